//! What batches hold, in which order, and where an iterator can be taken up again.
use candle_core::{DType, Device, Tensor};
use tallow_data::{Batch, Batches, Cursor, Error, ImageSet, Order, Permutation, Pixels, Tail};

/// `n` images of 2x3 pixels; image `i` is all `i`, labelled `i % 4`.
fn set(n: u8) -> ImageSet {
    let pixels: Vec<u8> = (0..n).flat_map(|i| [i; 6]).collect();
    let labels: Vec<u8> = (0..n).map(|i| i % 4).collect();
    ImageSet::from_pixels(pixels, labels, [2, 3]).unwrap()
}

/// Pixels that stay readable: byte / 255 - 0, divided by 1 / 255.
fn bytes_as_floats(dtype: DType) -> Pixels {
    Pixels { dtype, device: Device::Cpu, mean: vec![0.0], std: vec![1.0 / 255.0] }
}

fn open(n: u8, batch: usize, order: Order, tail: Tail) -> Batches {
    set(n).batches(batch, order, tail, bytes_as_floats(DType::F32)).unwrap()
}

/// Which images a batch holds, after checking that images and labels agree.
fn images_in(batch: &Batch) -> Vec<u32> {
    let pixels: Vec<Vec<f32>> = batch.inputs.flatten_from(1).unwrap().to_vec2().unwrap();
    let images: Vec<u32> = pixels.iter().map(|image| image[0].round() as u32).collect();
    assert!(pixels.iter().all(|image| image.iter().all(|pixel| pixel == &image[0])));
    let labels: Vec<u32> = batch.targets.to_vec1().unwrap();
    assert!(images.iter().map(|image| image % 4).eq(labels));
    images
}

fn all_images(batches: &mut Batches) -> Vec<Vec<u32>> {
    batches.map(|batch| images_in(&batch.unwrap())).collect()
}

#[test]
fn sequential_with_and_without_the_tail() {
    let mut kept = open(7, 3, Order::Sequential, Tail::Keep);
    assert_eq!((kept.n_batches(), kept.len()), (3, 3));
    assert_eq!(all_images(&mut kept), [vec![0, 1, 2], vec![3, 4, 5], vec![6]]);
    assert_eq!((kept.cursor().position, kept.len()), (7, 0));
    assert!(kept.next().is_none());
    let mut dropped = open(7, 3, Order::Sequential, Tail::Drop);
    assert_eq!((dropped.n_batches(), dropped.len()), (2, 2));
    assert_eq!(all_images(&mut dropped), [vec![0, 1, 2], vec![3, 4, 5]]);
    assert_eq!(dropped.cursor().position, 6);
    assert_eq!(all_images(&mut open(3, 5, Order::Sequential, Tail::Keep)), [[0, 1, 2]]);
}

#[test]
fn shapes_dtypes_and_first_index() {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let mut batches =
            set(7).batches(5, Order::Sequential, Tail::Keep, bytes_as_floats(dtype)).unwrap();
        assert_eq!(batches.batch_bytes(), 5 * (6 * dtype.size_in_bytes() as u64 + 4));
        let (first, last) = (batches.next().unwrap().unwrap(), batches.next().unwrap().unwrap());
        assert_eq!(
            (first.inputs.dims(), last.inputs.dims()),
            (&[5, 1, 2, 3][..], &[2, 1, 2, 3][..])
        );
        assert_eq!((first.inputs.dtype(), first.targets.dtype()), (dtype, DType::U32));
        assert_eq!((first.targets.dims(), first.first_index, last.first_index), (&[5][..], 0, 5));
    }
}

#[test]
fn digits_are_normalised() {
    let digits = ImageSet::digits().unwrap();
    let pixels = Pixels::digits(DType::F64, &Device::Cpu);
    let batch = digits
        .batches(10_000, Order::Sequential, Tail::Drop, pixels)
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    let moment = |tensor: Tensor| tensor.mean_all().unwrap().to_scalar::<f64>().unwrap();
    let (mean, square) = (moment(batch.inputs.clone()), moment(batch.inputs.sqr().unwrap()));
    // The constants have four digits: half a unit of the fourth, over the deviation of 0.3.
    assert!(
        mean.abs() < 0.5e-4 / 0.3 && (square - 1.0).abs() < 2.0 * 0.5e-4 / 0.3,
        "{mean} {square}"
    );
}

#[test]
fn a_shuffled_epoch_is_its_permutation() {
    let mut orders = Vec::new();
    for epoch in 0..4 {
        let mut batches = open(50, 8, Order::Shuffled { seed: 11, epoch }, Tail::Keep);
        let permutation = Permutation::new(50, 11, epoch);
        let images: Vec<u32> = all_images(&mut batches).concat();
        assert!(
            images.iter().map(|&image| u64::from(image)).eq((0..50).map(|i| permutation.index(i)))
        );
        assert!(!orders.contains(&images));
        orders.push(images);
    }
}

#[test]
fn a_view_shuffles_itself() {
    let (_, rest) = set(50).split(40).unwrap();
    let order = Order::Shuffled { seed: 1, epoch: 0 };
    let mut batches = rest.batches(4, order, Tail::Keep, bytes_as_floats(DType::F32)).unwrap();
    let mut images = all_images(&mut batches).concat();
    images.sort_unstable();
    assert!(images.into_iter().eq(40..50));
}

#[test]
fn any_cursor_is_taken_up_exactly() {
    let order = |epoch| Order::Shuffled { seed: 5, epoch };
    for tail in [Tail::Keep, Tail::Drop] {
        let mut straight = open(23, 4, order(2), tail);
        loop {
            let cursor = straight.cursor();
            let mut resumed = open(23, 4, order(0), tail); // opened at another epoch: the cursor decides
            resumed.seek(cursor).unwrap();
            assert_eq!((resumed.cursor(), resumed.len()), (cursor, straight.len()));
            assert_eq!(all_images(&mut resumed), all_images(&mut straight.clone()));
            if straight.next().is_none() {
                break;
            }
        }
    }
}

#[test]
fn a_cursor_outlives_a_change_of_batch() {
    let mut wide = open(20, 6, Order::Shuffled { seed: 9, epoch: 1 }, Tail::Keep);
    let seen = images_in(&wide.next().unwrap().unwrap());
    let mut narrow = open(20, 5, Order::Shuffled { seed: 9, epoch: 1 }, Tail::Keep);
    narrow.seek(wide.cursor()).unwrap();
    assert_eq!(narrow.len(), 3);
    let all = [seen, all_images(&mut narrow).concat()].concat();
    assert_eq!(
        all,
        all_images(&mut open(20, 20, Order::Shuffled { seed: 9, epoch: 1 }, Tail::Keep)).concat()
    );
}

#[test]
fn a_run_of_no_batches_is_refused() {
    let open = |n, batch, tail| {
        set(n).batches(batch, Order::Sequential, tail, bytes_as_floats(DType::F32))
    };
    assert!(matches!(open(7, 0, Tail::Keep), Err(Error::ZeroBatch)));
    assert!(matches!(open(0, 1, Tail::Keep), Err(Error::EmptySet)));
    let error = open(7, 8, Tail::Drop).unwrap_err();
    assert!(matches!(error, Error::NoWholeBatch { n_images: 7, batch_images: 8 }), "{error}");
    assert!(open(7, 7, Tail::Drop).is_ok());
    assert!(open(7, usize::MAX, Tail::Keep).unwrap().next().is_some());
}

#[test]
fn a_cursor_of_a_larger_set_is_refused() {
    let mut batches = open(7, 2, Order::Sequential, Tail::Keep);
    let error = batches.seek(Cursor { position: 8, ..Cursor::epoch(0) }).unwrap_err();
    assert!(matches!(error, Error::Cursor { position: 8, n_images: 7 }), "{error}");
    assert_eq!(batches.cursor(), Cursor::default());
    batches.seek(Cursor { position: 7, ..Cursor::epoch(0) }).unwrap();
    assert!(batches.next().is_none());
}

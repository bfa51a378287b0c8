//! Any source as the data set of a trainer.
use candle_core::{DType, Device, Tensor};
use tallow_data::{
    Ahead, Batch, Dataset, Error, ImageBatches, ImageSet, Images, Kind, LabelledImage, Layout,
    Loader, Loading, OnCorrupt, Order, Pixels, Result, Shard, Source, Synthetic, Tail,
    TokenBatches, Workers, pipeline::from_fn,
};

const THREADED: Loading = Loading {
    seed: 3,
    workers: Workers { n_threads: 3, max_samples: 20, max_bytes: 1 << 20 },
    ahead: Ahead::ONE,
    on_corrupt: OnCorrupt::Fail,
    shard: Shard::ALL,
};

fn grey() -> ImageSet {
    let pixels: Vec<u8> = (0..50 * 6).map(|i| (i * 7 % 256) as u8).collect();
    ImageSet::from_pixels(pixels, (0..50).map(|i| i % 4).collect::<Vec<u8>>(), [2, 3]).unwrap()
}

fn pixels() -> Pixels {
    Pixels::digits(DType::F32, &Device::Cpu)
}

fn loader(loading: Loading) -> Loader<ImageBatches> {
    let collate = ImageBatches::new([1, 2, 3], Layout::ChannelsFirst, pixels()).unwrap();
    Loader::new(grey(), |image, _| Ok(image), collate, loading)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
    values.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

fn shown(batch: Result<Batch>) -> (Vec<u32>, Vec<u32>, u64) {
    let batch = batch.unwrap();
    (bits(&batch.inputs), batch.targets.to_vec1().unwrap(), batch.first_index)
}

/// The same images in the same order as from memory, bit for bit, whatever the threads.
#[test]
fn a_loader_is_the_set_it_loads() {
    let images = Images { set: grey(), pixels: pixels() };
    for loading in [Loading::PLAIN, THREADED] {
        let loader = loader(loading);
        assert_eq!(
            (Dataset::n_samples(&loader), loader.batch_bytes(3)),
            (50, images.batch_bytes(3))
        );
        for order in [Order::Sequential, Order::Shuffled { seed: 5, epoch: 2 }] {
            for tail in [Tail::Keep, Tail::Drop] {
                let want: Vec<_> = images.epoch(8, order, tail).unwrap().map(shown).collect();
                let got: Vec<_> = loader.epoch(8, order, tail).unwrap().map(shown).collect();
                assert_eq!(got, want);
            }
        }
    }
}

/// Every data set goes on from any cursor of its own.
#[test]
fn data_sets_resume() {
    let kind = Kind::Tokens { n_tokens: 4, vocab: 50 };
    let made = Synthetic { kind, n_samples: 23, seed: 1, device: Device::Cpu };
    let images = Images { set: grey(), pixels: pixels() };
    let threaded = loader(THREADED);
    let sets: [&dyn Dataset; 3] = [&made, &images, &threaded];
    for set in sets {
        let order = |epoch| Order::Shuffled { seed: 8, epoch };
        let ids = |batch: Result<Batch>| {
            let batch = batch.unwrap();
            (bits(&batch.inputs), batch.first_index)
        };
        let whole: Vec<_> = set.epoch(6, order(4), Tail::Keep).unwrap().map(ids).collect();
        let mut run = set.epoch(6, order(4), Tail::Keep).unwrap();
        for done in 0..=whole.len() {
            // The order's own epoch does not count: the cursor's does.
            let rest = set.resume(6, order(0), Tail::Keep, run.cursor()).unwrap();
            assert_eq!(rest.map(ids).collect::<Vec<_>>(), whole[done..]);
            assert_eq!(run.next().is_some(), done < whole.len());
        }
        let mut cursor = run.cursor();
        cursor.position += 1;
        assert!(matches!(set.resume(6, order(0), Tail::Keep, cursor), Err(Error::Cursor { .. })));
        assert!(matches!(set.epoch(0, order(0), Tail::Keep), Err(Error::ZeroBatch)));
        assert!(matches!(set.epoch(99, order(0), Tail::Drop), Err(Error::NoWholeBatch { .. })));
    }
}

#[test]
fn augmentation_belongs_to_seed_epoch_and_image() {
    let flipped = |loading, epoch| -> Vec<Vec<u32>> {
        let collate = ImageBatches::new([1, 2, 3], Layout::ChannelsFirst, pixels()).unwrap();
        let flip = |mut image: LabelledImage, at: tallow_data::At| {
            if at.rng().coin(0.5) {
                image.pixels.chunks_exact_mut(3).for_each(<[u8]>::reverse);
            }
            Ok(image)
        };
        let loader = Loader::new(grey(), flip, collate, loading);
        let order = Order::Shuffled { seed: 1, epoch };
        loader.epoch(7, order, Tail::Keep).unwrap().map(|batch| shown(batch).0).collect()
    };
    let order = |epoch| Order::Shuffled { seed: 1, epoch };
    let plain: Vec<Vec<u32>> = loader(THREADED)
        .epoch(7, order(0), Tail::Keep)
        .unwrap()
        .map(|batch| shown(batch).0)
        .collect();
    let serial = Loading { seed: THREADED.seed, ..Loading::PLAIN };
    assert_eq!(flipped(THREADED, 0), flipped(serial, 0));
    assert_ne!(flipped(THREADED, 0), plain);
    assert_ne!(flipped(THREADED, 0), flipped(Loading { seed: 4, ..THREADED }, 0));
}

#[test]
fn tokens_are_shifted_by_one() {
    let source = from_fn(10, |index| Ok((0..5).map(|i| (10 * index + i) as u32).collect()));
    let collate = TokenBatches { seq_tokens: 4, device: Device::Cpu };
    let loader = Loader::new(source, |tokens, _| Ok(tokens), collate, THREADED);
    let batch = loader.epoch(2, Order::Sequential, Tail::Drop).unwrap().next().unwrap().unwrap();
    assert_eq!(batch.inputs.to_vec2::<u32>().unwrap(), [[0, 1, 2, 3], [10, 11, 12, 13]]);
    assert_eq!(batch.targets.to_vec2::<u32>().unwrap(), [[1, 2, 3, 4], [11, 12, 13, 14]]);
    assert_eq!(loader.batch_bytes(2), 2 * 2 * 4 * 4);
}

#[test]
fn a_sample_of_another_shape_is_named() {
    let source = from_fn(10, |index| {
        let n = if index == 4 { 5 } else { 6 };
        Ok(LabelledImage { pixels: vec![0; n], dims: [1, n / 3 + n % 3 / 2, 3], label: 0 })
    });
    let collate = ImageBatches::new([1, 2, 3], Layout::ChannelsFirst, pixels()).unwrap();
    let loader = Loader::new(source, |image, _| Ok(image), collate, THREADED);
    let epoch = loader.epoch(2, Order::Sequential, Tail::Keep).unwrap();
    let results: Vec<Result<Batch>> = epoch.collect();
    assert_eq!(results.len(), 3);
    let error = results[2].as_ref().unwrap_err().to_string();
    assert!(error.starts_with("sample 4: a sample of [1, 2, 3]"), "{error}");
    let collate = TokenBatches { seq_tokens: 4, device: Device::Cpu };
    let loader = Loader::new(
        from_fn(3, |_| Ok(vec![1; 4])),
        |tokens, _| Ok(tokens),
        collate,
        Loading::PLAIN,
    );
    let mut epoch = loader.epoch(2, Order::Sequential, Tail::Keep).unwrap();
    let error = epoch.next().unwrap().unwrap_err().to_string();
    assert_eq!(error, "sample 0: a sample of [4], the batch is of [5]");
    assert!(matches!(
        ImageBatches::new(
            [1, 2, 3],
            Layout::ChannelsFirst,
            Pixels::imagenet(DType::F32, &Device::Cpu)
        ),
        Err(Error::PerChannel { n_channels: 1, .. })
    ));
}

#[test]
fn ranks_load_their_share() {
    let mut labels = 0;
    for rank in 0..3 {
        let shard = Shard { rank, n_ranks: 3, tail: Tail::Drop };
        let loader = loader(Loading { shard, ..THREADED });
        assert_eq!(loader.n_samples(), 16);
        let order = Order::Shuffled { seed: 5, epoch: 0 };
        labels +=
            loader.epoch(5, order, Tail::Keep).unwrap().map(|b| shown(b).1.len()).sum::<usize>();
    }
    assert_eq!(labels, 48);
    assert_eq!(Source::n_samples(&grey()), 50);
}

#[test]
fn images_without_pixels_are_refused() {
    for dims in [[1, 0, 5], [1, 5, 0], [0, 5, 5]] {
        let error = ImageBatches::new(dims, Layout::ChannelsLast, pixels()).unwrap_err();
        assert!(matches!(error, Error::Size { .. }), "{error}");
    }
}

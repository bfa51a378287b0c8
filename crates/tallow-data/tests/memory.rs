//! What reading and batching hold, to the byte. No test harness: its threads would be counted too.
mod common;
use candle_core::{DType, Device};
use std::{alloc::System, path::Path};
use tallow_data::{Batches, Cursor, ImageSet, Order, Pixels, Tail, idx::parse_u8, set_bytes};
use tallow_memory::CountingAllocator;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

/// Tensor headers, shapes, and the paths and messages of errors.
const SMALL_BYTES: u64 = 4096;
/// What inflating a gzip stream needs: its window and tables.
const INFLATE_BYTES: u64 = 128 << 10;

fn main() {
    let loading = ALLOC.scope();
    let digits = ImageSet::digits().unwrap();
    let held_bytes = set_bytes(10_000, 28, 28);
    assert!(loading.current_bytes() - held_bytes < SMALL_BYTES, "{}", loading.current_bytes());
    assert!(loading.peak_bytes() < held_bytes + INFLATE_BYTES, "{}", loading.peak_bytes());

    a_split_holds_nothing(&digits);
    for dtype in [DType::F32, DType::BF16] {
        epochs_peak_alike(&digits, dtype);
    }
    a_header_is_not_believed();
    drop(digits);
    assert!(loading.current_bytes() < SMALL_BYTES);
    println!("memory is bounded");
}

fn a_split_holds_nothing(digits: &ImageSet) {
    let scope = ALLOC.scope();
    let _views = digits.split(9000).unwrap();
    assert_eq!(scope.peak_bytes(), 0);
}

fn epochs_peak_alike(digits: &ImageSet, dtype: DType) {
    let whole = ALLOC.scope();
    let order = Order::Shuffled { seed: 3, epoch: 0 };
    let pixels = Pixels::digits(dtype, &Device::Cpu);
    let mut batches = digits.batches(64, order, Tail::Keep, pixels).unwrap();
    let batch_bytes = batches.batch_bytes();
    let peaks_bytes: Vec<u64> = (0..3).map(|epoch| epoch_peak_bytes(&mut batches, epoch)).collect();
    assert_eq!(peaks_bytes[0], peaks_bytes[2]);
    // The price is the peak, but for headers: one batch, not two.
    let over_bytes = peaks_bytes[0].checked_sub(batch_bytes).expect("a batch holds its own bytes");
    assert!(over_bytes < SMALL_BYTES, "{over_bytes} more than the {batch_bytes} of a batch");
    drop((batches, peaks_bytes));
    assert_eq!(whole.current_bytes(), 0);
}

fn epoch_peak_bytes(batches: &mut Batches, epoch: u64) -> u64 {
    let scope = ALLOC.scope();
    batches.seek(Cursor::epoch(epoch)).unwrap();
    let mut n_images = 0;
    for batch in &mut *batches {
        n_images += batch.unwrap().inputs.dims()[0];
    }
    assert_eq!((n_images, scope.current_bytes()), (10_000, 0));
    scope.peak_bytes()
}

/// Petabytes announced, a hundred bytes there: the room grows with the content.
fn a_header_is_not_believed() {
    let content = common::idx(&[u32::MAX, 1000, 1000], &[7; 100]);
    for content in [common::gzip(&content), content] {
        let scope = ALLOC.scope();
        assert!(parse_u8(Path::new("hostile"), &content, 3).is_err());
        assert!(scope.peak_bytes() < (64 << 10) + INFLATE_BYTES, "{}", scope.peak_bytes());
    }
}

//! What pipelines hold while they stream, to the byte. No test harness: its threads would be counted too.
mod common;
use candle_core::{DType, Device, Tensor};
use std::{
    alloc::System,
    fs::File,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tallow_data::{
    Ahead, Batch, Cursor, Dataset, DiskCache, Error, Groups, ImageBatches, LabelledImage, Layout,
    Loader, Loading, OnCorrupt, Order, Pixels, Result, Sampler, Samples, Shard, Shuffle, Source,
    Tail, Workers,
    pipeline::{
        Mix, Pack, Packing, ahead_bytes, bucket_bytes, from_fn, from_iter, group_bytes, mix_bytes,
        packed_bytes, packing_bytes, shuffle_bytes, workers_bytes,
    },
};
use tallow_memory::CountingAllocator;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

const SAMPLE_BYTES: u64 = 64 << 10;
const BATCH: u64 = 16;
/// Tensor headers, boxes of closures, queues of pointers, threads' names.
const SMALL_BYTES: u64 = 32 << 10;

fn main() {
    let all = ALLOC.scope();
    a_source_of_any_size_takes_the_same();
    dat_1_nothing_is_copied_and_the_shuffle_is_bounded();
    groups_hold_their_window();
    a_mix_holds_its_period();
    a_loader_holds_its_price();
    a_cache_holds_a_sample();
    samples_of_all_sizes_stay_within_the_bytes();
    drop(all);
    println!("memory is bounded");
}

/// Generated, and read from a file with holes: the peak is the price, whether 32 or 320 MiB pass.
fn a_source_of_any_size_takes_the_same() {
    let workers = Workers { n_threads: 3, max_samples: 1000, max_bytes: 64 * SAMPLE_BYTES };
    let batch_bytes = BATCH * SAMPLE_BYTES;
    let price_bytes = workers_bytes(workers, SAMPLE_BYTES)
        + group_bytes(BATCH, SAMPLE_BYTES)
        + ahead_bytes(Ahead::ONE, batch_bytes);
    let path = common::folder("sparse").join("zeros");
    let mut peaks_bytes = Vec::new();
    for n_samples in [512, 5120] {
        let generated = from_fn(n_samples, |index| Ok(vec![index as u8; SAMPLE_BYTES as usize]));
        peaks_bytes.push(streamed(generated, workers));
        let file = File::create(&path).unwrap();
        file.set_len(n_samples * SAMPLE_BYTES).unwrap();
        peaks_bytes.push(streamed(holes(path.clone(), n_samples), workers));
    }
    for &peak_bytes in &peaks_bytes {
        assert!(peak_bytes <= price_bytes + SMALL_BYTES, "{peak_bytes} above {price_bytes}");
        assert!(peak_bytes >= price_bytes, "{peak_bytes}, the price {price_bytes} is too high");
    }
    println!("{} bytes priced, {peaks_bytes:?} held", price_bytes);
}

/// Samples read at their place.
fn holes(path: PathBuf, n_samples: u64) -> impl Source<Item = Vec<u8>> {
    let file = File::open(&path).unwrap();
    from_fn(n_samples, move |index| {
        let mut bytes = vec![0; SAMPLE_BYTES as usize];
        common::read_exact_at(&file, &mut bytes, index * SAMPLE_BYTES)
            .map_err(|error| Error::Io { path: path.clone(), error })?;
        Ok(bytes)
    })
}

/// Peak of an epoch through shuffle, map, batch and prefetch. At its second batch the consumer waits
/// until the third is stacked and all queues are full; the thread that makes the third waits for the
/// queues with the rows in its hands.
fn streamed(source: impl Source<Item = Vec<u8>> + 'static, workers: Workers) -> u64 {
    let scope = ALLOC.scope();
    let n_samples = source.n_samples();
    let n_made = Arc::new(AtomicU64::new(0));
    let (made, seen) = (n_made.clone(), n_made.clone());
    let full = 3 * BATCH + 64;
    let samples = Samples::of(source, Sampler::shuffled(1)).unwrap().map(move |mut bytes, at| {
        bytes[0] = at.rng().below(256) as u8;
        made.fetch_add(1, Ordering::Relaxed);
        Ok(bytes)
    });
    let batches = samples.workers(workers).batch(BATCH as usize, Tail::Drop).unwrap();
    let n_batches = Arc::new(AtomicU64::new(0));
    let n_stacked = n_batches.clone();
    let batches = batches.map(move |rows| {
        let batch = stacked(&rows)?;
        if n_batches.fetch_add(1, Ordering::Relaxed) == 2 {
            wait_for(&seen, full);
        }
        Ok(batch)
    });
    let batches = batches.prefetch(Ahead::ONE);
    for (number, batch) in batches.epoch(0).unwrap().enumerate() {
        let batch = batch.unwrap();
        assert_eq!(batch.inputs.dims()[0] as u64, BATCH);
        if number == 1 {
            wait_for(&n_stacked, 3);
            wait_for(&n_made, full);
        }
    }
    assert_eq!(n_made.load(Ordering::Relaxed), n_samples);
    drop(batches);
    assert!(scope.current_bytes() < 1024, "{} bytes left", scope.current_bytes());
    scope.peak_bytes()
}

fn wait_for(counter: &AtomicU64, full: u64) {
    while counter.load(Ordering::Relaxed) < full {
        std::thread::yield_now();
    }
}

fn stacked(rows: &[Vec<u8>]) -> Result<Batch> {
    let mut bytes = Vec::with_capacity(rows.iter().map(Vec::len).sum());
    rows.iter().for_each(|row| bytes.extend_from_slice(row));
    let inputs = Tensor::from_vec(bytes, (rows.len(), rows[0].len()), &Device::Cpu)?;
    let targets = Tensor::zeros(rows.len(), DType::U8, &Device::Cpu)?;
    Ok(Batch { inputs, targets, first_index: 0 })
}

/// 10 000 items of 1 KiB behind a counting reader; batch 32, shuffle 64; one batch of samples ahead
/// in the workers, one batch ahead on the device.
fn dat_1_nothing_is_copied_and_the_shuffle_is_bounded() {
    const ITEM_BYTES: u64 = 1 << 10;
    let bound_bytes = (64 + 32 * (2 + 2)) * ITEM_BYTES;
    let n_read = Arc::new(AtomicU64::new(0));
    let counted = n_read.clone();
    let stream = from_iter(move |_| {
        let n_read = counted.clone();
        (0..10_000u64).map(move |index| {
            n_read.fetch_add(1, Ordering::Relaxed);
            Ok(vec![index as u8; ITEM_BYTES as usize])
        })
    });
    let shuffle = Shuffle::Window { n_samples: 64 };
    let samples = Samples::stream(stream, Sampler { seed: 4, shuffle, shard: Shard::ALL }).unwrap();
    let batches = |workers, ahead| -> Groups<Batch> {
        let samples = samples.clone().workers(workers);
        samples.batch(32, Tail::Drop).unwrap().map(|rows| stacked(&rows)).prefetch(ahead)
    };
    let plain = batches(Workers::NONE, Ahead::NONE);
    plain.epoch(0).unwrap().next().unwrap().unwrap();
    assert!(n_read.load(Ordering::Relaxed) <= 64 + 32);
    let threads = Workers { n_threads: 2, max_samples: 32, max_bytes: 32 * ITEM_BYTES };
    let ahead = batches(threads, Ahead::ONE);
    for (batches, is_exact) in [(&plain, true), (&ahead, false)] {
        let peaks_bytes: Vec<u64> = (0..3)
            .map(|_| {
                let scope = ALLOC.scope();
                // The same epoch, so that the shuffle holds the same.
                assert!(batches.epoch(0).unwrap().all(|batch| batch.is_ok()));
                assert!(scope.current_bytes() < 64, "{} bytes left", scope.current_bytes());
                scope.peak_bytes()
            })
            .collect();
        assert!(
            peaks_bytes.iter().all(|&peak| peak <= bound_bytes + SMALL_BYTES),
            "{peaks_bytes:?}"
        );
        assert!(!is_exact || peaks_bytes[0] == peaks_bytes[2], "{peaks_bytes:?}");
    }
    let window_bytes = shuffle_bytes(64, ITEM_BYTES);
    let stream_only = samples.clone().each();
    let scope = ALLOC.scope();
    assert_eq!(stream_only.epoch(0).unwrap().count(), 10_000);
    assert!(scope.peak_bytes() < window_bytes + ITEM_BYTES + 4096, "{}", scope.peak_bytes());
}

fn groups_hold_their_window() {
    let peak = |groups: &dyn Fn() -> u64| {
        let scope = ALLOC.scope();
        assert!(groups() > 0);
        assert!(scope.current_bytes() < 64, "{} bytes left", scope.current_bytes());
        scope.peak_bytes()
    };
    let rows = from_fn(2000, |index| Ok(vec![index as u8; 500 + (index * 7 % 500) as usize]));
    let rows = Samples::of(rows, Sampler::shuffled(0)).unwrap();
    let bucketed = peak(&|| {
        let n_tokens = |row: &Vec<u8>| row.len() as u64;
        rows.clone().bucket(8, 16, Tail::Keep, n_tokens).unwrap().epoch(0).unwrap().count() as u64
    });
    assert!(bucketed <= bucket_bytes(128, 1000) + 4096, "{bucketed}");

    let documents = from_fn(3000, |index| Ok(vec![index as u32; 10 + (index * 7 % 190) as usize]));
    let documents = Samples::of(documents, Sampler::shuffled(0)).unwrap();
    for packing in [Packing::Split { tail: Tail::Keep }, Packing::Whole { window_tokens: 20_000 }] {
        let pack = Pack { seq_tokens: 256, pad_id: 0, packing };
        let packed =
            peak(&|| documents.clone().pack(pack).unwrap().epoch(0).unwrap().count() as u64);
        let price_bytes = packing_bytes(packing, 200, 105) + packed_bytes(1, 256);
        assert!(packed <= price_bytes + 4096, "{packed} above {price_bytes}");
    }
}

fn a_mix_holds_its_period() {
    let source = |n| -> Arc<dyn Source<Item = u64>> { Arc::new(from_fn(n, Ok)) };
    let sources = vec![source(1 << 40), source(1 << 50)];
    let scope = ALLOC.scope();
    let mix = Mix::until_all_ended(sources, &[10_000, 20_001]).unwrap();
    assert!(scope.current_bytes() < mix_bytes(30_001) + 256, "{}", scope.current_bytes());
    assert!(mix.n_samples() > 1 << 50);
}

fn a_loader_holds_its_price() {
    let dims = [3, 64, 64];
    let source = from_fn(600, move |index| {
        Ok(LabelledImage { pixels: vec![index as u8; 3 * 64 * 64], dims, label: index as u32 % 10 })
    });
    let collate =
        ImageBatches::new(dims, Layout::ChannelsFirst, Pixels::imagenet(DType::F32, &Device::Cpu))
            .unwrap();
    let loading = Loading {
        seed: 1,
        workers: Workers { n_threads: 2, max_samples: 64, max_bytes: 1 << 20 },
        ahead: Ahead::ONE,
        on_corrupt: OnCorrupt::Fail,
        shard: Shard::ALL,
    };
    let loader = Loader::new(source, |image, _| Ok(image), collate, loading);
    for loading in [loading, Loading { workers: Workers::NONE, ahead: Ahead::NONE, ..loading }] {
        let loader = loader.with(loading);
        let scope = ALLOC.scope();
        let order = Order::Shuffled { seed: 1, epoch: 0 };
        let n_batches = loader.epoch(8, order, Tail::Drop).unwrap().map(Result::unwrap).count();
        assert_eq!((n_batches, scope.current_bytes()), (75, 0));
        let price_bytes = loader.held_bytes(8);
        assert!(scope.peak_bytes() < price_bytes + SMALL_BYTES, "{}", scope.peak_bytes());
        // A batch of floats is what it is about.
        assert!(scope.peak_bytes() >= loader.batch_bytes(8), "{}", scope.peak_bytes());
    }
}

fn a_cache_holds_a_sample() {
    let n_bytes = 100_000;
    let source = from_fn(50, move |index| Ok(vec![index as u8; n_bytes]));
    let cache = DiskCache::open(source, common::folder("cache-bytes"), 1, u64::MAX).unwrap();
    for _ in 0..2 {
        let scope = ALLOC.scope();
        for index in 0..50 {
            assert_eq!(cache.get(index).unwrap()[0], index as u8);
        }
        assert!(scope.peak_bytes() < 2 * n_bytes as u64 + 4096, "{}", scope.peak_bytes());
    }
    assert_eq!((cache.state().n_misses, cache.state().n_hits), (50, 50));
}

/// Sizes from 1 to 256 KiB: workers may add the growth, no more.
fn samples_of_all_sizes_stay_within_the_bytes() {
    let source = from_fn(3000, |index| Ok(vec![0u8; 1024 << (index * 11 % 9)]));
    let workers = Workers { n_threads: 3, max_samples: 1000, max_bytes: 4 << 20 };
    let samples = Samples::of(source, Sampler::shuffled(5)).unwrap().workers(workers);
    let each = samples.each();
    let scope = ALLOC.scope();
    let run = each.resume(Cursor::epoch(0)).unwrap();
    assert_eq!(run.map(Result::unwrap).count(), 3000);
    let bound_bytes = workers_bytes(workers, 256 << 10) + 3 * (255 << 10) + (256 << 10);
    assert!(scope.peak_bytes() < bound_bytes + 256 * 1024, "{}", scope.peak_bytes());
}

//! A cache that is right, or absent: never a reason to fail, never a wrong sample.
mod common;
use std::{
    fs::{self, OpenOptions},
    io::{Seek, SeekFrom, Write},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tallow_data::{
    DiskCache, Error, LabelledImage, Result, Sampler, Samples, Source, Stored, Tail, Workers,
    cache_bytes, pipeline::from_fn,
};

fn sample(index: u64) -> Vec<u32> {
    (0..index % 7 * 10).map(|i| (index * 100 + i) as u32).collect()
}

/// A source that counts how often it is asked.
fn counted(n: u64) -> (impl Source<Item = Vec<u32>> + 'static, Arc<AtomicU64>) {
    let n_made = Arc::new(AtomicU64::new(0));
    let made = n_made.clone();
    let source = from_fn(n, move |index| {
        made.fetch_add(1, Ordering::Relaxed);
        Ok(sample(index))
    });
    (source, n_made)
}

fn all_right(cache: &impl Source<Item = Vec<u32>>) {
    assert!((0..cache.n_samples()).all(|index| cache.get(index).unwrap() == sample(index)));
}

fn disk_bytes(folder: &Path) -> u64 {
    fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn samples_are_made_once() {
    let folder = common::folder("cache-once");
    let (source, n_made) = counted(40);
    let cache = DiskCache::open(source, &folder, 3, u64::MAX).unwrap();
    all_right(&cache);
    all_right(&cache);
    assert_eq!(n_made.load(Ordering::Relaxed), 40);
    let state = cache.state();
    assert_eq!((state.n_hits, state.n_misses, state.closed), (40, 40, None));
    assert_eq!(disk_bytes(&folder), cache_bytes(40, state.held_bytes));
    drop(cache);
    let (source, n_made) = counted(40);
    all_right(&DiskCache::open(source, &folder, 3, u64::MAX).unwrap());
    assert_eq!(n_made.load(Ordering::Relaxed), 0);
}

#[test]
fn workers_share_a_cache() {
    let (source, n_made) = counted(500);
    let cache = DiskCache::open(source, common::folder("cache-shared"), 3, u64::MAX).unwrap();
    let samples = Samples::of(cache, Sampler::shuffled(1)).unwrap();
    let samples = samples.map(|tokens, at| Ok((at.index, tokens)));
    let workers = Workers { n_threads: 4, max_samples: 50, max_bytes: 1 << 20 };
    let batches = samples.workers(workers).batch(7, Tail::Keep).unwrap();
    for epoch in 0..3 {
        for batch in batches.epoch(epoch).unwrap() {
            for (index, tokens) in batch.unwrap() {
                assert_eq!(tokens, sample(index));
            }
        }
    }
    assert_eq!(n_made.load(Ordering::Relaxed), 500);
}

/// Any byte of either file is another one, or the file ends early: the sample is made again.
#[test]
fn damage_is_a_miss() {
    let folder = common::folder("cache-damage");
    for file in ["samples", "slots"] {
        let path = folder.join(file);
        for step in 0..60 {
            let _ = fs::remove_dir_all(&folder);
            let (source, _) = counted(20);
            all_right(&DiskCache::open(source, &folder, 3, u64::MAX).unwrap());
            let n_bytes = fs::metadata(&path).unwrap().len();
            let header_bytes = if file == "slots" { 24 } else { 0 };
            let at = header_bytes + step * 977 % (n_bytes - header_bytes);
            let mut opened = OpenOptions::new().write(true).open(&path).unwrap();
            if step % 3 == 0 {
                opened.set_len(at).unwrap();
            } else {
                opened.seek(SeekFrom::Start(at)).unwrap();
                opened.write_all(&[0xa5 ^ step as u8]).unwrap();
            }
            drop(opened);
            let (source, _) = counted(20);
            let cache = DiskCache::open(source, &folder, 3, u64::MAX).unwrap();
            all_right(&cache);
            all_right(&cache);
        }
    }
}

#[test]
fn above_the_limit_samples_pass_through() {
    let (source, n_made) = counted(40);
    let cache = DiskCache::open(source, common::folder("cache-limit"), 3, 1000).unwrap();
    all_right(&cache);
    all_right(&cache);
    let state = cache.state();
    assert!(state.held_bytes <= 1000 && state.n_hits > 0 && state.closed.is_some(), "{state:?}");
    assert_eq!(n_made.load(Ordering::Relaxed), state.n_misses);
}

/// The system has a file that is always full.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_stops_the_cache_and_not_the_run() {
    let folder = common::folder("cache-full");
    std::os::unix::fs::symlink("/dev/full", folder.join("samples")).unwrap();
    let (source, n_made) = counted(40);
    let cache = DiskCache::open(source, &folder, 3, u64::MAX).unwrap();
    all_right(&cache);
    all_right(&cache);
    let state = cache.state();
    assert!(state.closed.unwrap().contains("No space left"));
    // Those of no tokens need no space.
    assert_eq!((n_made.load(Ordering::Relaxed), state.n_hits), (79, 1));
}

#[test]
fn another_content_or_run_is_refused() {
    let folder = common::folder("cache-refused");
    let open = |n, key| DiskCache::open(counted(n).0, &folder, key, u64::MAX).map(drop);
    open(5, 1).unwrap();
    for (n, key) in [(5, 2), (6, 1)] {
        let error = open(n, key).unwrap_err();
        assert!(matches!(error, Error::Cache { .. }));
        assert!(error.to_string().contains("holds 5 samples of key 0x1"), "{error}");
    }
    let held = DiskCache::open(counted(5).0, &folder, 1, u64::MAX).unwrap();
    let error = open(5, 1).unwrap_err();
    assert!(error.to_string().contains("in use by another run"), "{error}");
    drop(held);
    open(5, 1).unwrap();
    fs::write(folder.join("slots"), [7; 100]).unwrap();
    assert!(open(5, 1).unwrap_err().to_string().contains("no cache of samples"));
    assert!(DiskCache::open(counted(5).0, folder.join("slots"), 1, 0).is_err());
}

#[test]
fn errors_of_the_source_go_through() {
    let source = from_fn(3, |_| -> Result<Vec<u8>> { Err(Error::EmptySet) });
    let cache = DiskCache::open(source, common::folder("cache-error"), 1, u64::MAX).unwrap();
    assert!(matches!(cache.get(1), Err(Error::EmptySet)));
    assert_eq!(cache.name(1), "sample 1");
}

#[test]
fn what_is_stored_comes_back() {
    fn there_and_back<T: Stored + PartialEq + std::fmt::Debug>(sample: T) {
        let mut bytes = Vec::new();
        sample.store(&mut bytes);
        assert_eq!(T::load(&bytes), Some(sample));
    }
    there_and_back(vec![1u8, 2, 3]);
    there_and_back(vec![1.5f32, f32::MIN, -0.0]);
    there_and_back(vec![u64::MAX, 0]);
    there_and_back("words".to_owned());
    there_and_back(LabelledImage { pixels: vec![1, 2, 3, 4, 5, 6], dims: [1, 2, 3], label: 9 });
    assert_eq!(Vec::<u32>::load(&[1, 2, 3]), None);
    assert_eq!(String::load(&[0xff]), None);
    assert_eq!(LabelledImage::load(&[0; 27]), None);
}

//! What pipelines hand out, in which order, and how they fail. Cases named by their id.
use std::{
    collections::HashMap,
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
use tallow_data::{
    Ahead, Cursor, Error, OnCorrupt, Result, Sampler, Samples, Shard, Shuffle, Source, Tail,
    Workers,
    formats::Concat,
    pipeline::{IGNORED, Pack, PackedBatch, Packing, from_fn, from_iter},
};
mod common;

const THREADS: [usize; 5] = [0, 1, 2, 3, 7];

fn workers(n_threads: usize) -> Workers {
    Workers { n_threads, max_samples: 16, max_bytes: 1 << 20 }
}

/// `work` in a thread; a hang is a failure.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    let thread = thread::spawn(move || done.send(work()));
    let Ok(result) = wait.recv_timeout(Duration::from_secs(5)) else {
        match thread.is_finished() {
            true => panic!("{:?}", thread.join().map(|_| ()).unwrap_err().downcast_ref::<String>()),
            false => panic!("still waiting after 5 s"),
        }
    };
    result
}

fn corrupt(name: &str) -> Error {
    Error::Corrupt { path: PathBuf::from(name), offset: Some(7), reason: "cut short".to_owned() }
}

#[test]
fn dat_4_values_belong_to_seed_epoch_and_id() {
    let epoch = |seed, epoch, n_ranks, n_threads| -> HashMap<u64, u64> {
        let mut values = HashMap::new();
        for rank in 0..n_ranks {
            let shard = Shard { rank, n_ranks, tail: Tail::Keep };
            let sampler = Sampler { seed, shuffle: Shuffle::Global, shard };
            let shards = (0..5).map(|shard| (21 * shard..101.min(21 * shard + 21)).collect());
            let shards: Concat<Vec<u64>> = Concat::new(shards.collect());
            let samples = Samples::of(shards, sampler).unwrap();
            let drawn = samples.map(|id, at| Ok((id, at.rng().next_u64())));
            let batches = drawn.workers(workers(n_threads)).batch(5, Tail::Keep).unwrap();
            for batch in batches.epoch(epoch).unwrap() {
                for (id, value) in batch.unwrap() {
                    assert_eq!(values.insert(id, value), None, "{id} came twice");
                }
            }
        }
        values
    };
    let first = epoch(7, 0, 1, 0);
    assert!((0..101).all(|id| first.contains_key(&id)) && first.len() == 101);
    let distinct: std::collections::HashSet<u64> = first.values().copied().collect();
    assert_eq!(distinct.len(), 101);
    for n_threads in THREADS {
        for n_ranks in [1, 2, 3] {
            assert_eq!(epoch(7, 0, n_ranks, n_threads), first);
        }
    }
    for other in [epoch(7, 1, 1, 2), epoch(8, 0, 1, 2)] {
        assert!((0..101).all(|id| other[&id] != first[&id]));
    }
}

#[test]
fn each_closure_has_numbers_of_its_own() {
    let samples = Samples::of(from_fn(50, Ok), Sampler::sequential(1)).unwrap();
    let twice = samples.map(|_, at| Ok(at.rng().next_u64()));
    let twice = twice.map(|first, at| Ok((first, at.rng().next_u64())));
    assert!(twice.each().epoch(0).unwrap().all(|pair| pair.is_ok_and(|(a, b)| a != b)));
}

/// Item 50 fails by a value or a panic.
fn failing(n_threads: usize, ahead: Ahead, fail: fn() -> Result<u64>) {
    in_time(move || {
        let source = from_fn(200, move |index| if index == 50 { fail() } else { Ok(index) });
        let samples = Samples::of(source, Sampler::sequential(0)).unwrap();
        let batches = samples.workers(workers(n_threads)).batch(8, Tail::Keep).unwrap();
        let mut run = batches.prefetch(ahead).epoch(0).unwrap();
        for first in (0..48).step_by(8) {
            let batch = run.next().unwrap().unwrap();
            assert!(batch.into_iter().eq(first..first + 8));
        }
        let error = run.next().unwrap().unwrap_err().to_string();
        assert!(error.contains("sample 50") && error.contains("cable cut"), "{error}");
        assert_eq!(run.cursor().position, 48);
        assert!((0..10).all(|_| run.next().is_none()));
    });
}

#[test]
fn dat_5_a_failing_reader_is_heard() {
    for n_threads in THREADS {
        for ahead in [Ahead::NONE, Ahead::ONE, Ahead { n_groups: 9, max_bytes: 500 }] {
            failing(n_threads, ahead, || {
                Err(candle_core::Error::Msg("cable cut".to_owned()).into())
            });
            failing(n_threads, ahead, || panic!("cable cut"));
        }
    }
}

#[test]
fn dat_5_a_failing_stream_is_heard() {
    for n_threads in THREADS {
        in_time(move || {
            let stream = from_iter(|_| {
                (0..).map(|i: u64| if i == 20 { panic!("cable cut") } else { Ok(i) })
            });
            let samples = Samples::stream(stream, Sampler::sequential(0)).unwrap();
            let samples = samples.workers(workers(n_threads));
            let batches = samples.batch(6, Tail::Keep).unwrap().prefetch(Ahead::ONE);
            let mut run = batches.epoch(0).unwrap();
            assert_eq!(run.by_ref().take(3).filter(Result::is_ok).count(), 3);
            let error = run.next().unwrap().unwrap_err();
            assert!(matches!(error, Error::Panicked { .. }), "{error}");
            assert!(error.to_string().contains("cable cut") && run.next().is_none());
        });
    }
}

/// A panic that cannot be caught: what it carries panics again where it is thrown away.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the cause panics as well");
    }
}

#[test]
fn dat_5_a_dead_worker_is_heard() {
    for n_threads in [1, 2, 7] {
        for ahead in [Ahead::NONE, Ahead::ONE] {
            in_time(move || {
                let source = from_fn(100, |index| match index {
                    20 => std::panic::panic_any(Bomb),
                    index => Ok(index),
                });
                let samples = Samples::of(source, Sampler::sequential(0)).unwrap();
                let batches = samples.workers(workers(n_threads)).batch(4, Tail::Keep).unwrap();
                let mut run = batches.prefetch(ahead).epoch(0).unwrap();
                let mut n_before = 0;
                let error = loop {
                    match run.next().expect("an end that is not told") {
                        Ok(_) => n_before += 1,
                        Err(error) => break error,
                    }
                };
                assert!(matches!(error, Error::DeadWorker), "{error}");
                // Others may have been busy with samples before it.
                assert!(n_before <= 5 && run.cursor().position == 4 * n_before);
                assert!(run.next().is_none());
            });
        }
    }
}

#[test]
fn dat_5_dropping_a_full_queue_joins_all_threads() {
    for n_threads in [1, 3, 7] {
        let alive = Arc::new(());
        let held = alive.clone();
        let n_made = Arc::new(AtomicU64::new(0));
        let made = n_made.clone();
        let dropped_secs = in_time(move || {
            let source = from_fn(1 << 40, move |index| {
                let _ = &held;
                made.fetch_add(1, Ordering::Relaxed);
                Ok(index)
            });
            let samples = Samples::of(source, Sampler::shuffled(0)).unwrap();
            let batches = samples.workers(workers(n_threads)).batch(4, Tail::Drop).unwrap();
            let batches = batches.prefetch(Ahead { n_groups: 3, max_bytes: 1 << 20 });
            let mut run = batches.epoch(0).unwrap();
            drop(batches);
            run.next().unwrap().unwrap();
            // One batch is out, three are ahead, 16 samples lie in the workers: then all wait.
            while n_made.load(Ordering::Relaxed) < 4 + 12 + 16 {
                thread::yield_now();
            }
            let start = Instant::now();
            drop(run);
            (start.elapsed().as_secs_f64(), n_made.load(Ordering::Relaxed))
        });
        assert_eq!(Arc::strong_count(&alive), 1, "a thread still holds the source");
        assert!(dropped_secs.0 < 1.0 && dropped_secs.1 == 32, "{dropped_secs:?}");
    }
}

#[test]
fn a_run_can_be_dropped_at_any_moment() {
    for stop in 0..40 {
        for n_threads in [0, 1, 4] {
            in_time(move || {
                let source = from_fn(60, |index| {
                    thread::sleep(Duration::from_micros(20));
                    Ok(index)
                });
                let samples = Samples::of(source, Sampler::shuffled(3)).unwrap();
                let batches = samples.workers(workers(n_threads)).batch(2, Tail::Keep).unwrap();
                let mut run = batches.prefetch(Ahead::ONE).epoch(0).unwrap();
                for _ in 0..stop {
                    run.next();
                }
            });
        }
    }
}

#[test]
fn spare_9_without_shuffle_epochs_are_alike() {
    let epoch = |shuffle, epoch| -> Vec<u64> {
        let sampler = Sampler { seed: 9, shuffle, shard: Shard::ALL };
        let samples = Samples::of(from_fn(300, Ok), sampler).unwrap();
        samples.workers(workers(3)).each().epoch(epoch).unwrap().map(Result::unwrap).collect()
    };
    assert!(epoch(Shuffle::Off, 0).into_iter().eq(0..300));
    assert_eq!(epoch(Shuffle::Off, 0), epoch(Shuffle::Off, 1));
    for shuffle in [Shuffle::Global, Shuffle::Window { n_samples: 50 }] {
        assert_ne!(epoch(shuffle, 0), epoch(shuffle, 1));
        assert_eq!(epoch(shuffle, 1), epoch(shuffle, 1));
    }
}

#[test]
fn shd_5_ranks_make_equally_many_steps() {
    for (tail, n_steps) in [(Tail::Drop, 4), (Tail::Keep, 5)] {
        let mut seen = Vec::new();
        for rank in 0..7 {
            let shard = Shard { rank, n_ranks: 7, tail: Tail::Drop };
            let sampler = Sampler { seed: 1, shuffle: Shuffle::Global, shard };
            let samples = Samples::of(from_fn(100, Ok), sampler).unwrap();
            let batches: Vec<Vec<u64>> =
                samples.batch(3, tail).unwrap().epoch(0).unwrap().map(Result::unwrap).collect();
            assert_eq!(batches.len(), n_steps, "rank {rank}");
            seen.extend(batches.concat());
        }
        let n_seen = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), n_seen, "an id came twice");
        // 100 - 7 * 14 do not fill a round of ranks; 7 * 2 more do not fill batches.
        assert_eq!(100 - n_seen, if tail == Tail::Drop { 2 + 14 } else { 2 });
    }
}

#[test]
fn shd_5_evaluation_counts_each_sample_once() {
    let (mut sum, mut count) = (0.0, 0);
    for rank in 0..3 {
        let shard = Shard { rank, n_ranks: 3, tail: Tail::Keep };
        let sampler = Sampler { seed: 0, shuffle: Shuffle::Off, shard };
        let losses = Samples::of(from_fn(10, |index| Ok(index as f64)), sampler).unwrap();
        for batch in losses.batch(2, Tail::Keep).unwrap().epoch(0).unwrap() {
            let batch = batch.unwrap();
            sum += batch.iter().sum::<f64>();
            count += batch.len();
        }
    }
    assert_eq!((sum / count as f64, count), (4.5, 10));
}

/// Eight files, two of them bad, as in the case.
fn files() -> impl Source<Item = u64> {
    from_fn(8, |index| match index {
        2 => Err(corrupt("cut.jpg")),
        5 => Err(corrupt("empty.jpg")),
        index => Ok(index),
    })
}

#[test]
fn dat_2_corrupt_samples_fail_with_their_place() {
    for n_threads in THREADS {
        let samples = Samples::of(files(), Sampler::sequential(0)).unwrap();
        let batches = samples.workers(workers(n_threads)).batch(2, Tail::Keep).unwrap();
        let mut run = batches.epoch(0).unwrap();
        assert_eq!(run.next().unwrap().unwrap(), [0, 1]);
        let error = run.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }));
        assert_eq!(error.to_string(), "`cut.jpg` at byte 7: cut short");
        assert!(run.next().is_none());
    }
}

#[test]
fn dat_2_skipped_samples_are_counted_and_batches_refilled() {
    for n_threads in THREADS {
        let samples = Samples::of(files(), Sampler::sequential(0)).unwrap();
        let samples = samples.workers(workers(n_threads)).on_corrupt(OnCorrupt::Skip { limit: 2 });
        let batches = samples.batch(3, Tail::Keep).unwrap().prefetch(Ahead::ONE);
        let mut run = batches.epoch(0).unwrap();
        assert_eq!(run.next().unwrap().unwrap(), [0, 1, 3]);
        // Whatever was read ahead: the second is not yet counted.
        assert_eq!((run.cursor().skipped, run.skipped().len()), (1, 1));
        let cursor = run.cursor();
        assert_eq!(run.next().unwrap().unwrap(), [4, 6, 7]);
        assert!(run.next().is_none());
        let names: Vec<String> = run.skipped().into_iter().map(|skip| skip.reason).collect();
        let want = ["`cut.jpg` at byte 7: cut short", "`empty.jpg` at byte 7: cut short"];
        assert_eq!((run.cursor().skipped, names), (2, want.map(str::to_owned).to_vec()));

        let mut resumed = batches.resume(cursor).unwrap();
        assert_eq!(resumed.next().unwrap().unwrap(), [4, 6, 7]);
        assert_eq!((resumed.cursor(), resumed.skipped().len()), (run.cursor(), 1));
    }
}

/// Nothing comes after them that the cursor could be behind.
#[test]
fn corrupt_samples_at_the_end_are_counted_too() {
    for n_threads in THREADS {
        let make =
            |index| if index < 5 { Ok(index) } else { Err(corrupt(&format!("{index}.jpg"))) };
        let samples = Samples::of(from_fn(305, make), Sampler::sequential(0)).unwrap();
        let skip = OnCorrupt::Skip { limit: 400 };
        let batches = samples.workers(workers(n_threads)).on_corrupt(skip).batch(5, Tail::Keep);
        let mut run = batches.unwrap().prefetch(Ahead::ONE).epoch(0).unwrap();
        assert_eq!((run.next().unwrap().unwrap(), run.n_skipped()), (vec![0, 1, 2, 3, 4], 0));
        assert!(run.next().is_none());
        assert_eq!((run.n_skipped(), run.skipped().len()), (300, 256));
        assert!(run.skipped()[0].reason.contains("`5.jpg`"), "{:?}", run.skipped()[0]);
    }
}

#[test]
fn dat_2_more_than_the_limit_is_an_error() {
    for n_threads in THREADS {
        let samples = Samples::of(files(), Sampler::sequential(0)).unwrap();
        let samples = samples.workers(workers(n_threads)).on_corrupt(OnCorrupt::Skip { limit: 1 });
        let batches = samples.batch(2, Tail::Keep).unwrap();
        let mut run = batches.epoch(0).unwrap();
        assert_eq!(run.next().unwrap().unwrap(), [0, 1]);
        assert_eq!(run.next().unwrap().unwrap(), [3, 4]);
        let cursor = run.cursor();
        for mut run in [run, batches.resume(cursor).unwrap()] {
            let error = run.next().unwrap().unwrap_err();
            assert!(matches!(error, Error::Skipped { limit: 1, .. }));
            assert!(error.to_string().contains("empty.jpg"), "{error}");
        }
    }
}

#[test]
fn a_bug_is_not_skipped() {
    let source = from_fn(8, |index| if index == 3 { panic!("a bug") } else { Ok(index) });
    let samples = Samples::of(source, Sampler::sequential(0)).unwrap();
    let samples = samples.on_corrupt(OnCorrupt::Skip { limit: 99 });
    let error = samples.each().epoch(0).unwrap().find_map(Result::err).unwrap();
    assert_eq!(error.to_string(), "sample 3: panicked: a bug");
}

#[test]
fn all_samples_corrupt_is_an_empty_epoch_or_an_error() {
    for n_threads in THREADS {
        for (limit, n_errors) in [(u64::MAX, 0), (9, 1)] {
            let n_got = in_time(move || {
                let source = from_fn(500, |_| Err::<u64, _>(corrupt("x")));
                let samples = Samples::of(source, Sampler::shuffled(0)).unwrap();
                let samples =
                    samples.workers(workers(n_threads)).on_corrupt(OnCorrupt::Skip { limit });
                samples.batch(4, Tail::Keep).unwrap().epoch(0).unwrap().count()
            });
            assert_eq!(n_got, n_errors);
        }
    }
}

#[test]
fn a_file_that_vanishes_is_named() {
    let folder = common::folder("vanishing");
    let path = |index| folder.join(format!("{index}.txt"));
    (0..9).for_each(|index| fs::write(path(index), index.to_string()).unwrap());
    let files = folder.clone();
    let source = from_fn(9, move |index| {
        let path = files.join(format!("{index}.txt"));
        fs::read_to_string(&path).map_err(|error| Error::Io { path, error })
    });
    let samples = Samples::of(source, Sampler::sequential(0)).unwrap();
    let mut run = samples.clone().batch(2, Tail::Keep).unwrap().epoch(0).unwrap();
    assert_eq!(run.next().unwrap().unwrap(), ["0", "1"]);
    fs::remove_file(path(3)).unwrap();
    let error = run.next().unwrap().unwrap_err().to_string();
    assert!(error.contains("3.txt"), "{error}");
    let skipping = samples.on_corrupt(OnCorrupt::Skip { limit: 1 }).batch(4, Tail::Keep).unwrap();
    let mut rest = skipping.resume(run.cursor()).unwrap();
    assert_eq!(rest.next().unwrap().unwrap(), ["2", "4", "5", "6"]);
}

#[test]
fn buckets_hold_like_lengths_and_every_sample() {
    let source = from_fn(103, |index| Ok(vec![0u8; (index * 37 % 50) as usize]));
    let samples = Samples::of(source, Sampler::shuffled(2)).unwrap().workers(workers(2));
    let n_tokens = |sample: &Vec<u8>| sample.len() as u64;
    let run = samples.clone().bucket(8, 4, Tail::Keep, n_tokens).unwrap().epoch(0).unwrap();
    let batches: Vec<Vec<Vec<u8>>> = run.map(Result::unwrap).collect();
    let spread = |batches: &[Vec<Vec<u8>>]| -> usize {
        let range = |batch: &Vec<Vec<u8>>| {
            let lens = batch.iter().map(Vec::len);
            lens.clone().max().unwrap() - lens.min().unwrap()
        };
        batches.iter().map(range).sum()
    };
    assert_eq!(batches.iter().filter(|batch| batch.len() == 8).count(), 12);
    let mut lens: Vec<usize> = batches.iter().flatten().map(Vec::len).collect();
    lens.sort_unstable();
    let mut want: Vec<usize> = (0..103).map(|index| index * 37 % 50).collect();
    want.sort_unstable();
    assert_eq!(lens, want);
    let plain: Vec<Vec<Vec<u8>>> = samples
        .clone()
        .batch(8, Tail::Keep)
        .unwrap()
        .epoch(0)
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert!(3 * spread(&batches) < spread(&plain), "{} {}", spread(&batches), spread(&plain));

    let run = samples.clone().bucket_by_tokens(100, 40, n_tokens).unwrap().epoch(0).unwrap();
    let batches: Vec<Vec<Vec<u8>>> = run.map(Result::unwrap).collect();
    let padded =
        |batch: &Vec<Vec<u8>>| batch.len() * batch.iter().map(|s| s.len().max(1)).max().unwrap();
    assert!(batches.iter().all(|batch| padded(batch) <= 100));
    assert_eq!(batches.iter().map(Vec::len).sum::<usize>(), 103);

    let dropped = samples.clone().bucket(8, 4, Tail::Drop, n_tokens).unwrap().epoch(0).unwrap();
    assert_eq!(dropped.map(|batch| batch.unwrap().len()).collect::<Vec<_>>(), [8; 12]);

    let error = samples.batch_by_tokens(10, n_tokens).epoch(0).unwrap().find_map(Result::err);
    assert!(matches!(error, Some(Error::TooLong { max_tokens: 10, .. })));
}

fn packed(
    lens: &'static [usize],
    seq_tokens: usize,
    packing: Packing,
) -> Vec<tallow_data::pipeline::Packed> {
    let source = from_fn(lens.len() as u64, move |index| {
        Ok((0..lens[index as usize]).map(|i| 100 * (index as u32 + 1) + i as u32).collect())
    });
    let samples = Samples::of(source, Sampler::sequential(0)).unwrap();
    let pack = Pack { seq_tokens, pad_id: 7, packing };
    samples.pack(pack).unwrap().epoch(0).unwrap().map(Result::unwrap).collect()
}

#[test]
fn split_documents_do_not_leak() {
    let sequences = packed(&[3, 0, 4], 5, Packing::Split { tail: Tail::Keep });
    let [first, last] = &sequences[..] else { panic!("{sequences:?}") };
    assert_eq!(first.ids, [100, 101, 102, 300, 301]);
    // The cut document's next token is the target; the whole one ends.
    assert_eq!(first.targets, [101, 102, IGNORED, 301, 302]);
    assert_eq!(
        (&first.positions[..], &first.segments[..]),
        (&[0, 1, 2, 0, 1][..], &[1, 1, 1, 2, 2][..])
    );
    assert_eq!(last.ids, [302, 303, 7, 7, 7]);
    assert_eq!(last.targets, [303, IGNORED, IGNORED, IGNORED, IGNORED]);
    assert_eq!(
        (&last.positions[..], &last.segments[..]),
        (&[0, 1, 0, 0, 0][..], &[1, 1, 0, 0, 0][..])
    );
    assert_eq!(packed(&[3, 0, 4], 5, Packing::Split { tail: Tail::Drop }), sequences[..1]);
    let batch = PackedBatch::new(&sequences, &candle_core::Device::Cpu).unwrap();
    assert_eq!(batch.ids.dims(), [2, 5]);
    assert_eq!(batch.targets.to_vec2::<i64>().unwrap()[1], last.targets);
}

#[test]
fn whole_documents_stay_whole() {
    let lens = &[6, 2, 9, 5, 4, 1, 3, 23];
    let sequences = packed(lens, 10, Packing::Whole { window_tokens: 1000 });
    // 53 tokens in 6 sequences of 10, as few as possible.
    assert_eq!(sequences.len(), 6);
    let mut tokens: Vec<u32> = Vec::new();
    for sequence in &sequences {
        for segment in 1..=*sequence.segments.iter().max().unwrap() {
            let own: Vec<usize> = (0..10).filter(|&i| sequence.segments[i] == segment).collect();
            let ids: Vec<u32> = own.iter().map(|&i| sequence.ids[i]).collect();
            assert!(ids.windows(2).all(|pair| pair[1] == pair[0] + 1));
            let document = ids[0] / 100 - 1;
            let whole = lens[document as usize].min(10);
            assert!(ids.len() == whole || lens[document as usize] > 10, "{ids:?}");
            tokens.extend(ids);
        }
        for (&id, &target) in sequence.ids.iter().zip(&sequence.targets) {
            assert!(target == IGNORED || target == i64::from(id) + 1);
        }
    }
    tokens.sort_unstable();
    let want = (0..8).flat_map(|d| (0..lens[d as usize] as u32).map(move |i| 100 * (d + 1) + i));
    assert!(tokens.into_iter().eq(want));
}

#[test]
fn a_stream_of_unknown_length_is_sharded_evenly() {
    let own = |rank| -> Vec<u64> {
        let shard = Shard { rank, n_ranks: 3, tail: Tail::Drop };
        let sampler = Sampler { seed: 0, shuffle: Shuffle::Off, shard };
        let stream = from_iter(|epoch| (0..11u64).map(move |i| Ok(100 * epoch + i)));
        let samples = Samples::stream(stream, sampler).unwrap().workers(workers(2));
        samples.each().epoch(1).unwrap().map(Result::unwrap).collect()
    };
    assert_eq!([own(0), own(1), own(2)], [[100, 103, 106], [101, 104, 107], [102, 105, 108]]);
    let stream = from_iter(|_| (0..3u64).map(Ok));
    let error = Samples::stream(stream, Sampler::shuffled(0)).unwrap_err();
    assert!(matches!(error, Error::GlobalShuffle));
}

#[test]
fn a_slow_sample_keeps_its_place() {
    // The others are made meanwhile, and come after it.
    let source = from_fn(40, |index| {
        if index == 1 {
            thread::sleep(Duration::from_millis(100));
        }
        Ok(index)
    });
    let samples = Samples::of(source, Sampler::sequential(0)).unwrap().workers(workers(4));
    let run = samples.each().resume(Cursor::epoch(0)).unwrap();
    assert!(run.map(Result::unwrap).eq(0..40));
}

#[test]
fn nothing_is_a_typed_error() {
    let samples = || Samples::of(from_fn(4, Ok), Sampler::sequential(0)).unwrap();
    assert!(matches!(samples().batch(0, Tail::Keep), Err(Error::ZeroBatch)));
    assert!(matches!(samples().bucket(0, 1, Tail::Keep, |_| 1), Err(Error::ZeroBatch)));
    assert!(matches!(samples().bucket(1, 0, Tail::Keep, |_| 1), Err(Error::ZeroWindow)));
    let shard = Shard { rank: 2, n_ranks: 2, tail: Tail::Keep };
    let sampler = Sampler { seed: 0, shuffle: Shuffle::Off, shard };
    assert!(matches!(
        Samples::of(from_fn(4, Ok), sampler),
        Err(Error::Rank { rank: 2, n_ranks: 2 })
    ));
}

//! Whatever the pipeline, a run that is stopped anywhere and resumed gives exactly what is left.
use proptest::prelude::*;
use std::path::PathBuf;
use tallow_data::{
    Ahead, At, Cursor, Error, Groups, OnCorrupt, Result, Sampler, Samples, Shard, Shuffle, Tail,
    Workers,
    pipeline::{Pack, Packing, from_fn, from_iter},
};

/// How samples are gathered.
#[derive(Clone, Copy, Debug)]
enum Gather {
    Batch { n: usize, tail: Tail },
    ByTokens { max_tokens: u64 },
    Bucket { n: usize, window_batches: usize, tail: Tail },
    BucketByTokens { max_tokens: u64, window_samples: usize },
    Pack { pack: Pack, n: usize },
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    n_samples: u64,
    is_stream: bool,
    sampler: Sampler,
    /// Every so many samples one is corrupt; 0 is never.
    corrupt_every: u64,
    /// Every so many samples one is filtered out.
    drop_every: u64,
    gather: Gather,
    ahead: Ahead,
}

fn document(index: u64) -> Result<Vec<u32>> {
    let n = index.wrapping_mul(0x9e37_79b9) >> 7 & 7;
    Ok((0..n).map(|i| (index * 16 + i) as u32).collect())
}

fn spoil(plan: Plan, mut document: Vec<u32>, at: At) -> Result<Vec<u32>> {
    if plan.corrupt_every > 0 && at.index % plan.corrupt_every == 1 {
        let path = PathBuf::from(format!("{}.txt", at.index));
        return Err(Error::Corrupt { path, offset: None, reason: "spoilt".to_owned() });
    }
    document.push(at.index as u32);
    document.push(at.rng().below(1 << 20) as u32);
    Ok(document)
}

fn groups(plan: Plan, workers: Workers) -> Groups<String> {
    let n = plan.n_samples;
    let samples = if plan.is_stream {
        Samples::stream(from_iter(move |_| (0..n).map(document)), plan.sampler)
    } else {
        Samples::of(from_fn(n, document), plan.sampler)
    };
    let samples = samples
        .unwrap()
        .map(move |document, at| spoil(plan, document, at))
        .filter(move |document| {
            let index = u64::from(document[document.len() - 2]);
            plan.drop_every == 0 || index % plan.drop_every != 2
        })
        .on_corrupt(OnCorrupt::Skip { limit: u64::MAX })
        .workers(workers);
    let n_tokens = |document: &Vec<u32>| document.len() as u64;
    let shown = |batch: Vec<Vec<u32>>| Ok(format!("{batch:?}"));
    let groups = match plan.gather {
        Gather::Batch { n, tail } => samples.batch(n, tail).unwrap().map(shown),
        Gather::ByTokens { max_tokens } => samples.batch_by_tokens(max_tokens, n_tokens).map(shown),
        Gather::Bucket { n, window_batches, tail } => {
            samples.bucket(n, window_batches, tail, n_tokens).unwrap().map(shown)
        }
        Gather::BucketByTokens { max_tokens, window_samples } => {
            samples.bucket_by_tokens(max_tokens, window_samples, n_tokens).unwrap().map(shown)
        }
        Gather::Pack { pack, n } => {
            let packed = samples.pack(pack).unwrap().batch(n, Tail::Keep).unwrap();
            packed.map(|sequences| Ok(format!("{sequences:?}")))
        }
    };
    groups.prefetch(plan.ahead)
}

/// What a run hands out, and the cursor after each.
fn rest(groups: &Groups<String>, cursor: Cursor) -> Vec<(String, Cursor)> {
    let mut run = groups.resume(cursor).unwrap();
    let mut all = Vec::new();
    while let Some(group) = run.next() {
        all.push((group.unwrap(), run.cursor()));
    }
    all
}

fn a_tail() -> impl Strategy<Value = Tail> {
    prop_oneof![Just(Tail::Keep), Just(Tail::Drop)]
}

fn a_gather() -> impl Strategy<Value = Gather> {
    prop_oneof![
        (1..9usize, a_tail()).prop_map(|(n, tail)| Gather::Batch { n, tail }),
        (10..40u64).prop_map(|max_tokens| Gather::ByTokens { max_tokens }),
        (1..5usize, 1..5usize, a_tail()).prop_map(|(n, window_batches, tail)| Gather::Bucket {
            n,
            window_batches,
            tail
        }),
        (10..40u64, 1..20usize).prop_map(|(max_tokens, window_samples)| {
            Gather::BucketByTokens { max_tokens, window_samples }
        }),
        (1..20usize, a_tail(), 1..4usize).prop_map(|(seq_tokens, tail, n)| {
            let packing = Packing::Split { tail };
            Gather::Pack { pack: Pack { seq_tokens, pad_id: 0, packing }, n }
        }),
        (1..20usize, 1..100u64, 1..4usize).prop_map(|(seq_tokens, window_tokens, n)| {
            let packing = Packing::Whole { window_tokens };
            Gather::Pack { pack: Pack { seq_tokens, pad_id: 0, packing }, n }
        }),
    ]
}

fn a_sampler() -> impl Strategy<Value = (bool, Sampler)> {
    let window = (1..30u64).prop_map(|n_samples| Shuffle::Window { n_samples });
    let shuffle = prop_oneof![Just(Shuffle::Off), Just(Shuffle::Global), window];
    (any::<bool>(), any::<u64>(), shuffle, 1..4u64, any::<u64>(), a_tail()).prop_map(
        |(is_stream, seed, shuffle, n_ranks, rank, tail)| {
            let shard = Shard { rank: rank % n_ranks, n_ranks, tail };
            let is_stream = is_stream && shuffle != Shuffle::Global;
            (is_stream, Sampler { seed, shuffle, shard })
        },
    )
}

prop_compose! {
    fn a_plan()(
        n_samples in 0..120u64,
        (is_stream, sampler) in a_sampler(),
        corrupt_every in 0..6u64,
        drop_every in 0..6u64,
        gather in a_gather(),
        n_groups in 0..4usize,
        max_bytes in 0..2000u64,
    ) -> Plan {
        let ahead = Ahead { n_groups, max_bytes };
        let (corrupt_every, drop_every) = (corrupt_every * 3, drop_every * 2);
        Plan { n_samples, is_stream, sampler, corrupt_every, drop_every, gather, ahead }
    }
}

prop_compose! {
    fn some_workers()(n_threads in 0..4usize, max_samples in 1..20usize, max_bytes in 0..500u64) -> Workers {
        Workers { n_threads, max_samples, max_bytes }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn before_and_after_is_the_whole(
        plan in a_plan(),
        one in some_workers(),
        other in some_workers(),
        epoch in 0..3u64,
        stops in proptest::collection::vec(any::<proptest::sample::Index>(), 3),
    ) {
        let whole = rest(&groups(plan, Workers::NONE), Cursor::epoch(epoch));
        prop_assert_eq!(&rest(&groups(plan, one), Cursor::epoch(epoch)), &whole);
        let resumed = groups(plan, other);
        for stop in stops {
            let n_done = stop.index(whole.len() + 1);
            let cursor = n_done.checked_sub(1).map_or(Cursor::epoch(epoch), |last| whole[last].1);
            prop_assert_eq!(&rest(&resumed, cursor)[..], &whole[n_done..]);
        }
    }

    /// Stopped after every group, by dropping a run that has more of them ready.
    #[test]
    fn a_run_of_single_steps_is_the_whole(plan in a_plan(), workers in some_workers()) {
        let groups = groups(plan, workers);
        let whole = rest(&groups, Cursor::epoch(1));
        let (mut cursor, mut steps) = (Cursor::epoch(1), Vec::new());
        loop {
            let mut run = groups.resume(cursor).unwrap();
            let Some(group) = run.next() else { break };
            cursor = run.cursor();
            steps.push((group.unwrap(), cursor));
        }
        prop_assert_eq!(steps, whole);
    }

    #[test]
    fn each_sample_once_over_all_ranks(
        n_samples in 0..150u64,
        (is_stream, sampler) in a_sampler(),
        workers in some_workers(),
        n in 1..9usize,
    ) {
        let mut seen = Vec::new();
        for rank in 0..sampler.shard.n_ranks {
            let shard = Shard { rank, tail: Tail::Keep, ..sampler.shard };
            let sampler = Sampler { shard, ..sampler };
            let samples = if is_stream {
                Samples::stream(from_iter(move |_| (0..n_samples).map(Ok)), sampler)
            } else {
                Samples::of(from_fn(n_samples, Ok), sampler)
            };
            let batches = samples.unwrap().workers(workers).batch(n, Tail::Keep).unwrap();
            for batch in batches.prefetch(Ahead::ONE).epoch(4).unwrap() {
                seen.extend(batch.unwrap());
            }
        }
        seen.sort_unstable();
        prop_assert!(seen.into_iter().eq(0..n_samples));
    }
}

#[test]
fn a_cursor_of_other_data_is_refused() {
    let batches = |n| {
        Samples::of(from_fn(n, Ok), Sampler::shuffled(1)).unwrap().batch(4, Tail::Keep).unwrap()
    };
    let cursor = Cursor { position: 11, ..Cursor::epoch(0) };
    let error = batches(10).resume(cursor).unwrap_err();
    assert!(matches!(error, Error::Cursor { position: 11, n_images: 10 }), "{error}");
    assert_eq!(batches(11).resume(cursor).unwrap().count(), 0);

    let documents = Samples::of(from_fn(3, document), Sampler::sequential(0)).unwrap();
    for packing in [Packing::Split { tail: Tail::Keep }, Packing::Whole { window_tokens: 50 }] {
        let pack = Pack { seq_tokens: 4, pad_id: 0, packing };
        let cursor = Cursor { within: 99, ..Cursor::epoch(0) };
        let mut run = documents.clone().pack(pack).unwrap().resume(cursor).unwrap();
        let error = run.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::Within { within: 99, .. }), "{error}");
        assert!(run.next().is_none());
    }
}

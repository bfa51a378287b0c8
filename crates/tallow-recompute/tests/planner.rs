//! The planner against every plan there is, and the promises that hold for any limit.

use proptest::prelude::*;
use std::time::Instant;
use tallow_recompute::*;

/// Every plan for segments `first..end`. A redo of a range is not redone as a whole again, that
/// would only repeat it.
fn all_plans(first: usize, end: usize) -> Vec<Vec<Step>> {
    plans_up_to(first, end, end)
}

/// Those whose first step ends before `most`, or there.
fn plans_up_to(first: usize, end: usize, most: usize) -> Vec<Vec<Step>> {
    if first == end {
        return vec![vec![]];
    }
    let mut plans = Vec::new();
    let mut push = |step: &Step, rest: &[Step]| {
        plans.push([std::slice::from_ref(step), rest].concat());
    };
    for rest in all_plans(first + 1, end) {
        push(&Step::Keep(first), &rest);
    }
    for split in first + 1..=most {
        let rests = all_plans(split, end);
        for again in plans_up_to(first, split, split - 1) {
            let step = Step::Redo { first, end: split, again: Plan(again) };
            rests.iter().for_each(|rest| push(&step, rest));
        }
    }
    plans
}

/// Small whole numbers: the planner's slots are single bytes, and nothing is rounded.
fn chains(n: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<SegmentCost>> {
    let segment = (0u64..6, 0u64..12, 0u64..4, 0u64..4, 0u64..8, (1u32..6, 1u32..6));
    (prop::collection::vec(segment, n), 0usize..3, any::<bool>()).prop_map(
        |(segments, n_frozen, wants_input)| {
            let mut costs = Vec::new();
            let (mut input_bytes, mut tracked) = (3, wants_input);
            let n = segments.len();
            for (i, (output, kept, f, t, b, secs)) in segments.into_iter().enumerate() {
                let learns = tracked || i >= n_frozen.min(n - 1);
                let kept_bytes = if learns { output + kept } else { 0 };
                costs.push(SegmentCost {
                    name: i.to_string(),
                    input_bytes,
                    input_bf16_bytes: input_bytes,
                    input_grad_bytes: if tracked { input_bytes } else { 0 },
                    output_bytes: output,
                    is_view: false,
                    learns,
                    kept_bytes,
                    forward_peak_bytes: output + f,
                    tracked_forward_peak_bytes: kept_bytes.max(output) + t,
                    backward_peak_bytes: if learns { b + input_bytes } else { 0 },
                    param_grad_bytes: 0,
                    forward_secs: f64::from(secs.0),
                    backward_secs: if learns { f64::from(secs.1) } else { 0.0 },
                });
                (input_bytes, tracked) = (output, learns);
            }
            costs
        },
    )
}

/// The least time at each peak that some plan has.
fn exact(costs: &[SegmentCost]) -> Vec<Simulated> {
    let plans = all_plans(0, costs.len()).into_iter().map(Plan);
    let mut all: Vec<_> = plans.map(|plan| simulate(costs, &plan).unwrap()).collect();
    all.sort_by(|a, b| a.peak_bytes.cmp(&b.peak_bytes).then(a.secs.total_cmp(&b.secs)));
    all
}

fn check_exact(costs: &[SegmentCost]) -> std::result::Result<(), TestCaseError> {
    let all = exact(costs);
    let smallest = all[0].peak_bytes;
    let top = all.last().expect("there is a plan").peak_bytes;
    for limit_bytes in smallest.saturating_sub(2)..=top + 1 {
        let fitting = all.iter().filter(|s| s.peak_bytes <= limit_bytes);
        let best = fitting.map(|s| s.secs).min_by(f64::total_cmp);
        match (plan_chain(costs, limit_bytes), best) {
            (Ok(planned), Some(secs)) => {
                prop_assert_eq!(
                    planned.simulated.secs,
                    secs,
                    "{} at {}",
                    planned.plan,
                    limit_bytes
                );
                prop_assert_eq!(simulate(costs, &planned.plan).unwrap(), planned.simulated);
                prop_assert!(planned.simulated.peak_bytes <= limit_bytes);
            }
            (Err(Error::NothingFits { smallest_bytes, .. }), None) => {
                prop_assert_eq!(smallest_bytes, smallest);
            }
            (planned, best) => prop_assert!(false, "{planned:?}, but the best is {best:?}"),
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    #[test]
    fn no_plan_is_faster(costs in chains(1..=5)) {
        check_exact(&costs)?;
    }

    #[test]
    fn a_smaller_limit_is_never_faster_nor_higher(
        costs in chains(3..=9),
        factor in prop::sample::select(vec![1u64, 977, 1 << 20]),
    ) {
        let scale = |cost: &SegmentCost| SegmentCost {
            name: cost.name.clone(),
            input_grad_bytes: cost.input_grad_bytes * factor,
            output_bytes: cost.output_bytes * factor,
            kept_bytes: cost.kept_bytes * factor,
            forward_peak_bytes: cost.forward_peak_bytes * factor,
            tracked_forward_peak_bytes: cost.tracked_forward_peak_bytes * factor,
            backward_peak_bytes: cost.backward_peak_bytes * factor,
            ..*cost
        };
        let costs: Vec<_> = costs.iter().map(scale).collect();
        let top = simulate(&costs, &Plan::keep_all(costs.len())).unwrap().peak_bytes;
        let Err(Error::NothingFits { smallest_bytes, .. }) = plan_chain(&costs, 0) else {
            return Ok(()); // fits in nothing at all
        };
        prop_assert!(plan_chain(&costs, smallest_bytes).is_ok());
        prop_assert!(plan_chain(&costs, smallest_bytes - 1).is_err());
        let mut before = Simulated { peak_bytes: 0, saved_bytes: 0, secs: f64::INFINITY };
        for i in 0..=20 {
            let limit_bytes = smallest_bytes + (top - smallest_bytes) * i / 20;
            let planned = plan_chain(&costs, limit_bytes).unwrap().simulated;
            prop_assert!(planned.peak_bytes <= limit_bytes);
            prop_assert!(planned.peak_bytes >= before.peak_bytes);
            prop_assert!(planned.secs <= before.secs);
            before = planned;
        }
        let least: f64 = costs.iter().map(|c| c.forward_secs + c.backward_secs).sum();
        prop_assert_eq!(before.secs, least);
    }
}

/// A chain like a transformer: `n` equal blocks and a loss.
fn blocks(n: usize) -> Vec<SegmentCost> {
    let block = |i: usize| SegmentCost {
        name: i.to_string(),
        input_grad_bytes: if i == 0 { 0 } else { 4 << 20 },
        output_bytes: 4 << 20,
        learns: true,
        kept_bytes: 64 << 20,
        forward_peak_bytes: 70 << 20,
        tracked_forward_peak_bytes: 70 << 20,
        backward_peak_bytes: 60 << 20,
        forward_secs: 1.0,
        backward_secs: 2.0,
        ..SegmentCost::default()
    };
    let mut costs: Vec<_> = (0..n - 1).map(block).collect();
    costs.push(SegmentCost { output_bytes: 4, ..block(n - 1) });
    costs
}

#[test]
fn two_hundred_segments_are_planned_at_once() {
    let costs = blocks(200);
    let start = Instant::now();
    let Err(Error::NothingFits { smallest_bytes, .. }) = plan_chain(&costs, 0) else {
        panic!("nothing fits in nothing")
    };
    let elapsed_secs = start.elapsed().as_secs_f64();
    let keep_all = simulate(&costs, &Plan::keep_all(200)).unwrap();
    // One block's backward, and a handful of inputs: logarithmic in the length.
    assert!(smallest_bytes < 200 << 20, "{smallest_bytes}");
    println!(
        "200 segments: {elapsed_secs:.2} s; {smallest_bytes} of {} bytes",
        keep_all.peak_bytes
    );
    for (limit_bytes, most_extra_forwards) in [(keep_all.peak_bytes, 0.0), (2 << 30, 200.0)] {
        let planned = plan_chain(&costs, limit_bytes).unwrap();
        assert!(planned.simulated.secs <= keep_all.secs + most_extra_forwards, "{limit_bytes}");
    }
    // Generous: this machine is shared and the test build is not fully optimised.
    assert!(elapsed_secs < 10.0, "{elapsed_secs}");
}

#[test]
fn degenerate_chains_have_plans() {
    assert_eq!(plan_chain(&[], 0).unwrap().plan, Plan(vec![]));
    let one = blocks(2).split_off(1);
    assert_eq!(plan_chain(&one, u64::MAX).unwrap().plan, Plan::keep_all(1));
    let frozen = SegmentCost { learns: false, output_bytes: 5, ..SegmentCost::default() };
    let planned = plan_chain(&[frozen.clone(), frozen], 100).unwrap();
    assert_eq!((planned.simulated.peak_bytes, planned.simulated.saved_bytes), (10, 5));
    let message = plan_chain(&blocks(3), 7).unwrap_err().to_string();
    assert!(message.starts_with("no plan fits 7 bytes, the smallest needs 1"), "{message}");
}

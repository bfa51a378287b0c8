//! Prices, the pick and the post-mortem.
use tallow_memory::{
    Terms,
    plan::{
        Choice, NothingFits, PostMortem, Priced, Saving, pick,
        prices::{Format, Home, Parameter, Ranks, Sheet, offloaded_bytes, price},
    },
};

/// 784-256-10: 203 530 parameters, 200 960 of them in the first layer.
const MLP: [Parameter; 4] = [
    Parameter::trainable(784 * 256),
    Parameter::trainable(256),
    Parameter::trainable(256 * 10),
    Parameter::trainable(10),
];

const ADAM: Sheet = Sheet { moments: Format::F32, n_moments: 2, ..Sheet::plain(Format::F32) };

#[test]
fn mem_2_f32_adam_counts_its_moments() {
    let terms = price(&MLP, &ADAM);
    assert_eq!((terms.weights_bytes, terms.gradients_bytes), (814_120, 814_120));
    assert_eq!(terms.optimizer_state_bytes, 1_628_240);
    assert_eq!(terms.total_bytes(), 3_256_480);
    let sgd = price(&MLP, &Sheet::plain(Format::F32));
    assert_eq!((sgd.optimizer_state_bytes, sgd.total_bytes()), (0, 1_628_240));
    let momentum = Sheet { n_moments: 1, ..ADAM };
    assert_eq!(price(&MLP, &momentum).optimizer_state_bytes, 814_120);
    let summed = Sheet { accumulators: Format::F32, ..ADAM };
    assert_eq!(price(&MLP, &summed).accumulators_bytes, 814_120);
}

#[test]
fn mem_2_narrow_states_and_masters() {
    let eight_bit = price(&MLP, &Sheet { moments: Format::Blockwise8, ..ADAM });
    // Scales: 784 + 1 + 10 + 1 blocks.
    assert_eq!(eight_bit.optimizer_state_bytes, 2 * (203_530 + 4 * 796));
    let bf16 = Sheet { moments: Format::F32, n_moments: 2, ..Sheet::plain(Format::Half) };
    let with_masters = price(&MLP, &Sheet { masters: Format::F32, ..bf16 });
    assert_eq!((with_masters.weights_bytes, with_masters.gradients_bytes), (407_060, 407_060));
    assert_eq!(with_masters.optimizer_state_bytes, 814_120 + 1_628_240);
    let narrow = price(&MLP, &Sheet { moments: Format::Half, ..bf16 });
    assert_eq!(narrow.optimizer_state_bytes, 2 * 407_060);
}

#[test]
fn mem_2_divided_and_offloaded() {
    let zero_1 = price(&MLP, &Sheet { ranks: Ranks { state: 4, ..Ranks::ONE }, ..ADAM });
    assert_eq!((zero_1.weights_bytes, zero_1.gradients_bytes), (814_120, 814_120));
    // ceil(n / 4) of each tensor: 50 176 + 64 + 640 + 3.
    assert_eq!(zero_1.optimizer_state_bytes, 2 * 4 * 50_883);
    let zero_3 = Sheet { ranks: Ranks { weights: 4, gradients: 4, state: 4 }, ..ADAM };
    assert_eq!(price(&MLP, &zero_3).total_bytes(), 4 * 4 * 50_883);
    let many = Sheet { ranks: Ranks { state: 1_000_000, ..Ranks::ONE }, ..ADAM };
    assert_eq!(price(&MLP, &many).optimizer_state_bytes, 2 * 4 * 4); // one element of each
    let away = Sheet { state_home: Home::Elsewhere, ..ADAM };
    assert_eq!(price(&MLP, &away).total_bytes(), 1_628_240);
    assert_eq!((offloaded_bytes(&MLP, &away), offloaded_bytes(&MLP, &ADAM)), (1_628_240, 0));
}

#[test]
fn mem_2_frozen_parameters_have_no_state() {
    let mut frozen = MLP;
    frozen[0] = Parameter::frozen(784 * 256);
    frozen[1] = Parameter::frozen(256);
    let terms = price(&frozen, &ADAM);
    assert_eq!((terms.weights_bytes, terms.gradients_bytes), (814_120, 4 * 2_570));
    assert_eq!(terms.optimizer_state_bytes, 2 * 4 * 2_570);
}

#[test]
fn absurd_sizes_stop_at_the_top() {
    let terms = price(&[Parameter::trainable(u64::MAX); 3], &ADAM);
    assert_eq!((terms.weights_bytes, terms.total_bytes()), (u64::MAX, u64::MAX));
    let rows = [(0, 0), (1, 5), (255, 259), (256, 260), (257, 265), (512, 520)];
    for (n_elems, n_bytes) in rows {
        assert_eq!(Format::Blockwise8.bytes(n_elems), n_bytes);
    }
}

fn candidate(
    precision: &str,
    micro_batch: usize,
    state: &str,
    total_bytes: u64,
    secs_per_sample: f64,
) -> Priced<Choice> {
    let choice = Choice {
        precision: precision.into(),
        micro_batch,
        recompute: "none".into(),
        optimizer_state: state.into(),
        offload: "none".into(),
    };
    let terms = Terms { other_bytes: total_bytes, ..Terms::ZERO };
    Priced { terms, secs_per_sample, choice }
}

fn candidates() -> Vec<Priced<Choice>> {
    vec![
        candidate("f32", 16, "f32", 1000, 0.010),
        candidate("f32", 8, "f32", 800, 0.020), // 200 bytes for 10 ms
        candidate("f32", 16, "8bit", 700, 0.012), // 300 bytes for 2 ms: the cheapest
        candidate("bf16", 16, "f32", 600, 0.016), // 400 bytes for 6 ms
        candidate("bf16", 1, "8bit", 100, 0.050),
    ]
}

#[test]
fn the_fastest_that_fits_is_picked() {
    let candidates = candidates();
    let rows = [(u64::MAX, 0), (1000, 0), (999, 2), (700, 2), (699, 3), (599, 4), (100, 4)];
    for (budget_bytes, i) in rows {
        assert_eq!(pick(&candidates, budget_bytes).unwrap(), &candidates[i], "{budget_bytes}");
    }
}

#[test]
fn ties_go_to_the_users_order() {
    let mut tied =
        vec![candidate("f32", 4, "f32", 500, 0.01), candidate("bf16", 4, "f32", 400, 0.01)];
    assert_eq!(pick(&tied, 500).unwrap().choice.precision, "f32");
    tied.reverse();
    assert_eq!(pick(&tied, 500).unwrap().choice.precision, "bf16");
    // Unmeasured is slowest, and better than nothing.
    tied[0].secs_per_sample = f64::NAN;
    assert_eq!(pick(&tied, 500).unwrap().choice.precision, "f32");
    assert_eq!(pick(&tied, 499).unwrap().choice.precision, "bf16");
}

#[test]
fn nothing_fits_names_the_smallest_and_the_cheapest_knob() {
    let error = pick(&candidates(), 99).unwrap_err();
    let NothingFits::AllAbove { budget_bytes: 99, smallest_bytes: 100, smallest, saving } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        smallest,
        "precision=bf16 micro_batch=1 recompute=none optimizer_state=8bit offload=none"
    );
    let Saving { knob: "optimizer_state", saved_bytes: 300, .. } = **saving.as_ref().unwrap()
    else {
        panic!("{saving:?}")
    };
    assert!(error.to_string().ends_with(
        "cheapest change: optimizer_state f32 -> 8bit saves 300 bytes for 2.00e-3 s a sample"
    ));
    let none = pick::<Choice>(&[], 7).unwrap_err();
    assert_eq!(none, NothingFits::NoCandidates { budget_bytes: 7 });
    let alone = pick(&candidates()[..1], 7).unwrap_err();
    assert!(matches!(alone, NothingFits::AllAbove { saving: None, .. }), "{alone}");
}

#[test]
fn a_saving_without_loss_is_the_cheapest() {
    let mut candidates = candidates();
    candidates.push(candidate("f16", 16, "f32", 990, 0.009)); // smaller and faster
    candidates.push(candidate("fp8", 16, "f32", 950, 0.010)); // free, and saves more
    candidates.push(candidate("fp8", 16, "8bit", 10, 0.001)); // best of all, but two changes
    let Err(NothingFits::AllAbove { saving: Some(saving), .. }) = pick(&candidates, 9) else {
        panic!()
    };
    assert_eq!((saving.knob, &*saving.to, saving.saved_bytes), ("precision", "fp8", 50));
}

/// A larger budget never picks slower, and what is picked always fits.
#[test]
fn more_budget_is_never_slower() {
    let mut state = 1u64;
    let mut below = |n: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    for _ in 0..300 {
        let n_candidates = 1 + below(12);
        let candidates: Vec<_> = (0..n_candidates)
            .map(|i| candidate("f32", i as usize, "f32", below(50), below(10) as f64))
            .collect();
        let mut slowest = f64::INFINITY;
        for budget_bytes in 0..=50 {
            let smallest = candidates.iter().map(|c| c.terms.total_bytes()).min().unwrap();
            let picked = pick(&candidates, budget_bytes);
            assert_eq!(picked.is_ok(), smallest <= budget_bytes);
            let Ok(picked) = picked else { continue };
            assert!(picked.terms.total_bytes() <= budget_bytes);
            assert!(picked.secs_per_sample <= slowest);
            slowest = picked.secs_per_sample;
        }
    }
}

#[test]
fn a_post_mortem_names_the_live_and_the_remedy() {
    let at_peak = Terms { weights_bytes: 400, saved_activations_bytes: 610, ..Terms::ZERO };
    let report = PostMortem::new(at_peak, 980, &candidates());
    assert_eq!(
        report.to_string(),
        "1010 bytes were live at the peak, the limit is 980:\n  \
         weights                            400\n  \
         saved activations                  610\n\
         would have fitted: precision=f32 micro_batch=16 recompute=none optimizer_state=8bit \
         offload=none (700 bytes, 1.20e-2 s a sample)"
    );
    // The plan was wrong by 290 bytes: 700 + 290 would not have fitted, 600 + 290 would.
    let at_peak = Terms { other_bytes: 1290, ..Terms::ZERO };
    let report = PostMortem::new(at_peak, 980, &candidates());
    assert!(report.remedy.unwrap().contains("precision=bf16 micro_batch=16"));
    let hopeless = PostMortem::new(at_peak, 300, &candidates());
    let text = hopeless.to_string();
    assert!(text.ends_with("optimizer_state f32 -> 8bit saves 300 bytes for 2.00e-3 s a sample"));
    let unpriced = PostMortem::new::<Choice>(at_peak, 300, &[]);
    assert!(matches!(unpriced.remedy, Err(NothingFits::NoCandidates { .. })), "{unpriced}");
}

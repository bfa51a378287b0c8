//! Gradients that update as they come and are gone, against gradients that are kept.

mod support;

use support::{EPS, Net, RATE, Setup, State, dynamic, nested, seen};
use tallow_backward::Error as BackwardError;
use tallow_testkit::{Tol, assert_close};
use tallow_train::{
    Applied, BatchSplit, Error, Gradients, Recipe, Sizing, Skip, Trainer, Update,
    accum::Clip,
    optim,
    precision::{self, LossScale, Policy},
    recompute::Plan,
};

const BOTH: [Gradients; 2] = [Gradients::Summed, Gradients::Released];

/// After `n_updates` updates of `n` samples in one micro-batch.
fn train(
    net: Net,
    policy: &Policy,
    n: usize,
    n_updates: u64,
    change: impl FnOnce(Recipe) -> Recipe,
) -> (Vec<Update>, State) {
    let mut setup = Setup::new(net, policy, (n, n), change);
    let updates = (0..n_updates).map(|seed| setup.update(n, seed).expect("updates")).collect();
    (updates, setup.state())
}

#[test]
fn released_is_summed_bit_for_bit_where_the_mean_is_exact() {
    // Division by 8 samples, or 64 tokens, is exact: by a divisor at the end or by a factor at once.
    for (net, n_segments) in [(Net::Digits, 5), (Net::Gpt2, 6), (Net::Mixed, 4)] {
        for policy in [Policy::f32(), Policy::bf16()] {
            if net == Net::Mixed && policy != Policy::f32() {
                continue; // it has no casts at its borders
            }
            for plan in [Plan::keep_all(n_segments), nested(0, n_segments)] {
                let [want, got] = BOTH.map(|gradients| {
                    let recompute = plan.clone();
                    train(net, &policy, 8, 4, |recipe| Recipe { gradients, recompute, ..recipe })
                });
                let what = format!("{net:?}, {:?}, {plan}", policy.compute);
                assert_eq!(seen(&got.0), seen(&want.0), "{what}: losses");
                got.1.assert_same(&want.1, &what);
            }
        }
    }
}

/// A mean over ten samples and a clipped norm round in another order: a division and a product one
/// way, one product with a rounded factor the other. That is at most 3 roundings a gradient, and
/// AdamW moves a weight by at most a rate of that share, against 1/2 ulp of the weight itself.
#[test]
fn released_is_summed_within_rounding_where_it_is_not() {
    for (clip, scale, policy) in [
        (Clip::Off, LossScale::off(), Policy::f32()),
        (Clip::Norm(1e-2), LossScale::off(), Policy::f32()),
        (Clip::Norm(1e-2), dynamic(2f32.powi(24)), Policy::f16()),
        (Clip::Off, dynamic(2f32.powi(24)), Policy::f16()),
    ] {
        // The first window of the dynamic scale overflows; an f16 copy of a weight may round
        // otherwise after the first update, so that the second is another.
        let n_updates = if scale == LossScale::off() { 3 } else { 2 };
        let [want, got] = BOTH.map(|gradients| {
            train(Net::Digits, &policy, 10, n_updates, |recipe| Recipe {
                gradients,
                clip,
                loss_scale: scale.clone(),
                ..recipe
            })
        });
        let what = format!("{clip:?}, {:?}", policy.compute);
        // Which parameter overflowed first depends on who is looked at first.
        let applied = [&want.0, &got.0]
            .map(|updates| updates.iter().map(|u| u.outcome == Applied::Yes).collect::<Vec<_>>());
        assert_eq!(applied[0], applied[1], "{what}");
        let is_dynamic = scale != LossScale::off();
        assert_eq!(
            applied[0],
            if is_dynamic { vec![false, true] } else { vec![true; 3] },
            "{what}"
        );
        assert_eq!(got.1.scale, want.1.scale, "{what}");
        let tol = Tol::Rel(8.0 * EPS);
        assert_close(&what, &got.1.floats(), &want.1.floats(), tol);
    }
}

#[test]
fn a_tied_parameter_is_updated_once_an_update() {
    for clip in [Clip::Off, Clip::Norm(1e-3)] {
        let mut setup = Setup::new(Net::Gpt2, &Policy::f32(), (4, 4), |recipe| Recipe {
            gradients: Gradients::Released,
            clip,
            ..recipe
        });
        for seed in 0..3 {
            let _update = setup.update(4, seed).expect("updates");
        }
        let counts = setup.trainer.optimizer();
        for name in counts.names() {
            assert_eq!(counts.n_updates(name), Some(3), "{name}, {clip:?}");
        }
    }
    // The norm is that of the sum, not of its parts: clipped to the same length as summed.
    let tiny = 1e-12;
    let [summed, released] = BOTH.map(|gradients| {
        let (updates, _) = train(Net::Gpt2, &Policy::f32(), 4, 1, |recipe| Recipe {
            gradients,
            skip_above_norm: tiny,
            ..recipe
        });
        let Applied::Skipped(Skip::Norm { norm, .. }) = updates[0].outcome else {
            panic!("{updates:?}")
        };
        norm
    });
    assert_close("norm", &[released], &[summed], Tol::Rel(4.0 * EPS));
}

/// The scale doubles when the verdict closes its window: the backward that follows is of the old one.
#[test]
fn a_scale_that_grows_scales_no_gradient() {
    let optimizer = |recipe: Recipe| Recipe {
        optimizer: optim::Config::new(optim::Algorithm::SGD, RATE),
        ..recipe
    };
    let run = |loss_scale: LossScale| {
        train(Net::Mixed, &Policy::f32(), 8, 3, |recipe| Recipe {
            gradients: Gradients::Released,
            loss_scale,
            ..optimizer(recipe)
        })
    };
    // Powers of two change no bit of an f32 gradient.
    let (_, want) = run(LossScale::off());
    let (_, got) = run(dynamic(1024.0));
    assert_eq!(got.scale.scale, 8.0 * 1024.0);
    State { scale: want.scale, ..got }.assert_same(&want, "dynamic scale");
}

/// A trainer of `net` and a batch that makes every gradient NaN.
fn spoilt(net: Net, change: impl FnOnce(Recipe) -> Recipe) -> (Setup, tallow_data::Batch) {
    let setup = Setup::new(net, &Policy::f32(), (8, 8), change);
    let mut bad = net.batch(8, 5, &Policy::f32());
    bad.inputs = (bad.inputs * f64::NAN).expect("NaN");
    (setup, bad)
}

#[test]
fn a_gradient_that_is_not_finite_moves_nothing_where_a_verdict_is_needed() {
    let released = |recipe| Recipe { gradients: Gradients::Released, ..recipe };
    let settings: [fn(Recipe) -> Recipe; 3] = [
        |recipe| Recipe { clip: Clip::Norm(1.0), ..recipe },
        |recipe| Recipe { skip_above_norm: 1e9, ..recipe },
        |recipe| Recipe { loss_scale: dynamic(1024.0), ..recipe },
    ];
    for (i, change) in settings.into_iter().enumerate() {
        let (mut setup, bad) = spoilt(Net::Mixed, |recipe| change(released(recipe)));
        for n_before in 0..2 {
            let before = setup.state();
            match setup.trainer.update(&bad) {
                Err(Error::Backward(BackwardError::NonFinite { name, .. })) => {
                    assert!(i < 2, "a dynamic scale skips");
                    assert_eq!(name, "last.bias");
                    setup.state().assert_same(&before, "refused");
                }
                Ok(Update { outcome: Applied::Skipped(Skip::Overflow { name }), .. }) => {
                    assert_eq!((i, name.as_str()), (2, "last.bias"));
                    let after = setup.state();
                    assert_eq!(after.scale.scale, before.scale.scale / 4096.0);
                    assert_eq!(after.scale.skips.overflow, n_before + 1);
                    State { scale: before.scale, ..after }.assert_same(&before, "skipped");
                }
                other => panic!("{other:?}"),
            }
            let update = setup.update(8, n_before).expect("goes on");
            assert_eq!(update.outcome, Applied::Yes);
        }
    }
    // The first update is judged in any case.
    let (mut setup, bad) = spoilt(Net::Mixed, released);
    let before = setup.state();
    let error = setup.trainer.update(&bad).expect_err("must be refused");
    assert!(
        matches!(&error, Error::Backward(BackwardError::NonFinite { update: 1, .. })),
        "{error}"
    );
    setup.state().assert_same(&before, "the first update");
}

#[test]
fn without_a_verdict_it_is_an_error_that_names_the_parameter() {
    let released = |recipe| Recipe { gradients: Gradients::Released, ..recipe };
    let (mut setup, bad) = spoilt(Net::Mixed, released);
    let _good = setup.update(8, 0).expect("updates");
    let before = setup.state();
    let error = setup.trainer.update(&bad).expect_err("must be refused");
    let Error::Backward(BackwardError::NonFinite { update: 2, name, loss }) = &error else {
        panic!("{error}")
    };
    assert_eq!(name, "last.bias");
    assert!(loss.is_nan());
    assert!(error.to_string().contains("the gradient of last.bias is not finite"), "{error}");
    // The very first gradient was NaN, so nothing of the other segments was released either.
    setup.state().assert_same(&before, "refused");
}

/// From the peak to nothing in four updates.
fn falling() -> optim::Schedule {
    let shape = optim::Shape::Linear { total_updates: 4, end: 0.0 };
    optim::Schedule { peak: RATE, warmup_updates: 0, shape }
}

/// Inputs `factor` times as large.
fn grown(net: Net, n: usize, seed: u64, factor: f64, policy: &Policy) -> tallow_data::Batch {
    let mut batch = net.batch(n, seed, policy);
    batch.inputs = (batch.inputs * factor).expect("a product");
    batch
}

/// A net without batch norm, which would undo the factor, and without dropout, whose masks follow
/// the position in the data.
mod flat {
    use super::support;
    use candle_core::{Device, Module, Result, Tensor};
    use tallow_models::{Score, Segments};
    use tallow_tensor::{
        Params,
        layers::{self, Linear},
        ops::{self, CrossEntropy, Loss},
    };
    use tallow_train::{
        Recipe, Trainer,
        precision::{Masters, Policy},
    };

    pub(crate) struct Flat(Linear, Linear);

    impl Segments for Flat {
        fn names(&self) -> Vec<String> {
            vec!["first".to_string()]
        }

        fn head_name(&self) -> String {
            "last".to_string()
        }

        fn run(&self, _: usize, x: &Tensor, _: bool) -> Result<Tensor> {
            self.0.forward(&x.flatten_from(1)?)
        }

        fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
            Ok(ops::cross_entropy(&self.1.forward(x)?, targets, cfg)?)
        }

        fn score(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
            Score::of_logits(&self.1.forward(x)?, targets, cfg)
        }
    }

    pub(crate) fn build(change: impl FnOnce(Recipe) -> Recipe) -> (Trainer<Flat>, Params) {
        let params = Params::new(1);
        let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
        let vb = masters.builder(&Device::Cpu);
        let first = layers::linear(12, 8, vb.pp("first")).expect("builds");
        let last = layers::linear(8, 3, vb.pp("last")).expect("builds");
        let recipe = change(support::recipe(8, 8, 1));
        (Trainer::new(Flat(first, last), masters, vec![], recipe).expect("valid"), params)
    }
}

#[test]
fn scl_3_a_norm_above_the_limit_is_skipped_and_the_next_step_works() {
    let (small, large) = (1.0, 1000.0);
    let batch = |seed, factor| grown(Net::Mixed, 8, seed, factor, &Policy::f32());
    for gradients in BOTH {
        for scale in [LossScale::off(), dynamic(1024.0)] {
            let recipe = |recipe: Recipe, limit: f64| {
                let loss_scale = scale.clone();
                Recipe {
                    gradients,
                    loss_scale,
                    skip_above_norm: limit,
                    schedule: falling(),
                    ..recipe
                }
            };
            let norm_of = |seed, factor| {
                let (mut trainer, _) = flat::build(|plain| recipe(plain, 1e-12));
                match trainer.update(&batch(seed, factor)).expect("a skip is no error").outcome {
                    Applied::Skipped(Skip::Norm { norm, limit: 1e-12 }) => norm,
                    other => panic!("{other:?}"),
                }
            };
            let limit = 4.0 * norm_of(0, small).max(norm_of(1, small));
            let too_large = norm_of(0, large);
            assert!(too_large > limit, "{too_large} is not above {limit}");

            // The same without the skipped windows.
            let (mut plain, want) = flat::build(|plain| recipe(plain, limit));
            for seed in [0, 1] {
                let _loss = plain.must_update(&batch(seed, small));
            }

            let (mut trainer, got) = flat::build(|plain| recipe(plain, limit));
            let before = support::bits(&got.all());
            let mut rates = Vec::new();
            for (n_updates, seed, factor) in
                [(0, 0, large), (1, 0, small), (1, 1, large), (2, 1, small)]
            {
                let update = trainer.update(&batch(seed, factor)).expect("a skip is no error");
                match update.outcome {
                    Applied::Skipped(Skip::Norm { norm, limit: found }) if factor == large => {
                        assert!(norm > limit && found == limit, "{norm} {found}");
                        let last = trainer.loss_scale().last().expect("a window was closed");
                        assert_eq!(last.skipped, Some(precision::Skip::NormLimit));
                        assert_eq!(last.new_scale, last.old_scale);
                    }
                    Applied::Yes if factor == small => {
                        rates.push(trainer.optimizer().learning_rate())
                    }
                    other => panic!("{other:?}"),
                }
                if n_updates == 0 {
                    assert_eq!(support::bits(&got.all()), before);
                }
                assert_eq!(trainer.n_updates(), n_updates);
                assert!(!trainer.loss_scale().state().open);
            }
            assert_eq!(rates, [falling().rate(0), falling().rate(1)]);
            assert_eq!(trainer.n_windows(), 4);
            assert_eq!(trainer.optimizer().n_updates("first.weight"), Some(2));
            let state = trainer.loss_scale().state();
            assert_eq!((state.n_windows, state.skips.norm_limit, state.skips.overflow), (4, 2, 0));
            assert_eq!(state.scale, plain.loss_scale().value());
            assert_eq!(support::bits(&got.all()), support::bits(&want.all()), "{gradients:?}");
        }
    }
}

/// An update that must move the weights.
trait MustUpdate {
    fn must_update(&mut self, batch: &tallow_data::Batch) -> f64;
}

impl MustUpdate for Trainer<flat::Flat> {
    fn must_update(&mut self, batch: &tallow_data::Batch) -> f64 {
        let update = self.update(batch).expect("updates");
        assert_eq!(update.outcome, Applied::Yes);
        update.loss
    }
}

#[test]
fn scl_3_counters_after_two_overflows() {
    let batch = |seed, factor| grown(Net::Mixed, 8, seed, factor, &Policy::f32());
    for gradients in BOTH {
        let (mut trainer, _) = flat::build(|recipe| Recipe {
            gradients,
            loss_scale: dynamic(1024.0),
            schedule: falling(),
            ..recipe
        });
        let mut applied = Vec::new();
        for (seed, factor) in [(0, f64::INFINITY), (1, f64::INFINITY), (2, 1.0), (3, 1.0)] {
            let update = trainer.update(&batch(seed, factor)).expect("a skip is no error");
            if update.outcome == Applied::Yes {
                applied.push(trainer.optimizer().learning_rate());
            }
        }
        assert_eq!(applied, [RATE, 0.75 * RATE], "{gradients:?}");
        assert_eq!((trainer.n_windows(), trainer.n_updates()), (4, 2));
        assert_eq!(trainer.optimizer().n_updates("last.bias"), Some(2));
        assert_eq!(trainer.loss_scale().skips().overflow, 2);
        assert_eq!(trainer.loss_scale().state().n_windows, 4);
    }
}

#[test]
fn contradictions_are_refused_by_name() {
    let refused = |change: &dyn Fn(Recipe) -> Recipe| {
        let (model, masters, params) = Net::Mixed.build(&Policy::f32());
        let recipe = change(Recipe { gradients: Gradients::Released, ..support::recipe(8, 8, 3) });
        match Trainer::new(model, masters, params.buffers(), recipe) {
            Err(Error::Setting { name, value, .. }) => (name, value),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("must be refused"),
        }
    };
    let two = BatchSplit::derive(Some(8), Some(4), None, 1).expect("they fit");
    assert_eq!(refused(&|recipe| Recipe { split: two, ..recipe }), ("accumulate", 2.0));
    assert_eq!(refused(&|r| Recipe { clip: Clip::Value(0.5), ..r }), ("clip value", 0.5));

    let (mut setup, _) = spoilt(Net::Mixed, |r| Recipe { gradients: Gradients::Released, ..r });
    let error = setup.trainer.size_by(Sizing::fixed(4)).expect_err("must be refused");
    assert!(matches!(error, Error::Setting { name: "sizing", value: 4.0, .. }), "{error}");
    assert_eq!(setup.trainer.split().accumulate(), 1);
    let _update = setup.update(8, 0).expect("one micro-batch");
}

#[test]
fn a_batch_in_which_no_target_counts_moves_nothing() {
    for clip in [Clip::Off, Clip::Norm(1.0)] {
        let change = |recipe| Recipe { gradients: Gradients::Released, clip, ..recipe };
        let mut setup = Setup::new(Net::Digits, &Policy::f32(), (4, 4), change);
        let _first = setup.update(4, 0).expect("a good batch"); // the second needs no verdict
        let before = setup.state();
        let mut batch = setup.net.batch(4, 1, &setup.policy);
        batch.targets = (batch.targets.to_dtype(candle_core::DType::I64))
            .and_then(|t| t.zeros_like()? - 100.0)
            .expect("ignored targets");
        let error = setup.trainer.update(&batch).expect_err("there is no mean of nothing");
        assert!(matches!(error, Error::Accum(_)), "{error}");
        setup.state().assert_same(&before, "no target counts");
    }
}

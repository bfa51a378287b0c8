//! What a builder makes of few words: the same trainer, bit for bit, as a recipe written by hand, or a
//! refusal that names what contradicts what.

mod support;

use candle_core::{Device, Tensor};
use candle_nn::{VarBuilder, linear};
use support::{Net, Setup, constant, seen};
use tallow_data::{Batch, Dataset, Kind, Order, Synthetic, Tail};
use tallow_memory::NoMeter;
use tallow_models::{Gpt2Config, Segments, Whole};
use tallow_train::{
    Built, Error, Gradients, Recipe, Trainer,
    accum::{Clip, SplitError},
    optim::{self, Algorithm, Config, Schedule, Shape, StateFormat},
    plan::{self, Space, Workload},
    precision::{DynamicScale, LossScale, Policy},
    recompute::{self, Plan},
};

fn built(net: Net, policy: &Policy) -> (Built<support::Boxed>, tallow_train::Params) {
    let (model, masters, params) = net.build(policy);
    (Built { model, masters, buffers: params.buffers() }, params)
}

/// `build` gets the plain builder, `change` the plain recipe.
fn assert_same(
    net: Net,
    policy: &Policy,
    build: impl FnOnce(tallow_train::Builder<support::Boxed>) -> tallow_train::Builder<support::Boxed>,
    change: impl FnOnce(Recipe) -> Recipe,
) {
    let mut by_hand = Setup::new(net, policy, (8, 8), change);
    let (built, params) = built(net, policy);
    let trainer = build(Trainer::builder(built).batch(8)).build().expect("valid");
    let mut short = Setup { net, policy: policy.clone(), trainer, params };
    let updates = |setup: &mut Setup| {
        let updates = (0..3).map(|seed| setup.update(8, seed).expect("updates"));
        seen(&updates.collect::<Vec<_>>())
    };
    assert_eq!(updates(&mut short), updates(&mut by_hand));
    short.state().assert_same(&by_hand.state(), "by hand");
}

#[test]
fn defaults_are_adamw_at_a_constant_rate() {
    let change = |recipe: Recipe| Recipe {
        optimizer: Config { learning_rate: 1e-3, ..recipe.optimizer },
        schedule: constant(1e-3),
        ..recipe
    };
    assert_same(Net::Mixed, &Policy::f32(), |builder| builder, change);
    // f16 needs a scale.
    let change = |recipe: Recipe| Recipe {
        loss_scale: LossScale::dynamic(DynamicScale::STANDARD).expect("valid"),
        ..change(recipe)
    };
    assert_same(Net::Digits, &Policy::f16(), |builder| builder, change);
}

#[test]
fn every_setting_reaches_the_recipe() {
    let lion = || Config { format: StateFormat::BITS8, ..Config::new(Algorithm::LION, 3e-4) };
    assert_same(
        Net::Gpt2,
        &Policy::bf16(),
        |builder| {
            let builder = builder.micro_batch(2).optimizer(lion()).warmup_cosine(2, 5);
            let builder = builder.clip_norm(0.5).recompute(recompute::Policy::All).ema_decay(0.9);
            builder.adjust(|recipe| recipe.label_smoothing = 0.1)
        },
        |recipe| Recipe {
            split: tallow_train::BatchSplit::derive(Some(8), Some(2), None, 1).expect("they fit"),
            optimizer: lion(),
            schedule: Schedule {
                peak: 3e-4,
                warmup_updates: 2,
                shape: Shape::Cosine { total_updates: 5, end: 0.0 },
            },
            clip: Clip::Norm(0.5),
            recompute: recompute::Policy::All
                .plan(&vec![Default::default(); recipe.recompute.n_segments()])
                .expect("a rule without costs"),
            label_smoothing: 0.1,
            ema_decay: Some(0.9),
            ..recipe
        },
    );
    let schedule = Schedule { warmup_updates: 1, ..constant(1e-2) };
    assert_same(
        Net::Mixed,
        &Policy::f32(),
        |builder| {
            builder
                .released()
                .schedule(schedule)
                .plan(Plan::keep_all(99))
                .plan(support::nested(0, 4))
        },
        |recipe| Recipe {
            gradients: Gradients::Released,
            schedule,
            recompute: support::nested(0, 4),
            optimizer: Config { learning_rate: 1e-3, ..recipe.optimizer },
            ..recipe
        },
    );
}

#[test]
fn settings_that_contradict_each_other_are_refused_by_name() {
    type Change =
        fn(tallow_train::Builder<support::Boxed>) -> tallow_train::Builder<support::Boxed>;
    let refused = |change: Change| {
        let builder = change(Trainer::builder(built(Net::Mixed, &Policy::f32()).0));
        builder.build().err().expect("must be refused")
    };
    let rivals: [(Change, &str, &str); 4] = [
        (
            |b| b.learning_rate(1.0).optimizer(Config::new(Algorithm::SGD, 0.1)),
            "learning_rate",
            "optimizer",
        ),
        (|b| b.schedule(constant(1.0)).learning_rate(1.0), "learning_rate", "schedule"),
        (|b| b.warmup_cosine(1, 9).schedule(constant(1.0)), "warmup_cosine", "schedule"),
        (|b| b.plan(Plan::keep_all(4)).recompute(recompute::Policy::All), "recompute", "plan"),
    ];
    for (change, first, second) in rivals {
        let error = refused(change);
        let message = format!("{first} and {second} are both given, and decide the same");
        assert_eq!(error.to_string(), message);
    }
    assert!(matches!(refused(|b| b), Error::Split(SplitError::NoBatch)));
    let split = refused(|b| b.batch(10).micro_batch(4).accumulate(2));
    assert!(split.to_string().contains("makes 3 of them, not accumulate 2"), "{split}");
    let released = refused(|b| b.batch(8).micro_batch(4).released());
    assert!(matches!(released, Error::Setting { name: "accumulate", .. }), "{released}");
    let costs = refused(|b| b.batch(8).recompute(recompute::Policy::Bytes(1)));
    assert!(costs.to_string().contains("a rule without costs"), "{costs}");
    let other = refused(|b| b.batch(8).plan(Plan::keep_all(99)));
    assert!(matches!(other, Error::Recompute(_)), "{other}");
}

/// Any candle model, given as one closure.
#[test]
fn a_candle_model_of_one_closure_learns() {
    let model = |vb: VarBuilder<'static>| {
        let (up, down) = (linear(12, 16, vb.pp("up"))?, linear(16, 3, vb.pp("down"))?);
        Ok(Whole(move |x: &Tensor| x.flatten_from(1)?.apply(&up)?.relu()?.apply(&down)))
    };
    let built = Built::new(Policy::f32(), 0, &Device::Cpu, model).expect("builds");
    let trainer = Trainer::builder(built).batch(8).micro_batch(4).learning_rate(1e-2).build();
    let mut trainer = trainer.expect("valid");
    let batch = Net::Mixed.batch(8, 1, &Policy::f32());
    let losses: Vec<f64> = (0..20).map(|_| trainer.update(&batch).expect("updates").loss).collect();
    assert!(losses[19] < 0.8 * losses[0], "{losses:?}");
}

/// A small GPT-2 on synthetic tokens.
struct Tokens;

impl Tokens {
    fn data(&self) -> Synthetic {
        let kind = Kind::Tokens { n_tokens: 16, vocab: 50 };
        Synthetic { kind, n_samples: 8, seed: 1, device: Device::Cpu }
    }
}

impl Workload for Tokens {
    type Model = Box<dyn Segments>;

    fn build(&self, policy: &Policy) -> plan::Result<Built<Self::Model>> {
        let small = Gpt2Config::small();
        let config =
            Gpt2Config { vocab: 50, context: 16, model_dim: 16, n_heads: 2, n_layers: 2, ..small };
        let model = |vb| Ok(Box::new(config.build(vb)?) as Self::Model);
        Ok(Built::new(policy.clone(), 0, &Device::Cpu, model)?)
    }

    fn batch(&self, _policy: &Policy, n_samples: usize) -> plan::Result<Batch> {
        let data = self.data();
        let mut epoch = data.epoch(n_samples, Order::Sequential, Tail::Keep)?;
        Ok(epoch.next().expect("a batch")?)
    }

    fn batch_bytes(&self, _policy: &Policy, n_samples: usize) -> u64 {
        self.data().batch_bytes(n_samples)
    }
}

#[test]
fn a_plan_under_a_budget_is_the_recipe_of_its_choice() {
    // Nothing is measured, so everything fits; what is forbidden is not turned.
    let forbid = plan::Knob::ALL.to_vec();
    let space = Space { forbid, ..Space::new(8) };
    let planned = || Trainer::planned(&Tokens, &space, Some(1 << 30), &NoMeter).expect("fits");
    let mut trainer = planned().build().expect("valid");
    assert_eq!((trainer.split().batch(), trainer.split().micro_batch()), (8, 8));
    let by_hand = Tokens.build(&Policy::f32()).expect("builds");
    let mut by_hand = Trainer::builder(by_hand).batch(8).build().expect("valid");
    let batch = Tokens.batch(&Policy::f32(), 8).expect("a batch");
    for _ in 0..2 {
        let [a, b] = [&mut trainer, &mut by_hand].map(|t| t.update(&batch).expect("updates"));
        assert_eq!(a, b);
    }

    type Change =
        fn(tallow_train::Builder<Box<dyn Segments>>) -> tallow_train::Builder<Box<dyn Segments>>;
    let decided: [(Change, &str); 4] = [
        (|b| b.micro_batch(2), "micro_batch"),
        (|b| b.optimizer(optim::Config::new(Algorithm::SGD, 0.1)), "optimizer"),
        (|b| b.recompute(recompute::Policy::All), "recompute"),
        (|b| b.ema_decay(0.9), "ema_decay"),
    ];
    for (change, name) in decided {
        let error = change(planned()).build().err().expect("the plan has decided that");
        let message =
            format!("{name} and a plan under a budget are both given, and decide the same");
        assert_eq!(error.to_string(), message);
    }
    let average = Space { has_average: true, ..space.clone() };
    let builder = Trainer::planned(&Tokens, &average, None, &NoMeter).expect("fits");
    let trainer = builder.ema_decay(0.9).learning_rate(2e-3).clip_norm(1.0).build();
    assert!(trainer.is_ok());
}

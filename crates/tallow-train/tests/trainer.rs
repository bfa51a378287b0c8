//! Updates against plain arithmetic in f64.

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use tallow_data::{Batch, ImageSet, Order, Pixels, Tail};
use tallow_tensor::{Params, layers};
use tallow_testkit::{Tol, assert_close, values};
use tallow_train::{AdamW, BatchSplit, Epochs, Error, Event, Recipe, Schedule, Trainer, fit};

/// Flattens and multiplies: small enough to reason about.
struct Flat(layers::Linear);

impl ModuleT for Flat {
    fn forward_t(&self, x: &Tensor, _train: bool) -> Result<Tensor> {
        self.0.forward(&x.flatten_from(1)?)
    }
}

fn flat(seed: u64, dtype: DType) -> (Flat, Vec<(String, Var)>) {
    let params = Params::new(seed);
    let linear = layers::linear(12, 3, params.builder(dtype, &Device::Cpu)).expect("builds");
    (Flat(linear), params.trainable())
}

fn batch(n: usize, dtype: DType) -> Batch {
    let images = Tensor::from_vec(values(5, n * 12), (n, 1, 3, 4), &Device::Cpu).expect("images");
    let labels: Vec<u32> = (0..n as u32).map(|i| i % 3).collect();
    Batch {
        images: images.to_dtype(dtype).expect("a float"),
        labels: Tensor::from_vec(labels, n, &Device::Cpu).expect("labels"),
        first_index: 0,
    }
}

fn recipe(micro_batch: usize, schedule: Schedule) -> Recipe {
    let split = BatchSplit::derive(Some(10), Some(micro_batch), None, 1).expect("they fit");
    Recipe { split, optimizer: AdamW::default_for(0.01), schedule, label_smoothing: 0.0 }
}

fn all(params: &[(String, Var)]) -> Vec<f64> {
    let get = |v: &Var| v.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    params.iter().flat_map(|(_, v)| get(v).expect("values")).collect()
}

/// Weights after some updates in micro-batches of `micro_batch`.
fn train(micro_batch: usize) -> (Vec<f64>, Vec<f64>) {
    let (model, params) = flat(1, DType::F64);
    let recipe = recipe(micro_batch, Schedule::Constant);
    let mut trainer = Trainer::new(model, params.clone(), recipe).expect("valid");
    let losses = [10, 10, 7].map(|n| trainer.update(&batch(n, DType::F64)).expect("updates").loss);
    (all(&params), losses.to_vec())
}

#[test]
fn regrouping_micro_batches_changes_nothing_beyond_rounding() {
    let (want, want_losses) = train(10);
    for micro_batch in [1, 3, 4, 9] {
        let (got, losses) = train(micro_batch);
        assert_close("weights", &got, &want, Tol::Rel(1e-12));
        assert_close("losses", &losses, &want_losses, Tol::Rel(1e-14));
    }
}

#[test]
fn acc_3_the_rate_follows_applied_updates() {
    let schedule = Schedule::Linear { n_updates: 9 };
    let shares: Vec<f64> = (0..10).map(|k| schedule.share(k)).collect();
    let want: Vec<f64> = (0..10).map(|k| f64::from(9 - k) / 9.0).collect();
    assert_close("linear", &shares, &want, Tol::Rel(1e-15));
    let cosine = Schedule::Cosine { n_updates: 4 };
    let shares: Vec<f64> = (0..6).map(|k| cosine.share(k)).collect();
    let half = 0.5f64.sqrt() / 2.0;
    let want = [1.0, 0.5 + half, 0.5, 0.5 - half, 0.0, 0.0];
    assert_close("cosine", &shares, &want, Tol::Rel(1e-15));
    // A rate of 0 moves nothing: the schedule reaches the optimizer.
    let (model, params) = flat(1, DType::F64);
    let schedule = Schedule::Linear { n_updates: 1 };
    let mut trainer = Trainer::new(model, params.clone(), recipe(10, schedule)).expect("valid");
    trainer.update(&batch(10, DType::F64)).expect("the first update moves");
    let before = all(&params);
    trainer.update(&batch(10, DType::F64)).expect("the second is at rate 0");
    assert_eq!(all(&params), before);
}

/// Candle's fused layer norm loses the gradient of all before it.
struct Lossy {
    first: layers::Linear,
    norm: candle_nn::LayerNorm,
    last: layers::Linear,
}

impl ModuleT for Lossy {
    fn forward_t(&self, x: &Tensor, _train: bool) -> Result<Tensor> {
        let x = self.norm.forward(&self.first.forward(&x.flatten_from(1)?)?)?;
        self.last.forward(&x)
    }
}

#[test]
fn ker_1_a_lost_gradient_ends_the_first_update_by_name() {
    let params = Params::new(0);
    let vb = params.builder(DType::F32, &Device::Cpu);
    let model = Lossy {
        first: layers::linear(12, 8, vb.pp("first")).expect("builds"),
        norm: candle_nn::layer_norm(8, 1e-5, vb.pp("norm")).expect("builds"),
        last: layers::linear(8, 3, vb.pp("last")).expect("builds"),
    };
    let params = params.trainable();
    let before = all(&params);
    let mut trainer =
        Trainer::new(model, params.clone(), recipe(10, Schedule::Constant)).expect("valid");
    let error = trainer.update(&batch(10, DType::F32)).expect_err("must be refused");
    let Error::MissingGradients { names } = &error else { panic!("{error}") };
    assert_eq!(*names, ["first.bias", "first.weight", "norm.bias", "norm.weight"]);
    assert!(error.to_string().starts_with("4 parameters got no gradient"), "{error}");
    assert_eq!(all(&params), before);
}

#[test]
fn a_loss_that_is_not_finite_moves_nothing() {
    let (model, params) = flat(1, DType::F32);
    let before = all(&params);
    let mut trainer =
        Trainer::new(model, params.clone(), recipe(10, Schedule::Constant)).expect("valid");
    let mut bad = batch(10, DType::F32);
    bad.images = (bad.images * f64::NAN).expect("NaN");
    let error = trainer.update(&bad).expect_err("must be refused");
    assert!(matches!(error, Error::NonFinite { update: 1, .. }), "{error}");
    assert_eq!(all(&params), before);
    trainer.update(&batch(10, DType::F32)).expect("a good batch still works");
    assert_eq!(trainer.n_updates(), 1);
}

fn plan(epochs: u64, batch: usize, max_updates: Option<u64>) -> Epochs {
    let pixels = (0..23u16 * 12).map(|i| (i * 37 % 251) as u8).collect::<Vec<_>>();
    let labels = (0..23u8).map(|i| i % 3).collect::<Vec<_>>();
    let set = ImageSet::from_pixels(pixels, labels, [3, 4]).expect("images");
    let (train, held_out) = set.split(18).expect("two parts");
    let pixels = Pixels { dtype: DType::F64, device: Device::Cpu, mean: 0.5, std: 0.25 };
    Epochs { train, held_out, pixels, batch, epochs, max_updates, seed: 3 }
}

#[test]
fn fit_makes_exactly_the_updates_it_announced() {
    // 18 images in batches of 4 are 5 updates an epoch, the last of 2 images.
    for (epochs, max_updates, n_updates, n_samples, n_evaluations) in [
        (2, None, 10, 36, 2),
        (3, Some(7), 7, 26, 2),
        (1, Some(99), 5, 18, 1),
        (2, Some(5), 5, 18, 1),
    ] {
        let plan = plan(epochs, 4, max_updates);
        assert_eq!(plan.n_updates(), n_updates);
        let (model, params) = flat(1, DType::F64);
        let split = BatchSplit::derive(Some(4), Some(3), None, 1).expect("they fit");
        let recipe = Recipe { split, ..recipe(10, Schedule::Constant) };
        let mut trainer = Trainer::new(model, params, recipe).expect("valid");
        let (mut updates, mut evaluations) = (vec![], 0);
        let outcome = fit(&mut trainer, &plan, |event| match event {
            Event::Updated { n_updates, update } => updates.push((n_updates, update.n_samples)),
            Event::Evaluated { evaluation, .. } => {
                assert_eq!(evaluation.n_samples, 5);
                evaluations += 1;
            }
        })
        .expect("trains");
        assert_eq!((outcome.n_updates, outcome.n_samples), (n_updates, n_samples));
        assert_eq!(updates.len() as u64, n_updates);
        assert_eq!(updates.iter().map(|u| u.1).sum::<u64>(), n_samples);
        assert_eq!(evaluations, n_evaluations);
    }
}

#[test]
fn evaluation_is_the_mean_over_samples_whatever_the_batches() {
    let (model, params) = flat(1, DType::F64);
    let trainer = Trainer::new(model, params, recipe(10, Schedule::Constant)).expect("valid");
    let plan = plan(1, 4, None);
    let by = |n| {
        let batches = plan.train.batches(n, Order::Sequential, Tail::Keep, plan.pixels.clone());
        trainer.evaluate(batches.expect("batches")).expect("an evaluation")
    };
    let want = by(18);
    for n in [1, 4, 7] {
        let got = by(n);
        assert_close("loss", &[got.loss], &[want.loss], Tol::Rel(1e-14));
        assert_eq!((got.accuracy, got.n_samples), (want.accuracy, 18));
    }
}

#[test]
fn plans_of_no_updates_are_refused() {
    for (plan, has) in [
        (plan(0, 4, None), "epochs is 0"),
        (plan(1, 4, Some(0)), "max_updates is 0"),
        (plan(1, 19, None), "a batch of 19 is more than the 18 images"),
    ] {
        let error = plan.check().expect_err("must be refused").to_string();
        assert!(error.contains(has), "{error}");
    }
}

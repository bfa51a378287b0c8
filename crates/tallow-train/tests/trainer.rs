//! Updates against plain arithmetic in f64.

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use tallow_backward::Error as BackwardError;
use tallow_data::{Batch, Dataset, ImageSet, Images, Order, Pixels, Tail};
use tallow_models::Whole;
use tallow_tensor::{Params, layers};
use tallow_testkit::{Tol, assert_close, values};
use tallow_train::{
    Applied, BatchSplit, Error, Gradients, Recipe, Skip, Trainer, accum, optim,
    precision::{DynamicScale, LossScale, Masters, Policy},
    recompute::Plan,
};

/// Flattens and multiplies: small enough to reason about.
struct Flat(layers::Linear);

impl ModuleT for Flat {
    fn forward_t(&self, x: &Tensor, _train: bool) -> Result<Tensor> {
        self.0.forward(&x.flatten_from(1)?)
    }
}

fn flat(policy: Policy) -> (Flat, Masters, Params) {
    let params = Params::new(1);
    let masters = Masters::new(policy, params.clone()).expect("a valid policy");
    let linear = layers::linear(12, 3, masters.builder(&Device::Cpu)).expect("builds");
    (Flat(linear), masters, params)
}

fn trainer(policy: Policy, recipe: Recipe) -> (Trainer<Whole<Flat>>, Vec<(String, Var)>) {
    let (model, masters, params) = flat(policy);
    let trained = masters.params();
    (Trainer::new(Whole(model), masters, params.buffers(), recipe).expect("valid"), trained)
}

fn batch(n: usize, dtype: DType) -> Batch {
    let images = Tensor::from_vec(values(5, n * 12), (n, 1, 3, 4), &Device::Cpu).expect("images");
    let labels: Vec<u32> = (0..n as u32).map(|i| i % 3).collect();
    Batch {
        inputs: images.to_dtype(dtype).expect("a float"),
        targets: Tensor::from_vec(labels, n, &Device::Cpu).expect("labels"),
        first_index: 0,
    }
}

const RATE: f64 = 0.01;

fn schedule(shape: optim::Shape) -> optim::Schedule {
    optim::Schedule { peak: RATE, warmup_updates: 0, shape }
}

fn recipe(micro_batch: usize) -> Recipe {
    Recipe {
        split: BatchSplit::derive(Some(10), Some(micro_batch), None, 1).expect("they fit"),
        optimizer: optim::Config::new(optim::Algorithm::ADAMW, RATE),
        schedule: schedule(optim::Shape::Constant),
        loss_scale: LossScale::off(),
        accum: accum::AccumConfig { dtype: accum::AccumDType::F32, warn_above: 8 },
        clip: accum::Clip::Off,
        skip_above_norm: f64::INFINITY,
        gradients: Gradients::Summed,
        recompute: Plan::keep_all(2),
        saved: tallow_train::recompute::Saved::AsIs,
        check: tallow_train::recompute::Check::Shape,
        label_smoothing: 0.0,
        ema_decay: None,
    }
}

fn all(params: &[(String, Var)]) -> Vec<f64> {
    let get = |v: &Var| v.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    params.iter().flat_map(|(_, v)| get(v).expect("values")).collect()
}

/// Weights and losses after some updates in micro-batches of `micro_batch`.
fn train(micro_batch: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut trainer, params) = trainer(Policy::f32(), recipe(micro_batch));
    let losses = [10, 10, 7].map(|n| trainer.update(&batch(n, DType::F32)).expect("updates").loss);
    (all(&params), losses.to_vec())
}

#[test]
fn regrouping_micro_batches_changes_nothing_beyond_rounding() {
    let (want, want_losses) = train(10);
    for micro_batch in [1, 3, 4, 9] {
        let (got, losses) = train(micro_batch);
        // Sums of ten f32 gradients in another order; AdamW passes on their relative error.
        let tol = Tol::Rel(10.0 * 16.0 * f64::from(f32::EPSILON));
        assert_close("weights", &got, &want, tol);
        assert_close("losses", &losses, &want_losses, tol);
    }
}

#[test]
fn acc_3_the_rate_follows_applied_updates() {
    // A rate of 0 moves nothing: the schedule reaches the optimizer.
    let shape = optim::Shape::Linear { total_updates: 1, end: 0.0 };
    let (mut trainer, params) =
        trainer(Policy::f32(), Recipe { schedule: schedule(shape), ..recipe(10) });
    let start = all(&params);
    let _moved = trainer.update(&batch(10, DType::F32)).expect("the first update moves");
    let before = all(&params);
    assert_ne!(start, before);
    let _still = trainer.update(&batch(10, DType::F32)).expect("the second is at rate 0");
    assert_eq!(all(&params), before);
}

#[test]
fn clipping_bounds_the_update() {
    // Plain descent at rate 1: the step is the gradient, whose norm is clipped to 1e-3.
    let optimizer = optim::Config::new(optim::Algorithm::SGD, 1.0);
    let schedule = optim::Schedule { peak: 1.0, ..schedule(optim::Shape::Constant) };
    let clip = accum::Clip::Norm(1e-3);
    let (mut trainer, params) =
        trainer(Policy::f32(), Recipe { optimizer, schedule, clip, ..recipe(4) });
    let before = all(&params);
    let _update = trainer.update(&batch(10, DType::F32)).expect("updates");
    let squares = all(&params).into_iter().zip(&before).map(|(a, b)| (a - b).powi(2));
    // Weights of size 0.3 carry their own rounding into the difference.
    assert_close("norm", &[squares.sum::<f64>().sqrt()], &[1e-3], Tol::Rel(1e-3));
}

#[test]
fn scl_3_an_overflow_moves_the_scale_and_the_position_only() {
    let (init, ceiling) = (2f32.powi(40), 2f32.powi(40));
    let dynamic = DynamicScale { init, ceiling, ..DynamicScale::STANDARD };
    let loss_scale = LossScale::dynamic(dynamic).expect("valid");
    let (mut trainer, params) =
        trainer(Policy::f16().uniform(), Recipe { loss_scale, ..recipe(5) });
    let before = all(&params);
    let update = trainer.update(&batch(10, DType::F16)).expect("a skip is no error");
    assert_eq!(update.outcome, Applied::Skipped(Skip::Overflow { name: "bias".to_string() }));
    assert_eq!(all(&params), before);
    assert_eq!((trainer.n_windows(), trainer.n_updates()), (1, 0));
    assert_eq!(trainer.loss_scale().value(), init / 2.0);
    assert_eq!(trainer.loss_scale().skips().overflow, 1);
    // It recovers: the scale falls until f16 gradients fit.
    for _ in 0..40 {
        let _update = trainer.update(&batch(10, DType::F16)).expect("no limit is reached");
        if trainer.n_updates() > 0 {
            break;
        }
    }
    assert_ne!(all(&params), before);
}

#[test]
fn every_precision_learns_the_same_first_step_within_its_rounding() {
    let step = |policy: Policy, dtype| {
        let (mut trainer, params) = trainer(policy, recipe(10));
        let update = trainer.update(&batch(10, dtype)).expect("updates");
        assert_eq!(update.outcome, Applied::Yes);
        (update.loss, all(&params))
    };
    let (want_loss, want) = step(Policy::f32(), DType::F32);
    for (policy, dtype, eps) in [
        (Policy::bf16().uniform(), DType::BF16, 1.0 / 128.0),
        (Policy::f16().uniform(), DType::F16, 1.0 / 1024.0),
        (Policy::fp8_stored(DType::BF16).uniform(), DType::BF16, 1.0 / 8.0),
    ] {
        let (loss, got) = step(policy.clone(), dtype);
        assert_close("loss", &[loss], &[want_loss], Tol::Rel(eps));
        // AdamW's first step has the size of the rate, whatever the gradient: signs may differ where
        // a gradient is small, so weights are within two rates.
        assert_close("weights", &got, &want, Tol::Rel(2.0 * RATE / 0.29));
    }
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
    let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
    let vb = masters.builder(&Device::Cpu);
    let model = Lossy {
        first: layers::linear(12, 8, vb.pp("first")).expect("builds"),
        norm: candle_nn::layer_norm(8, 1e-5, vb.pp("norm")).expect("builds"),
        last: layers::linear(8, 3, vb.pp("last")).expect("builds"),
    };
    let params = params.trainable();
    let before = all(&params);
    let mut trainer = Trainer::new(Whole(model), masters, vec![], recipe(10)).expect("valid");
    let error = trainer.update(&batch(10, DType::F32)).expect_err("must be refused");
    let Error::Backward(BackwardError::MissingGradients { names }) = &error else {
        panic!("{error}")
    };
    assert_eq!(*names, ["first.bias", "first.weight", "norm.bias", "norm.weight"]);
    assert!(error.to_string().starts_with("4 parameters got no gradient"), "{error}");
    assert_eq!(all(&params), before);
}

#[test]
fn a_gradient_that_is_not_finite_moves_nothing() {
    let (mut trainer, params) = trainer(Policy::f32(), recipe(10));
    let before = all(&params);
    let mut bad = batch(10, DType::F32);
    bad.inputs = (bad.inputs * f64::NAN).expect("NaN");
    let error = trainer.update(&bad).expect_err("must be refused");
    let Error::Backward(BackwardError::NonFinite { update: 1, name, .. }) = &error else {
        panic!("{error}")
    };
    assert_eq!(name, "bias");
    assert_eq!(all(&params), before);
    let _good = trainer.update(&batch(10, DType::F32)).expect("a good batch still works");
    assert_eq!(trainer.n_updates(), 1);
}

/// A batch norm before the linear layer.
struct Normed(layers::BatchNorm2d, Flat);

impl ModuleT for Normed {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.1.forward_t(&self.0.forward_t(x, train)?, train)
    }
}

#[test]
fn a_refused_batch_leaves_running_statistics_alone() {
    let params = Params::new(1);
    let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
    let vb = masters.builder(&Device::Cpu);
    let norm = layers::batch_norm2d(1, tallow_tensor::ops::Then::Identity, vb.pp("bn"));
    let linear = layers::linear(12, 3, vb.pp("fc")).expect("builds");
    let model = Normed(norm.expect("builds"), Flat(linear));
    let buffers = params.buffers();
    let before = all(&buffers);
    assert_eq!(before, [0.0, 1.0]);
    let mut trainer =
        Trainer::new(Whole(model), masters, buffers.clone(), recipe(5)).expect("valid");
    let mut bad = batch(10, DType::F32);
    bad.inputs = (bad.inputs * f64::INFINITY).expect("infinities");
    trainer.update(&bad).expect_err("must be refused");
    assert_eq!(all(&buffers), before);
    let _good = trainer.update(&batch(10, DType::F32)).expect("a good batch");
    assert_ne!(all(&buffers), before);
}

#[test]
fn a_batch_that_fails_midway_leaves_nothing_behind() {
    // Micro-batches of 3 leave one sample, whose 1x1 planes have no variance.
    let build = || {
        let params = Params::new(1);
        let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
        let vb = masters.builder(&Device::Cpu);
        let norm = layers::batch_norm2d(12, tallow_tensor::ops::Then::Identity, vb.pp("bn"));
        let linear = layers::linear(12, 3, vb.pp("fc")).expect("builds");
        let model = Normed(norm.expect("builds"), Flat(linear));
        let all = params.all();
        (Trainer::new(Whole(model), masters, params.buffers(), recipe(3)).expect("valid"), all)
    };
    let narrow = |n: usize| {
        let whole = batch(n, DType::F32);
        Batch { inputs: whole.inputs.reshape((n, 12, 1, 1)).expect("12 channels"), ..whole }
    };
    let (mut failed, got) = build();
    let before = all(&got);
    failed.update(&narrow(10)).expect_err("the last piece has one sample");
    assert_eq!(all(&got), before);
    let (mut fresh, want) = build();
    let (a, b) = (failed.update(&narrow(9)), fresh.update(&narrow(9)));
    assert_eq!(a.expect("updates").loss, b.expect("updates").loss);
    assert_eq!(all(&got), all(&want));
}

/// Candle's transposed convolution has no backward.
struct Transposed(Var, Flat);

impl ModuleT for Transposed {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let (n, ..) = x.dims4()?;
        let x = x.reshape((n, 1, 12))?.conv_transpose1d(&self.0, 0, 0, 1, 1, 1)?;
        self.1.forward_t(&x, train)
    }
}

#[test]
fn spare_12_an_operation_without_backward_is_named_at_the_first_step() {
    let (flat, masters, _) = flat(Policy::f32());
    let kernel = Var::ones((1, 1, 1), DType::F32, &Device::Cpu).expect("a variable");
    let model = Transposed(kernel, flat);
    let mut trainer = Trainer::new(Whole(model), masters, vec![], recipe(10)).expect("valid");
    let error = trainer.update(&batch(10, DType::F32)).expect_err("must be refused");
    assert!(error.to_string().contains("conv-transpose1d"), "{error}");
}

#[test]
fn evaluation_is_the_mean_over_samples_whatever_the_batches() {
    let (trainer, _) = trainer(Policy::f32(), recipe(10));
    let pixels = (0..18u16 * 12).map(|i| (i * 37 % 251) as u8).collect::<Vec<_>>();
    let labels = (0..18u8).map(|i| i % 3).collect::<Vec<_>>();
    let set = ImageSet::from_pixels(pixels, labels, [3, 4]).expect("images");
    let pixels =
        Pixels { dtype: DType::F32, device: Device::Cpu, mean: vec![0.5], std: vec![0.25] };
    let set = Images { set, pixels };
    let by = |n| {
        let batches = set.epoch(n, Order::Sequential, Tail::Keep);
        trainer.evaluate(batches.expect("batches")).expect("an evaluation")
    };
    let want = by(18);
    for n in [1, 4, 7] {
        let got = by(n);
        assert_close("loss", &[got.loss], &[want.loss], Tol::Rel(4.0 * f64::from(f32::EPSILON)));
        assert_eq!((got.accuracy, got.n_samples), (want.accuracy, 18));
    }
}

//! Small networks, recipes, plans, and runs of training down to the bits.
#![allow(dead_code)] // each test binary uses its own part

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use std::sync::Arc;
use tallow_data::Batch;
use tallow_models::{Gpt2Config, ResNetConfig, Score, Segments};
use tallow_tensor::{
    layers::{self, BatchNorm2d, Dropout, Linear},
    ops::{self, CrossEntropy, Loss, Then},
    pass,
};
use tallow_testkit::values;
use tallow_train::{
    BatchSplit, Gradients, Params, Recipe, Trainer, Update, accum, optim,
    precision::{DynamicScale, LossScale, LossScaleState, Masters, Policy},
    recompute::{self, Again, Chain, Plan, Segment, SegmentCost, Step},
};

pub(crate) const RATE: f64 = 0.01;
/// Relative distance of neighbouring f32 numbers.
pub(crate) const EPS: f64 = f32::EPSILON as f64;

pub(crate) type Boxed = Box<dyn Segments>;

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Net {
    /// The digits ResNet on 12x12 images.
    Digits,
    /// ResNet-18 on 32x32 images: the last planes have one pixel.
    ResNet18,
    /// Two blocks, dropout 0.1, the head tied to the embedding.
    Gpt2,
    /// [`Mixed`].
    Mixed,
}

impl Net {
    pub(crate) fn build(self, policy: &Policy) -> (Boxed, Masters, Params) {
        let params = Params::new(1);
        let masters = Masters::new(policy.clone(), params.clone()).expect("a valid policy");
        let vb = masters.builder(&Device::Cpu);
        let model: Boxed = match self {
            Net::Digits => Box::new(ResNetConfig::digits().build(vb).expect("builds")),
            Net::ResNet18 => Box::new(ResNetConfig::resnet18(10).build(vb).expect("builds")),
            Net::Gpt2 => {
                let sizes =
                    Gpt2Config { vocab: 40, context: 16, model_dim: 16, ..Gpt2Config::small() };
                let config = Gpt2Config { n_layers: 2, n_heads: 2, dropout_seed: 3, ..sizes };
                Box::new(config.build(vb).expect("builds"))
            }
            Net::Mixed => Box::new(Mixed::new(vb).expect("builds")),
        };
        (model, masters, params)
    }

    /// A batch of `n` samples, the same for the same `seed`.
    pub(crate) fn batch(self, n: usize, seed: u64, policy: &Policy) -> Batch {
        let ids = |n: usize, seed: u64, m: f64| -> Vec<u32> {
            values(seed, n).into_iter().map(|v| ((v + 1.0) / 2.0 * m) as u32).collect()
        };
        let image = |shape: [usize; 3]| {
            let [c, h, w] = shape;
            let x = Tensor::from_vec(values(seed, n * c * h * w), (n, c, h, w), &Device::Cpu);
            x.and_then(|x| x.to_dtype(policy.compute)).expect("images")
        };
        let (inputs, n_classes) = match self {
            Net::Digits => (image([1, 12, 12]), 10.0),
            Net::ResNet18 => (image([3, 32, 32]), 10.0),
            Net::Mixed => (image([1, 3, 4]), 3.0),
            Net::Gpt2 => {
                let tokens = |seed| {
                    Tensor::from_vec(ids(8 * n, seed, 40.0), (n, 8), &Device::Cpu).expect("tokens")
                };
                return Batch {
                    inputs: tokens(seed),
                    targets: tokens(seed + 1000),
                    first_index: 0,
                };
            }
        };
        let targets = Tensor::from_vec(ids(n, seed + 1000, n_classes), n, &Device::Cpu);
        Batch { inputs, targets: targets.expect("classes"), first_index: 0 }
    }
}

/// Everything with a hidden state: batch norm, dropout, and matrices around them.
pub(crate) struct Mixed {
    norm: BatchNorm2d,
    first: Linear,
    dropout: Dropout,
    last: Linear,
}

impl Mixed {
    fn new(vb: candle_nn::VarBuilder) -> Result<Self> {
        Ok(Self {
            norm: layers::batch_norm2d(1, Then::Identity, vb.pp("bn"))?,
            first: layers::linear(12, 16, vb.pp("first"))?,
            dropout: Dropout::new(0.25, 5)?,
            last: layers::linear(16, 3, vb.pp("last"))?,
        })
    }
}

impl Segments for Mixed {
    fn names(&self) -> Vec<String> {
        ["bn", "first", "drop"].map(String::from).to_vec()
    }

    fn head_name(&self) -> String {
        "last".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, train: bool) -> Result<Tensor> {
        match index {
            0 => self.norm.forward_t(x, train),
            1 => self.first.forward(&x.flatten_from(1)?)?.tanh(),
            2 => self.dropout.forward_t(x, train),
            _ => panic!("no segment {index}"),
        }
    }

    fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        Ok(ops::cross_entropy(&self.last.forward(x)?, targets, cfg)?)
    }

    fn score(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        Score::of_logits(&self.last.forward(x)?, targets, cfg)
    }
}

/// AdamW with decay, f32 sums, nothing else turned on; `n_segments` without the head.
pub(crate) fn recipe(batch: usize, micro_batch: usize, n_segments: usize) -> Recipe {
    let optimizer = optim::Config::new(optim::Algorithm::ADAMW, RATE);
    Recipe {
        split: BatchSplit::derive(Some(batch), Some(micro_batch), None, 1).expect("they fit"),
        optimizer: optim::Config { weight_decay: 0.01, ..optimizer },
        schedule: constant(RATE),
        loss_scale: LossScale::off(),
        accum: accum::AccumConfig { dtype: accum::AccumDType::F32, warn_above: 8 },
        clip: accum::Clip::Off,
        skip_above_norm: f64::INFINITY,
        gradients: Gradients::Summed,
        recompute: Plan::keep_all(n_segments + 1),
        saved: recompute::Saved::AsIs,
        check: recompute::Check::Shape,
        label_smoothing: 0.0,
        ema_decay: None,
    }
}

pub(crate) fn constant(peak: f64) -> optim::Schedule {
    optim::Schedule { peak, warmup_updates: 0, shape: optim::Shape::Constant }
}

/// From `init`; falls by 2^12 at an overflow and doubles with every clean window.
pub(crate) fn dynamic(init: f32) -> LossScale {
    let backoff = 1.0 / 4096.0;
    let config = DynamicScale { init, backoff, growth_windows: 1, ..DynamicScale::STANDARD };
    LossScale::dynamic(config).expect("valid")
}

/// A trainer and all it moves.
pub(crate) struct Setup {
    pub(crate) net: Net,
    pub(crate) policy: Policy,
    pub(crate) trainer: Trainer<Boxed>,
    pub(crate) params: Params,
}

impl Setup {
    /// `change` gets the plain recipe of this split.
    pub(crate) fn new(
        net: Net,
        policy: &Policy,
        (batch, micro_batch): (usize, usize),
        change: impl FnOnce(Recipe) -> Recipe,
    ) -> Self {
        let (model, masters, params) = net.build(policy);
        let recipe = change(recipe(batch, micro_batch, model.names().len()));
        let trainer = Trainer::new(model, masters, params.buffers(), recipe).expect("valid");
        Self { net, policy: policy.clone(), trainer, params }
    }

    /// An update on the batch of this `seed`.
    pub(crate) fn update(&mut self, n: usize, seed: u64) -> tallow_train::Result<Update> {
        self.trainer.update(&self.net.batch(n, seed, &self.policy))
    }

    pub(crate) fn state(&self) -> State {
        State {
            values: bits(&self.params.all()),
            scale: self.trainer.loss_scale().state(),
            n_updates: self.trainer.n_updates(),
        }
    }
}

/// Weights and statistics by their bits, the loss scale, the count of updates.
#[derive(Clone, PartialEq)]
pub(crate) struct State {
    pub(crate) values: Vec<(String, Vec<u32>)>,
    pub(crate) scale: LossScaleState,
    pub(crate) n_updates: u64,
}

impl State {
    /// The message names what differs, and not millions of numbers.
    #[track_caller]
    pub(crate) fn assert_same(&self, want: &State, what: &str) {
        assert_eq!(self.values.len(), want.values.len(), "{what}: parameters");
        for ((name, got), (_, want)) in self.values.iter().zip(&want.values) {
            let n = got.iter().zip(want).filter(|(a, b)| a != b).count();
            assert_eq!((got.len(), n), (want.len(), 0), "{what}: {n} elements of {name} differ");
        }
        assert_eq!(self.scale, want.scale, "{what}: loss scale");
        assert_eq!(self.n_updates, want.n_updates, "{what}: updates");
    }

    pub(crate) fn floats(&self) -> Vec<f64> {
        let values = self.values.iter().flat_map(|(_, bits)| bits);
        values.map(|bits| f64::from(f32::from_bits(*bits))).collect()
    }
}

pub(crate) fn bits(params: &[(String, Var)]) -> Vec<(String, Vec<u32>)> {
    let of = |var: &Var| {
        assert_eq!(var.dtype(), DType::F32, "masters and statistics are f32");
        let values = var.flatten_all().and_then(|v| v.to_vec1::<f32>()).expect("values");
        tallow_testkit::bits(&values)
    };
    params.iter().map(|(name, var)| (name.clone(), of(var))).collect()
}

/// Outcomes of updates with the bits of their losses.
pub(crate) fn seen(updates: &[Update]) -> Vec<(u64, String)> {
    updates.iter().map(|u| (u.loss.to_bits(), format!("{:?}", u.outcome))).collect()
}

/// As deep as can be: to go back through a segment, all before it are run again from the first.
pub(crate) fn nested(first: usize, end: usize) -> Plan {
    let before = if first + 1 < end { nested(first, end - 1).0 } else { Vec::new() };
    let again = Plan([before, vec![Step::Keep(end - 1)]].concat());
    Plan(vec![Step::Redo { first, end, again }])
}

/// The position of tallow's random draws as a hook of recomputation.
pub(crate) fn here() -> Again {
    let at = pass::position();
    Box::new(move |again| pass::replay(at, again))
}

/// What `model` costs on `batch` by the tensors in its graphs, a second a segment: the same on
/// every machine.
pub(crate) fn costs(model: &dyn Segments, batch: &Batch) -> Vec<SegmentCost> {
    let cfg = CrossEntropy { ignore_index: -100, label_smoothing: 0.0 };
    let n = model.names().len();
    let mut segments: Vec<_> = model
        .names()
        .into_iter()
        .enumerate()
        .map(|(i, name)| Segment::new(name, move |x: &Tensor| model.run(i, x, true)))
        .collect();
    segments.push(Segment::new(model.head_name(), |x: &Tensor| {
        Ok(model.loss(x, &batch.targets, &cfg)?.sum)
    }));
    let chain = Chain { replay: Arc::new(here), ..Chain::new(segments) };
    let kept = chain.estimate_kept_bytes(&batch.inputs).expect("runs");
    let mut outputs = vec![4; n + 1];
    pass::replay(pass::position(), || {
        let mut x = batch.inputs.clone();
        for (i, bytes) in outputs[..n].iter_mut().enumerate() {
            x = model.run(i, &x, true).expect("runs").detach();
            *bytes = (x.elem_count() * x.dtype().size_in_bytes()) as u64;
        }
    });
    let cost = |i: usize| {
        let kept_bytes = kept[i].max(outputs[i]);
        let input_grad_bytes = if i == 0 { 0 } else { outputs[i - 1] };
        SegmentCost {
            input_grad_bytes,
            output_bytes: outputs[i],
            kept_bytes,
            forward_peak_bytes: outputs[i],
            tracked_forward_peak_bytes: kept_bytes,
            backward_peak_bytes: outputs[i] + input_grad_bytes,
            forward_secs: 1.0,
            backward_secs: 2.0,
            ..SegmentCost::unmeasured(chain.segments[i].name.clone())
        }
    };
    (0..=n).map(cost).collect()
}

/// A plan of each policy, a deep one, and the one that holds least.
pub(crate) fn plans(net: Net, n_samples: usize) -> Vec<Plan> {
    use recompute::Policy::{All, Every, Named};
    let (model, ..) = net.build(&Policy::f32());
    let costs = costs(&*model, &net.batch(n_samples, 1, &Policy::f32()));
    let tightest = match recompute::plan_chain(&costs, 0) {
        Err(recompute::Error::NothingFits { smallest_bytes, .. }) => {
            recompute::plan_chain(&costs, smallest_bytes).expect("it just said so").plan
        }
        other => panic!("0 bytes are enough: {other:?}"),
    };
    let named = Named(vec![costs[1].name.clone(), model.head_name()]);
    let mut plans: Vec<Plan> =
        [All, Every(2), named].iter().map(|p| p.plan(&costs).expect("no costs needed")).collect();
    plans.extend([nested(0, costs.len()), tightest]);
    for plan in &plans {
        assert!(plan.n_redone() > 0, "{plan} recomputes nothing");
    }
    plans
}

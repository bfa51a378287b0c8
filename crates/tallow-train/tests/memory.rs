//! Live bytes from update to update, by the counting allocator. One test: it has the process to
//! itself.

mod support;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use std::alloc::System;
use support::{EPS, Net, Setup};
use tallow_data::Batch;
use tallow_memory::{CountingAllocator, peak_during};
use tallow_models::{Score, Segments};
use tallow_tensor::{
    Params,
    layers::{self, Linear},
    ops::{self, CrossEntropy, Loss},
};
use tallow_testkit::values;
use tallow_train::{
    Applied, Gradients, Recipe, Trainer, Update, optim,
    precision::{Masters, Policy},
};

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator::new(System);

const WIDTH: usize = 512;
const FROZEN_BYTES: u64 = (WIDTH * WIDTH * 4) as u64;
/// What a thread of candle's products keeps at most: a graph kept by each of 45 losses is more.
const CANDLE_SCRATCH_BYTES: u64 = 1 << 20;
const RANK: usize = 2;
/// Down, up and the head's weight and bias.
const N_TRAINABLE: u64 = (2 * WIDTH * RANK + 3 * WIDTH + 3) as u64;

/// How the base is frozen.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Frozen {
    /// A tensor that is no variable, behind tallow's product.
    Tensor,
    /// The same behind candle's.
    CandleTensor,
    /// A variable that is none of the trainer's parameters, in a segment of its own.
    Foreign,
    /// A parameter whose group is frozen.
    Group,
}

/// A small adapter, then a large frozen weight: the gradient must pass through it.
struct Adapted {
    how: Frozen,
    down: Linear,
    up: Linear,
    base: Tensor,
    head: Linear,
}

impl Segments for Adapted {
    fn names(&self) -> Vec<String> {
        ["adapter", "base"].map(String::from).to_vec()
    }

    fn head_name(&self) -> String {
        "head".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, _: bool) -> Result<Tensor> {
        match (index, self.how) {
            (0, _) => x + self.up.forward(&self.down.forward(x)?)?,
            (_, Frozen::CandleTensor) => x.matmul(&self.base.t()?),
            _ => Ok(ops::linear(x, &self.base, None)?),
        }
    }

    fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        Ok(ops::cross_entropy(&self.head.forward(x)?, targets, cfg)?)
    }

    fn score(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        Score::of_logits(&self.head.forward(x)?, targets, cfg)
    }
}

fn adapted(how: Frozen, gradients: Gradients) -> (Trainer<Adapted>, Params) {
    let params = Params::new(0);
    let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
    let vb = masters.builder(&Device::Cpu);
    let small = |i, o, name| layers::linear_no_bias(i, o, vb.pp(name)).expect("builds");
    let (down, up) = (small(WIDTH, RANK, "down"), small(RANK, WIDTH, "up"));
    let base = match how {
        Frozen::Group => small(WIDTH, WIDTH, "base").weight().clone(),
        _ => {
            let base = Tensor::from_vec(values(3, WIDTH * WIDTH), (WIDTH, WIDTH), &Device::Cpu);
            let base = (base.expect("a matrix") * (1.0 / WIDTH as f64)).expect("a product");
            let base = base.to_dtype(DType::F32).expect("a float");
            if how == Frozen::Foreign {
                Var::from_tensor(&base).expect("a variable").into_inner()
            } else {
                base
            }
        }
    };
    let head = layers::linear(WIDTH, 3, vb.pp("head")).expect("builds");
    let mut recipe = Recipe { gradients, ..support::recipe(4, 4, 2) };
    let pattern = "base.*".to_string();
    recipe.optimizer.groups = vec![optim::Group { pattern, treatment: optim::Treatment::Frozen }];
    let model = Adapted { how, down, up, base, head };
    (Trainer::new(model, masters, vec![], recipe).expect("valid"), params)
}

fn rows(seed: u64) -> Batch {
    let x = Tensor::from_vec(values(seed, 4 * WIDTH), (4, WIDTH), &Device::Cpu);
    Batch {
        inputs: x.and_then(|x| x.to_dtype(DType::F32)).expect("rows"),
        targets: Tensor::from_vec(vec![0u32, 1, 2, 0], 4, &Device::Cpu).expect("classes"),
        first_index: 0,
    }
}

/// Live bytes after updates 5 and 50; every report is kept.
fn live(mut update: impl FnMut(u64) -> Update) -> [u64; 2] {
    let mut kept = Vec::with_capacity(50);
    let mut live = Vec::with_capacity(50);
    for seed in 0..50 {
        kept.push(update(seed));
        live.push(ALLOCATOR.current_bytes());
    }
    assert!(kept.iter().all(|update| update.outcome == Applied::Yes && update.loss.is_finite()));
    [live[4], live[49]]
}

fn mem_1_a_frozen_weight_costs_nothing_and_no_loss_keeps_its_graph() {
    for gradients in [Gradients::Summed, Gradients::Released] {
        for how in [Frozen::Tensor, Frozen::CandleTensor, Frozen::Foreign, Frozen::Group] {
            let what = format!("{how:?}, {gradients:?}");
            let (mut trainer, params) = adapted(how, gradients);
            let [at_5, at_50] = live(|seed| trainer.update(&rows(seed)).expect("updates"));
            if how == Frozen::CandleTensor {
                // Each thread of candle's own products keeps its scratch from its first one on.
                let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
                let grown = at_50.saturating_sub(at_5);
                assert!(grown <= n_threads * CANDLE_SCRATCH_BYTES, "{what}: {grown}");
            } else {
                assert_eq!(at_5, at_50, "{what}: live bytes after updates 5 and 50");
            }
            // Two moments, and the sums: of what is trained, and nothing else.
            let n_sums = if gradients == Gradients::Summed { 1 } else { 0 };
            assert_eq!(trainer.held_bytes(), (2 + n_sums) * 4 * N_TRAINABLE, "{what}");
            let (_update, peak) = peak_during(&ALLOCATOR, || trainer.update(&rows(0)));
            println!(
                "MEM-1 {what}: {peak} bytes above what is held; the frozen weight has {FROZEN_BYTES}"
            );
            if how == Frozen::Tensor {
                assert!(peak < FROZEN_BYTES, "{what}: {peak}");
            }
            // Candle makes the gradient of an operand that no one wants, and a variable that is not
            // the trainer's has one: three copies (zeros, the op's, their sum), which die with
            // their segment.
            assert!(peak < 4 * FROZEN_BYTES, "{what}: {peak}");
            drop(params);
        }
    }
}

fn mem_1_a_frozen_parameter_has_no_part_in_the_norm() {
    let norm = |how| {
        let (trainer, params) = adapted(how, Gradients::Summed);
        if let Some((_, base)) = params.all().into_iter().find(|(name, _)| name == "base.weight") {
            let (plain, _) = adapted(Frozen::Tensor, Gradients::Summed);
            base.set(&plain.model().base).expect("the same values");
        }
        drop(trainer);
        let (model, masters) = rebuilt(how, &params);
        let mut recipe = Recipe { skip_above_norm: 1e-12, ..support::recipe(4, 4, 2) };
        let pattern = "base.*".to_string();
        recipe.optimizer.groups =
            vec![optim::Group { pattern, treatment: optim::Treatment::Frozen }];
        let mut trainer = Trainer::new(model, masters, vec![], recipe).expect("valid");
        match trainer.update(&rows(0)).expect("a skip is no error").outcome {
            Applied::Skipped(tallow_train::Skip::Norm { norm, .. }) => norm,
            other => panic!("{other:?}"),
        }
    };
    let (frozen, absent) = (norm(Frozen::Group), norm(Frozen::Tensor));
    tallow_testkit::assert_close("norm", &[frozen], &[absent], tallow_testkit::Tol::Rel(4.0 * EPS));
}

/// The same model on the same store.
fn rebuilt(how: Frozen, params: &Params) -> (Adapted, Masters) {
    let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
    let vb = masters.builder(&Device::Cpu);
    let small = |i, o, name| layers::linear_no_bias(i, o, vb.pp(name)).expect("builds");
    let (down, up) = (small(WIDTH, RANK, "down"), small(RANK, WIDTH, "up"));
    let base = match how {
        Frozen::Group => small(WIDTH, WIDTH, "base").weight().clone(),
        _ => adapted(how, Gradients::Summed).0.model().base.clone(),
    };
    let head = layers::linear(WIDTH, 3, vb.pp("head")).expect("builds");
    (Adapted { how, down, up, base, head }, masters)
}

fn the_digits_resnet_holds_the_same_after_5_and_50_updates() {
    for format in [optim::StateFormat::F32, optim::StateFormat::BITS8] {
        let mut setup = Setup::new(Net::Digits, &Policy::f32(), (4, 2), |mut recipe| {
            recipe.optimizer.format = format;
            Recipe { recompute: support::nested(0, 5), ..recipe }
        });
        let [at_5, at_50] = live(|seed| {
            let update = setup.update(4, seed).expect("updates");
            assert_eq!(update.n_micro_batches, 2);
            update
        });
        assert_eq!(at_5, at_50, "{format:?}: live bytes after updates 5 and 50");
    }
}

#[test]
fn mem_1() {
    tallow_testkit::with_one_worker();
    mem_1_a_frozen_weight_costs_nothing_and_no_loss_keeps_its_graph();
    mem_1_a_frozen_parameter_has_no_part_in_the_norm();
    the_digits_resnet_holds_the_same_after_5_and_50_updates();
}

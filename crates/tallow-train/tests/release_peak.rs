//! How many layers' gradients are alive at once, by the counting allocator. One test: it has the
//! process to itself.

mod support;

use candle_core::{DType, Device, Module, Result, Tensor};
use std::alloc::System;
use support::{constant, nested, recipe};
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
    Gradients, Recipe, Trainer, accum, optim,
    precision::{Masters, Policy},
    recompute::Plan,
};

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator::new(System);

const WIDTH: usize = 512;
const LAYER_BYTES: u64 = (WIDTH * WIDTH * 4) as u64;
const N_SAMPLES: usize = 4;

/// Equal layers, each a segment; the last one's output are the logits.
struct Wide(Vec<Linear>);

impl Segments for Wide {
    fn names(&self) -> Vec<String> {
        (0..self.0.len()).map(|i| format!("layer.{i}")).collect()
    }

    fn head_name(&self) -> String {
        "loss".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, _: bool) -> Result<Tensor> {
        self.0[index].forward(x)?.tanh()
    }

    fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        Ok(ops::cross_entropy(x, targets, cfg)?)
    }

    fn score(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        Score::of_logits(x, targets, cfg)
    }
}

fn batch() -> Batch {
    let cpu = Device::Cpu;
    let x = Tensor::from_vec(values(1, N_SAMPLES * WIDTH), (N_SAMPLES, WIDTH), &cpu);
    Batch {
        inputs: x.and_then(|x| x.to_dtype(DType::F32)).expect("rows"),
        targets: Tensor::from_vec(vec![0u32, 1, 2, 3], N_SAMPLES, &cpu).expect("classes"),
        first_index: 0,
    }
}

/// Bytes held at the peak of each of three updates above weights and state, and what was trained.
fn peaks(
    n_layers: usize,
    gradients: Gradients,
    clip: accum::Clip,
    plan: Plan,
) -> (Vec<u64>, Vec<Vec<u32>>) {
    let start = ALLOCATOR.current_bytes();
    let params = Params::new(0);
    let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
    let vb = masters.builder(&Device::Cpu);
    let layer = |i| layers::linear_no_bias(WIDTH, WIDTH, vb.pp(format!("layer.{i}")));
    let model = Wide((0..n_layers).map(layer).collect::<Result<_>>().expect("builds"));
    let optimizer = optim::Config::new(optim::Algorithm::ADAMW, 1e-3);
    let recipe = Recipe {
        optimizer,
        schedule: constant(1e-3),
        gradients,
        clip,
        recompute: plan,
        ..recipe(N_SAMPLES, N_SAMPLES, n_layers)
    };
    let mut trainer = Trainer::new(model, masters, vec![], recipe).expect("valid");
    let weights_and_state = n_layers as u64 * LAYER_BYTES * 3;
    let batch = batch();
    let peaks = (0..3).map(|_| {
        let before = ALLOCATOR.current_bytes() - start;
        let (update, peak) = peak_during(&ALLOCATOR, || trainer.update(&batch));
        let _update = update.expect("updates");
        before + peak - weights_and_state
    });
    let peaks = peaks.collect();
    (peaks, support::bits(&params.all()).into_iter().map(|(_, bits)| bits).collect())
}

/// All kept, or in two halves that are run again.
fn plans(n_layers: usize) -> [Plan; 2] {
    let (half, last) = (n_layers / 2, Plan::keep_all(n_layers + 1).0[n_layers..].to_vec());
    let halves = [nested(0, half).0, nested(half, n_layers).0, last].concat();
    [Plan::keep_all(n_layers + 1), Plan(halves)]
}

/// A segment's gradient is held once: operations set it aside, candle's store never sees it. The
/// issue allows two layers' gradients.
const GRADIENT_COPIES: u64 = 1;
/// Inputs, outputs and their gradients of all layers (8 KiB each), and scratch of the products.
const BESIDE_BYTES: u64 = LAYER_BYTES / 2;

#[test]
fn released_gradients_live_one_layer_at_a_time() {
    // Scratch that threads keep is made by the first products.
    let _warm = peaks(2, Gradients::Summed, accum::Clip::Off, Plan::keep_all(3));
    let norm = accum::Clip::Norm(1e-2);
    for (i, clip) in [(0, accum::Clip::Off), (0, norm), (1, accum::Clip::Off)] {
        let of = |n_layers, gradients| peaks(n_layers, gradients, clip, plans(n_layers)[i].clone());
        let what = format!("{clip:?}, {}", plans(8)[i]);
        let [(four, _), (eight, weights)] = [4, 8].map(|n| of(n, Gradients::Released));
        println!("{what}: released {four:?} of 4 layers, {eight:?} of 8");
        for (four, eight) in four.iter().zip(&eight) {
            assert!(*eight < GRADIENT_COPIES * LAYER_BYTES + BESIDE_BYTES, "{what}: {eight}");
            // Four more layers are four more activations, and no more gradients.
            assert!(*eight < four + LAYER_BYTES / 2, "{what}: {four} and {eight}");
        }
        let [(four, _), (eight, others)] = [4, 8].map(|n| of(n, Gradients::Summed));
        println!("{what}: summed {four:?} of 4 layers, {eight:?} of 8");
        for (four, eight) in four.iter().zip(&eight) {
            assert!(*eight >= 8 * LAYER_BYTES, "{what}: {eight}");
            assert!(*eight > four + 7 * LAYER_BYTES / 2, "{what}: {four} and {eight}");
        }
        if clip == accum::Clip::Off {
            assert!(weights == others, "{what}: the weights differ");
        }
    }
}

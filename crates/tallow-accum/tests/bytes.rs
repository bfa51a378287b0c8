//! What an accumulator holds, counted. No test harness: its threads would be counted too.

mod support;
use candle_core::{DType, Device, Module, Tensor, Var};
use std::alloc::System;
use support::{config, named, store};
use tallow_accum::*;
use tallow_memory::CountingAllocator;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

/// Headers of tensors, the table of a `GradStore`, partial sums of a pass.
const SMALL_BYTES: u64 = 8 << 10;
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

fn main() {
    tallow_testkit::with_one_worker();
    for dtype in [AccumDType::F32, AccumDType::BF16, AccumDType::Parameter] {
        the_price_is_what_is_held(dtype);
    }
    a_steady_state_allocates_nothing();
    a_micro_batch_dies_in_add();
    the_sink_holds_one_gradient();
    println!("bytes are as documented");
}

/// A parameter of each dtype, and an accumulator that has had a gradient for each.
fn filled(n: usize, dtype: AccumDType) -> (Vec<(String, Var)>, u64) {
    let vars = DTYPES.map(|dtype| support::zeros(n, dtype));
    let params = named(&[("a", &vars[0]), ("b", &vars[1]), ("c", &vars[2]), ("d", &vars[3])]);
    let scope = ALLOC.scope();
    let mut accum = GradientAccumulator::new(&params, config(dtype)).unwrap();
    assert_eq!((accum.held_bytes(), scope.current_bytes() < SMALL_BYTES), (0, true));
    for (i, var) in vars.iter().enumerate() {
        accum.add_one(i, &var.zeros_like().unwrap()).unwrap();
    }
    assert_eq!(accum.held_bytes(), accumulator_bytes(&params, dtype));
    let held_bytes = scope.current_bytes();
    (params, held_bytes)
}

/// Headers do not depend on sizes, so the difference of two sizes is exact.
fn the_price_is_what_is_held(dtype: AccumDType) {
    filled(40_000, dtype); // the pool's own queue grows at its first use
    let (small, small_bytes) = filled(1000, dtype);
    let (large, large_bytes) = filled(50_000, dtype);
    let price = accumulator_bytes(&large, dtype) - accumulator_bytes(&small, dtype);
    assert_eq!(large_bytes - small_bytes, price, "{dtype:?}");
    assert!(small_bytes - accumulator_bytes(&small, dtype) < SMALL_BYTES);
}

fn a_steady_state_allocates_nothing() {
    let device = Device::Cpu;
    let w = Var::randn(0f32, 0.1, (64, 300), &device).unwrap();
    let b = Var::zeros(64, DType::F32, &device).unwrap();
    let params = named(&[("b", &b), ("w", &w)]);
    let model = candle_nn::Linear::new(w.as_tensor().clone(), Some(b.as_tensor().clone()));
    let x = Tensor::randn(0f32, 1.0, (8, 300), &device).unwrap();
    let mut accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    let mut held_bytes = Vec::with_capacity(50);
    for update in 0..50 {
        for _ in 0..4 {
            let loss = model.forward(&x).unwrap().sqr().unwrap().sum_all().unwrap();
            accum.add(loss.backward().unwrap(), 8.0).unwrap();
        }
        let clip = if update % 2 == 0 { Clip::Norm(1e-3) } else { Clip::Value(1e-3) };
        let window = accum.take_mean(Finish { loss_scale: 1.0, clip }).unwrap();
        assert!(window.report().clipped);
        for var in [&w, &b] {
            let step = (window.grads().get(var).unwrap() * 0.1).unwrap();
            var.set(&(var.as_tensor() - step).unwrap()).unwrap();
        }
        drop(window);
        held_bytes.push(ALLOC.current_bytes());
    }
    assert_eq!(held_bytes[4], held_bytes[49]);
}

fn a_micro_batch_dies_in_add() {
    let vars = [0, 1, 2].map(|_| support::zeros(100_000, DType::F32));
    let params = named(&[("a", &vars[0]), ("b", &vars[1]), ("c", &vars[2])]);
    let mut accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    for round in 0..3 {
        let scope = ALLOC.scope();
        let mut grads = store(&[]);
        for var in &vars {
            grads.insert(var, var.ones_like().unwrap());
        }
        let with_grads_bytes = scope.current_bytes();
        assert!(with_grads_bytes >= 1_200_000);
        accum.add(grads, 1.0).unwrap();
        // The first round allocates the buffers: each while the gradients before it are gone.
        let (kept_bytes, extra_bytes) = if round == 0 { (1_200_000, 400_000) } else { (0, 0) };
        assert!(scope.current_bytes() < kept_bytes + SMALL_BYTES);
        assert!(scope.peak_bytes() < with_grads_bytes + extra_bytes + SMALL_BYTES);
    }
    let scope = ALLOC.scope();
    let window = accum.take_mean(Finish { loss_scale: 2.0, clip: Clip::Norm(0.1) }).unwrap();
    assert!(window.report().clipped);
    drop(window);
    assert!(scope.peak_bytes() < SMALL_BYTES, "a window copies nothing: {}", scope.peak_bytes());
}

fn the_sink_holds_one_gradient() {
    let vars = [0, 1, 2].map(|_| support::zeros(100_000, DType::BF16));
    let params = named(&[("a", &vars[0]), ("b", &vars[1]), ("c", &vars[2])]);
    let mut accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    let buffers_bytes = accumulator_bytes(&params, AccumDType::F32);
    let scope = ALLOC.scope();
    for _ in 0..3 {
        for i in (0..3).rev() {
            let grad = vars[i].ones_like().unwrap();
            accum.add_one(i, &grad).unwrap();
        }
        accum.end_micro_batch(1.0).unwrap();
    }
    assert!(scope.peak_bytes() < buffers_bytes + 200_000 + SMALL_BYTES);
}

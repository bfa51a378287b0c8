//! What masters, copies and 8-bit tensors hold, counted. No test harness: its threads would be
//! counted too.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use std::alloc::System;
use tallow_memory::CountingAllocator;
use tallow_precision::{
    Fp8, LossScale, LossScaleState, Masters, Policy, Stored, Verdict, copy_bytes, fp8_bytes,
    master_bytes,
};

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

/// Tensor headers, shapes, names and op nodes.
const SMALL_BYTES: u64 = 4 << 10;
/// Below the size from which kernels wake threads, whose queues would be counted.
const DIMS: (usize, usize) = (120, 128);
const N_ELEMS: u64 = 120 * 128;
const CPU: Device = Device::Cpu;

fn main() -> tallow_precision::Result<()> {
    // What candle sets up once, at its first tensors, is nobody's price.
    drop(Policy::bf16().cast("w", &Tensor::ones(DIMS, DType::F32, &CPU)?)?);
    for policy in [Policy::bf16(), Policy::f16(), Policy::f32(), Policy::fp8_stored(DType::BF16)] {
        a_step_holds_its_price(policy)?;
    }
    unscaling_holds_nothing()?;
    stored_tensors_hold_their_price()?;
    a_cast_dies_with_its_segment()?;
    assert!(size_of::<LossScaleState>() < 200, "{}", size_of::<LossScaleState>());
    println!("bytes are as documented");
    Ok(())
}

#[track_caller]
fn about(bytes: u64, expected_bytes: u64) {
    let slack = bytes.checked_sub(expected_bytes);
    assert!(slack.is_some_and(|b| b < SMALL_BYTES), "{bytes}, not {expected_bytes}");
}

fn a_step_holds_its_price(policy: Policy) -> tallow_precision::Result<()> {
    let narrow = policy.compute;
    let copied = narrow != DType::F32;
    let whole = ALLOC.scope();
    let masters = Masters::new(policy, VarMap::new())?;
    let w = masters.builder(&CPU).get_with_hints(DIMS, "w", candle_nn::init::ONE)?;
    let price_bytes = if copied { copy_bytes(N_ELEMS, narrow) } else { 0 };
    assert_eq!(masters.copies_bytes(), price_bytes);
    about(whole.current_bytes(), master_bytes(N_ELEMS) + price_bytes);

    let params = masters.params();
    let mut live_bytes = Vec::new();
    for _ in 0..50 {
        let mut scale = LossScale::off();
        let mut grads = scale.apply(&w.to_dtype(DType::F32)?.sum_all()?)?.backward()?;
        let gathering = ALLOC.scope();
        masters.gather(&mut grads)?;
        about(gathering.peak_bytes(), if copied { master_bytes(N_ELEMS) } else { 0 });
        drop(gathering);
        assert_eq!(scale.unscale(&params, &mut grads)?, Verdict::Finite);
        drop(grads);
        let publishing = ALLOC.scope();
        masters.publish()?;
        assert!(publishing.peak_bytes() < SMALL_BYTES, "{}", publishing.peak_bytes());
        live_bytes.push(whole.current_bytes());
    }
    // The counts themselves grow by a number a step, in a vector.
    assert!(live_bytes[49] - live_bytes[4] < 1024, "{live_bytes:?}");
    Ok(())
}

fn unscaling_holds_nothing() -> tallow_precision::Result<()> {
    for (dtype, extra_bytes) in [
        (DType::F32, 0),
        (DType::BF16, 0),
        (DType::F64, 0),
        // An f32 gradient in place of the f16 one.
        (DType::F16, 4 * N_ELEMS),
    ] {
        let w = vec![("w".to_string(), Var::ones(DIMS, dtype, &CPU)?)];
        let mut scale = LossScale::fixed(4.0)?;
        let loss = scale.apply(&w[0].1.sum_all()?)?;
        let mut grads = loss.backward()?;
        let scope = ALLOC.scope();
        assert_eq!(scale.unscale(&w, &mut grads)?, Verdict::Finite);
        about(scope.peak_bytes(), extra_bytes);
    }
    Ok(())
}

fn stored_tensors_hold_their_price() -> tallow_precision::Result<()> {
    let x = Tensor::ones(DIMS, DType::BF16, &CPU)?;
    let scope = ALLOC.scope();
    let stored = Stored::store(&x, Fp8::E4m3)?;
    about(scope.peak_bytes(), fp8_bytes(N_ELEMS) - 4);
    assert_eq!(stored.bytes(), fp8_bytes(N_ELEMS));
    about(scope.current_bytes(), N_ELEMS);
    let loading = ALLOC.scope();
    drop(stored.load(DType::F32)?);
    about(loading.peak_bytes(), 4 * N_ELEMS);
    Ok(())
}

fn a_cast_dies_with_its_segment() -> tallow_precision::Result<()> {
    let w = Var::ones(DIMS, DType::F32, &CPU)?;
    for policy in [Policy::bf16(), Policy::fp8_stored(DType::F16)] {
        let scope = ALLOC.scope();
        let segment = || policy.cast("layer.weight", &w).map(|copy| copy.elem_count());
        assert_eq!(segment()? as u64, N_ELEMS);
        about(scope.peak_bytes(), 2 * N_ELEMS);
        assert!(scope.current_bytes() < SMALL_BYTES);
    }
    Ok(())
}

//! What the accumulator's tests share.
#![allow(dead_code)] // each test binary uses its own part

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use tallow_accum::*;

pub(crate) fn config(dtype: AccumDType) -> AccumConfig {
    AccumConfig { dtype, warn_above: ADVISED_MICRO_BATCHES }
}

/// `values` in `dtype`, rounded once.
pub(crate) fn tensor(values: &[f64], dtype: DType) -> Tensor {
    Tensor::new(values, &Device::Cpu).and_then(|t| t.to_dtype(dtype)).expect("a float dtype")
}

pub(crate) fn zeros(n: usize, dtype: DType) -> Var {
    Var::zeros(n, dtype, &Device::Cpu).expect("a float dtype")
}

pub(crate) fn named(vars: &[(&str, &Var)]) -> Vec<(String, Var)> {
    vars.iter().map(|(name, var)| (name.to_string(), (*var).clone())).collect()
}

/// An accumulator for one parameter `w`.
pub(crate) fn accum_of(w: &Var, dtype: AccumDType) -> GradientAccumulator {
    GradientAccumulator::new(&named(&[("w", w)]), config(dtype)).expect("one float parameter")
}

pub(crate) fn store(grads: &[(&Var, Tensor)]) -> GradStore {
    let mut store = GradStore::default();
    for (var, grad) in grads {
        store.insert(var, grad.clone());
    }
    store
}

/// Adds a micro-batch whose gradient of `w` is `grad`.
pub(crate) fn add(accum: &mut GradientAccumulator, w: &Var, grad: &[f64], weight: f64) {
    let grad = tensor(grad, w.dtype()).reshape(w.shape()).expect("as many as w");
    accum.add(store(&[(w, grad)]), weight).expect("it fits");
}

/// Exact.
pub(crate) fn f64s(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).and_then(|x| x.flatten_all()?.to_vec1()).expect("a float tensor")
}

pub(crate) fn f64_bits(x: &Tensor) -> Vec<u64> {
    f64s(x).iter().map(|x| x.to_bits()).collect()
}

pub(crate) fn grad_of(window: &Window, w: &Var) -> Vec<f64> {
    f64s(window.grads().get(w).expect("w has a gradient"))
}

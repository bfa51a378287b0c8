//! Softmax and its logarithm over the last dimension.

use crate::{
    Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor};
use tallow_kernels::softmax as kernels;

enum Softmax {
    Plain,
    Log,
}

impl Kernel for Softmax {
    const NAME: &'static str = "softmax";
    const USES_OUTPUT: bool = true;

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (x, cols) = (args[0].dense::<T>()?, args[0].last_dim());
        let mut out = vec![T::default(); x.len()];
        match self {
            Softmax::Plain => kernels::softmax(&mut out, &x, cols),
            Softmax::Log => kernels::log_softmax(&mut out, &x, cols),
        }
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], out: Arg, dout: Arg) -> Result<Grads> {
        let (out, dout, cols) = (out.dense::<T>()?, dout.dense::<T>()?, args[0].last_dim());
        let mut dx = vec![T::default(); out.len()];
        match self {
            Softmax::Plain => kernels::softmax_backward(&mut dx, &out, &dout, cols),
            Softmax::Log => kernels::log_softmax_backward(&mut dx, &out, &dout, cols),
        }
        Ok(vec![tensor(dx, args[0].shape())?])
    }
}

/// Softmax over the last dimension of `x` `[..., C]`, denominators in f64. Keeps its output only.
/// # Errors
/// If `x` is not a float tensor.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    apply(Softmax::Plain, &[x], || composed::softmax(x))
}

/// Logarithm of softmax over the last dimension of `x` `[..., C]`. Keeps its output only.
/// # Errors
/// If `x` is not a float tensor.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    apply(Softmax::Log, &[x], || composed::log_softmax(x))
}

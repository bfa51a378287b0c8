//! Sums and means that do not stall in half precision.

use crate::{
    Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, scalar, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor, WithDType};
use tallow_kernels::{Real, reduce};

/// The sum of all elements times `factor`.
struct Sum {
    factor: f64,
}

impl Kernel for Sum {
    const NAME: &'static str = "sum_all";

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let sum = reduce::sum(&args[0].dense::<T>()?) * self.factor;
        Ok((T::Acc::to_cpu_storage_owned(vec![T::Acc::of(sum)]), Shape::from(())))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let d = <T as WithDType>::from_f64(scalar(Self::NAME, dout)? * self.factor);
        Ok(vec![tensor(vec![d; args[0].n_elems()], args[0].shape())?])
    }
}

/// The sum of all elements of `x`, added up in f64; a scalar in f32 (f64 for f64). Keeps nothing.
/// # Errors
/// If `x` is not a float tensor.
pub fn sum_all(x: &Tensor) -> Result<Tensor> {
    apply(Sum { factor: 1.0 }, &[x], || composed::sum_all(x))
}

/// The mean of all elements of `x`, added up in f64; a scalar in f32 (f64 for f64); NaN if there
/// are none. Keeps nothing.
/// # Errors
/// If `x` is not a float tensor.
pub fn mean_all(x: &Tensor) -> Result<Tensor> {
    apply(Sum { factor: 1.0 / x.elem_count() as f64 }, &[x], || composed::mean_all(x))
}

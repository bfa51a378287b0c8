//! Dropout whose mask is a function of a key.

use crate::{
    Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor};
use tallow_kernels::dropout as kernels;
pub use tallow_kernels::dropout::{DropKey, uniform};

struct Dropout {
    p: f64,
    key: DropKey,
}

impl Kernel for Dropout {
    const NAME: &'static str = "dropout";

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let x = args[0].dense::<T>()?;
        let mut out = vec![T::default(); x.len()];
        kernels::dropout(&mut out, &x, self.p, self.key)?;
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let dout = dout.dense::<T>()?;
        let mut dx = vec![T::default(); dout.len()];
        kernels::dropout(&mut dx, &dout, self.p, self.key)?;
        Ok(vec![tensor(dx, args[0].shape())?])
    }
}

/// Zeroes each element with probability `p` and scales the rest by `1 / (1 - p)`.
///
/// Which ones is a function of `key` alone (Philox4x32-10), so backward and a recomputed forward
/// draw the same mask and nothing is kept.
/// # Errors
/// If `p` is not in `[0, 1)`.
pub fn dropout(x: &Tensor, p: f64, key: DropKey) -> Result<Tensor> {
    apply(Dropout { p, key }, &[x], || composed::dropout(x, p, key))
}

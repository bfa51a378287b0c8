//! 2-D pooling.

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor};
use tallow_kernels::pool::{self as kernels, Pool2dShape};
pub use tallow_kernels::pool::{Divisor, Pool2dConfig};

enum How {
    Max,
    Average(Divisor),
}

struct Pool2d {
    shape: Pool2dShape,
    how: How,
}

impl Kernel for Pool2d {
    const NAME: &'static str = "pool2d";

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (x, dims) = (args[0].dense::<T>()?, args[0].dims());
        let [p, q] = self.shape.out_extents();
        let mut out = vec![T::default(); dims[0] * dims[1] * p * q];
        match self.how {
            How::Max => kernels::max_pool2d(&mut out, &x, &self.shape),
            How::Average(divisor) => kernels::avg_pool2d(&mut out, &x, &self.shape, divisor),
        }
        Ok((T::to_cpu_storage_owned(out), Shape::from((dims[0], dims[1], p, q))))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let dout = dout.dense::<T>()?;
        let mut dx = vec![T::default(); args[0].n_elems()];
        match self.how {
            How::Max => {
                kernels::max_pool2d_backward(&mut dx, &args[0].dense::<T>()?, &dout, &self.shape);
            }
            How::Average(divisor) => {
                kernels::avg_pool2d_backward(&mut dx, &dout, &self.shape, divisor);
            }
        }
        Ok(vec![tensor(dx, args[0].shape())?])
    }
}

fn dims4(x: &Tensor) -> Result<[usize; 4]> {
    x.dims().try_into().map_err(|_| Error::Shape {
        op: Pool2d::NAME,
        what: "input",
        found: x.dims().to_vec(),
        expected: "of four dimensions".to_string(),
    })
}

fn checked(x: &Tensor, cfg: Pool2dConfig) -> Result<Pool2dShape> {
    let [n, c, h, w] = dims4(x)?;
    Ok(Pool2dShape::new(n * c, [h, w], cfg)?)
}

/// `x` `[N, C, H, W]` → `[N, C, P, Q]`, the maximum of each window; padding never wins.
///
/// A tie goes to the first maximum. Keeps `x` alone: the maxima are found again in backward.
/// # Errors
/// If `x` has not four dimensions or the window does not fit.
pub fn max_pool2d(x: &Tensor, cfg: Pool2dConfig) -> Result<Tensor> {
    let shape = checked(x, cfg)?;
    apply(Pool2d { shape, how: How::Max }, &[x], || composed::max_pool2d(x, cfg))
}

/// `x` `[N, C, H, W]` → `[N, C, P, Q]`, the mean of each window. Keeps nothing.
/// # Errors
/// If `x` has not four dimensions or the window does not fit.
pub fn avg_pool2d(x: &Tensor, cfg: Pool2dConfig, divisor: Divisor) -> Result<Tensor> {
    let shape = checked(x, cfg)?;
    let op = Pool2d { shape, how: How::Average(divisor) };
    apply(op, &[x], || composed::avg_pool2d(x, cfg, divisor))
}

struct GlobalAverage;

impl Kernel for GlobalAverage {
    const NAME: &'static str = "global_avg_pool2d";

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (x, dims) = (args[0].dense::<T>()?, args[0].dims());
        let mut out = vec![T::default(); dims[0] * dims[1]];
        kernels::global_avg_pool(&mut out, &x, dims[2] * dims[3]);
        Ok((T::to_cpu_storage_owned(out), Shape::from((dims[0], dims[1]))))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let dims = args[0].dims();
        let mut dx = vec![T::default(); args[0].n_elems()];
        kernels::global_avg_pool_backward(&mut dx, &dout.dense::<T>()?, dims[2] * dims[3]);
        Ok(vec![tensor(dx, args[0].shape())?])
    }
}

/// `x` `[N, C, H, W]` → `[N, C]`, the mean of each plane, summed in f64. Keeps nothing.
/// # Errors
/// If `x` has not four dimensions.
pub fn global_avg_pool2d(x: &Tensor) -> Result<Tensor> {
    dims4(x)?;
    apply(GlobalAverage, &[x], || composed::global_avg_pool2d(x))
}

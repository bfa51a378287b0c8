//! 2-D convolution.

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, operands, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor};
pub use tallow_kernels::conv::Conv2dConfig;
use tallow_kernels::conv::{
    self as kernels, Conv2dShape, conv2d_backward_bias, conv2d_backward_input,
    conv2d_backward_weight,
};

struct Conv2d(Conv2dShape);

impl Kernel for Conv2d {
    const NAME: &'static str = "conv2d";
    const OPERANDS: &'static [&'static str] = &["input", "weight", "bias"];

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (x, weight) = (args[0].dense::<T>()?, args[1].dense::<T>()?);
        let bias = args.get(2).map(|b| b.dense::<T>()).transpose()?;
        let dims = self.0.out_dims();
        let mut out = vec![T::default(); dims.iter().product()];
        kernels::conv2d(&mut out, &x, &weight, bias.as_deref(), &self.0);
        Ok((T::to_cpu_storage_owned(out), Shape::from_dims(&dims)))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let dout = dout.dense::<T>()?;
        let mut grads = Vec::with_capacity(args.len());
        for (i, arg) in args.iter().enumerate() {
            grads.push(match arg.room::<T>() {
                None => None,
                Some(mut d) => {
                    match i {
                        0 => conv2d_backward_input(&mut d, &dout, &args[1].dense::<T>()?, &self.0),
                        1 => conv2d_backward_weight(&mut d, &dout, &args[0].dense::<T>()?, &self.0),
                        _ => conv2d_backward_bias(&mut d, &dout, &self.0),
                    }
                    tensor(d, arg.shape())?
                }
            });
        }
        Ok(grads)
    }
}

fn dims4(what: &'static str, t: &Tensor) -> Result<[usize; 4]> {
    t.dims().try_into().map_err(|_| Error::Shape {
        op: Conv2d::NAME,
        what,
        found: t.dims().to_vec(),
        expected: "of four dimensions".to_string(),
    })
}

/// `x` `[N, C, H, W]`, `weight` `[O, C/groups, R, S]`, `bias` `[O]` → `[N, O, P, Q]`.
///
/// bf16 and f16 accumulate in f32. Keeps `x` and `weight`; the patch matrix is never whole.
/// # Errors
/// If shapes, dtypes or the configuration do not fit together.
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    cfg: Conv2dConfig,
) -> Result<Tensor> {
    let shape = Conv2dShape::new(dims4("input", x)?, dims4("weight", weight)?, cfg)?;
    if let Some(b) = bias
        && b.dims() != [shape.out_dims()[1]]
    {
        let (found, expected) = (b.dims().to_vec(), format!("[{}]", shape.out_dims()[1]));
        return Err(Error::Shape { op: Conv2d::NAME, what: "bias", found, expected });
    }
    let fallback = || composed::conv2d(x, weight, bias, cfg);
    apply(Conv2d(shape), &operands(x, Some(weight), bias), fallback)
}

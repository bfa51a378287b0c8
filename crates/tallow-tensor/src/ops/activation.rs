//! Activations, elementwise over any shape.

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor};
use tallow_kernels::activation as kernels;

#[derive(Clone, Copy)]
enum Curve {
    GeluTanh,
    GeluErf,
    Silu,
    Relu,
}

impl Kernel for Curve {
    const NAME: &'static str = "activation";

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let x = args[0].dense::<T>()?;
        let mut out = vec![T::default(); x.len()];
        match self {
            Curve::GeluTanh => kernels::gelu_tanh(&mut out, &x),
            Curve::GeluErf => kernels::gelu_erf(&mut out, &x),
            Curve::Silu => kernels::silu(&mut out, &x),
            Curve::Relu => kernels::relu(&mut out, &x),
        }
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], out: Arg, dout: Arg) -> Result<Grads> {
        let dout = dout.dense::<T>()?;
        let mut dx = vec![T::default(); dout.len()];
        match self {
            Curve::GeluTanh => kernels::gelu_tanh_backward(&mut dx, &args[0].dense::<T>()?, &dout),
            Curve::GeluErf => kernels::gelu_erf_backward(&mut dx, &args[0].dense::<T>()?, &dout),
            Curve::Silu => kernels::silu_backward(&mut dx, &args[0].dense::<T>()?, &dout),
            Curve::Relu => kernels::relu_backward(&mut dx, &out.dense::<T>()?, &dout),
        }
        Ok(vec![tensor(dx, args[0].shape())?])
    }
}

/// GELU in its tanh form (Hendrycks & Gimpel 2016), as GPT-2 uses it. Keeps `x`.
/// # Errors
/// If `x` is not a float tensor.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    apply(Curve::GeluTanh, &[x], || composed::gelu_tanh(x))
}

/// GELU by the error function: `x * Phi(x)`. Keeps `x`.
/// # Errors
/// If `x` is not a float tensor.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    apply(Curve::GeluErf, &[x], || composed::gelu_erf(x))
}

/// SiLU or swish: `x / (1 + exp(-x))`. Keeps `x`.
/// # Errors
/// If `x` is not a float tensor.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    apply(Curve::Silu, &[x], || composed::silu(x))
}

/// `max(x, 0)`, NaN where `x` is; its gradient at 0 is 0. Keeps its output only.
/// # Errors
/// If `x` is not a float tensor.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    apply(Curve::Relu, &[x], || composed::relu(x))
}

struct AddRelu;

impl Kernel for AddRelu {
    const NAME: &'static str = "add_relu";
    const OPERANDS: &'static [&'static str] = &["left operand", "right operand"];

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (a, b) = (args[0].dense::<T>()?, args[1].dense::<T>()?);
        let mut out = vec![T::default(); a.len()];
        kernels::add_relu(&mut out, &a, &b);
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], out: Arg, dout: Arg) -> Result<Grads> {
        let dout = dout.dense::<T>()?;
        let mut d = vec![T::default(); dout.len()];
        kernels::relu_backward(&mut d, &out.dense::<T>()?, &dout);
        // Both operands have the same gradient: one buffer serves them.
        let d = tensor(d, args[0].shape())?;
        Ok(args.iter().map(|arg| d.clone().filter(|_| arg.wanted)).collect())
    }
}

/// `relu(a + b)` for operands of one shape: the end of a residual block. Keeps its output only.
/// # Errors
/// If the shapes or dtypes differ or are no floats.
pub fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.dims() != b.dims() {
        let (found, expected) = (b.dims().to_vec(), format!("{:?}", a.dims()));
        return Err(Error::Shape { op: AddRelu::NAME, what: "right operand", found, expected });
    }
    apply(AddRelu, &[a, b], || composed::add_relu(a, b))
}

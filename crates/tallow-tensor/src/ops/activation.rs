//! Activations, elementwise over any shape.

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor};
use tallow_kernels::{accum::add as add_to, activation as kernels, reduce::sum_cols};

#[derive(Clone, Copy)]
enum Curve {
    GeluTanh,
    GeluErf,
    Silu,
    Relu,
}

impl Kernel for Curve {
    const NAME: &'static str = "activation";
    const USES_OUTPUT: bool = true;

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

struct SwiGlu;

impl Kernel for SwiGlu {
    const NAME: &'static str = "swiglu";
    const OPERANDS: &'static [&'static str] = &["gate", "up"];

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (gate, up) = (args[0].dense::<T>()?, args[1].dense::<T>()?);
        let mut out = vec![T::default(); gate.len()];
        kernels::swiglu(&mut out, &gate, &up);
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let (gate, dout) = (args[0].dense::<T>()?, dout.dense::<T>()?);
        let (mut dgate, mut dup) = (args[0].room::<T>(), args[1].room::<T>());
        if let Some(dgate) = &mut dgate {
            kernels::swiglu_backward_gate(dgate, &gate, &args[1].dense::<T>()?, &dout);
        }
        if let Some(dup) = &mut dup {
            kernels::swiglu(dup, &gate, &dout);
        }
        let grads = [dgate, dup].into_iter().zip(args);
        grads.map(|(d, arg)| d.map_or(Ok(None), |d| tensor(d, arg.shape()))).collect()
    }
}

/// `silu(gate) * up` for operands of one shape (Shazeer 2020), as in Llama. Keeps its operands.
/// # Errors
/// If the shapes or dtypes differ or are no floats.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    same_shape(SwiGlu::NAME, "up", gate, up)?;
    apply(SwiGlu, &[gate, up], || composed::swiglu(gate, up))
}

fn same_shape(op: &'static str, what: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    if a.dims() == b.dims() {
        return Ok(());
    }
    let (found, expected) = (b.dims().to_vec(), format!("{:?}", a.dims()));
    Err(Error::Shape { op, what, found, expected })
}

struct Add;

impl Kernel for Add {
    const NAME: &'static str = "add";
    const OPERANDS: &'static [&'static str] = &["left operand", "right operand"];

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let mut out = args[0].dense::<T>()?.into_owned();
        let right = args[1].dense::<T>()?;
        for part in out.chunks_mut(right.len().max(1)) {
            add_to(part, &right);
        }
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let dout = dout.dense::<T>()?;
        // Not by the number of elements: a batch of one has the same, in another shape.
        let is_whole = |arg: &Arg| arg.dims() == args[0].dims();
        let right = match args[1].wanted && !is_whole(&args[1]) {
            true => {
                let mut sum = vec![T::default(); args[1].n_elems()];
                sum_cols(&mut sum, &dout);
                tensor(sum, args[1].shape())?
            }
            false => None,
        };
        // Operands of one shape have the same gradient: one buffer serves them.
        let wants_same = |arg: &Arg| arg.wanted && is_whole(arg);
        let same = match args.iter().any(wants_same) {
            true => tensor(dout.to_vec(), args[0].shape())?,
            false => None,
        };
        let left = same.clone().filter(|_| args[0].wanted);
        Ok(vec![left, right.or(same.filter(|_| wants_same(&args[1])))])
    }
}

/// `a + b`: a residual connection, or a position embedding; `b` has the shape of `a` or its last
/// dimensions.
///
/// Keeps nothing of its own. Unlike candle's sum it leaves no gradient for a frozen operand in the
/// store, and sums that of a smaller `b` in f32 (f64 for f64).
/// # Errors
/// If the shapes do not fit, or the dtypes differ or are no floats.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if !a.dims().ends_with(b.dims()) {
        same_shape(Add::NAME, "right operand", a, b)?;
    }
    apply(Add, &[a, b], || composed::add(a, b))
}

struct AddRelu;

impl Kernel for AddRelu {
    const NAME: &'static str = "add_relu";
    const USES_OUTPUT: bool = true;
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
    same_shape(AddRelu::NAME, "right operand", a, b)?;
    apply(AddRelu, &[a, b], || composed::add_relu(a, b))
}

//! Rotary position embedding.

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor},
};
use candle_core::{CpuStorage, Device, Shape, Tensor};
use tallow_kernels::rotary as kernels;
pub use tallow_kernels::rotary::Rope;

struct Rotary(Rope);

impl Kernel for Rotary {
    const NAME: &'static str = "rope";
    const OPERANDS: &'static [&'static str] = &["input", "cos", "sin"];
    const SAME_DTYPE: bool = false;

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (cos, sin) =
            (args[1].as_type::<T::Acc>(Self::NAME)?, args[2].as_type::<T::Acc>(Self::NAME)?);
        let x = args[0].dense::<T>()?;
        let mut out = vec![T::default(); x.len()];
        kernels::rope(&mut out, &x, &cos, &sin, args[0].last_dim(), self.0);
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let (cos, sin) =
            (args[1].as_type::<T::Acc>(Self::NAME)?, args[2].as_type::<T::Acc>(Self::NAME)?);
        let mut dx = vec![T::default(); args[0].n_elems()];
        let d = args[0].last_dim();
        kernels::rope_backward(&mut dx, &dout.dense::<T>()?, &cos, &sin, d, self.0);
        Ok(vec![tensor(dx, args[0].shape())?, None, None])
    }
}

/// The tables of [`rope`]: cosines and sines `[tokens, head_dim / 2]` in f32, of angles
/// `t * base^(-2 j / head_dim)` computed in f64.
/// # Errors
/// If `head_dim` is odd.
pub fn rope_table(
    n_tokens: usize,
    head_dim: usize,
    base: f64,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    rope_table_of(0, n_tokens, &rope_frequencies(head_dim, base)?, device)
}

/// `base^(-2 j / head_dim)` of each pair `j`, radians a token: what [`rope_table`] is made of.
/// # Errors
/// If `head_dim` is odd.
pub fn rope_frequencies(head_dim: usize, base: f64) -> Result<Vec<f64>> {
    even(head_dim)?;
    Ok(kernels::rope_frequencies(head_dim, base))
}

/// As [`rope_table`], of `n_tokens` tokens from `first` and a frequency for each pair.
/// # Errors
/// Only candle's own.
pub fn rope_table_of(
    first: usize,
    n_tokens: usize,
    freqs: &[f64],
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let (cos, sin) = kernels::rope_table_of::<f32>(first, n_tokens, freqs);
    let shape = (n_tokens, freqs.len());
    Ok((Tensor::from_vec(cos, shape, device)?, Tensor::from_vec(sin, shape, device)?))
}

fn even(head_dim: usize) -> Result<()> {
    if head_dim.is_multiple_of(2) {
        return Ok(());
    }
    let (found, expected) = (vec![head_dim], "even".to_string());
    Err(Error::Shape { op: Rotary::NAME, what: "head_dim", found, expected })
}

/// Turns the pairs of each head by the angles of their position (Su et al. 2021).
///
/// `x` `[..., T, D]`; `cos`, `sin` `[T, D / 2]` of any float dtype, without gradients. Keeps the
/// tables.
/// # Errors
/// If shapes do not fit.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, style: Rope) -> Result<Tensor> {
    let op = Rotary::NAME;
    let &[.., tokens, d] = x.dims() else {
        let (found, expected) = (x.dims().to_vec(), "[..., tokens, head_dim]".to_string());
        return Err(Error::Shape { op, what: "input", found, expected });
    };
    for (what, t) in [("cos", cos), ("sin", sin)] {
        if t.dims() != [tokens, d / 2] || d % 2 != 0 {
            let (found, expected) = (t.dims().to_vec(), format!("[{tokens}, {d} / 2]"));
            return Err(Error::Shape { op, what, found, expected });
        }
    }
    apply(Rotary(style), &[x, cos, sin], || composed::rope(x, cos, sin, style))
}

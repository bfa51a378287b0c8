//! How much of each gradient a half format would lose.

use crate::{Error, Result, error::COMPUTE, unscale::check_float};
use candle_core::{DType, Tensor, Var, backprop::GradStore};
use half::{bf16, f16};

/// What a format keeps of one gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Underflow {
    /// The parameter.
    pub name: String,
    /// Elements of the gradient.
    pub n_elems: u64,
    /// Elements that are not zero in f32.
    pub n_nonzero: u64,
    /// Of these, the ones that are zero or subnormal in the format.
    pub n_lost: u64,
}

impl Underflow {
    /// Share of the non-zero elements that the format loses, in `[0, 1]`; 0 where all are zero.
    pub fn share(&self) -> f64 {
        match self.n_nonzero {
            0 => 0.0,
            n => self.n_lost as f64 / n as f64,
        }
    }
}

/// For each gradient of `params`, in their order: how much of `grad * scale` is zero or subnormal in
/// `dtype`. A share over a few percent asks for a larger loss scale.
///
/// Reads gradients after [`crate::LossScale::unscale`]; `scale` is the scale that a window would have.
/// A diagnosis, not part of a step: it copies one gradient at a time in f32.
/// # Errors
/// If `dtype` is not bf16, f16 or f32, or no parameter has a gradient.
pub fn underflow(
    params: &[(String, Var)],
    grads: &GradStore,
    scale: f32,
    dtype: DType,
) -> Result<Vec<Underflow>> {
    // Overflow is not underflow: what is infinite or NaN is not counted.
    let is_lost: fn(f32) -> bool = match dtype {
        DType::F32 => |x| x.abs() < f32::MIN_POSITIVE,
        DType::BF16 => |x| bf16::from_f32(x).to_f32().abs() < bf16::MIN_POSITIVE.to_f32(),
        DType::F16 => |x| f16::from_f32(x).to_f32().abs() < f16::MIN_POSITIVE.to_f32(),
        dtype => {
            let what = "the format".to_string();
            return Err(Error::DType { what, dtype, expected: COMPUTE });
        }
    };
    let mut reports = Vec::new();
    for (name, var) in params {
        let Some(grad) = grads.get(var) else { continue };
        check_float(name, grad)?;
        reports.push(count(name, grad, scale, is_lost)?);
    }
    match reports.is_empty() {
        true => Err(Error::NoGradients { n_params: params.len() }),
        false => Ok(reports),
    }
}

fn count(name: &str, grad: &Tensor, scale: f32, is_lost: fn(f32) -> bool) -> Result<Underflow> {
    let values = grad.detach().to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let nonzero = values.iter().filter(|x| **x != 0.0);
    Ok(Underflow {
        name: name.to_string(),
        n_elems: values.len() as u64,
        n_nonzero: nonzero.clone().count() as u64,
        n_lost: nonzero.filter(|x| is_lost(**x * scale)).count() as u64,
    })
}

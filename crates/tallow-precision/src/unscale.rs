//! One pass over gradients: divide, and see whether all are finite.

use crate::{Error, Result, error::FLOAT, stored::detached_cast};
use candle_core::{
    CpuStorage, DType, InplaceOp1, Layout, Storage, Tensor, Var, backprop::GradStore,
};
use half::bf16;
use std::{
    collections::{BTreeSet, HashSet},
    sync::atomic::{AtomicBool, Ordering},
};

/// Divides each gradient of `params` by `scale`; the first name whose gradient is not finite.
pub(crate) fn divide_all<'a>(
    params: &'a [(String, Var)],
    grads: &mut GradStore,
    scale: f32,
) -> Result<Option<&'a str>> {
    let shared = shared_storages(params, grads)?;
    let mut seen = HashSet::new();
    let mut first: Option<&str> = None;
    for (name, var) in params {
        // A tied parameter may stand in the list under two names: it has one gradient.
        if !seen.insert(var.id()) {
            continue;
        }
        let Some(grad) = grads.remove(var) else { continue };
        let in_place = grad.device().is_cpu()
            && grad.is_contiguous()
            && grad.dtype() != DType::F16
            && !shared.contains(&address(&grad));
        let (grad, finite) =
            if in_place { divide_in_place(grad, scale)? } else { divide_copy(grad, scale)? };
        grads.insert(var, grad);
        if !finite && first.is_none_or(|other| name.as_str() < other) {
            first = Some(name);
        }
    }
    Ok(first)
}

/// Where gradients live that must not be written: two of them, or a parameter, share the place.
///
/// Checks all dtypes too, so that an error leaves every gradient as it was.
fn shared_storages(params: &[(String, Var)], grads: &GradStore) -> Result<BTreeSet<usize>> {
    let vars: BTreeSet<usize> = params.iter().map(|(_, var)| address(var)).collect();
    let (mut once, mut shared, mut n_grads) = (BTreeSet::new(), BTreeSet::new(), 0);
    let mut seen = HashSet::new();
    for (name, var) in params {
        let Some(grad) = grads.get(var) else { continue };
        check_float(name, grad)?;
        n_grads += 1;
        if seen.insert(var.id()) {
            let place = address(grad);
            if vars.contains(&place) || !once.insert(place) {
                shared.insert(place);
            }
        }
    }
    match n_grads {
        0 => Err(Error::NoGradients { n_params: params.len() }),
        _ => Ok(shared),
    }
}

/// `Err` unless `grad`, the gradient of `name`, holds floats.
pub(crate) fn check_float(name: &str, grad: &Tensor) -> Result<()> {
    match grad.dtype() {
        DType::F32 | DType::F64 | DType::BF16 | DType::F16 => Ok(()),
        dtype => {
            let what = format!("the gradient of `{name}`");
            Err(Error::DType { what, dtype, expected: FLOAT })
        }
    }
}

/// The identity of a tensor's storage, whatever view of it the tensor is.
fn address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage).addr()
}

fn divide_in_place(grad: Tensor, scale: f32) -> Result<(Tensor, bool)> {
    let divide = Divide { scale, finite: AtomicBool::new(true) };
    grad.inplace_op1(&divide)?;
    Ok((grad, divide.finite.into_inner()))
}

fn divide_copy(grad: Tensor, scale: f32) -> Result<(Tensor, bool)> {
    let wide = if grad.dtype() == DType::F16 { DType::F32 } else { grad.dtype() };
    if grad.device().is_cpu() {
        let copy = match grad.dtype() == wide {
            true => grad.detach().force_contiguous()?,
            false => detached_cast(&grad, wide)?,
        };
        return divide_in_place(copy, scale);
    }
    let grad = grad.detach();
    let grad = (grad.to_dtype(wide)? / f64::from(scale))?;
    // x * 0 is 0 for every finite x and NaN for all others.
    let zero = (grad.to_dtype(DType::F32)? * 0.0)?.sum_all()?.to_scalar::<f32>()?;
    Ok((grad, zero == 0.0))
}

/// `x /= scale`, and whether all results are finite.
struct Divide {
    scale: f32,
    finite: AtomicBool,
}

impl InplaceOp1 for Divide {
    fn name(&self) -> &'static str {
        "unscale"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("unscale: the gradient is not contiguous")
        };
        let scale = self.scale;
        let finite = match storage {
            CpuStorage::F32(x) => x[start..end].iter_mut().fold(true, |finite, x| {
                *x /= scale;
                finite & x.is_finite()
            }),
            CpuStorage::F64(x) => x[start..end].iter_mut().fold(true, |finite, x| {
                *x /= f64::from(scale);
                finite & x.is_finite()
            }),
            CpuStorage::BF16(x) => x[start..end].iter_mut().fold(true, |finite, x| {
                *x = bf16::from_f32(x.to_f32() / scale);
                finite & x.is_finite()
            }),
            _ => candle_core::bail!("unscale: the gradient is neither f32, f64 nor bf16"),
        };
        self.finite.store(finite, Ordering::Relaxed);
        Ok(())
    }
}

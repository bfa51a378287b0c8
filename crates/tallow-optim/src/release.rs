//! Gradient release together with clipping and loss scaling, in two phases.
//!
//! A global norm is known only when the last gradient is, and by then a released gradient is gone.
//! So backward runs twice: the first pass adds each gradient to a [`GradientNorm`] and drops it, the
//! second updates each parameter with [`crate::Optimizer::step_var`] and the [`Verdict`]'s factor
//! and drops it. No two gradients need be alive together in either pass; the price is the second
//! backward. Where gradients are accumulated, their sums exist anyway, and one pass is enough.

use crate::error::{Error, Result};
use candle_core::{CpuStorage, DType, Storage, Tensor};
use tallow_kernels::optim::sum_of_squares;

/// The global norm of gradients that are seen one at a time and not kept.
#[derive(Clone, Debug, Default)]
pub struct GradientNorm {
    sum_of_squares: f64,
    first_overflow: Option<String>,
}

/// What the gradients said about this update.
#[must_use = "an overflowed update must be skipped"]
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// All finite.
    Finite {
        /// What to multiply each gradient by.
        factor: f64,
        /// The norm, with the loss scale undone, before clipping.
        norm: f64,
    },
    /// Skip the update.
    Overflow {
        /// The first parameter whose gradient was not finite.
        name: String,
    },
}

impl GradientNorm {
    /// No gradient seen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes note of the gradient of parameter `name`. Squares add up in f64, which no f32 overflows.
    ///
    /// *Memory:* nothing that grows with the gradient, unless it is strided or off the CPU.
    /// # Errors
    /// If it is no float.
    pub fn add(&mut self, name: &str, grad: &Tensor) -> Result<()> {
        let sum = squares(name, grad)?;
        if !sum.is_finite() && self.first_overflow.is_none() {
            self.first_overflow = Some(name.to_owned());
        }
        self.sum_of_squares += sum;
        Ok(())
    }

    /// The factor that undoes `loss_scale` and clips the norm to `max_norm`, by PyTorch's formula
    /// `min(1, max_norm / (norm + 1e-6))`; an infinite `max_norm` clips nothing.
    pub fn verdict(self, loss_scale: f64, max_norm: f64) -> Verdict {
        if let Some(name) = self.first_overflow {
            return Verdict::Overflow { name };
        }
        let norm = self.sum_of_squares.sqrt() / loss_scale;
        let clip = (max_norm / (norm + 1e-6)).min(1.0);
        Verdict::Finite { factor: clip / loss_scale, norm }
    }
}

fn squares(name: &str, grad: &Tensor) -> Result<f64> {
    if !crate::fused::is_float(grad.dtype()) {
        let (name, shape) = (name.to_owned(), grad.shape().clone());
        let (dtype, found, found_dtype) = (DType::F32, shape.clone(), grad.dtype());
        return Err(Error::Gradient { name, shape, dtype, found, found_dtype });
    }
    let dense = grad.contiguous()?;
    let (storage, layout) = dense.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        let sum = dense.detach().to_dtype(DType::F32)?.sqr()?.sum_all()?;
        return Ok(sum.to_dtype(DType::F64)?.to_scalar()?);
    };
    let start = layout.start_offset();
    let range = start..start + layout.shape().elem_count();
    Ok(match storage {
        CpuStorage::F32(x) => sum_of_squares(&x[range]),
        CpuStorage::F64(x) => sum_of_squares(&x[range]),
        CpuStorage::BF16(x) => sum_of_squares(&x[range]),
        CpuStorage::F16(x) => sum_of_squares(&x[range]),
        _ => unreachable!("the dtype was checked"),
    })
}

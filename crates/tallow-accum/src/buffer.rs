//! The running sum of one parameter's gradients.

use crate::{AccumDType, Error, Result, composed, cpu};
use candle_core::{DType, Tensor, Var};
use tallow_kernels::accum::Finished;

/// A parameter and its sum. On the CPU the memory is allocated once and written in place.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) name: String,
    pub(crate) var: Var,
    dtype: DType,
    sum: Option<Tensor>,
    /// Whether `sum` is of this window. What an earlier one left is written over, never read, so no
    /// NaN can outlive its window.
    filled: bool,
}

impl Buffer {
    pub(crate) fn new(name: &str, var: &Var, dtype: AccumDType) -> Result<Self> {
        if !is_float(var.dtype()) {
            return Err(Error::DType {
                name: name.to_string(),
                what: "parameter",
                found: var.dtype(),
                expected: "f32, f64, bf16 or f16",
            });
        }
        let dtype = dtype.buffer(var.dtype());
        Ok(Self { name: name.to_string(), var: var.clone(), dtype, sum: None, filled: false })
    }

    /// That `grad` can be added.
    pub(crate) fn check(&self, grad: &Tensor) -> Result<()> {
        let name = || self.name.clone();
        if grad.shape() != self.var.shape() {
            let (found, expected) = (grad.dims().to_vec(), self.var.dims().to_vec());
            return Err(Error::Shape { name: name(), found, expected });
        }
        let found = grad.dtype();
        let too_wide = found == DType::F64 && self.dtype != DType::F64;
        if too_wide || !is_float(found) {
            let expected = match self.dtype {
                DType::F64 => "f32, f64, bf16 or f16",
                _ => "f32, bf16 or f16",
            };
            return Err(Error::DType {
                name: name(),
                what: "gradient of parameter",
                found,
                expected,
            });
        }
        if !grad.device().same_device(self.var.device()) {
            let (found, expected) = (grad.device().location(), self.var.device().location());
            return Err(Error::Device { name: name(), found, expected });
        }
        Ok(())
    }

    /// Adds a checked gradient.
    pub(crate) fn add(&mut self, grad: &Tensor) -> Result<()> {
        match (self.on_cpu(), self.filled, &self.sum) {
            (true, true, Some(sum)) => cpu::add(sum, grad)?,
            (true, _, Some(sum)) => cpu::write(sum, grad)?,
            (true, _, None) => {
                let sum = Tensor::zeros(self.var.shape(), self.dtype, self.var.device())?;
                cpu::write(&sum, grad)?;
                self.sum = Some(sum);
            }
            (false, true, Some(sum)) => self.sum = Some(composed::add(sum, grad)?),
            (false, ..) => self.sum = Some(composed::write(self.dtype, grad)?),
        }
        self.filled = true;
        Ok(())
    }

    /// The sum, if there was a gradient in this window.
    pub(crate) fn sum(&self) -> Option<&Tensor> {
        self.sum.as_ref().filter(|_| self.filled)
    }

    /// Divides and clips, if there was a gradient in this window.
    pub(crate) fn finish(&mut self, divisor: f64, limit: f64) -> Result<Option<Finished>> {
        let Some(sum) = self.sum() else { return Ok(None) };
        if self.on_cpu() {
            return cpu::finish(sum, divisor, limit).map(Some);
        }
        let (quotient, found) = composed::finish(sum, divisor, limit)?;
        self.sum = Some(quotient);
        Ok(Some(found))
    }

    /// Multiplies, if there was a gradient in this window.
    pub(crate) fn scale(&mut self, factor: f64) -> Result<()> {
        match self.sum() {
            Some(sum) if self.on_cpu() => cpu::scale(sum, factor),
            Some(sum) => {
                self.sum = Some(composed::scale(sum, factor)?);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Forgets the window.
    pub(crate) fn reset(&mut self) {
        self.filled = false;
        if !self.on_cpu() {
            self.sum = None; // it would be replaced, not reused
        }
    }

    /// Bytes allocated.
    pub(crate) fn held_bytes(&self) -> u64 {
        let n_elems = self.sum.as_ref().map_or(0, |sum| sum.elem_count());
        (n_elems * self.dtype.size_in_bytes()) as u64
    }

    fn on_cpu(&self) -> bool {
        self.var.device().is_cpu()
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16)
}

//! Settings, each checked once, and the price of the buffers.

use crate::{Error, Result};
use candle_core::{DType, Var};

/// Micro-batches of a window that the reference scenario advises at most: beyond it, time is lost
/// without memory being gained.
pub const ADVISED_MICRO_BATCHES: u64 = 8;

/// How gradients are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccumConfig {
    /// What the buffers hold.
    pub dtype: AccumDType,
    /// A longer window is reported as above what is advised; [`ADVISED_MICRO_BATCHES`] as a rule.
    pub warn_above: u64,
}

impl AccumConfig {
    pub(crate) fn check(&self) -> Result<()> {
        if self.warn_above == 0 {
            return Err(Error::Setting { name: "warn_above", value: 0.0, expected: "1 or more" });
        }
        Ok(())
    }
}

/// What the buffers hold. Those of `f64` parameters are `f64` whatever is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccumDType {
    /// `f32`, also for half-precision parameters: a small gradient is not lost beside a large sum.
    F32,
    /// `bf16`: half the bytes; addends below 1/256 of the sum are lost.
    BF16,
    /// The parameter's own, which candle's optimizers expect of a gradient.
    Parameter,
}

impl AccumDType {
    /// The dtype of the buffer for a parameter of dtype `param`.
    pub const fn buffer(self, param: DType) -> DType {
        match (param, self) {
            (DType::F64, _) => DType::F64,
            (_, AccumDType::F32) => DType::F32,
            (_, AccumDType::BF16) => DType::BF16,
            (_, AccumDType::Parameter) => param,
        }
    }
}

/// Bytes of the buffer for a parameter of `n_elems` elements.
pub fn buffer_bytes(n_elems: u64, param: DType, dtype: AccumDType) -> u64 {
    n_elems * dtype.buffer(param).size_in_bytes() as u64
}

/// Bytes that an accumulator holds once each of `params` has had a gradient.
///
/// The few hundred bytes of a tensor's header and name are not counted.
pub fn accumulator_bytes(params: &[(String, Var)], dtype: AccumDType) -> u64 {
    params.iter().map(|(_, var)| buffer_bytes(var.elem_count() as u64, var.dtype(), dtype)).sum()
}

/// What happens to gradients at the end of a window, besides the division.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finish {
    /// What every loss of the window was multiplied by before `backward`; 1 for none.
    pub loss_scale: f64,
    /// Limit of the gradients, applied after the division and after the scale is removed.
    pub clip: Clip,
}

impl Finish {
    /// No loss scale, no limit.
    pub const PLAIN: Self = Self { loss_scale: 1.0, clip: Clip::Off };

    pub(crate) fn check(&self) -> Result<()> {
        let limit = match self.clip {
            Clip::Off => 1.0,
            Clip::Norm(limit) | Clip::Value(limit) => limit,
        };
        for (name, value) in [("loss_scale", self.loss_scale), ("clip", limit)] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(Error::Setting { name, value, expected: "above 0 and finite" });
            }
        }
        Ok(())
    }
}

/// A limit of gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// None.
    Off,
    /// All gradients together are shortened to this Euclidean norm if theirs is larger.
    Norm(f64),
    /// Each element is brought into `[-limit, limit]`.
    Value(f64),
}

//! Dropout that can be replayed.

use crate::{
    ops::{self, DropKey},
    pass,
};
use candle_core::{ModuleT, Result, Tensor};

/// Dropout whose masks are functions of the seed, the step and the order of draws in it.
///
/// See [`pass`] for the step and for replaying; two calls of one layer draw different masks.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    p: f64,
    seed: u64,
}

impl Dropout {
    /// Zeroes with probability `p`, `0 <= p < 1`.
    /// # Errors
    /// If `p` is outside that range.
    pub fn new(p: f64, seed: u64) -> crate::Result<Self> {
        if !(0.0..1.0).contains(&p) {
            return Err(tallow_kernels::dropout::DropoutError::Probability { p }.into());
        }
        Ok(Self { p, seed })
    }
}

impl ModuleT for Dropout {
    /// Any shape → the same shape; the identity unless `train` and `p > 0`.
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if !train || self.p == 0.0 {
            return Ok(x.clone());
        }
        let pass::Position { step, draws } = pass::draw();
        // One sequence per (step, draw): a step draws less than 2^24 masks.
        let stream = (step << 24) | (draws & 0xff_ffff);
        Ok(ops::dropout(x, self.p, DropKey { seed: self.seed, stream })?)
    }
}

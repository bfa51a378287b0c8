//! Where the parameter gradients of a chain go.

use crate::Result;
use candle_core::{Tensor, backprop::GradStore};

/// Takes the parameter gradients of one segment after the other, the last segment first.
///
/// A closure `FnMut(&str, GradStore) -> Result<()>` is a sink; it gets the segment's name. What it
/// does not keep is freed before the next segment runs.
pub trait GradSink {
    /// Takes the gradients of `segment`: of its variables, and of nothing else.
    fn add(&mut self, segment: &str, grads: GradStore) -> Result<()>;

    /// Gives back what was added for `param` so far: `add` then gets the sum. The sum is then made
    /// in the order in which plain candle makes it. `None` where sums are the sink's affair.
    fn so_far(&mut self, param: &Tensor) -> Option<Tensor> {
        let _ = param;
        None
    }
}

impl<F: FnMut(&str, GradStore) -> Result<()>> GradSink for F {
    fn add(&mut self, segment: &str, grads: GradStore) -> Result<()> {
        self(segment, grads)
    }
}

/// The sink that keeps everything, as plain candle's `backward` does, down to the bits of tied
/// parameters.
#[derive(Debug, Default)]
pub struct Collect(GradStore);

impl Collect {
    /// The gradients of every parameter.
    pub fn into_grads(self) -> GradStore {
        self.0
    }
}

impl GradSink for Collect {
    fn add(&mut self, _segment: &str, grads: GradStore) -> Result<()> {
        Ok(self.0.extend(grads)?)
    }

    fn so_far(&mut self, param: &Tensor) -> Option<Tensor> {
        self.0.remove(param)
    }
}

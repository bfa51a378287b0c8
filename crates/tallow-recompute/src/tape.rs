//! What a chain's forward leaves for its backward.

use crate::{
    GradSink, Result,
    run::{Item, Run},
};
use candle_core::Tensor;

/// The inputs and graphs a [`crate::Chain`] kept.
#[must_use = "a tape that is dropped gives no gradients"]
pub struct Tape<'c, 'a> {
    pub(crate) run: Run<'c, 'a>,
    pub(crate) items: Vec<Item<'c>>,
}

impl Tape<'_, '_> {
    /// Differentiates the chain, given the gradient of its output. Each segment's parameter
    /// gradients go to `sink` when its graph is gone and before the next one runs. Returns the
    /// gradient of the chain's input if that was a variable or came from one.
    pub fn backward(self, grad: Tensor, sink: &mut impl GradSink) -> Result<Option<Tensor>> {
        self.run.backward(self.items, grad, sink)
    }

    /// [`Tape::backward`] where the output is the loss, times `scale`.
    pub fn backward_from_loss(
        self,
        loss: &Tensor,
        scale: f64,
        sink: &mut impl GradSink,
    ) -> Result<Option<Tensor>> {
        let grad = (loss.ones_like()? * scale)?;
        self.backward(grad, sink)
    }
}

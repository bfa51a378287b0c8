//! What a window of micro-batches came to.

use candle_core::backprop::GradStore;
use std::{fmt, marker::PhantomData};

/// The gradients of a window, in the accumulator's own buffers.
///
/// It borrows the accumulator, so that no later micro-batch can write over gradients still in use;
/// the accumulator is ready for the next window as soon as this is dropped. A tensor *cloned* out of
/// [`Window::grads`] shares the buffer and will change with it: [`candle_core::Tensor::copy`] keeps
/// its values.
///
/// ```compile_fail,E0499
/// # use tallow_accum::*;
/// # fn step(accum: &mut GradientAccumulator, w: &candle_core::Var) -> Result<()> {
/// let window = accum.take_mean(Finish::PLAIN)?;
/// accum.end_micro_batch(1.0)?; // `accum` is still borrowed
/// window.grads().get(w);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "these gradients are what the window was for"]
pub struct Window<'a> {
    grads: GradStore,
    report: WindowReport,
    accumulator: PhantomData<&'a mut ()>,
}

impl Window<'_> {
    pub(crate) fn new(grads: GradStore, report: WindowReport) -> Self {
        Self { grads, report, accumulator: PhantomData }
    }

    /// The gradients, in the buffers' dtype; parameters that had none in this window are absent.
    pub fn grads(&self) -> &GradStore {
        &self.grads
    }

    /// Whether they may be applied.
    pub fn verdict(&self) -> &Verdict {
        &self.report.verdict
    }

    /// What is known of them.
    pub fn report(&self) -> &WindowReport {
        &self.report
    }
}

/// What is known of a window.
#[derive(Clone, Debug, PartialEq)]
pub struct WindowReport {
    /// Micro-batches in it.
    pub n_micro_batches: u64,
    /// Their weights' sum.
    pub total_weight: f64,
    /// Euclidean norm of all gradients together after the division, before clipping.
    pub norm: f64,
    /// Whether clipping changed anything.
    pub clipped: bool,
    /// Whether there were more micro-batches than advised.
    pub above_advised: bool,
    /// Whether the gradients may be applied.
    pub verdict: Verdict,
}

/// What the gradients of a window said. One verdict a window, wherever in it the overflow was.
#[must_use = "a window that is not finite must be skipped"]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They may be applied.
    Finite,
    /// They may not: there is an infinity or a NaN.
    NonFinite {
        /// The first parameter that has one, in the order of names.
        name: String,
    },
}

impl Verdict {
    /// The first parameter that has an infinity or a NaN, in the order of names.
    pub fn not_finite(&self) -> Option<&str> {
        match self {
            Verdict::Finite => None,
            Verdict::NonFinite { name } => Some(name),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Verdict::Finite => write!(f, "all gradients are finite"),
            Verdict::NonFinite { name } => write!(f, "the gradient of `{name}` is not finite"),
        }
    }
}

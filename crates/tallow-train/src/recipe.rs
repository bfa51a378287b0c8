//! How updates are made, and what they did.

use crate::{Error, Result};
use tallow_accum::{AccumConfig, BatchSplit, Clip};
use tallow_backward::{Gradients, Passes};
use tallow_optim::Schedule;
use tallow_precision::LossScale;
use tallow_recompute::{Check, Plan, Saved};

/// How updates are made. What is not wanted is a value: one micro-batch, `LossScale::off()`,
/// `Clip::Off`, `Shape::Constant`, `Plan::keep_all`, an infinite `skip_above_norm`.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Batch and micro-batch.
    pub split: BatchSplit,
    /// The optimizer; its learning rate is the schedule's.
    pub optimizer: tallow_optim::Config,
    /// The learning rate over applied updates.
    pub schedule: Schedule,
    /// What losses are multiplied by before backward.
    pub loss_scale: LossScale,
    /// How gradients are summed over micro-batches.
    pub accum: AccumConfig,
    /// Limit of the mean gradients.
    pub clip: Clip,
    /// An update whose gradient norm is above this is skipped.
    pub skip_above_norm: f64,
    /// How gradients reach the optimizer.
    pub gradients: Gradients,
    /// Which segments keep their activations; the head with the loss is the last.
    pub recompute: Plan,
    /// How the inputs of the others wait for backward.
    pub saved: Saved,
    /// What a segment that runs again must agree in with its first run.
    pub check: Check,
    /// Weight of the uniform distribution in the loss, from 0 to 1.
    pub label_smoothing: f64,
    /// Decay of a running average of the weights, which evaluations then use; `None`: there is none.
    pub ema_decay: Option<f64>,
}

impl Recipe {
    /// That every number is in its range and the choices go together.
    pub(crate) fn check(&self) -> Result<()> {
        let setting = |name, value, expected| Err(Error::Setting { name, value, expected });
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            return setting("label_smoothing", self.label_smoothing, "from 0 to 1");
        }
        // A NaN fails too.
        if !matches!(self.skip_above_norm.partial_cmp(&0.0), Some(std::cmp::Ordering::Greater)) {
            return setting("skip_above_norm", self.skip_above_norm, "above 0");
        }
        self.schedule.check()?;
        match (self.gradients, self.split.accumulate(), self.clip) {
            (Gradients::Summed, ..) => Ok(()),
            (Gradients::Released, 1, Clip::Off | Clip::Norm(_)) => Ok(()),
            (Gradients::Released, 1, Clip::Value(limit)) => {
                setting("clip value", limit, "absent where gradients are released: clip the norm")
            }
            (Gradients::Released, n, _) => {
                let expected = "1 where gradients are released: sums over micro-batches are kept";
                setting("accumulate", n as f64, expected)
            }
        }
    }

    /// How its micro-batches are walked.
    pub(crate) fn passes(&self) -> Passes<'_> {
        let Self { recompute: plan, saved, check, label_smoothing, .. } = self;
        Passes { plan, saved, check: *check, label_smoothing: *label_smoothing }
    }
}

/// What one batch did.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// Mean loss over the batch, before the update.
    pub loss: f64,
    /// Samples of the batch.
    pub n_samples: u64,
    /// Micro-batches that it was cut into.
    pub n_micro_batches: u64,
    /// Whether the weights moved.
    pub outcome: Applied,
}

/// Whether a batch moved the weights.
#[must_use]
#[derive(Clone, Debug, PartialEq)]
pub enum Applied {
    /// They moved.
    Yes,
    /// Nothing moved but the loss scale and the position in the data.
    Skipped(Skip),
}

/// Why an update was skipped.
#[derive(Clone, Debug, PartialEq)]
pub enum Skip {
    /// Gradients overflowed.
    Overflow {
        /// The first parameter whose gradient is not finite, by name; where gradients are released,
        /// the first to come.
        name: String,
    },
    /// The gradients are finite, but larger than wanted.
    Norm {
        /// Of the mean gradients, before clipping.
        norm: f64,
        /// [`Recipe::skip_above_norm`].
        limit: f64,
    },
}

/// How a model does on data it does not learn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss.
    pub loss: f64,
    /// Share of samples, or tokens, whose largest logit is their target's.
    pub accuracy: f64,
    /// Samples, or tokens.
    pub n_samples: u64,
}

//! Why a run cannot start or go on.

use crate::{CheckpointError, SplitError};

/// What trainers return.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a run cannot start or go on. Weights are as they were before the update that failed.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Batch numbers that do not fit together.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// A setting outside the range in which training means anything.
    #[error("{name} is {value}, it must be {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The range.
        expected: &'static str,
    },
    /// A run of no updates.
    #[error("a run of 0 updates: {reason}")]
    NoUpdates {
        /// Which number makes it so.
        reason: String,
    },
    /// A micro-batch of the plan that the model cannot be trained on.
    #[error("a micro-batch of {n_samples} samples cannot be trained on: {error}")]
    MicroBatch {
        /// Its samples.
        n_samples: usize,
        /// The model's refusal.
        error: Box<Error>,
    },
    /// The model's judgement of the held-out images is not a number.
    #[error("the held-out loss is {loss} after {n_updates} updates: the weights have exploded")]
    Exploded {
        /// The loss.
        loss: f64,
        /// Updates applied.
        n_updates: u64,
    },
    /// Parameters that the loss does not reach: an operation between lost the gradient.
    #[error(
        "{} parameters got no gradient in the first update: {}; an operation without backward lies \
         between them and the loss (to freeze them, leave them out of the trainer's parameters)",
        names.len(),
        names.join(", ")
    )]
    MissingGradients {
        /// Their names, sorted.
        names: Vec<String>,
    },
    /// A gradient is NaN or infinite, and the loss scale is not dynamic: nothing would change.
    #[error(
        "update {update}: the gradient of {name} is not finite (loss {loss}); a lower learning rate, \
         gradient clipping or a lower loss scale may keep it finite"
    )]
    NonFinite {
        /// The update, from 1.
        update: u64,
        /// The mean loss.
        loss: f64,
        /// The first such parameter, by name; where gradients are released, the first to come.
        name: String,
    },
    /// The loss scale's or the master parameters'.
    #[error(transparent)]
    Precision(#[from] tallow_precision::Error),
    /// The accumulator's.
    #[error(transparent)]
    Accum(#[from] tallow_accum::Error),
    /// The optimizer's.
    #[error(transparent)]
    Optim(#[from] tallow_optim::Error),
    /// The schedule's.
    #[error(transparent)]
    Schedule(#[from] tallow_optim::ConfigError),
    /// The data set's.
    #[error(transparent)]
    Data(#[from] tallow_data::Error),
    /// A parameter of several segments whose gradient did not come from all of them.
    #[error(
        "{name} is used by several segments, and this update's gradient came from fewer of them than \
         the first's: gradients cannot be released"
    )]
    Tied {
        /// The parameter.
        name: String,
    },
    /// A budget below what any allowed plan needs.
    #[error("{0}")]
    NothingFits(crate::plan::NothingFits),
    /// A checkpoint's.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// The run was told to stop in the midst of an update, which has not been made.
    #[error("interrupted")]
    Interrupted,
    /// The weights'.
    #[error(transparent)]
    Models(Box<tallow_models::Error>),
    /// A segment's, or a plan's.
    #[error(transparent)]
    Recompute(#[from] tallow_recompute::Error),
    /// The memory's.
    #[error(transparent)]
    Memory(#[from] tallow_memory::Error),
    /// An operation's.
    #[error(transparent)]
    Tensor(#[from] tallow_tensor::Error),
    /// Candle's.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<tallow_models::Error> for Error {
    fn from(error: tallow_models::Error) -> Self {
        Error::Models(Box::new(error))
    }
}

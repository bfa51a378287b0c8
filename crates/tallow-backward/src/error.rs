//! Why a micro-batch has no gradients.

/// What this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a micro-batch has no gradients, or an update by them is not made.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The [`crate::Watch`] was told to stop.
    #[error("interrupted")]
    Interrupted,
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
    /// A mean over nothing: every target is ignored.
    #[error("every target of the micro-batch is ignored, so there is no mean to learn from")]
    NothingCounted,
    /// A parameter of several segments whose gradient did not come from all of them.
    #[error(
        "{name} is used by several segments, and this update's gradient came from fewer of them than \
         the first's: gradients cannot be released"
    )]
    Tied {
        /// The parameter.
        name: String,
    },
    /// The memory's: the mark was passed, or the cap.
    #[error(transparent)]
    Memory(#[from] tallow_memory::Error),
    /// The master parameters'.
    #[error(transparent)]
    Precision(#[from] tallow_precision::Error),
    /// The optimizer's.
    #[error(transparent)]
    Optim(Box<tallow_optim::Error>),
    /// A segment's, or a plan's.
    #[error(transparent)]
    Recompute(#[from] tallow_recompute::Error),
    /// Candle's.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<tallow_optim::Error> for Error {
    fn from(error: tallow_optim::Error) -> Self {
        Error::Optim(Box::new(error))
    }
}

//! Why a run cannot start or go on.

/// What a run returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a run cannot start or go on. Weights are as they were before the update that failed.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A run of no updates.
    #[error("a run of 0 updates: {reason}")]
    NoUpdates {
        /// Which number makes it so.
        reason: String,
    },
    /// A micro-batch of the run that the model cannot be trained on.
    #[error("a micro-batch of {n_samples} samples cannot be trained on: {error}")]
    MicroBatch {
        /// Its samples.
        n_samples: usize,
        /// The model's refusal.
        error: Box<tallow_train::Error>,
    },
    /// The model's judgement of the held-out samples is not a number.
    #[error("the held-out loss is {loss} after {n_updates} updates: the weights have exploded")]
    Exploded {
        /// The loss.
        loss: f64,
        /// Updates applied.
        n_updates: u64,
    },
    /// The data set's.
    #[error(transparent)]
    Data(#[from] tallow_data::Error),
    /// The trainer's.
    #[error(transparent)]
    Train(#[from] tallow_train::Error),
}

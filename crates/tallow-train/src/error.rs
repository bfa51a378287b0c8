//! Why an update is not made.

/// What trainers return.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a trainer cannot be, or an update is not made. Weights are as they were before the update that
/// failed.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Batch numbers that do not fit together.
    #[error(transparent)]
    Split(#[from] tallow_accum::SplitError),
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
    /// Two settings of a builder that decide the same.
    #[error("{first} and {second} are both given, and decide the same")]
    Contradiction {
        /// One of them.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// The run was told to stop in the midst of an update, which has not been made.
    #[error("interrupted")]
    Interrupted,
    /// The memory's: the mark was passed, or the cap.
    #[error(transparent)]
    Memory(#[from] tallow_memory::Error),
    /// What else ends a micro-batch.
    #[error(transparent)]
    Backward(tallow_backward::Error),
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
    /// That of a plan of recomputation.
    #[error(transparent)]
    Recompute(#[from] tallow_recompute::Error),
    /// That of a plan under a budget.
    #[error(transparent)]
    Plan(#[from] tallow_plan::Error),
    /// The data set's.
    #[error(transparent)]
    Data(#[from] tallow_data::Error),
    /// A checkpoint's.
    #[error(transparent)]
    Checkpoint(#[from] tallow_checkpoint::Error),
    /// That of a checkpoint's weights.
    #[error(transparent)]
    Models(Box<tallow_models::Error>),
    /// Candle's.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<tallow_backward::Error> for Error {
    fn from(error: tallow_backward::Error) -> Self {
        use tallow_backward::Error as E;
        match error {
            E::Interrupted => Error::Interrupted,
            E::Memory(error) => Error::Memory(error),
            E::NothingCounted => tallow_accum::Error::ZeroWeight { n_micro_batches: 1 }.into(),
            error => Error::Backward(error),
        }
    }
}

impl From<tallow_models::Error> for Error {
    fn from(error: tallow_models::Error) -> Self {
        Error::Models(Box::new(error))
    }
}

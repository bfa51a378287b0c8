//! Why there is no plan.

use crate::NothingFits;

/// What planning returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why there is no plan.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A budget below what any allowed plan needs.
    #[error("{0}")]
    NothingFits(Box<NothingFits>),
    /// A choice from nothing.
    #[error("{name} is {value}, it must be {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The range.
        expected: &'static str,
    },
    /// The model's, or its parameters', when it is built.
    #[error(transparent)]
    Models(Box<tallow_models::Error>),
    /// The master parameters'.
    #[error(transparent)]
    Precision(#[from] tallow_precision::Error),
    /// The data set's.
    #[error(transparent)]
    Data(#[from] tallow_data::Error),
    /// That of a segment which runs to be measured.
    #[error(transparent)]
    Backward(Box<tallow_backward::Error>),
    /// That of a rule, or of the planner of a chain.
    #[error(transparent)]
    Recompute(#[from] tallow_recompute::Error),
    /// Candle's.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<tallow_backward::Error> for Error {
    fn from(error: tallow_backward::Error) -> Self {
        Error::Backward(Box::new(error))
    }
}

impl From<tallow_models::Error> for Error {
    fn from(error: tallow_models::Error) -> Self {
        Error::Models(Box::new(error))
    }
}

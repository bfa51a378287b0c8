//! What a user of an accumulator can get wrong.

use candle_core::{DType, DeviceLocation};

/// Why gradients cannot be accumulated, or the candle error under it.
///
/// Converts into [`candle_core::Error`] with its message, so that `?` works in candle code too.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A number outside its range.
    #[error("{name} is {value}, it must be {expected}")]
    Setting {
        /// The number.
        name: &'static str,
        /// What it is.
        value: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// Nothing to accumulate for.
    #[error("the list of parameters is empty")]
    NoParameters,
    /// Parameters have one order, that of their names.
    #[error("parameter `{name}` comes after `{previous}`: names must differ and be sorted")]
    Order {
        /// The parameter.
        name: String,
        /// The one before it.
        previous: String,
    },
    /// One variable under two names: its gradient would be counted under one of them only.
    #[error("parameters `{first}` and `{name}` are the same variable")]
    Shared {
        /// The parameter.
        name: String,
        /// The name it had before.
        first: String,
    },
    /// A gradient that is not of this parameter's shape.
    #[error("gradient of parameter `{name}` has shape {found:?}, the parameter has {expected:?}")]
    Shape {
        /// The parameter.
        name: String,
        /// Shape of the gradient.
        found: Vec<usize>,
        /// Shape of the parameter.
        expected: Vec<usize>,
    },
    /// A parameter or a gradient of a dtype that cannot be added up here.
    #[error("{what} `{name}` is {found:?}, it must be {expected}")]
    DType {
        /// The parameter.
        name: String,
        /// The parameter itself or its gradient.
        what: &'static str,
        /// Its dtype.
        found: DType,
        /// What it may be.
        expected: &'static str,
    },
    /// A gradient that is elsewhere than its parameter.
    #[error("gradient of parameter `{name}` is on {found:?}, the parameter on {expected:?}")]
    Device {
        /// The parameter.
        name: String,
        /// Where the gradient is.
        found: DeviceLocation,
        /// Where the parameter is.
        expected: DeviceLocation,
    },
    /// A window that was ended before its first micro-batch.
    #[error("the window holds no micro-batch, there is no gradient to take")]
    EmptyWindow,
    /// A mean over nothing, as when every token of a window is ignored.
    #[error("the {n_micro_batches} micro-batches of the window weigh 0 together, there is no mean")]
    ZeroWeight {
        /// Micro-batches of the window.
        n_micro_batches: u64,
    },
    /// Gradients whose weight is not known yet.
    #[error("{n_gradients} gradients belong to a micro-batch that has not ended")]
    OpenMicroBatch {
        /// Gradients added since the last end of a micro-batch.
        n_gradients: u64,
    },
    /// Candle's own.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// What accumulation returns.
pub type Result<T> = std::result::Result<T, Error>;

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => Self::Wrapped(Box::new(other)),
        }
    }
}

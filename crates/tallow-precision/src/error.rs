//! What a user of this crate can get wrong.

use crate::{Rule, Skip};
use candle_core::DType;

/// A setting, a window or a parameter that cannot be, or the candle error under it.
///
/// Converts into [`candle_core::Error`] with its message, so that `?` works in candle code too.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A number outside its range.
    #[error("{setting} is {value}, it must be {expected}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// What would do.
        expected: String,
    },
    /// The run skips and does not recover.
    #[error(
        "{count} windows in a row overflowed, the limit; the loss scale is {scale} and the first \
         tensor to overflow is `{name}`"
    )]
    Stuck {
        /// Windows in a row that overflowed.
        count: u32,
        /// The scale after the last of them.
        scale: f32,
        /// The first tensor, in order of names, that was not finite in the last of them.
        name: String,
    },
    /// Gradients were to be divided though no loss was scaled since the last division.
    #[error(
        "no loss was scaled since window {n_windows} was unscaled: dividing again would divide by \
         the loss scale twice"
    )]
    Unscaled {
        /// Windows that are closed.
        n_windows: u64,
    },
    /// A window was to be skipped that does not exist or is skipped already.
    #[error("window {n_windows} cannot be skipped as {asked:?}: it was {found}", found = skipped(*.found))]
    Skipped {
        /// Windows that are closed.
        n_windows: u64,
        /// The reason given.
        asked: Skip,
        /// The reason it was skipped for before; `None` where there is no window yet.
        found: Option<Skip>,
    },
    /// A saved state of another kind of loss scale, and no scale to start from.
    #[error("the saved state has {saved:?}, this run has {asked:?}: say which scale to start from")]
    Resume {
        /// The rule of the saved state.
        saved: Rule,
        /// The rule of this run.
        asked: Rule,
    },
    /// No parameters, or none with a gradient.
    #[error("none of {n_params} parameters has a gradient")]
    NoGradients {
        /// Parameters given.
        n_params: usize,
    },
    /// A dtype that has no place there.
    #[error("{what} is {dtype:?}, it must be {expected}")]
    DType {
        /// The setting or tensor.
        what: String,
        /// Its dtype.
        dtype: DType,
        /// What would do.
        expected: &'static str,
    },
    /// A pattern without a character.
    #[error("override {index} of the policy has an empty pattern")]
    EmptyPattern {
        /// Its place in the list.
        index: usize,
    },
    /// A parameter was asked for with a shape other than the one it has.
    #[error("parameter `{name}` has shape {has:?}, the model asks for {asked:?}")]
    Parameter {
        /// The parameter.
        name: String,
        /// Its shape.
        has: Vec<usize>,
        /// The shape asked for.
        asked: Vec<usize>,
    },
    /// The store of parameters has a variable in another dtype than the policy keeps masters in.
    #[error("parameter `{name}` is {found:?} in its store, the policy keeps masters in {asked:?}")]
    MasterDType {
        /// The parameter.
        name: String,
        /// Its dtype.
        found: DType,
        /// The policy's parameter dtype.
        asked: DType,
    },
    /// Candle's own.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// The dtypes that models compute in.
pub(crate) const COMPUTE: &str = "f32, bf16 or f16";
/// The dtypes that losses and gradients may have.
pub(crate) const FLOAT: &str = "f32, f64, bf16 or f16";

/// What this crate's functions return.
pub type Result<T> = std::result::Result<T, Error>;

fn skipped(found: Option<Skip>) -> String {
    found.map_or("never opened".to_string(), |reason| format!("skipped as {reason:?} before"))
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => Self::Wrapped(Box::new(other)),
        }
    }
}

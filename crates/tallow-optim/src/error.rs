use candle_core::{DType, Shape};
use std::path::PathBuf;
use tallow_kernels::optim::BlockError;

/// What this crate refuses.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting that no optimizer can work with.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A parameter that cannot be trained.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    /// A gradient that does not fit its parameter; nothing was updated.
    #[error(
        "gradient of `{name}`: {found_dtype:?} {found:?}, the parameter is {dtype:?} {shape:?}"
    )]
    Gradient {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Shape,
        /// Its dtype.
        dtype: DType,
        /// The gradient's shape.
        found: Shape,
        /// The gradient's dtype; it must be a float, not the parameter's.
        found_dtype: DType,
    },
    /// A checkpoint or a state file.
    #[error(transparent)]
    State(#[from] StateError),
    /// Candle's own.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// A setting that no optimizer can work with.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A number out of its range.
    #[error("{setting} is {value}, it must be {allowed}")]
    Setting {
        /// Which.
        setting: String,
        /// The number given.
        value: f64,
        /// The range.
        allowed: &'static str,
    },
    /// A block that no 8-bit state can have.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// A window too small for one chunk of the named parameter's state.
    #[error("a window of {window_bytes} bytes is too small: `{name}` needs {least_bytes}")]
    Window {
        /// The size asked for.
        window_bytes: u64,
        /// The parameter with the largest chunk.
        name: String,
        /// Its size.
        least_bytes: u64,
    },
    /// Two settings that cannot live together.
    #[error("{algorithm} keeps its state in f32 and in memory only, not as {setting}")]
    Unsupported {
        /// The algorithm.
        algorithm: &'static str,
        /// The setting that it lacks.
        setting: &'static str,
    },
}

/// A parameter that cannot be trained.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ParameterError {
    /// The list is empty, or every parameter in it is frozen.
    #[error("none of the {n_parameters} parameters given is to be trained")]
    None {
        /// How many were given.
        n_parameters: usize,
    },
    /// Two entries are one variable, or have one name: it would be updated twice.
    #[error("parameters `{first}` and `{second}` are the same variable or name")]
    Twice {
        /// One.
        first: String,
        /// The other.
        second: String,
    },
    /// Not f32, f64, bf16 or f16.
    #[error("parameter `{name}` is {dtype:?}: it must be f32, f64, bf16 or f16")]
    DType {
        /// The parameter.
        name: String,
        /// Its dtype.
        dtype: DType,
    },
    /// Narrower than f32, where an average is wanted.
    #[error("parameter `{name}` is {dtype:?}: an average of weights needs them in f32")]
    Narrow {
        /// The parameter.
        name: String,
        /// Its dtype.
        dtype: DType,
    },
    /// Its elements do not lie side by side, so it cannot be updated in place.
    #[error("parameter `{name}` of shape {shape:?} does not lie in memory in one piece")]
    Layout {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Shape,
    },
    /// Off the CPU only f32 states, and bf16 ones rounded to nearest, exist.
    #[error("parameter `{name}` is off the CPU, where there is no {setting}")]
    Device {
        /// The parameter.
        name: String,
        /// The setting that is missing there.
        setting: &'static str,
    },
    /// There is no such parameter, or it is frozen.
    #[error("there is no trained parameter `{name}`")]
    Unknown {
        /// The name or number asked for.
        name: String,
    },
}

/// A checkpoint or a state file that cannot be used.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Not a safetensors file, or cut short.
    #[error("{path}: {n_bytes} bytes that are no whole safetensors file: {source}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Its size.
        n_bytes: u64,
        /// What the parser found.
        source: safetensors::SafeTensorError,
    },
    /// It lacks a tensor, or has one that no parameter of this optimizer owns.
    #[error("{path}: tensor `{tensor}` is {found}, wanted {wanted}")]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype and shape, or `absent`.
        found: String,
        /// What this optimizer has in its place, or `absent`.
        wanted: String,
    },
    /// It belongs to another optimizer, or to another configuration of this one.
    #[error("{path}: metadata `{key}` is `{found}`, wanted `{wanted}`")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The metadata's key.
        key: String,
        /// What the file says.
        found: String,
        /// What this optimizer says.
        wanted: String,
    },
    /// An earlier update of this parameter failed half way. Load a checkpoint.
    #[error("{path}: the state of `{name}` was torn by a failed update; load a checkpoint")]
    Torn {
        /// The state file.
        path: PathBuf,
        /// The parameter.
        name: String,
    },
    /// Another optimizer has this state file open.
    #[error("{path}: the state file belongs to another optimizer")]
    InUse {
        /// The state file.
        path: PathBuf,
    },
}

/// This crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Keeps the message and the error: candle's traits demand candle's type.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::Wrapped(Box::new(error)),
        }
    }
}

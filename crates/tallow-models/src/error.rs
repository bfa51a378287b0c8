//! What a configuration, an input or a file can get wrong.

use candle_core::DType;
use std::path::PathBuf;

/// A model that cannot be built or run, or the error under it.
///
/// Converts into [`candle_core::Error`] with its message, so that `?` works in candle code too.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A size that must be at least 1.
    #[error("{name} is 0, it must be at least 1")]
    Zero {
        /// The size.
        name: &'static str,
    },
    /// Something that must be shared out evenly cannot be.
    #[error("{part} {n_parts} does not divide {whole} {n_whole}")]
    NotDivisible {
        /// What divides.
        part: &'static str,
        /// Its number.
        n_parts: usize,
        /// What is divided.
        whole: &'static str,
        /// Its number.
        n_whole: usize,
    },
    /// A number outside its range.
    #[error("{name} is {found}, it must be {expected}")]
    Range {
        /// The setting.
        name: &'static str,
        /// Its value.
        found: f64,
        /// What would do.
        expected: &'static str,
    },
    /// A field of a Hugging Face configuration that is absent, or says what this crate has not.
    #[error("config field `{name}` is {found}, it must be {expected}")]
    Field {
        /// The field.
        name: String,
        /// Its value, or "absent".
        found: String,
        /// What would do.
        expected: String,
    },
    /// More tokens than the model has positions.
    #[error("{n_tokens} tokens, the model has positions for {context}")]
    TooLong {
        /// Tokens, those of a cache among them.
        n_tokens: usize,
        /// Positions.
        context: usize,
    },
    /// An input of another shape than the model's.
    #[error("the input is {found:?}, it must be {expected}")]
    Input {
        /// Its shape.
        found: Vec<usize>,
        /// What would fit.
        expected: String,
    },
    /// A pattern of a LoRA that names no linear layer of the model.
    #[error("LoRA target `{target}` matches none of the model's {n_linears} linear layers")]
    NoTarget {
        /// The pattern.
        target: String,
        /// Linear layers looked at.
        n_linears: usize,
    },
    /// Logits from which no token can be drawn.
    #[error("the logits after {n_tokens} tokens have no finite maximum")]
    Logits {
        /// Tokens before.
        n_tokens: usize,
    },
    /// A file of weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// An operation's.
    #[error(transparent)]
    Tensor(#[from] tallow_tensor::Error),
    /// Candle's own.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// A file of weights that cannot be used.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The system refused.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Not a safetensors file, or cut short.
    #[error("{path}: {n_bytes} bytes that are no whole safetensors file: {what}", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Its size.
        n_bytes: u64,
        /// What is wrong.
        what: String,
    },
    /// A file could not be written.
    #[error("{path}: {source}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: safetensors::SafeTensorError,
    },
    /// Parameters that no file holds.
    #[error(
        "{n_missing} of {n_params} parameters are in none of the {n_tensors} tensors of the files; \
         the first is `{first}`"
    )]
    Missing {
        /// The first, as it would be called in a file.
        first: String,
        /// How many.
        n_missing: usize,
        /// Parameters asked for.
        n_params: usize,
        /// Tensors the files hold.
        n_tensors: usize,
    },
    /// A tensor of another shape than the parameter's.
    #[error("`{name}` has shape {found:?} in {path}, the model asks for {asked:?}", path = path.display())]
    Shape {
        /// The tensor.
        name: String,
        /// The file.
        path: PathBuf,
        /// Its shape there.
        found: Vec<usize>,
        /// The shape asked for.
        asked: Vec<usize>,
    },
    /// A tensor whose dtype is no float of candle's.
    #[error("`{name}` is {found} in {path}, it must be F64, F32, BF16 or F16", path = path.display())]
    DType {
        /// The tensor.
        name: String,
        /// The file.
        path: PathBuf,
        /// Its dtype there.
        found: String,
    },
    /// A parameter that cannot be written: no float.
    #[error("parameter `{name}` is {dtype:?}, files hold floats")]
    NotFloat {
        /// The parameter.
        name: String,
        /// Its dtype.
        dtype: DType,
    },
    /// A tensor that no parameter takes, where all should be taken.
    #[error("`{name}` is in {path}, but not in the model", path = path.display())]
    Unused {
        /// The tensor.
        name: String,
        /// The file, or the first of several.
        path: PathBuf,
    },
}

/// What this crate's functions return.
pub type Result<T> = std::result::Result<T, Error>;

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            Error::Tensor(error) => error.into(),
            other => Self::Wrapped(Box::new(other)),
        }
    }
}

/// Refuses sizes of 0.
pub(crate) fn at_least_one(sizes: &[(&'static str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some(&(name, _)) => Err(Error::Zero { name }),
        None => Ok(()),
    }
}

/// Refuses parts that do not divide the whole.
pub(crate) fn divides(
    (part, n_parts): (&'static str, usize),
    (whole, n_whole): (&'static str, usize),
) -> Result<()> {
    if n_parts > 0 && n_whole.is_multiple_of(n_parts) {
        return Ok(());
    }
    Err(Error::NotDivisible { part, n_parts, whole, n_whole })
}

/// Refuses what is not a finite number above 0.
pub(crate) fn positive(name: &'static str, found: f64) -> Result<()> {
    if found.is_finite() && found > 0.0 {
        return Ok(());
    }
    Err(Error::Range { name, found, expected: "finite and above 0" })
}

/// Refuses what is no probability of dropout.
pub(crate) fn dropout_range(name: &'static str, found: f64) -> Result<()> {
    if (0.0..1.0).contains(&found) {
        return Ok(());
    }
    Err(Error::Range { name, found, expected: "at least 0 and below 1" })
}

/// Refuses more parameters than memory has addresses; products of sizes then do not wrap around.
pub(crate) fn addressable(n_params: u64) -> Result<()> {
    if n_params < 1 << 60 {
        return Ok(());
    }
    let (name, found) = ("number of parameters", n_params as f64);
    Err(Error::Range { name, found, expected: "below 2^60" })
}

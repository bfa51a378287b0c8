//! What a user of these operations can get wrong.

use candle_core::DType;
use tallow_kernels as kernels;

/// An operation or layer that cannot run, or the candle error under it.
///
/// Converts into [`candle_core::Error`] with its message, so that `?` works in candle code too.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation on floats was given something else.
    #[error("{op}: {dtype:?} is not supported, it needs f32, f64, bf16 or f16")]
    DType {
        /// The operation.
        op: &'static str,
        /// The dtype given.
        dtype: DType,
    },
    /// Class targets of another dtype.
    #[error("{op}: targets are {dtype:?}, they must be u8, u32 or i64")]
    Targets {
        /// The operation.
        op: &'static str,
        /// Their dtype.
        dtype: DType,
    },
    /// Operands that must share a dtype do not.
    #[error("{op}: {what} is {found:?}, it must be {expected:?} like the first operand")]
    DTypeMismatch {
        /// The operation.
        op: &'static str,
        /// The operand.
        what: &'static str,
        /// Its dtype.
        found: DType,
        /// The dtype of the first operand.
        expected: DType,
    },
    /// An operand has a shape that does not fit the others.
    #[error("{op}: {what} is {found:?}, it must be {expected}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The operand.
        what: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// What would fit.
        expected: String,
    },
    /// A convolution, pooling or batch norm that no kernel can run.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// Heads that do not fit together.
    #[error(transparent)]
    Attention(#[from] kernels::attention::ShapeError),
    /// A target outside the classes, or a smoothing outside `[0, 1]`.
    #[error(transparent)]
    Loss(#[from] kernels::loss::LossError),
    /// An id outside the table.
    #[error(transparent)]
    Embedding(#[from] kernels::embedding::EmbeddingError),
    /// A probability outside `[0, 1)`.
    #[error(transparent)]
    Dropout(#[from] kernels::dropout::DropoutError),
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
    /// A parameter was asked for in a dtype other than the one it has.
    #[error("parameter `{name}` is {has:?}, the model asks for {asked:?}")]
    ParameterDType {
        /// The parameter.
        name: String,
        /// Its dtype.
        has: DType,
        /// The dtype asked for.
        asked: DType,
    },
    /// Candle's own.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// What operations return.
pub type Result<T> = std::result::Result<T, Error>;

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => Self::Wrapped(Box::new(other)),
        }
    }
}

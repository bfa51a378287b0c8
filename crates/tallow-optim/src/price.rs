//! What states cost, before any is made.

use tallow_kernels::optim::{Block, Format, Rounding};

/// Parameters with fewer elements keep f32 moments in 8-bit: they cost little and matter much
/// (norms, biases).
pub const MIN_8BIT_ELEMS: u64 = 4096;

/// How moments are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateFormat {
    /// 4 bytes an element; 8 for f64 parameters.
    F32,
    /// 2 bytes an element; 4 with [`Rounding::Kahan`]. With [`Rounding::Nearest`] a second moment
    /// of `beta2` 0.999 does not decay: a thousandth is below half a step of bf16.
    Bf16(Rounding),
    /// A byte an element and 4 bytes a block, quantised block by block.
    Bits8 {
        /// Elements of a block, a power of two from 16 to 2048.
        block_elems: usize,
    },
}

impl StateFormat {
    /// 8 bits in blocks of 256, which keep an outlier's harm small.
    pub const BITS8: StateFormat = StateFormat::Bits8 { block_elems: 256 };
}

/// The format of a moment of one parameter.
pub(crate) const fn resolved(format: StateFormat, is_f64: bool, n_elems: u64) -> Format {
    let full = if is_f64 { Format::F64 } else { Format::F32 };
    match format {
        StateFormat::F32 => full,
        StateFormat::Bf16(rounding) => Format::Bf16(rounding),
        StateFormat::Bits8 { block_elems } => match Block::new(block_elems) {
            Ok(block) if n_elems >= MIN_8BIT_ELEMS => Format::Bits8(block),
            _ => full,
        },
    }
}

/// Bytes of one moment of a parameter of `n_elems` elements that is not f64.
const fn moment_bytes(n_elems: u64, format: StateFormat) -> u64 {
    resolved(format, false, n_elems).bytes(n_elems)
}

/// Bytes AdamW or Adam keeps for a parameter: two moments.
pub const fn adamw_state_bytes(n_elems: u64, format: StateFormat) -> u64 {
    2 * moment_bytes(n_elems, format)
}

/// Bytes SGD with momentum keeps for a parameter; without momentum it keeps none.
pub const fn sgd_state_bytes(n_elems: u64, format: StateFormat) -> u64 {
    moment_bytes(n_elems, format)
}

/// Bytes Lion keeps for a parameter: its momentum.
pub const fn lion_state_bytes(n_elems: u64, format: StateFormat) -> u64 {
    moment_bytes(n_elems, format)
}

/// Bytes Adafactor keeps for a parameter of shape `dims`: a number a row and a column of each
/// matrix of the last two dimensions, or a number an element of a vector.
pub const fn adafactor_state_bytes(dims: &[usize]) -> u64 {
    let (rows, cols) = adafactor_numbers(dims);
    4 * (rows + cols)
}

/// Numbers of the factors `row` and `col`; the whole second moment of a vector counts as `row`.
pub(crate) const fn adafactor_numbers(dims: &[usize]) -> (u64, u64) {
    let mut n_elems = 1;
    let mut i = 0;
    while i < dims.len() {
        n_elems *= dims[i] as u64;
        i += 1;
    }
    if dims.len() < 2 || n_elems == 0 {
        return (n_elems, 0);
    }
    (n_elems / dims[dims.len() - 1] as u64, n_elems / dims[dims.len() - 2] as u64)
}

/// Bytes that [`Rounding::Kahan`] of 16-bit weights adds to any optimizer's state.
pub const fn kahan_weights_bytes(n_elems: u64) -> u64 {
    2 * n_elems
}

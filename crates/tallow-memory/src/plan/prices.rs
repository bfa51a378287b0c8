//! Bytes that follow from counting elements: weights, gradients, sums, optimizer state.
//!
//! | | bytes of a tensor of `n` elements |
//! |---|---|
//! | [`Format::F32`] | `4 n` |
//! | [`Format::Half`] | `2 n` |
//! | [`Format::Blockwise8`] | `n + 4 ceil(n / 256)` |
//! | divided over `w` ranks | that of `ceil(n / w)` elements |
//!
//! Frozen parameters have weights and nothing else. A sheet is about what is *kept*; what an
//! optimizer or a gather needs for a moment is a transient and the caller's to price.
//!
//! ```
//! use tallow_memory::plan::prices::{Format, Parameter, Sheet, price};
//!
//! // 784-256-10, Adam in f32.
//! let mlp = [784 * 256, 256, 256 * 10, 10].map(Parameter::trainable);
//! let adam = Sheet { moments: Format::F32, n_moments: 2, ..Sheet::plain(Format::F32) };
//! assert_eq!(
//!     price(&mlp, &adam).to_string(),
//!     "weights 814120 + gradients 814120 + optimizer state 1628240 = 3256480 bytes"
//! );
//! ```

use crate::terms::Terms;

/// Elements of a block of [`Format::Blockwise8`], each with one f32 scale.
pub const BLOCK_ELEMS: u64 = 256;

/// How the elements of a tensor are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Not at all.
    Absent,
    /// 4 bytes.
    F32,
    /// 2 bytes: bf16 or f16.
    Half,
    /// 1 byte, and 4 for each block of [`BLOCK_ELEMS`] or the rest of one.
    Blockwise8,
}

impl Format {
    /// Bytes of a tensor of `n_elems`; stops at `u64::MAX`.
    pub const fn bytes(self, n_elems: u64) -> u64 {
        match self {
            Format::Absent => 0,
            Format::F32 => n_elems.saturating_mul(4),
            Format::Half => n_elems.saturating_mul(2),
            Format::Blockwise8 => {
                n_elems.saturating_add(n_elems.div_ceil(BLOCK_ELEMS).saturating_mul(4))
            }
        }
    }
}

/// A parameter, as far as bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Elements.
    pub n_elems: u64,
    /// Whether it is trained; a frozen one has no gradient and no state.
    pub is_trainable: bool,
}

impl Parameter {
    /// One that is trained.
    pub const fn trainable(n_elems: u64) -> Self {
        Self { n_elems, is_trainable: true }
    }

    /// One that is not.
    pub const fn frozen(n_elems: u64) -> Self {
        Self { n_elems, is_trainable: false }
    }
}

/// Over how many ranks each part is divided, tensor by tensor; 1 is whole, at each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Weights, as in ZeRO 3.
    pub weights: u64,
    /// Gradients and their sums, from ZeRO 2 on.
    pub gradients: u64,
    /// Masters and moments, from ZeRO 1 on.
    pub state: u64,
}

impl Ranks {
    /// Nothing is divided.
    pub const ONE: Ranks = Ranks { weights: 1, gradients: 1, state: 1 };
}

/// Where masters and moments live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// With the weights.
    Device,
    /// Elsewhere: they cost the device nothing, and [`offloaded_bytes`] there.
    Elsewhere,
}

/// How a model is kept while it trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sheet {
    /// Parameters in what they compute in.
    pub weights: Format,
    /// Gradients of one backward pass.
    pub gradients: Format,
    /// Sums over micro-batches; absent for a single one.
    pub accumulators: Format,
    /// Master weights; absent where the weights are their own.
    pub masters: Format,
    /// Each moment.
    pub moments: Format,
    /// How many moments the optimizer has: Adam 2, momentum 1, plain SGD 0.
    pub n_moments: u64,
    /// The division over ranks.
    pub ranks: Ranks,
    /// Where masters and moments live.
    pub state_home: Home,
}

impl Sheet {
    /// Weights and gradients in `format`, and nothing else: plain SGD.
    pub const fn plain(format: Format) -> Self {
        Self {
            weights: format,
            gradients: format,
            accumulators: Format::Absent,
            masters: Format::Absent,
            moments: Format::Absent,
            n_moments: 0,
            ranks: Ranks::ONE,
            state_home: Home::Device,
        }
    }
}

/// What a rank's device keeps of `parameters`.
///
/// # Panics
/// If a number of ranks is 0.
pub fn price(parameters: &[Parameter], sheet: &Sheet) -> Terms {
    let Ranks { weights, gradients, .. } = sheet.ranks;
    let trained = |format| kept_bytes(parameters, format, gradients, true);
    let optimizer_state_bytes = match sheet.state_home {
        Home::Device => state_bytes(parameters, sheet),
        Home::Elsewhere => 0,
    };
    Terms {
        weights_bytes: kept_bytes(parameters, sheet.weights, weights, false),
        gradients_bytes: trained(sheet.gradients),
        accumulators_bytes: trained(sheet.accumulators),
        optimizer_state_bytes,
        ..Terms::ZERO
    }
}

/// What a rank keeps away from its device: masters and moments, if their home is elsewhere.
///
/// # Panics
/// If the number of ranks is 0.
pub fn offloaded_bytes(parameters: &[Parameter], sheet: &Sheet) -> u64 {
    match sheet.state_home {
        Home::Device => 0,
        Home::Elsewhere => state_bytes(parameters, sheet),
    }
}

fn state_bytes(parameters: &[Parameter], sheet: &Sheet) -> u64 {
    let of = |format| kept_bytes(parameters, format, sheet.ranks.state, true);
    of(sheet.masters).saturating_add(of(sheet.moments).saturating_mul(sheet.n_moments))
}

fn kept_bytes(parameters: &[Parameter], format: Format, n_ranks: u64, trained_only: bool) -> u64 {
    let counted = parameters.iter().filter(|p| p.is_trainable || !trained_only);
    let bytes = counted.map(|p| format.bytes(p.n_elems.div_ceil(n_ranks)));
    bytes.fold(0, u64::saturating_add)
}

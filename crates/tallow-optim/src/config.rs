//! What an optimizer is told, checked once.

use crate::{
    error::ConfigError,
    price::{StateFormat, resolved},
};
use candle_core::DType;
use std::path::PathBuf;
use tallow_kernels::optim::{Adafactor, Adam, Block, Lion, Rounding, Rule, Sgd};

/// The formula and its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Algorithm {
    /// Decoupled weight decay (Loshchilov and Hutter 2019).
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
    },
    /// Weight decay as part of the gradient (Kingma and Ba 2015).
    Adam {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
    },
    /// Gradient descent; weight decay as part of the gradient, no dampening.
    Sgd {
        /// Decay of the momentum; at 0 nothing is kept.
        momentum: f64,
        /// Whether the gradient looks a step ahead; needs momentum.
        nesterov: bool,
    },
    /// The sign of an interpolated momentum (Chen et al. 2023); decoupled weight decay.
    Lion {
        /// Weight of the momentum in the direction.
        beta1: f64,
        /// Decay of the momentum.
        beta2: f64,
    },
    /// Factored second moment (Shazeer and Stern 2018), as `torch.optim.Adafactor`. Its state is
    /// small, and stays in f32 and in memory.
    Adafactor {
        /// The second moment forgets by `t^beta2_decay`; negative.
        beta2_decay: f64,
        /// Floor of the second moment; `None` for the epsilon of the arithmetic's type.
        eps1: Option<f64>,
        /// Floor of the parameter's scale.
        eps2: f64,
        /// The update's root mean square is clipped to this.
        d: f64,
    },
}

impl Algorithm {
    /// AdamW with the usual numbers: 0.9, 0.999, 1e-8.
    pub const ADAMW: Algorithm = Algorithm::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    /// Adam with the usual numbers.
    pub const ADAM: Algorithm = Algorithm::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    /// Plain gradient descent.
    pub const SGD: Algorithm = Algorithm::Sgd { momentum: 0.0, nesterov: false };
    /// Lion with its paper's numbers: 0.9, 0.99.
    pub const LION: Algorithm = Algorithm::Lion { beta1: 0.9, beta2: 0.99 };
    /// Adafactor with PyTorch's numbers.
    pub const ADAFACTOR: Algorithm =
        Algorithm::Adafactor { beta2_decay: -0.8, eps1: None, eps2: 1e-3, d: 1.0 };
}

/// An optimizer's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The formula.
    pub algorithm: Algorithm,
    /// The rate of the next update; see [`crate::Schedule`].
    pub learning_rate: f64,
    /// Weight decay of parameters that no group names.
    pub weight_decay: f64,
    /// The first group whose pattern matches a parameter's name rules it.
    pub groups: Vec<Group>,
    /// How moments are stored. Parameters below [`crate::MIN_8BIT_ELEMS`] stay f32 in 8-bit.
    pub format: StateFormat,
    /// How bf16 and f16 weights are rounded; there are no master copies.
    pub weights: Rounding,
    /// Where moments lie.
    pub place: Place,
    /// Seed of stochastic rounding.
    pub seed: u64,
}

/// Parameters that are treated alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// A name in which each `*` stands for any run of characters.
    pub pattern: String,
    /// What becomes of them.
    pub treatment: Treatment,
}

/// What an optimizer does with a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Treatment {
    /// Nothing; no state is kept.
    Frozen,
    /// It is trained.
    Trained {
        /// The learning rate is multiplied by this.
        learning_rate_factor: f64,
        /// Weight decay.
        weight_decay: f64,
    },
}

/// Where moments lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In memory.
    Ram,
    /// In a file, of which a window is in memory during an update. The file is scratch: it is made
    /// anew, never read by a later run, and removed with the optimizer.
    File {
        /// The file; an existing one is overwritten.
        path: PathBuf,
        /// The most bytes of state in memory.
        window_bytes: u64,
    },
}

impl Config {
    /// f32 state in memory, no decay, no groups, rounding to nearest.
    pub fn new(algorithm: Algorithm, learning_rate: f64) -> Config {
        Config {
            algorithm,
            learning_rate,
            weight_decay: 0.0,
            groups: Vec::new(),
            format: StateFormat::F32,
            weights: Rounding::Nearest,
            place: Place::Ram,
            seed: 0,
        }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        number("learning_rate", self.learning_rate, NOT_NEGATIVE)?;
        number("weight_decay", self.weight_decay, NOT_NEGATIVE)?;
        for Group { pattern, treatment } in &self.groups {
            if let Treatment::Trained { learning_rate_factor, weight_decay } = *treatment {
                let of = |setting| format!("group `{pattern}`: {setting}");
                number(&of("learning_rate_factor"), learning_rate_factor, NOT_NEGATIVE)?;
                number(&of("weight_decay"), weight_decay, NOT_NEGATIVE)?;
            }
        }
        if let StateFormat::Bits8 { block_elems } = self.format {
            Block::new(block_elems)?;
        }
        self.algorithm.check()?;
        if let Algorithm::Adafactor { .. } = self.algorithm {
            let algorithm = "Adafactor";
            if self.format != StateFormat::F32 {
                return Err(ConfigError::Unsupported { algorithm, setting: "bf16 or 8-bit" });
            }
            if self.place != Place::Ram {
                return Err(ConfigError::Unsupported { algorithm, setting: "a file" });
            }
        }
        Ok(())
    }

    /// Whether no group freezes `name`.
    pub fn is_trained(&self, name: &str) -> bool {
        matches!(self.treatment(name), Treatment::Trained { .. })
    }

    /// What becomes of parameter `name`.
    pub(crate) fn treatment(&self, name: &str) -> Treatment {
        let group = self.groups.iter().find(|g| crate::pattern::matches(&g.pattern, name));
        group.map_or(
            Treatment::Trained { learning_rate_factor: 1.0, weight_decay: self.weight_decay },
            |group| group.treatment,
        )
    }

    /// The format of a moment of `n_elems` elements of a parameter of `dtype`.
    pub(crate) fn format(&self, dtype: DType, n_elems: usize) -> tallow_kernels::optim::Format {
        resolved(self.format, dtype == DType::F64, n_elems as u64)
    }
}

/// A range of numbers, and how to say it.
type Range = (fn(f64) -> bool, &'static str);
const NOT_NEGATIVE: Range = (|x| x.is_finite() && x >= 0.0, "finite and at least 0");
const FINITE: Range = (f64::is_finite, "finite");
const POSITIVE: Range = (|x| x.is_finite() && x > 0.0, "finite and above 0");
const NEGATIVE: Range = (|x| x.is_finite() && x < 0.0, "finite and below 0");
const FRACTION: Range = (|x| (0.0..1.0).contains(&x), "at least 0 and below 1");
const MOMENTUM: Range = (|x| x > 0.0 && x < 1.0, "above 0 and below 1 with Nesterov");
const ABOVE_ONE: Range = (|x| x.is_finite() && x >= 1.0, "finite and at least 1");

/// Checks one setting.
pub(crate) fn number(
    setting: &str,
    value: f64,
    (is_good, allowed): Range,
) -> Result<(), ConfigError> {
    if is_good(value) {
        Ok(())
    } else {
        Err(ConfigError::Setting { setting: setting.into(), value, allowed })
    }
}

/// Checks a rate set after the optimizer was made.
pub(crate) fn check_learning_rate(learning_rate: f64) -> Result<(), ConfigError> {
    number("learning_rate", learning_rate, NOT_NEGATIVE)
}

/// Checks what gradients are multiplied by.
pub(crate) fn check_grad_factor(factor: f64) -> Result<(), ConfigError> {
    number("the factor of a gradient", factor, FINITE)
}

impl Algorithm {
    fn check(&self) -> Result<(), ConfigError> {
        match *self {
            Algorithm::AdamW { beta1, beta2, eps } | Algorithm::Adam { beta1, beta2, eps } => {
                number("beta1", beta1, FRACTION)?;
                number("beta2", beta2, FRACTION)?;
                number("eps", eps, POSITIVE)
            }
            Algorithm::Sgd { momentum, nesterov: true } => number("momentum", momentum, MOMENTUM),
            Algorithm::Sgd { momentum, nesterov: false } => number("momentum", momentum, FRACTION),
            Algorithm::Lion { beta1, beta2 } => {
                number("beta1", beta1, FRACTION)?;
                number("beta2", beta2, FRACTION)
            }
            Algorithm::Adafactor { beta2_decay, eps1, eps2, d } => {
                number("beta2_decay", beta2_decay, NEGATIVE)?;
                number("eps1", eps1.unwrap_or(0.0), NOT_NEGATIVE)?;
                number("eps2", eps2, NOT_NEGATIVE)?;
                number("d", d, ABOVE_ONE)
            }
        }
    }

    /// Moments kept: first and second.
    pub(crate) fn moments(&self) -> (bool, bool) {
        match self {
            Algorithm::AdamW { .. } | Algorithm::Adam { .. } => (true, true),
            Algorithm::Sgd { momentum, .. } => (*momentum != 0.0, false),
            Algorithm::Lion { .. } => (true, false),
            Algorithm::Adafactor { .. } => (false, true),
        }
    }

    /// The formula of one update of one parameter.
    pub(crate) fn step(&self, lr: f64, decay: f64, t: u64, dtype: DType) -> Step {
        match *self {
            Algorithm::AdamW { beta1, beta2, eps } => {
                Step::Each(Rule::AdamW(Adam { lr, beta1, beta2, eps, decay, t }))
            }
            Algorithm::Adam { beta1, beta2, eps } => {
                Step::Each(Rule::Adam(Adam { lr, beta1, beta2, eps, decay, t }))
            }
            Algorithm::Sgd { momentum, nesterov } => {
                Step::Each(Rule::Sgd(Sgd { lr, momentum, nesterov, decay }))
            }
            Algorithm::Lion { beta1, beta2 } => {
                Step::Each(Rule::Lion(Lion { lr, beta1, beta2, decay }))
            }
            Algorithm::Adafactor { beta2_decay, eps1, eps2, d } => {
                let eps1 = eps1.unwrap_or(match dtype {
                    DType::F64 => f64::EPSILON,
                    _ => f64::from(f32::EPSILON),
                });
                Step::Whole(Adafactor { lr, beta2_decay, eps1, eps2, d, decay, t })
            }
        }
    }
}

/// The formula of one update.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Element by element.
    Each(Rule),
    /// With sums over the parameter.
    Whole(Adafactor),
}

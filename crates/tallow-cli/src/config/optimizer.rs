//! Section `optimizer`.

use anyhow::{Result, ensure};
use serde::Deserialize;
use tallow_train::optim::{self, Algorithm, Rounding, StateFormat};

/// Section `optimizer`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct OptimizerSection {
    name: Option<AlgorithmName>,
    pub(super) state: Option<State>,
    weight_decay: Option<f64>,
    beta1: Option<f64>,
    beta2: Option<f64>,
    eps: Option<f64>,
    momentum: Option<f64>,
    nesterov: Option<bool>,
    pub(super) release_gradients: Option<bool>,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum AlgorithmName {
    AdamW,
    Adam,
    Sgd,
    Lion,
    Adafactor,
}

/// How moments are stored.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(crate) enum State {
    #[serde(rename = "f32")]
    F32,
    #[serde(rename = "bf16")]
    Bf16,
    #[serde(rename = "8bit")]
    Bits8,
}

impl State {
    fn format(self) -> (&'static str, StateFormat) {
        match self {
            State::F32 => ("f32", StateFormat::F32),
            State::Bf16 => ("bf16", StateFormat::Bf16(Rounding::Stochastic)),
            State::Bits8 => ("8bit", StateFormat::BITS8),
        }
    }
}

/// The optimizer and its name, as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Optimizer {
    pub(crate) name: String,
    pub(crate) config: optim::Config,
}

impl OptimizerSection {
    /// What the section means with moments in `state`; a number that the formula does not have is
    /// refused, not ignored.
    /// # Errors
    /// Those, by key.
    pub(super) fn checked(&self, state: State, learning_rate: f64) -> Result<Optimizer> {
        let (text, algorithm, decay) = self.algorithm()?;
        let (state, format) = state.format();
        ensure!(
            self.keeps_state() || self.state.is_none(),
            "optimizer.state is {state}, but sgd without momentum keeps none"
        );
        let weight_decay = self.weight_decay.unwrap_or(decay);
        let config = optim::Config::new(algorithm, learning_rate);
        let config = optim::Config { weight_decay, format, ..config };
        Ok(Optimizer { name: format!("{text}, {state} state"), config })
    }

    /// Whether there is anything to store in another format.
    pub(super) fn keeps_state(&self) -> bool {
        self.name != Some(AlgorithmName::Sgd) || self.momentum.unwrap_or(0.0) != 0.0
    }

    fn algorithm(&self) -> Result<(&'static str, Algorithm, f64)> {
        use AlgorithmName as Name;
        let name = self.name.unwrap_or(Name::AdamW);
        let betas = |beta1: f64, beta2: f64| {
            (self.beta1.unwrap_or(beta1), self.beta2.unwrap_or(beta2), self.eps.unwrap_or(1e-8))
        };
        let (text, algorithm, decay) = match name {
            Name::AdamW => {
                let (beta1, beta2, eps) = betas(0.9, 0.999);
                ("adamw", Algorithm::AdamW { beta1, beta2, eps }, 0.01)
            }
            Name::Adam => {
                let (beta1, beta2, eps) = betas(0.9, 0.999);
                ("adam", Algorithm::Adam { beta1, beta2, eps }, 0.0)
            }
            Name::Lion => {
                let (beta1, beta2, _) = betas(0.9, 0.99);
                ("lion", Algorithm::Lion { beta1, beta2 }, 0.0)
            }
            Name::Sgd => {
                let (momentum, nesterov) =
                    (self.momentum.unwrap_or(0.0), self.nesterov.unwrap_or(false));
                ("sgd", Algorithm::Sgd { momentum, nesterov }, 0.0)
            }
            Name::Adafactor => ("adafactor", Algorithm::ADAFACTOR, 0.0),
        };
        let adam = matches!(name, Name::AdamW | Name::Adam);
        for (key, given, known) in [
            ("beta1", self.beta1.is_some(), adam || name == Name::Lion),
            ("beta2", self.beta2.is_some(), adam || name == Name::Lion),
            ("eps", self.eps.is_some(), adam),
            ("momentum", self.momentum.is_some(), name == Name::Sgd),
            ("nesterov", self.nesterov.is_some(), name == Name::Sgd),
        ] {
            ensure!(!given || known, "optimizer.{key} is given, but {text} has none");
        }
        Ok((text, algorithm, decay))
    }
}

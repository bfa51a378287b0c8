//! Section `precision`.

use anyhow::{Context, Result, bail, ensure};
use candle_core::DType;
use serde::Deserialize;
use tallow_train::{
    optim::Rounding,
    precision::{DynamicScale, LossScale, Policy},
};

/// Section `precision`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct PrecisionSection {
    pub(super) compute: Option<Compute>,
    loss_scale: Option<Scale>,
    pub(super) masters: Option<bool>,
    keep_f32: Option<Vec<String>>,
}

/// What matrices and convolutions compute in.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Compute {
    F32,
    Bf16,
    F16,
    Fp8,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "loss_scale is \"dynamic\", \"off\" or a number")]
enum Scale {
    Number(f64),
    Word(ScaleWord),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum ScaleWord {
    Dynamic,
    Off,
}

/// What computes in what.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Precision {
    /// The precision, as written.
    pub(crate) name: String,
    /// Dtypes by name.
    pub(crate) policy: Policy,
    /// How weights without masters are rounded.
    pub(crate) weights: Rounding,
    /// The loss scale at the start.
    pub(crate) loss_scale: LossScale,
}

impl PrecisionSection {
    /// Whether nothing of it is given.
    pub(super) fn is_empty(&self) -> bool {
        let Self { compute, loss_scale, masters, keep_f32 } = self;
        compute.is_none() && loss_scale.is_none() && masters.is_none() && keep_f32.is_none()
    }

    /// What the section means where it computes in `compute`.
    /// # Errors
    /// If keys contradict that.
    pub(super) fn checked(&self, compute: Compute) -> Result<Precision> {
        let (policy, weights) = self.policy(compute)?;
        let name = compute.name(self.masters != Some(false));
        Ok(Precision { name, policy, weights, loss_scale: self.loss_scale(compute)? })
    }

    fn policy(&self, compute: Compute) -> Result<(Policy, Rounding)> {
        let mut policy = match compute {
            Compute::F32 => Policy::f32(),
            Compute::Bf16 => Policy::bf16(),
            Compute::F16 => Policy::f16(),
            Compute::Fp8 => Policy::fp8_stored(DType::BF16),
        };
        ensure!(
            compute != Compute::F32 || self.keep_f32.is_none(),
            "precision.keep_f32 is given, but everything computes in f32"
        );
        for pattern in self.keep_f32.iter().flatten() {
            policy = policy.with(pattern, DType::F32);
        }
        match (self.masters, compute) {
            (None | Some(true), _) => Ok((policy, Rounding::Nearest)),
            (Some(false), Compute::Bf16 | Compute::F16) => {
                Ok((Policy { parameter: policy.compute, ..policy }, Rounding::Stochastic))
            }
            (Some(false), Compute::F32) => {
                bail!("precision.masters is false, but f32 weights are their own masters")
            }
            (Some(false), Compute::Fp8) => {
                bail!("precision.masters is false, but fp8 weights need masters; use bf16")
            }
        }
    }

    fn loss_scale(&self, compute: Compute) -> Result<LossScale> {
        let dynamic = || LossScale::dynamic(DynamicScale::STANDARD).expect("the standard is one");
        match &self.loss_scale {
            None if compute == Compute::F16 => Ok(dynamic()),
            None | Some(Scale::Word(ScaleWord::Off)) => Ok(LossScale::off()),
            Some(Scale::Word(ScaleWord::Dynamic)) => Ok(dynamic()),
            Some(Scale::Number(scale)) => {
                LossScale::fixed(*scale as f32).context("precision.loss_scale")
            }
        }
    }
}

impl Compute {
    fn name(self, masters: bool) -> String {
        let name = match self {
            Compute::F32 => "f32",
            Compute::Bf16 => "bf16",
            Compute::F16 => "f16",
            Compute::Fp8 => "fp8",
        };
        if masters { name.to_string() } else { format!("{name} without masters") }
    }
}

//! Rotary frequencies for sequences longer than a model was first trained on.

use crate::{
    error::{Error, Result, at_least_one, positive},
    hf::{HfValue, refuse},
};
use std::{collections::BTreeMap, f64::consts::TAU};
use tallow_tensor::ops;

/// How rotary frequencies are changed for longer sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Divided by a factor (Chen et al. 2023).
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1's: slow frequencies divided by a factor, fast ones kept, a ramp between.
    Llama3 {
        /// The factor.
        factor: f64,
        /// Pairs that turn less often than this in the original context are slow.
        low_freq_factor: f64,
        /// Pairs that turn more often than this in the original context are fast.
        high_freq_factor: f64,
        /// Tokens of the longest sequence of the first training.
        original_context: usize,
    },
}

impl RopeScaling {
    /// Radians a token of each of the `head_dim / 2` pairs.
    /// # Errors
    /// If `head_dim` is odd.
    pub fn frequencies(&self, head_dim: usize, theta: f64) -> Result<Vec<f64>> {
        let mut freqs = ops::rope_frequencies(head_dim, theta)?;
        for freq in &mut freqs {
            *freq = match *self {
                Self::None => *freq,
                Self::Linear { factor } => *freq / factor,
                Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                    let n_turns = original_context as f64 * *freq / TAU;
                    let ramp = (n_turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = ramp.clamp(0.0, 1.0);
                    (1.0 - kept) * *freq / factor + kept * *freq
                }
            };
        }
        Ok(freqs)
    }

    /// Refuses numbers out of their range.
    pub(crate) fn check(&self) -> Result<()> {
        match *self {
            Self::None => Ok(()),
            Self::Linear { factor } => positive("rope factor", factor),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("rope factor", factor)?;
                positive("rope low_freq_factor", low_freq_factor)?;
                at_least_one(&[("rope original_context", original_context)])?;
                if high_freq_factor.is_finite() && high_freq_factor > low_freq_factor {
                    return Ok(());
                }
                let (name, found) = ("rope high_freq_factor", high_freq_factor);
                Err(Error::Range { name, found, expected: "finite and above low_freq_factor" })
            }
        }
    }

    /// The base of the frequencies and their scaling, from `rope_parameters` (transformers 5) or
    /// `rope_theta` and `rope_scaling` (before).
    pub(crate) fn from_hf(config: &HfValue) -> Result<(f64, Self)> {
        let theta = config.number_or("rope_theta", 10_000.0)?;
        let Some(rope) = config.get("rope_parameters").or(config.get("rope_scaling")) else {
            return Ok((theta, Self::None));
        };
        let theta = rope.number_or("rope_theta", theta)?;
        let kind = rope.get("rope_type").or(rope.get("type"));
        let number = |name: &str| match rope.get(name).map(HfValue::number) {
            Some(Some(x)) => Ok(x),
            _ => Err(refuse(name, rope.get(name), "a number")),
        };
        let scaling = match kind {
            None => Self::None,
            Some(HfValue::Text(kind)) if kind == "default" => Self::None,
            Some(HfValue::Text(kind)) if kind == "linear" => {
                Self::Linear { factor: number("factor")? }
            }
            Some(HfValue::Text(kind)) if kind == "llama3" => Self::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_context: rope.size("original_max_position_embeddings")?,
            },
            found => {
                let known = r#"absent or one of ["default", "linear", "llama3"]"#;
                return Err(refuse("rope_type", found, known));
            }
        };
        Ok((theta, scaling))
    }

    /// Both ways of writing it, for every version of transformers.
    pub(crate) fn to_hf(self, theta: f64) -> BTreeMap<String, HfValue> {
        let mut fields = match self {
            Self::None => vec![("rope_type", "default".into())],
            Self::Linear { factor } => {
                vec![("rope_type", "linear".into()), ("factor", factor.into())]
            }
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => vec![
                ("rope_type", "llama3".into()),
                ("factor", factor.into()),
                ("low_freq_factor", low_freq_factor.into()),
                ("high_freq_factor", high_freq_factor.into()),
                ("original_max_position_embeddings", original_context.into()),
            ],
        };
        let map = |fields: &[(&str, HfValue)]| {
            HfValue::Map(fields.iter().map(|(n, v)| (n.to_string(), v.clone())).collect())
        };
        let scaling = if self == Self::None { HfValue::Null } else { map(&fields) };
        fields.push(("rope_theta", theta.into()));
        BTreeMap::from([
            ("rope_parameters".to_string(), map(&fields)),
            ("rope_scaling".to_string(), scaling),
            ("rope_theta".to_string(), theta.into()),
        ])
    }
}

//! Whole networks by the JSON object that `xtask/python/torch_step.py` takes too.

use candle_nn::VarBuilder;
use serde_json::Value;
use tallow_models::{Gpt2Config, ResNetConfig, Segments};

/// What a binary ends with.
pub type Failure = Box<dyn std::error::Error>;

/// Classes of the images.
pub const N_CLASSES: usize = 1000;

/// The number under `key`.
/// # Errors
/// If there is none.
pub fn number(work: &Value, key: &str) -> Result<usize, Failure> {
    Ok(work[key].as_u64().ok_or(format!("no number `{key}`"))? as usize)
}

/// The network: a GPT-2 without dropout of `vocab`, `dim`, `layers`, `heads` and `context` where
/// `model` is "gpt", else a ResNet-50.
/// # Errors
/// If a size is missing, or does not go with the others.
pub fn model(work: &Value, vb: VarBuilder) -> Result<Box<dyn Segments>, Failure> {
    if work["model"] != "gpt" {
        return Ok(Box::new(ResNetConfig::resnet50(N_CLASSES).build(vb)?));
    }
    let config = Gpt2Config {
        vocab: number(work, "vocab")?,
        context: number(work, "context")?,
        model_dim: number(work, "dim")?,
        n_layers: number(work, "layers")?,
        n_heads: number(work, "heads")?,
        dropout: 0.0,
        dropout_seed: 0,
    };
    Ok(Box::new(config.build(vb)?))
}

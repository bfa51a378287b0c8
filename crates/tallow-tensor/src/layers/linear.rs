//! A linear layer.

use crate::ops;
use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder, init::DEFAULT_KAIMING_NORMAL};

/// `x W^T + b`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// From `weight` `[O, D]` and `bias` `[O]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// `[O, D]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `[O]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    /// `x` `[..., D]` → `[..., O]`, in the dtype of the weight.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(self.weight.dtype())?;
        Ok(ops::linear(&x, &self.weight, self.bias.as_ref())?)
    }
}

/// A linear layer with bias, initialised as `candle_nn::linear`.
/// # Errors
/// If the builder has no such parameters.
pub fn linear(in_features: usize, out_features: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = linear_no_bias(in_features, out_features, vb.clone())?.weight;
    let bound = 1.0 / (in_features.max(1) as f64).sqrt();
    let init = Init::Uniform { lo: -bound, up: bound };
    let bias = vb.get_with_hints(out_features, "bias", init)?;
    Ok(Linear::new(weight, Some(bias)))
}

/// A linear layer without bias, initialised as `candle_nn::linear_no_bias`.
/// # Errors
/// If the builder has no such parameters.
pub fn linear_no_bias(in_features: usize, out_features: usize, vb: VarBuilder) -> Result<Linear> {
    let shape = (out_features, in_features);
    Ok(Linear::new(vb.get_with_hints(shape, "weight", DEFAULT_KAIMING_NORMAL)?, None))
}

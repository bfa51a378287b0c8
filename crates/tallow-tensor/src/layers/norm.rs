//! Normalisation layers.

use crate::{
    ops::{self, ChannelStats, Then},
    pass,
};
use candle_core::{DType, Module, ModuleT, Result, Tensor, Var};
use candle_nn::{
    VarBuilder,
    init::{ONE, ZERO},
};

/// When a batch norm folds a batch's statistics into its running ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatUpdates {
    /// At each training forward that is not a [replay](crate::pass::replay): PyTorch's behaviour,
    /// once however often a segment is recomputed.
    EachForward,
    /// Only when the caller calls [`BatchNorm2d::update`].
    ByCaller,
}

/// Batch normalisation of the channels of `[N, C, ...]`, alone or with a relu fused behind it.
///
/// Running statistics are kept in f32 (f64 for f64 inputs) under PyTorch's names `running_mean` and
/// `running_var`; the running variance is the unbiased one.
#[derive(Clone, Debug)]
pub struct BatchNorm2d {
    weight: Tensor,
    bias: Tensor,
    running_mean: Var,
    running_var: Var,
    /// Added to the variance.
    pub eps: f64,
    /// Share of the newest batch in the running statistics; PyTorch's default is 0.1.
    pub momentum: f64,
    /// What follows.
    pub then: Then,
    /// When running statistics change.
    pub updates: StatUpdates,
}

impl BatchNorm2d {
    /// The output on the batch's own statistics, and those statistics; nothing is updated.
    /// # Errors
    /// If there is one value per channel, or the channels do not fit.
    pub fn forward_batch(&self, x: &Tensor) -> crate::Result<(Tensor, ChannelStats)> {
        ops::batch_norm2d(x, Some(&self.weight), Some(&self.bias), self.eps, self.then)
    }

    /// The output on the running statistics, as in evaluation.
    /// # Errors
    /// If the channels do not fit.
    pub fn forward_running(&self, x: &Tensor) -> crate::Result<Tensor> {
        let get = |var: &Var| var.to_dtype(DType::F64)?.to_vec1::<f64>();
        let stats = ChannelStats { mean: get(&self.running_mean)?, var: get(&self.running_var)? };
        ops::batch_norm2d_given(
            x,
            &stats,
            Some(&self.weight),
            Some(&self.bias),
            self.eps,
            self.then,
        )
    }

    /// Folds the statistics of a batch of `n_values` values per channel into the running ones:
    /// `running = (1 - momentum) running + momentum batch`, the variance unbiased.
    /// # Errors
    /// If there are fewer than two values, whose variance means nothing.
    pub fn update(&self, stats: &ChannelStats, n_values: usize) -> crate::Result<()> {
        let channels = stats.mean.len();
        if n_values < 2 && channels > 0 {
            let shape = [n_values, channels, 1];
            return Err(tallow_kernels::Error::OneValuePerChannel { shape }.into());
        }
        let unbiased = n_values as f64 / (n_values as f64 - 1.0);
        for (var, batch, factor) in
            [(&self.running_mean, &stats.mean, 1.0), (&self.running_var, &stats.var, unbiased)]
        {
            let running = var.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            let mixed: Vec<f64> = running
                .iter()
                .zip(batch)
                .map(|(r, b)| (1.0 - self.momentum) * r + self.momentum * b * factor)
                .collect();
            let mixed = Tensor::from_vec(mixed, var.shape(), var.device())?;
            var.set(&mixed.to_dtype(var.dtype())?)?;
        }
        Ok(())
    }

    /// Mean and variance that evaluation uses.
    pub fn running(&self) -> (&Var, &Var) {
        (&self.running_mean, &self.running_var)
    }
}

impl ModuleT for BatchNorm2d {
    /// `x` `[N, C, ...]` → the same shape.
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if !train {
            return Ok(self.forward_running(x)?);
        }
        let (out, stats) = self.forward_batch(x)?;
        if self.updates == StatUpdates::EachForward && !pass::is_replay() {
            self.update(&stats, x.elem_count().checked_div(stats.mean.len()).unwrap_or(0))?;
        }
        Ok(out)
    }
}

/// A batch norm with `eps` 1e-5 and momentum 0.1, PyTorch's defaults.
/// # Errors
/// If the builder has no such parameters.
pub fn batch_norm2d(channels: usize, then: Then, vb: VarBuilder) -> Result<BatchNorm2d> {
    let wide = if vb.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let buffer = |name: &str, init| {
        let tensor = vb.get_with_hints_dtype(channels, name, init, wide)?;
        Var::from_tensor(&tensor)
    };
    Ok(BatchNorm2d {
        weight: vb.get_with_hints(channels, "weight", ONE)?,
        bias: vb.get_with_hints(channels, "bias", ZERO)?,
        running_mean: buffer("running_mean", ZERO)?,
        running_var: buffer("running_var", ONE)?,
        eps: 1e-5,
        momentum: 0.1,
        then,
        updates: StatUpdates::EachForward,
    })
}

/// Layer normalisation over the last dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

impl LayerNorm {
    /// From scale and shift `[D]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>, eps: f64) -> Self {
        Self { weight, bias, eps }
    }
}

impl Module for LayerNorm {
    /// `x` `[..., D]` → the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(ops::layer_norm(x, Some(&self.weight), self.bias.as_ref(), self.eps)?)
    }
}

/// A layer norm with scale and shift.
/// # Errors
/// If the builder has no such parameters.
pub fn layer_norm(features: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    let weight = vb.get_with_hints(features, "weight", ONE)?;
    Ok(LayerNorm::new(weight, Some(vb.get_with_hints(features, "bias", ZERO)?), eps))
}

/// RMS normalisation over the last dimension.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// From the scale `[D]`.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self { weight, eps }
    }
}

impl Module for RmsNorm {
    /// `x` `[..., D]` → the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(ops::rms_norm(x, Some(&self.weight), self.eps)?)
    }
}

/// An RMS norm with a scale.
/// # Errors
/// If the builder has no such parameters.
pub fn rms_norm(features: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm::new(vb.get_with_hints(features, "weight", ONE)?, eps))
}

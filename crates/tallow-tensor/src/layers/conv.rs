//! Convolution and pooling layers.

use crate::ops::{self, Conv2dConfig, Divisor, Pool2dConfig};
use candle_core::{Module, Result, Tensor};
use candle_nn::{
    Init, VarBuilder,
    init::{FanInOut, NonLinearity, NormalOrUniform},
};

/// A 2-D convolution.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    cfg: Conv2dConfig,
}

impl Conv2d {
    /// From `weight` `[O, C/groups, R, S]` and `bias` `[O]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>, cfg: Conv2dConfig) -> Self {
        Self { weight, bias, cfg }
    }

    /// `[O, C/groups, R, S]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `[O]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Conv2d {
    /// `x` `[N, C, H, W]` → `[N, O, P, Q]`, in the dtype of the weight.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(self.weight.dtype())?;
        Ok(ops::conv2d(&x, &self.weight, self.bias.as_ref(), self.cfg)?)
    }
}

/// He et al. 2015, by fan-out, as torchvision initialises its ResNets.
const KAIMING_FAN_OUT: Init = Init::Kaiming {
    dist: NormalOrUniform::Normal,
    fan: FanInOut::FanOut,
    non_linearity: NonLinearity::ReLU,
};

/// A convolution with bias; `kernel` is (height, width).
/// # Errors
/// If the builder has no such parameters, or `groups` is 0.
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel: [usize; 2],
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let weight = conv2d_no_bias(in_channels, out_channels, kernel, cfg, vb.clone())?.weight;
    let fan_in = in_channels / cfg.groups * kernel[0] * kernel[1];
    let bound = 1.0 / (fan_in.max(1) as f64).sqrt();
    let bias = vb.get_with_hints(out_channels, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Conv2d::new(weight, Some(bias), cfg))
}

/// A convolution without bias; `kernel` is (height, width).
/// # Errors
/// If the builder has no such parameters, or `groups` is 0.
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel: [usize; 2],
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    if cfg.groups == 0 {
        let zero = tallow_kernels::Error::Zero { op: "conv2d", what: "groups" };
        return Err(crate::Error::from(zero).into());
    }
    let shape = (out_channels, in_channels / cfg.groups, kernel[0], kernel[1]);
    Ok(Conv2d::new(vb.get_with_hints(shape, "weight", KAIMING_FAN_OUT)?, None, cfg))
}

/// The maximum of each window.
#[derive(Clone, Copy, Debug)]
pub struct MaxPool2d(pub Pool2dConfig);

impl Module for MaxPool2d {
    /// `x` `[N, C, H, W]` → `[N, C, P, Q]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(ops::max_pool2d(x, self.0)?)
    }
}

/// The mean of each window.
#[derive(Clone, Copy, Debug)]
pub struct AvgPool2d {
    /// How the window moves.
    pub cfg: Pool2dConfig,
    /// What the sum is divided by.
    pub divisor: Divisor,
}

impl Module for AvgPool2d {
    /// `x` `[N, C, H, W]` → `[N, C, P, Q]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(ops::avg_pool2d(x, self.cfg, self.divisor)?)
    }
}

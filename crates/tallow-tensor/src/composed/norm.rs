//! Normalisation.

// N batch · C channels · M pixels of a plane

use super::{activation::wide_relu, widen};
use crate::{
    Result,
    ops::{ChannelStats, Then},
};
use candle_core::{D, DType, Device, Tensor};

/// As [`ops::batch_norm2d`](crate::ops::batch_norm2d).
/// # Errors
/// As there.
pub fn batch_norm2d(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    then: Then,
) -> Result<(Tensor, ChannelStats)> {
    let x_ncm = planes(x)?;
    let mean = x_ncm.mean_keepdim((0, 2))?;
    let centred = x_ncm.broadcast_sub(&mean)?;
    let var = centred.sqr()?.mean_keepdim((0, 2))?;
    let out = centred.broadcast_div(&(&var + eps)?.sqrt()?)?;
    let host =
        |t: Tensor| t.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1();
    let stats = ChannelStats { mean: host(mean)?, var: host(var)? };
    Ok((finish(&out, x, weight, bias, then)?, stats))
}

/// As [`ops::batch_norm2d_given`](crate::ops::batch_norm2d_given).
/// # Errors
/// As there.
pub fn batch_norm2d_given(
    x: &Tensor,
    stats: &ChannelStats,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    then: Then,
) -> Result<Tensor> {
    let x_ncm = planes(x)?;
    let channels = |values: Vec<f64>| {
        let n = values.len();
        let values = Tensor::from_vec(values, (n, 1), &Device::Cpu)?.to_dtype(x_ncm.dtype())?;
        values.to_device(x.device())
    };
    let std = stats.var.iter().map(|var| (var + eps).sqrt()).collect();
    let centred = x_ncm.broadcast_sub(&channels(stats.mean.clone())?)?;
    finish(&centred.broadcast_div(&channels(std)?)?, x, weight, bias, then)
}

/// `[N, C, ...]` → `[N, C, M]`, widened.
fn planes(x: &Tensor) -> Result<Tensor> {
    let (n, c) = (x.dim(0)?, x.dim(1)?);
    Ok(widen("batch_norm2d", x)?.reshape((n, c, ()))?)
}

/// Scale, shift and relu of normalised planes, in the shape and dtype of `x`.
fn finish(
    normed: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    then: Then,
) -> Result<Tensor> {
    let out = affine(normed, weight, bias, |t| t.unsqueeze(1))?;
    let out = if then == Then::Relu { wide_relu(&out)? } else { out };
    Ok(out.reshape(x.dims())?.to_dtype(x.dtype())?)
}

/// `normed * weight + bias` in the dtype of `normed`, the parameters brought into shape.
fn affine(
    normed: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    shape: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let mut out = normed.clone();
    if let Some(weight) = weight {
        out = out.broadcast_mul(&shape(&weight.to_dtype(out.dtype())?)?)?;
    }
    if let Some(bias) = bias {
        out = out.broadcast_add(&shape(&bias.to_dtype(out.dtype())?)?)?;
    }
    Ok(out)
}

/// As [`ops::layer_norm`](crate::ops::layer_norm).
/// # Errors
/// As there.
pub fn layer_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let wide = widen("layer_norm", x)?;
    let centred = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
    Ok(affine(&over_rms(&centred, eps)?, weight, bias, |t| Ok(t.clone()))?.to_dtype(x.dtype())?)
}

/// As [`ops::rms_norm`](crate::ops::rms_norm).
/// # Errors
/// As there.
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let normed = over_rms(&widen("rms_norm", x)?, eps)?;
    Ok(affine(&normed, weight, None, |t| Ok(t.clone()))?.to_dtype(x.dtype())?)
}

/// `x / sqrt(mean(x^2) + eps)` of each row.
fn over_rms(x: &Tensor, eps: f64) -> candle_core::Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?)
}

//! Elementwise operations.

use super::{keep_where, widen};
use crate::{Result, ops::DropKey};
use candle_core::Tensor;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
use tallow_kernels::dropout as kernels;

/// As [`ops::gelu_tanh`](crate::ops::gelu_tanh).
/// # Errors
/// As there.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    /// Where tanh is 1 in f64 too. Beyond, the derivative of the cube overflows and meets a 0.
    const FLAT: f64 = 100.0;
    let wide = widen("gelu_tanh", x)?;
    let near = wide.clamp(-FLAT, FLAT)?;
    let cube = (near.sqr()? * &near)?;
    let inner = ((near + (cube * 0.044715)?)? * (FRAC_2_SQRT_PI * FRAC_1_SQRT_2))?;
    let gate = ((inner.tanh()? + 1.0)? * 0.5)?;
    Ok((wide * gate)?.to_dtype(x.dtype())?)
}

/// As [`ops::gelu_erf`](crate::ops::gelu_erf).
/// # Errors
/// As there.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    let wide = widen("gelu_erf", x)?;
    let gate = (((&wide * FRAC_1_SQRT_2)?.erf()? + 1.0)? * 0.5)?;
    Ok((wide * gate)?.to_dtype(x.dtype())?)
}

/// As [`ops::silu`](crate::ops::silu).
/// # Errors
/// As there.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    let wide = widen("silu", x)?;
    // `exp(-x)` would overflow, and in backward meet a 0.
    let e = wide.abs()?.neg()?.exp()?;
    let numerator = wide.ge(0.0)?.where_cond(&e.ones_like()?, &e)?;
    let gate = (numerator / (e + 1.0)?)?;
    Ok((wide * gate)?.to_dtype(x.dtype())?)
}

/// As [`ops::relu`](crate::ops::relu).
/// # Errors
/// As there.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    Ok(wide_relu(&widen("relu", x)?)?.to_dtype(x.dtype())?)
}

/// Everything but `x <= 0` passes, NaN too. Candle's own relu has the gradient 1 at 0.
pub(super) fn wide_relu(x: &Tensor) -> candle_core::Result<Tensor> {
    x.le(0.0)?.where_cond(&x.zeros_like()?, x)
}

/// As [`ops::swiglu`](crate::ops::swiglu).
/// # Errors
/// As there.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let product = (silu(&widen("swiglu", gate)?)? * widen("swiglu", up)?)?;
    Ok(product.to_dtype(gate.dtype())?)
}

/// As [`ops::add`](crate::ops::add), but candle's sum gives a frozen operand a gradient too.
/// # Errors
/// As there.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let sum = widen("add", a)?.broadcast_add(&widen("add", b)?)?;
    Ok(sum.to_dtype(a.dtype())?)
}

/// As [`ops::add_relu`](crate::ops::add_relu).
/// # Errors
/// As there.
pub fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let sum = (widen("add_relu", a)? + widen("add_relu", b)?)?;
    Ok(wide_relu(&sum)?.to_dtype(a.dtype())?)
}

/// As [`ops::dropout`](crate::ops::dropout): the mask is made on the host and moved, 1 byte an
/// element.
/// # Errors
/// As there.
pub fn dropout(x: &Tensor, p: f64, key: DropKey) -> Result<Tensor> {
    let wide = widen("dropout", x)?;
    let ones = vec![1f32; x.elem_count()];
    let mut kept = vec![0f32; ones.len()];
    kernels::dropout(&mut kept, &ones, p, key)?;
    let keep: Vec<u8> = kept.into_iter().map(|k| u8::from(k > 0.0)).collect();
    let keep = Tensor::from_vec(keep, x.dims(), x.device())?;
    let scaled = (wide * (1.0 / (1.0 - p)))?;
    Ok(keep_where(&keep, &scaled, 0.0)?.to_dtype(x.dtype())?)
}

//! Operations on rows, and sums.

use super::widen;
use crate::{Result, ops::Rope};
use candle_core::{D, Tensor};
use tallow_kernels::embedding::EmbeddingError;

/// As [`ops::softmax`](crate::ops::softmax).
/// # Errors
/// As there.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    Ok(wide_softmax(&widen("softmax", x)?)?.to_dtype(x.dtype())?)
}

/// As [`ops::log_softmax`](crate::ops::log_softmax).
/// # Errors
/// As there.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let shifted = shifted(&widen("log_softmax", x)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    Ok(shifted.broadcast_sub(&log_sum)?.to_dtype(x.dtype())?)
}

pub(super) fn wide_softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    let e = shifted(x)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}

/// Each row minus its maximum. A shift changes no softmax, so the maximum needs no gradient, and
/// candle's would count ties twice.
pub(super) fn shifted(x: &Tensor) -> candle_core::Result<Tensor> {
    x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)
}

/// As [`ops::embedding`](crate::ops::embedding), but a table in half precision is widened whole,
/// because candle sums repeated ids in the table's dtype.
/// # Errors
/// As there.
pub fn embedding(weight: &Tensor, ids: &Tensor, padding: Option<u32>) -> Result<Tensor> {
    let (n_ids, d) = weight.dims2()?;
    let flat = ids.flatten_all()?.contiguous()?;
    let host = flat.to_vec1::<u32>()?;
    if let Some(position) = host.iter().position(|&id| id as usize >= n_ids) {
        return Err(EmbeddingError::Id { id: host[position], position, n_ids }.into());
    }
    let mut out = widen("embedding", weight)?.index_select(&flat, 0)?;
    if let Some(padding) = padding {
        let is_padding = flat.eq(padding)?.unsqueeze(1)?.broadcast_as(out.dims())?;
        out = is_padding.where_cond(&out.detach(), &out)?;
    }
    let mut dims = ids.dims().to_vec();
    dims.push(d);
    Ok(out.reshape(dims)?.to_dtype(weight.dtype())?)
}

/// As [`ops::rope`](crate::ops::rope).
/// # Errors
/// As there.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, style: Rope) -> Result<Tensor> {
    let wide = widen("rope", x)?;
    let half = x.dim(D::Minus1)? / 2;
    let [cos, sin] = [cos, sin].map(|t| t.detach().to_dtype(wide.dtype()));
    let (cos, sin) = (cos?, sin?);
    let (a, b) = match style {
        Rope::Half => (wide.narrow(D::Minus1, 0, half)?, wide.narrow(D::Minus1, half, half)?),
        Rope::Interleaved => {
            let mut dims = x.dims().to_vec();
            dims.pop();
            dims.extend([half, 2]);
            let pairs = wide.reshape(dims)?;
            let of = |i| pairs.narrow(D::Minus1, i, 1)?.squeeze(D::Minus1);
            (of(0)?, of(1)?)
        }
    };
    let turned_a = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let turned_b = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let out = match style {
        Rope::Half => Tensor::cat(&[turned_a, turned_b], D::Minus1)?,
        Rope::Interleaved => Tensor::stack(&[turned_a, turned_b], D::Minus1)?.reshape(x.dims())?,
    };
    Ok(out.to_dtype(x.dtype())?)
}

/// As [`ops::sum_all`](crate::ops::sum_all).
/// # Errors
/// As there.
pub fn sum_all(x: &Tensor) -> Result<Tensor> {
    Ok(widen("sum_all", x)?.sum_all()?)
}

/// As [`ops::mean_all`](crate::ops::mean_all).
/// # Errors
/// As there.
pub fn mean_all(x: &Tensor) -> Result<Tensor> {
    Ok((widen("mean_all", x)?.sum_all()? / x.elem_count() as f64)?)
}

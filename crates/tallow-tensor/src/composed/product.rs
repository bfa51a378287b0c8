//! Matrix products and attention.

// B batch · H query heads · G key-value heads · T tokens · D head size

use super::{keep_where, rows::wide_softmax, widen};
use crate::{Result, ops::Mask};
use candle_core::{Device, Tensor};
use tallow_kernels::attention::AttentionShape;

/// As [`ops::linear`](crate::ops::linear), but a bias adds one rounding.
/// # Errors
/// As there.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let out = times_matrix(x, &weight.contiguous()?.t()?)?;
    match bias {
        None => Ok(out),
        Some(bias) => {
            let sum = widen("linear", &out)?.broadcast_add(&widen("linear", bias)?)?;
            Ok(sum.to_dtype(x.dtype())?)
        }
    }
}

/// As [`ops::lora_linear`](crate::ops::lora_linear), but the graph keeps both terms.
/// # Errors
/// As there.
pub fn lora_linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let base = linear(x, &weight.detach(), bias.map(Tensor::detach).as_ref())?;
    let low = scaled(&linear(x, a, None)?, scale)?;
    Ok((base + linear(&low, b, None)?)?)
}

/// As [`ops::matmul`](crate::ops::matmul).
/// # Errors
/// As there.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if b.rank() == 2 {
        return times_matrix(a, &b.contiguous()?);
    }
    Ok(a.contiguous()?.matmul(&b.contiguous()?)?)
}

/// `a` `[..., M, K]` by `b` `[K, N]`. The batch is folded into the rows, so that the sum over it in
/// the gradient of `b` is the product's, in f32.
fn times_matrix(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (k, n) = b.dims2()?;
    let n_rows = a.elem_count().checked_div(k).unwrap_or(0);
    let mut dims = a.dims().to_vec();
    dims.pop();
    dims.push(n);
    Ok(a.reshape((n_rows, k))?.matmul(b)?.reshape(dims)?)
}

/// As [`ops::attention_rows`](crate::ops::attention_rows), by [`attention`].
/// # Errors
/// As there.
pub fn attention_rows(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: &AttentionShape,
    mask: Mask,
    scale: f64,
) -> Result<Tensor> {
    let AttentionShape { batch, n_heads, n_kv_heads, q_tokens, head_dim, .. } = *shape;
    let heads = |rows: &Tensor, n: usize| -> Result<Tensor> {
        Ok(rows.reshape((batch, (), n, head_dim))?.transpose(1, 2)?)
    };
    let (k, v) = (heads(k, n_kv_heads)?, heads(v, n_kv_heads)?);
    let out = attention(&heads(q, n_heads)?, &k, &v, mask, scale)?;
    Ok(out.transpose(1, 2)?.reshape((batch, q_tokens, n_heads * head_dim))?)
}

/// As [`ops::attention`](crate::ops::attention), but the graph keeps several tensors
/// `[B, H, Tq, Tk]`: candle has no operation with a backward that would do without.
/// # Errors
/// As there.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Mask, scale: f64) -> Result<Tensor> {
    let ((b, h, q_tokens, d), (_, g, kv_tokens, _)) = (q.dims4()?, k.dims4()?);
    // The first queries of a causal mask may see nothing: they are cut off, and 0 in the end.
    let n_seeing = match mask {
        _ if kv_tokens == 0 => 0,
        Mask::Causal => q_tokens.min(kv_tokens),
        Mask::Full => q_tokens,
    };
    if n_seeing == 0 {
        return Ok(q.zeros_like()?);
    }
    let q = q.narrow(2, q_tokens - n_seeing, n_seeing)?.contiguous()?;
    let (k, v) = (k.contiguous()?, v.contiguous()?);
    // The query heads of one key-value head stand together: their tokens are its rows.
    let q = q.reshape((b, g, h / g * n_seeing, d))?;
    let scores = scaled(&widen("attention", &q.matmul(&k.t()?)?)?, scale)?;
    let mut scores = scores.reshape((b, h, n_seeing, kv_tokens))?;
    if mask == Mask::Causal {
        scores = keep_where(&causal(n_seeing, kv_tokens, q.device())?, &scores, f64::NEG_INFINITY)?;
    }
    let p = wide_softmax(&scores)?.to_dtype(q.dtype())?;
    let out = p.reshape((b, g, h / g * n_seeing, kv_tokens))?.matmul(&v)?;
    Ok(out.reshape((b, h, n_seeing, d))?.pad_with_zeros(2, q_tokens - n_seeing, 0)?)
}

/// `x * factor`. Candle cuts the graph at a constant factor of 0.
fn scaled(x: &Tensor, factor: f64) -> candle_core::Result<Tensor> {
    if factor != 0.0 {
        return x * factor;
    }
    x * x.zeros_like()?
}

/// 1 where query `i` sees key `j`, `[Tq, Tk]`.
fn causal(q_tokens: usize, kv_tokens: usize, device: &Device) -> candle_core::Result<Tensor> {
    let sees = |i: usize, j: usize| u8::from(j <= i + kv_tokens - q_tokens);
    let mask = (0..q_tokens).flat_map(|i| (0..kv_tokens).map(move |j| sees(i, j))).collect();
    Tensor::from_vec(mask, (q_tokens, kv_tokens), device)
}

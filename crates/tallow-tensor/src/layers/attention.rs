//! Self-attention with its four projections.

// B batch · T tokens · M model size · H heads · G key-value heads · D head size

use super::{Linear, linear, linear_no_bias};
use crate::ops::{self, Mask};
use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

/// Sizes of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSizes {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; equal to `n_heads`, or a divisor of it (grouped queries).
    pub n_kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
}

/// Multi-head self-attention (Vaswani et al. 2017) without a `T x T` tensor.
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    out_proj: Linear,
    heads: HeadSizes,
    mask: Mask,
}

impl MultiHeadAttention {
    /// With biases, parameters `q_proj`, `k_proj`, `v_proj`, `out_proj`.
    /// # Errors
    /// If the builder has no such parameters.
    pub fn new(model_dim: usize, heads: HeadSizes, mask: Mask, vb: VarBuilder) -> Result<Self> {
        Self::build(model_dim, heads, mask, vb, linear)
    }

    /// Without biases.
    /// # Errors
    /// If the builder has no such parameters.
    pub fn no_bias(model_dim: usize, heads: HeadSizes, mask: Mask, vb: VarBuilder) -> Result<Self> {
        Self::build(model_dim, heads, mask, vb, linear_no_bias)
    }

    fn build(
        model_dim: usize,
        heads: HeadSizes,
        mask: Mask,
        vb: VarBuilder,
        project: fn(usize, usize, VarBuilder) -> Result<Linear>,
    ) -> Result<Self> {
        let (q, kv) = (heads.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim);
        Ok(Self {
            q_proj: project(model_dim, q, vb.pp("q_proj"))?,
            k_proj: project(model_dim, kv, vb.pp("k_proj"))?,
            v_proj: project(model_dim, kv, vb.pp("v_proj"))?,
            out_proj: project(q, model_dim, vb.pp("out_proj"))?,
            heads,
            mask,
        })
    }
}

impl Module for MultiHeadAttention {
    /// `x_btm` `[B, T, M]` → `[B, T, M]`.
    fn forward(&self, x_btm: &Tensor) -> Result<Tensor> {
        let HeadSizes { n_heads, n_kv_heads, head_dim } = self.heads;
        let (q, k) = (self.q_proj.forward(x_btm)?, self.k_proj.forward(x_btm)?);
        let v = self.v_proj.forward(x_btm)?;
        let scale = 1.0 / (head_dim as f64).sqrt();
        let heads = (n_heads, n_kv_heads);
        let out_btm = ops::attention_rows(&q, &k, &v, heads, self.mask, scale)?;
        self.out_proj.forward(&out_btm)
    }
}

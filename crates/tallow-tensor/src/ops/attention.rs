//! Scaled dot-product attention without a `T x T` tensor.

// B batch · H query heads · G key-value heads · T tokens · D head size

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor, WithDType};
use std::sync::OnceLock;
use tallow_kernels::attention::{self as kernels, AttentionShape};

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Query `i` of `Tq` sees keys `0..=i + Tk - Tq`: aligned to the last key, as in FlashAttention.
    Causal,
    /// All of them.
    Full,
}

struct Attention {
    shape: AttentionShape,
    mask: Mask,
    scale: f64,
    /// `[B, H, Tq]`, the log-sum-exp of each query's scores, in the accumulator type.
    lse: OnceLock<CpuStorage>,
}

impl Kernel for Attention {
    const NAME: &'static str = "attention";
    const USES_OUTPUT: bool = true;
    const OPERANDS: &'static [&'static str] = &["q", "k", "v"];

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (q, k, v) = (args[0].dense::<T>()?, args[1].dense::<T>()?, args[2].dense::<T>()?);
        let mut out = vec![T::default(); q.len()];
        let mut lse = vec![<T::Acc as Default>::default(); q.len() / self.shape.head_dim];
        let causal = self.mask == Mask::Causal;
        kernels::attention(&mut out, &mut lse, &q, &k, &v, &self.shape, causal, self.scale);
        let _ = self.lse.set(T::Acc::to_cpu_storage_owned(lse));
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], out: Arg, dout: Arg) -> Result<Grads> {
        let lse = self.lse.get().expect("forward ran before backward");
        let mut rooms = [args[0].room::<T>(), args[1].room::<T>(), args[2].room::<T>()];
        let [dq, dk, dv] = &mut rooms;
        kernels::attention_backward(
            dq.as_deref_mut(),
            dk.as_deref_mut(),
            dv.as_deref_mut(),
            &args[0].dense::<T>()?,
            &args[1].dense::<T>()?,
            &args[2].dense::<T>()?,
            &out.dense::<T>()?,
            T::Acc::cpu_storage_as_slice(lse)?,
            &dout.dense::<T>()?,
            &self.shape,
            self.mask == Mask::Causal,
            self.scale,
        );
        let grads = rooms.into_iter().zip(args);
        grads.map(|(d, arg)| d.map_or(Ok(None), |d| tensor(d, arg.shape()))).collect()
    }
}

/// `softmax(q k^T * scale) v`: `q` `[B, H, Tq, D]`, `k` and `v` `[B, G, Tk, D]` → `[B, H, Tq, D]`.
///
/// `G` divides `H`: query head `h` reads key-value head `h / (H / G)` (grouped-query attention).
/// Queries that see no key give 0. Keeps its operands, its output and one number per query
/// (FlashAttention, Dao 2023).
/// # Errors
/// If shapes or dtypes do not fit together.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Mask, scale: f64) -> Result<Tensor> {
    let op = Attention::NAME;
    let dims4 = |what, t: &Tensor| match *t.dims() {
        [b, h, t, d] => Ok([b, h, t, d]),
        ref dims => {
            let (found, expected) = (dims.to_vec(), "[batch, heads, tokens, head_dim]".to_string());
            Err(Error::Shape { op, what, found, expected })
        }
    };
    let [batch, n_heads, q_tokens, head_dim] = dims4("q", q)?;
    let [_, n_kv_heads, kv_tokens, _] = dims4("k", k)?;
    for (what, t) in [("k", k), ("v", v)] {
        let expected = [batch, n_kv_heads, kv_tokens, head_dim];
        if t.dims() != expected {
            let (found, expected) = (t.dims().to_vec(), format!("{expected:?}"));
            return Err(Error::Shape { op, what, found, expected });
        }
    }
    let shape =
        AttentionShape { batch, n_heads, n_kv_heads, q_tokens, kv_tokens, head_dim }.checked()?;
    let op = Attention { shape, mask, scale, lse: OnceLock::new() };
    apply(op, &[q, k, v], || composed::attention(q, k, v, mask, scale))
}

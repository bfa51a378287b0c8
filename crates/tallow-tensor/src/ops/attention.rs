//! Scaled dot-product attention without a `T x T` tensor.

// B batch · H query heads · G key-value heads · T tokens · D head size

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor, WithDType};
use std::sync::OnceLock;
use tallow_kernels::{
    attention::{self as kernels, AttentionShape},
    heads::{Heads, merge_heads, split_heads},
};

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

/// Attention on rows of tokens as linear layers make them, without a view of heads between.
struct Rows {
    attention: Attention,
    /// `q`, `k`, `v` stand side by side in the rows of one operand.
    packed: bool,
}

impl Rows {
    fn new(shape: AttentionShape, mask: Mask, scale: f64, packed: bool) -> Result<Self> {
        let attention = Attention { shape: shape.checked()?, mask, scale, lse: OnceLock::new() };
        Ok(Self { attention, packed })
    }

    /// Where the heads of `q`, `k` and `v` stand: operand, and place in it.
    fn parts(&self) -> [(usize, Heads); 3] {
        let AttentionShape { batch, n_heads, n_kv_heads, q_tokens, kv_tokens, head_dim } =
            self.attention.shape;
        let starts = [0, n_heads, n_heads + n_kv_heads].map(|n| n * head_dim);
        std::array::from_fn(|i| {
            let (n_heads, tokens) =
                if i == 0 { (n_heads, q_tokens) } else { (n_kv_heads, kv_tokens) };
            let alone =
                Heads { batch, tokens, width: n_heads * head_dim, first: 0, n_heads, head_dim };
            let width = starts[2] + n_kv_heads * head_dim;
            let packed = Heads { width, first: starts[i], ..alone };
            if self.packed { (0, packed) } else { (i, alone) }
        })
    }

    /// `q`, `k` and `v`, heads first.
    fn split<T: Scalar>(&self, args: &[Arg]) -> Result<[Vec<T>; 3]> {
        let mut heads = [const { Vec::new() }; 3];
        for (dst, (arg, part)) in heads.iter_mut().zip(self.parts()) {
            *dst = vec![T::default(); part.batch * part.tokens * part.n_heads * part.head_dim];
            split_heads(dst, &args[arg].dense::<T>()?, &part);
        }
        Ok(heads)
    }

    /// The output's place: as that of `q` alone.
    fn out(&self) -> Heads {
        let (_, q) = self.parts()[0];
        Heads { width: q.n_heads * q.head_dim, first: 0, ..q }
    }
}

impl Kernel for Rows {
    const NAME: &'static str = "attention";
    const OPERANDS: &'static [&'static str] = &["q", "k", "v"];
    const USES_OUTPUT: bool = true;

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let Attention { shape, mask, scale, lse: kept } = &self.attention;
        let [q, k, v] = self.split::<T>(args)?;
        let mut heads = vec![T::default(); q.len()];
        let mut lse = vec![<T::Acc as Default>::default(); shape.lse_elems()];
        let causal = *mask == Mask::Causal;
        kernels::attention(&mut heads, &mut lse, &q, &k, &v, shape, causal, *scale);
        let _ = kept.set(T::Acc::to_cpu_storage_owned(lse));
        let mut out = q; // it has the size, and is done with
        let place = self.out();
        merge_heads(&mut out, &heads, &place);
        let dims = (place.batch, place.tokens, place.width);
        Ok((T::to_cpu_storage_owned(out), Shape::from(dims)))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], out: Arg, dout: Arg) -> Result<Grads> {
        let Attention { shape, mask, scale, lse } = &self.attention;
        let lse = lse.get().expect("forward ran before backward");
        let [q, k, v] = self.split::<T>(args)?;
        let (mut out_heads, mut dout_heads) = (q.clone(), q.clone());
        split_heads(&mut out_heads, &out.dense::<T>()?, &self.out());
        split_heads(&mut dout_heads, &dout.dense::<T>()?, &self.out());
        let wanted = self.parts().map(|(arg, _)| args[arg].wanted);
        let mut grads = [&q, &k, &v].map(|x| vec![T::default(); x.len()]);
        let [dq, dk, dv] = &mut grads;
        let if_wanted = |i: usize, d| if wanted[i] { Some(d) } else { None };
        kernels::attention_backward(
            if_wanted(0, &mut dq[..]),
            if_wanted(1, &mut dk[..]),
            if_wanted(2, &mut dv[..]),
            &q,
            &k,
            &v,
            &out_heads,
            T::Acc::cpu_storage_as_slice(lse)?,
            &dout_heads,
            shape,
            *mask == Mask::Causal,
            *scale,
        );
        drop((q, k, v, out_heads, dout_heads));
        let mut rows: Vec<Option<Vec<T>>> = args.iter().map(Arg::room).collect();
        for (grad, (arg, part)) in grads.into_iter().zip(self.parts()) {
            if let Some(rows) = &mut rows[arg] {
                merge_heads(rows, &grad, &part);
            }
        }
        let grads = rows.into_iter().zip(args);
        grads.map(|(d, arg)| d.map_or(Ok(None), |d| tensor(d, arg.shape()))).collect()
    }
}

/// [`attention`] on rows of tokens as linear layers make them: `q` `[B, Tq, H D]`, `k` and `v`
/// `[B, Tk, G D]` → `[B, Tq, H D]`, for `(H, G)` heads.
///
/// Keeps its operands, its output and one number per query; copies heads while it runs.
/// # Errors
/// If shapes or dtypes do not fit together.
pub fn attention_rows(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    (n_heads, n_kv_heads): (usize, usize),
    mask: Mask,
    scale: f64,
) -> Result<Tensor> {
    let [batch, q_tokens, head_dim] = row_heads("q", q, n_heads)?;
    let [_, kv_tokens, _] = row_heads("k", k, n_kv_heads)?;
    for (what, t) in [("k", k), ("v", v)] {
        let expected = [batch, kv_tokens, n_kv_heads * head_dim];
        if t.dims() != expected {
            let (found, expected) = (t.dims().to_vec(), format!("{expected:?}"));
            return Err(Error::Shape { op: Attention::NAME, what, found, expected });
        }
    }
    let shape = AttentionShape { batch, n_heads, n_kv_heads, q_tokens, kv_tokens, head_dim };
    let rows = Rows::new(shape, mask, scale, false)?;
    apply(rows, &[q, k, v], || composed::attention_rows(q, k, v, &shape, mask, scale))
}

/// As [`attention_rows`] of one operand: `qkv` `[B, T, (H + 2 G) D]`, the heads of queries, keys and
/// values side by side, as one linear layer makes them → `[B, T, H D]`.
/// # Errors
/// If `qkv` has not three dimensions, or its rows not `H + 2 G` heads of one size.
pub fn attention_packed(
    qkv: &Tensor,
    (n_heads, n_kv_heads): (usize, usize),
    mask: Mask,
    scale: f64,
) -> Result<Tensor> {
    let n_all = n_heads.saturating_add(n_kv_heads.saturating_mul(2));
    let [batch, tokens, head_dim] = row_heads("qkv", qkv, n_all)?;
    let (q_tokens, kv_tokens) = (tokens, tokens);
    let shape = AttentionShape { batch, n_heads, n_kv_heads, q_tokens, kv_tokens, head_dim };
    let rows = Rows::new(shape, mask, scale, true)?;
    apply(rows, &[qkv], || {
        let part = |first: usize, n: usize| qkv.narrow(2, first * head_dim, n * head_dim);
        let (q, k) = (part(0, n_heads)?, part(n_heads, n_kv_heads)?);
        let v = part(n_heads + n_kv_heads, n_kv_heads)?;
        composed::attention_rows(&q, &k, &v, &shape, mask, scale)
    })
}

/// Sequences, tokens and the size of a head of rows that hold `n_heads`.
fn row_heads(what: &'static str, t: &Tensor, n_heads: usize) -> Result<[usize; 3]> {
    match *t.dims() {
        [batch, tokens, width] if n_heads > 0 && width.is_multiple_of(n_heads) => {
            Ok([batch, tokens, width / n_heads])
        }
        ref dims => {
            let expected = format!("[batch, tokens, {n_heads} heads of one size]");
            Err(Error::Shape { op: Attention::NAME, what, found: dims.to_vec(), expected })
        }
    }
}

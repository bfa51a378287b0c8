//! Scaled dot-product attention that never holds a `Tq x Tk` matrix (FlashAttention: Dao et al.
//! 2022, Dao 2023), with causal masking and grouped-query heads.
//!
//! Per head `S = scale * Q K^T`, `P = softmax(S)` over the keys, `O = P V`. Forward walks the keys
//! in blocks with an online softmax and keeps, besides `O`, one log-sum-exp a query; backward
//! computes `P = exp(S - lse)` again block by block.
//!
//! The causal mask is aligned to the **last** key: query `i` sees the keys `j <= i + (Tk - Tq)`, as
//! in FlashAttention since 2.1. PyTorch's `is_causal` aligns to the first key; the two agree where
//! `Tq == Tk`. A query that sees no key gives a zero output, `lse = -inf` and zero gradients. NaN
//! in a key or value may reach the queries whose mask hides it, for it passes through a product
//! with 0.
//!
//! Scores, sums and statistics are in the accumulator type. Where the processor multiplies `bf16`
//! itself, `P` and `dS` are rounded to it before they are multiplied, as FlashAttention does.
// B batch · H query heads · G key-value heads · Tq, Tk query and key tokens · D head dimension

use crate::{
    Element, Real,
    cast::{is_own_acc, narrow_into, operand, sums_operand},
    gemm::{Mat, Store, gemm_serial, gemm_serial_scratch_bytes},
    isa::vectorized,
    pack::packs_narrow,
    par::{self, Disjoint},
    reduce::{dot, lanes, max},
};

/// Queries of one tile.
const Q_BLOCK: usize = 128;
/// Keys of one tile.
const K_BLOCK: usize = 256;

/// Sizes of one attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences, `B`.
    pub batch: usize,
    /// Query heads, `H`.
    pub n_heads: usize,
    /// Key and value heads, `G`, a divisor of `H`: query head `h` reads head `h / (H / G)`.
    pub n_kv_heads: usize,
    /// Query tokens, `Tq`.
    pub q_tokens: usize,
    /// Key and value tokens, `Tk`.
    pub kv_tokens: usize,
    /// Elements of one head, `D`.
    pub head_dim: usize,
}

/// What is wrong with an [`AttentionShape`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// The heads cannot be shared out.
    #[error("attention: {n_kv_heads} key-value heads do not divide {n_heads} query heads")]
    HeadGroups {
        /// Query heads.
        n_heads: usize,
        /// Key and value heads.
        n_kv_heads: usize,
    },
    /// A head without elements.
    #[error("attention: head_dim is 0, it must be at least 1")]
    EmptyHead,
    /// A tensor of this shape has more elements than memory has addresses.
    #[error("attention: the element count of {shape:?} overflows")]
    TooLarge {
        /// The shape.
        shape: AttentionShape,
    },
}

impl AttentionShape {
    /// The shape itself if the kernels can run it.
    /// # Errors
    /// If the key-value heads do not divide the query heads, heads are empty, or sizes overflow.
    pub fn checked(self) -> Result<Self, ShapeError> {
        let Self { batch, n_heads, n_kv_heads, q_tokens, kv_tokens, head_dim } = self;
        if n_heads.checked_rem(n_kv_heads) != Some(0) {
            return Err(ShapeError::HeadGroups { n_heads, n_kv_heads });
        }
        if head_dim == 0 {
            return Err(ShapeError::EmptyHead);
        }
        let tokens = q_tokens.max(kv_tokens);
        [batch, n_heads, tokens, head_dim]
            .into_iter()
            .try_fold(1, usize::checked_mul)
            .filter(|&n| n <= isize::MAX as usize)
            .map(|_| self)
            .ok_or(ShapeError::TooLarge { shape: self })
    }

    /// Elements of `q`, of the output and of their gradients: `[B, H, Tq, D]`.
    pub fn q_elems(&self) -> usize {
        self.lse_elems() * self.head_dim
    }

    /// Elements of `k`, of `v` and of their gradients: `[B, G, Tk, D]`.
    pub fn kv_elems(&self) -> usize {
        self.batch * self.n_kv_heads * self.kv_tokens * self.head_dim
    }

    /// Log-sum-exps kept for backward: `[B, H, Tq]`.
    pub fn lse_elems(&self) -> usize {
        self.batch * self.n_heads * self.q_tokens
    }

    /// How many keys, from the first, query `i` sees.
    fn n_visible(&self, i: usize, causal: bool) -> usize {
        if causal { (i + 1 + self.kv_tokens).saturating_sub(self.q_tokens) } else { self.kv_tokens }
    }

    /// The key-value head, counted over the batch, of a query head counted over the batch.
    fn kv_head(&self, head: usize) -> usize {
        head / (self.n_heads / self.n_kv_heads)
    }
}

/// `out = softmax(scale * q k^T) v` per head; `lse` is the log of the softmax's denominator.
///
/// `q` `[B, H, Tq, D]`, `k`, `v` `[B, G, Tk, D]` → `out` `[B, H, Tq, D]`, `lse` `[B, H, Tq]`.
///
/// *Scratch:* [`attention_scratch_bytes`].
/// # Panics
/// If a length does not match or the shape is not [`AttentionShape::checked`].
pub fn attention<T: Element>(
    out: &mut [T],
    lse: &mut [T::Acc],
    q: &[T],
    k: &[T],
    v: &[T],
    shape: &AttentionShape,
    causal: bool,
    scale: f64,
) {
    assert_lens("attention", shape, &[out, q], &[k, v], lse);
    let blocks_per_head = shape.q_tokens.div_ceil(Q_BLOCK);
    let (out, lse) = (Disjoint::new(out), Disjoint::new(lse));
    let run = if packs_narrow::<T>() { query_block::<T, T> } else { query_block::<T, T::Acc> };
    par::tasks(shape.batch * shape.n_heads * blocks_per_head, |task| {
        let (head, first) = (task / blocks_per_head, task % blocks_per_head * Q_BLOCK);
        let n_q = Q_BLOCK.min(shape.q_tokens - first);
        let start = head * shape.q_tokens + first;
        let d = shape.head_dim;
        // SAFETY: this task alone has these queries; both slices outlive the call.
        let (out, lse) = unsafe { (out.slice(start * d, n_q * d), lse.slice(start, n_q)) };
        let q = &q[start * d..][..n_q * d];
        let kv_start = shape.kv_head(head) * shape.kv_tokens * d;
        let [k, v] = [k, v].map(|x| &x[kv_start..][..shape.kv_tokens * d]);
        run(out, lse, q, k, v, first, shape, causal, T::Acc::of(scale));
    });
}

/// Bytes each thread inside [`attention`] borrows: the tile of scores, the unscaled output, the
/// packed operands of a product, and the tiles of `q`, `k`, `v` widened or that of the probabilities
/// rounded, where `T` is narrower than its accumulator.
pub fn attention_scratch_bytes<T: Element>(shape: &AttentionShape) -> u64 {
    let n_q = Q_BLOCK.min(shape.q_tokens) as u64;
    let n_k = K_BLOCK.min(shape.kv_tokens) as u64;
    let d = shape.head_dim as u64;
    let sums = (n_q * n_k + n_q * d) * size_of::<T::Acc>() as u64 + n_q * 16;
    let operands = operand_bytes::<T>((n_q + 2 * n_k) * d, n_q * n_k);
    sums + operands + products_bytes::<T>(&[(n_q, n_k, d), (n_q, d, n_k)])
}

/// Bytes of operands that are copies: of inputs where they are widened, of sums where these are rounded.
fn operand_bytes<T: Element>(n_inputs: u64, n_sums: u64) -> u64 {
    if is_own_acc::<T>() {
        0
    } else if packs_narrow::<T>() {
        n_sums * size_of::<T>() as u64
    } else {
        n_inputs * size_of::<T::Acc>() as u64
    }
}

/// Bytes that products of these (m, n, k) pack, one after the other.
fn products_bytes<T: Element>(sizes: &[(u64, u64, u64)]) -> u64 {
    let packed = |&(m, n, k): &(u64, u64, u64)| gemm_serial_scratch_bytes::<T>(m, n, k);
    sizes.iter().map(packed).max().unwrap_or(0)
}

/// The outputs of the queries from `first` of one head, by online softmax over the key blocks.
fn query_block<T: Element, O: Element<Acc = T::Acc>>(
    out: &mut [T],
    lse: &mut [T::Acc],
    q: &[T],
    k: &[T],
    v: &[T],
    first: usize,
    shape: &AttentionShape,
    causal: bool,
    scale: T::Acc,
) {
    let zero = T::Acc::of(0.0);
    let (d, n_q) = (shape.head_dim, lse.len());
    let [mut q_copy, mut k_copy, mut v_copy, mut p_copy] = [const { Vec::<O>::new() }; 4];
    let q = Mat::new(operand(q, &mut q_copy), n_q, d);
    let mut s = vec![zero; n_q * K_BLOCK.min(shape.kv_tokens)];
    let mut o = vec![zero; n_q * d];
    let mut m = vec![T::Acc::of(f64::NEG_INFINITY); n_q];
    let mut l = vec![0.0f64; n_q];
    // The last query sees the most keys.
    let n_keys = shape.n_visible(first + n_q - 1, causal);
    for start in (0..n_keys).step_by(K_BLOCK) {
        let n_k = K_BLOCK.min(n_keys - start);
        let tile = start * d..(start + n_k) * d;
        let k = Mat::new(operand(&k[tile.clone()], &mut k_copy), n_k, d);
        let v = Mat::new(operand(&v[tile], &mut v_copy), n_k, d);
        gemm_serial(&mut s, n_k, q, k.t(), Store::Overwrite);
        for i in 0..n_q {
            let seen = shape.n_visible(first + i, causal).saturating_sub(start).min(n_k);
            let (s, hidden) = s[i * n_k..][..n_k].split_at_mut(seen);
            hidden.fill(zero);
            s.iter_mut().for_each(|s| *s *= scale);
            absorb_row(s, &mut m[i], &mut l[i], &mut o[i * d..][..d]);
        }
        let p = Mat::new(sums_operand(&s[..n_q * n_k], &mut p_copy), n_q, n_k);
        gemm_serial(&mut o, d, p, v, Store::Add);
    }
    for i in 0..n_q {
        let out = &mut out[i * d..][..d];
        if shape.n_visible(first + i, causal) == 0 {
            out.fill(T::default());
            lse[i] = T::Acc::of(f64::NEG_INFINITY);
            continue;
        }
        let r = T::Acc::of(1.0 / l[i]);
        for (out, &o) in out.iter_mut().zip(&o[i * d..]) {
            *out = T::narrow(o * r);
        }
        lse[i] = T::Acc::of(m[i].f64() + l[i].ln());
    }
}

/// Turns a row's scores into `exp(s - m)`, raising `m` to the row's maximum, and brings the
/// denominator `l` and the output `o` to the new `m`.
fn absorb_row<R: Real>(s: &mut [R], m: &mut R, l: &mut f64, o: &mut [R]) {
    let m_new = m.max(max(s));
    // While all scores are -inf they are exponentiated as they are, and give 0.
    let shift = if m_new == R::of(f64::NEG_INFINITY) { R::of(0.0) } else { m_new };
    let alpha = (*m - shift).quick_exp();
    vectorized(
        #[inline(always)]
        || s.iter_mut().for_each(|s| *s = (*s - shift).quick_exp()),
    );
    *l = *l * alpha.f64()
        + lanes(
            s,
            #[inline(always)]
            |p| p.f64(),
        );
    *m = m_new;
    o.iter_mut().for_each(|o| *o *= alpha);
}

/// Gradients of [`attention`], each where asked for, from its inputs, its `out` and its `lse`.
///
/// With `D = rowsum(dout * out)`, `P = exp(S - lse)`, `dP = dout v^T`, `dS = scale * P (dP - D)`:
/// `dq = dS k`, `dk = dS^T q`, `dv = P^T dout`, the last two summed over the query heads that share
/// a key-value head. Added up in the accumulator type, rounded once.
///
/// *Kept:* `q`, `k`, `v`, `out`, `lse`. *Scratch:* [`attention_backward_scratch_bytes`].
/// # Panics
/// If a length does not match or the shape is not [`AttentionShape::checked`].
pub fn attention_backward<T: Element>(
    dq: Option<&mut [T]>,
    dk: Option<&mut [T]>,
    dv: Option<&mut [T]>,
    q: &[T],
    k: &[T],
    v: &[T],
    out: &[T],
    lse: &[T::Acc],
    dout: &[T],
    shape: &AttentionShape,
    causal: bool,
    scale: f64,
) {
    assert_lens("attention_backward", shape, &[q, out, dout], &[k, v], lse);
    for (name, grad, len) in [("dq", &dq, q.len()), ("dk", &dk, k.len()), ("dv", &dv, v.len())] {
        let fits = grad.as_ref().is_none_or(|grad| grad.len() == len);
        assert!(fits, "attention_backward: length of {name}");
    }
    let (dq, dk, dv) = (dq.map(Disjoint::new), dk.map(Disjoint::new), dv.map(Disjoint::new));
    let run = if packs_narrow::<T>() { head_backward::<T, T> } else { head_backward::<T, T::Acc> };
    let heads_per_group = shape.n_heads / shape.n_kv_heads;
    let (n_q, n_kv) = (shape.q_tokens * shape.head_dim, shape.kv_tokens * shape.head_dim);
    par::tasks(shape.batch * shape.n_kv_heads, |kv_head| {
        let kv = kv_head * n_kv..(kv_head + 1) * n_kv;
        let (k, v) = (&k[kv.clone()], &v[kv]);
        let mut grads = Grads {
            dq: dq.map(|_| vec![T::Acc::of(0.0); n_q]),
            dk: dk.map(|_| vec![T::Acc::of(0.0); n_kv]),
            dv: dv.map(|_| vec![T::Acc::of(0.0); n_kv]),
        };
        for head in kv_head * heads_per_group..(kv_head + 1) * heads_per_group {
            let rows = head * n_q..(head + 1) * n_q;
            let (q, out, dout) = (&q[rows.clone()], &out[rows.clone()], &dout[rows]);
            let lse = &lse[head * shape.q_tokens..][..shape.q_tokens];
            run(&mut grads, q, k, v, out, lse, dout, shape, causal, T::Acc::of(scale));
            if let (Some(dst), Some(src)) = (&dq, &mut grads.dq) {
                // SAFETY: this task alone has this query head; `dq` is borrowed by the caller.
                narrow_into(unsafe { dst.slice(head * n_q, n_q) }, src);
                src.fill(T::Acc::of(0.0));
            }
        }
        for (dst, src) in [(&dk, &grads.dk), (&dv, &grads.dv)] {
            if let (Some(dst), Some(src)) = (dst, src) {
                // SAFETY: this task alone has this key-value head.
                narrow_into(unsafe { dst.slice(kv_head * n_kv, n_kv) }, src);
            }
        }
    });
}

/// Bytes each thread inside [`attention_backward`] borrows: the gradients of one head in the
/// accumulator type (all three counted), two tiles of scores, packed operands, and where `T` is narrower
/// than its accumulator the tiles of `q`, `k`, `v`, `dout` widened or those of scores rounded.
pub fn attention_backward_scratch_bytes<T: Element>(shape: &AttentionShape) -> u64 {
    let (t_q, t_k) = (shape.q_tokens as u64, shape.kv_tokens as u64);
    let (n_q, n_k) = (t_q.min(Q_BLOCK as u64), t_k.min(K_BLOCK as u64));
    let d = shape.head_dim as u64;
    let sums = (t_q + 2 * t_k) * d + 2 * n_q * n_k + n_q;
    let operands = operand_bytes::<T>(2 * (n_q + n_k) * d, 2 * n_q * n_k);
    let packed = products_bytes::<T>(&[(n_q, n_k, d), (n_k, d, n_q), (n_q, d, n_k)]);
    sums * size_of::<T::Acc>() as u64 + operands + packed
}

/// Gradients of one query head and its key-value head, where asked for.
struct Grads<R> {
    dq: Option<Vec<R>>,
    dk: Option<Vec<R>>,
    dv: Option<Vec<R>>,
}

/// Adds the gradients of one query head to `grads`.
fn head_backward<T: Element, O: Element<Acc = T::Acc>>(
    grads: &mut Grads<T::Acc>,
    q: &[T],
    k: &[T],
    v: &[T],
    out: &[T],
    lse: &[T::Acc],
    dout: &[T],
    shape: &AttentionShape,
    causal: bool,
    scale: T::Acc,
) {
    let zero = T::Acc::of(0.0);
    let d = shape.head_dim;
    let [mut q_copy, mut k_copy, mut v_copy, mut dout_copy] = [const { Vec::<O>::new() }; 4];
    let [mut p_copy, mut ds_copy] = [const { Vec::<O>::new() }; 2];
    let tile_elems = Q_BLOCK.min(shape.q_tokens) * K_BLOCK.min(shape.kv_tokens);
    let (mut p, mut ds) = (vec![zero; tile_elems], vec![zero; tile_elems]);
    for first in (0..shape.q_tokens).step_by(Q_BLOCK) {
        let n_q = Q_BLOCK.min(shape.q_tokens - first);
        let rows = first * d..(first + n_q) * d;
        let row_dots: Vec<T::Acc> = (first..first + n_q)
            .map(|i| T::Acc::of(dot(&dout[i * d..][..d], &out[i * d..][..d])))
            .collect();
        let q = Mat::new(operand(&q[rows.clone()], &mut q_copy), n_q, d);
        let dout = Mat::new(operand(&dout[rows.clone()], &mut dout_copy), n_q, d);
        let n_keys = shape.n_visible(first + n_q - 1, causal);
        for start in (0..n_keys).step_by(K_BLOCK) {
            let n_k = K_BLOCK.min(n_keys - start);
            let tile = start * d..(start + n_k) * d;
            let k = Mat::new(operand(&k[tile.clone()], &mut k_copy), n_k, d);
            let v = Mat::new(operand(&v[tile.clone()], &mut v_copy), n_k, d);
            gemm_serial(&mut p, n_k, q, k.t(), Store::Overwrite);
            gemm_serial(&mut ds, n_k, dout, v.t(), Store::Overwrite);
            for i in 0..n_q {
                let seen = shape.n_visible(first + i, causal).saturating_sub(start).min(n_k);
                let (p, p_hidden) = p[i * n_k..][..n_k].split_at_mut(seen);
                let (ds, ds_hidden) = ds[i * n_k..][..n_k].split_at_mut(seen);
                p_hidden.fill(zero);
                ds_hidden.fill(zero);
                let (lse, row_dot) = (lse[first + i], row_dots[i]);
                vectorized(
                    #[inline(always)]
                    || {
                        for (p, ds) in p.iter_mut().zip(ds) {
                            *p = (*p * scale - lse).quick_exp();
                            *ds = *p * (*ds - row_dot) * scale;
                        }
                    },
                );
            }
            let p = Mat::new(sums_operand(&p[..n_q * n_k], &mut p_copy), n_q, n_k);
            let ds = Mat::new(sums_operand(&ds[..n_q * n_k], &mut ds_copy), n_q, n_k);
            if let Some(dv) = &mut grads.dv {
                gemm_serial(&mut dv[tile.clone()], d, p.t(), dout, Store::Add);
            }
            if let Some(dk) = &mut grads.dk {
                gemm_serial(&mut dk[tile], d, ds.t(), q, Store::Add);
            }
            if let Some(dq) = &mut grads.dq {
                gemm_serial(&mut dq[rows.clone()], d, ds, k, Store::Add);
            }
        }
    }
}

/// # Panics
/// If a length does not match the shape, or the shape cannot run.
fn assert_lens<T, R>(
    what: &str,
    shape: &AttentionShape,
    q_like: &[&[T]],
    kv_like: &[&[T]],
    lse: &[R],
) {
    assert_eq!(shape.checked(), Ok(*shape), "{what}: unchecked shape");
    for x in q_like {
        assert_eq!(x.len(), shape.q_elems(), "{what}: not [B, H, Tq, D] of {shape:?}");
    }
    for x in kv_like {
        assert_eq!(x.len(), shape.kv_elems(), "{what}: not [B, G, Tk, D] of {shape:?}");
    }
    assert_eq!(lse.len(), shape.lse_elems(), "{what}: lse is not [B, H, Tq] of {shape:?}");
}

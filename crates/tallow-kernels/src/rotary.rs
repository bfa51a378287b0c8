//! Rotary position embedding (Su et al. 2021): pairs of a head's elements turn by an angle that
//! grows with the position, `theta[t, j] = t * base^(-2 j / D)`.
//!
//! *Kept:* the tables, `T * D / 2` values each; backward needs nothing else.

use crate::{Element, Real, par};

/// Which elements of a head form the pair `j` of `D / 2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rope {
    /// `j` and `j + D / 2`: GPT-NeoX, and Llama as Hugging Face stores it.
    Half,
    /// `2 j` and `2 j + 1`: the paper, and Llama as Meta stores it.
    Interleaved,
}

/// `cos` and `sin` of every angle, `[T, D / 2]` each, computed in `f64` and rounded once.
/// # Panics
/// If `head_dim` is odd.
pub fn rope_table<R: Real>(n_tokens: usize, head_dim: usize, base: f64) -> (Vec<R>, Vec<R>) {
    rope_table_of(0, n_tokens, &rope_frequencies(head_dim, base))
}

/// `base^(-2 j / D)` of each pair `j`: radians a token.
/// # Panics
/// If `head_dim` is odd.
pub fn rope_frequencies(head_dim: usize, base: f64) -> Vec<f64> {
    assert_eq!(head_dim % 2, 0, "rope_frequencies: head_dim is odd");
    let n_pairs = head_dim / 2;
    (0..n_pairs).map(|j| libm::pow(base, -(j as f64) / n_pairs as f64)).collect()
}

/// As [`rope_table`], of `n_tokens` tokens from `first` and a frequency for each pair.
pub fn rope_table_of<R: Real>(first: usize, n_tokens: usize, freqs: &[f64]) -> (Vec<R>, Vec<R>) {
    let n_pairs = freqs.len();
    (0..n_tokens * n_pairs)
        .map(|i| {
            let (t, j) = (first + i / n_pairs, i % n_pairs);
            let (sin, cos) = libm::sincos(t as f64 * freqs[j]);
            (R::of(cos), R::of(sin))
        })
        .unzip()
}

/// Turns each pair `(a, b)` of every row into `(a cos - b sin, b cos + a sin)`.
///
/// `x` `[R, T, D]`, any number `R` of heads and batches → `out` `[R, T, D]`; `cos`, `sin`
/// `[T, D / 2]`.
///
/// *Scratch:* none.
/// # Panics
/// If `head_dim` is odd or a length does not match.
pub fn rope<T: Element>(
    out: &mut [T],
    x: &[T],
    cos: &[T::Acc],
    sin: &[T::Acc],
    head_dim: usize,
    style: Rope,
) {
    turn(out, x, cos, sin, head_dim, style, T::Acc::of(1.0));
}

/// Gradient of [`rope`]: `dout` turned back by the same angles; shapes as there.
///
/// *Scratch:* none.
/// # Panics
/// If `head_dim` is odd or a length does not match.
pub fn rope_backward<T: Element>(
    dx: &mut [T],
    dout: &[T],
    cos: &[T::Acc],
    sin: &[T::Acc],
    head_dim: usize,
    style: Rope,
) {
    turn(dx, dout, cos, sin, head_dim, style, T::Acc::of(-1.0));
}

/// The rotation by `sign` times the angle.
fn turn<T: Element>(
    out: &mut [T],
    x: &[T],
    cos: &[T::Acc],
    sin: &[T::Acc],
    head_dim: usize,
    style: Rope,
    sign: T::Acc,
) {
    let n_pairs = head_dim / 2;
    assert_eq!(head_dim % 2, 0, "rope: head_dim is odd");
    assert_eq!(out.len(), x.len(), "rope: output and input differ in length");
    assert_eq!(cos.len(), sin.len(), "rope: cos and sin differ in length");
    if x.is_empty() {
        return;
    }
    assert_eq!(cos.len() % n_pairs, 0, "rope: cos is not whole tokens of head_dim / 2");
    let n_tokens = cos.len() / n_pairs;
    assert!(
        n_tokens > 0 && x.len().is_multiple_of(n_tokens * head_dim),
        "rope: input is not whole sequences of {n_tokens} tokens of {head_dim}"
    );
    par::rows(
        out,
        head_dim,
        #[inline(always)]
        |i, out| {
            let x = &x[i * head_dim..][..head_dim];
            let angle = (i % n_tokens) * n_pairs;
            let angles = cos[angle..][..n_pairs].iter().zip(&sin[angle..][..n_pairs]);
            match style {
                Rope::Half => {
                    let (out_a, out_b) = out.split_at_mut(n_pairs);
                    let (a, b) = x.split_at(n_pairs);
                    let pairs = out_a.iter_mut().zip(out_b).zip(a.iter().zip(b));
                    for (((out_a, out_b), (a, b)), (&cos, &sin)) in pairs.zip(angles) {
                        let (a, b, sin) = (a.widen(), b.widen(), sign * sin);
                        *out_a = T::narrow(a * cos - b * sin);
                        *out_b = T::narrow(b * cos + a * sin);
                    }
                }
                Rope::Interleaved => {
                    let pairs = out.chunks_exact_mut(2).zip(x.chunks_exact(2));
                    for ((out, x), (&cos, &sin)) in pairs.zip(angles) {
                        let (a, b, sin) = (x[0].widen(), x[1].widen(), sign * sin);
                        out[0] = T::narrow(a * cos - b * sin);
                        out[1] = T::narrow(b * cos + a * sin);
                    }
                }
            }
        },
    );
}

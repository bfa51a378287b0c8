//! Layer norm and RMS norm over the last axis, with their backward passes.
//!
//! Both are `y = xhat * weight (+ bias)` with `xhat = (x - mean) / sqrt(var + eps)`; RMS norm takes
//! 0 for the mean, so that `var` is the mean square. Backward recomputes mean and variance from
//! `x`: nothing is kept between the passes but `x` itself.
//!
//! Weights and biases are in the accumulator type, so that `bf16` activations go with `f32`
//! parameters. A NaN or an infinity in a row makes that row NaN.

use std::borrow::Cow;

use crate::{
    Element, Real,
    isa::vectorized,
    par::{self, Disjoint},
    reduce::{by_row_blocks, n_row_blocks, n_rows, parts, parts2, row_blocks_bytes},
};

/// What the variance of a row is taken about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Centre {
    /// The row's mean: layer norm.
    Mean,
    /// Zero: RMS norm.
    Zero,
}

/// Layer norm (Ba et al. 2016) of each row: `y = (x - mean) / sqrt(var + eps) * weight + bias`,
/// the variance biased (divided by `C`).
///
/// `x` `[N, C]` → `out` `[N, C]`; `weight`, `bias` `[C]`, 1 and 0 where absent.
///
/// *Scratch:* a row of `C` for each absent parameter.
/// # Panics
/// If a length does not match.
pub fn layer_norm<T: Element>(
    out: &mut [T],
    x: &[T],
    weight: Option<&[T::Acc]>,
    bias: Option<&[T::Acc]>,
    n_cols: usize,
    eps: f64,
) {
    forward("layer_norm", Centre::Mean, out, x, weight, bias, n_cols, eps);
}

/// Gradients of [`layer_norm`], each where asked for. With `g = dout * weight`:
///
/// - `dx = (g - mean(g) - xhat * mean(g * xhat)) / sqrt(var + eps)`, means over the row;
/// - `dweight = sum of dout * xhat`, `dbias = sum of dout`, over the rows.
///
/// *Scratch:* [`norm_backward_scratch_bytes`].
/// # Panics
/// If a length does not match.
pub fn layer_norm_backward<T: Element>(
    dx: Option<&mut [T]>,
    dweight: Option<&mut [T::Acc]>,
    dbias: Option<&mut [T::Acc]>,
    x: &[T],
    weight: Option<&[T::Acc]>,
    dout: &[T],
    n_cols: usize,
    eps: f64,
) {
    let centre = Centre::Mean;
    backward("layer_norm_backward", centre, dx, dweight, dbias, x, weight, dout, n_cols, eps);
}

/// RMS norm (Zhang and Sennrich 2019) of each row: `y = x / sqrt(mean(x^2) + eps) * weight`.
///
/// `x` `[N, C]` → `out` `[N, C]`; `weight` `[C]`, 1 where absent.
///
/// *Scratch:* a row of `C` for each absent parameter.
/// # Panics
/// If a length does not match.
pub fn rms_norm<T: Element>(
    out: &mut [T],
    x: &[T],
    weight: Option<&[T::Acc]>,
    n_cols: usize,
    eps: f64,
) {
    forward("rms_norm", Centre::Zero, out, x, weight, None, n_cols, eps);
}

/// Gradients of [`rms_norm`], each where asked for. With `g = dout * weight`:
/// `dx = (g - xhat * mean(g * xhat)) / sqrt(mean(x^2) + eps)`, `dweight = sum of dout * xhat`.
///
/// *Scratch:* [`norm_backward_scratch_bytes`].
/// # Panics
/// If a length does not match.
pub fn rms_norm_backward<T: Element>(
    dx: Option<&mut [T]>,
    dweight: Option<&mut [T::Acc]>,
    x: &[T],
    weight: Option<&[T::Acc]>,
    dout: &[T],
    n_cols: usize,
    eps: f64,
) {
    let centre = Centre::Zero;
    backward("rms_norm_backward", centre, dx, dweight, None, x, weight, dout, n_cols, eps);
}

/// Bytes a backward pass borrows at most: for each block of rows the `f64` partial sums of the
/// `n_param_grads` parameter gradients asked for, a row of terms of each and one of `dout * weight`; and
/// a row of ones for an absent weight.
pub fn norm_backward_scratch_bytes<T: Element>(
    n_rows: u64,
    n_cols: u64,
    n_param_grads: u64,
) -> u64 {
    let acc_row_bytes = n_cols * size_of::<T::Acc>() as u64;
    row_blocks_bytes(n_rows, n_cols, n_param_grads * n_cols)
        + (n_row_blocks(n_rows, n_cols) * (1 + n_param_grads) + 1) * acc_row_bytes
}

/// Mean and `1 / sqrt(var + eps)` of one row.
fn stats<T: Element>(x: &[T], centre: Centre, eps: f64) -> (T::Acc, T::Acc) {
    let n = x.len() as f64;
    let mean = match centre {
        Centre::Mean => {
            parts(
                x,
                #[inline(always)]
                |v| v.widen(),
            ) / n
        }
        Centre::Zero => 0.0,
    };
    let centre = T::Acc::of(mean);
    let squares = parts(
        x,
        #[inline(always)]
        |v| (v.widen() - centre) * (v.widen() - centre),
    );
    let var = if squares.is_finite() { squares / n } else { wide_var(x, mean) };
    (T::Acc::of(mean), T::Acc::of(1.0 / (var + eps).sqrt()))
}

/// The variance about `mean` of a row whose squares the accumulator type does not hold.
fn wide_var<T: Element>(x: &[T], mean: f64) -> f64 {
    let square = |v: &T| (v.widen().f64() - mean) * (v.widen().f64() - mean);
    x.iter().map(square).sum::<f64>() / x.len() as f64
}

fn forward<T: Element>(
    what: &str,
    centre: Centre,
    out: &mut [T],
    x: &[T],
    weight: Option<&[T::Acc]>,
    bias: Option<&[T::Acc]>,
    n_cols: usize,
    eps: f64,
) {
    n_rows(what, x.len(), n_cols);
    assert_eq!(out.len(), x.len(), "{what}: out and x differ in length");
    assert_cols(what, "weight", weight, n_cols);
    assert_cols(what, "bias", bias, n_cols);
    let weight = weight.map_or_else(|| filled(1.0, n_cols), Cow::Borrowed);
    let bias = bias.map_or_else(|| filled(0.0, n_cols), Cow::Borrowed);
    par::rows(
        out,
        n_cols,
        #[inline(always)]
        |i, y| {
            let x = &x[i * n_cols..][..n_cols];
            let (mean, rstd) = stats(x, centre, eps);
            vectorized(
                #[inline(always)]
                || {
                    for (((y, x), &w), &b) in y.iter_mut().zip(x).zip(&*weight).zip(&*bias) {
                        *y = T::narrow((x.widen() - mean) * rstd * w + b);
                    }
                },
            );
        },
    );
}

fn backward<T: Element>(
    what: &str,
    centre: Centre,
    dx: Option<&mut [T]>,
    dweight: Option<&mut [T::Acc]>,
    dbias: Option<&mut [T::Acc]>,
    x: &[T],
    weight: Option<&[T::Acc]>,
    dout: &[T],
    n_cols: usize,
    eps: f64,
) {
    let n_rows = n_rows(what, x.len(), n_cols);
    assert_eq!(dout.len(), x.len(), "{what}: dout and x differ in length");
    assert!(dx.as_ref().is_none_or(|dx| dx.len() == x.len()), "{what}: dx and x differ in length");
    assert_cols(what, "weight", weight, n_cols);
    assert_cols(what, "dweight", dweight.as_deref(), n_cols);
    assert_cols(what, "dbias", dbias.as_deref(), n_cols);

    let weight = weight.map_or_else(|| filled(1.0, n_cols), Cow::Borrowed);
    let dx = dx.map(Disjoint::new);
    let n_w = if dweight.is_some() { n_cols } else { 0 };
    let n_b = if dbias.is_some() { n_cols } else { 0 };
    let sums = by_row_blocks(n_rows, n_cols, n_w + n_b, |rows, sums| {
        let zero = T::Acc::of(0.0);
        let (mut g, mut few) = (vec![zero; n_cols], vec![zero; n_w + n_b]);
        for first in rows.clone().step_by(FEW_ROWS) {
            few.fill(zero);
            let (dw, db) = few.split_at_mut(n_w);
            for i in first..rows.end.min(first + FEW_ROWS) {
                let x = &x[i * n_cols..][..n_cols];
                let dout = &dout[i * n_cols..][..n_cols];
                let row = Row { centre, x, mean_rstd: stats(x, centre, eps) };
                row.add_param_grads(dw, db, dout);
                if let Some(dx) = &dx {
                    // SAFETY: row `i` belongs to this block alone; `dx` outlives the loop.
                    let dx = unsafe { dx.slice(i * n_cols, n_cols) };
                    row.input_gradient(dx, dout, &weight, &mut g);
                }
            }
            for (sum, few) in sums.iter_mut().zip(&few) {
                *sum += few.f64();
            }
        }
    });
    let (dw, db) = sums.split_at(n_w);
    for (dst, src) in [(dweight, dw), (dbias, db)] {
        for (d, &s) in dst.unwrap_or_default().iter_mut().zip(src) {
            *d = T::Acc::of(s);
        }
    }
}

/// Rows whose terms of a parameter's gradient are added up in the accumulator type, before they are
/// added to the `f64` sums.
const FEW_ROWS: usize = 8;

/// A row of the input, its mean and `1 / sqrt(var + eps)`.
struct Row<'a, T: Element> {
    centre: Centre,
    x: &'a [T],
    mean_rstd: (T::Acc, T::Acc),
}

impl<T: Element> Row<'_, T> {
    /// `dw += dout * xhat`, `db += dout`; either may be empty.
    fn add_param_grads(&self, dw: &mut [T::Acc], db: &mut [T::Acc], dout: &[T]) {
        let (mean, rstd) = self.mean_rstd;
        vectorized(
            #[inline(always)]
            || {
                for ((dw, x), d) in dw.iter_mut().zip(self.x).zip(dout) {
                    *dw += d.widen() * ((x.widen() - mean) * rstd);
                }
                for (db, d) in db.iter_mut().zip(dout) {
                    *db += d.widen();
                }
            },
        );
    }

    /// `dx`, by way of `g = dout * weight`.
    fn input_gradient(&self, dx: &mut [T], dout: &[T], weight: &[T::Acc], g: &mut [T::Acc]) {
        let (x, (mean, rstd), n) = (self.x, self.mean_rstd, self.x.len() as f64);
        vectorized(
            #[inline(always)]
            || {
                for ((g, d), &w) in g.iter_mut().zip(dout).zip(weight) {
                    *g = d.widen() * w;
                }
            },
        );
        let (sum_g, sum_g_xhat) = parts2(
            g,
            x,
            #[inline(always)]
            |g, x| (g, g * ((x.widen() - mean) * rstd)),
        );
        let mean_g = match self.centre {
            Centre::Mean => T::Acc::of(sum_g / n),
            Centre::Zero => T::Acc::of(0.0),
        };
        let mean_g_xhat = T::Acc::of(sum_g_xhat / n);
        vectorized(
            #[inline(always)]
            || {
                for ((dx, x), &g) in dx.iter_mut().zip(x).zip(&*g) {
                    let xhat = (x.widen() - mean) * rstd;
                    *dx = T::narrow((g - mean_g - xhat * mean_g_xhat) * rstd);
                }
            },
        );
    }
}

/// What an absent parameter stands for.
fn filled<R: Real>(value: f64, n_cols: usize) -> Cow<'static, [R]> {
    Cow::Owned(vec![R::of(value); n_cols])
}

/// # Panics
/// If the parameter is there and is not `n_cols` long.
fn assert_cols<R>(what: &str, name: &str, param: Option<&[R]>, n_cols: usize) {
    if let Some(param) = param {
        assert_eq!(param.len(), n_cols, "{what}: {name} is not one value a column");
    }
}

//! Softmax and log-softmax over the last axis, with their backward passes.
//!
//! The largest entry of the row is subtracted before `exp`, and denominators are added up in `f64`, a few terms at a time. As in
//! PyTorch, a row that holds a NaN or `+inf`, or nothing but `-inf`, becomes NaN.

use crate::{
    Element, Real,
    isa::vectorized,
    par,
    reduce::{max, n_rows, parts, parts2},
};

/// `out[i, j] = exp(x[i, j]) / sum over k of exp(x[i, k])`: `x` `[N, C]` → `out` `[N, C]`.
///
/// *Scratch:* none.
/// # Panics
/// If a length does not match.
pub fn softmax<T: Element>(out: &mut [T], x: &[T], n_cols: usize) {
    assert_rows("softmax", out.len(), x.len(), n_cols);
    par::rows(
        out,
        n_cols,
        #[inline(always)]
        |i, out| {
            let x = &x[i * n_cols..][..n_cols];
            let m = max(x);
            let exp = |v: T| (v.widen() - m).quick_exp();
            if let Some(out) = T::as_acc_mut(out) {
                vectorized(
                    #[inline(always)]
                    || out.iter_mut().zip(x).for_each(|(o, &v)| *o = exp(v)),
                );
                let r = T::Acc::of(
                    1.0 / parts(
                        out,
                        #[inline(always)]
                        |e| e,
                    ),
                );
                vectorized(
                    #[inline(always)]
                    || out.iter_mut().for_each(|o| *o *= r),
                );
            } else {
                // The output would round the exponentials: they are computed again instead.
                let r = T::Acc::of(1.0 / parts(x, exp));
                vectorized(
                    #[inline(always)]
                    || out.iter_mut().zip(x).for_each(|(o, &v)| *o = T::narrow(exp(v) * r)),
                );
            }
        },
    );
}

/// Gradient of [`softmax`] from its output `p`: `dx = p * (dout - sum over the row of p * dout)`.
///
/// `out`, `dout` `[N, C]` → `dx` `[N, C]`.
///
/// *Kept:* the output. *Scratch:* none.
/// # Panics
/// If a length does not match.
pub fn softmax_backward<T: Element>(dx: &mut [T], out: &[T], dout: &[T], n_cols: usize) {
    assert_rows("softmax_backward", dx.len(), out.len(), n_cols);
    assert_rows("softmax_backward", dx.len(), dout.len(), n_cols);
    par::rows(
        dx,
        n_cols,
        #[inline(always)]
        |i, dx| {
            let p = &out[i * n_cols..][..n_cols];
            let dout = &dout[i * n_cols..][..n_cols];
            let (sum, _) = parts2(
                p,
                dout,
                #[inline(always)]
                |p, d| (p.widen() * d.widen(), T::Acc::of(0.0)),
            );
            let sum = T::Acc::of(sum);
            vectorized(
                #[inline(always)]
                || {
                    for ((dx, p), d) in dx.iter_mut().zip(p).zip(dout) {
                        *dx = T::narrow(p.widen() * (d.widen() - sum));
                    }
                },
            );
        },
    );
}

/// `out[i, j] = x[i, j] - log(sum over k of exp(x[i, k]))`: `x` `[N, C]` → `out` `[N, C]`.
///
/// *Scratch:* none.
/// # Panics
/// If a length does not match.
pub fn log_softmax<T: Element>(out: &mut [T], x: &[T], n_cols: usize) {
    assert_rows("log_softmax", out.len(), x.len(), n_cols);
    par::rows(
        out,
        n_cols,
        #[inline(always)]
        |i, out| {
            let x = &x[i * n_cols..][..n_cols];
            let m = max(x);
            let log_sum = T::Acc::of(
                parts(
                    x,
                    #[inline(always)]
                    |v| (v.widen() - m).quick_exp(),
                )
                .ln(),
            );
            vectorized(
                #[inline(always)]
                || {
                    for (o, v) in out.iter_mut().zip(x) {
                        *o = T::narrow((v.widen() - m) - log_sum);
                    }
                },
            );
        },
    );
}

/// Gradient of [`log_softmax`] from its output: `dx = dout - exp(out) * sum over the row of dout`.
///
/// `out`, `dout` `[N, C]` → `dx` `[N, C]`.
///
/// *Kept:* the output. *Scratch:* none.
/// # Panics
/// If a length does not match.
pub fn log_softmax_backward<T: Element>(dx: &mut [T], out: &[T], dout: &[T], n_cols: usize) {
    assert_rows("log_softmax_backward", dx.len(), out.len(), n_cols);
    assert_rows("log_softmax_backward", dx.len(), dout.len(), n_cols);
    par::rows(
        dx,
        n_cols,
        #[inline(always)]
        |i, dx| {
            let log_p = &out[i * n_cols..][..n_cols];
            let dout = &dout[i * n_cols..][..n_cols];
            let sum = T::Acc::of(parts(
                dout,
                #[inline(always)]
                |d| d.widen(),
            ));
            vectorized(
                #[inline(always)]
                || {
                    for ((dx, l), d) in dx.iter_mut().zip(log_p).zip(dout) {
                        *dx = T::narrow(d.widen() - l.widen().quick_exp() * sum);
                    }
                },
            );
        },
    );
}

/// # Panics
/// If the lengths differ or are not whole rows.
fn assert_rows(what: &str, a_elems: usize, b_elems: usize, n_cols: usize) {
    assert_eq!(a_elems, b_elems, "{what}: slices differ in length");
    n_rows(what, a_elems, n_cols);
}

//! Products whose sums are finished before they are stored.

use super::{Dense, Mat, Store, products};
use crate::{
    Element, Real,
    activation::{gelu_erf_of, gelu_tanh_of, positive, silu_of},
    cast::narrow_rows,
    isa::vectorized,
    pack::packs_narrow,
    product::Sink,
};
use std::ops::Range;

/// What a sum goes through last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    #[default]
    Identity,
    /// `max(x, 0)`; NaN stays NaN.
    Relu,
    /// [`gelu_tanh`](crate::activation::gelu_tanh).
    GeluTanh,
    /// [`gelu_erf`](crate::activation::gelu_erf).
    GeluErf,
    /// [`silu`](crate::activation::silu).
    Silu,
}

/// What a product does with its sums before it rounds them once:
/// `activation(sum + bias + residual)`.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a, T> {
    /// One value a column.
    pub bias: Option<&'a [T]>,
    /// As large as the destination, and dense.
    pub residual: Option<&'a [T]>,
    /// Comes last.
    pub activation: Activation,
}

/// `c = activation(a b + bias + residual)`: `a` is `m x k`, `b` is `k x n`, `c` dense row-major
/// `m x n`. Sums are kept in [`Element::Acc`] and rounded once.
///
/// *Scratch:* that of [`gemm()`](super::gemm()).
/// # Panics
/// If the sizes do not agree.
pub fn gemm_fused<T: Element>(c: &mut [T], a: Mat<T>, b: Mat<T>, epilogue: Epilogue<T>) {
    let (n, n_elems) = (b.n_cols, c.len());
    assert!(epilogue.bias.is_none_or(|bias| bias.len() == n), "gemm_fused: bias of {n}");
    assert!(epilogue.residual.is_none_or(|r| r.len() == n_elems), "gemm_fused: residual");
    let sink = |dst, start, ld| {
        let dense = Dense { dst, start, ld, store: Store::Overwrite };
        Fused { dense, epilogue }
    };
    if packs_narrow::<T>() {
        products::<T, T, T::Narrow, _>(c, 1, |_| a, |_| b, sink);
    } else {
        products::<T, T, T::Acc, _>(c, 1, |_| a, |_| b, sink);
    }
}

/// Columns that are finished at once on their way to a narrow destination.
const AT_ONCE: usize = 64;

struct Fused<'a, T> {
    dense: Dense<T>,
    epilogue: Epilogue<'a, T>,
}

impl<T: Element> Fused<'_, T> {
    /// Finishes the sums of row `i` from column `j` on.
    fn finish_row(&self, sums: &mut [T::Acc], i: usize, j: usize) {
        let Epilogue { bias, residual, activation } = self.epilogue;
        for addend in [bias.map(|b| &b[j..]), residual.map(|r| &r[i * self.dense.ld + j..])] {
            vectorized(
                #[inline(always)]
                || {
                    for (sum, x) in sums.iter_mut().zip(addend.unwrap_or_default()) {
                        *sum += x.widen();
                    }
                },
            );
        }
        match activation {
            Activation::Identity => {}
            Activation::Relu => each(sums, positive),
            Activation::GeluTanh => each(sums, gelu_tanh_of),
            Activation::GeluErf => each(sums, gelu_erf_of),
            Activation::Silu => each(sums, silu_of),
        }
    }
}

#[inline(always)]
fn each<R: Real>(sums: &mut [R], f: impl Fn(R) -> R) {
    vectorized(
        #[inline(always)]
        || sums.iter_mut().for_each(|sum| *sum = f(*sum)),
    );
}

impl<T: Element> Sink<T::Acc> for Fused<'_, T> {
    fn place(&self, at: (usize, usize), n: (usize, usize)) -> Option<(*mut T::Acc, usize)> {
        self.dense.place(at, n)
    }
    fn adds(&self) -> bool {
        self.dense.adds()
    }
    fn takes_parts(&self) -> bool {
        self.dense.takes_parts()
    }
    fn put(
        &self,
        (i, j): (usize, usize),
        (n_rows, n_cols): (usize, usize),
        (sums, ld): (&[T::Acc], usize),
        part: usize,
    ) {
        if self.takes_parts() {
            return self.dense.put((i, j), (n_rows, n_cols), (sums, ld), part);
        }
        let mut row = [T::Acc::of(0.0); AT_ONCE];
        for r in 0..n_rows {
            for at in (0..n_cols).step_by(AT_ONCE) {
                let n = AT_ONCE.min(n_cols - at);
                let row = &mut row[..n];
                row.copy_from_slice(&sums[r * ld + at..][..n]);
                self.finish_row(row, i + r, j + at);
                let first = self.dense.start + (i + r) * self.dense.ld + j + at;
                let dst = self.dense.dst.ptr(first, n);
                // SAFETY: in bounds by `ptr`'s check; these sums belong to one tile, which one call
                // computes.
                unsafe { narrow_rows((dst, n), (row, n), (1, n), false) };
            }
        }
    }
    /// Sums that were added up in place.
    fn finish(&self, rows: Range<usize>, cols: Range<usize>) {
        if !self.takes_parts() {
            return;
        }
        for i in rows {
            let first = self.dense.start + i * self.dense.ld + cols.start;
            // SAFETY: these sums belong to one tile, which one call computes.
            let row = unsafe { self.dense.dst.slice(first, cols.len()) };
            let row = T::as_acc_mut(row).expect("sums that come in parts are stored as they are");
            self.finish_row(row, i, cols.start);
        }
    }
}

/// The specification of [`gemm_fused`].
pub fn gemm_fused_scalar<T: Element>(c: &mut [T], a: Mat<T>, b: Mat<T>, epilogue: Epilogue<T>) {
    let n = b.n_cols;
    for (at, c) in c.iter_mut().enumerate() {
        let (i, j) = (at / n, at % n);
        let mut sum = T::Acc::of(0.0);
        for p in 0..a.n_cols {
            let x = a.data[i * a.row_stride + p * a.col_stride];
            sum += x.widen() * b.data[p * b.row_stride + j * b.col_stride].widen();
        }
        sum += epilogue.bias.map_or(T::Acc::of(0.0), |bias| bias[j].widen());
        sum += epilogue.residual.map_or(T::Acc::of(0.0), |residual| residual[at].widen());
        *c = T::narrow(match epilogue.activation {
            Activation::Identity => sum,
            Activation::Relu => positive(sum),
            Activation::GeluTanh => gelu_tanh_of(sum),
            Activation::GeluErf => gelu_erf_of(sum),
            Activation::Silu => silu_of(sum),
        });
    }
}

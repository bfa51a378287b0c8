//! Sums and means, added up in `f64` whatever is stored.
//!
//! A sum in `f16` stalls at 2048 and one in `bf16` at 256; these do not. Each sum runs in
//! independent lanes so that the compiler can vectorise it, and long ones in fixed
//! blocks, so that the result is the same bit for bit on any number of threads.

use crate::{Element, Real, cast::round, isa::vectorized, par};

/// Independent partial sums of a reduction; fixed, for the order of summation is part of a result.
const LANES: usize = 16;
/// Of these the first, which what is left over of short rows is added to.
const FEW: usize = 8;
/// Elements of one block of a long sum.
const BLOCK_ELEMS: usize = 1 << 16;
/// Most row blocks of a column sum: enough to share out, few enough that partials stay small.
const MAX_ROW_BLOCKS: usize = 32;
/// Fewest elements worth a row block of their own.
const MIN_BLOCK_ELEMS: usize = 1 << 13;

/// The sum of `x`; 0 when empty.
pub fn sum<T: Element>(x: &[T]) -> f64 {
    let block = |i: usize| {
        let start = i * BLOCK_ELEMS;
        lanes(
            &x[start..x.len().min(start + BLOCK_ELEMS)],
            #[inline(always)]
            |v| v.widen().f64(),
        )
    };
    match x.len().div_ceil(BLOCK_ELEMS) {
        0 => 0.0,
        1 => block(0),
        n_blocks => par::tasks(n_blocks, block).into_iter().sum(),
    }
}

/// The mean of `x`; NaN when empty, as 0 / 0.
pub fn mean<T: Element>(x: &[T]) -> f64 {
    sum(x) / x.len() as f64
}

/// `out[i] = sum over j of x[i, j]`: `x` `[N, C]` → `out` `[N]`, rounded once.
///
/// *Scratch:* none.
/// # Panics
/// If `x` does not hold `out.len()` rows of `n_cols`.
pub fn sum_rows<T: Element, D: Element>(out: &mut [D], x: &[T], n_cols: usize) {
    assert_eq!(x.len(), out.len() * n_cols, "sum_rows: x is not out.len() rows of {n_cols}");
    par::elems(
        out,
        #[inline(always)]
        |start, cut| {
            for (i, o) in cut.iter_mut().enumerate() {
                let row = &x[(start + i) * n_cols..][..n_cols];
                *o = round(lanes(
                    row,
                    #[inline(always)]
                    |v| v.widen().f64(),
                ));
            }
        },
    );
}

/// `out[j] = sum over i of x[i, j]`: `x` `[N, C]` → `out` `[C]`, rounded once; zeros for no rows.
///
/// *Scratch:* [`sum_cols_scratch_bytes`].
/// # Panics
/// If `x` is not whole rows of `out.len()`.
pub fn sum_cols<T: Element, D: Element>(out: &mut [D], x: &[T]) {
    let n_cols = out.len();
    let n_rows = n_rows("sum_cols", x.len(), n_cols);
    let sums = by_row_blocks(n_rows, n_cols, n_cols, |rows, sums| {
        for row in rows {
            for (s, v) in sums.iter_mut().zip(&x[row * n_cols..][..n_cols]) {
                *s += v.widen().f64();
            }
        }
    });
    for (o, s) in out.iter_mut().zip(sums) {
        *o = round(s);
    }
}

/// Bytes [`sum_cols`] borrows: one `f64` a column and row block.
pub fn sum_cols_scratch_bytes(n_rows: u64, n_cols: u64) -> u64 {
    row_blocks_bytes(n_rows, n_cols, n_cols)
}

/// Adds up `n_sums` column sums over `n_rows` rows of `n_cols` elements: `f(rows, sums)` adds the
/// rows of one block to zeroed sums; blocks are cut by shape and combined in their order.
pub(crate) fn by_row_blocks<F>(n_rows: usize, n_cols: usize, n_sums: usize, f: F) -> Vec<f64>
where
    F: Fn(std::ops::Range<usize>, &mut [f64]) + Send + Sync,
{
    let block_rows = block_rows(n_rows, n_cols);
    let block = |i: usize| {
        let mut sums = vec![0.0; n_sums];
        f(i * block_rows..n_rows.min((i + 1) * block_rows), &mut sums);
        sums
    };
    let mut parts = match n_rows.div_ceil(block_rows) {
        0 => return vec![0.0; n_sums],
        1 => return block(0),
        n_blocks => par::tasks(n_blocks, block),
    }
    .into_iter();
    let mut total = parts.next().expect("there are at least two blocks");
    for part in parts {
        for (t, p) in total.iter_mut().zip(part) {
            *t += p;
        }
    }
    total
}

/// Rows of one block of [`by_row_blocks`].
fn block_rows(n_rows: usize, n_cols: usize) -> usize {
    n_rows.div_ceil(MAX_ROW_BLOCKS).max(MIN_BLOCK_ELEMS.div_ceil(n_cols.max(1)))
}

/// Row blocks of [`by_row_blocks`]; at least 1.
pub(crate) fn n_row_blocks(n_rows: u64, n_cols: u64) -> u64 {
    n_rows.div_ceil(block_rows(n_rows as usize, n_cols as usize) as u64).max(1)
}

/// Bytes of the partial sums of [`by_row_blocks`].
pub(crate) fn row_blocks_bytes(n_rows: u64, n_cols: u64, n_sums: u64) -> u64 {
    n_row_blocks(n_rows, n_cols) * n_sums * size_of::<f64>() as u64
}

/// `sum of term(x[i])`, in lanes.
#[inline(always)]
pub(crate) fn lanes<T: Copy>(x: &[T], term: impl Fn(T) -> f64) -> f64 {
    vectorized(
        #[inline(always)]
        || {
            let mut acc = [0.0; LANES];
            let (body, rest) = x.as_chunks::<LANES>();
            for x in body {
                for l in 0..LANES {
                    acc[l] += term(x[l]);
                }
            }
            let (rest, tail) = rest.as_chunks::<FEW>();
            for x in rest {
                for l in 0..FEW {
                    acc[l] += term(x[l]);
                }
            }
            for (l, &x) in tail.iter().enumerate() {
                acc[l] += term(x);
            }
            fold(acc)
        },
    )
}

/// `sum of term(x[i], y[i])`, in lanes.
#[inline(always)]
pub(crate) fn lanes2<T: Copy, U: Copy>(x: &[T], y: &[U], term: impl Fn(T, U) -> f64) -> f64 {
    // Adding -0 changes nothing, not even -0.
    sums2(
        x,
        y,
        #[inline(always)]
        |x, y| (term(x, y), -0.0),
    )
    .0
}

/// Both sums of the pairs `term(x[i], y[i])` in one pass, in lanes.
#[inline(always)]
pub(crate) fn sums2<T: Copy, U: Copy>(
    x: &[T],
    y: &[U],
    term: impl Fn(T, U) -> (f64, f64),
) -> (f64, f64) {
    assert_eq!(x.len(), y.len(), "sums2: x and y differ in length");
    vectorized(
        #[inline(always)]
        || {
            let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
            let (x_body, x_rest) = x.as_chunks::<LANES>();
            let (y_body, y_rest) = y.as_chunks::<LANES>();
            for (x, y) in x_body.iter().zip(y_body) {
                for l in 0..LANES {
                    let terms = term(x[l], y[l]);
                    a[l] += terms.0;
                    b[l] += terms.1;
                }
            }
            let (x_rest, x_tail) = x_rest.as_chunks::<FEW>();
            let (y_rest, y_tail) = y_rest.as_chunks::<FEW>();
            for (x, y) in x_rest.iter().zip(y_rest) {
                for l in 0..FEW {
                    let terms = term(x[l], y[l]);
                    a[l] += terms.0;
                    b[l] += terms.1;
                }
            }
            for (l, (&x, &y)) in x_tail.iter().zip(y_tail).enumerate() {
                let terms = term(x, y);
                a[l] += terms.0;
                b[l] += terms.1;
            }
            (fold(a), fold(b))
        },
    )
}

/// Lanes of a sum whose terms are added up in the accumulator type first.
const WIDE: usize = 64;
/// Elements of such a part: 16 terms a lane.
const PART: usize = 16 * WIDE;

/// As [`lanes`], 16 terms a lane added up in `R` before they are added in `f64`: for terms that are rounded
/// to `R` anyway, at a third of the time.
#[inline(always)]
pub(crate) fn parts<R: Real, T: Copy>(x: &[T], term: impl Fn(T) -> R) -> f64 {
    // Nobody looks at the second sum.
    parts2(
        x,
        x,
        #[inline(always)]
        |x, _| (term(x), R::of(0.0)),
    )
    .0
}

/// As [`sums2`], in the way of [`parts`].
#[inline(always)]
pub(crate) fn parts2<R: Real, T: Copy, U: Copy>(
    x: &[T],
    y: &[U],
    term: impl Fn(T, U) -> (R, R),
) -> (f64, f64) {
    assert_eq!(x.len(), y.len(), "parts2: x and y differ in length");
    vectorized(
        #[inline(always)]
        || {
            let mut sums = (0.0, 0.0);
            for (x, y) in x.chunks(PART).zip(y.chunks(PART)) {
                let (mut a, mut b) = ([R::of(0.0); WIDE], [R::of(0.0); WIDE]);
                let (x_body, x_tail) = x.as_chunks::<WIDE>();
                let (y_body, y_tail) = y.as_chunks::<WIDE>();
                for (x, y) in x_body.iter().zip(y_body) {
                    for l in 0..WIDE {
                        let terms = term(x[l], y[l]);
                        a[l] += terms.0;
                        b[l] += terms.1;
                    }
                }
                for (l, (&x, &y)) in x_tail.iter().zip(y_tail).enumerate() {
                    let terms = term(x, y);
                    a[l] += terms.0;
                    b[l] += terms.1;
                }
                sums = (sums.0 + fold(halved(a)), sums.1 + fold(halved(b)));
            }
            sums
        },
    )
}

/// Sums of lanes, as many as [`LANES`].
#[inline(always)]
fn halved<R: Real>(mut acc: [R; WIDE]) -> [f64; LANES] {
    for n in [WIDE / 2, WIDE / 4] {
        for l in 0..n {
            acc[l] += acc[l + n];
        }
    }
    std::array::from_fn(|l| acc[l].f64())
}
const _: () = assert!(WIDE / 4 == LANES);

/// `sum of x[i] * y[i]`.
pub(crate) fn dot<T: Element, U: Element>(x: &[T], y: &[U]) -> f64 {
    lanes2(
        x,
        y,
        #[inline(always)]
        |a, b| a.widen().f64() * b.widen().f64(),
    )
}

/// `max of x[i]` without its NaNs; -infinity when empty.
pub(crate) fn max<T: Element>(x: &[T]) -> T::Acc {
    let mut acc = [T::Acc::of(f64::NEG_INFINITY); LANES];
    let (body, tail) = x.as_chunks::<LANES>();
    vectorized(
        #[inline(always)]
        || {
            for chunk in body {
                for l in 0..LANES {
                    let v = chunk[l].widen();
                    acc[l] = if v > acc[l] { v } else { acc[l] };
                }
            }
        },
    );
    for (l, v) in tail.iter().enumerate() {
        let v = v.widen();
        acc[l] = if v > acc[l] { v } else { acc[l] };
    }
    acc.into_iter().fold(T::Acc::of(f64::NEG_INFINITY), |m, v| if v > m { v } else { m })
}

/// How many rows of `n_cols` make `n_elems`; 0 for no columns.
///
/// # Panics
/// If they are not whole rows.
pub(crate) fn n_rows(what: &str, n_elems: usize, n_cols: usize) -> usize {
    let n_rows = n_elems.checked_div(n_cols).unwrap_or(0);
    assert_eq!(n_rows * n_cols, n_elems, "{what}: not whole rows of {n_cols}");
    n_rows
}

/// Adds the lanes up in a fixed order: one half to the other.
#[inline(always)]
fn fold(mut acc: [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            acc[l] += acc[l + half];
        }
        half /= 2;
    }
    acc[0]
}

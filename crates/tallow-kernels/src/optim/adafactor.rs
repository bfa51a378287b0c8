//! Adafactor (Shazeer and Stern 2018), in the form of `torch.optim.Adafactor`.

use super::{
    CHUNK_ELEMS, UpdateKey, Weight, Weights,
    moment::{num, read, write},
};
use crate::{
    Element, Real, par,
    reduce::{by_row_blocks, lanes},
};
use num_traits::Float;
use std::ops::Range;

/// Elements of one partial sum of a norm.
const SUM_ELEMS: usize = 1 << 16;

/// Numbers of Adafactor for one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// Upper bound of the relative step.
    pub lr: f64,
    /// The second moment forgets by `t^beta2_decay`; negative.
    pub beta2_decay: f64,
    /// Floor of the second moment's mean and, squared, of the second moment.
    pub eps1: f64,
    /// Floor of the parameter's scale.
    pub eps2: f64,
    /// The update's root mean square is clipped to this.
    pub d: f64,
    /// Decoupled weight decay.
    pub decay: f64,
    /// Which update of this parameter it is, from 1.
    pub t: u64,
}

/// The second moment, as planes of little-endian numbers of the accumulator's type.
pub enum SecondMoment<'a> {
    /// Of a vector or scalar: one number an element.
    Whole(&'a mut [u8]),
    /// Of a batch of `n_rows` by `n_cols` matrices, the last two dimensions.
    Factored {
        /// Rows of one matrix.
        n_rows: usize,
        /// Columns of one matrix.
        n_cols: usize,
        /// Means over columns, a number a row.
        row: &'a mut [u8],
        /// Means over rows, a number a column of each matrix.
        col: &'a mut [u8],
    },
}

/// The most bytes [`adafactor`] borrows, besides partial sums: the numbers of the second moment
/// once more, and sums of factors in `f64`.
pub const fn adafactor_scratch_bytes(second_moment_bytes: u64) -> u64 {
    3 * second_moment_bytes
}

/// The second moment in accumulator precision, with the means that the factors need.
enum Variance<A> {
    Whole(Vec<A>),
    Factored { n_rows: usize, n_cols: usize, row: Vec<A>, col: Vec<A>, mean: Vec<A> },
}

/// Updates parameter and second moment in place, by the gradient `g = grad_factor grad`.
///
/// ```text
/// rho = min(lr, 1 / sqrt(t));  alpha = max(eps2, rms(p)) rho;  b = t^beta2_decay
/// row += b (mean over columns of g^2 - row);  col += b (mean over rows of g^2 - col)
/// v = row col / max(eps1, mean of row);  u = g / sqrt(max(v, eps1^2))
/// p = p (1 - lr decay) - alpha u / max(1, rms(u) / d)
/// ```
/// # Panics
/// If lengths differ.
pub fn adafactor<T: Weight, G: Element>(
    rule: &Adafactor,
    key: UpdateKey,
    param: &mut [T],
    grad: &[G],
    grad_factor: f64,
    mut weights: Weights,
    second: SecondMoment,
) {
    assert_eq!(param.len(), grad.len(), "adafactor: parameter and gradient differ in length");
    if param.is_empty() {
        return;
    }
    let n = param.len() as f64;
    let sum_p = sum_of_squares(param);
    let factor = T::Acc::of(grad_factor);
    let v = second_moment(rule, grad, factor, second);
    let eps1 = T::Acc::of(rule.eps1 * rule.eps1);
    let step_of = |first: usize, u: &mut [T::Acc]| {
        v.fill(first, u, T::Acc::of(rule.eps1));
        for (u, g) in u.iter_mut().zip(&grad[first..]) {
            *u = num::<G, T::Acc>(*g) * factor / at_least(*u, eps1).sqrt();
        }
    };
    let sum_u = sum(param.len(), |range| {
        chunks(range, |first, n| {
            let mut u = [T::Acc::of(0.0); CHUNK_ELEMS];
            step_of(first, &mut u[..n]);
            square_sum(&u[..n])
        })
    });
    let rho = rule.lr.min(1.0 / (rule.t as f64).sqrt());
    let alpha = rule.eps2.max((sum_p / n).sqrt()) * rho;
    // Written so that a NaN stays one.
    let rms = (sum_u / n).sqrt() / rule.d;
    let alpha = T::Acc::of(alpha / if rms <= 1.0 { 1.0 } else { rms });
    let keep = T::Acc::of(1.0 - rule.lr * rule.decay);
    let apply = |first: usize, param: &mut [T], weights: &mut Weights| {
        let [mut u, mut p] = [[T::Acc::of(0.0); CHUNK_ELEMS]; 2];
        for at in (0..param.len()).step_by(CHUNK_ELEMS) {
            let n = CHUNK_ELEMS.min(param.len() - at);
            step_of(first + at, &mut u[..n]);
            weights.load(param, at, &mut p[..n]);
            for (p, u) in p.iter_mut().zip(&u).take(n) {
                *p = *p * keep - alpha * *u;
            }
            weights.store(param, at, &p[..n], key.draws(0), (first + at) as u64);
        }
    };
    divide(0, param, &mut weights, &apply);
}

/// Halves the parameter until one thread's worth is left.
fn divide<T: Send, F>(first: usize, param: &mut [T], weights: &mut Weights, apply: &F)
where
    F: Fn(usize, &mut [T], &mut Weights) + Sync,
{
    let n_cuts = param.len().div_ceil(super::CUT_ELEMS);
    if n_cuts <= 1 {
        return apply(first, param, weights);
    }
    let n = n_cuts / 2 * super::CUT_ELEMS;
    let whole = match weights {
        Weights::Nearest => Weights::Nearest,
        Weights::Stochastic => Weights::Stochastic,
        Weights::Kahan(low) => Weights::Kahan(low),
    };
    let ((left, right), (mut weights, mut rest)) = (param.split_at_mut(n), whole.split_at(n));
    rayon::join(
        || divide(first, left, &mut weights, apply),
        || divide(first + n, right, &mut rest, apply),
    );
}

/// Moves the second moment on by `grad`, and returns it in accumulator precision.
fn second_moment<A: Real, G: Element>(
    rule: &Adafactor,
    grad: &[G],
    factor: A,
    second: SecondMoment,
) -> Variance<A> {
    let g2 = |g: G| square(num::<G, A>(g) * factor);
    let beta = A::of(libm::pow(rule.t as f64, rule.beta2_decay));
    let moved = |plane: &mut [u8], news: &dyn Fn(usize) -> f64| {
        let mut numbers = numbers::<A>(plane);
        for (i, x) in numbers.iter_mut().enumerate() {
            *x += beta * (A::of(news(i)) - *x);
        }
        put(plane, &numbers);
        numbers
    };
    match second {
        SecondMoment::Whole(plane) => {
            let n_bytes = grad.len() * size_of::<A>();
            assert_eq!(plane.len(), n_bytes, "adafactor: bytes of the second moment");
            Variance::Whole(moved(plane, &|i| g2(grad[i])))
        }
        SecondMoment::Factored { n_rows, n_cols, row, col } => {
            let area = n_rows * n_cols;
            assert!(area != 0 && grad.len().is_multiple_of(area), "adafactor: not whole matrices");
            let rows = par::tasks(grad.len() / n_cols, |r| {
                lanes(&grad[r * n_cols..][..n_cols], g2) / n_cols as f64
            });
            let cols: Vec<f64> = grad
                .chunks(area)
                .flat_map(|matrix| col_sums(matrix, n_cols, g2))
                .map(|sum| sum / n_rows as f64)
                .collect();
            assert_eq!(
                row.len(),
                rows.len() * size_of::<A>(),
                "adafactor: bytes of the row factor"
            );
            assert_eq!(
                col.len(),
                cols.len() * size_of::<A>(),
                "adafactor: bytes of the col factor"
            );
            let (row, col) = (moved(row, &|i| rows[i]), moved(col, &|i| cols[i]));
            let mean =
                |rows: &[A]| A::of(rows.iter().map(|r| r.f64()).sum::<f64>() / n_rows as f64);
            let mean = row.chunks(n_rows).map(mean).collect();
            Variance::Factored { n_rows, n_cols, row, col, mean }
        }
    }
}

fn col_sums<G: Element>(
    matrix: &[G],
    n_cols: usize,
    g2: impl Fn(G) -> f64 + Send + Sync,
) -> Vec<f64> {
    by_row_blocks(matrix.len() / n_cols, n_cols, n_cols, |rows, sums| {
        for row in rows {
            for (s, g) in sums.iter_mut().zip(&matrix[row * n_cols..][..n_cols]) {
                *s += g2(*g);
            }
        }
    })
}

impl<A: Real> Variance<A> {
    /// Elements `first..first + v.len()` of the estimate.
    fn fill(&self, first: usize, v: &mut [A], eps1: A) {
        match self {
            Variance::Whole(numbers) => v.copy_from_slice(&numbers[first..][..v.len()]),
            Variance::Factored { n_rows, n_cols, row, col, mean } => {
                let mut at = 0;
                while at < v.len() {
                    let (r, c) = ((first + at) / n_cols, (first + at) % n_cols);
                    let (matrix, n) = (r / n_rows, (n_cols - c).min(v.len() - at));
                    let scale = row[r] / at_least(mean[matrix], eps1);
                    let cols = &col[matrix * n_cols + c..][..n];
                    for (v, col) in v[at..at + n].iter_mut().zip(cols) {
                        *v = scale * *col;
                    }
                    at += n;
                }
            }
        }
    }
}

/// The sum of the squares of `x`, in f64: no gradient in `f32` or 16 bits overflows it.
pub fn sum_of_squares<T: Element>(x: &[T]) -> f64 {
    sum(x.len(), |range| square_sum(&x[range]))
}

/// The sum of `f` over fixed ranges of `0..n`, in their order.
fn sum(n: usize, f: impl Fn(Range<usize>) -> f64 + Send + Sync) -> f64 {
    let block = |i: usize| f(i * SUM_ELEMS..n.min((i + 1) * SUM_ELEMS));
    par::tasks(n.div_ceil(SUM_ELEMS), block).into_iter().sum()
}

/// The sum of `f(first, n)` over the chunks of a range.
fn chunks(range: Range<usize>, f: impl Fn(usize, usize) -> f64) -> f64 {
    let end = range.end;
    range.step_by(CHUNK_ELEMS).map(|first| f(first, CHUNK_ELEMS.min(end - first))).sum()
}

fn square<T: Element>(x: T) -> f64 {
    x.widen().f64() * x.widen().f64()
}

fn square_sum<T: Element>(x: &[T]) -> f64 {
    lanes(x, square)
}

/// The larger of the two; NaN stays NaN.
fn at_least<A: Real>(x: A, floor: A) -> A {
    if x < floor { floor } else { x }
}

/// The numbers of a plane.
fn numbers<A: Real>(plane: &[u8]) -> Vec<A> {
    let mut numbers = vec![A::of(0.0); plane.len() / size_of::<A>()];
    if size_of::<A>() == 4 {
        read(plane, &mut numbers, |b| num(f32::from_le_bytes(b)));
    } else {
        read(plane, &mut numbers, |b| num(f64::from_le_bytes(b)));
    }
    numbers
}

fn put<A: Real>(plane: &mut [u8], numbers: &[A]) {
    if size_of::<A>() == 4 {
        write(plane, numbers, |x| (x.f64() as f32).to_le_bytes());
    } else {
        write(plane, numbers, |x| x.f64().to_le_bytes());
    }
}

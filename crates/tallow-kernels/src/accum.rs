//! Gradient accumulation: adds in place, and one pass that divides, clips, and measures.

use crate::{Element, Real, cast::round, par, reduce::lanes};
use rayon::prelude::*;

/// Elements of one cut of [`finish`]; fixed, for the order of summation is part of a result.
const CUT_ELEMS: usize = 1 << 13;
/// Below this many elements a loop stays on the caller's thread.
const SERIAL_ELEMS: usize = 1 << 14;
/// A sum of squares below this may have lost terms that underflowed, so it is made again, scaled.
const LEAST_SQUARES: f64 = f64::MIN_POSITIVE * (1u64 << 60) as f64 * (1u64 << 60) as f64;

/// A sum of squares, `scale² · sum`, that neither overflows nor underflows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Squares {
    scale: f64,
    sum: f64,
}

impl Squares {
    /// No terms.
    pub const ZERO: Self = Self { scale: 1.0, sum: 0.0 };

    /// `scale² · sum`; a `sum` that is not finite says that a term was not.
    pub fn new(scale: f64, sum: f64) -> Self {
        Self { scale, sum }
    }

    /// Both sums in one.
    pub fn plus(self, other: Self) -> Self {
        if self.sum == 0.0 || other.sum == 0.0 {
            return if self.sum == 0.0 { other } else { self };
        }
        let scale = self.scale.max(other.scale);
        let at_scale = |s: Self| s.sum * (s.scale / scale).powi(2);
        Self { scale, sum: at_scale(self) + at_scale(other) }
    }

    /// The root: infinite or NaN if a term was.
    pub fn norm(self) -> f64 {
        self.scale * self.sum.sqrt()
    }

    /// `target / norm`, also where the norm itself would overflow.
    pub fn ratio(self, target: f64) -> f64 {
        target / self.scale / self.sum.sqrt()
    }

    /// Whether every term was finite.
    pub fn is_finite(self) -> bool {
        self.sum.is_finite()
    }

    /// Of `x`: plainly where that is safe, else relative to the largest. Squares of `f32` and
    /// narrower never leave the range of `f64`.
    pub fn of<T: Element>(x: &[T]) -> Self {
        let sum = lanes(
            x,
            #[inline(always)]
            |v| v.widen().f64().powi(2),
        );
        if sum.is_nan() || (LEAST_SQUARES..f64::INFINITY).contains(&sum) {
            return Self { scale: 1.0, sum };
        }
        let scale = x.iter().fold(0.0, |max, v| v.widen().f64().abs().max(max));
        if scale == 0.0 || scale.is_infinite() {
            return Self { scale: 1.0, sum: scale };
        }
        Self {
            scale,
            sum: lanes(
                x,
                #[inline(always)]
                |v| (v.widen().f64() / scale).powi(2),
            ),
        }
    }
}

/// What [`finish`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finished {
    /// Of the quotients, before clipping.
    pub squares: Squares,
    /// Quotients beyond the limit.
    pub n_clipped: u64,
}

/// `acc[i] += src[i]`, added in `A`'s accumulator type and rounded once.
///
/// An `f64` source of a narrower accumulator is rounded to `f32` first.
///
/// *Scratch:* none.
/// # Panics
/// If the lengths differ.
pub fn add<A: Element, S: Element>(acc: &mut [A], src: &[S]) {
    assert_eq!(acc.len(), src.len(), "add: acc and src differ in length");
    par::elems(
        acc,
        #[inline(always)]
        |start, cut| {
            for (a, s) in cut.iter_mut().zip(&src[start..]) {
                *a = A::narrow(a.widen() + A::Acc::of(s.widen().f64()));
            }
        },
    );
}

/// `acc[i] = clamp(acc[i] / divisor, -limit, limit)`, and the sum of squares before the clamp.
///
/// Divides in `f64` and rounds once; no limit is `f64::INFINITY`. NaN stays NaN. Each element is
/// loaded from memory once. Sums run in fixed cuts: the same bits on any number of threads.
///
/// *Scratch:* 24 bytes for every 8192 elements.
pub fn finish<A: Element>(acc: &mut [A], divisor: f64, limit: f64) -> Finished {
    let plus = |a: Finished, b: Finished| Finished {
        squares: a.squares.plus(b.squares),
        n_clipped: a.n_clipped + b.n_clipped,
    };
    let none = Finished { squares: Squares::ZERO, n_clipped: 0 };
    if acc.len() < SERIAL_ELEMS {
        return acc
            .chunks_mut(CUT_ELEMS)
            .map(|cut| finish_cut(cut, divisor, limit))
            .fold(none, plus);
    }
    let cuts: Vec<Finished> =
        acc.par_chunks_mut(CUT_ELEMS).map(|cut| finish_cut(cut, divisor, limit)).collect();
    cuts.into_iter().fold(none, plus)
}

/// One cut, which stays in the L1 cache between its loops.
fn finish_cut<A: Element>(cut: &mut [A], divisor: f64, limit: f64) -> Finished {
    for a in &mut *cut {
        *a = round(a.widen().f64() / divisor);
    }
    let squares = Squares::of(cut);
    let mut n_clipped = 0;
    if limit < f64::INFINITY {
        for a in cut {
            let x = a.widen().f64();
            if x.abs() > limit {
                *a = round(limit.copysign(x));
                n_clipped += 1;
            }
        }
    }
    Finished { squares, n_clipped }
}

/// `acc[i] *= factor`, multiplied in `f64` and rounded once.
///
/// *Scratch:* none.
pub fn scale<A: Element>(acc: &mut [A], factor: f64) {
    par::elems(
        acc,
        #[inline(always)]
        |_, cut| {
            for a in cut {
                *a = round(a.widen().f64() * factor);
            }
        },
    );
}

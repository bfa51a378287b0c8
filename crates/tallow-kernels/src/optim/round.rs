//! Rounding to 16 bits by chance, from counters.

use crate::{Element, dropout::philox4x32};
use half::{bf16, f16};

/// How a 16-bit weight or moment is rounded. `f32` and `f64` need none of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To nearest, ties to even. An update below half a step is lost.
    Nearest,
    /// Up with the probability that makes the mean exact; no bytes of its own.
    Stochastic,
    /// To nearest, and what rounding lost is kept beside it in a bf16 (Kahan 1965).
    Kahan,
}

/// The random numbers of one array in one update: number `i` is a function of `(seed, stream, i)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draws {
    /// The run's seed.
    pub seed: u64,
    /// Which array of which update.
    pub stream: u64,
}

impl Draws {
    /// Calls `f(i, draw)` for `i` in `0..n` with draw number `first + i`: 16 random bits, eight to
    /// a call of Philox.
    #[inline(always)]
    pub(crate) fn each(self, first: u64, n: usize, mut f: impl FnMut(usize, u16)) {
        let mut i = 0;
        while i < n {
            let at = first + i as u64;
            let words = self.words(at / 8);
            for lane in (at % 8) as usize..8.min((at % 8) as usize + n - i) {
                f(i, (words[lane / 2] >> (16 * (lane % 2))) as u16);
                i += 1;
            }
        }
    }

    fn words(self, n: u64) -> [u32; 4] {
        let counter = [n as u32, (n >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32];
        philox4x32(counter, [self.seed as u32, (self.seed >> 32) as u32])
    }
}

/// An element that can be a parameter: it can be rounded by chance.
pub trait Weight: Element {
    /// Whether it has fewer bits than its accumulator, so that rounding matters.
    const ROUNDS: bool;

    /// `x` rounded to nearest, ties to even; NaN stays NaN.
    #[inline(always)]
    fn nearest(x: Self::Acc) -> Self {
        Self::narrow(x)
    }

    /// `x` rounded to one of its two neighbours: away from zero if `draw / 2^16` is below the part
    /// of the way there. Infinities, NaN and what lies beyond the largest number round to nearest.
    fn stochastic(x: Self::Acc, draw: u16) -> Self;
}

macro_rules! exact {
    ($t:ty) => {
        impl Weight for $t {
            const ROUNDS: bool = false;
            fn stochastic(x: $t, _: u16) -> $t {
                x
            }
        }
    };
}
exact!(f32);
exact!(f64);

impl Weight for bf16 {
    const ROUNDS: bool = true;

    /// Without a branch on the fraction, which no predictor guesses.
    #[inline(always)]
    fn nearest(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
    }

    #[inline(always)]
    fn stochastic(x: f32, draw: u16) -> bf16 {
        // A bf16 is the upper half of an f32: the sum carries into it with the right probability.
        let up = bf16::from_bits((x.to_bits().wrapping_add(u32::from(draw)) >> 16) as u16);
        if x.is_finite() && up.is_finite() { up } else { bf16::from_f32(x) }
    }
}

impl Weight for f16 {
    const ROUNDS: bool = true;

    #[inline(always)]
    fn stochastic(x: f32, draw: u16) -> f16 {
        let nearest = f16::from_f32(x);
        if !nearest.is_finite() || nearest.to_f32() == x {
            return nearest;
        }
        // Neighbours of one sign have neighbouring bits, also across subnormals.
        let beyond = nearest.to_f32().abs() > x.abs();
        let inner = f16::from_bits(nearest.to_bits() - u16::from(beyond));
        let outer = f16::from_bits(inner.to_bits() + 1);
        if outer.is_infinite() {
            return nearest;
        }
        let part = (x - inner.to_f32()) / (outer.to_f32() - inner.to_f32());
        if f32::from(draw) < part * 65536.0 { outer } else { inner }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_branchless_rounding_is_half_s() {
        let steps = (0..=u32::MAX >> 7).map(|i| f32::from_bits(i << 7 | i & 0x7f));
        for x in steps.chain([f32::NAN, f32::MAX, f32::INFINITY, -0.0]) {
            let (got, want) = (bf16::nearest(x), bf16::from_f32(x));
            assert!(got.to_bits() == want.to_bits(), "{x:e}: {got} {want}");
        }
    }
}

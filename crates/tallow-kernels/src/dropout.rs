//! Dropout and random numbers from counters instead of a stream: Philox4x32-10 (Salmon et al.
//! 2011, "Parallel random numbers: as easy as 1, 2, 3").
//!
//! Number `i` is a function of `(seed, stream, i)`. A mask is therefore computed again in backward,
//! or by a recomputed segment, and never stored, and it does not depend on the number of threads.

use crate::{Element, Real, par};

/// Names one endless sequence of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropKey {
    /// The run's seed: the key of Philox.
    pub seed: u64,
    /// Which sequence of that run (say step and layer): the upper half of its counter.
    pub stream: u64,
}

/// What [`dropout`] refuses.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum DropoutError {
    /// The probability is outside `[0, 1)` or NaN.
    #[error("dropout: the probability is {p}, it must be at least 0 and below 1")]
    Probability {
        /// The probability given.
        p: f64,
    },
}

/// Keeps element `i` where its random word `philox(i / 4)[i % 4]` is at least `p * 2^32`, scaled by
/// `1 / (1 - p)`; the others become 0 (NaN among them: a dropped value has no influence).
///
/// Its backward is the same call on `dout`, with the same `p` and `key`.
///
/// *Kept:* nothing. *Scratch:* none.
/// # Errors
/// If `p` is not in `[0, 1)`.
/// # Panics
/// If the lengths differ.
pub fn dropout<T: Element>(
    out: &mut [T],
    x: &[T],
    p: f64,
    key: DropKey,
) -> Result<(), DropoutError> {
    assert_eq!(out.len(), x.len(), "dropout: out and x differ in length");
    if !(0.0..1.0).contains(&p) {
        return Err(DropoutError::Probability { p });
    }
    let threshold = (p * 4_294_967_296.0).ceil() as u64; // at most 2^32
    let scale = T::Acc::of(1.0 / (1.0 - p));
    par::elems(
        out,
        #[inline(always)]
        |start, cut| {
            assert_eq!(start % 4, 0, "dropout: a cut starts inside a block of random words");
            let blocks = cut.chunks_mut(4).zip(x[start..].chunks(4));
            for (n, (out, x)) in (start as u64 / 4..).zip(blocks) {
                for ((o, x), word) in out.iter_mut().zip(x).zip(key.words(n)) {
                    let keep = u64::from(word) >= threshold;
                    *o = if keep { T::narrow(x.widen() * scale) } else { T::default() };
                }
            }
        },
    );
    Ok(())
}

/// Number `i` of the sequence, uniform in `[0, 1)`: 53 random bits.
pub fn uniform(key: DropKey, i: u64) -> f64 {
    let words = key.words(i / 2);
    let pair = 2 * (i % 2) as usize;
    unit(words[pair], words[pair + 1])
}

/// Number `i` of the sequence, standard normal (Box and Muller 1958): numbers `2 n` and `2 n + 1`
/// are `r cos(a)` and `r sin(a)` with `r = sqrt(-2 ln(1 - u))`, `a = 2 pi u'`.
///
/// `libm` rather than the platform's functions: the same parameters on every machine.
pub fn normal(key: DropKey, i: u64) -> f64 {
    let words = key.words(i / 2);
    let r = libm::sqrt(-2.0 * libm::log(1.0 - unit(words[0], words[1])));
    let (sin, cos) = libm::sincos(std::f64::consts::TAU * unit(words[2], words[3]));
    r * if i.is_multiple_of(2) { cos } else { sin }
}

impl DropKey {
    /// Block `n` of four random words.
    #[inline]
    fn words(self, n: u64) -> [u32; 4] {
        let [c0, c1] = halves(n);
        let [c2, c3] = halves(self.stream);
        philox4x32([c0, c1, c2, c3], halves(self.seed))
    }
}

/// Philox4x32-10: ten rounds, with the paper's multipliers and Weyl constants.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    const M: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const W: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let (mut c, mut k) = (counter, key);
    for _ in 0..10 {
        let [lo0, hi0] = halves(M[0] * u64::from(c[0]));
        let [lo1, hi1] = halves(M[1] * u64::from(c[2]));
        c = [hi1 ^ c[1] ^ k[0], lo1, hi0 ^ c[3] ^ k[1], lo0];
        k = [k[0].wrapping_add(W[0]), k[1].wrapping_add(W[1])];
    }
    c
}

/// The lower and the upper 32 bits.
#[inline(always)]
fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// The upper 53 of 64 random bits as a number in `[0, 1)`.
fn unit(lo: u32, hi: u32) -> f64 {
    let bits = (u64::from(hi) << 32 | u64::from(lo)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

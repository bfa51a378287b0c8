//! Random numbers that are a function of a key: nothing is kept, so nothing has to be saved.

use crate::rng::{self, GOLDEN};

/// SplitMix64's first number from the state `z`.
const fn mix(z: u64) -> u64 {
    rng::mix(z.wrapping_add(GOLDEN))
}

/// The key of the random changes of sample `index` in `epoch` of a run with `seed`.
pub const fn sample_key(seed: u64, epoch: u64, index: u64) -> u64 {
    mix(mix(mix(seed) ^ epoch) ^ index)
}

/// The draws of one change of one sample, by their number.
pub(super) struct Draws {
    key: u64,
    n_drawn: u64,
}

impl Draws {
    /// Of the change at `place` in the list, for the sample with `key`.
    pub(super) fn new(key: u64, place: u64) -> Self {
        Self { key: mix(key ^ mix(place)), n_drawn: 0 }
    }

    /// Uniform in `0..1`, 53 bits.
    pub(super) fn unit(&mut self) -> f64 {
        self.n_drawn += 1;
        (mix(self.key ^ self.n_drawn) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `low..high`.
    pub(super) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Uniform among `0..n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        ((self.unit() * n as f64) as usize).min(n.saturating_sub(1))
    }
}

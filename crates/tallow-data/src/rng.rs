use std::ops::Range;

/// 2^64 over the golden ratio: SplitMix64's step.
pub(crate) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Random numbers that are a function of a key and a counter: draw `k` is `mix(key + k * golden)`,
/// which is SplitMix64 (Steele, Lea, Flood 2014). 8 bytes, and no state but the count of draws.
///
/// Good for order and augmentation; not a cipher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng(u64);

impl Rng {
    /// The numbers that belong to `parts`, in that order.
    pub fn keyed(parts: &[u64]) -> Self {
        Self(parts.iter().fold(GOLDEN, |key, &part| mix(mix(key.wrapping_add(GOLDEN)) ^ part)))
    }

    /// SplitMix64 of a plain seed.
    pub(crate) const fn from_state(state: u64) -> Self {
        Self(state)
    }

    /// 64 random bits; also the seed of a generator of your own.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// Uniform in `0..n`, off by less than `n / 2^64`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// Uniform in `0..1`, a multiple of 2^-24.
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1 << 24) as f32
    }

    /// Uniform in `range`.
    pub fn uniform(&mut self, range: Range<f32>) -> f32 {
        range.start + (range.end - range.start) * self.unit()
    }

    /// True with `probability`.
    pub fn coin(&mut self, probability: f32) -> bool {
        self.unit() < probability
    }
}

/// SplitMix64's finaliser.
pub(crate) const fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_key_counts() {
        let first = |parts: &[u64]| Rng::keyed(parts).next_u64();
        let keys: [&[u64]; 6] = [&[0, 0, 0], &[1, 0, 0], &[0, 1, 0], &[0, 0, 1], &[0, 0], &[]];
        let mut draws: Vec<u64> = keys.iter().map(|key| first(key)).collect();
        draws.sort_unstable();
        draws.dedup();
        assert_eq!(draws.len(), keys.len());
        assert_eq!(first(&[3, 4, 5]), first(&[3, 4, 5]));
    }

    #[test]
    fn draws_are_uniform() {
        let mut rng = Rng::keyed(&[1, 2, 3]);
        let mut counts = [0u32; 10];
        for _ in 0..10_000 {
            counts[rng.below(10) as usize] += 1;
        }
        let chi_square: f64 =
            counts.iter().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
        // Nine degrees of freedom, five standard deviations.
        assert!(chi_square < 9.0 + 5.0 * 18f64.sqrt(), "{counts:?}");
        assert!((0..1000).all(|_| (0.0..1.0).contains(&rng.unit())));
        assert!((0..1000).all(|_| (-2.0..3.0).contains(&rng.uniform(-2.0..3.0))));
        let heads = (0..10_000).filter(|_| rng.coin(0.25)).count();
        // Standard deviation 43.
        assert!(heads.abs_diff(2500) < 220, "{heads}");
    }
}

//! Inputs that are the same on every machine.

use half::bf16;

/// `n` values in (-1, 1) from SplitMix64. Each is exact in f32, so that an f64 reference and the
/// f32 code under test see the same input.
pub fn values(seed: u64, n: usize) -> Vec<f64> {
    values_f32(seed, n).into_iter().map(f64::from).collect()
}

/// [`values`] as f32: the same numbers.
pub fn values_f32(seed: u64, n: usize) -> Vec<f32> {
    const STEP: f32 = 1.0 / (1 << 23) as f32;
    let mut state = seed;
    // An odd multiple of the step: never an end of the interval, and never zero.
    let mut next = || ((split_mix(&mut state) >> 41) as f32 * 2.0 + 1.0) * STEP - 1.0;
    (0..n).map(|_| next()).collect()
}

/// [`values`] rounded to bf16, where the ends of [-1, 1] can occur.
pub fn values_bf16(seed: u64, n: usize) -> Vec<bf16> {
    values_f32(seed, n).into_iter().map(bf16::from_f32).collect()
}

/// The bit patterns, for "changes nothing" tests: tells `0.0` from `-0.0` and NaN from NaN.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The same numbers in f64, as [`crate::assert_close`] takes them.
pub fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

/// Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_mix_matches_the_published_sequence() {
        let mut state = 1_234_567;
        let got = [0; 3].map(|_| split_mix(&mut state));
        assert_eq!(
            got,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn values_fill_the_open_interval() {
        let x = values(7, 100_000);
        assert!(x.iter().all(|x| x.abs() < 1.0 && *x != 0.0));
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        // Five standard errors of the mean (1 / sqrt(3 n)) and of the variance (0.3 / sqrt(n)).
        assert!(mean.abs() < 5.0 * 0.0018, "{mean}");
        assert!((variance - 1.0 / 3.0).abs() < 5.0 * 0.001, "{variance}");
    }

    #[test]
    fn values_depend_on_the_seed_alone() {
        assert_eq!(values(1, 5), values(1, 9)[..5]);
        assert!(values(1, 9).iter().zip(values(2, 9)).all(|(a, b)| *a != b));
        assert_eq!(widen(&values_f32(1, 9)), values(1, 9));
        let rounded: Vec<f32> =
            values_f32(1, 9).iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
        assert_eq!(values_bf16(1, 9).iter().map(|x| x.to_f32()).collect::<Vec<_>>(), rounded);
    }

    #[test]
    fn bits_tell_signed_zeros_apart() {
        assert_eq!(bits(&[0.0, -0.0, 1.0]), [0, 0x8000_0000, 0x3f80_0000]);
    }
}

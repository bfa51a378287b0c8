//! Made-up numbers that any language can make again.

use tallow_kernels::Element;

/// `n` numbers between -0.5 and 0.5, 16 bits each, rounded to `T`; `seed` chooses which.
pub fn numbers<T: Element>(n: usize, seed: u32) -> Vec<T> {
    let number = |i: usize| (mixed(i, seed) >> 16) as f32 / 65536.0 - 0.5;
    (0..n).map(|i| of_f32(number(i))).collect()
}

/// `n` integers below `below`.
pub fn integers(n: usize, below: u32, seed: u32) -> Vec<u32> {
    (0..n).map(|i| (mixed(i, seed) >> 8) % below).collect()
}

/// `x`, rounded to `T`.
pub fn of_f32<T: Element>(x: f32) -> T {
    use tallow_kernels::Real;
    T::narrow(T::Acc::of(f64::from(x)))
}

/// The bits of the `i`th number.
fn mixed(i: usize, seed: u32) -> u32 {
    let h = (i as u32).wrapping_add(seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(2_654_435_761);
    let h = (h ^ h >> 15).wrapping_mul(2_246_822_519);
    h ^ h >> 13
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_script() {
        // What `numbers(4, 1)` and `integers(4, 1000, 3)` of the Python script print.
        assert_eq!(numbers::<f32>(4, 1), NUMBERS.map(|x| x as f32));
        assert_eq!(integers(4, 1000, 3), INTEGERS);
    }

    const NUMBERS: [f64; 4] =
        [-0.2121734619140625, 0.291717529296875, 0.2342681884765625, 0.3426513671875];
    const INTEGERS: [u32; 4] = [935, 891, 106, 814];
}

//! Gradients by differences, for ops that have no reference values.

/// The gradient of `f` at `x`, one entry at a time: `(f(x + h) - f(x - h)) / 2h`.
///
/// The error is about `h^2 |f'''| / 6 + eps |f| / h`, so for an `f` in f64 an `h` near 1e-5 is best.
pub fn central_difference(mut f: impl FnMut(&[f64]) -> f64, x: &[f64], h: f64) -> Vec<f64> {
    let mut moved = x.to_vec();
    let mut slope = |i: usize| {
        let (above, below) = (x[i] + h, x[i] - h);
        moved[i] = above;
        let f_above = f(&moved);
        moved[i] = below;
        let f_below = f(&moved);
        moved[i] = x[i];
        // Not 2h: the sums above have rounded.
        (f_above - f_below) / (above - below)
    };
    (0..x.len()).map(&mut slope).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Tol, assert_close, values};

    #[test]
    fn gradient_of_a_cubic() {
        let x = values(3, 9);
        let f = |x: &[f64]| x.iter().enumerate().map(|(i, x)| i as f64 * x.powi(3)).sum();
        let want: Vec<f64> = x.iter().enumerate().map(|(i, x)| 3.0 * i as f64 * x * x).collect();
        // h^2 f'''/6 = 8e-10 and eps f/h = 1e-10 against a largest entry near 10.
        assert_close("cubic", &central_difference(f, &x, 1e-5), &want, Tol::Rel(1e-9));
    }
}

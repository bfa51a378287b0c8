//! Adding in place, and the pass that ends a window.

mod support;
use half::{bf16, f16};
use support::{f64s, same_on_any_thread_count, to};
use tallow_kernels::{
    Element,
    accum::{Squares, add, finish, scale},
    cast::cast,
};
use tallow_testkit::{Tol, assert_close, values};

const SIZES: [usize; 8] = [0, 1, 7, 8, 9, 33, 1023, 70_000];
/// Sums in f64 of terms of one sign, in another order.
const SUM: Tol = Tol::Rel(1e-12);

/// Rounded once.
fn once<T: Element>(x: &[f64]) -> Vec<f64> {
    let mut rounded = vec![T::default(); x.len()];
    cast(&mut rounded, x);
    f64s(&rounded)
}

fn adds<A: Element, S: Element>() {
    for n in SIZES {
        let (mut acc, src) = (to::<A>(&values(1, n)), to::<S>(&values(2, n)));
        let want: Vec<f64> = f64s(&acc).iter().zip(f64s(&src)).map(|(a, s)| a + s).collect();
        add(&mut acc, &src);
        // One rounding: what the exact sum rounds to.
        assert_close("add", &f64s(&acc), &once::<A>(&want), Tol::Exact);
    }
}

#[test]
fn add_rounds_once() {
    adds::<f64, f64>();
    adds::<f64, bf16>();
    adds::<f32, f32>();
    adds::<f32, bf16>();
    adds::<f32, f16>();
    adds::<bf16, bf16>();
    adds::<bf16, f32>();
    adds::<f16, f16>();
}

fn finishes<A: Element>(limit: f64) {
    for n in SIZES {
        let sums = to::<A>(&values(3, n));
        let mut acc = sums.clone();
        let quotients = once::<A>(&f64s(&sums).iter().map(|x| x / 3.0).collect::<Vec<_>>());
        let found = finish(&mut acc, 3.0, limit);
        let want: Vec<f64> = quotients.iter().map(|x| x.clamp(-limit, limit)).collect();
        assert_close("finish", &f64s(&acc), &once::<A>(&want), Tol::Exact);
        let n_beyond = quotients.iter().filter(|x| x.abs() > limit).count() as u64;
        assert_eq!(found.n_clipped, n_beyond);
        let norm = quotients.iter().map(|x| x * x).sum::<f64>().sqrt();
        assert_close("norm", &[found.squares.norm()], &[norm], SUM);
    }
}

#[test]
fn finish_divides_once_clips_and_measures() {
    for limit in [f64::INFINITY, 0.25] {
        finishes::<f32>(limit);
        finishes::<f64>(limit);
        finishes::<bf16>(limit);
        finishes::<f16>(limit);
    }
}

#[test]
fn scale_rounds_once() {
    for n in SIZES {
        let mut acc = to::<f32>(&values(4, n));
        let want: Vec<f64> = f64s(&acc).iter().map(|x| x * 0.3).collect();
        scale(&mut acc, 0.3);
        assert_close("scale", &f64s(&acc), &once::<f32>(&want), Tol::Exact);
    }
}

#[test]
fn norms_neither_overflow_nor_underflow() {
    for size in [1e-320, 1e-300, 1e-160, 1.0, 1e160, 1e300] {
        let mut acc = vec![3.0 * size, -4.0 * size];
        let found = finish(&mut acc, 1.0, f64::INFINITY).squares;
        assert!(found.is_finite());
        // 1e-320 is subnormal: its three decimal digits are the limit there.
        let tol = if size < 1e-310 { Tol::Rel(1e-3) } else { SUM };
        assert_close("norm", &[found.norm()], &[5.0 * size], tol);
        assert_close("ratio", &[found.ratio(size)], &[0.2], tol);
    }
    let huge = Squares::of(&[f64::MAX; 4]);
    assert!(huge.is_finite());
    assert_close("ratio", &[huge.ratio(f64::MAX)], &[0.5], SUM);
    let norm = Squares::of(&[f32::MAX; 3]).norm();
    assert_close("f32", &[norm], &[f64::from(f32::MAX) * 3f64.sqrt()], SUM);
}

#[test]
fn squares_of_unlike_scales_add_up() {
    let parts = [1e-200, 1e200, 1.0, 0.0, 3e200].map(|x| Squares::of(&[x]));
    let norm = parts.into_iter().fold(Squares::ZERO, Squares::plus).norm();
    assert_close("norm", &[norm], &[10f64.sqrt() * 1e200], SUM);
    let small = [3e-200, 4e-200].map(|x| Squares::of(&[x]));
    let norm = small.into_iter().fold(Squares::ZERO, Squares::plus).norm();
    assert_close("norm", &[norm], &[5e-200], SUM);
}

#[test]
fn one_bad_value_anywhere_is_found() {
    for n in [1, 9, 1023, 70_000] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, n / 2, n - 1] {
                let mut acc = to::<f32>(&values(5, n));
                acc[place] = bad;
                let found = finish(&mut acc, 2.0, 0.5).squares;
                assert!(!found.is_finite(), "{bad} at {place} of {n}");
                let mut wide: Vec<f64> = values(5, n);
                wide[place] = f64::from(bad);
                assert!(!finish(&mut wide, 2.0, 0.5).squares.is_finite());
            }
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let (start, src) = (to::<f32>(&values(6, 70_000)), to::<bf16>(&values(7, 70_000)));
    same_on_any_thread_count(|| {
        let mut acc = start.clone();
        add(&mut acc, &src);
        let found = finish(&mut acc, 3.0, 0.2);
        scale(&mut acc, 0.7);
        (tallow_testkit::bits(&acc), found.squares.norm().to_bits(), found.n_clipped)
    });
}

#[test]
#[should_panic(expected = "differ in length")]
fn lengths_must_agree() {
    add(&mut [0f32; 2], &[0f32; 3]);
}

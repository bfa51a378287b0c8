//! Products against the scalar specification and plain `f64` sums.

mod support;
use half::{bf16, f16};
use support::{f64s, same_on_any_thread_count, to};
use tallow_kernels::{
    Element,
    gemm::{
        Activation, Epilogue, Mat, Store, batched_gemm, gemm, gemm_fused, gemm_fused_scalar,
        gemm_scalar, gemm_serial,
    },
};
use tallow_testkit::{Tol, assert_close, values};

const SIZES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (1, 33, 7),
    (9, 1, 8),
    (7, 8, 9),
    (31, 33, 65),
    (257, 5, 64),
    (3, 513, 17),
    (260, 520, 3),
    (40, 40, 1030),
];

/// All four transposes of one size, both stores, against the scalar twin.
fn check<T: Element>(m: usize, n: usize, k: usize, tol: Tol) {
    let (a, b, c0) =
        (to::<T>(&values(1, m * k)), to::<T>(&values(2, k * n)), to::<T>(&values(3, m * n)));
    for (a, b) in [
        (Mat::new(&a, m, k), Mat::new(&b, k, n)),
        (Mat::new(&a, k, m).t(), Mat::new(&b, k, n)),
        (Mat::new(&a, m, k), Mat::new(&b, n, k).t()),
        (Mat::new(&a, k, m).t(), Mat::new(&b, n, k).t()),
    ] {
        for store in [Store::Overwrite, Store::Add] {
            let (mut got, mut want) = (c0.clone(), c0.clone());
            gemm(&mut got, a, b, store);
            gemm_scalar(&mut want, a, b, store);
            assert_close(&format!("{m} {n} {k} {store:?}"), &f64s(&got), &f64s(&want), tol);
        }
    }
}

/// Every part of an epilogue alone and all together, on sums that come whole and in parts.
fn check_fused<T: Element>(eps: f64) {
    use Activation::{GeluErf, GeluTanh, Identity, Relu, Silu};
    for (m, n, k) in [(1, 1, 1), (7, 33, 9), (40, 40, 1030), (3, 513, 17), (9, 70, 0)] {
        let (a, b) = (to::<T>(&values(1, m * k)), to::<T>(&values(2, k * n)));
        let (bias, residual) = (to::<T>(&values(3, n)), to::<T>(&values(4, m * n)));
        let (a, b) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
        for activation in [Identity, Relu, GeluTanh, GeluErf, Silu] {
            for (bias, residual) in [
                (None, None),
                (Some(&bias[..]), None),
                (None, Some(&residual[..])),
                (Some(&bias[..]), Some(&residual[..])),
            ] {
                let epilogue = Epilogue { bias, residual, activation };
                let (mut got, mut want) = (vec![T::default(); m * n], vec![T::default(); m * n]);
                gemm_fused(&mut got, a, b, epilogue);
                gemm_fused_scalar(&mut want, a, b, epilogue);
                let what =
                    format!("{m} {n} {k} {activation:?} {} {}", bias.is_some(), residual.is_some());
                assert_close(&what, &f64s(&got), &f64s(&want), Tol::Rel(eps));
            }
        }
    }
}

#[test]
fn sums_are_finished_before_they_are_rounded() {
    check_fused::<f32>(1030.0 * f64::from(f32::EPSILON));
    check_fused::<f64>(1030.0 * f64::EPSILON);
    check_fused::<bf16>(2f64.powi(-7)); // one rounding, of sums in another order
    check_fused::<f16>(2f64.powi(-10));
}

#[test]
fn gemm_matches_scalar() {
    for (m, n, k) in SIZES {
        // Reordered f32 sums of k terms differ by at most k * eps of the largest entry's size.
        check::<f32>(m, n, k, Tol::Rel(k as f64 * f64::from(f32::EPSILON)));
        check::<f64>(m, n, k, Tol::Rel(k as f64 * f64::EPSILON));
        // Both round an f32 sum once: one step of the narrow type apart at most.
        check::<bf16>(m, n, k, Tol::Rel(2f64.powi(-8)));
        check::<f16>(m, n, k, Tol::Rel(2f64.powi(-11)));
    }
}

#[test]
fn spare_7_bf16_product_is_the_f32_product_rounded_once() {
    // Small integers: the f32 sum is exact, so the one rounding is all that may happen.
    let (m, n, k) = (33, 17, 700);
    let small = |seed, n| values(seed, n).iter().map(|v| (v * 8.0).round()).collect::<Vec<_>>();
    let (a, b) = (small(1, m * k), small(2, k * n));
    let (ab, bb) = (to::<bf16>(&a), to::<bf16>(&b));
    let mut got = vec![bf16::ZERO; m * n];
    gemm(&mut got, Mat::new(&ab, m, k), Mat::new(&bb, k, n), Store::Overwrite);
    let mut exact = vec![0f64; m * n];
    gemm_scalar(&mut exact, Mat::new(&a, m, k), Mat::new(&b, k, n), Store::Overwrite);
    let want: Vec<bf16> = exact.iter().map(|&v| bf16::from_f64(v)).collect();
    assert_eq!(got, want);
}

#[test]
fn overwrite_forgets_nan_and_empty_sums_are_zero() {
    let mut c = vec![f32::NAN; 6];
    gemm(&mut c, Mat::new(&[1.0; 2], 2, 1), Mat::new(&[2.0; 3], 1, 3), Store::Overwrite);
    assert_eq!(c, [2.0; 6]);
    let mut c = vec![f32::NAN; 6];
    gemm(&mut c, Mat::new(&[], 2, 0), Mat::new(&[], 0, 3), Store::Overwrite);
    assert_eq!(c, [0.0; 6]);
    let mut c = vec![bf16::NAN; 6];
    gemm(&mut c, Mat::new(&[], 2, 0), Mat::new(&[], 0, 3), Store::Overwrite);
    assert_eq!(c, [bf16::ZERO; 6]);
    gemm::<f32>(&mut [], Mat::new(&[], 0, 4), Mat::new(&[0.0; 8], 4, 2), Store::Overwrite);
}

#[test]
fn nan_and_inf_reach_their_row_only() {
    let mut a = vec![1f32; 9 * 9];
    a[9] = f32::NAN;
    a[18] = f32::INFINITY;
    let mut c = vec![0f32; 81];
    gemm(&mut c, Mat::new(&a, 9, 9), Mat::new(&[1.0; 81], 9, 9), Store::Overwrite);
    assert!(c[9..18].iter().all(|v| v.is_nan()));
    assert!(c[18..27].iter().all(|v| *v == f32::INFINITY));
    assert!(c[..9].iter().chain(&c[27..]).all(|v| *v == 9.0));
}

#[test]
fn a_batch_is_its_products() {
    let (n_batch, m, n, k) = (5, 6, 7, 8);
    let (a, b) = (values(4, n_batch * m * k), values(5, k * n));
    let mut got = vec![0f64; n_batch * m * n];
    let left = |i: usize| Mat::new(&a[i * m * k..][..m * k], m, k);
    batched_gemm(&mut got, n_batch, left, |_| Mat::new(&b, k, n), Store::Overwrite);
    let mut want = vec![0f64; n_batch * m * n];
    for (i, want) in want.chunks_exact_mut(m * n).enumerate() {
        gemm_scalar(want, left(i), Mat::new(&b, k, n), Store::Overwrite);
    }
    assert_close("batch", &got, &want, Tol::Rel(1e-14));
}

#[test]
fn threads_change_nothing() {
    let (m, n, k) = (600, 1100, 130);
    let (a, b) = (to::<f32>(&values(1, m * k)), to::<f32>(&values(2, k * n)));
    same_on_any_thread_count(|| {
        let mut c = vec![0f32; m * n];
        gemm(&mut c, Mat::new(&a, m, k), Mat::new(&b, k, n), Store::Overwrite);
        c
    });
}

#[test]
fn strides_that_wrap_are_refused() {
    let refused = |f: fn()| std::panic::catch_unwind(f).expect_err("must panic");
    refused(|| {
        let a = Mat { data: &[1f32; 4], n_rows: 3, n_cols: 1, row_stride: 1 << 63, col_stride: 1 };
        gemm(&mut [0f32; 3], a, Mat::new(&[1.0], 1, 1), Store::Overwrite);
    });
    refused(|| {
        let (a, b) = (Mat::new(&[1f32; 3], 3, 1), Mat::new(&[1f32], 1, 1));
        gemm_serial(&mut [0f32], 1 << 63, a, b, Store::Overwrite);
    });
    refused(|| {
        let (a, b) = (Mat::new(&[], 1 << 40, 0), Mat::new(&[], 0, 1 << 40));
        gemm::<f32>(&mut [], a, b, Store::Overwrite);
    });
}

//! What the kernel tests share.
#![allow(dead_code)] // each test binary uses its own part

use tallow_kernels::{Element, Real};

/// Rounds to the stored type.
pub(crate) fn to<T: Element>(x: &[f64]) -> Vec<T> {
    x.iter().map(|&v| T::narrow(T::Acc::of(v))).collect()
}

/// Exact.
pub(crate) fn f64s<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|v| v.widen().f64()).collect()
}

/// `f` on pools of 1, 2 and 5 threads must give the same bits.
pub(crate) fn same_on_any_thread_count<R: PartialEq + std::fmt::Debug + Send>(
    f: impl Fn() -> R + Sync,
) {
    let on = |n: usize| {
        rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("a pool").install(&f)
    };
    let one = on(1);
    for n in [2, 5] {
        assert!(on(n) == one, "results differ between 1 and {n} threads");
    }
}

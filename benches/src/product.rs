//! The `gemm` crate's products.

use crate::{
    cases::{Case, Op},
    inputs::numbers,
    work::{Precision, Work, on_slices},
};
use gemm::Parallelism;

/// Products of f32, which is what the crate has in common with ours.
pub fn work(case: &Case) -> Option<Box<dyn Work>> {
    let Op::Gemm { batch, m, n, k, a_t, b_t } = case.op else { return None };
    if case.precision != Precision::F32 {
        return None;
    }
    let (a, b) = (numbers::<f32>(batch * m * k, 1), numbers::<f32>(batch * k * n, 2));
    // Strides of columns and rows.
    let strides = |rows: usize, cols: usize, t| match t {
        false => (1, cols as isize),
        true => (rows as isize, 1),
    };
    let ((a_cs, a_rs), (b_cs, b_rs)) = (strides(m, k, a_t), strides(k, n, b_t));
    Some(on_slices(&[batch * m * n], move |outs| {
        let products = outs[0].chunks_mut(m * n).zip(a.chunks(m * k)).zip(b.chunks(k * n));
        for ((c, a), b) in products {
            let parallel = Parallelism::Rayon(0);
            // SAFETY: the strides stay inside the slices, whose lengths are the products of the sizes.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    k,
                    c.as_mut_ptr(),
                    1,
                    n as isize,
                    false,
                    a.as_ptr(),
                    a_cs,
                    a_rs,
                    b.as_ptr(),
                    b_cs,
                    b_rs,
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    parallel,
                );
            }
        }
    }))
}

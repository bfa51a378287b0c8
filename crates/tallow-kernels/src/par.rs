//! Parallel loops whose results do not depend on the number of threads.
//!
//! Work is cut by shape alone, never by thread count, and partial sums are combined in the order
//! of the cuts.

use crate::isa::vectorized;
use rayon::prelude::*;

/// Below this many elements a loop stays on the caller's thread: waking a worker costs more.
const SERIAL_ELEMS: usize = 1 << 14;
/// Elements per cut of an elementwise loop: 32 KiB of `f32`, so in and out fit in the L1 cache.
const CUT_ELEMS: usize = 1 << 13;

/// Calls `f(row, row_slice)` for each `row_elems`-long row of `out`, in parallel where that pays.
pub(crate) fn rows<T: Send, F>(out: &mut [T], row_elems: usize, f: F)
where
    F: Fn(usize, &mut [T]) + Send + Sync,
{
    if row_elems == 0 || out.is_empty() {
        return;
    }
    if out.len() < SERIAL_ELEMS {
        vectorized(
            #[inline(always)]
            || out.chunks_mut(row_elems).enumerate().for_each(|(i, row)| f(i, row)),
        );
    } else {
        let rows_per_cut = CUT_ELEMS.div_ceil(row_elems);
        out.par_chunks_mut(row_elems * rows_per_cut).enumerate().for_each(|(c, cut)| {
            vectorized(
                #[inline(always)]
                || {
                    for (i, row) in cut.chunks_mut(row_elems).enumerate() {
                        f(c * rows_per_cut + i, row);
                    }
                },
            );
        });
    }
}

/// Calls `f(start, cut)` for consecutive cuts of `out`, in parallel where that pays.
pub(crate) fn elems<T: Send, F>(out: &mut [T], f: F)
where
    F: Fn(usize, &mut [T]) + Send + Sync,
{
    if out.len() < SERIAL_ELEMS {
        vectorized(
            #[inline(always)]
            || f(0, out),
        );
    } else {
        out.par_chunks_mut(CUT_ELEMS).enumerate().for_each(|(c, cut)| {
            vectorized(
                #[inline(always)]
                || f(c * CUT_ELEMS, cut),
            );
        });
    }
}

/// `f(0), f(1), ..., f(n - 1)`, computed in parallel, returned in order.
pub(crate) fn tasks<R: Send, F>(n: usize, f: F) -> Vec<R>
where
    F: Fn(usize) -> R + Send + Sync,
{
    (0..n).into_par_iter().map(f).collect()
}

/// A mutable slice that several threads write at places that never overlap.
#[derive(Clone, Copy)]
pub(crate) struct Disjoint<T> {
    ptr: *mut T,
    n_elems: usize,
}

// SAFETY: threads only reach the elements through `slice`, whose caller promises that no two
// ranges alive at one time overlap; `T: Send` lets another thread write them.
unsafe impl<T: Send> Send for Disjoint<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<T> {}

impl<T> Disjoint<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), n_elems: slice.len() }
    }

    /// A pointer to `start`, good for the whole slice.
    /// # Panics
    /// If `start + n_elems` lies beyond the slice.
    pub(crate) fn ptr(&self, start: usize, n_elems: usize) -> *mut T {
        assert!(
            start.checked_add(n_elems).is_some_and(|end| end <= self.n_elems),
            "Disjoint: {start} + {n_elems} is beyond {}",
            self.n_elems
        );
        self.ptr.wrapping_add(start)
    }

    /// # Safety
    /// The slice given to `new` is still borrowed, and no other range alive overlaps this one.
    /// # Panics
    /// If the range ends beyond the slice.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, start: usize, n_elems: usize) -> &mut [T] {
        let first = self.ptr(start, n_elems);
        // SAFETY: in bounds by `ptr`'s check; unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(first, n_elems) }
    }
}

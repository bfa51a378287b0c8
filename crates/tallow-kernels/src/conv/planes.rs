//! Where the sums of a convolution go: rows are planes, columns the pixels of a grid over the batch.

use super::window::Window;
use crate::{
    Element, Real,
    cast::{narrow_apart, narrow_rows},
    par::Disjoint,
    product::Sink,
};
use std::ops::Range;

/// Planes `[images, n_planes, height, width]` of which a grid is written.
pub(super) struct Planes<'a, T> {
    bias: Option<&'a [T]>,
    dst: Disjoint<T>,
    /// Elements before the first plane, between two images, and in a plane.
    first: usize,
    image_elems: usize,
    plane_elems: usize,
    width: usize,
    /// The grid: its extents, first pixel and step.
    grid: [usize; 2],
    start: [usize; 2],
    step: [usize; 2],
}

impl<'a, T: Element> Planes<'a, T> {
    /// The grid of `window` from pixel `start` on, `step` apart, in planes of `extents`.
    pub(super) fn new(
        dst: Disjoint<T>,
        (first, image_elems): (usize, usize),
        extents: [usize; 2],
        window: &Window,
        (start, step): ([usize; 2], [usize; 2]),
    ) -> Self {
        let (plane_elems, width) = (extents[0] * extents[1], extents[1]);
        let bias = None;
        Self { bias, dst, first, image_elems, plane_elems, width, grid: window.grid, start, step }
    }

    fn n_grid(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// Whether the grid is the plane.
    fn is_whole(&self) -> bool {
        self.n_grid() == self.plane_elems
    }

    /// Adds `bias[i]` to each plane `i`: to finished sums, which narrow elements must not round before.
    pub(super) fn with_bias(self, bias: Option<&'a [T]>) -> Self {
        Self { bias, ..self }
    }

    /// Calls `f(element, n, offset)` for runs of the `n` columns from `j` on, in plane `i`.
    fn runs(&self, i: usize, j: usize, n: usize, mut f: impl FnMut(usize, usize, usize)) {
        let per_run = if self.is_whole() { self.n_grid() } else { self.grid[1] };
        let mut at = 0;
        while at < n {
            let (image, pixel) = ((j + at) / self.n_grid(), (j + at) % self.n_grid());
            let run = (per_run - pixel % per_run).min(n - at);
            let plane = self.first + image * self.image_elems + i * self.plane_elems;
            let (row, col) = (pixel / self.grid[1], pixel % self.grid[1]);
            let y = self.start[0] + row * self.step[0];
            f(plane + y * self.width + self.start[1] + col * self.step[1], run, at);
            at += run;
        }
    }
}

impl<T: Element> Sink<T::Acc> for Planes<'_, T> {
    fn place(
        &self,
        (i, j): (usize, usize),
        (n_rows, n_cols): (usize, usize),
    ) -> Option<(*mut T::Acc, usize)> {
        T::as_acc(&[])?;
        let (image, pixel) = (j / self.n_grid(), j % self.n_grid());
        if !self.is_whole() || pixel + n_cols > self.n_grid() {
            return None;
        }
        let first = self.first + image * self.image_elems + i * self.plane_elems + pixel;
        let first = self.dst.ptr(first, (n_rows - 1) * self.plane_elems + n_cols);
        // `T` is its own accumulator here, so the cast changes nothing.
        Some((first.cast(), self.plane_elems))
    }
    fn adds(&self) -> bool {
        false
    }
    fn takes_parts(&self) -> bool {
        T::as_acc(&[]).is_some()
    }
    /// Adds the bias to sums that were added up in place.
    fn finish(&self, rows: Range<usize>, cols: Range<usize>) {
        let Some(bias) = self.bias.filter(|_| self.takes_parts()) else { return };
        for i in rows {
            let b = bias[i].widen();
            self.runs(i, cols.start, cols.len(), |start, n, _| {
                // SAFETY: these pixels belong to one tile, which one call computes.
                let out = unsafe { self.dst.slice(start, n) };
                out.iter_mut().for_each(|o| *o = T::narrow(o.widen() + b));
            });
        }
    }
    fn put(
        &self,
        (i, j): (usize, usize),
        (n_rows, n_cols): (usize, usize),
        (sums, ld): (&[T::Acc], usize),
        part: usize,
    ) {
        let bias = self.bias.filter(|_| !self.takes_parts());
        let step = if self.is_whole() { 1 } else { self.step[1] };
        self.runs(i, j, n_cols, |start, n, at| {
            if step == 1 && bias.is_none() {
                let first = self.dst.ptr(start, (n_rows - 1) * self.plane_elems + n);
                let (sums, n) = ((&sums[at..], ld), (n_rows, n));
                // SAFETY: in bounds by `ptr`'s check; these pixels belong to one tile, which one call
                // computes.
                return unsafe { narrow_rows((first, self.plane_elems), sums, n, part > 0) };
            }
            for r in 0..n_rows {
                let sums = &sums[r * ld + at..][..n];
                let bias = bias.map_or(T::Acc::of(0.0), |b| b[i + r].widen());
                let first = self.dst.ptr(start + r * self.plane_elems, (n - 1) * step + 1);
                if self.bias.is_none() {
                    // SAFETY: as below.
                    unsafe { narrow_apart(first, step, sums, part > 0) };
                    continue;
                }
                for (l, &s) in sums.iter().enumerate() {
                    // SAFETY: in bounds by `ptr`'s check; these pixels belong to one tile, which one
                    // call computes, and no reference covers those between them.
                    unsafe {
                        let o = first.add(l * step);
                        *o = T::narrow(if part > 0 { (*o).widen() + s } else { s + bias });
                    }
                }
            }
        });
    }
}

/// Several grids of one window: rows come grid by grid.
pub(super) struct Grids<'a, T> {
    pub(super) grids: Vec<Planes<'a, T>>,
    /// Planes of each.
    pub(super) n_planes: usize,
}

impl<T: Element> Sink<T::Acc> for Grids<'_, T> {
    fn place(&self, _: (usize, usize), _: (usize, usize)) -> Option<(*mut T::Acc, usize)> {
        None
    }
    fn adds(&self) -> bool {
        false
    }
    fn takes_parts(&self) -> bool {
        T::as_acc(&[]).is_some()
    }
    fn put(
        &self,
        (i, j): (usize, usize),
        (n_rows, n_cols): (usize, usize),
        (sums, ld): (&[T::Acc], usize),
        part: usize,
    ) {
        for r in 0..n_rows {
            let (grid, plane) = ((i + r) / self.n_planes, (i + r) % self.n_planes);
            let sums = &sums[r * ld..];
            self.grids[grid].put((plane, j), (1, n_cols), (sums, ld), part);
        }
    }
}

//! Patches: what lies under a window, unfolded into the rows of a matrix, and folded back.

use super::{Conv2dConfig, Conv2dShape};
use crate::{
    Element, Real,
    gemm::{Mat, widen_into},
};
use std::ops::Range;

/// A run of output pixels `start..end`, counted over the whole batch.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Tile {
    pub(super) fn width(self) -> usize {
        self.end - self.start
    }

    /// Calls `f(image, first pixel, n pixels, offset in tile)` for each image the tile touches.
    pub(super) fn images(self, out_pixels: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
        let mut at = self.start;
        while at < self.end {
            let (image, pixel) = (at / out_pixels, at % out_pixels);
            let n = (out_pixels - pixel).min(self.end - at);
            f(image, pixel, n, at - self.start);
            at += n;
        }
    }
}

/// Tiles over the given images: several small images share one, a large image has several.
pub(super) fn tiles(shape: &Conv2dShape, depth: usize, images: Range<usize>) -> Vec<Tile> {
    let (pixels, width) = (shape.out_pixels(), shape.tile_pixels(depth));
    let unit = if pixels <= width { width / pixels * pixels } else { pixels };
    let (first, last) = (images.start * pixels, images.end * pixels);
    let mut tiles = Vec::new();
    for start in (first..last).step_by(unit) {
        let end = (start + unit).min(last);
        tiles.extend(
            (start..end)
                .step_by(width.max(1))
                .map(|s| Tile { start: s, end: (s + width).min(end) }),
        );
    }
    tiles
}

/// The patch matrix `[K, pixels]` of a tile, unfolded into `col` or, where they are the same, the
/// input itself.
pub(super) fn patches<'a, T: Element>(
    col: &'a mut Vec<T::Acc>,
    x: &'a [T],
    shape: &Conv2dShape,
    group: usize,
    tile: Tile,
) -> Mat<'a, T::Acc> {
    let (first, n, pixels) = (group * shape.group_in(), shape.group_in(), shape.out_pixels());
    let width = tile.width();
    if let Some(x) = T::as_acc(x)
        && shape.is_pointwise()
        && tile.start / pixels == (tile.end - 1) / pixels
    {
        let start = (tile.start / pixels * shape.channels + first) * pixels + tile.start % pixels;
        let (n_rows, n_cols) = (n, width);
        return Mat { data: &x[start..], n_rows, n_cols, row_stride: pixels, col_stride: 1 };
    }
    unfold(col, x, shape, first, n, tile);
    Mat::new(col, shape.depth(), width)
}

/// `col[K', pixels] =` patches of the channels `first..first + n` for the pixels of `tile`.
pub(super) fn unfold<T: Element>(
    col: &mut Vec<T::Acc>,
    x: &[T],
    shape: &Conv2dShape,
    first: usize,
    n: usize,
    tile: Tile,
) {
    let width = tile.width();
    col.resize(n * shape.taps() * width, T::Acc::of(0.0));
    for (row, col) in col.chunks_exact_mut(width).enumerate() {
        let (c, tap) = (first + row / shape.taps(), row % shape.taps());
        tile.images(shape.out_pixels(), |image, pixel, n_pixels, at| {
            let plane = (image * shape.channels + c) * shape.in_pixels();
            let plane = &x[plane..plane + shape.in_pixels()];
            let col = &mut col[at..at + n_pixels];
            match Shift::of(shape, tap) {
                Some(shift) => unfold_shifted(col, plane, &shift, pixel),
                None => unfold_rows(col, plane, shape, tap, pixel),
            }
        });
    }
}

fn unfold_shifted<T: Element>(col: &mut [T::Acc], plane: &[T], shift: &Shift, pixel: usize) {
    let (inside, from) = shift.inside(plane.len(), pixel, col.len());
    let zero = T::Acc::of(0.0);
    col[..inside.start].fill(zero);
    col[inside.end..].fill(zero);
    let n = inside.len();
    widen_into(&plane[from..from + n], &mut col[inside]);
    shift.wrapped(pixel, col.len(), |columns| col[columns].fill(zero));
}

fn unfold_rows<T: Element>(
    col: &mut [T::Acc],
    plane: &[T],
    shape: &Conv2dShape,
    tap: usize,
    pixel: usize,
) {
    visit_rows(shape, tap, pixel, col.len(), |offset, n, source| {
        let col = &mut col[offset..offset + n];
        match source {
            None => col.fill(T::Acc::of(0.0)),
            Some((from, 1)) => widen_into(&plane[from..from + n], col),
            Some((from, step)) => {
                for (c, x) in col.iter_mut().zip(plane[from..].iter().step_by(step)) {
                    *c = x.widen();
                }
            }
        }
    });
}

/// Adds one row of a patch gradient, for the output pixels from `pixel` on, to its plane. `col` is
/// scratch afterwards.
pub(super) fn fold_row<R: Real>(
    plane: &mut [R],
    col: &mut [R],
    shape: &Conv2dShape,
    tap: usize,
    pixel: usize,
) {
    if let Some(shift) = Shift::of(shape, tap) {
        shift.wrapped(pixel, col.len(), |columns| col[columns].fill(R::of(0.0)));
        let (inside, from) = shift.inside(plane.len(), pixel, col.len());
        let plane = &mut plane[from..from + inside.len()];
        plane.iter_mut().zip(&col[inside]).for_each(|(x, &c)| *x += c);
        return;
    }
    visit_rows(shape, tap, pixel, col.len(), |offset, n, source| {
        let Some((from, step)) = source else { return };
        let col = &col[offset..offset + n];
        if step == 1 {
            plane[from..from + n].iter_mut().zip(col).for_each(|(x, &c)| *x += c);
        } else {
            let plane = plane[from..].iter_mut().step_by(step);
            plane.zip(col).for_each(|(x, &c)| *x += c);
        }
    });
}

/// A tap of a convolution whose output has the extents of its input, at stride 1: the plane moved by
/// a fixed distance, but for the columns that wrap from one row into the next.
struct Shift {
    /// Input pixel minus output pixel.
    distance: isize,
    width: usize,
    /// Output columns whose tap lies in the padding.
    wrapped: Range<usize>,
}

impl Shift {
    fn of(shape: &Conv2dShape, tap: usize) -> Option<Self> {
        if shape.cfg.stride != [1, 1] || shape.output != shape.input {
            return None;
        }
        let width = shape.input[1];
        let at = [tap / shape.kernel[1], tap % shape.kernel[1]];
        let [down, right] = [0, 1]
            .map(|a| (at[a] * shape.cfg.dilation[a]) as isize - shape.cfg.padding[a] as isize);
        let n = right.unsigned_abs().min(width);
        let wrapped = if right < 0 { 0..n } else { width - n..width };
        Some(Self { distance: down * width as isize + right, width, wrapped })
    }

    /// Which of the `n` output pixels from `pixel` on fall into a plane of `n_in`, counted from
    /// `pixel`, and the input pixel of the first.
    fn inside(&self, n_in: usize, pixel: usize, n: usize) -> (Range<usize>, usize) {
        let first = pixel as isize + self.distance;
        let start = (-first).clamp(0, n as isize);
        let end = (n_in as isize - first).clamp(start, n as isize);
        (start as usize..end as usize, if start == end { 0 } else { (first + start) as usize })
    }

    /// Calls `f` with the wrapped columns among the `n` output pixels from `pixel` on.
    fn wrapped(&self, pixel: usize, n: usize, mut f: impl FnMut(Range<usize>)) {
        if self.wrapped.is_empty() {
            return;
        }
        let end = pixel + n;
        for row in (pixel / self.width * self.width..end).step_by(self.width) {
            let columns = (row + self.wrapped.start).max(pixel)..(row + self.wrapped.end).min(end);
            if columns.start < columns.end {
                f(columns.start - pixel..columns.end - pixel);
            }
        }
    }
}

/// Walks the output pixels `pixel..pixel + n` of one image for one kernel tap. For each run calls
/// `f(offset, n, source)`: `source` is the first input pixel and the step between two, or `None`
/// where the tap lies in the padding.
fn visit_rows(
    shape: &Conv2dShape,
    tap: usize,
    pixel: usize,
    n_pixels: usize,
    mut f: impl FnMut(usize, usize, Option<(usize, usize)>),
) {
    let ([h, w], q_extent) = (shape.input, shape.output[1]);
    let Conv2dConfig { stride, padding, dilation, .. } = shape.cfg;
    let (r, s) = (tap / shape.kernel[1] * dilation[0], tap % shape.kernel[1] * dilation[1]);
    // Output columns q for which 0 <= q * stride + s - padding < w.
    let q_from = padding[1].saturating_sub(s).div_ceil(stride[1]).min(q_extent);
    let q_to = (w + padding[1]).saturating_sub(s).div_ceil(stride[1]).min(q_extent).max(q_from);
    let mut at = 0;
    while at < n_pixels {
        let (p, q) = ((pixel + at) / q_extent, (pixel + at) % q_extent);
        let q_end = (q + n_pixels - at).min(q_extent);
        let y = p * stride[0] + r;
        if y < padding[0] || y >= h + padding[0] {
            f(at, q_end - q, None);
        } else {
            let (a, b) = (q_from.clamp(q, q_end), q_to.clamp(q, q_end));
            if a > q {
                f(at, a - q, None);
            }
            if b > a {
                let from = (y - padding[0]) * w + a * stride[1] + s - padding[1];
                f(at + a - q, b - a, Some((from, stride[1])));
            }
            if q_end > b {
                f(at + b - q, q_end - b, None);
            }
        }
        at += q_end - q;
    }
}

//! Convolutions of which each channel has a window of its own: as products their operands would have one
//! row, or a few. A row of sums stays in the L1 cache while all taps add to it.

use super::Conv2dShape;
use crate::{Element, Real, isa::vectorized, par, par::tasks};
use std::ops::Range;

/// Most output channels of an input channel that are computed one by one.
const MOST_OUT: usize = 4;

/// Whether `shape` is computed here.
pub(super) fn is_depthwise(shape: &Conv2dShape) -> bool {
    shape.channels > 1 && shape.cfg.groups == shape.channels && shape.group_out() <= MOST_OUT
}

/// What a tap of a window reads along one axis.
struct Tap {
    /// Output pixels for which it lies inside the input.
    inside: Range<usize>,
    /// Input pixel of the first of them.
    first: usize,
}

/// The taps of the window along `axis` (0 down, 1 across).
fn taps(shape: &Conv2dShape, axis: usize) -> Vec<Tap> {
    let (step, n_in) = (shape.cfg.stride[axis], shape.input[axis]);
    let tap = |t: usize| {
        let (at, padding) = (t * shape.cfg.dilation[axis], shape.cfg.padding[axis]);
        let start = padding.saturating_sub(at).div_ceil(step);
        let end = (n_in + padding).saturating_sub(at).div_ceil(step).min(shape.output[axis]);
        let first = if start < end { start * step + at - padding } else { 0 };
        Tap { inside: start.min(end)..end, first }
    };
    (0..shape.kernel[axis]).map(tap).collect()
}

impl Tap {
    /// The input pixel of output pixel `out`, if the tap reads one.
    fn of(&self, out: usize, step: usize) -> Option<usize> {
        self.inside.contains(&out).then(|| self.first + (out - self.inside.start) * step)
    }

    /// The output pixel that reads input pixel `at` with this tap.
    fn reached(&self, at: usize, step: usize) -> Option<usize> {
        let away = at.checked_sub(self.first).filter(|away| away.is_multiple_of(step))?;
        Some(self.inside.start + away / step).filter(|out| self.inside.contains(out))
    }
}

/// `out`, as [`conv2d`](super::conv2d): the bits of [`conv2d_scalar`](super::conv2d_scalar).
pub(super) fn forward<T: Element>(
    out: &mut [T],
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    shape: &Conv2dShape,
) {
    let ([down, across], n_cols) = ([taps(shape, 0), taps(shape, 1)], shape.output[1]);
    par::rows(
        out,
        shape.out_pixels(),
        #[inline(always)]
        |plane, out| {
            let (n, o) = (plane / shape.out_channels, plane % shape.out_channels);
            let x = of_plane(x, n * shape.channels + o / shape.group_out(), shape.in_pixels());
            let weight = of_plane(weight, o, shape.taps());
            let bias = bias.map_or(T::Acc::of(0.0), |bias| bias[o].widen());
            let mut sums = vec![T::Acc::of(0.0); n_cols];
            for (p, out) in out.chunks_exact_mut(n_cols).enumerate() {
                sums.fill(T::Acc::of(0.0));
                for (tap, weight) in down.iter().zip(weight.chunks_exact(across.len())) {
                    let Some(y) = tap.of(p, shape.cfg.stride[0]) else { continue };
                    let x = of_plane(x, y, shape.input[1]);
                    for (tap, w) in across.iter().zip(weight) {
                        let (sums, x) = (&mut sums[tap.inside.clone()], &x[tap.first..]);
                        add_from(sums, x, shape.cfg.stride[1], w.widen());
                    }
                }
                for (out, &sum) in out.iter_mut().zip(&sums) {
                    *out = T::narrow(sum + bias);
                }
            }
        },
    );
}

/// `dx`, as [`conv2d_backward_input`](super::conv2d_backward_input).
pub(super) fn input_gradient<T: Element>(
    dx: &mut [T],
    dout: &[T],
    weight: &[T],
    shape: &Conv2dShape,
) {
    let ([down, across], n_cols) = ([taps(shape, 0), taps(shape, 1)], shape.input[1]);
    par::rows(
        dx,
        shape.in_pixels(),
        #[inline(always)]
        |plane, dx| {
            let (n, c) = (plane / shape.channels, plane % shape.channels);
            let mut sums = vec![T::Acc::of(0.0); n_cols];
            for (y, dx) in dx.chunks_exact_mut(n_cols).enumerate() {
                sums.fill(T::Acc::of(0.0));
                for o in c * shape.group_out()..(c + 1) * shape.group_out() {
                    let dout = of_plane(dout, n * shape.out_channels + o, shape.out_pixels());
                    let weight = of_plane(weight, o, shape.taps());
                    for (tap, weight) in down.iter().zip(weight.chunks_exact(across.len())) {
                        let Some(p) = tap.reached(y, shape.cfg.stride[0]) else { continue };
                        let dout = of_plane(dout, p, shape.output[1]);
                        for (tap, w) in across.iter().zip(weight) {
                            let (sums, dout) = (&mut sums[tap.first..], &dout[tap.inside.clone()]);
                            add_to(sums, dout, shape.cfg.stride[1], w.widen());
                        }
                    }
                }
                for (dx, &sum) in dx.iter_mut().zip(&sums) {
                    *dx = T::narrow(sum);
                }
            }
        },
    );
}

/// `dweight`, as [`conv2d_backward_weight`](super::conv2d_backward_weight): products of the pixels of a column
/// are added up in the accumulator type, the columns in `f64`.
pub(super) fn weight_gradient<T: Element>(
    dweight: &mut [T],
    dout: &[T],
    x: &[T],
    shape: &Conv2dShape,
) {
    let ([down, across], n_cols) = ([taps(shape, 0), taps(shape, 1)], shape.output[1]);
    let of_channel = |o: usize| {
        let mut totals = vec![0.0f64; shape.taps()];
        let mut sums = vec![T::Acc::of(0.0); shape.taps() * n_cols];
        for n in 0..shape.batch {
            let x = of_plane(x, n * shape.channels + o / shape.group_out(), shape.in_pixels());
            let dout = of_plane(dout, n * shape.out_channels + o, shape.out_pixels());
            sums.fill(T::Acc::of(0.0));
            vectorized(
                #[inline(always)]
                || {
                    for (p, dout) in dout.chunks_exact(n_cols).enumerate() {
                        let of_row = sums.chunks_exact_mut(across.len() * n_cols);
                        for (tap, sums) in down.iter().zip(of_row) {
                            let Some(y) = tap.of(p, shape.cfg.stride[0]) else { continue };
                            let x = of_plane(x, y, shape.input[1]);
                            for (tap, sums) in across.iter().zip(sums.chunks_exact_mut(n_cols)) {
                                let sums = &mut sums[tap.inside.clone()];
                                let dout = &dout[tap.inside.clone()];
                                add_products(sums, dout, &x[tap.first..], shape.cfg.stride[1]);
                            }
                        }
                    }
                },
            );
            for (total, sums) in totals.iter_mut().zip(sums.chunks_exact(n_cols)) {
                *total += sums.iter().map(|sum| sum.f64()).sum::<f64>();
            }
        }
        totals
    };
    let all = tasks(shape.out_channels, of_channel);
    for (dw, total) in dweight.iter_mut().zip(all.into_iter().flatten()) {
        *dw = T::narrow(T::Acc::of(total));
    }
}

/// Bytes that `n_threads` hold: each a row of sums of the output or the input.
pub(super) fn row_bytes<T: Element>(shape: &Conv2dShape, n_threads: u64) -> u64 {
    n_threads * (shape.output[1].max(shape.input[1]) * size_of::<T::Acc>()) as u64
}

/// As [`row_bytes`], of the weight's gradient: a row for each tap; and a total in `f64`.
pub(super) fn weight_bytes<T: Element>(shape: &Conv2dShape, n_threads: u64) -> u64 {
    let row = shape.output[1] * size_of::<T::Acc>() + size_of::<f64>();
    // The totals of all channels are there at the end.
    let all = shape.out_channels * (shape.taps() * size_of::<f64>() + size_of::<Vec<f64>>());
    n_threads * (shape.taps() * row) as u64 + all as u64
}

fn of_plane<T>(x: &[T], plane: usize, n_elems: usize) -> &[T] {
    &x[plane * n_elems..][..n_elems]
}

/// `sums[q] += w x[q step]`.
#[inline(always)]
fn add_from<T: Element>(sums: &mut [T::Acc], x: &[T], step: usize, w: T::Acc) {
    if step == 1 {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += w * x.widen());
    } else {
        sums.iter_mut().zip(x.iter().step_by(step)).for_each(|(sum, x)| *sum += w * x.widen());
    }
}

/// `sums[q step] += w dout[q]`.
#[inline(always)]
fn add_to<T: Element>(sums: &mut [T::Acc], dout: &[T], step: usize, w: T::Acc) {
    if step == 1 {
        sums.iter_mut().zip(dout).for_each(|(sum, g)| *sum += w * g.widen());
    } else {
        sums.iter_mut().step_by(step).zip(dout).for_each(|(sum, g)| *sum += w * g.widen());
    }
}

/// `sums[q] += dout[q] x[q step]`.
#[inline(always)]
fn add_products<T: Element>(sums: &mut [T::Acc], dout: &[T], x: &[T], step: usize) {
    let pairs = sums.iter_mut().zip(dout);
    if step == 1 {
        pairs.zip(x).for_each(|((sum, g), x)| *sum += g.widen() * x.widen());
    } else {
        pairs.zip(x.iter().step_by(step)).for_each(|((sum, g), x)| *sum += g.widen() * x.widen());
    }
}

//! 2-D pooling over planes: maximum, average, and the average of a whole plane.
//!
//! Nothing is kept for the backward pass: the position of a maximum is found again from the input.

// H W input plane · P Q output plane · R S window

use crate::{
    Element, Error, Real,
    cast::narrow_into,
    conv::{check_elems, out_extent},
    par, reduce,
};
use num_traits::Float;
use std::ops::Range;

/// How a pooling window moves. Pairs are (height, width).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool2dConfig {
    /// Window extent.
    pub kernel: [usize; 2],
    /// Pixels between two windows.
    pub stride: [usize; 2],
    /// Pixels added on each side: `-inf` for the maximum, 0 for the average.
    pub padding: [usize; 2],
}

/// Checked sizes of one pooling over `n_planes` planes (batch times channels).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool2dShape {
    n_planes: usize,
    input: [usize; 2],
    output: [usize; 2],
    cfg: Pool2dConfig,
}

impl Pool2dShape {
    /// For `n_planes` planes of `[H, W]`.
    /// # Errors
    /// If a kernel extent or stride is 0, padding is more than half the kernel, or the window is
    /// larger than the padded plane.
    pub fn new(n_planes: usize, input: [usize; 2], cfg: Pool2dConfig) -> Result<Self, Error> {
        let op = "pool2d";
        for (what, n) in [
            ("kernel", cfg.kernel[0].min(cfg.kernel[1])),
            ("stride", cfg.stride[0].min(cfg.stride[1])),
            ("height", input[0]),
            ("width", input[1]),
        ] {
            if n == 0 {
                return Err(Error::Zero { op, what });
            }
        }
        let mut output = [0; 2];
        for (i, axis) in ["height", "width"].into_iter().enumerate() {
            let (kernel, padding) = (cfg.kernel[i], cfg.padding[i]);
            if padding > kernel / 2 {
                return Err(Error::Padding { op, padding, kernel });
            }
            output[i] = out_extent(op, axis, input[i], kernel, cfg.stride[i], padding, 1)?;
        }
        check_elems(op, &[n_planes, input[0], input[1]])?;
        check_elems(op, &[n_planes, output[0], output[1]])?;
        Ok(Self { n_planes, input, output, cfg })
    }

    /// `[P, Q]`.
    pub fn out_extents(&self) -> [usize; 2] {
        self.output
    }

    fn in_pixels(&self) -> usize {
        self.input[0] * self.input[1]
    }
    fn out_pixels(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// The rows and columns that the window of output pixel `i` covers inside the plane.
    fn window(&self, i: usize) -> [Range<usize>; 2] {
        let at = [i / self.output[1], i % self.output[1]];
        [0, 1].map(|a| {
            let from = at[a] * self.cfg.stride[a];
            let to = (from + self.cfg.kernel[a]).saturating_sub(self.cfg.padding[a]);
            from.saturating_sub(self.cfg.padding[a])..to.min(self.input[a])
        })
    }

    fn assert_lens(&self, n_in: usize, n_out: usize) {
        assert_eq!(n_in, self.n_planes * self.in_pixels(), "pool2d: input of {self:?}");
        assert_eq!(n_out, self.n_planes * self.out_pixels(), "pool2d: output of {self:?}");
    }
}

/// Output pixels of a row whose maxima are looked for at once: what the loops over them hold stays in
/// the L1 cache.
const CUT: usize = 128;

/// The maxima of some windows of one row, and where they are.
struct Maxima<R> {
    best: [R; CUT],
    at: [u32; CUT],
}

impl<R: Real> Maxima<R> {
    /// Of output pixels `(p, cols)`: the first maximum of each window; the last NaN where there is one,
    /// as in PyTorch. Tap by tap, for windows side by side.
    #[inline(always)]
    fn new<T: Element<Acc = R>>(
        plane: &[T],
        shape: &Pool2dShape,
        p: usize,
        cols: Range<usize>,
    ) -> Self {
        let mut maxima = Self { best: [R::of(f64::NEG_INFINITY); CUT], at: [0; CUT] };
        let (width, step, pad) = (shape.input[1], shape.cfg.stride[1], shape.cfg.padding[1]);
        let [rows, _] = shape.window(p * shape.output[1]);
        // The first pixel of each window, for windows of -infinity alone.
        for (at, q) in maxima.at.iter_mut().zip(cols.clone()) {
            *at = (rows.start * width + (q * step).saturating_sub(pad)) as u32;
        }
        for y in rows {
            for s in 0..shape.cfg.kernel[1] {
                // Those whose tap lies inside: 0 <= q step + s - pad < width.
                let first = pad.saturating_sub(s).div_ceil(step).max(cols.start);
                let end = (width + pad).saturating_sub(s).div_ceil(step).min(cols.end);
                if first >= end {
                    continue;
                }
                let (from, n) = (y * width + first * step + s - pad, end - first);
                let taps = &plane[from..=from + (n - 1) * step];
                let best = &mut maxima.best[first - cols.start..][..n];
                let at = &mut maxima.at[first - cols.start..][..n];
                match step {
                    1 => take::<T, 1>(best, at, taps, from),
                    2 => take::<T, 2>(best, at, taps, from),
                    _ => {
                        let pixels = (from as u32..).step_by(step);
                        let taps = taps.iter().step_by(step).zip(pixels);
                        for ((best, at), (&tap, pixel)) in best.iter_mut().zip(at).zip(taps) {
                            take_one(best, at, tap, pixel);
                        }
                    }
                }
            }
        }
        maxima
    }
}

/// Takes every `STEP`th of `taps`, the first of them being pixel `from`, where it is more than the best.
#[inline(always)]
fn take<T: Element, const STEP: usize>(
    best: &mut [T::Acc],
    at: &mut [u32],
    taps: &[T],
    from: usize,
) {
    let (body, last) = taps.as_chunks::<STEP>();
    let (best, last_best) = best.split_at_mut(body.len());
    let (at, last_at) = at.split_at_mut(body.len());
    let mut pixel = from as u32;
    for ((best, at), taps) in best.iter_mut().zip(at).zip(body) {
        take_one(best, at, taps[0], pixel);
        pixel += STEP as u32;
    }
    for ((best, at), &tap) in last_best.iter_mut().zip(last_at).zip(last) {
        take_one(best, at, tap, pixel);
    }
}

#[inline(always)]
fn take_one<T: Element>(best: &mut T::Acc, at: &mut u32, tap: T, pixel: u32) {
    let x = tap.widen();
    let more = (x > *best) | x.is_nan();
    *best = if more { x } else { *best };
    *at = if more { pixel } else { *at };
}

/// Calls `f(output pixel, maximum, its pixel)` for all windows of a plane.
#[inline(always)]
fn each_maximum<T: Element>(
    plane: &[T],
    shape: &Pool2dShape,
    mut f: impl FnMut(usize, T::Acc, usize),
) {
    let [n_rows, n_cols] = shape.output;
    for p in 0..n_rows {
        for start in (0..n_cols).step_by(CUT) {
            let cols = start..n_cols.min(start + CUT);
            let maxima = Maxima::new(plane, shape, p, cols.clone());
            for ((q, &best), &at) in cols.zip(&maxima.best).zip(&maxima.at) {
                f(p * n_cols + q, best, at as usize);
            }
        }
    }
}

/// `out[plane, p, q] = max` over the window.
/// # Panics
/// If a length does not match `shape`.
pub fn max_pool2d<T: Element>(out: &mut [T], x: &[T], shape: &Pool2dShape) {
    shape.assert_lens(x.len(), out.len());
    par::rows(
        out,
        shape.out_pixels(),
        #[inline(always)]
        |plane, out| {
            let x = &x[plane * shape.in_pixels()..][..shape.in_pixels()];
            each_maximum(
                x,
                shape,
                #[inline(always)]
                |i, best, _| out[i] = T::narrow(best),
            );
        },
    );
}

/// Adds each window's gradient to its maximum, found again from `x`. Overwrites `dx`.
/// # Panics
/// If a length does not match `shape`.
pub fn max_pool2d_backward<T: Element>(dx: &mut [T], x: &[T], dout: &[T], shape: &Pool2dShape) {
    shape.assert_lens(x.len(), dout.len());
    scatter(
        dx,
        shape,
        #[inline(always)]
        |plane, sums| {
            let x = &x[plane * shape.in_pixels()..][..shape.in_pixels()];
            let dout = &dout[plane * shape.out_pixels()..][..shape.out_pixels()];
            each_maximum(
                x,
                shape,
                #[inline(always)]
                |i, _, at| sums[at] += dout[i].widen(),
            );
        },
    );
}

/// Builds each plane of `dx` in the accumulator type by `add(plane, sums)`, which begins with zeros.
#[inline(always)]
fn scatter<T: Element>(
    dx: &mut [T],
    shape: &Pool2dShape,
    add: impl Fn(usize, &mut [T::Acc]) + Send + Sync,
) {
    assert_eq!(dx.len(), shape.n_planes * shape.in_pixels(), "pool2d: input of {shape:?}");
    par::rows(
        dx,
        shape.in_pixels(),
        #[inline(always)]
        |plane, dx| {
            if let Some(sums) = T::as_acc_mut(dx) {
                sums.fill(T::Acc::of(0.0));
                return add(plane, sums);
            }
            let mut sums = vec![T::Acc::of(0.0); shape.in_pixels()];
            add(plane, &mut sums);
            narrow_into(dx, &sums);
        },
    );
}

/// Bytes that a gradient of pooling holds on `n_threads`: the sums of a plane, for narrow elements.
pub fn pool2d_backward_scratch_bytes<T: Element>(shape: &Pool2dShape, n_threads: u64) -> u64 {
    match T::as_acc(&[]) {
        Some(_) => 0,
        None => n_threads * (shape.in_pixels() * size_of::<T::Acc>()) as u64,
    }
}

/// What an average divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Divisor {
    /// The whole window, padding included (PyTorch's default).
    Window,
    /// The elements of the window that lie inside the plane.
    Inside,
}

impl Divisor {
    fn of(self, shape: &Pool2dShape, [rows, cols]: &[Range<usize>; 2]) -> f64 {
        match self {
            // A window that runs over the far edge of the padding cannot occur: extents are floored.
            Divisor::Window => shape.cfg.kernel[0] as f64 * shape.cfg.kernel[1] as f64,
            Divisor::Inside => (rows.len() * cols.len()) as f64,
        }
    }
}

/// `out[plane, p, q] = sum of the window / divisor`.
/// # Panics
/// If a length does not match `shape`.
pub fn avg_pool2d<T: Element>(out: &mut [T], x: &[T], shape: &Pool2dShape, divisor: Divisor) {
    shape.assert_lens(x.len(), out.len());
    par::rows(
        out,
        shape.out_pixels(),
        #[inline(always)]
        |plane, out| {
            let x = &x[plane * shape.in_pixels()..][..shape.in_pixels()];
            for (i, out) in out.iter_mut().enumerate() {
                let window = shape.window(i);
                let mut sum = T::Acc::of(0.0);
                for y in window[0].clone() {
                    for z in window[1].clone() {
                        sum += x[y * shape.input[1] + z].widen();
                    }
                }
                *out = T::narrow(sum / T::Acc::of(divisor.of(shape, &window)));
            }
        },
    );
}

/// Spreads each window's gradient evenly over it. Overwrites `dx`.
/// # Panics
/// If a length does not match `shape`.
pub fn avg_pool2d_backward<T: Element>(
    dx: &mut [T],
    dout: &[T],
    shape: &Pool2dShape,
    divisor: Divisor,
) {
    shape.assert_lens(dx.len(), dout.len());
    scatter(dx, shape, |plane, sums| {
        let dout = &dout[plane * shape.out_pixels()..][..shape.out_pixels()];
        for (i, d) in dout.iter().enumerate() {
            let window = shape.window(i);
            let share = d.widen() / T::Acc::of(divisor.of(shape, &window));
            for y in window[0].clone() {
                for z in window[1].clone() {
                    sums[y * shape.input[1] + z] += share;
                }
            }
        }
    });
}

/// `out[plane]`, the mean of each plane of `pixels` elements, summed in `f64`.
/// # Panics
/// If the lengths do not match.
pub fn global_avg_pool<T: Element>(out: &mut [T], x: &[T], pixels: usize) {
    assert_eq!(x.len(), out.len() * pixels, "global_avg_pool: planes of {pixels}");
    par::rows(
        out,
        1,
        #[inline(always)]
        |plane, out| {
            let sum = reduce::sum(&x[plane * pixels..][..pixels]);
            out[0] = T::narrow(T::Acc::of(sum / pixels as f64));
        },
    );
}

/// Spreads each plane's gradient evenly over it. Overwrites `dx`.
/// # Panics
/// If the lengths do not match.
pub fn global_avg_pool_backward<T: Element>(dx: &mut [T], dout: &[T], pixels: usize) {
    assert_eq!(dx.len(), dout.len() * pixels, "global_avg_pool: planes of {pixels}");
    par::rows(
        dx,
        pixels,
        #[inline(always)]
        |plane, dx| {
            dx.fill(T::narrow(dout[plane].widen() / T::Acc::of(pixels as f64)));
        },
    );
}

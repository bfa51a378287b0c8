//! 2-D convolution (cross-correlation) and both its gradients, as products with patches.
//!
//! The patch matrix ("im2col", Chellapilla 2006) is never whole: each thread unfolds a tile of
//! output pixels, multiplies, and forgets it. [`conv2d_scalar`] is the specification.

// N batch · C input channels · O output channels · H W input · P Q output · R S kernel
// K = C/groups * R * S, the depth of the forward product

use crate::{
    Element, Error, Real,
    gemm::{Mat, Store, gemm_serial},
    par::{Disjoint, tasks},
    reduce,
};
use rayon::prelude::*;
use std::borrow::Cow;

/// Elements of one unfolded tile: 256 KiB of `f32`, half of a usual L2 cache.
const TILE_ELEMS: usize = 1 << 16;
/// Output channels of one block of the weight gradient.
const BLOCK_OUT: usize = 128;
/// Patch rows of one block of a gradient.
const BLOCK_DEPTH: usize = 1152;
/// Blocks below which the weight gradient is also cut over pixels, to keep threads busy.
const MIN_TASKS: usize = 8;

/// How a window moves. Pairs are (height, width).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dConfig {
    /// Pixels between two windows.
    pub stride: [usize; 2],
    /// Zeros added on each side.
    pub padding: [usize; 2],
    /// Pixels between two taps of a window.
    pub dilation: [usize; 2],
    /// Independent groups of channels.
    pub groups: usize,
}

impl Conv2dConfig {
    /// Stride 1, no padding, no dilation, one group.
    pub const UNIT: Self = Self {
        stride: [1, 1],
        padding: [0, 0],
        dilation: [1, 1],
        groups: 1,
    };
}

/// Checked sizes of one convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dShape {
    batch: usize,
    channels: usize,
    out_channels: usize,
    input: [usize; 2],
    output: [usize; 2],
    kernel: [usize; 2],
    cfg: Conv2dConfig,
}

impl Conv2dShape {
    /// For input `[N, C, H, W]` and weight `[O, C/groups, R, S]`.
    /// # Errors
    /// If a size, stride, dilation or group count is 0, channels and groups do not fit together,
    /// or the window is larger than the padded input.
    pub fn new(input: [usize; 4], weight: [usize; 4], cfg: Conv2dConfig) -> Result<Self, Error> {
        let op = "conv2d";
        let [_, channels, h, w] = input;
        let [out_channels, weight_channels, r, s] = weight;
        for (what, n) in [
            ("stride", cfg.stride[0].min(cfg.stride[1])),
            ("dilation", cfg.dilation[0].min(cfg.dilation[1])),
            ("groups", cfg.groups),
            ("kernel", r.min(s)),
            ("out_channels", out_channels),
            ("in_channels", channels),
        ] {
            if n == 0 {
                return Err(Error::Zero { op, what });
            }
        }
        let fits = weight_channels.checked_mul(cfg.groups) == Some(channels);
        if !fits || !out_channels.is_multiple_of(cfg.groups) {
            let groups = cfg.groups;
            return Err(Error::Channels {
                in_channels: channels,
                weight,
                groups,
            });
        }
        let output = [
            out_extent(
                op,
                "height",
                h,
                r,
                cfg.stride[0],
                cfg.padding[0],
                cfg.dilation[0],
            )?,
            out_extent(
                op,
                "width",
                w,
                s,
                cfg.stride[1],
                cfg.padding[1],
                cfg.dilation[1],
            )?,
        ];
        let (batch, input, kernel) = (input[0], [h, w], [r, s]);
        Ok(Self {
            batch,
            channels,
            out_channels,
            input,
            output,
            kernel,
            cfg,
        })
    }

    /// `[N, O, P, Q]`.
    pub fn out_dims(&self) -> [usize; 4] {
        [
            self.batch,
            self.out_channels,
            self.output[0],
            self.output[1],
        ]
    }

    fn group_in(&self) -> usize {
        self.channels / self.cfg.groups
    }
    fn group_out(&self) -> usize {
        self.out_channels / self.cfg.groups
    }
    fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }
    fn depth(&self) -> usize {
        self.group_in() * self.taps()
    }
    fn in_pixels(&self) -> usize {
        self.input[0] * self.input[1]
    }
    fn out_pixels(&self) -> usize {
        self.output[0] * self.output[1]
    }
    fn in_elems(&self) -> usize {
        self.batch * self.channels * self.in_pixels()
    }
    fn out_elems(&self) -> usize {
        self.batch * self.out_channels * self.out_pixels()
    }
    fn weight_elems(&self) -> usize {
        self.out_channels * self.depth()
    }
    /// Patches are the input itself.
    fn is_pointwise(&self) -> bool {
        self.kernel == [1, 1] && self.cfg.stride == [1, 1] && self.cfg.padding == [0, 0]
    }
    /// Output pixels of one tile whose patches have `depth` rows.
    fn tile_pixels(&self, depth: usize) -> usize {
        (TILE_ELEMS / depth).clamp(32, 1024)
    }
}

pub(crate) fn out_extent(
    op: &'static str,
    axis: &'static str,
    extent: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
) -> Result<usize, Error> {
    let window = (kernel - 1).saturating_mul(dilation).saturating_add(1);
    let padded = padding.saturating_mul(2).saturating_add(extent);
    if window > padded {
        return Err(Error::Window {
            op,
            axis,
            window,
            padded,
        });
    }
    Ok((padded - window) / stride + 1)
}

/// Bytes one thread holds at most during [`conv2d`] or a gradient, beside its inputs and outputs.
///
/// Narrow elements also keep one widened copy of the weight, shared by all threads, and the
/// gradient of the input keeps one widened image block per thread; both are included.
pub fn conv2d_scratch_bytes<T: Element>(shape: &Conv2dShape) -> u64 {
    let depth = shape.depth().min(BLOCK_DEPTH).max(shape.taps());
    let tile = shape
        .tile_pixels(shape.depth())
        .max(shape.tile_pixels(depth));
    let unfold = shape.depth() * shape.tile_pixels(shape.depth());
    let products = shape.group_out() * tile;
    let block = BLOCK_OUT * depth;
    let narrow = if T::as_acc(&[]).is_some() {
        0
    } else {
        shape.weight_elems() + (depth / shape.taps()) * shape.in_pixels()
    };
    (unfold + products + block + narrow) as u64 * size_of::<T::Acc>() as u64
}

/// A run of output pixels `start..end`, counted over the whole batch.
#[derive(Clone, Copy)]
struct Tile {
    start: usize,
    end: usize,
}

impl Tile {
    /// Calls `f(image, first pixel, n pixels, offset in tile)` for each image the tile touches.
    fn images(self, out_pixels: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
        let mut at = self.start;
        while at < self.end {
            let (image, pixel) = (at / out_pixels, at % out_pixels);
            let n = (out_pixels - pixel).min(self.end - at);
            f(image, pixel, n, at - self.start);
            at += n;
        }
    }
}

fn widened<T: Element>(x: &[T]) -> Cow<'_, [T::Acc]> {
    T::as_acc(x).map_or_else(|| x.iter().map(|v| v.widen()).collect(), Cow::Borrowed)
}

/// `col[K', pixels] =` patches of the channels `first..first + n` for the pixels of `tile`.
fn unfold<T: Element>(
    col: &mut Vec<T::Acc>,
    x: &[T],
    shape: &Conv2dShape,
    first: usize,
    n: usize,
    tile: Tile,
) {
    let width = tile.end - tile.start;
    col.resize(n * shape.taps() * width, T::Acc::of(0.0));
    for (row, col) in col.chunks_exact_mut(width).enumerate() {
        let (c, tap) = (first + row / shape.taps(), row % shape.taps());
        tile.images(shape.out_pixels(), |image, pixel, n_pixels, at| {
            let plane = (image * shape.channels + c) * shape.in_pixels();
            let plane = &x[plane..plane + shape.in_pixels()];
            visit_rows(shape, tap, pixel, n_pixels, |offset, n, source| {
                let col = &mut col[at + offset..at + offset + n];
                match source {
                    None => col.fill(T::Acc::of(0.0)),
                    Some((from, 1)) => widen_row(col, &plane[from..from + n]),
                    Some((from, step)) => {
                        for (c, x) in col.iter_mut().zip(plane[from..].iter().step_by(step)) {
                            *c = x.widen();
                        }
                    }
                }
            });
        });
    }
}

fn widen_row<T: Element>(dst: &mut [T::Acc], src: &[T]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = s.widen();
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
    let Conv2dConfig {
        stride,
        padding,
        dilation,
        ..
    } = shape.cfg;
    let (r, s) = (
        tap / shape.kernel[1] * dilation[0],
        tap % shape.kernel[1] * dilation[1],
    );
    // Output columns q for which 0 <= q * stride + s - padding < w.
    let q_from = padding[1]
        .saturating_sub(s)
        .div_ceil(stride[1])
        .min(q_extent);
    let q_to = (w + padding[1])
        .saturating_sub(s)
        .div_ceil(stride[1])
        .min(q_extent)
        .max(q_from);
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

/// `out[N, O, P, Q] = x[N, C, H, W] * weight[O, C/groups, R, S] + bias[O]`.
/// # Panics
/// If a length does not match `shape`.
pub fn conv2d<T: Element>(
    out: &mut [T],
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    shape: &Conv2dShape,
) {
    assert_eq!(out.len(), shape.out_elems(), "conv2d: output of {shape:?}");
    assert_eq!(x.len(), shape.in_elems(), "conv2d: input of {shape:?}");
    assert_eq!(
        weight.len(),
        shape.weight_elems(),
        "conv2d: weight of {shape:?}"
    );
    assert!(
        bias.is_none_or(|b| b.len() == shape.out_channels),
        "conv2d: bias of {shape:?}"
    );
    let (depth, group_out, pixels) = (shape.depth(), shape.group_out(), shape.out_pixels());
    let weight = widened(weight);
    let dst = Disjoint::new(out);
    let work = |(col, acc): &mut (Vec<T::Acc>, Vec<T::Acc>), group: usize, tile: Tile| {
        let width = tile.end - tile.start;
        let w = &weight[group * group_out * depth..(group + 1) * group_out * depth];
        acc.resize(group_out * width, T::Acc::of(0.0));
        let a = Mat::new(w, group_out, depth);
        let b = patches(col, x, shape, group, tile);
        gemm_serial(acc, width, a, b, Store::Overwrite);
        for (o, row) in acc.chunks_exact(width).enumerate() {
            let o = group * group_out + o;
            let bias = bias.map_or(T::Acc::of(0.0), |b| b[o].widen());
            tile.images(pixels, |image, pixel, n, at| {
                let start = (image * shape.out_channels + o) * pixels + pixel;
                // SAFETY: each (group, tile) is done once, and tiles do not overlap.
                let out = unsafe { dst.slice(start, n) };
                for (out, &sum) in out.iter_mut().zip(&row[at..]) {
                    *out = T::narrow(sum + bias);
                }
            });
        }
    };
    for_each_tile(shape, depth, work);
}

/// Runs `work(scratch, group, tile)` over all groups and tiles of output pixels, in parallel.
fn for_each_tile<S: Default + Send>(
    shape: &Conv2dShape,
    depth: usize,
    work: impl Fn(&mut S, usize, Tile) + Sync,
) {
    let tiles = tiles(shape, depth, 0..shape.batch);
    (0..tiles.len() * shape.cfg.groups)
        .into_par_iter()
        .for_each_init(S::default, |scratch, t| {
            work(scratch, t / tiles.len(), tiles[t % tiles.len()]);
        });
}

/// Tiles over the given images: several small images share one, a large image has several.
fn tiles(shape: &Conv2dShape, depth: usize, images: std::ops::Range<usize>) -> Vec<Tile> {
    let (pixels, width) = (shape.out_pixels(), shape.tile_pixels(depth));
    let unit = if pixels <= width {
        width / pixels * pixels
    } else {
        pixels
    };
    let (first, last) = (images.start * pixels, images.end * pixels);
    let mut tiles = Vec::new();
    for start in (first..last).step_by(unit) {
        let end = (start + unit).min(last);
        tiles.extend((start..end).step_by(width.max(1)).map(|s| Tile {
            start: s,
            end: (s + width).min(end),
        }));
    }
    tiles
}

/// The patch matrix `[K, pixels]` of a tile, unfolded into `col` or, where they are the same, the
/// input itself.
fn patches<'a, T: Element>(
    col: &'a mut Vec<T::Acc>,
    x: &'a [T],
    shape: &Conv2dShape,
    group: usize,
    tile: Tile,
) -> Mat<'a, T::Acc> {
    let (first, n, pixels) = (
        group * shape.group_in(),
        shape.group_in(),
        shape.out_pixels(),
    );
    let width = tile.end - tile.start;
    if let Some(x) = T::as_acc(x)
        && shape.is_pointwise()
        && tile.start / pixels == (tile.end - 1) / pixels
    {
        let start = (tile.start / pixels * shape.channels + first) * pixels + tile.start % pixels;
        let (n_rows, n_cols) = (n, width);
        return Mat {
            data: &x[start..],
            n_rows,
            n_cols,
            row_stride: pixels,
            col_stride: 1,
        };
    }
    unfold(col, x, shape, first, n, tile);
    Mat::new(col, shape.depth(), width)
}

/// `dx[N, C, H, W]`, the gradient of the input, from `dout[N, O, P, Q]`. Overwrites `dx`.
/// # Panics
/// If a length does not match `shape`.
pub fn conv2d_backward_input<T: Element>(
    dx: &mut [T],
    dout: &[T],
    weight: &[T],
    shape: &Conv2dShape,
) {
    assert_eq!(
        dx.len(),
        shape.in_elems(),
        "conv2d: input gradient of {shape:?}"
    );
    assert_eq!(
        dout.len(),
        shape.out_elems(),
        "conv2d: output gradient of {shape:?}"
    );
    assert_eq!(
        weight.len(),
        shape.weight_elems(),
        "conv2d: weight of {shape:?}"
    );
    if shape.in_pixels() == 0 {
        return;
    }
    let weight = widened(weight);
    let block = (BLOCK_DEPTH / shape.taps()).clamp(1, shape.group_in());
    let blocks = shape.group_in().div_ceil(block);
    let dst = Disjoint::new(dx);
    (0..shape.batch * shape.cfg.groups * blocks)
        .into_par_iter()
        .for_each_init(Vec::new, |scratch, t| {
            let (image, t) = (
                t / (shape.cfg.groups * blocks),
                t % (shape.cfg.groups * blocks),
            );
            let (group, first) = (t / blocks, t % blocks * block);
            let n = block.min(shape.group_in() - first);
            let c = image * shape.channels + group * shape.group_in() + first;
            // SAFETY: each (image, group, block of channels) is done once.
            let dx = unsafe { dst.slice(c * shape.in_pixels(), n * shape.in_pixels()) };
            match T::as_acc_mut(dx) {
                Some(dx) => fold_block(dx, dout, &weight, shape, scratch, (image, group, first, n)),
                None => {
                    let mut acc = vec![T::Acc::of(0.0); dx.len()];
                    fold_block(
                        &mut acc,
                        dout,
                        &weight,
                        shape,
                        scratch,
                        (image, group, first, n),
                    );
                    for (dx, acc) in dx.iter_mut().zip(acc) {
                        *dx = T::narrow(acc);
                    }
                }
            }
        });
}

/// The gradient of `n` input channels of one image, overwriting `dx`.
fn fold_block<T: Element>(
    dx: &mut [T::Acc],
    dout: &[T],
    weight: &[T::Acc],
    shape: &Conv2dShape,
    col: &mut Vec<T::Acc>,
    (image, group, first, n): (usize, usize, usize, usize),
) {
    let (depth, group_out, pixels) = (shape.depth(), shape.group_out(), shape.out_pixels());
    let rows = n * shape.taps();
    let w = &weight[group * group_out * depth + first * shape.taps()..];
    let w = Mat {
        data: w,
        n_rows: group_out,
        n_cols: rows,
        row_stride: depth,
        col_stride: 1,
    }
    .t();
    let start = (image * shape.out_channels + group * group_out) * pixels;
    let dout = &dout[start..start + group_out * pixels];
    let dout = widened(dout);
    if shape.is_pointwise() {
        let dout = Mat::new(&dout, group_out, pixels);
        gemm_serial(dx, pixels, w, dout, Store::Overwrite);
        return;
    }
    dx.fill(T::Acc::of(0.0));
    for tile in tiles(shape, rows, 0..1) {
        let width = tile.end - tile.start;
        col.resize(rows * width, T::Acc::of(0.0));
        let data = &dout[tile.start..];
        let d = Mat {
            data,
            n_rows: group_out,
            n_cols: width,
            row_stride: pixels,
            col_stride: 1,
        };
        gemm_serial(col, width, w, d, Store::Overwrite);
        for (row, col) in col.chunks_exact(width).enumerate() {
            let (c, tap) = (row / shape.taps(), row % shape.taps());
            let plane = &mut dx[c * shape.in_pixels()..(c + 1) * shape.in_pixels()];
            visit_rows(shape, tap, tile.start, width, |offset, n, source| {
                let Some((from, step)) = source else { return };
                let col = &col[offset..offset + n];
                if step == 1 {
                    plane[from..from + n]
                        .iter_mut()
                        .zip(col)
                        .for_each(|(x, &c)| *x += c);
                } else {
                    let plane = plane[from..].iter_mut().step_by(step);
                    plane.zip(col).for_each(|(x, &c)| *x += c);
                }
            });
        }
    }
}

/// `dweight[O, C/groups, R, S]`, the gradient of the weight. Overwrites `dweight`.
/// # Panics
/// If a length does not match `shape`.
pub fn conv2d_backward_weight<T: Element>(
    dweight: &mut [T],
    dout: &[T],
    x: &[T],
    shape: &Conv2dShape,
) {
    assert_eq!(
        dweight.len(),
        shape.weight_elems(),
        "conv2d: weight gradient of {shape:?}"
    );
    assert_eq!(
        dout.len(),
        shape.out_elems(),
        "conv2d: output gradient of {shape:?}"
    );
    assert_eq!(x.len(), shape.in_elems(), "conv2d: input of {shape:?}");
    let (depth, taps) = (shape.depth(), shape.taps());
    let block_in = (BLOCK_DEPTH / taps).clamp(1, shape.group_in());
    let (blocks_in, blocks_out) = (
        shape.group_in().div_ceil(block_in),
        shape.group_out().div_ceil(BLOCK_OUT),
    );
    let n_blocks = shape.cfg.groups * blocks_out * blocks_in;
    let tiles = tiles(shape, depth.min(BLOCK_DEPTH), 0..shape.batch);
    // Few blocks: cut over pixels too, and add the partial sums in the order of the cuts.
    let n_cuts = MIN_TASKS.div_ceil(n_blocks).clamp(1, tiles.len().max(1));
    let cut_tiles = tiles.len().div_ceil(n_cuts).max(1);
    let partials = tasks(n_blocks * n_cuts, |t| {
        let (b, cut) = (t / n_cuts, t % n_cuts);
        let block = weight_block(shape, b, blocks_in, blocks_out, block_in);
        let to = ((cut + 1) * cut_tiles).min(tiles.len());
        weight_partial(
            shape,
            &block,
            dout,
            x,
            &tiles[(cut * cut_tiles).min(to)..to],
        )
    });
    for (b, partials) in partials.chunks(n_cuts).enumerate() {
        let block = weight_block(shape, b, blocks_in, blocks_out, block_in);
        let cols = block.n_in * taps;
        for o in 0..block.n_out {
            let start = (block.group * shape.group_out() + block.first_out + o) * depth;
            let start = start + block.first_in * taps;
            for (j, dw) in dweight[start..start + cols].iter_mut().enumerate() {
                *dw = T::narrow(partials.iter().map(|p| p[o * cols + j]).sum());
            }
        }
    }
}

/// A rectangle of the weight's gradient: output channels by input channels of one group.
struct WeightBlock {
    group: usize,
    first_out: usize,
    n_out: usize,
    first_in: usize,
    n_in: usize,
}

fn weight_block(
    shape: &Conv2dShape,
    b: usize,
    blocks_in: usize,
    blocks_out: usize,
    block_in: usize,
) -> WeightBlock {
    let (group, b) = (b / (blocks_in * blocks_out), b % (blocks_in * blocks_out));
    let (first_out, first_in) = (b / blocks_in * BLOCK_OUT, b % blocks_in * block_in);
    let n_out = BLOCK_OUT.min(shape.group_out() - first_out);
    WeightBlock {
        group,
        first_out,
        n_out,
        first_in,
        n_in: block_in.min(shape.group_in() - first_in),
    }
}

/// `dout * patches^T` of one block over some tiles.
fn weight_partial<T: Element>(
    shape: &Conv2dShape,
    block: &WeightBlock,
    dout: &[T],
    x: &[T],
    tiles: &[Tile],
) -> Vec<T::Acc> {
    let (cols, pixels) = (block.n_in * shape.taps(), shape.out_pixels());
    let mut acc = vec![T::Acc::of(0.0); block.n_out * cols];
    let (mut col, mut d) = (Vec::new(), Vec::new());
    let first_in = block.group * shape.group_in() + block.first_in;
    let first_out = block.group * shape.group_out() + block.first_out;
    for &tile in tiles {
        let width = tile.end - tile.start;
        unfold(&mut col, x, shape, first_in, block.n_in, tile);
        d.resize(block.n_out * width, T::Acc::of(0.0));
        for (o, row) in d.chunks_exact_mut(width).enumerate() {
            tile.images(pixels, |image, pixel, n, at| {
                let start = (image * shape.out_channels + first_out + o) * pixels + pixel;
                widen_row(&mut row[at..at + n], &dout[start..start + n]);
            });
        }
        let (d, col) = (
            Mat::new(&d, block.n_out, width),
            Mat::new(&col, cols, width).t(),
        );
        gemm_serial(&mut acc, cols, d, col, Store::Add);
    }
    acc
}

/// `dbias[O]`: the sum of `dout` over batch and pixels, kept in `f64`.
/// # Panics
/// If a length does not match `shape`.
pub fn conv2d_backward_bias<T: Element>(dbias: &mut [T], dout: &[T], shape: &Conv2dShape) {
    assert_eq!(
        dbias.len(),
        shape.out_channels,
        "conv2d: bias gradient of {shape:?}"
    );
    assert_eq!(
        dout.len(),
        shape.out_elems(),
        "conv2d: output gradient of {shape:?}"
    );
    let pixels = shape.out_pixels();
    let sums = tasks(shape.out_channels, |o| {
        (0..shape.batch)
            .map(|n| reduce::sum(&dout[(n * shape.out_channels + o) * pixels..][..pixels]))
            .sum::<f64>()
    });
    for (db, sum) in dbias.iter_mut().zip(sums) {
        *db = T::narrow(T::Acc::of(sum));
    }
}

/// The specification of [`conv2d`]: one sum per output, over channels, then rows, then columns.
pub fn conv2d_scalar<T: Element>(
    out: &mut [T],
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    shape: &Conv2dShape,
) {
    let ([h, w], [p_extent, q_extent], [r_extent, s_extent]) =
        (shape.input, shape.output, shape.kernel);
    let Conv2dConfig {
        stride,
        padding,
        dilation,
        ..
    } = shape.cfg;
    for (i, out) in out.iter_mut().enumerate() {
        let (n, o) = (
            i / shape.out_pixels() / shape.out_channels,
            i / shape.out_pixels() % shape.out_channels,
        );
        let (p, q) = (i % shape.out_pixels() / q_extent, i % q_extent);
        debug_assert!(p < p_extent);
        let first = o / shape.group_out() * shape.group_in();
        let mut sum = T::Acc::of(0.0);
        for c in 0..shape.group_in() {
            for r in 0..r_extent {
                for s in 0..s_extent {
                    let y = (p * stride[0] + r * dilation[0]).checked_sub(padding[0]);
                    let z = (q * stride[1] + s * dilation[1]).checked_sub(padding[1]);
                    let (Some(y), Some(z)) = (y, z) else { continue };
                    if y < h && z < w {
                        let x = x[((n * shape.channels + first + c) * h + y) * w + z];
                        let k = weight[((o * shape.group_in() + c) * r_extent + r) * s_extent + s];
                        sum += x.widen() * k.widen();
                    }
                }
            }
        }
        *out = T::narrow(sum + bias.map_or(T::Acc::of(0.0), |b| b[o].widen()));
    }
}

//! The gradients of a convolution.

use super::{
    BLOCK_DEPTH, BLOCK_OUT, Conv2dShape, MAX_SUM_ELEMS, MIN_TASKS,
    patches::{Tile, fold_row, tiles, unfold},
    widened,
};
use crate::{
    Element, Real,
    cast::narrow_into,
    gemm::{Mat, Store, gemm_serial, widen_into},
    par::{Disjoint, tasks},
    reduce,
};
use rayon::prelude::*;

/// `dx[N, C, H, W]`, the gradient of the input, from `dout[N, O, P, Q]`. Overwrites `dx`.
/// # Panics
/// If a length does not match `shape`.
pub fn conv2d_backward_input<T: Element>(
    dx: &mut [T],
    dout: &[T],
    weight: &[T],
    shape: &Conv2dShape,
) {
    assert_eq!(dx.len(), shape.in_elems(), "conv2d: input gradient of {shape:?}");
    assert_eq!(dout.len(), shape.out_elems(), "conv2d: output gradient of {shape:?}");
    assert_eq!(weight.len(), shape.weight_elems(), "conv2d: weight of {shape:?}");
    if shape.in_pixels() == 0 {
        return;
    }
    let weight = widened(weight);
    let block = input_block::<T>(shape);
    let blocks = shape.group_in().div_ceil(block);
    let dst = Disjoint::new(dx);
    (0..shape.batch * shape.cfg.groups * blocks).into_par_iter().for_each_init(
        <(Vec<T::Acc>, Vec<T::Acc>)>::default,
        |scratch, t| {
            let (image, t) = (t / (shape.cfg.groups * blocks), t % (shape.cfg.groups * blocks));
            let (group, first) = (t / blocks, t % blocks * block);
            let n = block.min(shape.group_in() - first);
            let c = image * shape.channels + group * shape.group_in() + first;
            // SAFETY: each (image, group, block of channels) is done once.
            let dx = unsafe { dst.slice(c * shape.in_pixels(), n * shape.in_pixels()) };
            match T::as_acc_mut(dx) {
                Some(dx) => fold_block(dx, dout, &weight, shape, scratch, (image, group, first, n)),
                None => {
                    let mut acc = vec![T::Acc::of(0.0); dx.len()];
                    fold_block(&mut acc, dout, &weight, shape, scratch, (image, group, first, n));
                    narrow_into(dx, &acc);
                }
            }
        },
    );
}

/// The gradient of `n` input channels of one image, overwriting `dx`.
fn fold_block<T: Element>(
    dx: &mut [T::Acc],
    dout: &[T],
    weight: &[T::Acc],
    shape: &Conv2dShape,
    (col, widened): &mut (Vec<T::Acc>, Vec<T::Acc>),
    (image, group, first, n): (usize, usize, usize, usize),
) {
    let (depth, group_out, pixels) = (shape.depth(), shape.group_out(), shape.out_pixels());
    let rows = n * shape.taps();
    let w = &weight[group * group_out * depth + first * shape.taps()..];
    let w = Mat { data: w, n_rows: group_out, n_cols: rows, row_stride: depth, col_stride: 1 }.t();
    let start = (image * shape.out_channels + group * group_out) * pixels;
    let dout = Mat::new(&dout[start..start + group_out * pixels], group_out, pixels);
    if !shape.is_pointwise() {
        dx.fill(T::Acc::of(0.0));
    }
    for tile in tiles(shape, rows, 0..1) {
        let width = tile.width();
        let d = widened_columns(widened, dout, tile);
        if shape.is_pointwise() {
            gemm_serial(&mut dx[tile.start..], pixels, w, d, Store::Overwrite);
            continue;
        }
        col.resize(rows * width, T::Acc::of(0.0));
        gemm_serial(col, width, w, d, Store::Overwrite);
        for (row, col) in col.chunks_exact_mut(width).enumerate() {
            let (c, tap) = (row / shape.taps(), row % shape.taps());
            let plane = &mut dx[c * shape.in_pixels()..(c + 1) * shape.in_pixels()];
            fold_row(plane, col, shape, tap, tile.start);
        }
    }
}

/// Input channels of one block: their patches fill a tile and, where sums are kept apart from narrow
/// elements, their planes stay below [`MAX_SUM_ELEMS`].
pub(super) fn input_block<T: Element>(shape: &Conv2dShape) -> usize {
    let by_depth = BLOCK_DEPTH / shape.taps();
    let by_sums = match T::as_acc(&[]) {
        Some(_) => by_depth,
        None => by_depth.min(MAX_SUM_ELEMS / shape.in_pixels().max(1)),
    };
    by_sums.clamp(1, shape.group_in())
}

/// The columns of `tile`, widened into `scratch` where they are narrow.
fn widened_columns<'a, T: Element>(
    scratch: &'a mut Vec<T::Acc>,
    m: Mat<'a, T>,
    tile: Tile,
) -> Mat<'a, T::Acc> {
    let (n_rows, n_cols) = (m.n_rows, tile.width());
    if let Some(data) = T::as_acc(m.data) {
        let data = &data[tile.start..];
        return Mat { data, n_rows, n_cols, row_stride: m.row_stride, col_stride: 1 };
    }
    scratch.resize(n_rows * n_cols, T::Acc::of(0.0));
    for (row, to) in scratch.chunks_exact_mut(n_cols).enumerate() {
        widen_into(&m.data[row * m.row_stride + tile.start..][..n_cols], to);
    }
    Mat::new(scratch, n_rows, n_cols)
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
    assert_eq!(dweight.len(), shape.weight_elems(), "conv2d: weight gradient of {shape:?}");
    assert_eq!(dout.len(), shape.out_elems(), "conv2d: output gradient of {shape:?}");
    assert_eq!(x.len(), shape.in_elems(), "conv2d: input of {shape:?}");
    let plan = WeightPlan::new(shape);
    let tiles = tiles(shape, shape.depth().min(BLOCK_DEPTH), 0..shape.batch);
    let cut_tiles = tiles.len().div_ceil(plan.n_cuts).max(1);
    let dst = Disjoint::new(dweight);
    let store = |block: &WeightBlock, partials: &[Vec<T::Acc>]| {
        let cols = block.n_in * shape.taps();
        for o in 0..block.n_out {
            let start = (block.group * shape.group_out() + block.first_out + o) * shape.depth();
            // SAFETY: blocks do not overlap, and each is stored once.
            let dw = unsafe { dst.slice(start + block.first_in * shape.taps(), cols) };
            for (j, dw) in dw.iter_mut().enumerate() {
                *dw = T::narrow(partials.iter().map(|p| p[o * cols + j]).sum());
            }
        }
    };
    if plan.n_cuts == 1 {
        (0..plan.n_blocks()).into_par_iter().for_each(|b| {
            let block = plan.block(shape, b);
            store(&block, &[weight_partial(shape, &block, dout, x, &tiles)]);
        });
        return;
    }
    let partials = tasks(plan.n_blocks() * plan.n_cuts, |t| {
        let (b, cut) = (t / plan.n_cuts, t % plan.n_cuts);
        let to = ((cut + 1) * cut_tiles).min(tiles.len());
        weight_partial(shape, &plan.block(shape, b), dout, x, &tiles[(cut * cut_tiles).min(to)..to])
    });
    for (b, partials) in partials.chunks(plan.n_cuts).enumerate() {
        store(&plan.block(shape, b), partials);
    }
}

/// How the weight's gradient is cut into blocks and, where these are few, over pixels too: the
/// partial sums of a block are added in the order of the cuts.
pub(super) struct WeightPlan {
    groups: usize,
    blocks_out: usize,
    blocks_in: usize,
    block_in: usize,
    pub(super) n_cuts: usize,
}

impl WeightPlan {
    pub(super) fn new(shape: &Conv2dShape) -> Self {
        let block_in = (BLOCK_DEPTH / shape.taps()).clamp(1, shape.group_in());
        let blocks_in = shape.group_in().div_ceil(block_in);
        let blocks_out = shape.group_out().div_ceil(BLOCK_OUT);
        let mut plan =
            Self { groups: shape.cfg.groups, blocks_out, blocks_in, block_in, n_cuts: 1 };
        let n_tiles = tiles(shape, shape.depth().min(BLOCK_DEPTH), 0..shape.batch).len();
        plan.n_cuts = MIN_TASKS.div_ceil(plan.n_blocks()).clamp(1, n_tiles.max(1));
        plan
    }

    pub(super) fn n_blocks(&self) -> usize {
        self.groups * self.blocks_out * self.blocks_in
    }

    fn block(&self, shape: &Conv2dShape, b: usize) -> WeightBlock {
        let (group, b) =
            (b / (self.blocks_in * self.blocks_out), b % (self.blocks_in * self.blocks_out));
        let (first_out, first_in) =
            (b / self.blocks_in * BLOCK_OUT, b % self.blocks_in * self.block_in);
        let n_out = BLOCK_OUT.min(shape.group_out() - first_out);
        let n_in = self.block_in.min(shape.group_in() - first_in);
        WeightBlock { group, first_out, n_out, first_in, n_in }
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
        let width = tile.width();
        unfold(&mut col, x, shape, first_in, block.n_in, tile);
        d.resize(block.n_out * width, T::Acc::of(0.0));
        for (o, row) in d.chunks_exact_mut(width).enumerate() {
            tile.images(pixels, |image, pixel, n, at| {
                let start = (image * shape.out_channels + first_out + o) * pixels + pixel;
                widen_into(&dout[start..start + n], &mut row[at..at + n]);
            });
        }
        let (d, col) = (Mat::new(&d, block.n_out, width), Mat::new(&col, cols, width).t());
        gemm_serial(&mut acc, cols, d, col, Store::Add);
    }
    acc
}

/// `dbias[O]`: the sum of `dout` over batch and pixels, kept in `f64`.
/// # Panics
/// If a length does not match `shape`.
pub fn conv2d_backward_bias<T: Element>(dbias: &mut [T], dout: &[T], shape: &Conv2dShape) {
    assert_eq!(dbias.len(), shape.out_channels, "conv2d: bias gradient of {shape:?}");
    assert_eq!(dout.len(), shape.out_elems(), "conv2d: output gradient of {shape:?}");
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

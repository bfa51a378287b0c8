//! The gradients of a convolution.

use super::{
    BLOCK_DEPTH, BLOCK_OUT, Conv2dShape, Group, MIN_TASKS, depthwise,
    planes::{Grids, Planes},
    product,
    window::{Patches, Transposed, Window},
};
use crate::{
    Element, Real,
    gemm::{Dense, Store},
    isa::{self, Isa},
    micro::Packed,
    pack::{Lanes, Packs, packs_narrow},
    par::{self, Disjoint, tasks},
    product::{Left, Whole, tile},
    reduce,
};
use num_traits::Float;
use rayon::prelude::*;
use std::ops::Range;

/// Pixels below which a cut of the weight's gradient is not worth its partial sums.
const MIN_CUT_PIXELS: usize = 128;

/// `dx[N, C, H, W]`, the gradient of the input, from `dout[N, O, P, Q]`. Overwrites `dx`.
///
/// A stride cuts the input into phases: pixels that are a stride apart are reached by the same taps,
/// and from output pixels that lie side by side. Each phase is a convolution of its own.
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
    if depthwise::is_depthwise(shape) {
        return depthwise::input_gradient(dx, dout, weight, shape);
    }
    if packs_narrow::<T>() {
        input_gradient::<T, T::Narrow>(dx, dout, weight, shape);
    } else {
        input_gradient::<T, T::Acc>(dx, dout, weight, shape);
    }
}

fn input_gradient<T: Element, P: Packs<T>>(
    dx: &mut [T],
    dout: &[T],
    weight: &[T],
    shape: &Conv2dShape,
) {
    let (group_in, group_out) = (shape.group_in(), shape.group_out());
    let mut phases = phases(shape);
    if are_merged(shape, &phases) && all_finite(dout) {
        return merged_phases::<T, P>(dx, dout, weight, shape, &phases);
    }
    if phases.iter().any(|phase| phase.taps.is_empty()) {
        par::elems(
            dx,
            #[inline(always)]
            |_, dx| dx.fill(T::default()),
        );
        phases.retain(|phase| !phase.taps.is_empty());
    }
    let dst = Disjoint::new(dx);
    for phase in phases {
        let depth = group_out * phase.taps.len();
        let groups = (0..shape.cfg.groups).map(|group| {
            let (weight, dout, start) = of_group(shape, group, weight, dout);
            let left = Turned { weight, shape, taps: &phase.taps };
            let grid = (phase.start, shape.cfg.stride);
            Group {
                left: Whole::<P>::new(&left, group_in, depth),
                right: Patches::new(dout, &phase.window, shape.batch, group_out),
                sink: Planes::new(dst, start, shape.input, &phase.window, grid),
            }
        });
        let n_pixels = shape.batch * phase.window.grid[0] * phase.window.grid[1];
        if n_pixels > 0 {
            product(groups.collect(), (group_in, n_pixels), depth);
        }
    }
}

/// The weight and the output's gradient from a group's first on, and where its planes begin: elements
/// before the first and between two images.
fn of_group<'a, T>(
    shape: &Conv2dShape,
    group: usize,
    weight: &'a [T],
    dout: &'a [T],
) -> (&'a [T], &'a [T], (usize, usize)) {
    let (first, n_weights) = (group * shape.group_out(), shape.group_out() * shape.depth());
    let weight = &weight[first * shape.depth()..][..n_weights];
    let dout = dout.get(first * shape.out_pixels()..).unwrap_or_default();
    let in_pixels = shape.in_pixels();
    (weight, dout, (group * shape.group_in() * in_pixels, shape.channels * in_pixels))
}

/// Most rows of a product that computes all phases at once.
const MERGED_ROWS: usize = 16;

/// Whether all phases are computed at once: where one alone has too few rows to be worth the packing
/// of the patches.
pub(super) fn are_merged(shape: &Conv2dShape, phases: &[Phase]) -> bool {
    phases.len() > 1
        && shape.group_in() * phases.len() <= MERGED_ROWS
        && phases.iter().all(|phase| phase.window.grid == phases[0].window.grid)
}

/// The window that all phases look through.
pub(super) fn merged_window(phases: &[Phase]) -> Window {
    let mut taps: Vec<_> = phases.iter().flat_map(|phase| &phase.window.taps).copied().collect();
    taps.sort_unstable();
    taps.dedup();
    Window { taps, ..phases[0].window }
}

/// Weights of 0 keep out what is finite, and nothing else.
fn all_finite<T: Element>(x: &[T]) -> bool {
    const CUT: usize = 1 << 14;
    let cut = |x: &[T]| {
        isa::vectorized(
            #[inline(always)]
            || x.iter().fold(true, |all, x| all & x.widen().is_finite()),
        )
    };
    x.par_chunks(CUT).all(cut)
}

/// As [`input_gradient`], rows of the product being the channels of one phase after the other. Taps that
/// are not of a phase have weight 0.
fn merged_phases<T: Element, P: Packs<T>>(
    dx: &mut [T],
    dout: &[T],
    weight: &[T],
    shape: &Conv2dShape,
    phases: &[Phase],
) {
    let (group_in, group_out) = (shape.group_in(), shape.group_out());
    let (window, n_rows) = (merged_window(phases), phases.len() * group_in);
    let depth = group_out * window.taps.len();
    let tap_at = |phase: &Phase, at| {
        phase.window.taps.iter().position(|&tap| tap == at).map(|tap| phase.taps[tap])
    };
    let taps: Vec<Vec<_>> = phases
        .iter()
        .map(|phase| window.taps.iter().map(|&at| tap_at(phase, at)).collect())
        .collect();
    let dst = Disjoint::new(dx);
    let groups = (0..shape.cfg.groups).map(|group| {
        let (weight, dout, start) = of_group(shape, group, weight, dout);
        let grid = |phase: &Phase| {
            let grid = (phase.start, shape.cfg.stride);
            Planes::new(dst, start, shape.input, &window, grid)
        };
        Group {
            left: Whole::<P>::new(&Merged { weight, shape, taps: &taps }, n_rows, depth),
            right: Patches::new(dout, &window, shape.batch, group_out),
            sink: Grids { grids: phases.iter().map(grid).collect(), n_planes: group_in },
        }
    });
    let n_pixels = shape.batch * window.grid[0] * window.grid[1];
    if n_pixels > 0 {
        product(groups.collect(), (n_rows, n_pixels), depth);
    }
}

/// The weight of one group with phases and input channels for rows; depth is output channel, then tap
/// of the merged window.
struct Merged<'a, T> {
    weight: &'a [T],
    shape: &'a Conv2dShape,
    /// For each phase and tap of the merged window the tap of the weight, if it has one.
    taps: &'a [Vec<Option<usize>>],
}

impl<T: Element, P: Packs<T>> Left<P> for Merged<'_, T> {
    fn pack(&self, _: Isa, dst: &mut [P], rows: Range<usize>, depth: Range<usize>) {
        let (group_in, n_taps) = (self.shape.group_in(), self.taps[0].len());
        dst.fill(P::default());
        for (at, p) in depth.enumerate() {
            let (o, tap) = (p / n_taps, p % n_taps);
            for (l, row) in rows.clone().enumerate() {
                let (phase, c) = (row / group_in, row % group_in);
                if let Some(tap) = self.taps[phase][tap] {
                    let w = o * self.shape.depth() + c * self.shape.taps() + tap;
                    dst[P::left_place(l, at)] = P::pack_one(self.weight[w]);
                }
            }
        }
    }
}

/// The input pixels whose row and column leave given remainders when divided by the stride.
pub(super) struct Phase {
    start: [usize; 2],
    /// The taps that reach them.
    pub(super) taps: Vec<usize>,
    /// Where those taps read the output's gradient.
    pub(super) window: Window,
}

/// All phases; their pixels are the input.
pub(super) fn phases(shape: &Conv2dShape) -> Vec<Phase> {
    let [down, across] = shape.cfg.stride;
    let starts = (0..down).flat_map(|i| (0..across).map(move |j| [i, j]));
    starts.map(|start| phase(shape, start)).collect()
}

fn phase(shape: &Conv2dShape, start: [usize; 2]) -> Phase {
    let (stride, padding, dilation) = (shape.cfg.stride, shape.cfg.padding, shape.cfg.dilation);
    let mut window = Window {
        grid: [0, 1].map(|a| shape.input[a].saturating_sub(start[a]).div_ceil(stride[a])),
        step: [1, 1],
        source: shape.output,
        image_elems: shape.out_channels * shape.out_pixels(),
        taps: Vec::new(),
    };
    let mut taps = Vec::new();
    for tap in 0..shape.taps() {
        let at = [tap / shape.kernel[1], tap % shape.kernel[1]];
        let away =
            [0, 1].map(|a| (start[a] + padding[a]) as isize - (at[a] * dilation[a]) as isize);
        if [0, 1].iter().all(|&a| away[a].rem_euclid(stride[a] as isize) == 0) {
            taps.push(tap);
            window.taps.push([0, 1].map(|a| away[a].div_euclid(stride[a] as isize)));
        }
    }
    Phase { start, taps, window }
}

/// The weight of one group with input channels for rows; depth is output channel, then tap.
struct Turned<'a, T> {
    weight: &'a [T],
    shape: &'a Conv2dShape,
    taps: &'a [usize],
}

impl<T: Element, P: Packs<T>> Left<P> for Turned<'_, T> {
    fn pack(&self, isa: Isa, dst: &mut [P], rows: Range<usize>, depth: Range<usize>) {
        let n_taps = self.shape.taps();
        if n_taps == 1 {
            let lanes =
                Lanes { data: self.weight, lane_stride: 1, depth_stride: self.shape.depth() };
            return P::left(&lanes, isa, dst, rows, depth);
        }
        if self.taps.len() == n_taps {
            return P::left_runs(isa, dst, rows.len(), depth.len(), |at| {
                let (o, tap) = ((depth.start + at) / n_taps, (depth.start + at) % n_taps);
                let data = &self.weight[o * self.shape.depth() + rows.start * n_taps + tap..];
                (Lanes { data, lane_stride: n_taps, depth_stride: 1 }, n_taps - tap)
            });
        }
        if rows.len() < P::MR || !depth.len().is_multiple_of(P::STEP) {
            dst.fill(P::default());
        }
        for (at, p) in depth.enumerate() {
            let (o, tap) = (p / self.taps.len(), self.taps[p % self.taps.len()]);
            let w = &self.weight[o * self.shape.depth() + rows.start * n_taps + tap..];
            for (l, &w) in w.iter().step_by(n_taps).take(rows.len()).enumerate() {
                dst[P::left_place(l, at)] = P::pack_one(w);
            }
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
    assert_eq!(dweight.len(), shape.weight_elems(), "conv2d: weight gradient of {shape:?}");
    assert_eq!(dout.len(), shape.out_elems(), "conv2d: output gradient of {shape:?}");
    assert_eq!(x.len(), shape.in_elems(), "conv2d: input of {shape:?}");
    if depthwise::is_depthwise(shape) {
        return depthwise::weight_gradient(dweight, dout, x, shape);
    }
    if packs_narrow::<T>() {
        weight_gradient::<T, T::Narrow>(dweight, dout, x, shape);
    } else {
        weight_gradient::<T, T::Acc>(dweight, dout, x, shape);
    }
}

fn weight_gradient<T: Element, P: Packs<T>>(
    dweight: &mut [T],
    dout: &[T],
    x: &[T],
    shape: &Conv2dShape,
) {
    let (plan, window) = (WeightPlan::new::<P>(shape), shape.window());
    let n_pixels = shape.batch * shape.out_pixels();
    let cut_pixels = n_pixels.div_ceil(plan.n_cuts);
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
            store(&block, &[weight_partial::<T, P>(shape, &window, &block, dout, x, 0..n_pixels)]);
        });
        return;
    }
    let partials = tasks(plan.n_blocks() * plan.n_cuts, |t| {
        let (b, cut) = (t / plan.n_cuts, t % plan.n_cuts * cut_pixels);
        let pixels = cut.min(n_pixels)..n_pixels.min(cut + cut_pixels);
        weight_partial::<T, P>(shape, &window, &plan.block(shape, b), dout, x, pixels)
    });
    for (b, partials) in partials.chunks(plan.n_cuts).enumerate() {
        store(&plan.block(shape, b), partials);
    }
}

/// Patch rows below which a block is not halved to have more of them.
const MIN_BLOCK_DEPTH: usize = 256;

/// How the weight's gradient is cut into blocks and, where these are few, over pixels too: the
/// partial sums of a block are added in the order of the cuts.
pub(super) struct WeightPlan {
    groups: usize,
    blocks_out: usize,
    blocks_in: usize,
    pub(super) block_in: usize,
    pub(super) n_cuts: usize,
}

impl WeightPlan {
    pub(super) fn new<P: Packed>(shape: &Conv2dShape) -> Self {
        let block_in = (BLOCK_DEPTH / shape.taps()).clamp(1, shape.group_in());
        let blocks_out = shape.group_out().div_ceil(BLOCK_OUT);
        let groups = shape.cfg.groups;
        let mut plan = Self { groups, blocks_out, blocks_in: 1, block_in, n_cuts: 1 };
        plan.blocks_in = shape.group_in().div_ceil(block_in);
        // Smaller blocks first: cuts over pixels have partial sums to hold and to add.
        while plan.n_blocks() < MIN_TASKS && plan.block_in * shape.taps() >= 2 * MIN_BLOCK_DEPTH {
            plan.block_in = plan.block_in.div_ceil(2);
            plan.blocks_in = shape.group_in().div_ceil(plan.block_in);
        }
        let most = (shape.batch * shape.out_pixels()).div_ceil(MIN_CUT_PIXELS);
        plan.n_cuts = MIN_TASKS.div_ceil(plan.n_blocks()).clamp(1, most.max(1));
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

/// `dout * patches^T` of one block over some pixels.
fn weight_partial<T: Element, P: Packs<T>>(
    shape: &Conv2dShape,
    window: &Window,
    block: &WeightBlock,
    dout: &[T],
    x: &[T],
    pixels: Range<usize>,
) -> Vec<T::Acc> {
    let cols = block.n_in * shape.taps();
    let mut acc = vec![T::Acc::of(0.0); block.n_out * cols];
    if pixels.is_empty() {
        return acc;
    }
    let first_in = block.group * shape.group_in() + block.first_in;
    let first_out = block.group * shape.group_out() + block.first_out;
    let left = Pixels { dout, shape, first_out, start: pixels.start };
    let x = &x[first_in * shape.in_pixels()..];
    let right = Patches::new(x, window, shape.batch, block.n_in);
    let right = Transposed { patches: right, start: pixels.start };
    let sink = Dense { dst: Disjoint::new(&mut acc), start: 0, ld: cols, store: Store::Overwrite };
    tile::<P>(&left, &right, &sink, pixels.len(), 0..block.n_out, 0..cols);
    acc
}

/// The output's gradient with channels for rows, counted from `first_out` on, and the pixels of the
/// batch, from `start` on, for depth.
struct Pixels<'a, T> {
    dout: &'a [T],
    shape: &'a Conv2dShape,
    first_out: usize,
    start: usize,
}

impl<T: Element, P: Packs<T>> Left<P> for Pixels<'_, T> {
    fn pack(&self, isa: Isa, dst: &mut [P], rows: Range<usize>, depth: Range<usize>) {
        P::left_runs(isa, dst, rows.len(), depth.len(), |at| {
            let (n, pixel) = (self.shape.out_pixels(), self.start + depth.start + at);
            let plane = pixel / n * self.shape.out_channels + self.first_out + rows.start;
            let data = &self.dout[plane * n + pixel % n..];
            (Lanes { data, lane_stride: n, depth_stride: 1 }, n - pixel % n)
        });
    }
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

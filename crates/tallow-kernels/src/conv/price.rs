//! What convolutions hold beside their inputs and outputs.

use super::{
    BLOCK_DEPTH, BLOCK_OUT, Conv2dShape, MOST,
    backward::{WeightPlan, phases},
};
use crate::{Element, gemm::Cuts, product};

fn bytes<T: Element>(n_elems: usize) -> u64 {
    n_elems as u64 * size_of::<T::Acc>() as u64
}

fn is_narrow<T: Element>() -> bool {
    T::as_acc(&[]).is_none()
}

/// Bytes of a product with patches: the packed left operand of each group, and for each thread a tile.
fn product_bytes<T: Element>(
    groups: usize,
    (m, n): (usize, usize),
    depth: usize,
    n_threads: u64,
) -> u64 {
    let cuts = Cuts::new((m, n), MOST);
    let tile = product::right_elems(cuts.tile_rows, cuts.tile_cols, depth, is_narrow::<T>());
    bytes::<T>(groups * product::packed_elems(m, depth)) + n_threads * bytes::<T>(tile)
}

/// Bytes that [`conv2d`](super::conv2d) holds on `n_threads`: the packed weight, and for each thread
/// the patches of a tile and, for narrow elements, its sums.
pub fn conv2d_scratch_bytes<T: Element>(shape: &Conv2dShape, n_threads: u64) -> u64 {
    let n_pixels = shape.batch * shape.out_pixels();
    let sizes = (shape.group_out(), n_pixels);
    product_bytes::<T>(shape.cfg.groups, sizes, shape.depth(), n_threads)
}

/// Bytes that [`conv2d_backward_input`](super::conv2d_backward_input) holds on `n_threads`: as
/// [`conv2d_scratch_bytes`], of the phase that needs most.
pub fn conv2d_backward_input_scratch_bytes<T: Element>(shape: &Conv2dShape, n_threads: u64) -> u64 {
    let of_phase = |taps: usize, [rows, cols]: [usize; 2]| {
        let sizes = (shape.group_in(), shape.batch * rows * cols);
        product_bytes::<T>(shape.cfg.groups, sizes, shape.group_out() * taps, n_threads)
    };
    let phases = phases(shape);
    phases.iter().map(|p| of_phase(p.taps.len(), p.window.grid)).max().unwrap_or(0)
}

/// Bytes that [`conv2d_backward_weight`](super::conv2d_backward_weight) holds on `n_threads`: each the
/// packed operands of a block and its sums; where the blocks are few, the partial sums of all cuts.
pub fn conv2d_backward_weight_scratch_bytes<T: Element>(
    shape: &Conv2dShape,
    n_threads: u64,
) -> u64 {
    let depth = shape.depth().min(BLOCK_DEPTH.max(shape.taps()));
    let n_out = BLOCK_OUT.min(shape.group_out());
    let plan = WeightPlan::new(shape);
    let n_pixels = (shape.batch * shape.out_pixels()).div_ceil(plan.n_cuts);
    let tile = product::scratch_elems(n_out, depth, n_pixels, false);
    let (each, all) =
        if plan.n_cuts == 1 { (n_out * depth, 0) } else { (0, plan.n_cuts * shape.weight_elems()) };
    n_threads * bytes::<T>(tile + each) + bytes::<T>(all)
}

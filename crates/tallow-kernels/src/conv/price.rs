//! What convolutions hold beside their inputs and outputs.

use super::{
    BLOCK_OUT, Conv2dShape, MOST,
    backward::{WeightPlan, are_merged, merged_window, phases},
    depthwise::{self, is_depthwise},
    window::Window,
};
use crate::{Element, gemm::Cuts, micro::Packed, pack::packs_narrow, product};

/// `$f` of the elements that operands of `$t` are packed in.
macro_rules! packed {
    ($t:ty, $f:ident($($arg:expr),*)) => {
        if packs_narrow::<$t>() {
            $f::<$t, <$t as Element>::Narrow>($($arg),*)
        } else {
            $f::<$t, <$t as Element>::Acc>($($arg),*)
        }
    };
}

fn is_narrow<T: Element>() -> bool {
    T::as_acc(&[]).is_none()
}

/// Bytes of a product with patches: the packed left operand of each group, and for each thread a tile.
fn product_bytes<T: Element, P: Packed>(
    groups: usize,
    (m, n): (usize, usize),
    depth: usize,
    n_threads: u64,
) -> u64 {
    let cuts = Cuts::new::<P>((m, n), MOST);
    let tile = product::right_bytes::<P>(cuts.tile_rows, cuts.tile_cols, depth, is_narrow::<T>());
    let whole = groups * product::whole_elems::<P>(m, depth) * size_of::<P>();
    whole as u64 + n_threads * tile as u64
}

/// Bytes that [`conv2d`](super::conv2d) holds on `n_threads`: the packed weight, and for each thread
/// the patches of a tile and, for narrow elements, its sums.
pub fn conv2d_scratch_bytes<T: Element>(shape: &Conv2dShape, n_threads: u64) -> u64 {
    if is_depthwise(shape) {
        return depthwise::row_bytes::<T>(shape, n_threads);
    }
    let n_pixels = shape.batch * shape.out_pixels();
    let sizes = (shape.group_out(), n_pixels);
    packed!(T, product_bytes(shape.cfg.groups, sizes, shape.depth(), n_threads))
}

/// Bytes that [`conv2d_backward_input`](super::conv2d_backward_input) holds on `n_threads`: as
/// [`conv2d_scratch_bytes`], of the phase that needs most.
pub fn conv2d_backward_input_scratch_bytes<T: Element>(shape: &Conv2dShape, n_threads: u64) -> u64 {
    if is_depthwise(shape) {
        return depthwise::row_bytes::<T>(shape, n_threads);
    }
    let of_phase = |taps: usize, [rows, cols]: [usize; 2]| {
        let sizes = (shape.group_in(), shape.batch * rows * cols);
        packed!(T, product_bytes(shape.cfg.groups, sizes, shape.group_out() * taps, n_threads))
    };
    let phases = phases(shape);
    let one_by_one = phases.iter().map(|p| of_phase(p.taps.len(), p.window.grid)).max();
    let merged = are_merged(shape, &phases).then(|| {
        let Window { taps, grid, .. } = merged_window(&phases);
        let sizes = (phases.len() * shape.group_in(), shape.batch * grid[0] * grid[1]);
        let depth = shape.group_out() * taps.len();
        packed!(T, product_bytes(shape.cfg.groups, sizes, depth, n_threads))
    });
    one_by_one.max(merged).unwrap_or(0)
}

/// Bytes that [`conv2d_backward_weight`](super::conv2d_backward_weight) holds on `n_threads`: each the
/// packed operands of a block and its sums; where the blocks are few, the partial sums of all cuts.
pub fn conv2d_backward_weight_scratch_bytes<T: Element>(
    shape: &Conv2dShape,
    n_threads: u64,
) -> u64 {
    if is_depthwise(shape) {
        return depthwise::weight_bytes::<T>(shape, n_threads);
    }
    match packs_narrow::<T>() {
        true => weight_bytes::<T::Narrow>(shape, n_threads),
        false => weight_bytes::<T::Acc>(shape, n_threads),
    }
}

fn weight_bytes<P: Packed>(shape: &Conv2dShape, n_threads: u64) -> u64 {
    let n_out = BLOCK_OUT.min(shape.group_out());
    let plan = WeightPlan::new::<P>(shape);
    let depth = plan.block_in * shape.taps();
    let n_pixels = (shape.batch * shape.out_pixels()).div_ceil(plan.n_cuts);
    let tile = product::scratch_bytes::<P>(n_out, depth, n_pixels, false) as u64;
    let sums = |n: usize| (n * size_of::<P::Sum>()) as u64;
    if plan.n_cuts == 1 {
        n_threads * (tile + sums(n_out * depth))
    } else {
        n_threads * tile + sums(plan.n_cuts * shape.weight_elems())
    }
}

//! What convolutions hold beside their inputs and outputs, and beside what the products of one tile
//! pack ([`gemm_packing_bytes`](crate::gemm::gemm_packing_bytes)).

use super::{
    BLOCK_DEPTH, BLOCK_OUT, Conv2dShape,
    backward::{WeightPlan, input_block},
    patches::tiles,
};
use crate::Element;

/// The widest tile for patches of `depth` rows.
fn widest(shape: &Conv2dShape, depth: usize, n_images: usize) -> usize {
    tiles(shape, depth, 0..n_images).iter().map(|tile| tile.width()).max().unwrap_or(0)
}

fn bytes<T: Element>(n_sums: usize) -> u64 {
    n_sums as u64 * size_of::<T::Acc>() as u64
}

fn is_narrow<T: Element>() -> bool {
    T::as_acc(&[]).is_none()
}

/// Bytes that [`conv2d`](super::conv2d) holds on `n_threads`: each a tile of patches and of products;
/// narrow elements also one widened copy of the weight.
pub fn conv2d_scratch_bytes<T: Element>(shape: &Conv2dShape, n_threads: u64) -> u64 {
    let width = widest(shape, shape.depth(), shape.batch);
    // A tile of one image needs no patches where they are the input itself.
    let is_input = shape.is_pointwise() && !is_narrow::<T>() && shape.out_pixels() >= width;
    let patches = if is_input { 0 } else { shape.depth() * width };
    let weight = if is_narrow::<T>() { shape.weight_elems() } else { 0 };
    n_threads * bytes::<T>(patches + shape.group_out() * width) + bytes::<T>(weight)
}

/// Bytes that [`conv2d_backward_input`](super::conv2d_backward_input) holds on `n_threads`: each a tile
/// of patch gradients; narrow elements also, each, the sums of a block of channels and a tile of the
/// output gradient, and all together one widened copy of the weight.
pub fn conv2d_backward_input_scratch_bytes<T: Element>(shape: &Conv2dShape, n_threads: u64) -> u64 {
    let block = input_block::<T>(shape);
    let rows = block * shape.taps();
    let width = widest(shape, rows, 1);
    let patches = if shape.is_pointwise() { 0 } else { rows * width };
    let (narrow, weight) = if is_narrow::<T>() {
        (block * shape.in_pixels() + shape.group_out() * width, shape.weight_elems())
    } else {
        (0, 0)
    };
    n_threads * bytes::<T>(patches + narrow) + bytes::<T>(weight)
}

/// Bytes that [`conv2d_backward_weight`](super::conv2d_backward_weight) holds on `n_threads`: each a tile
/// of patches, of the output gradient, and the sums of a block; where the blocks are few, the partial
/// sums of all cuts.
pub fn conv2d_backward_weight_scratch_bytes<T: Element>(
    shape: &Conv2dShape,
    n_threads: u64,
) -> u64 {
    let depth = shape.depth().min(BLOCK_DEPTH.max(shape.taps()));
    let width = widest(shape, shape.depth().min(BLOCK_DEPTH), shape.batch);
    let n_out = BLOCK_OUT.min(shape.group_out());
    let plan = WeightPlan::new(shape);
    let (each, all) =
        if plan.n_cuts == 1 { (n_out * depth, 0) } else { (0, plan.n_cuts * shape.weight_elems()) };
    n_threads * bytes::<T>((depth + n_out) * width + each) + bytes::<T>(all)
}

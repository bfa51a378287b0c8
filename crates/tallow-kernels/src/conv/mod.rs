//! 2-D convolution (cross-correlation) and both its gradients, as products with patches.
//!
//! The patch matrix ("im2col", Chellapilla 2006) is never made: its elements are read from the input
//! while a product packs its operands. [`conv2d_scalar`] is the specification.

// N batch · C input channels · O output channels · H W input · P Q output · R S kernel
// K = C/groups * R * S, the depth of the forward product

use crate::{
    Element, Error, Real,
    gemm::{Cuts, Mat, Rows},
    pack::{Lanes, Packs, packs_narrow},
    par::Disjoint,
    product::{self, Sink, Whole},
};
use planes::Planes;
use rayon::prelude::*;
use window::{Patches, Window};

mod backward;
mod depthwise;
pub(crate) mod narrow;
mod planes;
mod price;
pub(crate) mod window;

pub use backward::{conv2d_backward_bias, conv2d_backward_input, conv2d_backward_weight};
pub use price::{
    conv2d_backward_input_scratch_bytes, conv2d_backward_weight_scratch_bytes, conv2d_scratch_bytes,
};

/// Most channels and pixels of one tile of the output or of the input's gradient.
const MOST: (usize, usize) = (768, 256);
/// Output channels of one block of the weight gradient.
const BLOCK_OUT: usize = 256;
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
    pub const UNIT: Self = Self { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 };
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
            return Err(Error::Channels { in_channels: channels, weight, groups });
        }
        let output = [
            out_extent(op, "height", h, r, cfg.stride[0], cfg.padding[0], cfg.dilation[0])?,
            out_extent(op, "width", w, s, cfg.stride[1], cfg.padding[1], cfg.dilation[1])?,
        ];
        let batch = input[0];
        check_elems(op, &input)?;
        check_elems(op, &weight)?;
        check_elems(op, &[batch, out_channels, output[0], output[1]])?;
        let (input, kernel) = ([h, w], [r, s]);
        Ok(Self { batch, channels, out_channels, input, output, kernel, cfg })
    }

    /// `[N, O, P, Q]`.
    pub fn out_dims(&self) -> [usize; 4] {
        [self.batch, self.out_channels, self.output[0], self.output[1]]
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
    /// What each tap reads around the pixels of the output.
    fn window(&self) -> Window {
        let Conv2dConfig { stride, padding, dilation, .. } = self.cfg;
        let tap = |t: usize| {
            let at = [t / self.kernel[1], t % self.kernel[1]];
            [0, 1].map(|a| (at[a] * dilation[a]) as isize - padding[a] as isize)
        };
        Window {
            grid: self.output,
            step: stride,
            source: self.input,
            image_elems: self.channels * self.in_pixels(),
            taps: (0..self.taps()).map(tap).collect(),
        }
    }
}

/// # Errors
/// If the product of `dims` overflows what one allocation may hold of the widest element.
pub(crate) fn check_elems(op: &'static str, dims: &[usize]) -> Result<(), Error> {
    let bytes = dims.iter().try_fold(size_of::<f64>(), |n, &d| n.checked_mul(d));
    match bytes {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
        _ => Err(Error::TooLarge { op, dims: dims.to_vec() }),
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
    let padded = padding.checked_mul(2).and_then(|p| p.checked_add(extent));
    let padded = padded.ok_or_else(|| Error::TooLarge { op, dims: vec![extent, padding] })?;
    if window > padded {
        return Err(Error::Window { op, axis, window, padded });
    }
    Ok((padded - window) / stride + 1)
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
    assert_eq!(weight.len(), shape.weight_elems(), "conv2d: weight of {shape:?}");
    assert!(bias.is_none_or(|b| b.len() == shape.out_channels), "conv2d: bias of {shape:?}");
    if out.is_empty() {
        return;
    }
    if depthwise::is_depthwise(shape) {
        return depthwise::forward(out, x, weight, bias, shape);
    }
    if packs_narrow::<T>() {
        forward::<T, T::Narrow>(out, x, weight, bias, shape);
    } else {
        forward::<T, T::Acc>(out, x, weight, bias, shape);
    }
}

fn forward<T: Element, P: Packs<T>>(
    out: &mut [T],
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    shape: &Conv2dShape,
) {
    let (depth, group_out) = (shape.depth(), shape.group_out());
    let window = shape.window();
    let dst = Disjoint::new(out);
    let image_elems = shape.out_channels * shape.out_pixels();
    let whole = ([0, 0], [1, 1]);
    let groups = (0..shape.cfg.groups).map(|group| {
        let weight = &weight[group * group_out * depth..][..group_out * depth];
        let left = Rows(Lanes::rows(Mat::new(weight, group_out, depth)));
        let x = x.get(group * shape.group_in() * shape.in_pixels()..).unwrap_or_default();
        let start = (group * group_out * shape.out_pixels(), image_elems);
        let sink = Planes::new(dst, start, shape.output, &window, whole);
        Group {
            left: Whole::<P>::new(&left, group_out, depth),
            right: Patches::new(x, &window, shape.batch, shape.group_in()),
            sink: sink.with_bias(bias.map(|b| &b[group * group_out..][..group_out])),
        }
    });
    product(groups.collect(), (group_out, shape.batch * shape.out_pixels()), depth);
}

/// The operands and the destination of one group's product.
struct Group<'a, T, P, S> {
    left: Whole<P>,
    right: Patches<'a, T>,
    sink: S,
}

/// The products of all groups, each `m x n` of the given depth.
fn product<T: Element, P: Packs<T>, S: Sink<T::Acc> + Sync>(
    groups: Vec<Group<T, P, S>>,
    (m, n): (usize, usize),
    depth: usize,
) {
    let cuts = Cuts::new::<P>((m, n), MOST);
    (0..groups.len() * cuts.n_tiles).into_par_iter().for_each(|t| {
        let Group { left, right, sink } = &groups[t / cuts.n_tiles];
        let (rows, cols) = cuts.tile(t % cuts.n_tiles, m, n);
        product::tile::<P>(left, right, sink, depth, rows.clone(), cols.clone());
        sink.finish(rows, cols);
    });
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
    let Conv2dConfig { stride, padding, dilation, .. } = shape.cfg;
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

//! Convolution and pooling.

// N batch · C input channels · O output channels · G groups · H W input · P Q output · R S kernel

use super::widen;
use crate::{
    Result,
    ops::{Conv2dConfig, Divisor, Pool2dConfig},
};
use candle_core::{D, DType, Device, Tensor};

/// Positions along one axis.
#[derive(Clone, Copy)]
struct Axis {
    input: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
}

impl Axis {
    fn of_pool(x: &Tensor, cfg: Pool2dConfig) -> Result<[Self; 2]> {
        let (_, _, h, w) = x.dims4()?;
        let Pool2dConfig { kernel, stride, padding } = cfg;
        Ok([0, 1].map(|i| Self {
            input: [h, w][i],
            kernel: kernel[i],
            stride: stride[i],
            padding: padding[i],
            dilation: 1,
        }))
    }

    /// Input pixels between the first and the last that the windows may start at.
    fn slack(&self) -> usize {
        self.input + 2 * self.padding - self.dilation * (self.kernel - 1) - 1
    }

    fn output(&self) -> usize {
        self.slack() / self.stride + 1
    }

    /// Pixels at the end that no window covers.
    fn rest(&self) -> usize {
        self.slack() % self.stride
    }

    /// Where tap `r` of each window lies in the padded input.
    fn padded_tap(&self, r: usize) -> impl Iterator<Item = usize> {
        let &Self { stride, dilation, .. } = self;
        (0..self.output()).map(move |p| p * stride + r * dilation)
    }

    /// Where tap `r` of each window lies in the input; beyond its edge the nearest pixel, which a
    /// pooling window holds too.
    fn nearest_tap(&self, r: usize) -> impl Iterator<Item = usize> {
        let &Self { padding, input, .. } = self;
        self.padded_tap(r).map(move |y| y.saturating_sub(padding).min(input - 1))
    }
}

fn ids(ids: impl Iterator<Item = usize>, device: &Device) -> candle_core::Result<Tensor> {
    let ids: Vec<u32> = ids.map(|i| i as u32).collect();
    let n = ids.len();
    Tensor::from_vec(ids, n, device)
}

/// As [`ops::conv2d`](crate::ops::conv2d), but the patch matrix is whole where candle's own
/// convolution would have a wrong gradient; a bias adds one rounding.
/// # Errors
/// As there.
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    cfg: Conv2dConfig,
) -> Result<Tensor> {
    let ((_, _, h, w), (_, _, r, s)) = (x.dims4()?, weight.dims4()?);
    let axes = [0, 1].map(|i| Axis {
        input: [h, w][i],
        kernel: [r, s][i],
        stride: cfg.stride[i],
        padding: cfg.padding[i],
        dilation: cfg.dilation[i],
    });
    let out = if candle_is_right(x.dtype(), &axes) {
        let [Axis { padding, stride, dilation, .. }, _] = axes;
        x.contiguous()?.conv2d(&weight.contiguous()?, padding, stride, dilation, cfg.groups)?
    } else {
        product_with_patches(x, weight, &axes, cfg.groups)?
    };
    match bias {
        None => Ok(out),
        Some(bias) => {
            let bias = widen("conv2d", bias)?.reshape((1, (), 1, 1))?;
            Ok(widen("conv2d", &out)?.broadcast_add(&bias)?.to_dtype(x.dtype())?)
        }
    }
}

/// Candle's backward derives both axes' output padding from the height and subtracts unsigned
/// sizes; in half precision its accumulators are not ours to choose.
fn candle_is_right(dtype: DType, [y, z]: &[Axis; 2]) -> bool {
    let same = |f: fn(&Axis) -> usize| f(y) == f(z);
    matches!(dtype, DType::F32 | DType::F64)
        && same(|a| a.stride)
        && same(|a| a.padding)
        && same(|a| a.dilation)
        && same(Axis::rest)
        && [y, z].iter().all(|a| a.rest() < a.input)
}

/// One product a group: `weight` `[G, O/G, R S C/G]` by patches `[G, R S C/G, N P Q]`.
fn product_with_patches(
    x: &Tensor,
    weight: &Tensor,
    axes: &[Axis; 2],
    groups: usize,
) -> Result<Tensor> {
    let ((n, c, _, _), (o, c_per_group, r, s)) = (x.dims4()?, weight.dims4()?);
    let [y, z] = axes;
    let (p, q) = (y.output(), z.output());
    // Widened, because backward adds up the gradients of a pixel's taps in this dtype.
    let padded = widen("conv2d", &x.transpose(0, 1)?)?
        .pad_with_zeros(2, y.padding, y.padding)?
        .pad_with_zeros(3, z.padding, z.padding)?
        .contiguous()?;
    let mut taps = Vec::with_capacity(r * s);
    for i in 0..r {
        let rows = padded.index_select(&ids(y.padded_tap(i), x.device())?, 2)?;
        for j in 0..s {
            let tap = rows.index_select(&ids(z.padded_tap(j), x.device())?, 3)?;
            taps.push(tap.reshape((groups, c / groups, n * p * q))?);
        }
    }
    let patches = Tensor::cat(&taps, 1)?.to_dtype(x.dtype())?;
    let weight =
        weight.permute((0, 2, 3, 1))?.reshape((groups, o / groups, r * s * c_per_group))?;
    Ok(weight.matmul(&patches)?.reshape((o, n, p, q))?.transpose(0, 1)?.contiguous()?)
}

/// As [`ops::max_pool2d`](crate::ops::max_pool2d).
/// # Errors
/// As there.
pub fn max_pool2d(x: &Tensor, cfg: Pool2dConfig) -> Result<Tensor> {
    let [y, z] = Axis::of_pool(x, cfg)?;
    // Widened, because backward adds up the gradients of overlapping windows in this dtype.
    let wide = widen("max_pool2d", x)?;
    let mut best: Option<Tensor> = None;
    for i in 0..y.kernel {
        let rows = wide.index_select(&ids(y.nearest_tap(i), x.device())?, 2)?;
        for j in 0..z.kernel {
            let tap = rows.index_select(&ids(z.nearest_tap(j), x.device())?, 3)?;
            best = Some(match best {
                None => tap,
                // The first maximum wins, and NaN, the one value that differs from itself.
                Some(best) => {
                    let wins = (tap.gt(&best)? + tap.ne(&tap)?)?;
                    wins.where_cond(&tap, &best)?
                }
            });
        }
    }
    Ok(best.expect("a window has a tap").to_dtype(x.dtype())?)
}

/// As [`ops::avg_pool2d`](crate::ops::avg_pool2d).
/// # Errors
/// As there.
pub fn avg_pool2d(x: &Tensor, cfg: Pool2dConfig, divisor: Divisor) -> Result<Tensor> {
    let axes = Axis::of_pool(x, cfg)?;
    let mut out = widen("avg_pool2d", x)?;
    // The mean over a window is the mean over its rows of the means over its columns.
    for (dim, axis) in [(3, axes[1]), (2, axes[0])] {
        let padded = out.pad_with_zeros(dim, axis.padding, axis.padding)?;
        let mut sum = padded.index_select(&ids(axis.padded_tap(0), x.device())?, dim)?;
        for r in 1..axis.kernel {
            sum = (sum + padded.index_select(&ids(axis.padded_tap(r), x.device())?, dim)?)?;
        }
        let inside = |first: usize| {
            let taps = first..first + axis.kernel;
            taps.filter(|y| (axis.padding..axis.padding + axis.input).contains(y)).count()
        };
        let n: Vec<f64> = match divisor {
            Divisor::Window => vec![axis.kernel as f64; axis.output()],
            Divisor::Inside => axis.padded_tap(0).map(|y| inside(y) as f64).collect(),
        };
        let n = Tensor::new(n, &Device::Cpu)?.to_dtype(out.dtype())?.to_device(x.device())?;
        out = sum.broadcast_div(&if dim == 2 { n.unsqueeze(1)? } else { n })?;
    }
    Ok(out.to_dtype(x.dtype())?)
}

/// As [`ops::global_avg_pool2d`](crate::ops::global_avg_pool2d).
/// # Errors
/// As there.
pub fn global_avg_pool2d(x: &Tensor) -> Result<Tensor> {
    let planes = widen("global_avg_pool2d", x)?.flatten_from(2)?;
    Ok(planes.mean(D::Minus1)?.to_dtype(x.dtype())?)
}

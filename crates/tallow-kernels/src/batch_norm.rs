//! Batch normalisation (Ioffe & Szegedy 2015), alone or followed by relu.
//!
//! The backward pass needs the input and the statistics (two numbers a channel): the normalised
//! values, and the mask of a fused relu, are computed again. Statistics accumulate in `f64`.

// N batch · C channels · M pixels of a plane

use crate::{Element, Error, Real, isa::vectorized, par, reduce};

/// `[N, C, M]`: batch, channels, pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchNormShape {
    /// Batch.
    pub batch: usize,
    /// Channels.
    pub channels: usize,
    /// Pixels of one plane.
    pub pixels: usize,
}

impl BatchNormShape {
    /// Values that one channel's statistics are made of.
    pub fn values_per_channel(&self) -> usize {
        self.batch * self.pixels
    }
    fn elems(&self) -> usize {
        self.batch * self.channels * self.pixels
    }
    fn plane<'a, T>(&self, x: &'a [T], n: usize, c: usize) -> &'a [T] {
        &x[(n * self.channels + c) * self.pixels..][..self.pixels]
    }
}

/// Mean and biased variance of each channel; what the backward pass keeps (16 bytes a channel).
#[derive(Clone, Debug, PartialEq)]
pub struct ChannelStats {
    /// Mean of each channel.
    pub mean: Vec<f64>,
    /// Variance of each channel, divided by the number of values.
    pub var: Vec<f64>,
}

/// What follows the normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Nothing.
    Identity,
    /// `max(y, 0)`.
    Relu,
}

/// Where the statistics came from, which decides whether gradients flow through them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Computed from the input itself (training).
    Batch,
    /// Given from outside (evaluation, frozen).
    Given,
}

/// Scale and shift of a normalisation; absent means 1 and 0.
#[derive(Clone, Copy, Debug)]
pub struct Affine<'a, R> {
    /// Scale of each channel.
    pub weight: Option<&'a [R]>,
    /// Shift of each channel.
    pub bias: Option<&'a [R]>,
}

impl<R: Real> Affine<'_, R> {
    fn weight(&self, c: usize) -> f64 {
        self.weight.map_or(1.0, |w| w[c].f64())
    }
    fn bias(&self, c: usize) -> f64 {
        self.bias.map_or(0.0, |b| b[c].f64())
    }
    fn assert_channels(&self, channels: usize) {
        assert!(self.weight.is_none_or(|w| w.len() == channels), "batch norm: weight length");
        assert!(self.bias.is_none_or(|b| b.len() == channels), "batch norm: bias length");
    }
}

/// Statistics of each channel in two passes: the mean, then the squares about it.
/// # Errors
/// If there is only one value per channel, whose variance would be 0 whatever the value.
/// # Panics
/// If the length of `x` does not match `shape`.
pub fn channel_stats<T: Element>(x: &[T], shape: &BatchNormShape) -> Result<ChannelStats, Error> {
    assert_eq!(x.len(), shape.elems(), "batch norm: input of {shape:?}");
    let n_values = shape.values_per_channel();
    if n_values < 2 {
        let shape = [shape.batch, shape.channels, shape.pixels];
        return Err(Error::OneValuePerChannel { shape });
    }
    let stats = par::tasks(shape.channels, |c| {
        let sum: f64 = (0..shape.batch).map(|n| reduce::sum(shape.plane(x, n, c))).sum();
        let mean = sum / n_values as f64;
        let squares: f64 =
            (0..shape.batch).map(|n| squares_about(shape.plane(x, n, c), mean)).sum();
        (mean, squares / n_values as f64)
    });
    let (mean, var) = stats.into_iter().unzip();
    Ok(ChannelStats { mean, var })
}

fn squares_about<T: Element>(x: &[T], mean: f64) -> f64 {
    reduce::lanes(
        x,
        #[inline(always)]
        |v| {
            let d = v.widen().f64() - mean;
            d * d
        },
    )
}

/// The map of one channel: `y = (x - mean) * scale + bias`.
///
/// The mean is kept as two numbers of the arithmetic's type: where `x` is close to a large mean,
/// `x - hi` is exact and `lo` carries what rounding the mean would lose.
struct ChannelMap<R> {
    hi: R,
    lo: R,
    scale: R,
    bias: R,
}

impl<R: Real> ChannelMap<R> {
    fn new(stats: &ChannelStats, affine: &Affine<R>, eps: f64, c: usize) -> Self {
        let (mean, rstd) = (stats.mean[c], 1.0 / (stats.var[c] + eps).sqrt());
        let hi = R::of(mean);
        Self {
            hi,
            lo: R::of(mean - hi.f64()),
            scale: R::of(affine.weight(c) * rstd),
            bias: R::of(affine.bias(c)),
        }
    }
    #[inline(always)]
    fn centred(&self, x: R) -> R {
        (x - self.hi) - self.lo
    }
    #[inline(always)]
    fn y(&self, x: R) -> R {
        self.centred(x) * self.scale + self.bias
    }
    /// `d` where the relu of `y(x)` lets it through.
    #[inline(always)]
    fn masked<T: Element<Acc = R>>(&self, x: T, d: T) -> f64 {
        if self.y(x.widen()) <= R::of(0.0) { 0.0 } else { d.widen().f64() }
    }
}

/// `relu` that lets NaN through.
#[inline(always)]
fn relu<R: Real>(y: R) -> R {
    if y <= R::of(0.0) { R::of(0.0) } else { y }
}

/// `out = (x - mean) / sqrt(var + eps) * weight + bias`, then relu if asked.
/// # Panics
/// If a length does not match `shape`.
pub fn batch_norm<T: Element>(
    out: &mut [T],
    x: &[T],
    stats: &ChannelStats,
    affine: Affine<T::Acc>,
    shape: &BatchNormShape,
    eps: f64,
    then: Then,
) {
    assert_eq!(out.len(), shape.elems(), "batch norm: output of {shape:?}");
    assert_eq!(x.len(), shape.elems(), "batch norm: input of {shape:?}");
    assert_eq!(stats.mean.len(), shape.channels, "batch norm: statistics of {shape:?}");
    affine.assert_channels(shape.channels);
    par::rows(
        out,
        shape.pixels,
        #[inline(always)]
        |plane, out| {
            let map = ChannelMap::new(stats, &affine, eps, plane % shape.channels);
            let x = &x[plane * shape.pixels..][..shape.pixels];
            let inputs = out.iter_mut().zip(x);
            match then {
                Then::Identity => {
                    vectorized(
                        #[inline(always)]
                        || inputs.for_each(|(o, x)| *o = T::narrow(map.y(x.widen()))),
                    );
                }
                Then::Relu => {
                    vectorized(
                        #[inline(always)]
                        || inputs.for_each(|(o, x)| *o = T::narrow(relu(map.y(x.widen())))),
                    );
                }
            }
        },
    );
}

/// Gradients of a batch normalisation.
pub struct BatchNormGrads {
    /// Gradient of the scale, one a channel.
    pub dweight: Vec<f64>,
    /// Gradient of the shift, one a channel.
    pub dbias: Vec<f64>,
}

/// Gradients from `dout`; `dx` is overwritten where it is asked for.
///
/// With `xhat = (x - mean) * rstd`, `g` the gradient after the relu's mask and `m` values a channel:
/// `dbias = sum g`, `dweight = sum g xhat`, and `dx = weight rstd (g - dbias / m - xhat dweight / m)`
/// for batch statistics, `dx = weight rstd g` for given ones.
/// # Panics
/// If a length does not match `shape`.
pub fn batch_norm_backward<T: Element>(
    dx: Option<&mut [T]>,
    x: &[T],
    dout: &[T],
    stats: &ChannelStats,
    source: Source,
    affine: Affine<T::Acc>,
    shape: &BatchNormShape,
    eps: f64,
    then: Then,
) -> BatchNormGrads {
    assert_eq!(x.len(), shape.elems(), "batch norm: input of {shape:?}");
    assert_eq!(dout.len(), shape.elems(), "batch norm: output gradient of {shape:?}");
    assert_eq!(stats.mean.len(), shape.channels, "batch norm: statistics of {shape:?}");
    affine.assert_channels(shape.channels);
    let sums = par::tasks(shape.channels, |c| {
        let map = ChannelMap::new(stats, &affine, eps, c);
        let mean = stats.mean[c];
        (0..shape.batch).fold((0.0, 0.0), |(sum, dot), n| {
            let (x, d) = (shape.plane(x, n, c), shape.plane(dout, n, c));
            let (s, t) = match then {
                Then::Identity => reduce::sums2(
                    x,
                    d,
                    #[inline(always)]
                    |x, d| {
                        let d = d.widen().f64();
                        (d, d * (x.widen().f64() - mean))
                    },
                ),
                Then::Relu => reduce::sums2(
                    x,
                    d,
                    #[inline(always)]
                    |x, d| {
                        let d = map.masked(x, d);
                        (d, d * (x.widen().f64() - mean))
                    },
                ),
            };
            (sum + s, dot + t)
        })
    });
    let rstd = |c: usize| 1.0 / (stats.var[c] + eps).sqrt();
    let dbias: Vec<f64> = sums.iter().map(|s| s.0).collect();
    let dweight: Vec<f64> = sums.iter().enumerate().map(|(c, s)| s.1 * rstd(c)).collect();
    let m = shape.values_per_channel() as f64;
    if let Some(dx) = dx {
        assert_eq!(dx.len(), shape.elems(), "batch norm: input gradient of {shape:?}");
        par::rows(
            dx,
            shape.pixels,
            #[inline(always)]
            |plane, dx| {
                let c = plane % shape.channels;
                let map = ChannelMap::new(stats, &affine, eps, c);
                // The three terms may cancel to a sliver of each, so they are kept in f64.
                let (scale, mean, rstd) = (affine.weight(c) * rstd(c), stats.mean[c], rstd(c));
                let (mean_g, mean_gx) = match source {
                    Source::Batch => (dbias[c] / m, dweight[c] / m),
                    Source::Given => (0.0, 0.0),
                };
                let (x, dout) = (shape.plane(x, 0, plane), shape.plane(dout, 0, plane));
                let (shift, slope) = (scale * mean_g, scale * rstd * mean_gx);
                let of = |x: T, g: f64| {
                    T::narrow(T::Acc::of(scale * g - shift - (x.widen().f64() - mean) * slope))
                };
                let inputs = dx.iter_mut().zip(x).zip(dout);
                match then {
                    Then::Identity => vectorized(
                        #[inline(always)]
                        || {
                            inputs.for_each(|((dx, &x), d)| *dx = of(x, d.widen().f64()));
                        },
                    ),
                    Then::Relu => vectorized(
                        #[inline(always)]
                        || {
                            inputs.for_each(|((dx, &x), &d)| *dx = of(x, map.masked(x, d)));
                        },
                    ),
                }
            },
        );
    }
    BatchNormGrads { dweight, dbias }
}

//! Batch, layer and RMS normalisation.
//!
//! Scale and shift may be of another float type than the input: activations in bf16 with f32
//! parameters are the usual mixed precision. Statistics accumulate in f64.

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, operands, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor};
use std::{
    borrow::Cow,
    sync::{Arc, OnceLock},
};
pub use tallow_kernels::batch_norm::{ChannelStats, Then};
use tallow_kernels::{
    Element, Real,
    batch_norm::{self as bn, Affine, BatchNormShape, Source},
    norm,
};

/// Scale and shift need exactly `n` elements; a shift needs a scale.
fn check_affine(
    op: &'static str,
    n: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<()> {
    for (what, t) in [("weight", weight), ("bias", bias)] {
        if let Some(t) = t
            && t.dims() != [n]
        {
            let (found, expected) = (t.dims().to_vec(), format!("[{n}]"));
            return Err(Error::Shape { op, what, found, expected });
        }
    }
    if let (None, Some(bias)) = (weight, bias) {
        let (found, expected) = (bias.dims().to_vec(), "absent without a weight".to_string());
        return Err(Error::Shape { op, what: "bias", found, expected });
    }
    Ok(())
}

struct BatchNorm {
    shape: BatchNormShape,
    eps: f64,
    then: Then,
    source: Source,
    /// Set by forward for [`Source::Batch`], from the start for [`Source::Given`].
    stats: Arc<OnceLock<ChannelStats>>,
}

impl Kernel for BatchNorm {
    const NAME: &'static str = "batch_norm2d";
    const OPERANDS: &'static [&'static str] = &["input", "weight", "bias"];
    const SAME_DTYPE: bool = false;

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let x = args[0].dense::<T>()?;
        if self.source == Source::Batch {
            // A second forward of one op cannot happen: `apply` makes a new one each time.
            let _ = self.stats.set(bn::channel_stats(&x, &self.shape)?);
        }
        let stats = self.stats.get().expect("statistics are set before they are read");
        let (weight, bias) = affine::<T>(Self::NAME, args)?;
        let affine = Affine { weight: weight.as_deref(), bias: bias.as_deref() };
        let mut out = vec![T::default(); x.len()];
        bn::batch_norm(&mut out, &x, stats, affine, &self.shape, self.eps, self.then);
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let (x, dout) = (args[0].dense::<T>()?, dout.dense::<T>()?);
        let stats = self.stats.get().expect("forward ran before backward");
        let (weight, bias) = affine::<T>(Self::NAME, args)?;
        let affine = Affine { weight: weight.as_deref(), bias: bias.as_deref() };
        let mut dx = args[0].room::<T>();
        let grads = bn::batch_norm_backward(
            dx.as_deref_mut(),
            &x,
            &dout,
            stats,
            self.source,
            affine,
            &self.shape,
            self.eps,
            self.then,
        );
        let mut all = vec![dx.map(|dx| tensor(dx, args[0].shape())).transpose()?.flatten()];
        for (arg, d) in args[1..].iter().zip([grads.dweight, grads.dbias]) {
            all.push(if arg.wanted { arg.gradient(Self::NAME, d)? } else { None });
        }
        Ok(all)
    }
}

/// A scale or a shift in the accumulator type of `T`.
type Widened<'a, T> = Option<Cow<'a, [<T as Element>::Acc]>>;

/// Scale and shift among `args`, in the accumulator type.
fn affine<'a, T: Scalar>(
    op: &'static str,
    args: &[Arg<'a>],
) -> Result<(Widened<'a, T>, Widened<'a, T>)> {
    let get = |i: usize| args.get(i).map(|a| a.as_type::<T::Acc>(op)).transpose();
    Ok((get(1)?, get(2)?))
}

fn batch_norm_shape(x: &Tensor) -> Result<BatchNormShape> {
    match *x.dims() {
        [batch, channels, ref pixels @ ..] => {
            Ok(BatchNormShape { batch, channels, pixels: pixels.iter().product() })
        }
        _ => Err(Error::Shape {
            op: BatchNorm::NAME,
            what: "input",
            found: x.dims().to_vec(),
            expected: "[batch, channels, ...]".to_string(),
        }),
    }
}

/// Normalises each channel of `x` `[N, C, ...]` by its own batch's statistics, then `then`.
///
/// Returns the output and the statistics (mean and biased variance, f64) for the caller to fold into
/// running ones: nothing is updated here. With `Then::Relu` the relu is fused and keeps nothing.
/// Keeps `x` and 16 bytes a channel.
/// # Errors
/// If there is only one value per channel, or shapes do not fit.
pub fn batch_norm2d(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    then: Then,
) -> Result<(Tensor, ChannelStats)> {
    let shape = batch_norm_shape(x)?;
    check_affine(BatchNorm::NAME, shape.channels, weight, bias)?;
    if shape.values_per_channel() < 2 {
        let shape = [shape.batch, shape.channels, shape.pixels];
        return Err(tallow_kernels::Error::OneValuePerChannel { shape }.into());
    }
    if !x.device().is_cpu() {
        return composed::batch_norm2d(x, weight, bias, eps, then);
    }
    let stats = Arc::new(OnceLock::new());
    let op = BatchNorm { shape, eps, then, source: Source::Batch, stats: stats.clone() };
    let fallback = || unreachable!("x is on the CPU");
    let out = apply(op, &operands(x, weight, bias), fallback)?;
    Ok((out, stats.get().expect("forward set the statistics").clone()))
}

/// Normalises each channel of `x` `[N, C, ...]` by the statistics given (evaluation, or frozen).
///
/// Gradients flow to `x`, `weight` and `bias`, not through the statistics.
/// # Errors
/// If shapes do not fit.
pub fn batch_norm2d_given(
    x: &Tensor,
    stats: &ChannelStats,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    then: Then,
) -> Result<Tensor> {
    let shape = batch_norm_shape(x)?;
    check_affine(BatchNorm::NAME, shape.channels, weight, bias)?;
    for n in [stats.mean.len(), stats.var.len()] {
        if n != shape.channels {
            let (found, expected) = (vec![n], format!("[{}]", shape.channels));
            let (op, what) = (BatchNorm::NAME, "statistics");
            return Err(Error::Shape { op, what, found, expected });
        }
    }
    let kept = Arc::new(OnceLock::from(stats.clone()));
    let op = BatchNorm { shape, eps, then, source: Source::Given, stats: kept };
    let fallback = || composed::batch_norm2d_given(x, stats, weight, bias, eps, then);
    apply(op, &operands(x, weight, bias), fallback)
}

/// Layer norm or RMS norm: both work on rows.
struct RowNorm {
    kind: Row,
    eps: f64,
}

#[derive(Clone, Copy, PartialEq)]
enum Row {
    Layer,
    Rms,
}

impl Kernel for RowNorm {
    const NAME: &'static str = "row norm";
    const OPERANDS: &'static [&'static str] = &["input", "weight", "bias"];
    const SAME_DTYPE: bool = false;

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (x, cols) = (args[0].dense::<T>()?, args[0].last_dim());
        let (w, b) = affine::<T>(Self::NAME, args)?;
        let (w, b) = (w.as_deref(), b.as_deref());
        let mut out = vec![T::default(); x.len()];
        match self.kind {
            Row::Layer => norm::layer_norm(&mut out, &x, w, b, cols, self.eps),
            Row::Rms => norm::rms_norm(&mut out, &x, w, cols, self.eps),
        }
        Ok((T::to_cpu_storage_owned(out), args[0].shape().clone()))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let (x, dout, cols) = (args[0].dense::<T>()?, dout.dense::<T>()?, args[0].last_dim());
        let (w, _) = affine::<T>(Self::NAME, args)?;
        let w = w.as_deref();
        let mut dx = args[0].room::<T>();
        let room = |i: usize| args.get(i).filter(|a| a.wanted).map(|_| vec![T::Acc::of(0.0); cols]);
        let (mut dw, mut db) = (room(1), room(2));
        let (dx_out, dw_out) = (dx.as_deref_mut(), dw.as_deref_mut());
        match self.kind {
            Row::Layer => norm::layer_norm_backward(
                dx_out,
                dw_out,
                db.as_deref_mut(),
                &x,
                w,
                &dout,
                cols,
                self.eps,
            ),
            Row::Rms => norm::rms_norm_backward(dx_out, dw_out, &x, w, &dout, cols, self.eps),
        }
        let mut all = vec![dx.map(|dx| tensor(dx, args[0].shape())).transpose()?.flatten()];
        for (arg, d) in args[1..].iter().zip([dw, db]) {
            all.push(d.map(|d| arg.gradient(Self::NAME, d)).transpose()?.flatten());
        }
        Ok(all)
    }
}

fn check_rows(
    op: &'static str,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<()> {
    let Some(&cols) = x.dims().last() else {
        let (found, expected) = (vec![], "of one dimension or more".to_string());
        return Err(Error::Shape { op, what: "input", found, expected });
    };
    check_affine(op, cols, weight, bias)
}

/// Layer norm (Ba et al. 2016) over the last dimension of `x` `[..., D]`. Keeps `x`.
/// # Errors
/// If `weight` or `bias` is not `[D]`.
pub fn layer_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    check_rows("layer_norm", x, weight, bias)?;
    let fallback = || composed::layer_norm(x, weight, bias, eps);
    apply(RowNorm { kind: Row::Layer, eps }, &operands(x, weight, bias), fallback)
}

/// RMS norm (Zhang & Sennrich 2019) over the last dimension of `x` `[..., D]`. Keeps `x`.
/// # Errors
/// If `weight` is not `[D]`.
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    check_rows("rms_norm", x, weight, None)?;
    let fallback = || composed::rms_norm(x, weight, eps);
    apply(RowNorm { kind: Row::Rms, eps }, &operands(x, weight, None), fallback)
}

//! Softmax cross-entropy, on logits or on the inputs of a linear layer.

// N rows · D features · V classes

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, operands, scalar, tensor},
};
use candle_core::{CpuStorage, DType, Shape, Tensor, WithDType};
use std::{
    any::Any,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};
pub use tallow_kernels::loss::{CrossEntropy, ONE_PASS_CHUNK_BYTES};
use tallow_kernels::{
    Element, Real, accum,
    loss::{self as kernels, Linear, LinearGrads, Sums},
};

/// A loss before its division: regrouping micro-batches then changes nothing but rounding.
#[derive(Clone, Debug)]
pub struct Loss {
    /// The sum over counted rows; a scalar in f32 (f64 for f64 input), with its graph.
    pub sum: Tensor,
    /// Rows that were not ignored.
    pub n_counted: u64,
}

impl Loss {
    /// The mean over counted rows; NaN if all were ignored, as in PyTorch.
    /// # Errors
    /// Only candle's own.
    pub fn mean(&self) -> Result<Tensor> {
        Ok((&self.sum / self.n_counted as f64)?)
    }
}

/// What forward leaves for backward: 16 bytes a row.
struct Kept {
    lse: Vec<f64>,
    sums: Sums,
}

struct LogitsLoss {
    targets: Vec<i64>,
    cfg: CrossEntropy,
    kept: Arc<OnceLock<Kept>>,
}

/// A scalar in the accumulator type of `T`.
fn scalar_storage<T: Scalar>(x: f64) -> (CpuStorage, Shape) {
    (T::Acc::to_cpu_storage_owned(vec![T::Acc::of(x)]), Shape::from(()))
}

impl Kernel for LogitsLoss {
    const NAME: &'static str = "cross_entropy";

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (x, classes) = (args[0].dense::<T>()?, args[0].last_dim());
        let mut lse = vec![0.0; self.targets.len()];
        let sums = kernels::cross_entropy(&mut lse, &x, &self.targets, classes, &self.cfg)?;
        let _ = self.kept.set(Kept { lse, sums });
        Ok(scalar_storage::<T>(sums.loss_sum))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let kept = self.kept.get().expect("forward ran before backward");
        let (x, classes) = (args[0].dense::<T>()?, args[0].last_dim());
        let mut dx = vec![T::default(); x.len()];
        kernels::cross_entropy_backward(
            &mut dx,
            &x,
            &kept.lse,
            &self.targets,
            classes,
            &self.cfg,
            scalar(Self::NAME, dout)?,
        )?;
        Ok(vec![tensor(dx, args[0].shape())?])
    }
}

/// The targets on the host, one per row of `x`.
pub(crate) fn host_targets(op: &'static str, x: &Tensor, targets: &Tensor) -> Result<Vec<i64>> {
    let n_rows = match *x.dims() {
        [n, _] => n,
        ref dims => {
            let (found, expected) = (dims.to_vec(), "[rows, columns]".to_string());
            return Err(Error::Shape { op, what: "input", found, expected });
        }
    };
    if targets.dims() != [n_rows] {
        let (found, expected) = (targets.dims().to_vec(), format!("[{n_rows}]"));
        return Err(Error::Shape { op, what: "targets", found, expected });
    }
    match targets.dtype() {
        DType::U8 | DType::U32 | DType::I64 => Ok(targets.to_dtype(DType::I64)?.to_vec1()?),
        dtype => Err(Error::Targets { op, dtype }),
    }
}

/// Cross-entropy of `logits` `[N, V]` with `targets` `[N]` (u8, u32 or i64), summed in f64.
///
/// PyTorch's meaning of ignored rows and label smoothing. Keeps `logits` and 16 bytes a row.
/// # Errors
/// If shapes do not fit, or a target is neither a class nor ignored.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
    if !logits.device().is_cpu() {
        return composed::cross_entropy(logits, targets, cfg);
    }
    let kept = Arc::new(OnceLock::new());
    let targets = host_targets(LogitsLoss::NAME, logits, targets)?;
    let op = LogitsLoss { targets, cfg: *cfg, kept: kept.clone() };
    let sum = apply(op, &[logits], || unreachable!("the logits are on the CPU"))?;
    Ok(Loss { sum, n_counted: kept.get().map_or(0, |k| k.sums.n_counted) })
}

struct LinearLoss {
    targets: Vec<i64>,
    cfg: CrossEntropy,
    chunk_bytes: u64,
    kept: Arc<OnceLock<Kept>>,
    /// Gradients of the operands that forward made already, until backward takes them.
    made: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Gradients of the sum of losses, `None` where they are not wanted.
type Wide<R> = [Option<Vec<R>>; 3];

impl LinearLoss {
    /// Forward in one pass with the gradients, which stay in `made`.
    fn with_grads<T: Scalar>(&self, args: &[Arg], lse: &mut [f64]) -> Result<Sums> {
        let mut wide = rooms::<T::Acc>(args);
        let sums = with_linear::<T, _>(args, |linear| {
            let [x, weight, bias] = wide.each_mut().map(|room| room.as_deref_mut());
            Ok(kernels::linear_cross_entropy_with_grads(
                lse,
                LinearGrads { x, weight, bias },
                linear,
                &self.targets,
                &self.cfg,
                self.chunk_bytes,
            )?)
        })?;
        *self.made() = Some(Box::new(wide));
        Ok(sums)
    }

    fn made(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logits at a time where they are not all classes of a row: more would leave the cache.
    fn tile_bytes(&self) -> u64 {
        self.chunk_bytes.min(kernels::DEFAULT_CHUNK_BYTES)
    }

    /// Gradients from forward's logits made again.
    fn again<T: Scalar>(&self, args: &[Arg], scale: f64) -> Result<Grads> {
        let kept = self.kept.get().expect("forward ran before backward");
        let mut rooms = rooms::<T>(args);
        with_linear::<T, _>(args, |linear| {
            let [dx, dweight, dbias] = rooms.each_mut().map(|room| room.as_deref_mut());
            Ok(kernels::linear_cross_entropy_backward(
                dx,
                dweight,
                dbias,
                linear,
                &kept.lse,
                &self.targets,
                &self.cfg,
                scale,
                self.tile_bytes(),
            )?)
        })?;
        let grads = rooms.into_iter().zip(args);
        grads.map(|(d, arg)| d.map_or(Ok(None), |d| tensor(d, arg.shape()))).collect()
    }
}

/// Room for the gradient of each operand, where it is wanted.
fn rooms<R: Element>(args: &[Arg]) -> [Option<Vec<R>>; 3] {
    [0, 1, 2].map(|i| args.get(i)?.room::<R>())
}

impl Kernel for LinearLoss {
    const NAME: &'static str = "linear_cross_entropy";
    const OPERANDS: &'static [&'static str] = &["input", "weight", "bias"];

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (targets, cfg) = (&self.targets, &self.cfg);
        let (n_rows, n_classes) = (targets.len(), args[1].dims()[0]);
        let mut lse = vec![0.0; n_rows];
        // Without a graph before `x` nothing tells that backward will be called: it may be the first
        // run of a segment that is recomputed.
        let pays = kernels::one_pass_pays::<T>(n_rows, n_classes, self.chunk_bytes);
        let sums = if args[0].wanted && pays {
            self.with_grads::<T>(args, &mut lse)?
        } else {
            with_linear::<T, _>(args, |linear| {
                let tile_bytes = self.tile_bytes();
                Ok(kernels::linear_cross_entropy(&mut lse, linear, targets, cfg, tile_bytes)?)
            })?
        };
        let _ = self.kept.set(Kept { lse, sums });
        Ok(scalar_storage::<T>(sums.loss_sum))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let scale = scalar(Self::NAME, dout)?;
        let made = self.made().take();
        let Some(wide) = made.and_then(|made| made.downcast::<Wide<T::Acc>>().ok()) else {
            // Not made by forward, or taken by a first backward.
            return self.again::<T>(args, scale);
        };
        let scaled = |(wide, arg): (Option<Vec<T::Acc>>, &Arg)| {
            wide.map_or(Ok(None), |wide| scaled::<T>(wide, arg, scale))
        };
        wide.into_iter().zip(args).map(scaled).collect()
    }
}

/// The gradient `scale wide` of `arg`, in its dtype.
fn scaled<T: Scalar>(mut wide: Vec<T::Acc>, arg: &Arg, scale: f64) -> Result<Option<Tensor>> {
    if T::DTYPE == T::Acc::DTYPE {
        if scale != 1.0 {
            accum::scale(&mut wide, scale);
        }
        return tensor(wide, arg.shape());
    }
    let mut grad = vec![T::default(); wide.len()];
    kernels::scale_into(&mut grad, &wide, scale);
    tensor(grad, arg.shape())
}

/// Runs `f` on the operands `x`, `weight` and perhaps `bias`.
fn with_linear<T: Scalar, R>(args: &[Arg], f: impl FnOnce(&Linear<T>) -> Result<R>) -> Result<R> {
    let (x, weight) = (args[0].dense::<T>()?, args[1].dense::<T>()?);
    let bias = args.get(2).map(|b| b.dense::<T>()).transpose()?;
    let (n_classes, n_features) = (args[1].dims()[0], args[1].dims()[1]);
    f(&Linear { x: &x, weight: &weight, bias: bias.as_deref(), n_features, n_classes })
}

/// Cross-entropy of the logits `x weight^T + bias` without ever holding them whole.
///
/// `x` `[N, D]`, `weight` `[V, D]`, `bias` `[V]`, `targets` `[N]` (u8, u32 or i64). Logits exist in
/// chunks of at most `chunk_bytes` (one row at least; [`ONE_PASS_CHUNK_BYTES`] is a good value) in f32.
/// Keeps `x`, `weight` and 16 bytes a row.
///
/// Where `x` has a graph and a chunk holds enough rows with all their classes, forward computes the
/// gradients too and keeps them for the first backward, in the accumulator type: a quarter less work,
/// for a gradient of `weight` that is there a little earlier. Else backward computes the logits again.
/// Detach `x` where no gradient is wanted, as in evaluation.
/// # Errors
/// If shapes do not fit, or a target is neither a class nor ignored.
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    cfg: &CrossEntropy,
    chunk_bytes: u64,
) -> Result<Loss> {
    let op = LinearLoss::NAME;
    let host = host_targets(op, x, targets)?;
    let mismatch = |what, t: &Tensor, expected: String| {
        Err(Error::Shape { op, what, found: t.dims().to_vec(), expected })
    };
    let d = x.dims()[1];
    let n_classes = match *weight.dims() {
        [v, w] if w == d => v,
        _ => return mismatch("weight", weight, format!("[classes, {d}]")),
    };
    if let Some(b) = bias
        && b.dims() != [n_classes]
    {
        return mismatch("bias", b, format!("[{n_classes}]"));
    }
    if !x.device().is_cpu() {
        return composed::linear_cross_entropy(x, weight, bias, targets, cfg, chunk_bytes);
    }
    let kept = Arc::new(OnceLock::new());
    let op = LinearLoss {
        targets: host,
        cfg: *cfg,
        chunk_bytes,
        kept: kept.clone(),
        made: Mutex::default(),
    };
    let fallback = || unreachable!("x is on the CPU");
    let sum = apply(op, &operands(x, Some(weight), bias), fallback)?;
    Ok(Loss { sum, n_counted: kept.get().map_or(0, |k| k.sums.n_counted) })
}

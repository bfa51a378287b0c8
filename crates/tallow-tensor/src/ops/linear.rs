//! Matrix products.

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, operands, tensor},
};
use candle_core::{CpuStorage, Shape, Tensor};
use tallow_kernels::{
    gemm::{Activation, Epilogue, Mat, Store, batched_gemm, gemm, gemm_fused},
    reduce::sum_cols,
};

/// `x W^T + b`.
struct Linear;

/// Rows of an operand `[..., D]`.
pub(super) fn rows(x: &Arg) -> usize {
    x.dims()[..x.dims().len() - 1].iter().product()
}

/// The matrix `[rows, cols]` in `data`, whose columns lie one after the other if `by_column`.
pub(super) fn matrix<T>(data: &[T], rows: usize, cols: usize, by_column: bool) -> Mat<'_, T> {
    if by_column { Mat::new(data, cols, rows).t() } else { Mat::new(data, rows, cols) }
}

/// `x W^T + b` of `n` rows into `out`.
pub(super) fn forward<T: Scalar>(
    out: &mut [T],
    x: &[T],
    weight: Arg,
    bias: Option<Arg>,
) -> Result<()> {
    let (w, by_column) = weight.dense_matrix::<T>()?;
    let (out_features, d) = (weight.dims()[0], weight.dims()[1]);
    let bias = bias.map(|bias| bias.dense::<T>()).transpose()?;
    let n = out.len().checked_div(out_features).unwrap_or(0);
    let (x, w) = (Mat::new(x, n, d), matrix(&w, out_features, d, by_column).t());
    let epilogue =
        Epilogue { bias: bias.as_deref(), residual: None, activation: Activation::Identity };
    gemm_fused(out, x, w, epilogue);
    Ok(())
}

impl Kernel for Linear {
    const NAME: &'static str = "linear";
    const OPERANDS: &'static [&'static str] = &["input", "weight", "bias"];

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let out_features = args[1].dims()[0];
        let mut out = vec![T::default(); rows(&args[0]) * out_features];
        forward(&mut out, &args[0].dense::<T>()?, args[1], args.get(2).copied())?;
        let mut dims = args[0].dims().to_vec();
        *dims.last_mut().expect("checked by linear") = out_features;
        Ok((T::to_cpu_storage_owned(out), Shape::from(dims)))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let dout = dout.dense::<T>()?;
        let (out_features, d) = (args[1].dims()[0], args[1].dims()[1]);
        let n = rows(&args[0]);
        let dout_no = Mat::new(&dout, n, out_features);
        let mut grads = Vec::with_capacity(args.len());
        for (i, arg) in args.iter().enumerate() {
            let Some(mut grad) = arg.room::<T>() else {
                grads.push(None);
                continue;
            };
            match i {
                0 => {
                    let (weight, by_column) = args[1].dense_matrix::<T>()?;
                    let weight = matrix(&weight, out_features, d, by_column);
                    gemm(&mut grad, dout_no, weight, Store::Overwrite);
                }
                1 => {
                    let x = args[0].dense::<T>()?;
                    gemm(&mut grad, dout_no.t(), Mat::new(&x, n, d), Store::Overwrite);
                }
                _ => sum_cols(&mut grad, &dout),
            }
            grads.push(tensor(grad, arg.shape())?);
        }
        Ok(grads)
    }
}

/// `x weight^T + bias`: `x` `[..., D]`, `weight` `[O, D]`, `bias` `[O]` → `[..., O]`.
///
/// bf16 and f16 accumulate in f32 and round once. Keeps `x` and `weight`; a frozen operand has no
/// gradient computed.
/// # Errors
/// If shapes or dtypes do not fit together.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let op = Linear::NAME;
    let &[out_features, d] = weight.dims() else {
        let (found, expected) = (weight.dims().to_vec(), "[out, in]".to_string());
        return Err(Error::Shape { op, what: "weight", found, expected });
    };
    if x.dims().last() != Some(&d) {
        let (found, expected) = (x.dims().to_vec(), format!("[..., {d}]"));
        return Err(Error::Shape { op, what: "input", found, expected });
    }
    if let Some(b) = bias
        && b.dims() != [out_features]
    {
        let (found, expected) = (b.dims().to_vec(), format!("[{out_features}]"));
        return Err(Error::Shape { op, what: "bias", found, expected });
    }
    let fallback = || composed::linear(x, weight, bias);
    apply(Linear, &operands(x, Some(weight), bias), fallback)
}

/// Batched product; the right operand may be one matrix for all.
struct Matmul {
    n_batch: usize,
    m: usize,
    k: usize,
    n: usize,
    shared_right: bool,
}

impl Matmul {
    /// The `i`th of the matrices in `data`, `rows` by `cols`.
    fn nth<T>(data: &[T], i: usize, rows: usize, cols: usize) -> Mat<'_, T> {
        Mat::new(&data[i * rows * cols..][..rows * cols], rows, cols)
    }
}

impl Kernel for Matmul {
    const NAME: &'static str = "matmul";
    const OPERANDS: &'static [&'static str] = &["left operand", "right operand"];

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let &Matmul { n_batch, m, k, n, shared_right } = self;
        let (a, b) = (args[0].dense::<T>()?, args[1].dense::<T>()?);
        let mut out = vec![T::default(); n_batch * m * n];
        if shared_right {
            gemm(&mut out, Mat::new(&a, n_batch * m, k), Mat::new(&b, k, n), Store::Overwrite);
        } else {
            let (left, right) = (|i| Self::nth(&a, i, m, k), |i| Self::nth(&b, i, k, n));
            batched_gemm(&mut out, n_batch, left, right, Store::Overwrite);
        }
        let mut dims = args[0].dims().to_vec();
        *dims.last_mut().expect("checked by matmul") = n;
        Ok((T::to_cpu_storage_owned(out), Shape::from(dims)))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let &Matmul { n_batch, m, k, n, shared_right } = self;
        let dout = dout.dense::<T>()?;
        let (mut da, mut db) = (args[0].room::<T>(), args[1].room::<T>());
        if let Some(da) = &mut da {
            let b = args[1].dense::<T>()?;
            if shared_right {
                let dout = Mat::new(&dout, n_batch * m, n);
                gemm(da, dout, Mat::new(&b, k, n).t(), Store::Overwrite);
            } else {
                let (left, right) = (|i| Self::nth(&dout, i, m, n), |i| Self::nth(&b, i, k, n).t());
                batched_gemm(da, n_batch, left, right, Store::Overwrite);
            }
        }
        if let Some(db) = &mut db {
            let a = args[0].dense::<T>()?;
            if shared_right {
                let (a, dout) = (Mat::new(&a, n_batch * m, k), Mat::new(&dout, n_batch * m, n));
                gemm(db, a.t(), dout, Store::Overwrite);
            } else {
                let (left, right) = (|i| Self::nth(&a, i, m, k).t(), |i| Self::nth(&dout, i, m, n));
                batched_gemm(db, n_batch, left, right, Store::Overwrite);
            }
        }
        let grads = [da, db].into_iter().zip(args);
        grads.map(|(d, arg)| d.map_or(Ok(None), |d| tensor(d, arg.shape()))).collect()
    }
}

/// `a b`: `a` `[..., M, K]` and `b` `[..., K, N]` with the same leading dimensions, or `b` `[K, N]`
/// for all → `[..., M, N]`.
///
/// bf16 and f16 accumulate in f32 and round once. Keeps both operands.
/// # Errors
/// If shapes or dtypes do not fit together.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let op = Matmul::NAME;
    let mismatch = |what, t: &Tensor, expected: String| {
        Err(Error::Shape { op, what, found: t.dims().to_vec(), expected })
    };
    let [ref lead @ .., m, k] = *a.dims() else {
        return mismatch("left operand", a, "[..., M, K]".to_string());
    };
    let [ref b_lead @ .., b_k, n] = *b.dims() else {
        return mismatch("right operand", b, "[..., K, N]".to_string());
    };
    if b_k != k || (!b_lead.is_empty() && b_lead != lead) {
        return mismatch("right operand", b, format!("{lead:?} or nothing, then [{k}, N]"));
    }
    let n_batch = lead.iter().product();
    let shared_right = b_lead.is_empty();
    let op = Matmul { n_batch, m, k, n, shared_right };
    apply(op, &[a, b], || composed::matmul(a, b))
}

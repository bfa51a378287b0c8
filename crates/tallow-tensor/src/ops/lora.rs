//! A frozen linear layer with a trainable correction of low rank.

// N rows · D inputs · O outputs · R rank

use super::linear::{forward, matrix, rows};
use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor, with_arg},
};
use candle_core::{CpuStorage, Shape, Tensor};
use tallow_kernels::{
    accum::scale,
    gemm::{Mat, Store, gemm},
};

struct LoraLinear {
    weight: Tensor,
    bias: Option<Tensor>,
    scale: f64,
}

impl LoraLinear {
    /// `scale x A^T` `[N, R]`.
    fn low<T: Scalar>(&self, x: &[T], a: &Arg, n: usize) -> Result<Vec<T>> {
        let (rank, d) = (a.dims()[0], a.dims()[1]);
        let mut u = vec![T::default(); n * rank];
        gemm(&mut u, Mat::new(x, n, d), Mat::new(&a.dense::<T>()?, rank, d).t(), Store::Overwrite);
        scale(&mut u, self.scale);
        Ok(u)
    }
}

impl Kernel for LoraLinear {
    const NAME: &'static str = "lora_linear";
    const OPERANDS: &'static [&'static str] = &["input", "a", "b"];

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (x, n) = (args[0].dense::<T>()?, rows(&args[0]));
        let (out_features, rank) = (args[2].dims()[0], args[2].dims()[1]);
        let mut out = vec![T::default(); n * out_features];
        with_arg(&self.weight, |weight| match &self.bias {
            None => forward(&mut out, &x, weight, None),
            Some(bias) => with_arg(bias, |bias| forward(&mut out, &x, weight, Some(bias))),
        })?;
        let (u, b) = (self.low(&x, &args[1], n)?, args[2].dense::<T>()?);
        gemm(&mut out, Mat::new(&u, n, rank), Mat::new(&b, out_features, rank).t(), Store::Add);
        let mut dims = args[0].dims().to_vec();
        *dims.last_mut().expect("checked by lora_linear") = out_features;
        Ok((T::to_cpu_storage_owned(out), Shape::from(dims)))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let (dout, n) = (dout.dense::<T>()?, rows(&args[0]));
        let ((rank, d), out_features) = ((args[1].dims()[0], args[1].dims()[1]), args[2].dims()[0]);
        let dout = Mat::new(&dout, n, out_features);
        let (mut dx, mut da, mut db) =
            (args[0].room::<T>(), args[1].room::<T>(), args[2].room::<T>());
        if let Some(db) = &mut db {
            let u = self.low(&args[0].dense::<T>()?, &args[1], n)?;
            gemm(db, dout.t(), Mat::new(&u, n, rank), Store::Overwrite);
        }
        // `scale dout B`: the gradient of `x A^T`.
        let mut du = vec![T::default(); n * rank];
        let b = args[2].dense::<T>()?;
        gemm(&mut du, dout, Mat::new(&b, out_features, rank), Store::Overwrite);
        scale(&mut du, self.scale);
        let du = Mat::new(&du, n, rank);
        if let Some(da) = &mut da {
            gemm(da, du.t(), Mat::new(&args[0].dense::<T>()?, n, d), Store::Overwrite);
        }
        if let Some(dx) = &mut dx {
            with_arg(&self.weight, |weight| {
                let (weight, by_column) = weight.dense_matrix::<T>()?;
                gemm(dx, dout, matrix(&weight, out_features, d, by_column), Store::Overwrite);
                Ok(())
            })?;
            gemm(dx, du, Mat::new(&args[1].dense::<T>()?, rank, d), Store::Add);
        }
        let grads = [dx, da, db].into_iter().zip(args);
        grads.map(|(d, arg)| d.map_or(Ok(None), |d| tensor(d, arg.shape()))).collect()
    }
}

/// `x weight^T + bias + scale (x a^T) b^T` (Hu et al. 2021): `x` `[..., D]`, `weight` `[O, D]`,
/// `bias` `[O]`, `a` `[R, D]`, `b` `[O, R]` → `[..., O]`.
///
/// `weight` and `bias` are constants: they get no gradient, even if they are variables. Keeps `x`,
/// `a` and `b` only; `x a^T` is computed again in backward.
/// # Errors
/// If shapes or dtypes do not fit together.
pub fn lora_linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let op = LoraLinear::NAME;
    let mismatch = |what, t: &Tensor, expected: String| {
        Err(Error::Shape { op, what, found: t.dims().to_vec(), expected })
    };
    let &[out_features, d] = weight.dims() else {
        return mismatch("weight", weight, "[out, in]".to_string());
    };
    if x.dims().last() != Some(&d) {
        return mismatch("input", x, format!("[..., {d}]"));
    }
    let rank = match *a.dims() {
        [rank, a_d] if a_d == d => rank,
        _ => return mismatch("a", a, format!("[rank, {d}]")),
    };
    if b.dims() != [out_features, rank] {
        return mismatch("b", b, format!("[{out_features}, {rank}]"));
    }
    if let Some(bias) = bias
        && bias.dims() != [out_features]
    {
        return mismatch("bias", bias, format!("[{out_features}]"));
    }
    for (what, t) in [("weight", Some(weight)), ("bias", bias)] {
        let Some(found) = t.map(Tensor::dtype).filter(|&dtype| dtype != x.dtype()) else {
            continue;
        };
        return Err(Error::DTypeMismatch { op, what, found, expected: x.dtype() });
    }
    let (weight, bias) = (weight.detach(), bias.map(Tensor::detach));
    let fallback = || composed::lora_linear(x, &weight, bias.as_ref(), a, b, scale);
    let kernel = LoraLinear { weight: weight.clone(), bias: bias.clone(), scale };
    apply(kernel, &[x, a, b], fallback)
}

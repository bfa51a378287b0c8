//! What the tests share.
#![allow(dead_code)] // each test binary uses its own part

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use tallow_precision::{LossScale, Verdict};

pub(crate) type TestResult<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A list of one parameter.
pub(crate) fn named(name: &str, value: Tensor) -> candle_core::Result<Vec<(String, Var)>> {
    Ok(vec![(name.to_string(), Var::from_tensor(&value)?)])
}

/// One window of micro-batches whose losses are `coefficients . w`, summed; its verdict and gradients.
pub(crate) fn one_window(
    scale: &mut LossScale,
    w: &[(String, Var)],
    micro_batches: &[[f32; 2]],
) -> TestResult<(Verdict, GradStore)> {
    let mut sum = GradStore::default();
    for coefficients in micro_batches {
        let coefficients = Tensor::new(coefficients, &Device::Cpu)?;
        let loss = (w[0].1.to_dtype(DType::F32)? * coefficients)?.sum_all()?;
        sum.extend(scale.apply(&loss)?.backward()?)?;
    }
    let verdict = scale.unscale(w, &mut sum)?;
    Ok((verdict, sum))
}

/// `w -= rate * gradient`.
pub(crate) fn sgd(params: &[(String, Var)], grads: &GradStore, rate: f64) -> TestResult {
    for (_, var) in params {
        if let Some(grad) = grads.get(var) {
            let step = (grad.to_dtype(var.dtype())? * rate)?;
            var.set(&(var.as_tensor() - step)?)?;
        }
    }
    Ok(())
}

//! One update off the CPU: the kernels' formulas from candle's operations.
//!
//! *Memory:* up to six temporaries of the parameter's size, until it returns.

use crate::{
    config::{Config, Place, Step},
    error::{ParameterError, Result},
    planes::Plan,
    price::StateFormat,
};
use candle_core::{D, DType, Tensor, Var};
use safetensors::Dtype;
use tallow_kernels::optim::{Adafactor, Adam, Lion, Rounding, Rule, Sgd};

/// Refuses what only the kernels do.
pub(crate) fn check(name: &str, config: &Config, dtype: DType) -> Result<(), ParameterError> {
    let is_short = matches!(dtype, DType::BF16 | DType::F16);
    let missing = match (config.format, &config.place) {
        (_, Place::File { .. }) => "state in a file",
        (StateFormat::Bits8 { .. }, _) => "8-bit state",
        (StateFormat::Bf16(Rounding::Stochastic), _) => "state rounded by chance",
        (StateFormat::Bf16(Rounding::Kahan), _) => "compensated state",
        _ if is_short && config.weights == Rounding::Stochastic => "rounding of weights by chance",
        _ if is_short && config.weights == Rounding::Kahan => "compensation of weights",
        _ => return Ok(()),
    };
    Err(ParameterError::Device { name: name.to_owned(), setting: missing })
}

/// A state of zeros on the parameter's device, a tensor a plane.
pub(crate) fn zeros(plan: &Plan, var: &Var) -> Result<Vec<Tensor>> {
    let zeros = |plane: &crate::planes::Plane| {
        Ok(Tensor::zeros(plane.dims.as_slice(), dtype_of(plane.dtype), var.device())?)
    };
    plan.planes.iter().map(zeros).collect()
}

/// Candle's name for the type of a plane; planes here are f32, f64 or bf16.
pub(crate) fn dtype_of(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F64 => DType::F64,
        Dtype::BF16 => DType::BF16,
        _ => DType::F32,
    }
}

/// Updates `var`, and replaces its state.
pub(crate) fn apply(
    step: &Step,
    var: &Var,
    grad: &Tensor,
    grad_factor: f64,
    state: &mut [Tensor],
) -> Result<()> {
    if var.elem_count() == 0 {
        return Ok(());
    }
    let acc = if var.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    // Detached, or the update would be recorded as a graph.
    let p = var.as_detached_tensor().to_dtype(acc)?;
    let g = (grad.detach().to_dtype(acc)? * grad_factor)?;
    let old = state.iter().map(|s| s.to_dtype(acc)).collect::<candle_core::Result<Vec<_>>>()?;
    let (p, new) = match (step, old.as_slice()) {
        (Step::Each(Rule::AdamW(a)), [m, v]) => {
            let decayed = (&p * (1.0 - a.lr * a.decay))?;
            adam(a, decayed, g, m, v)?
        }
        (Step::Each(Rule::Adam(a)), [m, v]) => {
            let g = (g + (&p * a.decay)?)?;
            adam(a, p, g, m, v)?
        }
        (Step::Each(Rule::Sgd(s)), m) => sgd(s, p, g, m.first())?,
        (Step::Each(Rule::Lion(l)), [m]) => lion(l, p, g, m)?,
        (Step::Whole(a), [row, col]) => factored(a, p, g, row, col)?,
        (Step::Whole(a), [v]) => {
            let v = lerp(v, &g.sqr()?, a)?;
            (adafactor(a, p, g, &v)?, vec![v])
        }
        (step, old) => unreachable!("{step:?} with {} moments", old.len()),
    };
    var.set(&p.to_dtype(var.dtype())?)?;
    for (state, new) in state.iter_mut().zip(new) {
        *state = new.to_dtype(state.dtype())?;
    }
    Ok(())
}

type Updated = candle_core::Result<(Tensor, Vec<Tensor>)>;

fn adam(a: &Adam, p: Tensor, g: Tensor, m: &Tensor, v: &Tensor) -> Updated {
    let bias = |beta: f64| 1.0 - beta.powf(a.t as f64);
    let m = ((m * a.beta1)? + (&g * (1.0 - a.beta1))?)?;
    let v = ((v * a.beta2)? + (g.sqr()? * (1.0 - a.beta2))?)?;
    let root = ((v.sqrt()? * (1.0 / bias(a.beta2).sqrt()))? + a.eps)?;
    let p = (p - ((&m / root)? * (a.lr / bias(a.beta1)))?)?;
    Ok((p, vec![m, v]))
}

fn sgd(s: &Sgd, p: Tensor, g: Tensor, m: Option<&Tensor>) -> Updated {
    let g = (g + (&p * s.decay)?)?;
    let Some(m) = m else { return Ok(((p - (g * s.lr)?)?, Vec::new())) };
    let m = ((m * s.momentum)? + &g)?;
    let ahead = if s.nesterov { (g + (&m * s.momentum)?)? } else { m.clone() };
    Ok(((p - (ahead * s.lr)?)?, vec![m]))
}

fn lion(l: &Lion, p: Tensor, g: Tensor, m: &Tensor) -> Updated {
    let c = ((m * l.beta1)? + (&g * (1.0 - l.beta1))?)?;
    let m = ((m * l.beta2)? + (g * (1.0 - l.beta2))?)?;
    let p = ((p * (1.0 - l.lr * l.decay))? - (c.sign()? * l.lr)?)?;
    Ok((p, vec![m]))
}

fn factored(a: &Adafactor, p: Tensor, g: Tensor, row: &Tensor, col: &Tensor) -> Updated {
    let squares = g.sqr()?;
    let row = lerp(row, &squares.mean(D::Minus1)?, a)?;
    let col = lerp(col, &squares.mean(D::Minus2)?, a)?;
    let mean = row.mean_keepdim(D::Minus1)?.maximum(a.eps1)?;
    let scaled = row.broadcast_div(&mean)?.unsqueeze(D::Minus1)?;
    let v = scaled.broadcast_mul(&col.unsqueeze(D::Minus2)?)?;
    Ok((adafactor(a, p, g, &v)?, vec![row, col]))
}

fn lerp(old: &Tensor, new: &Tensor, a: &Adafactor) -> candle_core::Result<Tensor> {
    old + ((new - old)? * (a.t as f64).powf(a.beta2_decay))?
}

fn adafactor(a: &Adafactor, p: Tensor, g: Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
    let rms = |x: &Tensor| -> candle_core::Result<f64> {
        Ok(x.sqr()?.mean_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?.sqrt())
    };
    let u = (g / v.maximum(a.eps1 * a.eps1)?.sqrt()?)?;
    let alpha = a.eps2.max(rms(&p)?) * a.lr.min(1.0 / (a.t as f64).sqrt());
    let alpha = alpha / (rms(&u)? / a.d).max(1.0);
    (p * (1.0 - a.lr * a.decay))? - (u * alpha)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Optimizer};
    use candle_core::Device;
    use tallow_testkit::{Tol, assert_close, values_f32};

    fn values(tensor: &Tensor) -> Vec<f64> {
        let flat = tensor.to_dtype(DType::F64).and_then(|t| t.flatten_all());
        flat.and_then(|t| t.to_vec1()).expect("floats")
    }

    #[test]
    fn the_composed_update_is_the_kernels() {
        let sgd = |momentum, nesterov| Algorithm::Sgd { momentum, nesterov };
        let algorithms = [
            Algorithm::ADAMW,
            Algorithm::ADAM,
            Algorithm::SGD,
            sgd(0.9, false),
            sgd(0.9, true),
            Algorithm::LION,
            Algorithm::ADAFACTOR,
        ];
        let dims: [&[usize]; 5] = [&[6, 5], &[2, 3, 4], &[17], &[], &[0, 3]];
        for algorithm in algorithms {
            for (dims, dtype) in dims.into_iter().flat_map(|d| [(d, DType::F32), (d, DType::F64)]) {
                let some = |seed| {
                    let data = values_f32(seed, dims.iter().product());
                    let tensor = Tensor::from_vec(data, dims, &Device::Cpu);
                    tensor.and_then(|t| t.to_dtype(dtype)).expect("data fills dims")
                };
                let copy = || Var::from_tensor(&some(1)).expect("a copy");
                let config = Config { weight_decay: 0.1, ..Config::new(algorithm, 0.01) };
                let (ours, theirs) = ([("w".to_string(), copy())], copy());
                let mut optimizer = Optimizer::new(&ours, config.clone()).expect("sound");
                let mut state = zeros(&Plan::new(&config, &theirs), &theirs).expect("zeros");
                for t in 1..=5 {
                    let grad = some(100 + t);
                    optimizer.step_one_scaled("w", &grad, 0.5).expect("it fits");
                    let step = algorithm.step(0.01, 0.1, t, dtype);
                    apply(&step, &theirs, &grad, 0.5, &mut state).expect("it fits");
                }
                let what = format!("{algorithm:?}, {dims:?}, {dtype:?}");
                assert_close(&what, &values(&theirs), &values(&ours[0].1), Tol::Rel(1e-6));
            }
        }
    }

    #[test]
    fn what_only_the_kernels_do_is_refused() {
        let plain = Config::new(Algorithm::ADAMW, 0.1);
        assert!(check("w", &plain, DType::BF16).is_ok());
        let near = StateFormat::Bf16(Rounding::Nearest);
        assert!(check("w", &Config { format: near, ..plain.clone() }, DType::F32).is_ok());
        let bits8 = StateFormat::Bits8 { block_elems: 256 };
        let error = check("w", &Config { format: bits8, ..plain.clone() }, DType::F32).unwrap_err();
        assert_eq!(
            error.to_string(),
            "parameter `w` is off the CPU, where there is no 8-bit state"
        );
        let chance = Config { weights: Rounding::Stochastic, ..plain };
        assert!(check("w", &chance, DType::F32).is_ok());
        assert!(check("w", &chance, DType::BF16).is_err());
    }
}

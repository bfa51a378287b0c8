//! Gradients used and dropped one at a time, also where a norm over all of them is needed.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use common::{optimizer, params, tensor, values, weights};
use tallow_optim::{Algorithm, Config, GradientNorm, StateFormat, Stepped, Verdict};
use tallow_testkit::{Tol, assert_close};

const SHAPES: [(&str, &[usize]); 3] = [("a", &[70, 70]), ("b", &[257]), ("c", &[1])];

fn gradient(i: u64, var: &Var, dtype: DType, scale: f64) -> Tensor {
    let grad = (tensor(50 + i, var.dims(), DType::F32) * scale).expect("finite");
    grad.to_dtype(dtype).expect("a float type")
}

/// Both phases over gradients made anew in each: the second backward.
fn two_phases(params: &[(String, Var)], config: &Config, loss_scale: f64, max_norm: f64) -> f64 {
    let mut optimizer = optimizer(params, config);
    let mut norm = GradientNorm::new();
    for (i, (name, var)) in (0..).zip(params) {
        norm.add(name, &gradient(i, var, DType::F32, loss_scale)).expect("a float");
    }
    let Verdict::Finite { factor, norm } = norm.verdict(loss_scale, max_norm) else {
        panic!("all gradients are finite")
    };
    for (i, (_, var)) in (0..).zip(params) {
        let grad = gradient(i, var, DType::F32, loss_scale);
        let stepped = optimizer.step_var(var, &grad, factor).expect("the gradient fits");
        assert_eq!(stepped, Stepped::Updated);
    }
    norm
}

#[test]
fn two_phases_clip_as_one_does() {
    let bits8 = StateFormat::BITS8;
    let plain = Config::new(Algorithm::Sgd { momentum: 0.9, nesterov: true }, 0.1);
    let configs = [
        plain.clone(),
        Config { format: bits8, ..plain },
        Config::new(Algorithm::ADAMW, 0.1),
        Config::new(Algorithm::ADAFACTOR, 0.1),
    ];
    for config in configs {
        for (loss_scale, max_norm) in [(1.0, f64::INFINITY), (65536.0, 1.0), (256.0, 1e4)] {
            let ours = params(&SHAPES, DType::F32);
            let norm = two_phases(&ours, &config, loss_scale, max_norm);
            let theirs = params(&SHAPES, DType::F32);
            let grads: Vec<_> =
                (0..).zip(&theirs).map(|(i, (_, var))| gradient(i, var, DType::F32, 1.0)).collect();
            let squares = grads.iter().flat_map(values).map(|g| g * g).sum::<f64>();
            assert_close("norm", &[norm], &[squares.sqrt()], Tol::Rel(1e-12));
            // The plain way: all gradients, scaled by a pass of its own.
            let clip = (max_norm / (norm + 1e-6)).min(1.0);
            let mut plain = optimizer(&theirs, &config);
            for ((name, _), grad) in theirs.iter().zip(grads) {
                plain.step_one(name, &(grad * clip).expect("finite")).expect("it fits");
            }
            // Powers of two are undone without rounding.
            assert_eq!(weights(&ours), weights(&theirs), "{config:?}, {loss_scale}, {max_norm}");
        }
    }
}

#[test]
fn an_overflow_is_named_and_a_norm_never_overflows() {
    let big = Tensor::full(1e38f32, 1000, &Device::Cpu).expect("large");
    let mut norm = GradientNorm::new();
    norm.add("big", &big).expect("a float");
    let Verdict::Finite { norm: found, .. } = norm.clone().verdict(1.0, 1.0) else {
        panic!("1e38 is finite")
    };
    assert_close("norm", &[found], &[f64::from(1e38f32) * 1000f64.sqrt()], Tol::Rel(1e-12));
    for (name, bad) in [("nan", f32::NAN), ("inf", f32::INFINITY)] {
        let grad = Tensor::new(&[1.0, bad], &Device::Cpu).expect("two numbers");
        norm.add(name, &grad.to_dtype(DType::F16).expect("a float type")).expect("a float");
    }
    assert_eq!(norm.verdict(1.0, 1.0), Verdict::Overflow { name: "nan".into() });
    let ids = Tensor::new(&[1u32], &Device::Cpu).expect("an id");
    let error = GradientNorm::new().add("ids", &ids).unwrap_err();
    assert!(error.to_string().contains("`ids`"), "{error}");
}

#[test]
fn a_factor_that_is_not_finite_moves_nothing() {
    let params = params(&SHAPES, DType::F32);
    let mut optimizer = optimizer(&params, &Config::new(Algorithm::ADAMW, 0.1));
    let before = weights(&params);
    let grad = gradient(0, &params[0].1, DType::F32, 1.0);
    let error = optimizer.step_one_scaled("a", &grad, f64::NAN).unwrap_err();
    assert!(error.to_string().contains("factor of a gradient is NaN"), "{error}");
    assert_eq!((before, optimizer.n_updates("a")), (weights(&params), Some(0)));
}

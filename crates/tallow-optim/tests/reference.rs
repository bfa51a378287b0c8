//! Every optimizer against PyTorch's, or against its formula in f64.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use common::{optimizer, store, tensor, values};
use tallow_optim::{Algorithm, Config};
use tallow_testkit::{Case, Reference, Tol, Values, assert_close, values as seeded, widen};

fn config(case: &Case) -> Config {
    let f = |key| case.f64(key);
    let kind = case.attrs["kind"].as_str().expect("a case says its kind");
    let (algorithm, weight_decay) = match kind {
        "adamw" => {
            let (beta1, beta2, eps) = (f("beta1"), f("beta2"), f("eps"));
            (Algorithm::AdamW { beta1, beta2, eps }, f("weight_decay"))
        }
        "sgd" => {
            let (momentum, nesterov) = (f("momentum"), case.bool("nesterov"));
            (Algorithm::Sgd { momentum, nesterov }, f("weight_decay"))
        }
        "adafactor" => (Algorithm::ADAFACTOR, 0.0),
        other => panic!("an optimizer `{other}`"),
    };
    Config { weight_decay, ..Config::new(algorithm, f("lr")) }
}

fn dense(values: &Values, dtype: DType) -> Tensor {
    let tensor = Tensor::from_vec(values.data.clone(), values.shape.as_slice(), &Device::Cpu);
    tensor.and_then(|t| t.to_dtype(dtype)).expect("data fills the shape")
}

#[test]
fn pytorch_s_twelve_updates() {
    let reference = Reference::load();
    let cases = reference.cases("optimizer");
    assert_eq!(cases.len(), 4);
    for case in cases {
        for dtype in [DType::F32, DType::F64] {
            let of = |what: &str| reference.values(&format!("{}.{what}", case.name));
            let params = ["a", "b"].map(|name| {
                let start = dense(&of(&format!("{name}.0")), dtype);
                (name.to_string(), Var::from_tensor(&start).expect("a copy"))
            });
            let mut optimizer = optimizer(&params, &config(&case));
            for step in 0..12 {
                let mut grads = Vec::new();
                for (name, var) in &params {
                    let grad = format!("g{name}.{step}");
                    if reference.has(&format!("{}.{grad}", case.name)) {
                        grads.push((var, dense(&of(&grad), dtype)));
                    }
                }
                optimizer.step(&store(&grads)).expect("gradients fit");
                for (name, var) in &params {
                    let what = format!("{} {name}, {dtype:?}, step {step}", case.name);
                    let want = widen(&of(&format!("{name}.{}", step + 1)).data);
                    assert_close(&what, &values(var), &want, Tol::Rel(1e-6));
                }
            }
            assert_eq!((optimizer.n_updates("a"), optimizer.n_updates("b")), (Some(12), Some(8)));
        }
    }
}

/// `f(p, g, state, t)` for each element, 10 updates, against the optimizer.
fn differs(algorithm: Algorithm, weight_decay: f64, f: fn(f64, f64, &mut [f64; 2], i32) -> f64) {
    let config = Config { weight_decay, ..Config::new(algorithm, 0.01) };
    for n in [1, 7, 8, 255, 256, 257, 1023] {
        let params = common::params(&[("w", &[n])], DType::F32);
        let mut optimizer = optimizer(&params, &config);
        let (mut want, mut state) = (values(&params[0].1), vec![[0.0; 2]; n]);
        for t in 1..=10 {
            let grad = tensor(100 + t, &[n], DType::F32);
            optimizer.step(&store(&[(&params[0].1, grad)])).expect("gradients fit");
            for ((p, g), state) in want.iter_mut().zip(seeded(100 + t, n)).zip(&mut state) {
                *p = f(*p, g, state, t as i32);
            }
        }
        let what = format!("{algorithm:?}, {n} elements");
        assert_close(&what, &values(&params[0].1), &want, Tol::Rel(1e-6));
    }
}

#[test]
fn adam_agrees_with_its_formula() {
    differs(Algorithm::ADAM, 0.1, |p, g, [m, v], t| {
        let g = g + 0.1 * p;
        *m = 0.9 * *m + 0.1 * g;
        *v = 0.999 * *v + 0.001 * g * g;
        let (m_hat, v_hat) = (*m / (1.0 - 0.9f64.powi(t)), *v / (1.0 - 0.999f64.powi(t)));
        p - 0.01 * m_hat / (v_hat.sqrt() + 1e-8)
    });
}

#[test]
fn lion_agrees_with_its_formula() {
    differs(Algorithm::LION, 0.1, |p, g, [m, _], _| {
        let c = 0.9 * *m + 0.1 * g;
        *m = 0.99 * *m + 0.01 * g;
        p - 0.01 * (c.signum() + 0.1 * p)
    });
}

/// PyTorch factors the last two dimensions of a tensor with more: each matrix by itself has the
/// same factors, and the update's clipping and the parameter's scale are the whole tensor's.
#[test]
fn adafactor_factors_the_last_two_dimensions() {
    let params = common::params(&[("w", &[2, 3, 5, 7])], DType::F32);
    let optimizer = optimizer(&params, &Config::new(Algorithm::ADAFACTOR, 0.01));
    assert_eq!(optimizer.state_bytes(), 4 * (2 * 3 * 5 + 2 * 3 * 7));
    assert_eq!(tallow_optim::adafactor_state_bytes(&[2, 3, 5, 7]), optimizer.state_bytes());
}

//! Cases from other trainers' histories, and what the README promises.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use common::{in_file, optimizer, params, path, seeded, store, tensor, values, weights};
use std::fs;
use tallow_optim::{
    Algorithm, Config, ConfigError, Error, Group, Optimizer, ParameterError, Place, Rounding,
    StateError, StateFormat, Stepped, Treatment,
};
use tallow_testkit::{Tol, assert_close};

const ADAMW: Algorithm = Algorithm::ADAMW;
const BITS8: StateFormat = StateFormat::BITS8;

fn formats() -> [StateFormat; 5] {
    let [nearest, chance, kahan] =
        [Rounding::Nearest, Rounding::Stochastic, Rounding::Kahan].map(StateFormat::Bf16);
    [StateFormat::F32, BITS8, nearest, chance, kahan]
}

fn group(pattern: &str, learning_rate_factor: f64, weight_decay: f64) -> Group {
    let treatment = Treatment::Trained { learning_rate_factor, weight_decay };
    Group { pattern: pattern.into(), treatment }
}

/// Parameters whose states straddle windows, blocks and the least size of 8 bits.
fn mixed(dtype: DType) -> Vec<(String, Var)> {
    let shapes: [(&str, &[usize]); 5] =
        [("a.bias", &[257]), ("a.weight", &[70, 130]), ("b", &[1]), ("c", &[4096]), ("d", &[0, 3])];
    params(&shapes, dtype)
}

#[test]
fn spare_4_an_absent_gradient_moves_nothing_and_zeros_do() {
    for format in formats() {
        let config = Config { format, weight_decay: 0.1, ..Config::new(ADAMW, 0.01) };
        let params = params(&[("a", &[5000]), ("b", &[5000])], DType::F32);
        let mut optimizer = optimizer(&params, &config);
        optimizer.step(&seeded(&params, 0)).expect("gradients fit");
        let (a, b) = (&params[0].1, &params[1].1);
        let (before_a, before_b) = (values(a), values(b));
        optimizer.save(&path("spare-4-before")).expect("saved");
        let zeros = Tensor::zeros(5000, DType::F32, &Device::Cpu).expect("zeros");
        optimizer.step(&store(&[(a, zeros)])).expect("gradients fit");
        optimizer.save(&path("spare-4-after")).expect("saved");
        let [before, after] = ["spare-4-before", "spare-4-after"].map(|name| {
            let bytes = fs::read(path(name)).expect("saved");
            fs::remove_file(path(name)).expect("it exists");
            bytes
        });
        let [before, after] = [&before, &after]
            .map(|b| safetensors::SafeTensors::deserialize(b).expect("a whole file"));
        let mut moved = Vec::new();
        for name in before.names() {
            let [before, after] = [&before, &after].map(|f| f.tensor(name).expect("same names"));
            if before.data() != after.data() {
                moved.push(name);
            }
        }
        // Codes that decay together keep their values; their scale moves instead.
        assert!(moved.iter().all(|name| name.starts_with("a.")), "{moved:?}, {format:?}");
        assert!(moved.contains(&"a.t") && moved.iter().any(|n| n.starts_with("a.m")), "{moved:?}");
        assert_eq!(before_b, values(b));
        // Decay and the old momentum act.
        assert!(before_a.iter().zip(values(a)).all(|(before, after)| *before != after));
        assert_eq!((optimizer.n_updates("a"), optimizer.n_updates("b")), (Some(2), Some(1)));
    }
}

#[test]
fn pre_1_bf16_weights_without_master_copies() {
    for (weights, want) in [(Rounding::Nearest, 1.0), (Rounding::Kahan, 0.941_406_25)] {
        let w = Var::from_tensor(&Tensor::ones(8, DType::BF16, &Device::Cpu).expect("ones"));
        let params = [("w".to_string(), w.expect("a copy"))];
        let config = Config { weights, ..Config::new(Algorithm::SGD, 6e-4) };
        let mut optimizer = optimizer(&params, &config);
        let grad = Tensor::ones(8, DType::F32, &Device::Cpu).expect("ones");
        (0..100).for_each(|_| optimizer.step_one("w", &grad).expect("the gradient fits"));
        assert_eq!(values(&params[0].1), [want; 8], "{weights:?}");
    }
    let run = |dtype, seed| {
        let w = Var::from_tensor(&Tensor::ones(4096, dtype, &Device::Cpu).expect("ones"));
        let params = [("w".to_string(), w.expect("a copy"))];
        let weights = Rounding::Stochastic;
        let config = Config { weights, seed, ..Config::new(Algorithm::SGD, 6e-4) };
        let mut optimizer = optimizer(&params, &config);
        let grad = Tensor::ones(4096, DType::F32, &Device::Cpu).expect("ones");
        (0..100).for_each(|_| optimizer.step_one("w", &grad).expect("the gradient fits"));
        values(&params[0].1)
    };
    for dtype in [DType::BF16, DType::F16] {
        let w = run(dtype, 1);
        let mean = w.iter().sum::<f64>() / 4096.0;
        let variance = w.iter().map(|w| (w - mean).powi(2)).sum::<f64>() / 4095.0;
        let standard_error = (variance / 4096.0).sqrt();
        assert!((mean - 0.94).abs() <= 4.0 * standard_error, "{mean} +- {standard_error}");
        assert!(w == run(dtype, 1) && w != run(dtype, 2), "seeded");
    }
}

#[test]
fn pre_2_eps_survives_half_precision() {
    for dtype in [DType::F16, DType::BF16] {
        for format in formats() {
            let start = Tensor::new(&[1f32, -2.0, 0.5], &Device::Cpu).expect("three numbers");
            let start = start.to_dtype(dtype).expect("a float type");
            let fresh = || [("w".to_string(), Var::from_tensor(&start).expect("a copy"))];
            let config = Config { format, ..Config::new(Algorithm::ADAM, 0.125) };
            let grad = |g: f32| Tensor::full(g, 3, &Device::Cpu).and_then(|g| g.to_dtype(dtype));
            let params = fresh();
            let mut still = optimizer(&params, &config);
            let zeros = grad(0.0).expect("zeros");
            (0..3).for_each(|_| still.step_one("w", &zeros).expect("the gradient fits"));
            assert_eq!(values(&params[0].1), values(&start));
            let params = fresh();
            let small = grad(1e-4).expect("small");
            optimizer(&params, &config).step_one("w", &small).expect("the gradient fits");
            for (before, after) in values(&start).iter().zip(values(&params[0].1)) {
                let by = before - after;
                assert!((by - 0.125).abs() <= 0.125e-3, "{dtype:?}, {format:?}: {by}");
            }
        }
    }
}

#[test]
fn opt_4_a_state_in_a_file_is_the_state_in_memory() {
    // 3 groups: decay 0.1, none, and one that no parameter belongs to.
    let groups =
        vec![group("*.weight", 1.0, 0.1), group("*.bias", 0.5, 0.0), group("z*", 2.0, 1.0)];
    let rules = [ADAMW, Algorithm::ADAM, Algorithm::LION];
    let sgd = Algorithm::Sgd { momentum: 0.9, nesterov: true };
    for (i, format) in formats().into_iter().enumerate() {
        for (j, algorithm) in rules.into_iter().chain([sgd]).enumerate() {
            for (dtype, weights) in [
                (DType::F32, Rounding::Nearest),
                (DType::BF16, Rounding::Stochastic),
                (DType::F16, Rounding::Kahan),
                (DType::F64, Rounding::Nearest),
            ] {
                let groups = groups.clone();
                let config =
                    Config { groups, format, weights, seed: 5, ..Config::new(algorithm, 0.0) };
                let (ram_params, file_params) = (mixed(dtype), mixed(dtype));
                let name = format!("opt-4-{i}-{j}-{dtype:?}");
                let window_bytes = 45_000;
                let mut ram = optimizer(&ram_params, &config);
                let mut file = optimizer(&file_params, &in_file(&config, &name, window_bytes));
                for k in 0..5 {
                    ram.set_learning_rate(0.01 / (k + 1) as f64);
                    file.set_learning_rate(0.01 / (k + 1) as f64);
                    ram.step(&seeded(&ram_params, k)).expect("gradients fit");
                    file.step(&seeded(&file_params, k)).expect("gradients fit");
                    assert_eq!(
                        common::weights(&ram_params),
                        common::weights(&file_params),
                        "{name}, {k}"
                    );
                }
                assert_eq!(ram.state_bytes(), file.state_bytes());
                assert!(file.resident_state_bytes() <= window_bytes);
                // The states too, bit for bit.
                let saved = [("ram", &ram), ("file", &file)].map(|(kind, optimizer)| {
                    let path = path(&format!("{name}-{kind}"));
                    optimizer.save(&path).expect("saved");
                    let bytes = fs::read(&path).expect("saved");
                    fs::remove_file(&path).expect("it exists");
                    bytes
                });
                let [ram, file] = saved
                    .each_ref()
                    .map(|b| safetensors::SafeTensors::deserialize(b).expect("a whole file"));
                for name in ram.names() {
                    let [a, b] = [&ram, &file].map(|f| f.tensor(name).expect("same names"));
                    assert!(a.data() == b.data() && a.dtype() == b.dtype(), "{name}");
                }
            }
        }
    }
}

#[test]
fn the_state_file_is_scratch() {
    let path = path("scratch");
    fs::write(&path, vec![0xa5; 100_000]).expect("a file left over by a crash");
    let config = Config::new(ADAMW, 0.01);
    let place = Place::File { path: path.clone(), window_bytes: 1 << 20 };
    let in_file = Config { place, ..config.clone() };
    let (left, right) = (mixed(DType::F32), mixed(DType::F32));
    let mut first = optimizer(&left, &in_file);
    let error = Optimizer::new(&right, in_file.clone()).unwrap_err();
    assert!(matches!(error, Error::State(StateError::InUse { .. })), "{error}");
    // Nothing of the old file is taken for a state.
    let mut ram = optimizer(&right, &config);
    first.step(&seeded(&left, 0)).expect("gradients fit");
    ram.step(&seeded(&right, 0)).expect("gradients fit");
    assert_eq!(weights(&left), weights(&right));
    drop(first);
    assert!(!path.exists());
}

#[test]
fn groups_freeze_scale_and_decay() {
    let params =
        params(&[("h.0.w", &[3]), ("h.1.w", &[3]), ("norm", &[3]), ("x", &[3])], DType::F64);
    let frozen = Group { pattern: "h.0.*".into(), treatment: Treatment::Frozen };
    let groups = vec![frozen, group("h.*", 0.5, 0.0), group("norm", 1.0, 0.2)];
    let config = Config { groups, weight_decay: 0.1, ..Config::new(Algorithm::SGD, 0.01) };
    let mut optimizer = optimizer(&params, &config);
    assert_eq!(optimizer.names().collect::<Vec<_>>(), ["h.1.w", "norm", "x"]);
    let before: Vec<_> = params.iter().map(|(_, var)| values(var)).collect();
    let grads: Vec<_> = params
        .iter()
        .map(|(_, var)| (var, Tensor::ones(3, DType::F64, &Device::Cpu).expect("ones")))
        .collect();
    optimizer.step(&store(&grads)).expect("gradients fit");
    for (i, (factor, decay)) in
        [(0.0, 0.0), (0.5, 0.0), (1.0, 0.2), (1.0, 0.1)].into_iter().enumerate()
    {
        let want: Vec<f64> =
            before[i].iter().map(|p| p - 0.01 * factor * (1.0 + decay * p)).collect();
        assert_close(&params[i].0, &values(&params[i].1), &want, Tol::Rel(1e-15));
    }
    let ones = Tensor::ones(3, DType::F64, &Device::Cpu).expect("ones");
    let frozen = optimizer.step_var(&params[0].1, &ones, 1.0).expect("the gradient fits");
    assert_eq!(frozen, Stepped::NotTrained);
    assert!(optimizer.step_one("h.0.w", &ones).unwrap_err().to_string().contains("`h.0.w`"));
}

#[test]
fn gradient_by_gradient_is_the_whole_store_at_once() {
    for format in formats() {
        let config = Config { format, seed: 3, ..Config::new(ADAMW, 0.01) };
        let (whole, single) = (mixed(DType::BF16), mixed(DType::BF16));
        let (mut at_once, mut one_by_one) =
            (optimizer(&whole, &config), optimizer(&single, &config));
        for k in 0..3 {
            at_once.step(&seeded(&whole, k)).expect("gradients fit");
            let grads = seeded(&single, k);
            for (_, var) in single.iter().rev() {
                let grad = grads.get(var).expect("each has one");
                let stepped = one_by_one.step_var(var, grad, 1.0).expect("the gradient fits");
                assert_eq!(stepped, Stepped::Updated);
            }
            assert_eq!(weights(&whole), weights(&single));
        }
    }
}

#[test]
fn gradients_of_another_type_or_layout_are_taken() {
    let config = Config::new(ADAMW, 0.01);
    for param_dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let grad = tensor(9, &[6, 4], DType::BF16);
        let run = |grad: &Tensor| {
            let params = params(&[("w", &[6, 4])], param_dtype);
            optimizer(&params, &config).step_one("w", grad).expect("the gradient fits");
            weights(&params)
        };
        let want = run(&grad);
        for dtype in [DType::F32, DType::F64] {
            assert_eq!(want, run(&grad.to_dtype(dtype).expect("exact")));
        }
        let strided = grad.t().and_then(|g| g.contiguous()).and_then(|g| g.t()).expect("a view");
        assert!(!strided.is_contiguous());
        assert_eq!(want, run(&strided));
    }
}

#[test]
fn bad_settings_are_named() {
    let w = params(&[("w", &[5000])], DType::F32);
    let adamw = |beta1, beta2, eps| Algorithm::AdamW { beta1, beta2, eps };
    let c = |algorithm, lr| Config::new(algorithm, lr);
    let rows: Vec<(Config, &str)> = vec![
        (c(ADAMW, f64::NAN), "learning_rate is NaN"),
        (c(ADAMW, -1.0), "learning_rate is -1"),
        (c(adamw(1.0, 0.9, 1e-8), 0.1), "beta1 is 1"),
        (c(adamw(0.9, -0.5, 1e-8), 0.1), "beta2 is -0.5"),
        (c(adamw(0.9, 0.9, 0.0), 0.1), "eps is 0"),
        (c(Algorithm::Sgd { momentum: 0.0, nesterov: true }, 0.1), "momentum is 0"),
        (c(Algorithm::Lion { beta1: f64::NAN, beta2: 0.9 }, 0.1), "beta1 is NaN"),
        (Config { weight_decay: f64::INFINITY, ..c(ADAMW, 0.1) }, "weight_decay is inf"),
        (
            Config { groups: vec![group("w", -2.0, 0.0)], ..c(ADAMW, 0.1) },
            "group `w`: learning_rate_factor is -2",
        ),
        (Config { format: StateFormat::Bits8 { block_elems: 0 }, ..c(ADAMW, 0.1) }, "block is 0"),
        (
            Config { format: StateFormat::Bits8 { block_elems: usize::MAX }, ..c(ADAMW, 0.1) },
            "block is 18446744073709551615",
        ),
        (Config { format: BITS8, ..c(Algorithm::ADAFACTOR, 0.1) }, "Adafactor"),
        (in_file(&c(Algorithm::ADAFACTOR, 0.1), "adafactor", 1 << 20), "Adafactor"),
        (in_file(&c(ADAMW, 0.1), "window", 16_383), "16383 bytes is too small: `w` needs 16384"),
    ];
    for (config, want) in rows {
        let error = Optimizer::new(&w, config).unwrap_err();
        assert!(matches!(error, Error::Config(_)) && error.to_string().contains(want), "{error}");
    }
    let mut late = optimizer(&w, &c(ADAMW, 0.1));
    late.set_learning_rate(f64::NAN);
    let before = weights(&w);
    let error = late.step(&seeded(&w, 0)).unwrap_err();
    assert!(matches!(error, Error::Config(ConfigError::Setting { .. })), "{error}");
    assert_eq!((before, late.n_updates("w")), (weights(&w), Some(0)));
}

#[test]
fn bad_parameters_and_gradients_are_named() {
    let config = Config::new(ADAMW, 0.1);
    let refused = |params: &[(String, Var)]| match Optimizer::new(params, config.clone()) {
        Err(Error::Parameter(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(&[]), ParameterError::None { n_parameters: 0 });
    let a = params(&[("a", &[3]), ("b", &[2])], DType::F32);
    let tied = [a[0].clone(), ("tied".to_string(), a[0].1.clone())];
    assert_eq!(
        refused(&tied).to_string(),
        "parameters `a` and `tied` are the same variable or name"
    );
    let twice = [a[0].clone(), ("a".to_string(), a[1].1.clone())];
    assert!(matches!(refused(&twice), ParameterError::Twice { .. }));
    let ids =
        Var::from_tensor(&Tensor::new(&[1u32], &Device::Cpu).expect("an id")).expect("a copy");
    assert_eq!(
        refused(&[("ids".into(), ids)]).to_string(),
        "parameter `ids` is U32: it must be f32, f64, bf16 or f16"
    );
    let strided = a[0].1.as_tensor().reshape((3, 1)).expect("the same elements");
    assert!(Var::from_tensor(&strided).expect("a copy").is_contiguous());

    // The second gradient is wrong: the first parameter is not updated either.
    let mut optimizer = optimizer(&a, &config);
    let before = weights(&a);
    let wrong = Tensor::ones((2, 2), DType::F32, &Device::Cpu).expect("ones");
    let error = optimizer.step_one("b", &wrong).unwrap_err().to_string();
    assert!(error.contains("`b`") && error.contains("[2, 2]") && error.contains("[2]"), "{error}");
    let mut grads = seeded(&a, 0);
    grads.insert(&a[1].1, wrong);
    assert!(matches!(optimizer.step(&grads), Err(Error::Gradient { .. })));
    // A gradient that is the parameter itself cannot be read while it is written.
    assert!(optimizer.step_one("a", &a[0].1).is_err());
    assert_eq!((before, optimizer.n_updates("a")), (weights(&a), Some(0)));
}

#[test]
fn candle_s_own_interface() {
    use candle_nn::Optimizer as _;
    let var = common::var(1, &[4], DType::F32);
    let config = Config { weight_decay: 0.1, ..Config::new(ADAMW, 0.01) };
    let mut ours =
        <Optimizer as candle_nn::Optimizer>::new(vec![var.clone()], config).expect("sound");
    let theirs_var = common::var(1, &[4], DType::F32);
    let params = candle_nn::ParamsAdamW { lr: 0.01, weight_decay: 0.1, ..Default::default() };
    let mut theirs = candle_nn::AdamW::new(vec![theirs_var.clone()], params).expect("sound");
    for _ in 0..5 {
        for (var, loss) in [(&var, 0), (&theirs_var, 1)] {
            let sum = var.sqr().and_then(|x| x.sum_all()).expect("a sum");
            let stepped =
                if loss == 0 { ours.backward_step(&sum) } else { theirs.backward_step(&sum) };
            stepped.expect("it has a gradient");
        }
    }
    assert_close("candle's AdamW", &values(&var), &values(&theirs_var), Tol::Rel(1e-6));
    let empty = <Optimizer as candle_nn::Optimizer>::empty(Config::new(ADAMW, 0.1)).unwrap_err();
    assert!(empty.to_string().contains("none of the 0 parameters"), "{empty}");
}

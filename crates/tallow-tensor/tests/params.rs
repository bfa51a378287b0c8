//! Named parameters: values by name and seed, one order, typed refusals, the guard.

mod support;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{
    Init, VarBuilder,
    init::{FanInOut, NonLinearity, NormalOrUniform},
};
use support::{host, tensor};
use tallow_tensor::{Params, is_buffer, layers, missing_gradients, ops::Then};
use tallow_testkit::{Tol, assert_close, values};

fn stored(params: &Params) -> Vec<(String, Vec<f64>)> {
    params.all().iter().map(|(name, var)| (name.clone(), host(var))).collect()
}

type Step = fn(&VarBuilder);

const STEPS: [Step; 3] = [
    |vb| drop(layers::linear(5, 3, vb.pp("fc")).expect("a layer")),
    |vb| drop(layers::batch_norm2d(4, Then::Relu, vb.pp("bn")).expect("a layer")),
    |vb| drop(layers::embedding(6, 2, vb.pp("wte")).expect("a layer")),
];

fn built(seed: u64, order: [usize; 3], dtype: DType) -> Params {
    let params = Params::new(seed);
    let vb = params.builder(dtype, &Device::Cpu);
    order.iter().for_each(|&i| STEPS[i](&vb));
    params
}

#[test]
fn values_are_a_function_of_seed_and_name() {
    let first = stored(&built(1, [0, 1, 2], DType::F32));
    for order in [[2, 1, 0], [1, 0, 2], [1, 2, 0]] {
        assert_eq!(stored(&built(1, order, DType::F32)), first, "{order:?}");
    }
    let other = stored(&built(2, [0, 1, 2], DType::F32));
    let drawn = |name: &str| ["fc.weight", "fc.bias", "wte.weight"].contains(&name);
    for ((name, a), (_, b)) in first.iter().zip(&other) {
        assert_eq!(a != b, drawn(name), "{name}");
    }
    // Names with the same shape and initialisation differ too.
    let params = Params::new(1);
    let vb = params.builder(DType::F32, &Device::Cpu);
    for name in ["a", "b", "ab", "ba"] {
        layers::linear(5, 3, vb.pp(name)).expect("a layer");
    }
    let all = stored(&params);
    for (i, (name, a)) in all.iter().enumerate() {
        for (other, b) in &all[..i] {
            assert!(a != b, "{name} and {other}");
        }
    }
}

/// A model may be built in bf16 from the seed of one in f32: the same numbers, rounded.
#[test]
fn a_narrow_value_is_the_wide_one_rounded() {
    let wide = built(1, [0, 1, 2], DType::F32);
    let narrow = built(1, [0, 1, 2], DType::BF16);
    for ((name, wide), (_, narrow)) in wide.all().iter().zip(&narrow.all()) {
        let rounded = wide.to_dtype(narrow.dtype()).expect("a float");
        assert_eq!(host(narrow), host(&rounded), "{name}");
        // Running statistics stay in f32.
        let dtype = if is_buffer(name) { DType::F32 } else { DType::BF16 };
        assert_eq!(narrow.dtype(), dtype, "{name}");
    }
}

/// Mean and spread of 65536 draws: 2 % are five standard errors of the mean, seven of the spread.
const DRAWN: Tol = Tol::Rel(0.02);

#[test]
fn spread_of_the_initial_values() {
    let kaiming = |dist, fan, non_linearity| Init::Kaiming { dist, fan, non_linearity };
    let (normal, uniform) = (NormalOrUniform::Normal, NormalOrUniform::Uniform);
    // Of [256, 16, 4, 4]: fan in 16 * 16, fan out 256 * 16; the gain of relu is sqrt(2).
    let rows = [
        (
            "fan in",
            kaiming(normal, FanInOut::FanIn, NonLinearity::ReLU),
            0.0,
            (2.0f64 / 256.0).sqrt(),
        ),
        (
            "fan out",
            kaiming(normal, FanInOut::FanOut, NonLinearity::ReLU),
            0.0,
            (2.0f64 / 4096.0).sqrt(),
        ),
        ("no gain", kaiming(normal, FanInOut::FanIn, NonLinearity::Linear), 0.0, 1.0 / 16.0),
        (
            "uniform",
            kaiming(uniform, FanInOut::FanIn, NonLinearity::ReLU),
            0.0,
            (2.0f64 / 256.0).sqrt(),
        ),
        ("between", Init::Uniform { lo: -1.0, up: 3.0 }, 1.0, 4.0 / 12.0f64.sqrt()),
        ("normal", Init::Randn { mean: 1.0, stdev: 2.0 }, 1.0, 2.0),
    ];
    for (name, init, mean, spread) in rows {
        let vb = Params::new(5).builder(DType::F32, &Device::Cpu);
        let x = host(&vb.get_with_hints((256, 16, 4, 4), name, init).expect("a new name"));
        let n = x.len() as f64;
        let got_mean = x.iter().sum::<f64>() / n;
        let got_spread = (x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n).sqrt();
        // The mean is judged beside the spread: where it is 0 it has no size of its own.
        assert_close(name, &[got_mean, got_spread], &[mean, spread], DRAWN);
    }
    let vb = Params::new(5).builder(DType::F32, &Device::Cpu);
    let seven = vb.get_with_hints(3, "constant", Init::Const(7.0)).expect("a new name");
    assert_close("constant", &host(&seven), &[7.0; 3], Tol::Exact);
}

#[test]
fn one_order_sorted_by_name_without_running_statistics() {
    let params = built(1, [2, 1, 0], DType::F32);
    let names = |list: Vec<(String, candle_core::Var)>| -> Vec<String> {
        list.into_iter().map(|(name, _)| name).collect()
    };
    let trainable = ["bn.bias", "bn.weight", "fc.bias", "fc.weight", "wte.weight"];
    assert_eq!(names(params.trainable()), trainable);
    let mut all = vec!["bn.running_mean", "bn.running_var"];
    all.extend(trainable);
    all.sort_unstable();
    assert_eq!(names(params.all()), all);
    assert_eq!(params.n_trainable(), 4 + 4 + 3 + 15 + 12);
    for (name, buffer) in [
        ("running_mean", true),
        ("bn.running_var", true),
        ("bn.num_batches_tracked", true),
        ("running_mean.weight", false),
        ("my_running_mean", false),
        ("", false),
    ] {
        assert_eq!(is_buffer(name), buffer, "{name}");
    }
}

#[test]
fn a_name_is_one_parameter() {
    let params = Params::new(1);
    let vb = params.builder(DType::F32, &Device::Cpu);
    let first = layers::linear(5, 3, vb.pp("fc")).expect("a layer");
    let again = layers::linear(5, 3, vb.pp("fc")).expect("the same one");
    assert_eq!(params.all().len(), 2);
    // Shared, not copied: what one sees the other does.
    let weight = &params.all()[1].1;
    weight.set(&tensor(&[2.0; 15], &[3, 5], DType::F32)).expect("one shape");
    for layer in [&first, &again] {
        assert_close("weight", &host(layer.weight()), &[2.0; 15], Tol::Exact);
    }
    assert_eq!(again.weight().id(), weight.as_tensor().id());
    let clone = params.clone();
    layers::linear(5, 3, clone.builder(DType::F32, &Device::Cpu).pp("fc2")).expect("a layer");
    assert_eq!(params.all().len(), 4);
}

#[test]
fn another_shape_is_refused_by_name() {
    let params = Params::new(1);
    let vb = params.builder(DType::F32, &Device::Cpu);
    layers::linear(5, 3, vb.pp("h.0.fc")).expect("a layer");
    for (asked, shape) in [((3, 6), "[3, 6]"), ((5, 3), "[5, 3]")] {
        let error = vb.get(asked, "h.0.fc.weight").expect_err("another shape");
        let message =
            format!("parameter `h.0.fc.weight` has shape [3, 5], the model asks for {shape}");
        assert!(error.to_string().contains(&message), "{error}");
    }
    assert_eq!(params.all().len(), 2, "nothing was added");
}

#[test]
fn missing_gradients_are_named_in_order() {
    let params = built(1, [0, 1, 2], DType::F32);
    let vb = params.builder(DType::F32, &Device::Cpu);
    let fc = layers::linear(5, 3, vb.pp("fc")).expect("a layer");
    let x = tensor(&values(1, 10), &[2, 5], DType::F32);
    let grads =
        |x: &Tensor| fc.forward(x).and_then(|out| out.sum_all()?.backward()).expect("a graph");
    let missing = missing_gradients(&grads(&x), &params.trainable());
    assert_eq!(missing, ["bn.bias", "bn.weight", "wte.weight"]);
    let fc_only: Vec<_> =
        params.trainable().into_iter().filter(|(name, _)| name.starts_with("fc")).collect();
    assert_eq!(missing_gradients(&grads(&x), &fc_only), [""; 0]);
    // A gradient of zeros is a gradient.
    let zeros = tensor(&[0.0; 10], &[2, 5], DType::F32);
    assert_eq!(missing_gradients(&grads(&zeros), &fc_only), [""; 0]);
}

#[test]
fn another_dtype_is_refused_by_name() {
    let params = Params::new(0);
    let shape = (2, 3);
    params.builder(DType::F32, &Device::Cpu).get(shape, "w").expect("made");
    let error = params.builder(DType::BF16, &Device::Cpu).get(shape, "w").expect_err("refused");
    let error = error.to_string();
    assert!(error.contains("parameter `w` is F32, the model asks for BF16"), "{error}");
}

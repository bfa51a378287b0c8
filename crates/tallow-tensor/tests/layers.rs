//! Every layer trains: gradients by name, hidden state that changes once, refusals that say why.

mod support;

use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use support::{Layout, gradient, host, run, tensor};
use tallow_tensor::{
    Error, Params, Result,
    layers::{self, BatchNorm2d, Dropout, HeadSizes, MultiHeadAttention, StatUpdates},
    missing_gradients,
    ops::{self, Conv2dConfig, CrossEntropy, Divisor, DropKey, Mask, Pool2dConfig, Rope, Then},
    pass::{self, Position},
};
use tallow_testkit::{Tol, assert_close, central_difference, values};

/// KER-1 asks for 1e-3; in f64 the differences themselves are good to this.
const DIFFERENCES: Tol = Tol::Rel(1e-6);
const H: f64 = 1e-5;

type Forward = Box<dyn Fn(&Tensor) -> candle_core::Result<Tensor>>;
type Build = fn(VarBuilder) -> candle_core::Result<Forward>;

/// A layer, the shape of its input, and the parameters whose true gradient is 0.
struct Row {
    name: &'static str,
    input: &'static [usize],
    flat: &'static [&'static str],
    build: Build,
}

fn module(m: impl Module + 'static) -> candle_core::Result<Forward> {
    Ok(Box::new(move |x| m.forward(x)))
}

fn training(m: impl ModuleT + 'static) -> candle_core::Result<Forward> {
    Ok(Box::new(move |x| m.forward_t(x, true)))
}

/// `sum(out^2)` of normalised channels hardly depends on the input, were it not for eps.
fn roomy(mut layer: BatchNorm2d) -> BatchNorm2d {
    layer.eps = 0.1;
    layer
}

const STEM: Conv2dConfig = Conv2dConfig { stride: [2, 2], padding: [1, 1], ..Conv2dConfig::UNIT };
const WINDOW: Pool2dConfig = Pool2dConfig { kernel: [3, 3], stride: [2, 2], padding: [1, 1] };
const FULL_HEADS: HeadSizes = HeadSizes { n_heads: 2, n_kv_heads: 2, head_dim: 3 };
const GROUPED_HEADS: HeadSizes = HeadSizes { n_heads: 4, n_kv_heads: 2, head_dim: 3 };
/// A shift of all keys moves all scores of a query alike, and softmax does not see it.
const KEY_BIAS: &[&str] = &["k_proj.bias"];

const ROWS: [Row; 20] = [
    Row {
        name: "linear",
        input: &[2, 3, 5],
        flat: &[],
        build: |vb| module(layers::linear(5, 4, vb)?),
    },
    Row {
        name: "linear_no_bias",
        input: &[7, 5],
        flat: &[],
        build: |vb| module(layers::linear_no_bias(5, 1, vb)?),
    },
    Row {
        name: "conv2d",
        input: &[2, 3, 7, 8],
        flat: &[],
        build: |vb| module(layers::conv2d(3, 4, [3, 3], STEM, vb)?),
    },
    Row {
        name: "conv2d_no_bias",
        input: &[2, 4, 5, 4],
        flat: &[],
        build: |vb| {
            let cfg = Conv2dConfig { groups: 2, ..Conv2dConfig::UNIT };
            module(layers::conv2d_no_bias(4, 2, [3, 2], cfg, vb)?)
        },
    },
    Row {
        name: "batch_norm2d",
        input: &[2, 3, 2, 3],
        flat: &[],
        build: |vb| training(roomy(layers::batch_norm2d(3, Then::Identity, vb)?)),
    },
    Row {
        name: "batch_norm2d, relu",
        input: &[2, 3, 2, 3],
        flat: &[],
        build: |vb| training(roomy(layers::batch_norm2d(3, Then::Relu, vb)?)),
    },
    Row {
        name: "batch_norm2d, evaluation",
        input: &[2, 3, 2, 3],
        flat: &[],
        build: |vb| {
            let layer = layers::batch_norm2d(3, Then::Identity, vb)?;
            Ok(Box::new(move |x| layer.forward_t(x, false)))
        },
    },
    Row {
        name: "batch_norm2d, relu, evaluation",
        input: &[2, 3, 2, 3],
        flat: &[],
        build: |vb| {
            let layer = layers::batch_norm2d(3, Then::Relu, vb)?;
            Ok(Box::new(move |x| layer.forward_t(x, false)))
        },
    },
    Row {
        name: "layer_norm",
        input: &[2, 3, 7],
        flat: &[],
        build: |vb| module(layers::layer_norm(7, 1e-5, vb)?),
    },
    Row {
        name: "rms_norm",
        input: &[2, 3, 7],
        flat: &[],
        build: |vb| module(layers::rms_norm(7, 1e-5, vb)?),
    },
    Row { name: "dropout", input: &[3, 5], flat: &[], build: |_| training(Dropout::new(0.4, 11)?) },
    Row {
        name: "dropout, evaluation",
        input: &[3, 5],
        flat: &[],
        build: |_| {
            let layer = Dropout::new(0.4, 11)?;
            Ok(Box::new(move |x| layer.forward_t(x, false)))
        },
    },
    Row {
        name: "attention, causal",
        input: &[2, 5, 6],
        flat: KEY_BIAS,
        build: |vb| module(MultiHeadAttention::new(6, FULL_HEADS, Mask::Causal, vb)?),
    },
    Row {
        name: "attention, full",
        input: &[2, 5, 6],
        flat: KEY_BIAS,
        build: |vb| module(MultiHeadAttention::new(6, FULL_HEADS, Mask::Full, vb)?),
    },
    Row {
        name: "attention, grouped",
        input: &[2, 5, 6],
        flat: KEY_BIAS,
        build: |vb| module(MultiHeadAttention::new(6, GROUPED_HEADS, Mask::Causal, vb)?),
    },
    Row {
        name: "attention, no bias",
        input: &[2, 5, 6],
        flat: &[],
        build: |vb| module(MultiHeadAttention::no_bias(6, GROUPED_HEADS, Mask::Full, vb)?),
    },
    Row {
        name: "rotary",
        input: &[2, 3, 5, 6],
        flat: &[],
        build: |vb| {
            // The square of a turned pair is that of the pair: a weight in front breaks the tie.
            let weight = vb.get_with_hints(6, "weight", Init::Const(1.0))?;
            let layer = layers::Rotary::new(ops::rope_frequencies(6, 10.0)?, Rope::Half);
            let add = vb.get_with_hints((5, 6), "shift", Init::Const(0.0))?;
            Ok(Box::new(move |x| {
                let turned = layer.forward(&x.broadcast_mul(&weight)?, 2)?;
                Ok(ops::add(&turned, &add)?)
            }))
        },
    },
    Row {
        name: "max_pool2d",
        input: &[2, 2, 5, 6],
        flat: &[],
        build: |_| module(layers::MaxPool2d(WINDOW)),
    },
    Row {
        name: "avg_pool2d",
        input: &[2, 2, 5, 6],
        flat: &[],
        build: |_| module(layers::AvgPool2d { cfg: WINDOW, divisor: Divisor::Window }),
    },
    Row {
        name: "avg_pool2d, inside",
        input: &[2, 2, 5, 6],
        flat: &[],
        build: |_| module(layers::AvgPool2d { cfg: WINDOW, divisor: Divisor::Inside }),
    },
];

/// Values without symmetry: a fresh scale of 1 and shift of 0 would make `sum(out^2)` a constant.
fn fill(params: &Params) {
    for (i, (name, var)) in params.all().iter().enumerate() {
        if name != "input" {
            // Positive where a variance must be, and far enough from 0 for the square root.
            let v = values(i as u64 + 1, var.elem_count());
            let v: Vec<f64> = v.iter().map(|v| v * 0.8 + 1.0).collect();
            var.set(&tensor(&v, var.dims(), var.dtype())).expect("one shape");
        }
    }
}

/// The gradient of the scalar `loss` by the elements of `var`, which keeps its values.
fn differences(var: &Var, loss: impl Fn() -> Tensor) -> Vec<f64> {
    let start = host(var);
    let set = |v: &[f64]| var.set(&tensor(v, var.dims(), DType::F64)).expect("one shape");
    let moved = |v: &[f64]| {
        set(v);
        host(&loss())[0]
    };
    let slopes = central_difference(moved, &start, H);
    set(&start);
    slopes
}

fn largest(v: &[f64]) -> f64 {
    v.iter().fold(0.0, |largest, v| v.abs().max(largest))
}

/// The input is a parameter too: a layer that drops the graph freezes what is upstream of it.
fn ker_1(row: &Row, layout: Layout) {
    let what = format!("{} {layout:?}", row.name);
    let params = Params::new(1);
    let vb = params.builder(DType::F64, &Device::Cpu);
    let init = Init::Randn { mean: 0.0, stdev: 1.0 };
    let x = vb.get_with_hints(row.input, "input", init).expect("a new name");
    let layer = (row.build)(vb).expect(&what);
    fill(&params);
    let loss = || {
        pass::begin_step(7); // the same masks each time
        let out = layer(&layout.of(&x).expect("a view")).expect(&what);
        out.sqr().and_then(|sq| sq.sum_all()).expect("floats")
    };
    let grads = loss().backward().expect(&what);
    assert_eq!(missing_gradients(&grads, &params.trainable()), [""; 0], "{what}");
    for (name, var) in params.trainable() {
        let what = format!("{what}: {name}");
        let mut got = host(&gradient(&what, &grads, &var));
        assert!(got.iter().all(|g| g.is_finite()), "{what}: {got:?}");
        let mut want = differences(&var, loss);
        if row.flat.contains(&name.as_str()) {
            // Nothing but rounding: judged beside the largest gradient there is.
            let all = params.trainable();
            let all = all.iter().map(|(_, var)| largest(&host(&gradient(&what, &grads, var))));
            let scale = all.fold(0.0, f64::max);
            got.push(scale);
            want = [vec![0.0; want.len()], vec![scale]].concat();
        } else {
            assert!(largest(&got) > 0.0, "{what}: the gradient is zero");
        }
        assert_close(&what, &got, &want, DIFFERENCES);
    }
}

#[test]
fn ker_1_every_layer_has_the_gradients_of_differences() {
    for row in &ROWS {
        for layout in [Layout::Dense, Layout::Strided, Layout::Offset] {
            ker_1(row, layout);
        }
    }
}

#[test]
fn ker_1_embeddings() {
    let params = Params::new(1);
    let layer = layers::embedding(6, 3, params.builder(DType::F64, &Device::Cpu)).expect("a layer");
    let ids = Tensor::new(&[[4u32, 0, 4], [1, 4, 2]], &Device::Cpu).expect("ids");
    let [(name, table)] = &params.trainable()[..] else { panic!("one parameter") };
    for ids in [&ids, &ids.t().expect("a matrix"), &ids.narrow(1, 1, 2).expect("two columns")] {
        let loss = || {
            let out = layer.forward(ids).expect("ids below 6");
            out.sqr().and_then(|sq| sq.sum_all()).expect("floats")
        };
        let got = host(&gradient(name, &loss().backward().expect("a graph"), table));
        let want = differences(table, loss);
        assert_close(name, &got, &want, DIFFERENCES);
    }
}

/// What stands between two linear layers, and the parameters that then get no gradient.
fn lost(between: impl Fn(&Tensor, VarBuilder) -> candle_core::Result<Tensor>) -> Vec<String> {
    let params = Params::new(1);
    let vb = params.builder(DType::F32, &Device::Cpu);
    let x = tensor(&values(1, 15), &[3, 5], DType::F32);
    let loss = || {
        let hidden = layers::linear(5, 8, vb.pp("up"))?.forward(&x)?;
        let hidden = between(&hidden, vb.pp("between"))?;
        layers::linear(8, 2, vb.pp("down"))?.forward(&hidden)?.sqr()?.sum_all()
    };
    let grads = loss().and_then(|loss| loss.backward()).expect("it runs all the same");
    missing_gradients(&grads, &params.trainable())
}

/// The trap itself: should candle close it, this test says so.
#[test]
fn ker_1_spare_12_candles_fused_layers_are_caught() {
    const UP: [&str; 2] = ["up.bias", "up.weight"];
    let with_own = ["between.bias", "between.weight", "up.bias", "up.weight"];
    assert_eq!(lost(|x, vb| candle_nn::layer_norm(8, 1e-5, vb)?.forward(x)), with_own);
    let scale_too = ["between.weight", "up.bias", "up.weight"];
    assert_eq!(lost(|x, vb| candle_nn::rms_norm(8, 1e-5, vb)?.forward(x)), scale_too);
    assert_eq!(lost(|x, _| candle_nn::ops::softmax_last_dim(x)), UP);
    // And ours in the same places.
    let ours: [fn(&Tensor, VarBuilder) -> candle_core::Result<Tensor>; 3] = [
        |x, vb| layers::layer_norm(8, 1e-5, vb)?.forward(x),
        |x, vb| layers::rms_norm(8, 1e-5, vb)?.forward(x),
        |x, _| Ok(ops::softmax(x)?),
    ];
    for between in ours {
        assert_eq!(lost(between), [""; 0]);
    }
    // Frozen on purpose is reported alike: the trainer is told which.
    assert_eq!(lost(|x, _| Ok(x.detach())), UP);
}

/// One feature, momentum 0.1, running mean 0 and variance 1.
fn one_feature(updates: StatUpdates) -> BatchNorm2d {
    let vb = Params::new(1).builder(DType::F32, &Device::Cpu);
    let mut layer = layers::batch_norm2d(1, Then::Identity, vb).expect("a layer");
    layer.updates = updates;
    layer
}

#[track_caller]
fn running(what: &str, layer: &BatchNorm2d, want: [f64; 2]) {
    let (mean, var) = layer.running();
    assert_close(what, &[host(mean), host(var)].concat(), &want, Tol::Ulps(1));
}

/// Batch mean 2 and unbiased variance 2, so after one update 0.2 and 1.1, after two 0.38 and 1.19.
#[test]
fn rec_1_running_statistics_change_once_a_step() {
    const BEFORE: [f64; 2] = [0.0, 1.0];
    const ONCE: [f64; 2] = [0.2, 1.1];
    const TWICE: [f64; 2] = [0.38, 1.19];
    let x = Var::new(&[[1f32], [3.0]], &Device::Cpu).expect("a variable");
    let x = x.as_tensor();
    let forward = |layer: &BatchNorm2d| layer.forward_t(x, true).expect("two values");

    let layer = one_feature(StatUpdates::EachForward);
    let out = forward(&layer);
    running("forward only", &layer, ONCE);
    out.sum_all().and_then(|sum| sum.backward()).expect("a graph");
    running("forward and backward", &layer, ONCE);
    forward(&layer);
    running("two forwards", &layer, TWICE);

    let layer = one_feature(StatUpdates::EachForward);
    let here = pass::position();
    let out = forward(&layer);
    let again = pass::replay(here, || pass::replay(here, || forward(&layer)));
    assert_close("replayed output", &host(&again), &host(&out), Tol::Exact);
    again.sum_all().and_then(|sum| sum.backward()).expect("a graph");
    running("replayed, nested", &layer, ONCE);
    assert!(!pass::is_replay());

    let layer = one_feature(StatUpdates::ByCaller);
    let (_, stats) = layer.forward_batch(x).expect("two values");
    forward(&layer);
    running("by the caller, not yet", &layer, BEFORE);
    layer.update(&stats, 2).expect("one channel");
    running("by the caller", &layer, ONCE);

    let layer = one_feature(StatUpdates::EachForward);
    let out = layer.forward_t(x, false).expect("no statistics needed");
    running("evaluation", &layer, BEFORE);
    let scale = 1.0 / 1.00001f64.sqrt();
    assert_close("evaluation", &host(&out), &[scale, 3.0 * scale], Tol::Ulps(1));
    for _ in 0..5 {
        forward(&layer);
    }
    // N micro-batches are N updates: 2 (1 - 0.9^5) and 1 + (1 - 0.9^5).
    let moved = 1.0 - 0.9f64.powi(5);
    let what = [host(layer.running().0), host(layer.running().1)].concat();
    assert_close("five micro-batches", &what, &[2.0 * moved, 1.0 + moved], Tol::Ulps(5));
}

/// Output of a dropout of 64 ones, and the gradient of `sum(out * a)`, `a` = 1..64.
fn dropped(forward: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>) -> [Vec<f64>; 2] {
    let x = Var::from_vec(vec![1f32; 64], 64, &Device::Cpu).expect("a variable");
    let a = tensor(&(1..=64).map(f64::from).collect::<Vec<_>>(), &[64], DType::F32);
    let out = forward(&x).expect("floats");
    let grads = (&out * a).and_then(|p| p.sum_all()?.backward()).expect("a graph");
    [host(&out), host(&gradient("dropout", &grads, &x))]
}

#[test]
fn rec_2_a_mask_is_a_function_of_seed_step_and_draw() {
    let at = |seed: u64| move |x: &Tensor| Dropout::new(0.5, seed)?.forward_t(x, true);
    pass::begin_step(3);
    let start = pass::position();
    let [out, grad] = dropped(at(9));
    assert_eq!(pass::position(), Position { step: 3, draws: 1 });
    let want = out.iter().zip(1..).map(|(out, a)| if *out == 0.0 { 0.0 } else { 2.0 * a as f64 });
    assert_close("gradient", &grad, &want.collect::<Vec<_>>(), Tol::Exact);
    assert!(out.iter().all(|&v| v == 0.0 || v == 2.0), "{out:?}");
    let n_kept = out.iter().filter(|&&v| v != 0.0).count();
    assert!((16..=48).contains(&n_kept), "{n_kept} of 64 kept: four standard deviations off");

    let second = dropped(at(9));
    assert_ne!(second[0], out, "two calls");
    let position = pass::position();
    assert_eq!(pass::replay(start, || dropped(at(9))), [out.clone(), grad], "replayed");
    // Two in a segment: each gets its own mask back.
    let both = pass::replay(start, || [dropped(at(9)), dropped(at(9))]);
    assert_eq!([&both[0][0], &both[1][0]], [&out, &second[0]], "both replayed");
    assert_eq!(pass::position(), position, "a replay leaves the position");

    pass::begin_step(4);
    assert_ne!(dropped(at(9))[0], out, "another step");
    pass::begin_step(3);
    assert_ne!(dropped(at(8))[0], out, "another seed");
    pass::begin_step(3);
    assert_eq!(dropped(at(9))[0], out, "the same seed and step");
    // Neither evaluation nor p = 0 draws, and both are the identity.
    let here = pass::position();
    let ones = vec![1.0; 64];
    assert_eq!(dropped(|x| Dropout::new(0.5, 9)?.forward_t(x, false))[0], ones);
    assert_eq!(dropped(|x| Dropout::new(0.0, 9)?.forward_t(x, true))[0], ones);
    assert_eq!(pass::position(), here);
}

#[test]
fn a_replay_that_panics_puts_the_position_back() {
    pass::begin_step(5);
    let from = Position { step: 1, draws: 2 };
    let caught = std::panic::catch_unwind(|| pass::replay(from, || panic!("inside")));
    assert!(caught.is_err());
    assert_eq!(pass::position(), Position { step: 5, draws: 0 });
    assert!(!pass::is_replay());
}

/// Sums of 4096 ones stall at 256 in bf16 and 2048 in f16 where the accumulator is narrow.
#[test]
fn pre_3_half_precision_reductions_do_not_stall() {
    const N: usize = 4096;
    for dtype in [DType::BF16, DType::F16] {
        let ones = &tensor(&[1.0; N], &[N], dtype);
        let exact = |what: &str, got: &Tensor, want: &[f64]| {
            assert_close(&format!("{what} of {dtype:?}"), &host(got), want, Tol::Exact);
        };
        let one = |_: &Tensor| tensor(&[1.0], &[], DType::F64);
        let mean = run("mean_all", std::slice::from_ref(ones), Layout::Dense, one, |x| {
            ops::mean_all(&x[0])
        });
        exact("mean_all", &mean.out, &[1.0]);
        exact("gradient of mean_all", &mean.grads[0], &[1.0 / N as f64; N]);
        let sum =
            run("sum_all", std::slice::from_ref(ones), Layout::Dense, one, |x| ops::sum_all(&x[0]));
        exact("sum_all", &sum.out, &[N as f64]);
        exact("gradient of sum_all", &sum.grads[0], &[1.0; N]);

        // Each entry is a power of two, so the row's sum is 1 exactly.
        let row = &ones.reshape((1, N)).expect("one row");
        exact("softmax", &ops::softmax(row).expect("floats"), &[1.0 / N as f64; N]);
        // Mean 1 and variance 0: nothing is left but the shift.
        let shift = &tensor(&values(3, N), &[N], dtype);
        let norm = ops::layer_norm(row, Some(ones), Some(shift), 1e-5).expect("one shape");
        exact("layer_norm", &norm, &host(shift));
        exact("rms_norm", &ops::rms_norm(row, Some(ones), 0.0).expect("one shape"), &[1.0; N]);
        // 2 and 0 in turn: mean 1, variance 1.
        let turns: Vec<f64> = (0..N).map(|i| if i % 2 == 0 { 2.0 } else { 0.0 }).collect();
        let want: Vec<f64> = turns.iter().map(|v| v - 1.0).collect();
        let turns = &tensor(&turns, &[N, 1], dtype);
        let (out, stats) =
            ops::batch_norm2d(turns, None, None, 0.0, Then::Identity).expect("floats");
        exact("batch_norm2d", &out, &want);
        assert_close("statistics", &[stats.mean, stats.var].concat(), &[1.0, 1.0], Tol::Exact);
        let flat = turns.reshape((1, N)).expect("one row");
        exact("layer_norm", &ops::layer_norm(&flat, None, None, 0.0).expect("floats"), &want);

        // The gradient of a bias is a sum over rows, that of a repeated id a sum over its uses.
        let column = &ones.reshape((N, 1)).expect("one column");
        let operands =
            [column.clone(), tensor(&[1.0], &[1, 1], dtype), tensor(&[0.0], &[1], dtype)];
        let seed = |out: &Tensor| tensor(&[1.0; N], out.dims(), DType::F64);
        let linear = run("linear", &operands, Layout::Dense, seed, |x| {
            ops::linear(&x[0], &x[1], Some(&x[2]))
        });
        exact("gradient of a weight", &linear.grads[1], &[N as f64]);
        exact("gradient of a bias", &linear.grads[2], &[N as f64]);
        let ids = Tensor::zeros(N, DType::U32, &Device::Cpu).expect("ids");
        let table = [tensor(&[1.0], &[1, 1], dtype)];
        let rows =
            run("embedding", &table, Layout::Dense, seed, |x| ops::embedding(&x[0], &ids, None));
        exact("gradient of a table", &rows.grads[0], &[N as f64]);
        // All logits alike: the loss of each row is ln 2, and there are 4096 of it.
        let logits = Tensor::zeros((N, 2), dtype, &Device::Cpu).expect("logits");
        let loss = ops::cross_entropy(
            &logits,
            &ids,
            &CrossEntropy { ignore_index: -100, label_smoothing: 0.0 },
        );
        let mean = host(&loss.expect("targets below 2").mean().expect("a scalar"));
        assert_close("cross_entropy", &mean, &[std::f64::consts::LN_2], Tol::Ulps(1));
    }
}

/// What one NaN or infinity does: it stays in its group of `out` and of the gradient of `x`.
struct Poisoned {
    name: &'static str,
    dims: &'static [usize],
    /// The group of an element: all with its coordinates on these axes.
    axes: &'static [usize],
    op: fn(&Tensor) -> Result<Tensor>,
}

fn groups(dims: &[usize], axes: &[usize]) -> Vec<usize> {
    let n: usize = dims.iter().product();
    let group = |mut i: usize| {
        let mut at = vec![0; dims.len()];
        for axis in (0..dims.len()).rev() {
            (at[axis], i) = (i % dims[axis], i / dims[axis]);
        }
        axes.iter().fold(0, |g, &axis| g * dims[axis] + at[axis])
    };
    (0..n).map(group).collect()
}

fn some(dims: &[usize]) -> Tensor {
    tensor(&values(8, dims.iter().product()), dims, DType::F32)
}

const POISONED: [Poisoned; 17] = [
    Poisoned { name: "relu", dims: &[3, 4], axes: &[0, 1], op: ops::relu },
    Poisoned { name: "gelu_tanh", dims: &[3, 4], axes: &[0, 1], op: ops::gelu_tanh },
    Poisoned { name: "gelu_erf", dims: &[3, 4], axes: &[0, 1], op: ops::gelu_erf },
    Poisoned { name: "silu", dims: &[3, 4], axes: &[0, 1], op: ops::silu },
    Poisoned {
        name: "add_relu",
        dims: &[3, 4],
        axes: &[0, 1],
        op: |x| ops::add_relu(x, &some(&[3, 4])),
    },
    Poisoned {
        name: "dropout",
        dims: &[3, 4],
        axes: &[0, 1],
        op: |x| ops::dropout(x, 0.1, DropKey { seed: 1, stream: 2 }),
    },
    Poisoned { name: "softmax", dims: &[2, 3, 17], axes: &[0, 1], op: ops::softmax },
    Poisoned { name: "log_softmax", dims: &[2, 3, 17], axes: &[0, 1], op: ops::log_softmax },
    Poisoned {
        name: "layer_norm",
        dims: &[2, 3, 17],
        axes: &[0, 1],
        op: |x| ops::layer_norm(x, Some(&some(&[17])), Some(&some(&[17])), 1e-5),
    },
    Poisoned {
        name: "rms_norm",
        dims: &[2, 3, 17],
        axes: &[0, 1],
        op: |x| ops::rms_norm(x, Some(&some(&[17])), 1e-5),
    },
    Poisoned {
        name: "batch_norm2d",
        dims: &[2, 3, 4, 5],
        axes: &[1],
        op: |x| Ok(ops::batch_norm2d(x, Some(&some(&[3])), Some(&some(&[3])), 1e-5, Then::Relu)?.0),
    },
    Poisoned {
        name: "conv2d",
        dims: &[2, 3, 4, 5],
        axes: &[0],
        op: |x| ops::conv2d(x, &some(&[4, 3, 3, 3]), None, STEM),
    },
    Poisoned {
        name: "max_pool2d",
        dims: &[2, 3, 4, 5],
        axes: &[0, 1],
        op: |x| ops::max_pool2d(x, WINDOW),
    },
    Poisoned {
        name: "avg_pool2d",
        dims: &[2, 3, 4, 5],
        axes: &[0, 1],
        op: |x| ops::avg_pool2d(x, WINDOW, Divisor::Window),
    },
    Poisoned {
        name: "global_avg_pool2d",
        dims: &[2, 3, 4, 5],
        axes: &[0, 1],
        op: ops::global_avg_pool2d,
    },
    Poisoned {
        name: "linear",
        dims: &[2, 3, 17],
        axes: &[0, 1],
        op: |x| ops::linear(x, &some(&[5, 17]), Some(&some(&[5]))),
    },
    Poisoned {
        name: "attention",
        dims: &[2, 3, 4, 5],
        axes: &[0, 1, 2],
        op: |x| ops::attention(x, &some(&[2, 3, 6, 5]), &some(&[2, 3, 6, 5]), Mask::Causal, 0.5),
    },
];

#[test]
fn nan_and_infinity_stay_where_they_are() {
    for row in &POISONED {
        let n: usize = row.dims.iter().product();
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for at in [0, n / 2, n - 1] {
                poison(row, bad, at);
            }
        }
    }
}

fn poison(row: &Poisoned, bad: f64, at: usize) {
    let what = format!("{} with {bad} at {at}", row.name);
    let clean = values(1, row.dims.iter().product());
    let mut data = clean.clone();
    data[at] = bad;
    let outcome = |data: &[f64]| {
        let x = [tensor(data, row.dims, DType::F32)];
        let dout = |out: &Tensor| tensor(&values(2, out.elem_count()), out.dims(), DType::F64);
        run(&what, &x, Layout::Dense, dout, |x| (row.op)(&x[0]))
    };
    let (got, want) = (outcome(&data), outcome(&clean));
    // The output may have fewer dimensions (means) or others (a window's), but the same groups.
    let out_dims = got.out.dims();
    let hit = groups(row.dims, row.axes)[at];
    for (part, dims, got, want) in [
        ("output", out_dims, &got.out, &want.out),
        ("gradient", row.dims, &got.grads[0], &want.grads[0]),
    ] {
        let (got, want) = (host(got), host(want));
        let elsewhere = groups(dims, row.axes).into_iter().map(|group| group != hit);
        let pick = |v: Vec<f64>| -> Vec<f64> {
            v.into_iter().zip(elsewhere.clone()).filter(|(_, keep)| *keep).map(|(v, _)| v).collect()
        };
        // Not one bit of the others changes.
        assert_close(&format!("{what}: {part}"), &pick(got.clone()), &pick(want), Tol::Exact);
        // A maximum drops -inf and a dropout may drop anything, but NaN is never swallowed.
        if bad.is_nan() && part == "output" && row.name != "dropout" {
            assert!(got.iter().any(|v| v.is_nan()), "{what}: the output hides it");
        }
    }
}

/// A typed error of the right variant, whose message has the numbers, also as candle's error.
#[track_caller]
fn refused<T>(result: Result<T>, variant: fn(&Error) -> bool, message: &str) {
    let Err(error) = result else { panic!("accepted, wanted: {message}") };
    assert!(variant(&error), "{error:?}");
    assert_eq!(error.to_string(), message);
    let candle = candle_core::Error::from(error).to_string();
    assert!(candle.contains(message), "{candle}");
}

fn floats(dims: &[usize]) -> Tensor {
    tensor(&vec![1.0; dims.iter().product()], dims, DType::F32)
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let shape: fn(&Error) -> bool = |e| matches!(e, Error::Shape { .. });
    let (x, image) = (&floats(&[2, 3]), &floats(&[1, 3, 4, 4]));
    let (cos, sin) = ops::rope_table(2, 4, 10.0, &Device::Cpu).expect("even");
    let targets = &Tensor::new(&[0u32, 1, 2], &Device::Cpu).expect("targets");
    let conv_weight = &floats(&[2, 3, 1, 1]);
    let unit = Conv2dConfig::UNIT;
    let ids = &Tensor::new(&[0u32], &Device::Cpu).expect("ids");
    let rows = [
        (ops::linear(x, &floats(&[5, 4]), None), "linear: input is [2, 3], it must be [..., 4]"),
        (ops::linear(x, &floats(&[3]), None), "linear: weight is [3], it must be [out, in]"),
        (
            ops::linear(x, &floats(&[5, 3]), Some(&floats(&[4]))),
            "linear: bias is [4], it must be [5]",
        ),
        (
            ops::matmul(x, &floats(&[4, 3])),
            "matmul: right operand is [4, 3], it must be [] or nothing, then [3, N]",
        ),
        (ops::matmul(&floats(&[3]), x), "matmul: left operand is [3], it must be [..., M, K]"),
        (
            ops::add_relu(x, &floats(&[3, 2])),
            "add_relu: right operand is [3, 2], it must be [2, 3]",
        ),
        (ops::swiglu(x, &floats(&[3, 2])), "swiglu: up is [3, 2], it must be [2, 3]"),
        (ops::add(x, &floats(&[2])), "add: right operand is [2], it must be [2, 3]"),
        (ops::add(&floats(&[3]), x), "add: right operand is [2, 3], it must be [3]"),
        (
            ops::lora_linear(x, &floats(&[5, 3]), None, &floats(&[2, 4]), &floats(&[5, 2]), 1.0),
            "lora_linear: a is [2, 4], it must be [rank, 3]",
        ),
        (
            ops::lora_linear(x, &floats(&[5, 3]), None, &floats(&[2, 3]), &floats(&[4, 2]), 1.0),
            "lora_linear: b is [4, 2], it must be [5, 2]",
        ),
        (
            ops::lora_linear(x, &floats(&[5, 4]), None, &floats(&[2, 4]), &floats(&[5, 2]), 1.0),
            "lora_linear: input is [2, 3], it must be [..., 4]",
        ),
        (
            ops::rope_frequencies(5, 10.0).map(|_| x.clone()),
            "rope: head_dim is [5], it must be even",
        ),
        (
            ops::layer_norm(x, Some(&floats(&[2])), None, 1e-5),
            "layer_norm: weight is [2], it must be [3]",
        ),
        (
            ops::layer_norm(x, None, Some(&floats(&[3])), 1e-5),
            "layer_norm: bias is [3], it must be absent without a weight",
        ),
        (ops::rms_norm(x, Some(&floats(&[2])), 1e-5), "rms_norm: weight is [2], it must be [3]"),
        (
            ops::batch_norm2d(image, Some(&floats(&[4])), None, 1e-5, Then::Identity).map(|o| o.0),
            "batch_norm2d: weight is [4], it must be [3]",
        ),
        (
            ops::conv2d(x, conv_weight, None, unit),
            "conv2d: input is [2, 3], it must be of four dimensions",
        ),
        (
            ops::conv2d(image, conv_weight, Some(&floats(&[3])), unit),
            "conv2d: bias is [3], it must be [2]",
        ),
        (ops::max_pool2d(x, WINDOW), "pool2d: input is [2, 3], it must be of four dimensions"),
        (
            ops::attention(image, &floats(&[1, 3, 4, 5]), image, Mask::Full, 1.0),
            "attention: k is [1, 3, 4, 5], it must be [1, 3, 4, 4]",
        ),
        (ops::rope(x, &cos, &sin, Rope::Half), "rope: cos is [2, 2], it must be [2, 3 / 2]"),
        (
            ops::embedding(&floats(&[3]), ids, None),
            "embedding: weight is [3], it must be [rows, features]",
        ),
        (
            ops::cross_entropy(x, targets, &PLAIN).map(|loss| loss.sum),
            "cross_entropy: targets is [3], it must be [2]",
        ),
        (
            ops::linear_cross_entropy(x, &floats(&[5, 4]), None, ids, &PLAIN, 0).map(|l| l.sum),
            "linear_cross_entropy: targets is [1], it must be [2]",
        ),
    ];
    for (result, message) in rows {
        refused(result, shape, message);
    }
}

/// Tables are made for what is asked: later positions, longer and shorter sequences in any order.
#[test]
fn a_rotary_layer_turns_as_whole_tables_do() {
    let freqs = ops::rope_frequencies(6, 100.0).expect("even");
    let (cos, sin) = ops::rope_table(12, 6, 100.0, &Device::Cpu).expect("even");
    let layer = layers::Rotary::new(freqs, Rope::Half);
    let x = tensor(&values(4, 2 * 12 * 6), &[2, 12, 6], DType::F32);
    let whole = ops::rope(&x, &cos, &sin, Rope::Half).expect("shapes fit");
    for (first, n) in [(0, 3), (0, 12), (2, 5), (11, 1), (4, 8), (0, 1), (0, 0)] {
        let part = |t: &Tensor| t.narrow(1, first, n).expect("inside");
        let got = layer.clone().forward(&part(&x), first).expect("shapes fit");
        assert_eq!(host(&got), host(&part(&whole)), "{n} from {first}");
    }
}

const PLAIN: CrossEntropy = CrossEntropy { ignore_index: -100, label_smoothing: 0.0 };

#[test]
fn dtypes_that_do_not_fit_are_named() {
    let (x, ids) = (&floats(&[2, 3]), &Tensor::new(&[0u32, 1], &Device::Cpu).expect("ids"));
    let other = &x.to_dtype(DType::F64).expect("a float");
    let no_float: fn(&Error) -> bool = |e| matches!(e, Error::DType { dtype: DType::U32, .. });
    let mismatch: fn(&Error) -> bool = |e| matches!(e, Error::DTypeMismatch { .. });
    const FLOATS: &str = "U32 is not supported, it needs f32, f64, bf16 or f16";
    refused(ops::relu(ids), no_float, &format!("activation: {FLOATS}"));
    refused(ops::sum_all(ids), no_float, &format!("sum_all: {FLOATS}"));
    refused(ops::softmax(ids), no_float, &format!("softmax: {FLOATS}"));
    refused(
        ops::linear(x, other, None),
        mismatch,
        "linear: weight is F64, it must be F32 like the first operand",
    );
    refused(
        ops::add_relu(other, x),
        mismatch,
        "add_relu: right operand is F32, it must be F64 like the first operand",
    );
    refused(
        ops::embedding(x, other, None),
        mismatch,
        "embedding: ids is F64, it must be U32 like the first operand",
    );
    refused(
        ops::cross_entropy(x, &floats(&[2]), &PLAIN),
        |e| matches!(e, Error::Targets { dtype: DType::F32, .. }),
        "cross_entropy: targets are F32, they must be u8, u32 or i64",
    );
}

#[test]
fn what_a_kernel_cannot_run_is_named() {
    use tallow_kernels::{
        Error as Kernel, attention::ShapeError, dropout::DropoutError, embedding::EmbeddingError,
        loss::LossError,
    };
    let image = &floats(&[1, 3, 4, 4]);
    let window: fn(&Error) -> bool = |e| matches!(e, Error::Kernel(Kernel::Window { .. }));
    refused(
        ops::batch_norm2d(&floats(&[1, 3, 1, 1]), None, None, 1e-5, Then::Identity),
        |e| matches!(e, Error::Kernel(Kernel::OneValuePerChannel { shape: [1, 3, 1] })),
        "batch norm: one value per channel in [1, 3, 1] (batch, channels, pixels); training needs more",
    );
    refused(
        ops::conv2d(image, &floats(&[2, 3, 5, 1]), None, Conv2dConfig::UNIT),
        window,
        "conv2d: a window of 5 does not fit the padded height of 4",
    );
    refused(
        ops::max_pool2d(&floats(&[1, 1, 3, 1]), Pool2dConfig { padding: [0, 0], ..WINDOW }),
        window,
        "pool2d: a window of 3 does not fit the padded width of 1",
    );
    refused(
        ops::avg_pool2d(image, Pool2dConfig { padding: [2, 1], ..WINDOW }, Divisor::Window),
        |e| matches!(e, Error::Kernel(Kernel::Padding { .. })),
        "pool2d: padding 2 is more than half of kernel 3",
    );
    refused(
        ops::conv2d(image, &floats(&[2, 2, 1, 1]), None, Conv2dConfig::UNIT),
        |e| matches!(e, Error::Kernel(Kernel::Channels { in_channels: 3, .. })),
        "conv2d: input has 3 channels and weight is [2, 2, 1, 1] with 1 groups; \
         in_channels must be weight[1] * groups and weight[0] a multiple of groups",
    );
    let kv = &floats(&[1, 2, 4, 4]);
    refused(
        ops::attention(image, kv, kv, Mask::Full, 1.0),
        |e| matches!(e, Error::Attention(ShapeError::HeadGroups { n_heads: 3, n_kv_heads: 2 })),
        "attention: 2 key-value heads do not divide 3 query heads",
    );
    let ids = &Tensor::new(&[1u32, 4], &Device::Cpu).expect("ids");
    refused(
        ops::embedding(&floats(&[4, 2]), ids, None),
        |e| matches!(e, Error::Embedding(EmbeddingError::Id { id: 4, position: 1, n_ids: 4 })),
        "embedding: id 4 at position 1 is beyond the table's 4 rows",
    );
    refused(
        ops::cross_entropy(&floats(&[2, 4]), ids, &PLAIN),
        |e| matches!(e, Error::Loss(LossError::Target { row: 1, target: 4, n_classes: 4 })),
        "cross entropy: target 4 of row 1 is not below 4 classes",
    );
    refused(
        ops::cross_entropy(&floats(&[2, 5]), ids, &CrossEntropy { label_smoothing: -0.5, ..PLAIN }),
        |e| matches!(e, Error::Loss(LossError::LabelSmoothing { .. })),
        "cross entropy: label_smoothing is -0.5, it must be from 0 to 1",
    );
    for p in [1.0, -0.1, f64::NAN] {
        let message = format!("dropout: the probability is {p}, it must be at least 0 and below 1");
        let dropout: fn(&Error) -> bool =
            |e| matches!(e, Error::Dropout(DropoutError::Probability { .. }));
        refused(Dropout::new(p, 1), dropout, &message);
        refused(ops::dropout(image, p, DropKey { seed: 1, stream: 1 }), dropout, &message);
    }
    let vb = Params::new(1).builder(DType::F32, &Device::Cpu);
    let no_groups = Conv2dConfig { groups: 0, ..Conv2dConfig::UNIT };
    let error = layers::conv2d(3, 4, [3, 3], no_groups, vb).expect_err("no groups").to_string();
    assert!(error.contains("conv2d: groups is 0, it must be at least 1"), "{error}");
}

/// A trainer of one sample of one pixel gets an error from the layer, not NaN in its statistics.
#[test]
fn one_value_per_channel_leaves_the_running_statistics() {
    let layer = one_feature(StatUpdates::EachForward);
    let x = floats(&[1, 1, 1, 1]);
    let error = layer.forward_t(&x, true).expect_err("no variance").to_string();
    assert!(error.contains("one value per channel in [1, 1, 1]"), "{error}");
    running("after the error", &layer, [0.0, 1.0]);
    layer.forward_t(&x, false).expect("evaluation needs no variance");
}

#[test]
fn a_layer_computes_in_the_dtype_of_its_weights() {
    let narrow = Tensor::ones((2, 3, 5, 5), DType::BF16, &Device::Cpu).expect("a tensor");
    let x = Var::from_tensor(&narrow).expect("a variable");
    let params = Params::new(0);
    let vb = params.builder(DType::F32, &Device::Cpu);
    let conv =
        layers::conv2d(3, 4, [3, 3], ops::Conv2dConfig::UNIT, vb.pp("conv")).expect("builds");
    let linear = layers::linear(9, 2, vb.pp("linear")).expect("builds");
    let y = conv.forward(&x).expect("runs").flatten_from(2).expect("flat");
    let y = linear.forward(&y.to_dtype(DType::F16).expect("half")).expect("runs");
    assert_eq!(y.dtype(), DType::F32);
    let grads = y.sum_all().and_then(|y| y.backward()).expect("backward");
    assert_eq!(grads.get(&x).expect("reached through both casts").dtype(), DType::BF16);
    assert!(missing_gradients(&grads, &params.trainable()).is_empty());
}

#[test]
fn a_linear_layer_without_inputs_is_its_bias_and_without_outputs_is_empty() {
    let x = Tensor::zeros((4, 0), DType::F32, &Device::Cpu).expect("a tensor");
    let bias = Tensor::new(&[1f32, 2.0], &Device::Cpu).expect("a tensor");
    let weight = Var::zeros((2, 0), DType::F32, &Device::Cpu).expect("a variable");
    let y = ops::linear(&x, &weight, Some(&bias)).expect("runs");
    assert_eq!(y.to_vec2::<f32>().expect("values"), [[1.0, 2.0]; 4]);
    let weight = Var::zeros((0, 3), DType::F32, &Device::Cpu).expect("a variable");
    let x = Var::ones((4, 3), DType::F32, &Device::Cpu).expect("a variable");
    let y = ops::linear(&x, &weight, None).expect("runs");
    assert_eq!(y.dims(), [4, 0]);
    let grads = ops::sum_all(&y).and_then(|y| Ok(y.backward()?)).expect("backward");
    assert_eq!(grads.get(&x).expect("zeros").to_vec2::<f32>().expect("values"), [[0.0; 3]; 4]);
}

/// The gradients that forward made ahead are those that backward makes, and are there once: a second
/// backward makes its own.
#[test]
fn a_fused_loss_has_the_same_gradients_ahead_and_afterwards() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let (n, d, v) = (40, 6, 50);
        let of = |seed, dims: &[usize]| {
            tensor(&values(seed, dims.iter().product()), dims, DType::F64).to_dtype(dtype)
        };
        let x = Var::from_tensor(&of(1, &[n, d]).expect("values")).expect("a variable");
        let weight = Var::from_tensor(&of(2, &[v, d]).expect("values")).expect("a variable");
        let bias = Var::from_tensor(&of(3, &[v]).expect("values")).expect("a variable");
        let targets = Tensor::from_iter((0..n as u32).map(|i| i * 7 % v as u32), &Device::Cpu);
        let targets = targets.expect("targets");
        let cfg = CrossEntropy { ignore_index: 3, label_smoothing: 0.1 };
        let loss = |x: &Tensor, chunk_bytes| {
            ops::linear_cross_entropy(x, &weight, Some(&bias), &targets, &cfg, chunk_bytes)
                .and_then(|loss| Ok((loss.mean()? * 8.0)?))
                .expect("shapes fit")
        };
        // Rows enough for one pass, and too few.
        let ahead = loss(&x, ops::ONE_PASS_CHUNK_BYTES);
        let first = ahead.backward().expect("a graph");
        let again = ahead.backward().expect("a graph");
        let afterwards = loss(&x, 1).backward().expect("a graph");
        // Nothing leads to the inputs: forward does no more than it must.
        let frozen = loss(&x.as_detached_tensor(), ops::ONE_PASS_CHUNK_BYTES);
        let frozen = frozen.backward().expect("a graph");
        assert!(frozen.get(&x).is_none());
        let tol = Tol::Rel(match dtype {
            DType::F64 => 1e-13,
            DType::F32 => 1e-5,
            DType::F16 => 2f64.powi(-10),
            _ => 2f64.powi(-6),
        });
        for (what, var) in [("x", &x), ("weight", &weight), ("bias", &bias)] {
            let want = host(first.get(var).expect("a gradient"));
            for grads in [&again, &afterwards] {
                assert_close(what, &host(grads.get(var).expect("a gradient")), &want, tol);
            }
            if let Some(grad) = frozen.get(var) {
                assert_close(what, &host(grad), &want, tol);
            }
        }
    }
}

/// Gradients below what f16 holds are there when the loss is scaled: they are rounded with the scale.
#[test]
fn a_fused_loss_in_f16_keeps_small_gradients_until_they_are_scaled() {
    let n = 4096;
    let x = Var::from_tensor(
        &Tensor::full(half::f16::from_f32(1e-4), (n, 1), &Device::Cpu).expect("x"),
    );
    let x = x.expect("a variable");
    let weight =
        Tensor::new(&[[1e-4f32], [0.0]], &Device::Cpu).and_then(|w| w.to_dtype(DType::F16));
    let weight = Var::from_tensor(&weight.expect("weight")).expect("a variable");
    let targets = Tensor::zeros(n, DType::U32, &Device::Cpu).expect("targets");
    let cfg = CrossEntropy { ignore_index: -100, label_smoothing: 0.0 };
    let loss = ops::linear_cross_entropy(&x, &weight, None, &targets, &cfg, 1 << 20);
    let scaled = (loss.and_then(|loss| loss.mean()).expect("a loss") * 65536.0).expect("a scale");
    let grads = scaled.backward().expect("a graph");
    // 65536 / 4096 rows * -1/2 * 1e-4
    let want = vec![-8e-4; n];
    let got = host(grads.get(&x).expect("a gradient"));
    assert_close("x", &got, &want, Tol::Rel(2f64.powi(-9)));
}

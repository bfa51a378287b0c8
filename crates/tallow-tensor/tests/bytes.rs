//! What operations hold between forward and backward, and what backward itself holds, counted. No
//! test harness: its threads would be counted too.

use candle_core::{DType, Device, Tensor, TensorId, Var};
use std::{alloc::System, collections::HashSet};
use tallow_memory::CountingAllocator;
use tallow_tensor::{
    Result,
    ops::{self, Conv2dConfig, CrossEntropy, Divisor, DropKey, Mask, Pool2dConfig, Rope, Then},
};
use tallow_testkit::values_f32;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

/// Tensor headers, shapes, op nodes, and what the thread pool keeps for its queue.
const SMALL_BYTES: u64 = 4 << 10;
const F32_BYTES: u64 = 4;

fn main() {
    tallow_testkit::with_one_worker();
    for row in rows() {
        keeps(&row);
    }
    a_fused_loss_never_holds_the_logits();
    mem_1_frozen_weights_get_no_gradient();
    mem_1_a_frozen_convolution_costs_no_weight_gradient();
    mem_1_a_frozen_summand_gets_no_gradient();
    mem_1_a_kept_loss_keeps_no_graph();
    println!("bytes are as documented");
}

fn some(seed: u64, dims: &[usize]) -> Tensor {
    let data = values_f32(seed, dims.iter().product());
    Tensor::from_vec(data, dims, &Device::Cpu).expect("data fills dims")
}

fn var(seed: u64, dims: &[usize]) -> Var {
    Var::from_tensor(&some(seed, dims)).expect("floats")
}

fn bytes(t: &Tensor) -> u64 {
    (t.elem_count() * t.dtype().size_in_bytes()) as u64
}

type Op = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// An operation on variables of these shapes, and what it keeps besides its output.
struct Row {
    name: &'static str,
    dims: Vec<Vec<usize>>,
    kept_bytes: u64,
    op: Op,
}

fn row(
    name: &'static str,
    dims: &[&[usize]],
    kept_bytes: u64,
    op: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
) -> Row {
    let dims = dims.iter().map(|d| d.to_vec()).collect();
    Row { name, dims, kept_bytes, op: Box::new(op) }
}

const IMAGE: &[usize] = &[2, 16, 64, 64];
const TOKENS: &[usize] = &[4, 128, 256];
const WINDOW: Pool2dConfig = Pool2dConfig { kernel: [3, 3], stride: [2, 2], padding: [1, 1] };
const PLAIN: CrossEntropy = CrossEntropy { ignore_index: -100, label_smoothing: 0.0 };
/// Targets as i64 and the log-sum-exp as f64.
const LOSS_ROW_BYTES: u64 = 16;

fn targets(n: usize, n_classes: usize) -> Tensor {
    let ids: Vec<u32> = (0..n).map(|i| (7 * i % n_classes) as u32).collect();
    Tensor::from_vec(ids, n, &Device::Cpu).expect("n ids")
}

fn rows() -> Vec<Row> {
    let norm = |x: &[Tensor], then| ops::batch_norm2d(&x[0], Some(&x[1]), Some(&x[2]), 1e-5, then);
    let ids = targets(2048, 64);
    let (few, many) = (targets(1024, 256), targets(1024, 4096));
    let (cos, sin) = ops::rope_table(128, 64, 10_000.0, &Device::Cpu).expect("even");
    let heads: &[usize] = &[2, 4, 128, 64];
    let frozen = some(9, &[128, 256]);
    vec![
        row("relu", &[IMAGE], 0, |x| ops::relu(&x[0])),
        row("gelu_tanh", &[IMAGE], 0, |x| ops::gelu_tanh(&x[0])),
        row("gelu_erf", &[IMAGE], 0, |x| ops::gelu_erf(&x[0])),
        row("silu", &[IMAGE], 0, |x| ops::silu(&x[0])),
        row("add_relu", &[IMAGE, IMAGE], 0, |x| ops::add_relu(&x[0], &x[1])),
        row("swiglu", &[IMAGE, IMAGE], 0, |x| ops::swiglu(&x[0], &x[1])),
        row("add", &[IMAGE, &[64, 64]], 0, |x| ops::add(&x[0], &x[1])),
        row("lora_linear", &[TOKENS, &[4, 256], &[128, 4]], 0, move |x| {
            ops::lora_linear(&x[0], &frozen, None, &x[1], &x[2], 0.5)
        }),
        row("dropout", &[IMAGE], 0, |x| ops::dropout(&x[0], 0.5, DropKey { seed: 1, stream: 2 })),
        row("max_pool2d", &[IMAGE], 0, |x| ops::max_pool2d(&x[0], WINDOW)),
        row("avg_pool2d", &[IMAGE], 0, |x| ops::avg_pool2d(&x[0], WINDOW, Divisor::Window)),
        row("global_avg_pool2d", &[IMAGE], 0, |x| ops::global_avg_pool2d(&x[0])),
        row("batch_norm2d", &[IMAGE, &[16], &[16]], 16 * 16, move |x| {
            Ok(norm(x, Then::Identity)?.0)
        }),
        row("batch_norm2d, relu", &[IMAGE, &[16], &[16]], 16 * 16, move |x| {
            Ok(norm(x, Then::Relu)?.0)
        }),
        row("conv2d", &[IMAGE, &[16, 16, 3, 3]], 0, |x| {
            ops::conv2d(&x[0], &x[1], None, Conv2dConfig::UNIT)
        }),
        row("layer_norm", &[TOKENS, &[256], &[256]], 0, |x| {
            ops::layer_norm(&x[0], Some(&x[1]), Some(&x[2]), 1e-5)
        }),
        row("rms_norm", &[TOKENS, &[256]], 0, |x| ops::rms_norm(&x[0], Some(&x[1]), 1e-5)),
        row("softmax", &[TOKENS], 0, |x| ops::softmax(&x[0])),
        row("log_softmax", &[TOKENS], 0, |x| ops::log_softmax(&x[0])),
        row("linear", &[TOKENS, &[256, 256], &[256]], 0, |x| {
            ops::linear(&x[0], &x[1], Some(&x[2]))
        }),
        row("matmul", &[TOKENS, &[256, 128]], 0, |x| ops::matmul(&x[0], &x[1])),
        // One number per query; no 128 x 128 tensor.
        row("attention", &[heads, heads, heads], 2 * 4 * 128 * F32_BYTES, |x| {
            ops::attention(&x[0], &x[1], &x[2], Mask::Causal, 0.125)
        }),
        row("embedding", &[&[64, 256]], 0, move |x| ops::embedding(&x[0], &ids, None)),
        row("rope", &[heads], 0, move |x| ops::rope(&x[0], &cos, &sin, Rope::Half)),
        row("sum_all", &[IMAGE], 0, |x| ops::sum_all(&x[0])),
        row("mean_all", &[IMAGE], 0, |x| ops::mean_all(&x[0])),
        row("cross_entropy", &[&[1024, 256]], 1024 * LOSS_ROW_BYTES, move |x| {
            Ok(ops::cross_entropy(&x[0], &few, &PLAIN)?.sum)
        }),
        row("linear_cross_entropy", &[&[1024, 64], &[4096, 64]], 1024 * LOSS_ROW_BYTES, {
            move |x| Ok(ops::linear_cross_entropy(&x[0], &x[1], None, &many, &PLAIN, 1 << 20)?.sum)
        }),
    ]
}

/// Between forward and backward an operation adds its output and `kept_bytes`, and dropping the
/// output gives all of it back.
fn keeps(row: &Row) {
    let name = row.name;
    let vars: Vec<Var> = row.dims.iter().enumerate().map(|(i, d)| var(i as u64, d)).collect();
    let operands: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let forward = || (row.op)(&operands).expect(name);
    let backward = |out: Tensor| drop(out.sum_all().and_then(|sum| sum.backward()).expect(name));
    backward(forward()); // buffers of threads
    let scope = ALLOC.scope();
    let out = forward();
    let (held_bytes, least_bytes) = (scope.current_bytes(), bytes(&out) + row.kept_bytes);
    assert!(
        (least_bytes..least_bytes + SMALL_BYTES).contains(&held_bytes),
        "{name} holds {held_bytes} bytes, its output and {} are {least_bytes}",
        row.kept_bytes,
    );
    backward(out);
    let left_bytes = scope.current_bytes();
    assert!(left_bytes < SMALL_BYTES, "{name} leaves {left_bytes} bytes");
}

/// 1024 rows of 8192 classes are 32 MiB of logits; one chunk is 1 MiB.
fn a_fused_loss_never_holds_the_logits() {
    const CHUNK_BYTES: u64 = 1 << 20;
    const LOGITS_BYTES: u64 = 1024 * 8192 * F32_BYTES;
    /// Softmax state and targets of 1024 rows, partial sums of one tile, packed operands.
    const ROWS_BYTES: u64 = 512 << 10;
    let (x, weight, targets) = (var(1, &[1024, 8]), var(2, &[8192, 8]), targets(1024, 8192));
    let loss = || {
        ops::linear_cross_entropy(&x, &weight, None, &targets, &PLAIN, CHUNK_BYTES)
            .and_then(|loss| loss.mean())
            .expect("shapes fit")
    };
    drop(loss().backward().expect("a graph")); // buffers of threads
    let scope = ALLOC.scope();
    let fused = loss();
    let forward_bytes = scope.peak_bytes();
    drop(fused.backward().expect("a graph"));
    let both_bytes = scope.peak_bytes();
    assert!(forward_bytes < CHUNK_BYTES + ROWS_BYTES, "forward: {forward_bytes} bytes");
    // Candle adds a first gradient to zeros: three copies of each, at worst.
    let gradients_bytes = 3 * (bytes(&x) + bytes(&weight));
    let limit_bytes = CHUNK_BYTES + ROWS_BYTES + gradients_bytes;
    assert!(both_bytes < limit_bytes, "backward: {both_bytes} bytes of {limit_bytes}");
    assert!(limit_bytes < LOGITS_BYTES / 8);
}

const FROZEN_BYTES: u64 = 512 * 512 * F32_BYTES;

/// Peak of `backward` above its start, and the ids of the gradients it returns.
fn backward(loss: &Tensor) -> (u64, HashSet<TensorId>) {
    let scope = ALLOC.scope();
    let grads = loss.backward().expect("a graph");
    let peak_bytes = scope.peak_bytes();
    (peak_bytes, grads.get_ids().copied().collect())
}

fn ids(vars: &[&Var]) -> HashSet<TensorId> {
    vars.iter().map(|v| v.as_tensor().id()).collect()
}

/// A frozen 512 x 512 weight behind a small adapter, which it must hand its gradient.
fn mem_1_frozen_weights_get_no_gradient() {
    let frozen = some(1, &[512, 512]);
    let (down, up) = (var(2, &[4, 512]), var(3, &[512, 4]));
    let x = some(4, &[2, 512]);
    type Product = fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>;
    let ours: [(&str, Product); 2] = [
        ("linear", |x, w| Ok(ops::linear(x, w, None)?)),
        ("matmul", |x, w| Ok(ops::matmul(x, w)?)),
    ];
    let loss = |product: Product| {
        let small = ops::linear(&x, &down, None).and_then(|h| ops::linear(&h, &up, None));
        let out = product(&small.expect("shapes fit"), &frozen).expect("shapes fit");
        out.sqr().and_then(|sq| sq.sum_all()).expect("floats")
    };
    for (name, product) in ours {
        drop(backward(&loss(product)));
        let (peak_bytes, got) = backward(&loss(product));
        assert_eq!(got, ids(&[&down, &up]), "{name}");
        assert!(peak_bytes < FROZEN_BYTES, "{name}: backward holds {peak_bytes} bytes");
    }
    // The trap: candle's own product makes a gradient for the frozen weight, and keeps it.
    let (peak_bytes, got) = backward(&loss(|x, w| x.matmul(w)));
    assert!(peak_bytes > FROZEN_BYTES && got.contains(&frozen.id()), "{peak_bytes} {got:?}");
}

fn mem_1_a_frozen_convolution_costs_no_weight_gradient() {
    let x = var(1, &[1, 64, 6, 6]);
    let weight = var(2, &[128, 64, 3, 3]);
    let cfg = Conv2dConfig { padding: [1, 1], ..Conv2dConfig::UNIT };
    let loss = |weight: &Tensor| {
        ops::conv2d(&x, weight, None, cfg).and_then(|y| ops::sum_all(&y)).expect("shapes fit")
    };
    let frozen = weight.detach();
    for weight in [weight.as_tensor(), &frozen] {
        drop(backward(&loss(weight))); // buffers of threads
    }
    let (trained_bytes, trained) = backward(&loss(&weight));
    let (frozen_bytes, kept) = backward(&loss(&frozen));
    assert_eq!((trained, kept), (ids(&[&x, &weight]), ids(&[&x])));
    assert!(
        frozen_bytes + bytes(&weight) <= trained_bytes,
        "{frozen_bytes} bytes frozen, {trained_bytes} trained",
    );
}

/// A residual connection around an adapter: the stream it starts from is frozen.
fn mem_1_a_frozen_summand_gets_no_gradient() {
    let (x, frozen, adapter) = (some(1, &[8, 64]), some(2, &[8, 64]), var(3, &[64, 64]));
    let loss = |sum: &dyn Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>| {
        let added = ops::linear(&x, &adapter, None).expect("shapes fit");
        let out = sum(&frozen, &added).and_then(|out| sum(&out, &frozen));
        out.and_then(|out| out.sqr()?.sum_all()).expect("floats")
    };
    let (_, ours) = backward(&loss(&|a, b| Ok(ops::add(a, b)?)));
    assert_eq!(ours, ids(&[&adapter]));
    let (_, gated) = backward(&loss(&|a, b| Ok(ops::swiglu(a, b)?)));
    assert_eq!(gated, ids(&[&adapter]));
    // The trap: candle's sum makes a gradient for the frozen one, and keeps it.
    let (_, candles) = backward(&loss(&|a, b| a + b));
    assert!(candles.contains(&frozen.id()), "{candles:?}");
}

/// 50 steps of descent; a graph kept by mistake would hold 256 KiB a step.
fn mem_1_a_kept_loss_keeps_no_graph() {
    let weight = var(1, &[64, 64]);
    let x = some(2, &[1024, 64]);
    let mut values: Vec<f32> = Vec::with_capacity(50);
    let mut losses: Vec<Tensor> = Vec::with_capacity(50);
    let mut live_bytes = Vec::with_capacity(50);
    // What one kept scalar itself holds.
    let scope = ALLOC.scope();
    let scalar = Tensor::new(0f32, &Device::Cpu).expect("a scalar").detach();
    let scalar_bytes = scope.current_bytes();
    drop((scope, scalar));
    for _ in 0..50 {
        let loss = ops::linear(&x, &weight, None).and_then(|y| ops::mean_all(&ops::silu(&y)?));
        let loss = loss.expect("shapes fit");
        let grads = loss.backward().expect("a graph");
        let step = grads.get(&weight).and_then(|grad| (weight.as_tensor() - grad * 0.1).ok());
        weight.set(&step.expect("a gradient")).expect("one shape");
        values.push(loss.to_scalar().expect("a scalar"));
        losses.push(loss.detach());
        drop((loss, grads));
        live_bytes.push(ALLOC.current_bytes());
    }
    assert!(values[49] < values[0], "it descends: {values:?}");
    let (kept_bytes, scalars_bytes) = (live_bytes[49] - live_bytes[4], 45 * scalar_bytes);
    assert!(
        kept_bytes.abs_diff(scalars_bytes) < SMALL_BYTES,
        "45 kept losses hold {kept_bytes} bytes, not {scalars_bytes}",
    );
    assert_eq!(losses[0].dtype(), DType::F32);
}

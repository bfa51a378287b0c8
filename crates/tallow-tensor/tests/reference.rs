//! Every operation on PyTorch's reference values in f32, however its operands lie in memory.

mod support;

use candle_core::{DType, Device, ModuleT, Tensor};
use std::collections::BTreeSet;
use support::{LAYOUTS, Layout, gradient, host, run, tensor};
use tallow_tensor::{
    Params, Result, layers,
    ops::{self, Conv2dConfig, CrossEntropy, Divisor, Mask, Pool2dConfig, Rope, Then},
};
use tallow_testkit::{Case, Reference, Tol, Values, assert_close, widen};

/// The reference is f64 rounded to f32; sums of some hundred terms in f32 lose no more than this.
const F32: Tol = Tol::Rel(1e-5);

type Op = fn(&Given, &[Tensor]) -> Result<Tensor>;

/// How one of the reference's operations is run: on its float operands, by name.
struct Row {
    op: &'static str,
    operands: &'static [&'static str],
    run: Op,
}

/// A case, and the reference for operands that are not floats.
struct Given<'a> {
    reference: &'a Reference,
    case: &'a Case,
}

impl Given<'_> {
    fn values(&self, what: &str) -> Values {
        self.reference.values(&format!("{}.{what}", self.case.name))
    }

    fn ids(&self, what: &str) -> Result<Tensor> {
        let (shape, ids) = self.reference.ids(&format!("{}.{what}", self.case.name));
        Ok(Tensor::from_vec(ids, shape, &Device::Cpu)?)
    }

    fn pair(&self, key: &str) -> [usize; 2] {
        [self.case.usize(key); 2]
    }
}

const ROWS: [Row; 17] = [
    Row { op: "conv2d", operands: &["x", "weight", "bias"], run: conv2d },
    Row { op: "max_pool2d", operands: &["x"], run: |g, x| ops::max_pool2d(&x[0], window(g)) },
    Row { op: "avg_pool2d", operands: &["x"], run: avg_pool2d },
    Row { op: "adaptive_avg_pool2d_1x1", operands: &["x"], run: global_avg_pool2d },
    Row { op: "batch_norm_train", operands: &["x", "weight", "bias"], run: batch_norm },
    Row { op: "layer_norm", operands: &["x", "weight", "bias"], run: layer_norm },
    Row { op: "rms_norm", operands: &["x", "weight"], run: rms_norm },
    Row { op: "softmax_last_dim", operands: &["x"], run: |_, x| ops::softmax(&x[0]) },
    Row { op: "scaled_dot_product_attention", operands: &["q", "k", "v"], run: attention },
    Row { op: "gelu_tanh", operands: &["x"], run: |_, x| ops::gelu_tanh(&x[0]) },
    Row { op: "gelu_erf", operands: &["x"], run: |_, x| ops::gelu_erf(&x[0]) },
    Row { op: "silu", operands: &["x"], run: |_, x| ops::silu(&x[0]) },
    Row { op: "relu", operands: &["x"], run: |_, x| ops::relu(&x[0]) },
    Row { op: "linear_cross_entropy", operands: &["x", "weight"], run: loss_of_logits },
    Row { op: "embedding", operands: &["weight"], run: embedding },
    Row { op: "rope_half", operands: &["x"], run: |g, x| rope(g, x, Rope::Half) },
    Row { op: "rope_interleaved", operands: &["x"], run: |g, x| rope(g, x, Rope::Interleaved) },
];

fn conv2d(given: &Given, x: &[Tensor]) -> Result<Tensor> {
    let (stride, padding) = (given.pair("stride"), given.pair("padding"));
    let (dilation, groups) = (given.pair("dilation"), given.case.usize("groups"));
    ops::conv2d(&x[0], &x[1], Some(&x[2]), Conv2dConfig { stride, padding, dilation, groups })
}

fn window(given: &Given) -> Pool2dConfig {
    let (kernel, stride) = (given.pair("kernel"), given.pair("stride"));
    Pool2dConfig { kernel, stride, padding: given.pair("padding") }
}

fn avg_pool2d(given: &Given, x: &[Tensor]) -> Result<Tensor> {
    let all = given.case.bool("count_include_pad");
    let divisor = if all { Divisor::Window } else { Divisor::Inside };
    ops::avg_pool2d(&x[0], window(given), divisor)
}

fn global_avg_pool2d(_: &Given, x: &[Tensor]) -> Result<Tensor> {
    let (n, c, ..) = x[0].dims4()?;
    Ok(ops::global_avg_pool2d(&x[0])?.reshape((n, c, 1, 1))?)
}

fn batch_norm(given: &Given, x: &[Tensor]) -> Result<Tensor> {
    let eps = given.case.f64("eps");
    Ok(ops::batch_norm2d(&x[0], Some(&x[1]), Some(&x[2]), eps, Then::Identity)?.0)
}

fn layer_norm(given: &Given, x: &[Tensor]) -> Result<Tensor> {
    ops::layer_norm(&x[0], Some(&x[1]), Some(&x[2]), given.case.f64("eps"))
}

fn rms_norm(given: &Given, x: &[Tensor]) -> Result<Tensor> {
    ops::rms_norm(&x[0], Some(&x[1]), given.case.f64("eps"))
}

fn attention(given: &Given, x: &[Tensor]) -> Result<Tensor> {
    let mask = if given.case.bool("causal") { Mask::Causal } else { Mask::Full };
    let head_dim = x[0].dims()[3] as f64;
    ops::attention(&x[0], &x[1], &x[2], mask, 1.0 / head_dim.sqrt())
}

fn smoothing(given: &Given) -> CrossEntropy {
    let ignore_index = given.case.attrs["ignore_index"].as_i64().expect("an integer");
    CrossEntropy { ignore_index, label_smoothing: given.case.f64("label_smoothing") }
}

fn loss_of_logits(given: &Given, x: &[Tensor]) -> Result<Tensor> {
    let logits = ops::linear(&x[0], &x[1], None)?;
    ops::cross_entropy(&logits, &given.ids("in.target")?, &smoothing(given))?.mean()
}

fn fused_loss(given: &Given, x: &[Tensor], chunk_bytes: u64) -> Result<Tensor> {
    let targets = given.ids("in.target")?;
    let cfg = smoothing(given);
    ops::linear_cross_entropy(&x[0], &x[1], None, &targets, &cfg, chunk_bytes)?.mean()
}

fn embedding(given: &Given, x: &[Tensor]) -> Result<Tensor> {
    ops::embedding(&x[0], &given.ids("in.ids")?.to_dtype(DType::U32)?, None)
}

fn rope(given: &Given, x: &[Tensor], style: Rope) -> Result<Tensor> {
    let (_, _, tokens, d) = x[0].dims4()?;
    let (cos, sin) = ops::rope_table(tokens, d, given.case.f64("base"), x[0].device())?;
    ops::rope(&x[0], &cos, &sin, style)
}

fn check(given: &Given, row: &Row, layout: Layout) {
    let what = format!("{} {layout:?}", given.case.name);
    let as_tensor = |v: Values| tensor(&widen(&v.data), &v.shape, DType::F32);
    let operands: Vec<Tensor> =
        row.operands.iter().map(|name| as_tensor(given.values(&format!("in.{name}")))).collect();
    let dout = given.values("dout");
    let dout = tensor(&widen(&dout.data), &dout.shape, DType::F64);
    let got = run(&what, &operands, layout, |_| dout, |x| (row.run)(given, x));
    let want = given.values("out");
    assert_eq!(got.out.dims(), want.shape, "{what}: shape");
    assert_close(&what, &host(&got.out), &widen(&want.data), F32);
    for (name, grad) in row.operands.iter().zip(&got.grads) {
        let want = given.values(&format!("grad.{name}"));
        assert_close(&format!("{what}: gradient of {name}"), &host(grad), &widen(&want.data), F32);
    }
}

fn check_all(rows: &[Row]) {
    let reference = &Reference::load();
    for row in rows {
        for case in &reference.cases(row.op) {
            for layout in LAYOUTS {
                check(&Given { reference, case }, row, layout);
            }
        }
    }
}

#[test]
fn operations() {
    check_all(&ROWS);
}

/// One row at a time, some rows, all rows: the size of a chunk changes nothing.
#[test]
fn fused_losses() {
    let chunks: [Op; 5] = [
        |g, x| fused_loss(g, x, 1),
        |g, x| fused_loss(g, x, 100),
        |g, x| fused_loss(g, x, 1600),
        |g, x| fused_loss(g, x, 8 << 20),
        |g, x| fused_loss(g, x, u64::MAX),
    ];
    let operands: &[&str] = &["x", "weight"];
    check_all(&chunks.map(|run| Row { op: "linear_cross_entropy", operands, run }));
}

/// The layer: its gradients by name, and its running statistics before and after.
#[test]
fn batch_norm_layers() {
    let reference = &Reference::load();
    for case in &reference.cases("batch_norm_train") {
        for layout in LAYOUTS {
            batch_norm_layer(&Given { reference, case }, layout);
        }
    }
}

fn batch_norm_layer(given: &Given, layout: Layout) {
    let what = format!("{} {layout:?}", given.case.name);
    let params = Params::new(0);
    let vb = params.builder(DType::F32, &Device::Cpu);
    let channels = given.values("in.weight").data.len();
    let mut layer = layers::batch_norm2d(channels, Then::Identity, vb).expect("a layer");
    layer.momentum = given.case.f64("momentum");
    layer.eps = given.case.f64("eps");
    for (name, var) in params.all() {
        let from = if tallow_tensor::is_buffer(&name) { "before" } else { "in" };
        let start = given.values(&format!("{from}.{name}"));
        var.set(&tensor(&widen(&start.data), &start.shape, DType::F32)).expect("one shape");
    }
    let x = given.values("in.x");
    let x = layout.of(&tensor(&widen(&x.data), &x.shape, DType::F32)).expect("a view");
    let dout = given.values("dout");
    let dout = tensor(&widen(&dout.data), &dout.shape, DType::F32);
    let grads = layer.forward_t(&x, true).and_then(|out| (out * dout)?.sum_all()?.backward());
    let grads = grads.expect(&what);
    for (name, var) in params.all() {
        let what = format!("{what}: {name}");
        let (got, of) = match tallow_tensor::is_buffer(&name) {
            true => (host(&var), "after"),
            false => (host(&gradient(&what, &grads, &var)), "grad"),
        };
        assert_close(&what, &got, &widen(&given.values(&format!("{of}.{name}")).data), F32);
    }
}

/// A case that the reference gains must gain a row here. Optimizers belong to another crate.
#[test]
fn every_case_has_a_row() {
    const CASES: &str = include_str!("../../tallow-testkit/reference/ops.json");
    let field = |object: &str, key: &str| {
        let value = object.split(&format!("\"{key}\": \"")).nth(1)?.split('"').next()?;
        Some(value.to_string())
    };
    let objects = CASES.split('{').skip(1);
    let all: BTreeSet<String> = objects
        .filter(|object| field(object, "op").as_deref() != Some("optimizer"))
        .map(|object| field(object, "name").expect("a case has a name"))
        .collect();
    let reference = Reference::load();
    let covered: BTreeSet<String> =
        ROWS.iter().flat_map(|row| reference.cases(row.op)).map(|case| case.name).collect();
    assert!(all.len() > 40, "{all:?}");
    assert_eq!(all, covered);
}

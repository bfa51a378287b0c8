//! The gradient of every operation: against central differences in f64, and in bf16 and f16 against
//! f32 on the same inputs.

mod support;

use candle_core::{DType, Device, Tensor};
use half::bf16;
use support::{Layout, host, run, tensor};
use tallow_tensor::{
    Result,
    ops::{
        self, ChannelStats, Conv2dConfig, CrossEntropy, Divisor, DropKey, Mask, Pool2dConfig, Rope,
        Then,
    },
};
use tallow_testkit::{Tol, assert_close, central_difference, values};

/// Step of the differences, and their error: `h^2 f'''/6 + eps f/h` is near 1e-9 for these sizes.
const H: f64 = 1e-5;
const DIFFERENCES: Tol = Tol::Rel(1e-6);

/// The narrow dtypes and the largest error of one rounding, relative to the value: 8 and 11 bits.
const NARROW: [(DType, f64); 2] = [(DType::BF16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)];

/// Forward and backward accumulate in f32 and round once as they store; a hundredth of a rounding is
/// left to f32 itself.
const ONCE: f64 = 1.01;
/// Where the processor multiplies bf16 itself, what one product hands to the next is rounded too.
const TWICE: f64 = 2.02;
/// Backward starts from the rounded output: that rounding, amplified at most so much, and its own.
const FROM_OUTPUT: f64 = 4.0;

type Op = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// One operation on operands of these shapes.
struct Row {
    name: String,
    dims: Vec<Vec<usize>>,
    /// Error of its output and of its gradients in half precision, in roundings.
    roundings: [f64; 2],
    op: Op,
}

fn row(name: String, dims: &[&[usize]], op: impl Fn(&[Tensor]) -> Result<Tensor> + 'static) -> Row {
    let dims = dims.iter().map(|d| d.to_vec()).collect();
    Row { name, dims, roundings: [ONCE; 2], op: Box::new(op) }
}

impl Row {
    fn roundings(self, of_output: f64, of_gradients: f64) -> Self {
        Self { roundings: [of_output, of_gradients], ..self }
    }

    /// Values in (-2, 2), exact in `dtype`.
    fn operands(&self, dtype: DType) -> Vec<Tensor> {
        let operand = |(i, dims): (usize, &Vec<usize>)| {
            let n: usize = dims.iter().product();
            let data: Vec<f64> = values(i as u64, n).iter().map(|v| 2.0 * v).collect();
            tensor(&data, dims, dtype)
        };
        self.dims.iter().enumerate().map(operand).collect()
    }

    fn against_differences(&self) {
        let operands = self.operands(DType::F64);
        let got = run(&self.name, &operands, Layout::Dense, upstream, &self.op);
        let r = host(&upstream(&got.out));
        for (i, grad) in got.grads.iter().enumerate() {
            let loss = |x: &[f64]| {
                let mut moved = operands.clone();
                moved[i] = tensor(x, operands[i].dims(), DType::F64);
                let out = (self.op)(&moved).expect("it ran once already");
                host(&out).iter().zip(&r).map(|(out, r)| out * r).sum()
            };
            let want = central_difference(loss, &host(&operands[i]), H);
            let what = format!("{}: gradient of operand {i}", self.name);
            assert_close(&what, &host(grad), &want, DIFFERENCES);
        }
    }

    fn against_f32(&self, dtype: DType, rounding: f64) {
        let what = format!("{} in {dtype:?}", self.name);
        let narrow = self.operands(dtype);
        let wide: Vec<Tensor> =
            narrow.iter().map(|t| t.to_dtype(DType::F32).expect("a float")).collect();
        // Exact in bf16 and f16, so that both see the same upstream gradient.
        let exact = |out: &Tensor| {
            let r = upstream(out).to_dtype(DType::BF16).and_then(|r| r.to_dtype(DType::F64));
            r.expect("a float")
        };
        let got = run(&what, &narrow, Layout::Dense, exact, &self.op);
        let want = run(&what, &wide, Layout::Dense, exact, &self.op);
        let out_tol = Tol::Rel(self.roundings[0] * rounding);
        assert_close(&what, &host(&got.out), &host(&want.out), out_tol);
        let tol = Tol::Rel(self.roundings[1] * rounding);
        for (i, (got, want)) in got.grads.iter().zip(&want.grads).enumerate() {
            let what = format!("{what}: gradient of operand {i}");
            assert_close(&what, &host(got), &host(want), tol);
        }
    }
}

/// The gradient of an output, some values in (-1, 1).
fn upstream(out: &Tensor) -> Tensor {
    tensor(&values(99, out.elem_count()), out.dims(), DType::F64)
}

fn check(rows: Vec<Row>) {
    for row in rows {
        row.against_differences();
        for (dtype, rounding) in NARROW {
            row.against_f32(dtype, rounding);
        }
    }
}

#[test]
fn activations() {
    type Unary = fn(&Tensor) -> Result<Tensor>;
    let curves: [(&str, Unary); 4] = [
        ("gelu_tanh", ops::gelu_tanh),
        ("gelu_erf", ops::gelu_erf),
        ("silu", ops::silu),
        ("relu", ops::relu),
    ];
    for dims in [&[1][..], &[7], &[3, 9], &[33]] {
        check(
            curves
                .map(|(name, f)| row(format!("{name} {dims:?}"), &[dims], move |x| f(&x[0])))
                .into(),
        );
        let add_relu = |x: &[Tensor]| ops::add_relu(&x[0], &x[1]);
        check(vec![row(format!("add_relu {dims:?}"), &[dims, dims], add_relu)]);
        let swiglu = |x: &[Tensor]| ops::swiglu(&x[0], &x[1]);
        check(vec![row(format!("swiglu {dims:?}"), &[dims, dims], swiglu)]);
    }
}

#[test]
fn sums_of_two() {
    for (left, right) in [
        (&[7][..], &[7][..]),
        (&[2, 3, 5], &[2, 3, 5]),
        (&[2, 3, 5], &[3, 5]),
        (&[1, 3, 5], &[3, 5]),
        (&[4, 33], &[33]),
        (&[3], &[]),
    ] {
        let add = |x: &[Tensor]| ops::add(&x[0], &x[1]);
        check(vec![row(format!("add {left:?} {right:?}"), &[left, right], add)]);
    }
}

/// A frozen weight and bias; half precision rounds the base, the low-rank product and their sum.
#[test]
fn low_rank_corrections() {
    const ROUNDINGS: f64 = 4.0;
    for (dims, o, r) in [(&[1, 1][..], 1, 1), (&[7, 5], 4, 2), (&[2, 3, 33], 17, 3)] {
        let d = *dims.last().expect("not empty");
        let frozen = move |like: &Tensor| {
            let [w, b] = [(20, vec![o, d]), (21, vec![o])].map(|(seed, dims)| {
                let n = dims.iter().product();
                tensor(&values(seed, n), &dims, DType::BF16).to_dtype(like.dtype())
            });
            (w.expect("a float"), b.expect("a float"))
        };
        for has_bias in [true, false] {
            let op = move |x: &[Tensor]| {
                let (w, b) = frozen(&x[0]);
                ops::lora_linear(&x[0], &w, has_bias.then_some(&b), &x[1], &x[2], 0.75)
            };
            let name = format!("lora_linear {dims:?} to {o} by {r}, bias {has_bias}");
            let row = row(name, &[dims, &[r, d], &[o, r]], op);
            row.against_differences();
            for (dtype, rounding) in NARROW {
                let narrow = row.operands(dtype);
                let wide: Vec<Tensor> =
                    narrow.iter().map(|t| t.to_dtype(DType::F32).expect("a float")).collect();
                let [got, want] = [narrow, wide]
                    .map(|x| run(&row.name, &x, Layout::Dense, upstream, |x| (row.op)(x)));
                let tol = Tol::Rel(ROUNDINGS * rounding);
                assert_close(&row.name, &host(&got.out), &host(&want.out), tol);
                for (got, want) in got.grads.iter().zip(&want.grads) {
                    assert_close(&row.name, &host(got), &host(want), tol);
                }
            }
        }
    }
}

/// A weight stored by columns, as GPT-2's, is read where it lies: the bits of a dense one.
#[test]
fn a_transposed_weight_gives_the_same_bits() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let [x, w, b] = [(1, &[5, 33][..]), (2, &[17, 33]), (3, &[17])]
            .map(|(seed, dims)| tensor(&values(seed, dims.iter().product()), dims, dtype));
        let by_column = w.t().and_then(|w| w.contiguous()?.t()).expect("a matrix");
        assert!(!by_column.is_contiguous());
        let of = |w: &Tensor| {
            let x = candle_core::Var::from_tensor(&x).expect("a float");
            let out = ops::linear(&x, w, Some(&b)).expect("shapes fit");
            let grads = out.sqr().and_then(|sq| sq.sum_all()?.backward()).expect("a graph");
            (host(&out), host(grads.get(&x).expect("one")))
        };
        assert_eq!(of(&w), of(&by_column), "{dtype:?}");
    }
}

#[test]
fn softmaxes() {
    for dims in [&[3, 1][..], &[2, 7], &[3, 9], &[2, 3, 33]] {
        check(vec![
            row(format!("softmax {dims:?}"), &[dims], |x| ops::softmax(&x[0]))
                .roundings(ONCE, FROM_OUTPUT),
            row(format!("log_softmax {dims:?}"), &[dims], |x| ops::log_softmax(&x[0]))
                .roundings(ONCE, FROM_OUTPUT),
        ]);
    }
}

#[test]
fn row_norms() {
    const EPS: f64 = 1e-2;
    for dims in [&[3, 1][..], &[2, 7], &[3, 3, 9], &[2, 33]] {
        let last = &dims[dims.len() - 1..];
        check(vec![
            row(format!("layer_norm {dims:?}"), &[dims, last, last], |x| {
                ops::layer_norm(&x[0], Some(&x[1]), Some(&x[2]), EPS)
            }),
            row(format!("layer_norm, no shift {dims:?}"), &[dims, last], |x| {
                ops::layer_norm(&x[0], Some(&x[1]), None, EPS)
            }),
            row(format!("layer_norm, bare {dims:?}"), &[dims], |x| {
                ops::layer_norm(&x[0], None, None, EPS)
            }),
            row(format!("rms_norm {dims:?}"), &[dims, last], |x| {
                ops::rms_norm(&x[0], Some(&x[1]), EPS)
            }),
            row(format!("rms_norm, bare {dims:?}"), &[dims], |x| ops::rms_norm(&x[0], None, EPS)),
        ]);
    }
}

#[test]
fn batch_norms() {
    const EPS: f64 = 1e-2;
    for dims in [&[7, 1][..], &[9, 2], &[2, 3, 3, 3], &[1, 2, 33], &[3, 7, 1, 1]] {
        let channels = &dims[1..2];
        let stats = ChannelStats {
            mean: values(5, dims[1]),
            var: values(6, dims[1]).iter().map(|v| v * v).collect(),
        };
        for then in [Then::Identity, Then::Relu] {
            let given = (stats.clone(), stats.clone());
            check(vec![
                row(format!("batch_norm2d {dims:?} {then:?}"), &[dims, channels, channels], {
                    move |x| Ok(ops::batch_norm2d(&x[0], Some(&x[1]), Some(&x[2]), EPS, then)?.0)
                }),
                row(format!("batch_norm2d, bare {dims:?} {then:?}"), &[dims], {
                    move |x| Ok(ops::batch_norm2d(&x[0], None, None, EPS, then)?.0)
                }),
                row(
                    format!("batch_norm2d_given {dims:?} {then:?}"),
                    &[dims, channels, channels],
                    {
                        move |x| {
                            let (weight, bias) = (Some(&x[1]), Some(&x[2]));
                            ops::batch_norm2d_given(&x[0], &given.0, weight, bias, EPS, then)
                        }
                    },
                ),
                row(format!("batch_norm2d_given, bare {dims:?} {then:?}"), &[dims], {
                    move |x| ops::batch_norm2d_given(&x[0], &given.1, None, None, EPS, then)
                }),
            ]);
        }
    }
}

#[test]
fn products() {
    for (dims, o) in [(&[1][..], 1), (&[7], 9), (&[9, 7], 33), (&[3, 1, 33], 7)] {
        let d = dims[dims.len() - 1];
        check(vec![
            row(format!("linear {dims:?} to {o}"), &[dims, &[o, d], &[o]], |x| {
                ops::linear(&x[0], &x[1], Some(&x[2]))
            }),
            row(format!("linear {dims:?} to {o}, no bias"), &[dims, &[o, d]], |x| {
                ops::linear(&x[0], &x[1], None)
            }),
        ]);
    }
    let operands: [(&[usize], &[usize]); 6] = [
        (&[1, 1], &[1, 1]),
        (&[9, 33], &[33, 7]),
        (&[3, 7, 9], &[3, 9, 1]),
        (&[2, 3, 1, 7], &[2, 3, 7, 9]),
        (&[3, 7, 9], &[9, 33]),
        (&[2, 3, 1, 7], &[7, 9]),
    ];
    for (a, b) in operands {
        check(vec![row(format!("matmul {a:?} {b:?}"), &[a, b], |x| ops::matmul(&x[0], &x[1]))]);
    }
}

#[test]
fn attentions() {
    // B, H, G, Tq, Tk, D: grouped queries; more queries than keys, where the first see none.
    for sizes in [
        [1, 1, 1, 1, 1, 1],
        [1, 2, 1, 7, 9, 3],
        [2, 4, 2, 9, 7, 5],
        [1, 6, 2, 1, 33, 7],
        [1, 2, 2, 33, 33, 1],
    ] {
        let [b, h, g, tq, tk, d] = sizes;
        for mask in [Mask::Causal, Mask::Full] {
            let operands: [&[usize]; 3] = [&[b, h, tq, d], &[b, g, tk, d], &[b, g, tk, d]];
            let scale = 1.0 / (d as f64).sqrt();
            let op = move |x: &[Tensor]| ops::attention(&x[0], &x[1], &x[2], mask, scale);
            check(vec![
                row(format!("attention {sizes:?} {mask:?}"), &operands, op)
                    .roundings(TWICE, FROM_OUTPUT),
            ]);
        }
    }
}

fn conv2d(input: [usize; 4], weight: [usize; 4], cfg: Conv2dConfig) -> Vec<Row> {
    let name = format!("conv2d {input:?} {weight:?} {cfg:?}");
    vec![
        row(name.clone(), &[&input, &weight, &weight[..1]], move |x| {
            ops::conv2d(&x[0], &x[1], Some(&x[2]), cfg)
        }),
        row(format!("{name}, no bias"), &[&input, &weight], move |x| {
            ops::conv2d(&x[0], &x[1], None, cfg)
        }),
    ]
}

#[test]
fn spare_2_strided_convolutions_of_odd_images() {
    let cfg = Conv2dConfig { stride: [2, 2], padding: [1, 1], ..Conv2dConfig::UNIT };
    for [h, w] in [[7, 8], [8, 7], [7, 7], [8, 8]] {
        check(conv2d([2, 3, h, w], [4, 3, 3, 3], cfg));
    }
}

#[test]
fn convolutions() {
    // Input, weight, stride, padding, dilation, groups.
    type Sizes = ([usize; 4], [usize; 4], [usize; 2], [usize; 2], [usize; 2], usize);
    let rows: [Sizes; 8] = [
        ([1, 1, 1, 1], [1, 1, 1, 1], [1, 1], [0, 0], [1, 1], 1),
        ([2, 7, 3, 3], [9, 7, 1, 1], [1, 1], [0, 0], [1, 1], 1),
        ([1, 3, 9, 7], [2, 3, 1, 1], [2, 2], [0, 0], [1, 1], 1),
        ([1, 2, 9, 9], [3, 2, 7, 7], [2, 2], [3, 3], [1, 1], 1),
        ([1, 6, 5, 4], [9, 2, 3, 3], [1, 1], [1, 1], [1, 1], 3),
        ([2, 7, 5, 4], [7, 1, 3, 3], [2, 1], [1, 1], [1, 1], 7),
        ([1, 2, 7, 9], [3, 2, 3, 3], [1, 1], [2, 2], [2, 2], 1),
        ([1, 4, 7, 5], [2, 2, 3, 2], [3, 1], [1, 0], [1, 2], 2),
    ];
    for (input, weight, stride, padding, dilation, groups) in rows {
        check(conv2d(input, weight, Conv2dConfig { stride, padding, dilation, groups }));
    }
}

#[test]
fn pools() {
    // Input, kernel, stride, padding.
    type Sizes = ([usize; 4], [usize; 2], [usize; 2], [usize; 2]);
    let rows: [Sizes; 5] = [
        ([1, 1, 1, 1], [1, 1], [1, 1], [0, 0]),
        ([2, 3, 8, 6], [2, 2], [2, 2], [0, 0]),
        ([1, 2, 7, 9], [3, 3], [2, 2], [1, 1]),
        ([1, 2, 9, 7], [3, 2], [1, 3], [1, 0]),
        ([1, 1, 33, 1], [3, 1], [3, 1], [1, 0]),
    ];
    for sizes in rows {
        let (input, kernel, stride, padding) = sizes;
        let cfg = Pool2dConfig { kernel, stride, padding };
        check(vec![
            row(format!("max_pool2d {sizes:?}"), &[&input], move |x| ops::max_pool2d(&x[0], cfg)),
            row(format!("avg_pool2d {sizes:?}"), &[&input], move |x| {
                ops::avg_pool2d(&x[0], cfg, Divisor::Window)
            }),
            row(format!("avg_pool2d, inside {sizes:?}"), &[&input], move |x| {
                ops::avg_pool2d(&x[0], cfg, Divisor::Inside)
            }),
            row(format!("global_avg_pool2d {input:?}"), &[&input], |x| {
                ops::global_avg_pool2d(&x[0])
            }),
        ]);
    }
}

#[test]
fn sums() {
    for dims in [&[1][..], &[7], &[3, 9], &[33, 1]] {
        check(vec![
            row(format!("sum_all {dims:?}"), &[dims], |x| ops::sum_all(&x[0])),
            row(format!("mean_all {dims:?}"), &[dims], |x| ops::mean_all(&x[0])),
        ]);
    }
}

#[test]
fn losses() {
    let targets_of = |n: usize, v: usize| {
        // Every third row is ignored, but the first counts.
        let ids = (0..n).map(|i| if i % 3 == 1 { -100 } else { (5 * i % v) as i64 }).collect();
        Tensor::from_vec::<_, i64>(ids, n, &Device::Cpu).expect("n ids")
    };
    for [n, d, v] in [[1, 1, 2], [7, 9, 33], [9, 7, 2]] {
        for label_smoothing in [0.0, 0.1] {
            let cfg = CrossEntropy { ignore_index: -100, label_smoothing };
            let what = format!("cross_entropy {n} x {v} smoothed {label_smoothing}");
            let targets = targets_of(n, v);
            check(vec![row(what.clone(), &[&[n, v]], move |x| {
                ops::cross_entropy(&x[0], &targets, &cfg)?.mean()
            })]);
            for chunk_bytes in [1, 500, u64::MAX] {
                let targets = [targets_of(n, v), targets_of(n, v)];
                let [with, without] = targets;
                check(vec![
                    row(format!("linear {what} in {chunk_bytes}"), &[&[n, d], &[v, d], &[v]], {
                        move |x| {
                            let bias = Some(&x[2]);
                            let fused = ops::linear_cross_entropy;
                            Ok(fused(&x[0], &x[1], bias, &with, &cfg, chunk_bytes)?.sum)
                        }
                    })
                    .roundings(ONCE, TWICE),
                    row(format!("linear {what} in {chunk_bytes}"), &[&[n, d], &[v, d]], {
                        move |x| {
                            let fused = ops::linear_cross_entropy;
                            Ok(fused(&x[0], &x[1], None, &without, &cfg, chunk_bytes)?.sum)
                        }
                    })
                    .roundings(ONCE, TWICE),
                ]);
            }
        }
    }
}

#[test]
fn embeddings() {
    for padding in [None, Some(4)] {
        // Row 4 three times, row 3 never.
        let ids = Tensor::new(&[[4u32, 0, 4], [1, 4, 2]], &Device::Cpu).expect("ids");
        let op = move |x: &[Tensor]| ops::embedding(&x[0], &ids, padding);
        let embedding = row(format!("embedding, padding {padding:?}"), &[&[5, 7]], op);
        match padding {
            None => check(vec![embedding]),
            Some(row) => a_padding_row_has_no_gradient(&embedding, row as usize),
        }
    }
}

/// Differences would see it: the row is read, and declared to have no gradient.
fn a_padding_row_has_no_gradient(embedding: &Row, padding: usize) {
    let operands = embedding.operands(DType::F64);
    let free = Tensor::new(&[[4u32, 0, 4], [1, 4, 2]], &Device::Cpu).expect("ids");
    let dense = Layout::Dense;
    let got = run("padding", &operands, dense, upstream, &embedding.op);
    let free =
        run("no padding", &operands, dense, upstream, |x| ops::embedding(&x[0], &free, None));
    let d = operands[0].dims()[1];
    let mut want = host(&free.grads[0]);
    want[padding * d..][..d].fill(0.0);
    assert_close("padding", &host(&got.grads[0]), &want, Tol::Exact);
}

#[test]
fn ropes() {
    for [tokens, d] in [[1, 2], [7, 6], [9, 34]] {
        for style in [Rope::Half, Rope::Interleaved] {
            // Small base: every pair turns by an angle worth the name.
            let (cos, sin) = ops::rope_table(tokens, d, 10.0, &Device::Cpu).expect("even");
            let op = move |x: &[Tensor]| ops::rope(&x[0], &cos, &sin, style);
            check(vec![row(format!("rope {tokens} {d} {style:?}"), &[&[2, 3, tokens, d]], op)]);
        }
    }
}

#[test]
fn dropouts() {
    for p in [0.0, 0.3, 0.9] {
        for n in [1, 7, 9, 33] {
            let key = DropKey { seed: 3, stream: 1 << 40 };
            let op = move |x: &[Tensor]| ops::dropout(&x[0], p, key);
            check(vec![row(format!("dropout {p} {n}"), &[&[3, n]], op)]);
        }
    }
}

/// Multiples of 1/8: their products are exact in f32, and so are sums of hundreds of them.
fn eighths(seed: u64, dims: &[usize], dtype: DType) -> Tensor {
    let data: Vec<f64> =
        values(seed, dims.iter().product()).iter().map(|v| (v * 16.0).round() / 8.0).collect();
    tensor(&data, dims, dtype)
}

fn bits(t: &Tensor) -> Vec<u16> {
    let flat = t.flatten_all().and_then(|t| t.to_vec1::<bf16>()).expect("a bf16 tensor");
    flat.into_iter().map(bf16::to_bits).collect()
}

/// Where f32 is exact, a bf16 result must be the f32 one rounded once, to the bit.
fn rounded_once(what: &str, dims: [&[usize]; 2], op: fn(&Tensor, &Tensor) -> Result<Tensor>) {
    let both = |dtype| {
        let operands: Vec<Tensor> =
            dims.iter().enumerate().map(|(i, d)| eighths(i as u64, d, dtype)).collect();
        let exact = |out: &Tensor| eighths(9, out.dims(), DType::F64);
        run(what, &operands, Layout::Dense, exact, |x| op(&x[0], &x[1]))
    };
    let (narrow, wide) = (both(DType::BF16), both(DType::F32));
    let once = |t: &Tensor| bits(&t.to_dtype(DType::BF16).expect("a float"));
    assert_eq!(bits(&narrow.out), once(&wide.out), "{what}");
    for (i, (narrow, wide)) in narrow.grads.iter().zip(&wide.grads).enumerate() {
        assert_eq!(bits(narrow), once(wide), "{what}: gradient of operand {i}");
    }
}

#[test]
fn spare_7_a_bf16_product_is_the_f32_product_rounded_once() {
    for [m, k, n] in [[1, 1, 1], [7, 33, 9], [33, 9, 65], [65, 257, 33]] {
        rounded_once(&format!("matmul {m} {k} {n}"), [&[m, k], &[k, n]], ops::matmul);
        rounded_once(&format!("batched {m} {k} {n}"), [&[3, m, k], &[3, k, n]], ops::matmul);
        let linear = |x: &Tensor, w: &Tensor| ops::linear(x, w, None);
        rounded_once(&format!("linear {m} {k} {n}"), [&[m, k], &[n, k]], linear);
    }
    for (input, weight) in [([2, 3, 7, 8], [5, 3, 3, 3]), ([1, 33, 9, 7], [9, 33, 1, 1])] {
        let conv2d = |x: &Tensor, w: &Tensor| ops::conv2d(x, w, None, Conv2dConfig::UNIT);
        rounded_once(&format!("conv2d {input:?}"), [&input, &weight], conv2d);
    }
}

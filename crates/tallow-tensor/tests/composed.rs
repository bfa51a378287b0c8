//! Each operation's fallback off the CPU gives its result and its gradients, compared on the CPU.

use candle_core::{DType, Device, Tensor, Var};
use tallow_kernels::{dropout::DropoutError, embedding::EmbeddingError, loss::LossError};
use tallow_tensor::{
    Error, Result, composed,
    ops::{
        self, ChannelStats, Conv2dConfig, CrossEntropy, Divisor, DropKey, Mask, Pool2dConfig, Rope,
        Then,
    },
};
use tallow_testkit::{Tol, assert_close, values};

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Dense,
    /// The last two dimensions swapped; one dimension alone has gaps.
    Strided,
    /// Begins after other elements.
    Offset,
}

const LAYOUTS: [Layout; 3] = [Layout::Dense, Layout::Strided, Layout::Offset];

/// Two compositions of the same arithmetic differ by roundings only; bf16 has 8 bits, f16 has 11,
/// and a few of their roundings (scores, probabilities) are not shared.
const TOLERANCES: [(DType, Tol); 4] = [
    (DType::F16, Tol::Rel(1.0 / 512.0)),
    (DType::F64, Tol::Rel(1e-10)),
    (DType::F32, Tol::Rel(2e-5)),
    (DType::BF16, Tol::Rel(1.0 / 64.0)),
];

/// A variable and its view of shape `dims`.
fn operand(seed: u64, dims: &[usize], dtype: DType, layout: Layout) -> Result<(Var, Tensor)> {
    let mut stored = dims.to_vec();
    match (layout, dims) {
        (Layout::Dense, _) => (),
        (Layout::Strided, &[n]) => stored = vec![n, 2],
        (Layout::Strided, _) => stored.swap(dims.len() - 2, dims.len() - 1),
        (Layout::Offset, _) => stored[0] += 3,
    }
    let data: Vec<f64> =
        values(seed, stored.iter().product()).into_iter().map(|v| 2.0 * v).collect();
    let var = Var::from_tensor(&Tensor::from_vec(data, stored, &Device::Cpu)?.to_dtype(dtype)?)?;
    let view = match (layout, dims) {
        (Layout::Dense, _) => var.as_tensor().clone(),
        (Layout::Strided, [_]) => var.narrow(1, 1, 1)?.squeeze(1)?,
        (Layout::Strided, _) => var.transpose(dims.len() - 2, dims.len() - 1)?,
        (Layout::Offset, _) => var.narrow(0, 2, dims[0])?,
    };
    Ok((var, view))
}

fn host(t: &Tensor) -> Result<Vec<f64>> {
    Ok(t.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// Output and gradients of all operands, with the gradient `r` of the output.
fn run(
    operands: &[(&[usize], DType)],
    layout: Layout,
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let made: Result<Vec<_>> = operands
        .iter()
        .enumerate()
        .map(|(i, &(dims, dtype))| operand(i as u64, dims, dtype, layout))
        .collect();
    let (vars, views): (Vec<Var>, Vec<Tensor>) = made?.into_iter().unzip();
    let out = f(&views)?;
    let r = Tensor::from_vec(values(99, out.elem_count()), out.dims(), &Device::Cpu)?;
    let grads = (out.to_dtype(DType::F64)? * r)?.sum_all()?.backward()?;
    let all = vars.iter().map(|v| grads.get(v).cloned().expect("each operand has a gradient"));
    Ok((out.clone(), all.collect()))
}

type Operation<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

fn compare(
    what: &str,
    operands: &[(&[usize], DType)],
    layout: Layout,
    tol: Tol,
    op: Operation,
    fallback: Operation,
) {
    let what = format!("{what} {:?} {layout:?}", operands[0].1);
    let (want, want_grads) = run(operands, layout, op).expect(&what);
    let (got, got_grads) = run(operands, layout, fallback).expect(&what);
    assert_eq!(got.dims(), want.dims(), "{what}: shape");
    assert_eq!(got.dtype(), want.dtype(), "{what}: dtype");
    assert_close(&what, &host(&got).unwrap(), &host(&want).unwrap(), tol);
    for (i, (got, want)) in got_grads.iter().zip(&want_grads).enumerate() {
        assert_eq!(got.dtype(), want.dtype(), "{what}: dtype of gradient {i}");
        let what = format!("{what}: gradient {i}");
        assert_close(&what, &host(got).unwrap(), &host(want).unwrap(), tol);
    }
}

/// `op` against `fallback` on operands of shapes `dims`, in every dtype and layout.
fn check(what: &str, dims: &[&[usize]], op: Operation, fallback: Operation) {
    for (dtype, tol) in TOLERANCES {
        let operands: Vec<_> = dims.iter().map(|&d| (d, dtype)).collect();
        for layout in LAYOUTS {
            compare(what, &operands, layout, tol, op, fallback);
        }
    }
}

/// As [`check`], and with a bf16 input beside f32 parameters.
fn check_norm(what: &str, dims: &[&[usize]], op: Operation, fallback: Operation) {
    check(what, dims, op, fallback);
    let mut operands: Vec<_> = dims.iter().map(|&d| (d, DType::F32)).collect();
    operands[0].1 = DType::BF16;
    let what = format!("{what}, f32 parameters");
    for layout in LAYOUTS {
        compare(&what, &operands, layout, TOLERANCES[3].1, op, fallback);
    }
}

#[test]
fn activations() {
    type Unary = fn(&Tensor) -> Result<Tensor>;
    let rows: [(&str, Unary, Unary); 4] = [
        ("gelu_tanh", ops::gelu_tanh, composed::gelu_tanh),
        ("gelu_erf", ops::gelu_erf, composed::gelu_erf),
        ("silu", ops::silu, composed::silu),
        ("relu", ops::relu, composed::relu),
    ];
    for (what, op, fallback) in rows {
        check(what, &[&[3, 5, 7]], &|x| op(&x[0]), &|x| fallback(&x[0]));
        // Multiplied within the graph: 0 stays 0, the rest reaches where exp and cubes overflow.
        for scale in [1e-30, 1e2, 1e15, 1e30] {
            let at = |x: &Tensor| Ok::<_, Error>((x * scale)?);
            let what = format!("{what} * {scale:e}");
            compare(
                &what,
                &[(&[31], DType::F32)],
                Layout::Dense,
                Tol::Rel(2e-5),
                &|x| op(&at(&x[0])?),
                &|x| fallback(&at(&x[0])?),
            );
        }
        let zero = |f: Unary| {
            let x = Var::new(&[0f64, -0.0], &Device::Cpu)?;
            let grads = f(&x)?.sum_all()?.backward()?;
            host(grads.get(&x).expect("a gradient"))
        };
        assert_close(what, &zero(fallback).unwrap(), &zero(op).unwrap(), Tol::Exact);
        let x = Tensor::new(&[f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0], &Device::Cpu);
        let [got, want] = [fallback, op].map(|f| host(&f(x.as_ref().unwrap()).unwrap()).unwrap());
        assert_close(what, &got, &want, Tol::Exact);
    }
    check("add_relu", &[&[4, 9], &[4, 9]], &|x| ops::add_relu(&x[0], &x[1]), &|x| {
        composed::add_relu(&x[0], &x[1])
    });
}

#[test]
fn gates_and_sums() {
    for dims in [&[7][..], &[3, 9]] {
        check("swiglu", &[dims, dims], &|x| ops::swiglu(&x[0], &x[1]), &|x| {
            composed::swiglu(&x[0], &x[1])
        });
        check("add", &[dims, dims], &|x| ops::add(&x[0], &x[1]), &|x| composed::add(&x[0], &x[1]));
    }
    check("add, smaller", &[&[4, 3, 9], &[3, 9]], &|x| ops::add(&x[0], &x[1]), &|x| {
        composed::add(&x[0], &x[1])
    });
}

#[test]
fn low_rank_corrections() {
    for (dims, o, r) in [(&[7, 5][..], 4, 2), (&[2, 3, 9], 6, 3)] {
        let d = *dims.last().expect("not empty");
        let frozen = move |like: &Tensor| -> Result<(Tensor, Tensor)> {
            let weight = operand(30, &[o, d], like.dtype(), Layout::Strided)?.1;
            Ok((weight, operand(31, &[o], like.dtype(), Layout::Dense)?.1))
        };
        let what = format!("lora_linear {dims:?} to {o} by {r}");
        let op = |x: &[Tensor]| {
            let (w, b) = frozen(&x[0])?;
            ops::lora_linear(&x[0], &w, Some(&b), &x[1], &x[2], 0.75)
        };
        check(&what, &[dims, &[r, d], &[o, r]], &op, &|x| {
            let (w, b) = frozen(&x[0])?;
            composed::lora_linear(&x[0], &w, Some(&b), &x[1], &x[2], 0.75)
        });
    }
}

#[test]
#[should_panic(expected = "gradient 0")]
fn half_a_gradient_is_found() {
    let half = |y: Tensor| Ok(((&y * 0.5)? + (&y * 0.5)?.detach())?);
    check("silu", &[&[7]], &|x| ops::silu(&x[0]), &|x| half(composed::silu(&x[0])?));
}

#[test]
fn convolutions() {
    // Input, weight, stride, padding, dilation, groups; after each, who computes f32 and f64.
    type Row = ([usize; 4], [usize; 4], [usize; 2], [usize; 2], [usize; 2], usize);
    let rows: [Row; 13] = [
        ([2, 3, 7, 8], [4, 3, 3, 3], [1, 1], [1, 1], [1, 1], 1), // candle
        ([2, 3, 7, 8], [4, 3, 3, 3], [2, 2], [1, 1], [1, 1], 1), // patches
        ([2, 3, 8, 7], [4, 3, 3, 3], [2, 2], [1, 1], [1, 1], 1), // patches
        ([2, 3, 8, 8], [4, 3, 3, 3], [2, 2], [1, 1], [1, 1], 1), // candle
        ([1, 3, 13, 13], [5, 3, 7, 7], [2, 2], [3, 3], [1, 1], 1), // candle
        ([2, 5, 7, 9], [3, 5, 1, 1], [1, 1], [0, 0], [1, 1], 1), // candle
        ([2, 5, 8, 10], [3, 5, 1, 1], [3, 3], [0, 0], [1, 1], 1), // patches
        ([2, 6, 6, 5], [9, 2, 3, 3], [1, 1], [1, 1], [1, 1], 3), // candle
        ([2, 6, 6, 5], [6, 1, 3, 3], [2, 2], [1, 1], [1, 1], 6), // patches
        ([1, 2, 9, 10], [3, 2, 3, 3], [1, 1], [2, 2], [2, 2], 1), // candle
        ([1, 2, 9, 11], [3, 2, 3, 3], [2, 2], [2, 2], [2, 2], 1), // candle
        ([2, 4, 9, 6], [4, 2, 3, 2], [2, 1], [1, 0], [1, 2], 2), // patches
        ([1, 2, 2, 2], [3, 2, 1, 1], [4, 4], [1, 1], [1, 1], 1), // patches
    ];
    for row in rows {
        let (input, weight, stride, padding, dilation, groups) = row;
        let cfg = Conv2dConfig { stride, padding, dilation, groups };
        let what = format!("conv2d {row:?}");
        let bias = [weight[0]];
        check(
            &what,
            &[&input, &weight, &bias],
            &|x| ops::conv2d(&x[0], &x[1], Some(&x[2]), cfg),
            &|x| composed::conv2d(&x[0], &x[1], Some(&x[2]), cfg),
        );
        check(&what, &[&input, &weight], &|x| ops::conv2d(&x[0], &x[1], None, cfg), &|x| {
            composed::conv2d(&x[0], &x[1], None, cfg)
        });
    }
}

#[test]
fn pools() {
    // Input, kernel, stride, padding.
    type Row = ([usize; 4], [usize; 2], [usize; 2], [usize; 2]);
    let rows: [Row; 6] = [
        ([2, 3, 8, 6], [2, 2], [2, 2], [0, 0]),
        ([2, 3, 7, 8], [3, 3], [2, 2], [1, 1]),
        ([1, 2, 8, 7], [3, 3], [1, 1], [1, 1]),
        ([1, 2, 9, 10], [3, 2], [1, 3], [1, 0]),
        ([1, 2, 5, 5], [5, 4], [2, 2], [2, 2]),
        ([1, 1, 1, 3], [3, 1], [3, 1], [1, 0]),
    ];
    for row in rows {
        let (input, kernel, stride, padding) = row;
        let cfg = Pool2dConfig { kernel, stride, padding };
        let what = format!("pool2d {row:?}");
        check(&format!("max_{what}"), &[&input], &|x| ops::max_pool2d(&x[0], cfg), &|x| {
            composed::max_pool2d(&x[0], cfg)
        });
        // Few distinct values: every window has ties.
        let coarse = |x: &Tensor| Ok::<_, Error>((x.round()?.detach() + (x - x.detach())?)?);
        check(
            &format!("ties of max_{what}"),
            &[&input],
            &|x| ops::max_pool2d(&coarse(&x[0])?, cfg),
            &|x| composed::max_pool2d(&coarse(&x[0])?, cfg),
        );
        for divisor in [Divisor::Window, Divisor::Inside] {
            check(
                &format!("avg_{what} {divisor:?}"),
                &[&input],
                &|x| ops::avg_pool2d(&x[0], cfg, divisor),
                &|x| composed::avg_pool2d(&x[0], cfg, divisor),
            );
        }
        check("global_avg_pool2d", &[&input], &|x| ops::global_avg_pool2d(&x[0]), &|x| {
            composed::global_avg_pool2d(&x[0])
        });
    }
}

#[test]
fn max_pool_of_nan_and_infinity() {
    let (nan, inf) = (f64::NAN, f64::NEG_INFINITY);
    for data in [[nan, 1.0, nan, 2.0, 3.0, 4.0], [inf; 6], [1.0, inf, inf, inf, inf, nan]] {
        let cfg = Pool2dConfig { kernel: [2, 2], stride: [1, 1], padding: [1, 1] };
        let run = |f: fn(&Tensor, Pool2dConfig) -> Result<Tensor>| {
            let x = Var::from_vec(data.to_vec(), (1, 1, 2, 3), &Device::Cpu)?;
            let out = f(&x, cfg)?;
            let grads = out.sum_all()?.backward()?;
            Ok::<_, Error>([host(&out)?, host(grads.get(&x).expect("a gradient"))?].concat())
        };
        let (got, want) = (run(composed::max_pool2d).unwrap(), run(ops::max_pool2d).unwrap());
        assert_close(&format!("max_pool2d of {data:?}"), &got, &want, Tol::Exact);
    }
}

#[test]
fn norms() {
    const EPS: f64 = 1e-5;
    let shapes: [&[usize]; 4] = [&[2, 3, 5, 7], &[3, 4, 1, 3], &[9, 5], &[2, 3, 31]];
    for dims in shapes {
        let (channels, last) = ([dims[1]], [*dims.last().unwrap()]);
        for then in [Then::Identity, Then::Relu] {
            let what = format!("batch_norm2d {dims:?} {then:?}");
            let out = |pair: (Tensor, ChannelStats)| pair.0;
            check_norm(
                &what,
                &[dims, &channels, &channels],
                &|x| ops::batch_norm2d(&x[0], Some(&x[1]), Some(&x[2]), EPS, then).map(out),
                &|x| composed::batch_norm2d(&x[0], Some(&x[1]), Some(&x[2]), EPS, then).map(out),
            );
            check_norm(
                &what,
                &[dims],
                &|x| ops::batch_norm2d(&x[0], None, None, EPS, then).map(out),
                &|x| composed::batch_norm2d(&x[0], None, None, EPS, then).map(out),
            );
            let stats = ChannelStats {
                mean: values(5, dims[1]),
                var: values(6, dims[1]).iter().map(|v| v * v).collect(),
            };
            let stats = &stats;
            check_norm(
                &format!("{what} given"),
                &[dims, &channels, &channels],
                &|x| ops::batch_norm2d_given(&x[0], stats, Some(&x[1]), Some(&x[2]), EPS, then),
                &|x| {
                    composed::batch_norm2d_given(&x[0], stats, Some(&x[1]), Some(&x[2]), EPS, then)
                },
            );
        }
        check_norm(
            &format!("layer_norm {dims:?}"),
            &[dims, &last, &last],
            &|x| ops::layer_norm(&x[0], Some(&x[1]), Some(&x[2]), EPS),
            &|x| composed::layer_norm(&x[0], Some(&x[1]), Some(&x[2]), EPS),
        );
        check_norm(
            &format!("layer_norm {dims:?}, no parameters"),
            &[dims],
            &|x| ops::layer_norm(&x[0], None, None, EPS),
            &|x| composed::layer_norm(&x[0], None, None, EPS),
        );
        check_norm(
            &format!("rms_norm {dims:?}"),
            &[dims, &last],
            &|x| ops::rms_norm(&x[0], Some(&x[1]), EPS),
            &|x| composed::rms_norm(&x[0], Some(&x[1]), EPS),
        );
        check_norm(
            &format!("rms_norm {dims:?}, no parameters"),
            &[dims],
            &|x| ops::rms_norm(&x[0], None, EPS),
            &|x| composed::rms_norm(&x[0], None, EPS),
        );
    }
}

#[test]
fn batch_norm_statistics() {
    for (dtype, tol) in TOLERANCES {
        let (_, x) = operand(1, &[3, 4, 5, 2], dtype, Layout::Strided).unwrap();
        let (none, then) = (None, Then::Identity);
        let (_, got) = composed::batch_norm2d(&x, none, none, 1e-5, then).unwrap();
        let (_, want) = ops::batch_norm2d(&x, none, none, 1e-5, then).unwrap();
        assert_close(&format!("mean of {dtype:?}"), &got.mean, &want.mean, tol);
        assert_close(&format!("variance of {dtype:?}"), &got.var, &want.var, tol);
    }
}

#[test]
fn softmaxes() {
    for dims in [&[1, 1][..], &[3, 5, 7], &[2, 257]] {
        let what = format!("{dims:?}");
        check(&format!("softmax {what}"), &[dims], &|x| ops::softmax(&x[0]), &|x| {
            composed::softmax(&x[0])
        });
        check(&format!("log_softmax {what}"), &[dims], &|x| ops::log_softmax(&x[0]), &|x| {
            composed::log_softmax(&x[0])
        });
    }
}

#[test]
fn attentions() {
    // B, H, G, Tq, Tk, D; more queries than keys: under the causal mask the first see nothing.
    for row in [
        [2, 4, 4, 7, 7, 5],
        [1, 6, 2, 5, 9, 4],
        [2, 4, 1, 9, 4, 3],
        [1, 2, 2, 1, 8, 8],
        [1, 2, 1, 70, 70, 4],
    ] {
        let [b, h, g, tq, tk, d] = row;
        for mask in [Mask::Causal, Mask::Full] {
            for scale in [1.0 / (d as f64).sqrt(), 0.0] {
                check(
                    &format!("attention {row:?} {mask:?} scale {scale}"),
                    &[&[b, h, tq, d], &[b, g, tk, d], &[b, g, tk, d]],
                    &|x| ops::attention(&x[0], &x[1], &x[2], mask, scale),
                    &|x| composed::attention(&x[0], &x[1], &x[2], mask, scale),
                );
            }
        }
    }
}

#[test]
fn products() {
    for (dims, o) in [(&[3][..], 2), (&[7, 5], 9), (&[2, 3, 17], 1), (&[1, 2, 3, 4], 33)] {
        let d = *dims.last().unwrap();
        let what = format!("linear {dims:?} to {o}");
        check(&what, &[dims, &[o, d], &[o]], &|x| ops::linear(&x[0], &x[1], Some(&x[2])), &|x| {
            composed::linear(&x[0], &x[1], Some(&x[2]))
        });
        check(&what, &[dims, &[o, d]], &|x| ops::linear(&x[0], &x[1], None), &|x| {
            composed::linear(&x[0], &x[1], None)
        });
    }
    let rows: [(&[usize], &[usize]); 4] = [
        (&[5, 7], &[7, 3]),
        (&[2, 3, 5, 7], &[2, 3, 7, 9]),
        (&[2, 3, 5, 7], &[7, 9]),
        (&[4, 1, 9], &[4, 9, 1]),
    ];
    for (a, b) in rows {
        check(&format!("matmul {a:?} {b:?}"), &[a, b], &|x| ops::matmul(&x[0], &x[1]), &|x| {
            composed::matmul(&x[0], &x[1])
        });
    }
}

#[test]
fn losses() {
    let (n, d, v) = (9, 5, 7);
    let ids: [i64; 9] = [0, 6, -100, 3, 3, 1, -100, 5, 2];
    let none: [i64; 9] = [-100; 9];
    let all: [u32; 9] = [0, 6, 1, 3, 3, 1, 4, 5, 2];
    let targets = [
        Tensor::new(&ids, &Device::Cpu).unwrap(),
        Tensor::new(&none, &Device::Cpu).unwrap(),
        Tensor::new(&all, &Device::Cpu).unwrap(),
    ];
    for targets in &targets {
        for label_smoothing in [0.0, 0.1, 1.0] {
            let cfg = &CrossEntropy { ignore_index: -100, label_smoothing };
            let what = format!("cross_entropy of {targets} smoothed {label_smoothing}");
            let counted = |x: &[Tensor]| -> Result<[u64; 2]> {
                let got = composed::cross_entropy(&x[0], targets, cfg)?.n_counted;
                Ok([got, ops::cross_entropy(&x[0], targets, cfg)?.n_counted])
            };
            check(&what, &[&[n, v]], &|x| Ok(ops::cross_entropy(&x[0], targets, cfg)?.sum), &|x| {
                let [got, want] = counted(x)?;
                assert_eq!(got, want, "{what}");
                Ok(composed::cross_entropy(&x[0], targets, cfg)?.sum)
            });
            for chunk_bytes in [0, 3 * 4 * v as u64, u64::MAX] {
                let what = format!("linear_{what} in {chunk_bytes} bytes");
                let ours: &dyn Fn(&[Tensor]) -> Result<Tensor> = &|x| {
                    let (x, weight, bias) = (&x[0], &x[1], x.get(2));
                    Ok(ops::linear_cross_entropy(x, weight, bias, targets, cfg, chunk_bytes)?.sum)
                };
                let theirs: &dyn Fn(&[Tensor]) -> Result<Tensor> = &|x| {
                    let (x, weight, bias) = (&x[0], &x[1], x.get(2));
                    let loss =
                        composed::linear_cross_entropy(x, weight, bias, targets, cfg, chunk_bytes)?;
                    Ok(loss.sum)
                };
                check(&what, &[&[n, d], &[v, d]], ours, theirs);
                check(&what, &[&[n, d], &[v, d], &[v]], ours, theirs);
            }
        }
    }
}

#[test]
fn an_ignored_row_may_hold_nan() {
    let x = Var::new(&[[1f64, 2.0], [f64::NAN, 3.0]], &Device::Cpu).unwrap();
    let targets = Tensor::new(&[0i64, 9], &Device::Cpu).unwrap();
    let cfg = &CrossEntropy { ignore_index: 9, label_smoothing: 0.1 };
    let run = |f: fn(&Tensor, &Tensor, &CrossEntropy) -> Result<ops::Loss>| {
        let sum = f(&x, &targets, cfg)?.sum;
        let grads = sum.backward()?;
        Ok::<_, Error>([host(&sum)?, host(grads.get(&x).expect("a gradient"))?].concat())
    };
    let (got, want) = (run(composed::cross_entropy).unwrap(), run(ops::cross_entropy).unwrap());
    assert_close("cross_entropy", &got, &want, Tol::Rel(1e-10));
}

#[test]
fn embeddings() {
    let ids = Tensor::new(&[[4u32, 0, 4], [1, 4, 2]], &Device::Cpu).unwrap();
    for ids in [&ids, &ids.t().unwrap(), &ids.narrow(1, 1, 2).unwrap()] {
        for padding in [None, Some(4), Some(3)] {
            check(
                &format!("embedding of {ids} padding {padding:?}"),
                &[&[5, 3]],
                &|x| ops::embedding(&x[0], ids, padding),
                &|x| composed::embedding(&x[0], ids, padding),
            );
        }
    }
}

#[test]
fn ropes() {
    for (tokens, d) in [(1, 2), (5, 6), (9, 16)] {
        let (cos, sin) = ops::rope_table(tokens, d, 10_000.0, &Device::Cpu).unwrap();
        for style in [Rope::Half, Rope::Interleaved] {
            let what = format!("rope {style:?} {tokens} {d}");
            for dims in [&[tokens, d][..], &[2, 3, tokens, d]] {
                check(&what, &[dims], &|x| ops::rope(&x[0], &cos, &sin, style), &|x| {
                    composed::rope(&x[0], &cos, &sin, style)
                });
            }
        }
    }
}

#[test]
fn dropouts() {
    let key = DropKey { seed: 7, stream: 1 << 40 };
    for p in [0.0, 0.3, 0.9] {
        check(&format!("dropout {p}"), &[&[3, 5, 7]], &|x| ops::dropout(&x[0], p, key), &|x| {
            composed::dropout(&x[0], p, key)
        });
    }
}

#[test]
fn sums() {
    for dims in [&[1][..], &[3, 5, 7], &[33, 65]] {
        check("sum_all", &[dims], &|x| ops::sum_all(&x[0]), &|x| composed::sum_all(&x[0]));
        check("mean_all", &[dims], &|x| ops::mean_all(&x[0]), &|x| composed::mean_all(&x[0]));
    }
}

#[test]
fn refusals_are_those_of_the_operation() {
    let cpu = &Device::Cpu;
    let weight = &Tensor::zeros((3, 2), DType::F32, cpu).unwrap();
    let ids = &Tensor::new(&[1u32, 3], cpu).unwrap();
    for refused in [composed::embedding(weight, ids, None), ops::embedding(weight, ids, None)] {
        let want = EmbeddingError::Id { id: 3, position: 1, n_ids: 3 };
        assert!(matches!(refused, Err(Error::Embedding(error)) if error == want));
    }
    let key = DropKey { seed: 0, stream: 0 };
    for refused in [composed::dropout(weight, 1.0, key), ops::dropout(weight, 1.0, key)] {
        let want = DropoutError::Probability { p: 1.0 };
        assert!(matches!(refused, Err(Error::Dropout(error)) if error == want));
    }
    let smoothed = |label_smoothing| CrossEntropy { ignore_index: -100, label_smoothing };
    let bad_target = LossError::Target { row: 1, target: -1, n_classes: 2 };
    let bad_smoothing = LossError::LabelSmoothing { label_smoothing: 1.5 };
    let targets = &Tensor::new(&[1i64, -1, -100], cpu).unwrap();
    for (cfg, want) in [(smoothed(0.0), bad_target), (smoothed(1.5), bad_smoothing)] {
        for refused in [
            composed::cross_entropy(weight, targets, &cfg),
            ops::cross_entropy(weight, targets, &cfg),
            composed::linear_cross_entropy(
                weight,
                &weight.narrow(0, 0, 2).unwrap(),
                None,
                targets,
                &cfg,
                64,
            ),
            ops::linear_cross_entropy(
                weight,
                &weight.narrow(0, 0, 2).unwrap(),
                None,
                targets,
                &cfg,
                64,
            ),
        ] {
            assert!(matches!(refused, Err(Error::Loss(error)) if error == want));
        }
    }
    let floats = &Tensor::zeros(3, DType::F32, cpu).unwrap();
    for refused in [
        composed::cross_entropy(weight, floats, &smoothed(0.0)),
        ops::cross_entropy(weight, floats, &smoothed(0.0)),
    ] {
        assert!(matches!(refused, Err(Error::Targets { dtype: DType::F32, .. })));
    }
    for refused in [composed::relu(ids), ops::relu(ids)] {
        assert!(matches!(refused, Err(Error::DType { dtype: DType::U32, .. })));
    }
}

//! Prints how fast each kernel runs beside what the machine can do.
//!
//! `cargo run --release -p tallow-kernels --example speed [THREADS] [WORD]`: only lines with WORD in
//! their name. Rates are the best of many short runs, for other work on the machine disturbs some.

use half::bf16;
use std::{hint::black_box, time::Instant};
use tallow_kernels::{
    Element, Real,
    activation::{gelu_tanh, relu, silu},
    attention::{AttentionShape, attention, attention_backward},
    batch_norm::*,
    cast::cast,
    conv::*,
    gemm::{Mat, Store, gemm},
    isa::Isa,
    loss::*,
    norm::layer_norm,
    softmax::softmax,
};

/// Elements of the elementwise lines.
const N_ELEMS: usize = 1 << 22;

/// Which lines are printed.
struct Bench {
    word: String,
}

impl Bench {
    /// Seconds of the best of several runs of `f`.
    fn best_secs(&self, mut f: impl FnMut()) -> f64 {
        let start = Instant::now();
        f();
        let first = start.elapsed().as_secs_f64();
        let n = (2e-3 / first).ceil().max(1.0) as usize;
        let (start, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
        while runs < 5 || (runs < 50 && start.elapsed().as_secs_f64() < 0.5) {
            let before = Instant::now();
            (0..n).for_each(|_| f());
            best = best.min(before.elapsed().as_secs_f64() / n as f64);
            runs += 1;
        }
        best
    }

    /// One line: `work` is in floating point operations or bytes.
    fn line(&self, name: &str, unit: &str, work: f64, f: impl FnMut()) {
        if name.contains(&self.word) {
            let secs = self.best_secs(f);
            println!("{name:44} {:9.3} ms {:8.1} {unit}", secs * 1e3, work / secs / 1e9);
        }
    }
}

fn numbers<T: Element>(n: usize) -> Vec<T> {
    (0..n).map(|i| T::narrow(T::Acc::of((i * 7 % 1013) as f64 / 506.5 - 1.0))).collect()
}

fn limits(bench: &Bench) {
    #[cfg(target_arch = "x86_64")]
    if Isa::best() >= Isa::Avx2 {
        let n = 1_000_000;
        bench.line("peak: fused multiply-adds, one thread", "GFLOP/s", n as f64 * 192.0, || {
            // SAFETY: the processor has AVX2 and FMA.
            black_box(unsafe { multiply_adds(black_box(n)) });
        });
    }
    let (x, mut out) = (numbers::<f32>(N_ELEMS), vec![0f32; N_ELEMS]);
    bench.line("limit: copy, one thread", "GB/s", 8.0 * N_ELEMS as f64, || {
        out.copy_from_slice(black_box(&x));
        black_box(&mut out);
    });
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_adds(n: usize) -> f32 {
    use std::arch::x86_64::*;
    let mut acc = [_mm256_set1_ps(1.0); 12];
    let (x, y) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(1e-3)));
    for _ in 0..n {
        acc.iter_mut().for_each(|a| *a = _mm256_fmadd_ps(*a, x, y));
    }
    _mm256_cvtss_f32(acc.into_iter().fold(x, |s, a| _mm256_add_ps(s, a)))
}

fn products<T: Element>(bench: &Bench, dtype: &str) {
    for (m, n, k) in [
        (2304, 2304, 2304),
        (4096, 1024, 4096),
        (1024, 1024, 1024),
        (64, 3136, 576),
        (64, 64, 64),
        (4, 1024, 1024),
        (1024, 4, 1024),
    ] {
        let (a, b, mut c) = (numbers::<T>(m * k), numbers::<T>(k * n), numbers::<T>(m * n));
        let flop = 2.0 * (m * n * k) as f64;
        for (layout, a, b) in [
            ("a b", Mat::new(&a, m, k), Mat::new(&b, k, n)),
            ("a bt", Mat::new(&a, m, k), Mat::new(&b, n, k).t()),
            ("at b", Mat::new(&a, k, m).t(), Mat::new(&b, k, n)),
        ] {
            bench.line(&format!("gemm {dtype} {m}x{n}x{k} {layout}"), "GFLOP/s", flop, || {
                gemm(&mut c, a, b, Store::Overwrite);
            });
        }
    }
}

/// Channels in, out, kernel, stride, pixels a side, batch: from ResNet-50 and from the digits' network.
const CONVOLUTIONS: [[usize; 6]; 19] = [
    [3, 64, 7, 2, 224, 8],
    [64, 64, 1, 1, 56, 8],
    [64, 64, 3, 1, 56, 8],
    [64, 256, 1, 1, 56, 8],
    [256, 128, 1, 1, 56, 8],
    [128, 128, 3, 2, 56, 8],
    [128, 512, 1, 1, 28, 8],
    [256, 512, 1, 2, 56, 8],
    [256, 256, 3, 1, 14, 8],
    [1024, 2048, 1, 2, 14, 8],
    [512, 512, 3, 1, 7, 8],
    [512, 2048, 1, 1, 7, 8],
    [1, 16, 3, 1, 28, 32],
    [16, 16, 3, 1, 28, 32],
    [16, 32, 3, 2, 28, 32],
    [32, 32, 3, 1, 14, 32],
    [32, 64, 3, 2, 14, 32],
    [64, 64, 3, 1, 7, 32],
    [16, 32, 1, 2, 28, 32],
];

fn convolutions<T: Element>(bench: &Bench, dtype: &str) {
    for [c, o, kernel, stride, pixels, batch] in CONVOLUTIONS {
        let (stride, padding) = ([stride; 2], [kernel / 2; 2]);
        let cfg = Conv2dConfig { stride, padding, dilation: [1, 1], groups: 1 };
        let (x_dims, w_dims) = ([batch, c, pixels, pixels], [o, c, kernel, kernel]);
        let shape = Conv2dShape::new(x_dims, w_dims, cfg).expect("valid");
        let n = |dims: [usize; 4]| dims.iter().product::<usize>();
        let (x, w) = (numbers::<T>(n(x_dims)), numbers::<T>(n(w_dims)));
        let dout = numbers::<T>(n(shape.out_dims()));
        let (mut out, mut dx, mut dw) = (dout.clone(), x.clone(), w.clone());
        let flop = 2.0 * (dout.len() * c * kernel * kernel) as f64;
        let name =
            format!("conv {dtype} {c}>{o} k{kernel} s{} {pixels} px batch {batch}", stride[0]);
        let line = |part: &str, f: &mut dyn FnMut()| {
            bench.line(&format!("{name} {part}"), "GFLOP/s", flop, f);
        };
        line("out", &mut || conv2d(&mut out, &x, &w, None, &shape));
        line("dx", &mut || conv2d_backward_input(&mut dx, &dout, &w, &shape));
        line("dw", &mut || conv2d_backward_weight(&mut dw, &dout, &x, &shape));
    }
}

fn rows_and_elements<T: Element>(bench: &Bench, dtype: &str) {
    let (x, dout, mut out) = (numbers::<T>(N_ELEMS), numbers::<T>(N_ELEMS), numbers::<T>(N_ELEMS));
    let bytes = (2 * N_ELEMS * size_of::<T>()) as f64;
    let line = |name: &str, passes: f64, f: &mut dyn FnMut()| {
        bench.line(&format!("{name} {dtype}"), "GB/s", bytes * passes, f);
    };
    line("relu", 1.0, &mut || relu(&mut out, &x));
    line("gelu_tanh", 1.0, &mut || gelu_tanh(&mut out, &x));
    line("silu", 1.0, &mut || silu(&mut out, &x));
    line("softmax 4096x1024", 1.0, &mut || softmax(&mut out, &x, 1024));
    let ones = numbers::<T::Acc>(1024);
    line("layer_norm 4096x1024", 1.0, &mut || {
        layer_norm(&mut out, &x, Some(&ones), Some(&ones), 1024, 1e-5);
    });
    let shape = BatchNormShape { batch: 32, channels: 64, pixels: 2048 };
    let affine = Affine { weight: Some(&ones[..64]), bias: Some(&ones[..64]) };
    let stats = channel_stats(&x, &shape).expect("many values");
    line("batch_norm with statistics", 1.5, &mut || {
        let stats = channel_stats(&x, &shape).expect("many values");
        batch_norm(&mut out, &x, &stats, affine, &shape, 1e-5, Then::Relu);
    });
    line("batch_norm_backward", 2.5, &mut || {
        let (dx, source, then) = (Some(&mut out[..]), Source::Batch, Then::Relu);
        batch_norm_backward(dx, &x, &dout, &stats, source, affine, &shape, 1e-5, then);
    });
    let mut narrow = vec![bf16::ZERO; N_ELEMS];
    line("cast to bf16 from", 1.0, &mut || cast(&mut narrow, &x));
}

fn attentions<T: Element>(bench: &Bench, dtype: &str) {
    for (batch, n_heads, tokens) in [(8, 6, 512), (1, 16, 4096)] {
        let (q_tokens, kv_tokens, head_dim) = (tokens, tokens, 64);
        let n_kv_heads = n_heads;
        let shape = AttentionShape { batch, n_heads, n_kv_heads, q_tokens, kv_tokens, head_dim };
        let x = numbers::<T>(shape.q_elems());
        let (mut out, mut lse) = (x.clone(), vec![T::Acc::of(0.0); shape.lse_elems()]);
        let [mut dq, mut dk, mut dv] = [const { Vec::new() }; 3].map(|_: Vec<T>| x.clone());
        let flop = 2.0 * (shape.q_elems() * tokens) as f64; // half of the two products: causal
        let name = format!("attention {dtype} b{batch} h{n_heads} t{tokens} d64");
        bench.line(&format!("{name} forward"), "GFLOP/s", flop, || {
            attention(&mut out, &mut lse, &x, &x, &x, &shape, true, 0.125);
        });
        bench.line(&format!("{name} backward"), "GFLOP/s", 2.5 * flop, || {
            let d = (Some(&mut dq[..]), Some(&mut dk[..]), Some(&mut dv[..]));
            attention_backward(d.0, d.1, d.2, &x, &x, &x, &out, &lse, &x, &shape, true, 0.125);
        });
    }
}

fn losses<T: Element>(bench: &Bench, dtype: &str) {
    let (n, d, v) = (4096, 384, 50257);
    let (x, weight) = (numbers::<T>(n * d), numbers::<T>(v * d));
    let targets: Vec<i64> = (0..n as i64).collect();
    let linear = Linear { x: &x, weight: &weight, bias: None, n_features: d, n_classes: v };
    let config = CrossEntropy { ignore_index: -100, label_smoothing: 0.0 };
    let (mut lse, mut dx, mut dw) = (vec![0.0; n], x.clone(), weight.clone());
    let flop = 8.0 * (n * d * v) as f64; // logits twice, and both gradients
    bench.line(&format!("linear + cross entropy {dtype} both ways"), "GFLOP/s", flop, || {
        let chunk = DEFAULT_CHUNK_BYTES;
        let sums = linear_cross_entropy(&mut lse, &linear, &targets, &config, chunk);
        assert_eq!(sums.expect("valid").n_counted, n as u64);
        let (dx, dw) = (Some(&mut dx[..]), Some(&mut dw[..]));
        let scale = 1.0 / n as f64;
        linear_cross_entropy_backward(dx, dw, None, &linear, &lse, &targets, &config, scale, chunk)
            .expect("valid");
    });
}

fn main() {
    let n_threads = std::env::args().nth(1).map_or(1, |n| n.parse().expect("a number of threads"));
    let bench = Bench { word: std::env::args().nth(2).unwrap_or_default() };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
    pool.build_global().expect("the first pool");
    println!("{:?}, {n_threads} threads", Isa::current());
    limits(&bench);
    products::<f32>(&bench, "f32");
    products::<bf16>(&bench, "bf16");
    convolutions::<f32>(&bench, "f32");
    convolutions::<bf16>(&bench, "bf16");
    rows_and_elements::<f32>(&bench, "f32");
    rows_and_elements::<bf16>(&bench, "bf16");
    attentions::<f32>(&bench, "f32");
    attentions::<bf16>(&bench, "bf16");
    losses::<f32>(&bench, "f32");
    losses::<bf16>(&bench, "bf16");
}

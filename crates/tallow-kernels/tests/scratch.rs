//! Every price of scratch against the bytes counted while the kernel runs, on one thread. No test
//! harness: its threads would be counted too.

mod support;
use half::bf16;
use std::alloc::System;
use support::to;
use tallow_kernels::{
    Element, Real,
    attention::{
        AttentionShape, attention, attention_backward, attention_backward_scratch_bytes,
        attention_scratch_bytes,
    },
    conv::*,
    gemm::{Mat, Store, gemm, gemm_scratch_bytes},
    loss::*,
    pool::{Pool2dConfig, Pool2dShape, max_pool2d_backward, pool2d_backward_scratch_bytes},
};
use tallow_memory::CountingAllocator;
use tallow_testkit::values;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

/// Lists of tiles and tasks, and growth by doubling of small vectors.
const SMALL_BYTES: u64 = 64 << 10;

fn main() {
    convolutions::<f32>();
    convolutions::<bf16>();
    attentions::<f32>();
    attentions::<bf16>();
    products();
    pools::<f32>();
    pools::<bf16>();
    losses::<f32>();
    losses::<bf16>();
    println!("prices are as counted");
}

/// The counted peak is at most the price; the price is not much more than the peak.
fn check(what: &str, price: u64, run: impl FnMut() + Send) {
    // A thread keeps its packing buffers until it ends: a new one has none yet.
    let peak = std::thread::scope(|threads| threads.spawn(|| alone(run)).join());
    let peak = peak.expect("the kernel runs");
    println!("{what}: price {price}, counted {peak}");
    assert!(peak <= price + SMALL_BYTES, "{what}: counted {peak}, the price is {price}");
    assert!(price <= peak + peak / 4 + SMALL_BYTES, "{what}: {price} is more than {peak} counted");
}

/// The peak of `run` while the calling thread is all of its pool.
fn alone(mut run: impl FnMut()) -> u64 {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
    let _pool = pool.expect("a pool");
    let scope = ALLOC.scope();
    run();
    scope.peak_bytes()
}

fn n_elems(dims: [usize; 4]) -> usize {
    dims.iter().product()
}

fn convolutions<T: Element>() {
    for (x_dims, w_dims, stride, groups) in [
        ([2, 64, 56, 56], [64, 64, 3, 3], 1, 1),
        ([1, 3, 224, 224], [64, 3, 7, 7], 2, 1),
        ([4, 256, 28, 28], [512, 256, 1, 1], 1, 1),
        ([2, 256, 28, 28], [512, 256, 1, 1], 2, 1),
        ([4, 512, 7, 7], [512, 512, 3, 3], 1, 1),
        ([1, 32, 40, 40], [32, 1, 3, 3], 1, 32),
    ] {
        let (stride, padding) = ([stride; 2], [w_dims[2] / 2; 2]);
        let cfg = Conv2dConfig { stride, padding, dilation: [1, 1], groups };
        let shape = Conv2dShape::new(x_dims, w_dims, cfg).expect("valid");
        let (x, w) = (to::<T>(&values(1, n_elems(x_dims))), to::<T>(&values(2, n_elems(w_dims))));
        let dout = to::<T>(&values(3, n_elems(shape.out_dims())));
        let (mut out, mut dx, mut dw) = (dout.clone(), x.clone(), w.clone());
        let what = |part| format!("conv2d {part} {x_dims:?} {w_dims:?} {}", size_of::<T>());
        check(&what("forward"), conv2d_scratch_bytes::<T>(&shape, 1), || {
            conv2d(&mut out, &x, &w, None, &shape);
        });
        let price = conv2d_backward_input_scratch_bytes::<T>(&shape, 1);
        check(&what("input"), price, || {
            conv2d_backward_input(&mut dx, &dout, &w, &shape);
        });
        let price = conv2d_backward_weight_scratch_bytes::<T>(&shape, 1);
        check(&what("weight"), price, || {
            conv2d_backward_weight(&mut dw, &dout, &x, &shape);
        });
    }
}

fn attentions<T: Element>() {
    let shape = AttentionShape {
        batch: 1,
        n_heads: 2,
        n_kv_heads: 1,
        q_tokens: 700,
        kv_tokens: 900,
        head_dim: 64,
    };
    let (n_q, n_kv) = (2 * 700 * 64, 900 * 64);
    let (q, k, v) =
        (to::<T>(&values(1, n_q)), to::<T>(&values(2, n_kv)), to::<T>(&values(3, n_kv)));
    let (mut out, mut lse) = (q.clone(), vec![<T::Acc as Default>::default(); 1400]);
    let what = |part| format!("attention {part} {}", size_of::<T>());
    check(&what("forward"), attention_scratch_bytes::<T>(&shape), || {
        attention(&mut out, &mut lse, &q, &k, &v, &shape, false, 0.1);
    });
    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
    let price = attention_backward_scratch_bytes::<T>(&shape);
    check(&what("backward"), price, || {
        let d = (Some(&mut dq[..]), Some(&mut dk[..]), Some(&mut dv[..]));
        attention_backward(d.0, d.1, d.2, &q, &k, &v, &out, &lse, &q, &shape, false, 0.1);
    });
}

fn pools<T: Element>() {
    let cfg = Pool2dConfig { kernel: [3, 3], stride: [2, 2], padding: [1, 1] };
    let shape = Pool2dShape::new(2, [300, 300], cfg).expect("valid");
    let (x, dout) = (to::<T>(&values(1, 2 * 90_000)), to::<T>(&values(2, 2 * 22_500)));
    let mut dx = x.clone();
    let price = pool2d_backward_scratch_bytes::<T>(&shape, 1);
    check(&format!("max pool backward {}", size_of::<T>()), price, || {
        max_pool2d_backward(&mut dx, &x, &dout, &shape);
    });
}

fn products() {
    let (m, n, k) = (600, 1100, 1300);
    let (a, b) = (to::<bf16>(&values(1, m * k)), to::<bf16>(&values(2, k * n)));
    let mut c = vec![bf16::ZERO; m * n];
    check("gemm bf16", gemm_scratch_bytes::<bf16>(600, 1100, 1300), || {
        gemm(&mut c, Mat::new(&a, m, k), Mat::new(&b, k, n), Store::Overwrite);
    });
    let (a, b) = (to::<f32>(&values(1, m * k)), to::<f32>(&values(2, k * n)));
    let mut c = vec![0f32; m * n];
    check("gemm f32", gemm_scratch_bytes::<f32>(600, 1100, 1300), || {
        gemm(&mut c, Mat::new(&a, m, k), Mat::new(&b, k, n), Store::Overwrite);
    });
}

fn losses<T: Element>() {
    let (n, d, v, chunk) = (1000usize, 64usize, 5000usize, 2 << 20);
    let (x, w) = (to::<T>(&values(1, n * d)), to::<T>(&values(2, v * d)));
    let targets: Vec<i64> = (0..n as i64).map(|i| i * 37 % v as i64).collect();
    let bias = to::<T>(&values(3, v));
    let linear = Linear { x: &x, weight: &w, bias: Some(&bias[..]), n_features: d, n_classes: v };
    let cfg = CrossEntropy { ignore_index: -100, label_smoothing: 0.0 };
    let mut lse = vec![0.0; n];
    let sizes = [n, d, v].map(|n| n as u64);
    let price = linear_cross_entropy_scratch_bytes::<T>(sizes[0], sizes[1], sizes[2], chunk);
    let what = |part| format!("linear cross entropy {part} {}", size_of::<T>());
    check(&what("forward"), price, || {
        let sums = linear_cross_entropy(&mut lse, &linear, &targets, &cfg, chunk);
        assert_eq!(sums.expect("valid").n_counted, 1000);
    });
    let (mut dx, mut dw, mut db) = (x.clone(), w.clone(), bias.clone());
    let price =
        linear_cross_entropy_backward_scratch_bytes::<T>(sizes[0], sizes[1], sizes[2], chunk);
    check(&what("backward"), price, || {
        let (dx, dw, db) = (Some(&mut dx[..]), Some(&mut dw[..]), Some(&mut db[..]));
        linear_cross_entropy_backward(dx, dw, db, &linear, &lse, &targets, &cfg, 1.0, chunk)
            .expect("valid");
    });
    // Blocks of all rows, and of some.
    for chunk in [64 << 20, chunk] {
        let [n, d, v] = sizes;
        let price = linear_cross_entropy_with_grads_scratch_bytes::<T>(n, d, v, chunk);
        let wide = |n: u64| vec![T::Acc::of(0.0); n as usize];
        let (mut dx, mut dw, mut db) = (wide(n * d), wide(v * d), wide(v));
        check(&what("in one pass"), price, || {
            let grads =
                LinearGrads { x: Some(&mut dx), weight: Some(&mut dw), bias: Some(&mut db) };
            let sums =
                linear_cross_entropy_with_grads(&mut lse, grads, &linear, &targets, &cfg, chunk);
            assert_eq!(sums.expect("valid").n_counted, 1000);
        });
    }
}

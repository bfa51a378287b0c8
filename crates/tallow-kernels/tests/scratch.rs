//! Every price of scratch against the bytes counted while the kernel runs, on one thread. No test
//! harness: its threads would be counted too.

mod support;
use half::bf16;
use std::alloc::System;
use support::to;
use tallow_kernels::{
    Element,
    attention::{
        AttentionShape, attention, attention_backward, attention_backward_scratch_bytes,
        attention_scratch_bytes,
    },
    conv::*,
    gemm::{Mat, Store, gemm, gemm_packing_bytes, gemm_scratch_bytes},
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
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    pool.install(|| {
        convolutions::<f32>();
        convolutions::<bf16>();
        attentions::<f32>();
        attentions::<bf16>();
        products();
        pools::<f32>();
        pools::<bf16>();
        losses::<f32>();
        losses::<bf16>();
    });
    println!("prices are as counted");
}

/// The counted peak is at most the price and what products of `packed` (m, n, k) may pack; the price
/// is not much more than the peak.
fn check<T: Element>(what: &str, price: u64, packed: [usize; 3], mut run: impl FnMut()) {
    let [m, n, k] = packed.map(|n| n as u64);
    let most = price + gemm_packing_bytes::<T>(m, n, k) + SMALL_BYTES;
    run(); // the gemm crate keeps its packing buffer once it has one
    let scope = ALLOC.scope();
    run();
    let peak = scope.peak_bytes();
    drop(scope);
    println!("{what}: price {price}, counted {peak}");
    assert!(peak <= most, "{what}: counted {peak}, the price is {price}");
    assert!(price <= peak + peak / 4 + SMALL_BYTES, "{what}: {price} is more than {peak} counted");
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
        let depth = w_dims[1] * w_dims[2] * w_dims[3];
        let packed = [w_dims[0] / groups, 2048, depth];
        check::<T>(&what("forward"), conv2d_scratch_bytes::<T>(&shape, 1), packed, || {
            conv2d(&mut out, &x, &w, None, &shape);
        });
        let packed = [depth, 1024, w_dims[0] / groups];
        let price = conv2d_backward_input_scratch_bytes::<T>(&shape, 1);
        check::<T>(&what("input"), price, packed, || {
            conv2d_backward_input(&mut dx, &dout, &w, &shape);
        });
        let packed = [128, 1152, 1024];
        let price = conv2d_backward_weight_scratch_bytes::<T>(&shape, 1);
        check::<T>(&what("weight"), price, packed, || {
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
    check::<T>(&what("forward"), attention_scratch_bytes::<T>(&shape), [64, 64, 64], || {
        attention(&mut out, &mut lse, &q, &k, &v, &shape, false, 0.1);
    });
    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
    let price = attention_backward_scratch_bytes::<T>(&shape);
    check::<T>(&what("backward"), price, [64, 64, 64], || {
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
    check::<T>(&format!("max pool backward {}", size_of::<T>()), price, [0; 3], || {
        max_pool2d_backward(&mut dx, &x, &dout, &shape);
    });
}

fn products() {
    let (m, n, k) = (600, 1100, 1300);
    let (a, b) = (to::<bf16>(&values(1, m * k)), to::<bf16>(&values(2, k * n)));
    let mut c = vec![bf16::ZERO; m * n];
    check::<bf16>("gemm bf16", gemm_scratch_bytes::<bf16>(), [256, 512, 512], || {
        gemm(&mut c, Mat::new(&a, m, k), Mat::new(&b, k, n), Store::Overwrite);
    });
    let (a, b) = (to::<f32>(&values(1, m * k)), to::<f32>(&values(2, k * n)));
    let mut c = vec![0f32; m * n];
    check::<f32>("gemm f32", gemm_scratch_bytes::<f32>(), [256, 512, k], || {
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
    check::<T>(&what("forward"), price, [n, 4096, d], || {
        let sums = linear_cross_entropy(&mut lse, &linear, &targets, &cfg, chunk);
        assert_eq!(sums.expect("valid").n_counted, 1000);
    });
    let (mut dx, mut dw, mut db) = (x.clone(), w.clone(), bias.clone());
    let price =
        linear_cross_entropy_backward_scratch_bytes::<T>(sizes[0], sizes[1], sizes[2], chunk);
    check::<T>(&what("backward"), price, [4096, 4096, n], || {
        let (dx, dw, db) = (Some(&mut dx[..]), Some(&mut dw[..]), Some(&mut db[..]));
        linear_cross_entropy_backward(dx, dw, db, &linear, &lse, &targets, &cfg, 1.0, chunk)
            .expect("valid");
    });
}

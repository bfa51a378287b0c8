//! The cases done by `tallow-kernels`.

mod pass;
mod planes;

use crate::{
    cases::{Case, Conv, Op},
    inputs::{integers, numbers},
    work::{Precision, Work, on_slices},
};
use half::bf16;
use tallow_kernels::{
    Real,
    attention::{AttentionShape, attention, attention_backward},
    conv::{Conv2dConfig, Conv2dShape, conv2d, conv2d_backward_input, conv2d_backward_weight},
    embedding::embedding_backward,
    gemm::{Mat, Store, batched_gemm},
    loss::{
        CrossEntropy, Linear, LinearGrads, ONE_PASS_CHUNK_BYTES, linear_cross_entropy_with_grads,
        scale_into,
    },
    optim::Weight,
};

/// Every case can be done.
/// # Errors
/// If a shape is refused.
pub fn work(case: &Case) -> Result<Box<dyn Work>, String> {
    match case.precision {
        Precision::F32 => of::<f32, bf16>(case),
        Precision::Bf16 => of::<bf16, f32>(case),
    }
}

/// With elements of `T`; `U` is the other precision.
fn of<T: Weight, U: Weight>(case: &Case) -> Result<Box<dyn Work>, String> {
    Ok(match case.op {
        Op::Gemm { batch, m, n, k, a_t, b_t } => gemm::<T>(batch, (m, n, k), (a_t, b_t)),
        Op::Conv(conv) => convolution::<T>(conv)?,
        Op::Attention { batch, heads, tokens, head_dim } => {
            causal::<T>(batch, heads, tokens, head_dim)
        }
        Op::LinearCrossEntropy { rows, features, classes } => {
            cross_entropy::<T>(rows, features, classes)
        }
        Op::Pass { kernel, rows, cols } => pass::work::<T, U>(kernel, rows, cols)?,
        Op::Planes { kernel, batch, channels, size } => {
            planes::work::<T>(kernel, batch, channels, size)?
        }
        Op::EmbeddingBackward { rows, features, vocab } => embedding::<T>(rows, features, vocab),
    })
}

fn gemm<T: Weight>(
    batch: usize,
    (m, n, k): (usize, usize, usize),
    (a_t, b_t): (bool, bool),
) -> Box<dyn Work> {
    let (a, b) = (numbers::<T>(batch * m * k, 1), numbers::<T>(batch * k * n, 2));
    on_slices(&[batch * m * n], move |outs| {
        let left = |i: usize| mat(&a[i * m * k..][..m * k], m, k, a_t);
        let right = |i: usize| mat(&b[i * k * n..][..k * n], k, n, b_t);
        batched_gemm(&mut outs[0], batch, left, right, Store::Overwrite);
    })
}

/// A dense matrix, or one that lies in memory as its transpose.
fn mat<T>(data: &[T], rows: usize, cols: usize, transposed: bool) -> Mat<'_, T> {
    if transposed { Mat::new(data, cols, rows).t() } else { Mat::new(data, rows, cols) }
}

fn convolution<T: Weight>(conv: Conv) -> Result<Box<dyn Work>, String> {
    let Conv { batch, channels, size, out_channels, kernel, stride } = conv;
    let padding = [conv.padding(); 2];
    let config = Conv2dConfig { stride: [stride; 2], padding, ..Conv2dConfig::UNIT };
    let weight_dims = [out_channels, channels, kernel, kernel];
    let shape = Conv2dShape::new([batch, channels, size, size], weight_dims, config);
    let shape = shape.map_err(|error| error.to_string())?;
    let [n_x, n_w, n_y] = [
        batch * channels * size * size,
        conv.weight_elems(),
        batch * out_channels * conv.out_size().pow(2),
    ];
    let (x, w, g) = (numbers::<T>(n_x, 1), numbers::<T>(n_w, 2), numbers::<T>(n_y, 3));
    Ok(on_slices(&[n_y, n_x, n_w], move |outs| {
        let [y, dx, dw] = outs else { return };
        conv2d(y, &x, &w, None, &shape);
        conv2d_backward_input(dx, &g, &w, &shape);
        conv2d_backward_weight(dw, &g, &x, &shape);
    }))
}

fn causal<T: Weight>(
    batch: usize,
    n_heads: usize,
    tokens: usize,
    head_dim: usize,
) -> Box<dyn Work> {
    let shape = AttentionShape {
        batch,
        n_heads,
        n_kv_heads: n_heads,
        q_tokens: tokens,
        kv_tokens: tokens,
        head_dim,
    };
    let n = shape.q_elems();
    let [q, k, v, g] = [1, 2, 3, 4].map(|seed| numbers::<T>(n, seed));
    let mut lse = vec![T::Acc::of(0.0); shape.lse_elems()];
    let scale = 1.0 / (head_dim as f64).sqrt();
    on_slices(&[n; 4], move |outs| {
        let [out, dq, dk, dv] = outs else { return };
        attention(out, &mut lse, &q, &k, &v, &shape, true, scale);
        let grads = (Some(&mut dq[..]), Some(&mut dk[..]), Some(&mut dv[..]));
        let (dq, dk, dv) = grads;
        attention_backward(dq, dk, dv, &q, &k, &v, out, &lse, &g, &shape, true, scale);
    })
}

/// Work whose loss comes out beside the gradients.
struct Loss<T> {
    x: Vec<T>,
    weight: Vec<T>,
    targets: Vec<i64>,
    lse: Vec<f64>,
    dx: Vec<T>,
    dweight: Vec<T>,
    features: usize,
    loss: f64,
}

fn cross_entropy<T: Weight>(rows: usize, features: usize, classes: usize) -> Box<dyn Work> {
    let (n_x, n_w) = (rows * features, classes * features);
    let targets = integers(rows, classes as u32, 3).into_iter().map(i64::from).collect();
    Box::new(Loss {
        x: numbers::<T>(n_x, 1),
        weight: numbers::<T>(n_w, 2),
        targets,
        lse: vec![0.0; rows],
        dx: vec![T::default(); n_x],
        dweight: vec![T::default(); n_w],
        features,
        loss: f64::NAN,
    })
}

impl<T: Weight> Work for Loss<T> {
    fn run(&mut self) -> Result<(), String> {
        let Self { x, weight, targets, lse, dx, dweight, features, loss } = self;
        let (n_features, n_classes) = (*features, weight.len() / *features);
        let linear = Linear { x, weight, bias: None, n_features, n_classes };
        let config = CrossEntropy { ignore_index: -100, label_smoothing: 0.0 };
        // Gradients are added up in the accumulator type, in place where that is the weight's.
        let room = |grad: &mut [T]| match T::as_acc_mut(grad) {
            Some(_) => vec![],
            None => vec![T::Acc::of(0.0); grad.len()],
        };
        let (mut wide_x, mut wide_w) = (room(dx), room(dweight));
        let sums = {
            let x = T::as_acc_mut(dx).unwrap_or(&mut wide_x);
            let weight = T::as_acc_mut(dweight).unwrap_or(&mut wide_w);
            let grads = LinearGrads { x: Some(x), weight: Some(weight), bias: None };
            // As many rows a block in either precision.
            let chunk = ONE_PASS_CHUNK_BYTES / 4 * size_of::<T>() as u64;
            linear_cross_entropy_with_grads(lse, grads, &linear, targets, &config, chunk)
        };
        let sums = sums.map_err(|error| error.to_string())?;
        let n = sums.n_counted as f64;
        *loss = sums.loss_sum / n;
        for (grad, wide) in [(dx, &wide_x), (dweight, &wide_w)] {
            match T::as_acc_mut(grad) {
                Some(grad) => tallow_kernels::accum::scale(grad, 1.0 / n),
                None => scale_into(grad, wide, 1.0 / n),
            }
        }
        Ok(())
    }

    fn samples(&self) -> Vec<f64> {
        use crate::work::sample;
        [vec![self.loss], sample(&self.dx), sample(&self.dweight)].concat()
    }
}

fn embedding<T: Weight>(rows: usize, features: usize, vocab: usize) -> Box<dyn Work> {
    let (ids, g) = (integers(rows, vocab as u32, 1), numbers::<T>(rows * features, 2));
    on_slices(&[vocab * features], move |outs| {
        embedding_backward(&mut outs[0], &ids, &g, features, None).expect("ids are below vocab");
    })
}

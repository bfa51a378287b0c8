//! The cases done by plain candle, where it has the operations.

use crate::{
    cases::{Case, Conv, Op, Pass, Planes},
    inputs::{integers, numbers},
    work::{Precision, Work, sample},
};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, ops};

/// One tensor from another.
type Map = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// What candle does for a case.
pub enum Offer {
    /// The same.
    Work(Box<dyn Work>),
    /// Nothing, and why.
    Nothing(&'static str),
}

/// Logits and scores that candle holds at the same time in forward and backward.
const COPIES: u64 = 10;

/// Candle's way, unless it would need more than `free_bytes`.
/// # Errors
/// What candle complained about.
pub fn work(case: &Case, free_bytes: u64) -> std::result::Result<Offer, String> {
    of(case, free_bytes).map_err(|error| error.to_string())
}

fn of(case: &Case, free_bytes: u64) -> Result<Offer> {
    let dtype = match case.precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::BF16,
    };
    let fits = |elems: usize| COPIES * elems as u64 * case.precision.elem_bytes() < free_bytes;
    let work = match case.op {
        Op::Gemm { batch, m, n, k, a_t, b_t } => gemm(batch, (m, n, k), (a_t, b_t), dtype)?,
        Op::Conv(_) if dtype == DType::BF16 => {
            return Ok(Offer::Nothing("no bf16 convolution on the CPU"));
        }
        Op::Conv(conv) => convolution(conv, dtype)?,
        Op::Attention { batch, heads, tokens, .. } if !fits(batch * heads * tokens * tokens) => {
            return Ok(Offer::Nothing("not enough memory for its scores"));
        }
        Op::Attention { batch, heads, tokens, head_dim } => {
            causal([batch, heads, tokens, head_dim], dtype)?
        }
        Op::LinearCrossEntropy { rows, classes, .. } if !fits(rows * classes) => {
            return Ok(Offer::Nothing("not enough memory for its logits"));
        }
        Op::LinearCrossEntropy { rows, features, classes } => {
            cross_entropy(rows, features, classes, dtype)?
        }
        Op::Pass { kernel, rows, cols } => return pass(kernel, rows, cols, dtype),
        Op::Planes { kernel: Planes::BatchNormRelu | Planes::BatchNormReluBackward, .. } => {
            return Ok(Offer::Nothing("no such operation by itself"));
        }
        Op::Planes { .. } => return Ok(Offer::Nothing("no padded pooling")),
        Op::EmbeddingBackward { rows, features, vocab } => embedding(rows, features, vocab, dtype)?,
    };
    Ok(Offer::Work(work))
}

/// A computation and the results of its last run.
struct OnTensors<F> {
    run: F,
    outs: Vec<Tensor>,
}

impl<F: FnMut() -> Result<Vec<Tensor>>> Work for OnTensors<F> {
    fn run(&mut self) -> std::result::Result<(), String> {
        self.outs.clear();
        self.outs = (self.run)().map_err(|error| error.to_string())?;
        Ok(())
    }

    fn samples(&self) -> Vec<f64> {
        let values = |out: &Tensor| -> Result<Vec<f64>> {
            let out = out.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            Ok(sample(&out))
        };
        self.outs.iter().flat_map(|out| values(out).unwrap_or_default()).collect()
    }
}

fn on_tensors(run: impl FnMut() -> Result<Vec<Tensor>> + 'static) -> Box<dyn Work> {
    Box::new(OnTensors { run, outs: Vec::new() })
}

fn tensor(dims: &[usize], seed: u32, dtype: DType) -> Result<Tensor> {
    let data = numbers::<f32>(dims.iter().product(), seed);
    Tensor::from_vec(data, dims, &Device::Cpu)?.to_dtype(dtype)
}

fn gemm(
    batch: usize,
    (m, n, k): (usize, usize, usize),
    (a_t, b_t): (bool, bool),
    dtype: DType,
) -> Result<Box<dyn Work>> {
    let operand = |rows, cols, t, seed| match t {
        false => tensor(&[batch, rows, cols], seed, dtype),
        true => tensor(&[batch, cols, rows], seed, dtype)?.t(),
    };
    let (a, b) = (operand(m, k, a_t, 1)?, operand(k, n, b_t, 2)?);
    Ok(on_tensors(move || Ok(vec![a.matmul(&b)?])))
}

/// Backward starts from ones, which is what candle has no more work with: only the output is the
/// same as elsewhere.
fn convolution(conv: Conv, dtype: DType) -> Result<Box<dyn Work>> {
    let Conv { batch, channels, size, out_channels, kernel, stride } = conv;
    let x = Var::from_tensor(&tensor(&[batch, channels, size, size], 1, dtype)?)?;
    let w = Var::from_tensor(&tensor(&[out_channels, channels, kernel, kernel], 2, dtype)?)?;
    Ok(on_tensors(move || {
        let y = x.conv2d(&w, conv.padding(), stride, 1, 1)?;
        y.backward()?;
        Ok(vec![y])
    }))
}

fn causal(dims: [usize; 4], dtype: DType) -> Result<Box<dyn Work>> {
    let var = |seed| Var::from_tensor(&tensor(&dims, seed, dtype)?);
    let (q, k, v) = (var(1)?, var(2)?, var(3)?);
    let [.., tokens, head_dim] = dims;
    let hidden = |i| if i % tokens > i / tokens { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..tokens * tokens).map(hidden).collect();
    let mask = Tensor::from_vec(mask, (tokens, tokens), &Device::Cpu)?.to_dtype(dtype)?;
    let scale = 1.0 / (head_dim as f64).sqrt();
    Ok(on_tensors(move || {
        let scores = (q.matmul(&k.t()?)? * scale)?.broadcast_add(&mask)?;
        let out = ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        out.backward()?;
        Ok(vec![out])
    }))
}

fn cross_entropy(
    rows: usize,
    features: usize,
    classes: usize,
    dtype: DType,
) -> Result<Box<dyn Work>> {
    let x = Var::from_tensor(&tensor(&[rows, features], 1, dtype)?)?;
    let w = Var::from_tensor(&tensor(&[classes, features], 2, dtype)?)?;
    let targets = Tensor::from_vec(integers(rows, classes as u32, 3), rows, &Device::Cpu)?;
    Ok(on_tensors(move || {
        let logits = x.matmul(&w.t()?)?.to_dtype(DType::F32)?;
        let loss = candle_nn::loss::cross_entropy(&logits, &targets)?;
        let mut grads = loss.backward()?;
        let grads = [grads.remove(&x), grads.remove(&w)].into_iter().flatten();
        Ok([loss].into_iter().chain(grads).collect())
    }))
}

fn embedding(rows: usize, features: usize, vocab: usize, dtype: DType) -> Result<Box<dyn Work>> {
    let ids = Tensor::from_vec(integers(rows, vocab as u32, 1), rows, &Device::Cpu)?;
    let g = tensor(&[rows, features], 2, dtype)?;
    Ok(on_tensors(move || {
        let zeros = Tensor::zeros((vocab, features), dtype, &Device::Cpu)?;
        Ok(vec![zeros.index_add(&ids, &g, 0)?])
    }))
}

fn pass(kernel: Pass, rows: usize, cols: usize, dtype: DType) -> Result<Offer> {
    let x = tensor(&[rows, cols], 1, dtype)?;
    let (w, b) = (tensor(&[cols], 3, dtype)?, tensor(&[cols], 4, dtype)?);
    let run: Map = match kernel {
        Pass::LayerNorm => Box::new(move |x| ops::layer_norm(x, &w, &b, 1e-5)),
        Pass::RmsNorm => Box::new(move |x| ops::rms_norm(x, &w, 1e-5)),
        Pass::Softmax => Box::new(ops::softmax_last_dim),
        Pass::Gelu => Box::new(|x| x.gelu()),
        Pass::Silu => Box::new(|x| x.silu()),
        Pass::Relu => Box::new(|x| x.relu()),
        Pass::AddRelu => {
            let other = tensor(&[rows, cols], 2, dtype)?;
            Box::new(move |x| (x + &other)?.relu())
        }
        Pass::Swiglu => {
            let up = tensor(&[rows, cols], 2, dtype)?;
            Box::new(move |x| x.silu()? * &up)
        }
        Pass::Cast => {
            let to = if dtype == DType::F32 { DType::BF16 } else { DType::F32 };
            Box::new(move |x| x.to_dtype(to))
        }
        Pass::Adamw => return Ok(Offer::Work(adamw(&x, dtype)?)),
        Pass::Adamw8 => return Ok(Offer::Nothing("no 8-bit state")),
        _ => return Ok(Offer::Nothing("no such operation by itself")),
    };
    Ok(Offer::Work(on_tensors(move || Ok(vec![run(&x)?]))))
}

fn adamw(param: &Tensor, dtype: DType) -> Result<Box<dyn Work>> {
    let var = Var::from_tensor(param)?;
    // The only way to a store of gradients is a backward pass.
    let grad = tensor(param.dims(), 2, dtype)?;
    let mut grads = var.sum_all()?.backward()?;
    grads.insert(&var, grad);
    let params = ParamsAdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let mut optimizer = AdamW::new(vec![var.clone()], params)?;
    Ok(on_tensors(move || {
        optimizer.step(&grads)?;
        Ok(vec![var.as_tensor().clone()])
    }))
}

//! Passes over a matrix.

use crate::{
    cases::Pass,
    inputs::numbers,
    work::{Work, on_slices},
};
use tallow_kernels::{
    accum, activation,
    cast::cast,
    norm,
    optim::{
        Adam, Block, Format, Job, Moment, Rounding, Rule, Sign, UpdateKey, Weight, Weights, update,
    },
    softmax,
};

const EPS: f64 = 1e-5;

/// The rule of all updates.
const ADAMW: Rule =
    Rule::AdamW(Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.01, t: 1 });

pub(super) fn work<T: Weight, U: Weight>(
    kernel: Pass,
    rows: usize,
    cols: usize,
) -> Result<Box<dyn Work>, String> {
    let n = rows * cols;
    let x = numbers::<T>(n, 1);
    Ok(match kernel {
        Pass::LayerNorm | Pass::RmsNorm => norm(kernel, x, cols),
        Pass::LayerNormBackward | Pass::RmsNormBackward => norm_backward(kernel, x, cols),
        Pass::Cast => on_slices::<U>(&[n], move |outs| cast(&mut outs[0], &x)),
        Pass::Accumulate => on_slices::<f32>(&[n], move |outs| accum::add(&mut outs[0], &x)),
        Pass::Adamw => adamw(x, if size_of::<T>() == 4 { Format::F32 } else { BF16 }),
        Pass::Adamw8 => {
            let block = Block::new(256).map_err(|error| error.to_string())?;
            adamw(x, Format::Bits8(block))
        }
        Pass::Softmax => on_slices(&[n], move |outs| softmax::softmax(&mut outs[0], &x, cols)),
        _ => element_wise(kernel, x, cols),
    })
}

const BF16: Format = Format::Bf16(Rounding::Nearest);

fn norm<T: Weight>(kernel: Pass, x: Vec<T>, cols: usize) -> Box<dyn Work> {
    let (w, b) = (numbers::<T::Acc>(cols, 3), numbers::<T::Acc>(cols, 4));
    on_slices(&[x.len()], move |outs| match kernel {
        Pass::LayerNorm => norm::layer_norm(&mut outs[0], &x, Some(&w), Some(&b), cols, EPS),
        _ => norm::rms_norm(&mut outs[0], &x, Some(&w), cols, EPS),
    })
}

fn norm_backward<T: Weight>(kernel: Pass, x: Vec<T>, cols: usize) -> Box<dyn Work> {
    let (w, g) = (numbers::<T::Acc>(cols, 3), numbers::<T>(x.len(), 2));
    let (mut dw, mut db) = (w.clone(), w.clone());
    on_slices(&[x.len()], move |outs| {
        let (dx, dw, w) = (Some(&mut outs[0][..]), Some(&mut dw[..]), Some(&w[..]));
        match kernel {
            Pass::LayerNormBackward => {
                norm::layer_norm_backward(dx, dw, Some(&mut db), &x, w, &g, cols, EPS);
            }
            _ => norm::rms_norm_backward(dx, dw, &x, w, &g, cols, EPS),
        }
    })
}

fn element_wise<T: Weight>(kernel: Pass, mut x: Vec<T>, cols: usize) -> Box<dyn Work> {
    use activation::*;
    let n = x.len();
    let g = numbers::<T>(n, 2);
    // The backward passes that start from the output.
    let forward = |x: &[T], f: &dyn Fn(&mut [T], &[T])| {
        let mut out = vec![T::default(); x.len()];
        f(&mut out, x);
        out
    };
    match kernel {
        Pass::SoftmaxBackward => x = forward(&x, &|out, x| softmax::softmax(out, x, cols)),
        Pass::ReluBackward => x = forward(&x, &|out, x| relu(out, x)),
        _ => {}
    }
    on_slices(&[n], move |outs| {
        let out = &mut outs[0];
        match kernel {
            Pass::SoftmaxBackward => softmax::softmax_backward(out, &x, &g, cols),
            Pass::Gelu => gelu_tanh(out, &x),
            Pass::GeluBackward => gelu_tanh_backward(out, &x, &g),
            Pass::Silu => silu(out, &x),
            Pass::SiluBackward => silu_backward(out, &x, &g),
            Pass::Swiglu => swiglu(out, &x, &g),
            Pass::Relu => relu(out, &x),
            Pass::ReluBackward => relu_backward(out, &x, &g),
            Pass::AddRelu => add_relu(out, &x, &g),
            _ => unreachable!("{kernel:?} is made above"),
        }
    })
}

/// An update of the same parameter again and again, with the numbers of a first one.
fn adamw<T: Weight>(param: Vec<T>, format: Format) -> Box<dyn Work> {
    let n = param.len();
    let grad = numbers::<T>(n, 2);
    let plane = |bytes: u64| vec![0u8; bytes as usize];
    let mut planes =
        [(); 2].map(|()| (plane(format.main_bytes(n as u64)), plane(format.side_bytes(n as u64))));
    let mut first = Some(param);
    on_slices(&[n], move |outs| {
        if let Some(param) = first.take() {
            outs[0] = param;
        }
        let [m, v] = &mut planes;
        let job = Job {
            param: &mut outs[0],
            grad: &grad,
            grad_factor: 1.0,
            weights: Weights::Nearest,
            m: Some(Moment::new(format, Sign::Signed, n, &mut m.0, &mut m.1)),
            v: Some(Moment::new(format, Sign::Unsigned, n, &mut v.0, &mut v.1)),
            start: 0,
        };
        update(&ADAMW, UpdateKey { seed: 0, parameter: 0, t: 1 }, job);
    })
}

//! Operands in several memory layouts, and what one operation makes of them.
#![allow(dead_code)] // each test binary uses its part

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use tallow_tensor::Result;

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Layout {
    /// As a fresh tensor.
    Dense,
    /// Its first and last dimensions were swapped, stored so, and swapped back; other elements before.
    Strided,
    /// It begins after other elements and ends before others.
    Offset,
}

pub(crate) const LAYOUTS: [Layout; 3] = [Layout::Dense, Layout::Strided, Layout::Offset];

impl Layout {
    /// The elements of `x` in this layout, as a node of its graph; what lies around them is 1000.
    pub(crate) fn of(self, x: &Tensor) -> candle_core::Result<Tensor> {
        let other = |x: &Tensor| x.ones_like()?.detach().affine(1e3, 0.0);
        match (self, x.dims()) {
            (Layout::Dense, _) => Ok(x.clone()),
            // One dimension alone: every other element of a longer tensor.
            (Layout::Strided, [_]) => {
                Tensor::stack(&[&other(x)?, x], 1)?.narrow(1, 1, 1)?.squeeze(1)
            }
            (Layout::Strided, dims) => {
                let last = dims.len() - 1;
                let stored = x.transpose(0, last)?.contiguous()?;
                let longer = Tensor::cat(&[&other(&stored)?, &stored], 0)?;
                longer.narrow(0, dims[last], dims[last])?.transpose(0, last)
            }
            (Layout::Offset, dims) => {
                let longer = Tensor::cat(&[&other(x)?, x, &other(x)?], 0)?;
                longer.narrow(0, dims[0], dims[0])
            }
        }
    }
}

/// A tensor of f64 values rounded to `dtype`.
pub(crate) fn tensor(data: &[f64], dims: &[usize], dtype: DType) -> Tensor {
    let wide = Tensor::from_vec(data.to_vec(), dims, &Device::Cpu).expect("data fills dims");
    wide.to_dtype(dtype).expect("a float dtype")
}

/// The elements in row-major order, exactly.
pub(crate) fn host(t: &Tensor) -> Vec<f64> {
    let wide = t.flatten_all().and_then(|t| t.to_dtype(DType::F64));
    wide.and_then(|t| t.to_vec1()).expect("a float tensor on the CPU")
}

/// The gradient of `var`, in its shape.
#[track_caller]
pub(crate) fn gradient(what: &str, grads: &GradStore, var: &Tensor) -> Tensor {
    let Some(grad) = grads.get(var) else { panic!("{what}: no gradient") };
    assert_eq!((grad.dims(), grad.dtype()), (var.dims(), var.dtype()), "{what}: gradient");
    grad.clone()
}

/// An output and the gradients of `sum(out * dout)`, one per operand.
pub(crate) struct Outcome {
    pub(crate) out: Tensor,
    pub(crate) grads: Vec<Tensor>,
}

/// Runs `f` on variables of these values in `layout` and back; `dout` is given the output's shape.
#[track_caller]
pub(crate) fn run(
    what: &str,
    operands: &[Tensor],
    layout: Layout,
    dout: impl FnOnce(&Tensor) -> Tensor,
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
) -> Outcome {
    let vars: Vec<Var> = operands.iter().map(|t| Var::from_tensor(t).expect("a float")).collect();
    let views: Vec<Tensor> = vars.iter().map(|var| layout.of(var).expect("a view")).collect();
    let out = f(&views).unwrap_or_else(|error| panic!("{what}: {error}"));
    // In f64, so that the seed is `dout` rounded to the output's dtype and nothing else is.
    let product = out.to_dtype(DType::F64).and_then(|wide| wide * dout(&out));
    let store = product.and_then(|p| p.sum_all()?.backward()).expect(what);
    let name = |i| format!("{what}, operand {i}");
    let grads = vars.iter().enumerate().map(|(i, var)| gradient(&name(i), &store, var));
    Outcome { grads: grads.collect(), out }
}

//! One update on the CPU: candle's storages as slices, the state's planes as moments.

use crate::{
    config::{Config, Step},
    error::Result,
    planes::Plan,
};
use candle_core::{
    CpuStorage, DType, InplaceOp2, Layout, Tensor, Var, WithDType, backend::BackendStorage, bail,
};
use half::{bf16, f16};
use std::cell::{Cell, RefCell};
use tallow_kernels::optim::{
    Job, Moment, Rounding, SecondMoment, Sign, UpdateKey, Weight, Weights, adafactor, update,
};

/// One update of one parameter: what does not depend on the elements.
pub(crate) struct Update<'a> {
    pub(crate) config: &'a Config,
    pub(crate) plan: &'a Plan,
    pub(crate) dims: &'a [usize],
    pub(crate) step: Step,
    pub(crate) grad_factor: f64,
    pub(crate) key: UpdateKey,
}

/// Takes the first element, how many there are, and their planes.
pub(crate) type Visit<'a> = dyn FnMut(usize, usize, Vec<&mut [u8]>) + 'a;

/// Where the planes of a state come from.
pub(crate) trait Planes {
    /// Calls `f(first, n_elems, planes)` until it has seen each element once, in order, and keeps
    /// what `f` made of the planes.
    fn each(&mut self, plan: &Plan, n_elems: usize, f: &mut Visit<'_>) -> Result<()>;
}

/// Planes in memory.
impl Planes for Vec<Vec<u8>> {
    fn each(&mut self, _: &Plan, n_elems: usize, f: &mut Visit<'_>) -> Result<()> {
        f(0, n_elems, self.iter_mut().map(Vec::as_mut_slice).collect());
        Ok(())
    }
}

/// Updates `var` and its state in place.
pub(crate) fn apply(
    update: &Update,
    var: &Var,
    grad: &Tensor,
    planes: &mut dyn Planes,
) -> Result<()> {
    let dense = grad.contiguous()?; // itself, unless it is strided
    let op = Fused { update, planes: RefCell::new(planes), result: Cell::new(Ok(())) };
    var.as_tensor().inplace_op2(&dense, &op)?;
    op.result.into_inner()
}

struct Fused<'a> {
    update: &'a Update<'a>,
    planes: RefCell<&'a mut dyn Planes>,
    /// What happened, typed: candle's own error keeps a message only.
    result: Cell<Result<()>>,
}

/// Runs `$body` on the elements of `$storage` as the slice `$x`.
macro_rules! with_slice {
    ($storage:expr, $x:ident => $body:expr) => {
        match $storage {
            CpuStorage::F32($x) => $body,
            CpuStorage::F64($x) => $body,
            CpuStorage::BF16($x) => $body,
            CpuStorage::F16($x) => $body,
            other => bail!("tallow-optim: {:?} is no float", other.dtype()),
        }
    };
}

impl InplaceOp2 for Fused<'_> {
    fn name(&self) -> &'static str {
        "tallow-optim"
    }

    fn cpu_fwd(
        &self,
        param: &mut CpuStorage,
        param_layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> candle_core::Result<()> {
        let offsets = (param_layout.contiguous_offsets(), grad_layout.contiguous_offsets());
        let (Some((p, p_end)), Some((g, g_end))) = offsets else {
            bail!("tallow-optim: parameter or gradient does not lie in memory in one piece")
        };
        let planes = &mut **self.planes.borrow_mut();
        let result = with_slice!(param, param => with_slice!(grad, grad => {
            run(self.update, &mut param[p..p_end], &grad[g..g_end], planes)
        }));
        self.result.set(result);
        Ok(())
    }
}

fn run<T: Weight, G: WithDType + tallow_kernels::Element>(
    u: &Update,
    param: &mut [T],
    grad: &[G],
    planes: &mut dyn Planes,
) -> Result<()> {
    let n_elems = param.len();
    planes.each(u.plan, n_elems, &mut |first, n, planes| {
        let (param, grad) = (&mut param[first..first + n], &grad[first..first + n]);
        match u.step {
            Step::Each(rule) => {
                let mut planes = planes.into_iter();
                let mut next = || planes.next().unwrap_or_default();
                let mut moment = |format, sign| {
                    let format: tallow_kernels::optim::Format = format;
                    let main = next();
                    let side = if format.side_bytes(1) > 0 { next() } else { &mut [] };
                    Moment::new(format, sign, n, main, side)
                };
                let m = u.plan.m.map(|format| moment(format, Sign::Signed));
                let v = u.plan.v.map(|format| moment(format, Sign::Unsigned));
                let weights = u.weights(next());
                let job = Job {
                    param,
                    grad,
                    grad_factor: u.grad_factor,
                    weights,
                    m,
                    v,
                    start: first as u64,
                };
                update(&rule, u.key, job);
            }
            Step::Whole(rule) => {
                let mut planes = planes.into_iter();
                let mut next = || planes.next().unwrap_or_default();
                let first = next();
                let second = match *u.dims {
                    [.., n_rows, n_cols] if n_elems > 0 => {
                        SecondMoment::Factored { n_rows, n_cols, row: first, col: next() }
                    }
                    _ => SecondMoment::Whole(first),
                };
                let weights = u.weights(next());
                adafactor(&rule, u.key, param, grad, u.grad_factor, weights, second);
            }
        }
    })
}

impl Update<'_> {
    fn weights<'a>(&self, low: &'a mut [u8]) -> Weights<'a> {
        match self.config.weights {
            Rounding::Kahan if self.plan.kahan => Weights::Kahan(low),
            Rounding::Nearest | Rounding::Kahan => Weights::Nearest,
            Rounding::Stochastic => Weights::Stochastic,
        }
    }
}

/// Whether this crate can train it.
pub(crate) fn is_float(dtype: DType) -> bool {
    [f32::DTYPE, f64::DTYPE, bf16::DTYPE, f16::DTYPE].contains(&dtype)
}

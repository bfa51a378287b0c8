//! The kernels of [`tallow_kernels::accum`] as in-place operations on candle's CPU tensors.

use crate::Result;
use candle_core::{CpuStorage, InplaceOp1, InplaceOp2, Layout, Tensor, bail};
use std::cell::Cell;
use tallow_kernels::{
    Element,
    accum::{self, Finished},
    cast::cast,
};

/// Runs `$body` with `$x` standing for the floats of `$storage` that `$layout` covers.
macro_rules! with_floats {
    ($op:expr, $storage:expr, $layout:expr, $borrow:tt, $x:ident => $body:expr) => {{
        let Some((start, end)) = $layout.contiguous_offsets() else {
            bail!("{}: elements do not lie side by side", $op)
        };
        match $storage {
            CpuStorage::F32(data) => { let $x = with_floats!($borrow data[start..end]); $body }
            CpuStorage::F64(data) => { let $x = with_floats!($borrow data[start..end]); $body }
            CpuStorage::BF16(data) => { let $x = with_floats!($borrow data[start..end]); $body }
            CpuStorage::F16(data) => { let $x = with_floats!($borrow data[start..end]); $body }
            _ => bail!("{}: not a float", $op),
        }
    }};
    (shared $data:ident[$range:expr]) => { &$data[$range] };
    (mutable $data:ident[$range:expr]) => { &mut $data[$range] };
}

/// `buffer = grad`, rounded to the buffer's dtype.
pub(crate) fn write(buffer: &Tensor, grad: &Tensor) -> Result<()> {
    Ok(buffer.inplace_op2(&grad.contiguous()?, &Put::Write)?)
}

/// `buffer += grad`, widened where it is narrower.
pub(crate) fn add(buffer: &Tensor, grad: &Tensor) -> Result<()> {
    Ok(buffer.inplace_op2(&grad.contiguous()?, &Put::Add)?)
}

/// `buffer = clamp(buffer / divisor, -limit, limit)`.
pub(crate) fn finish(buffer: &Tensor, divisor: f64, limit: f64) -> Result<Finished> {
    let op = Finish { divisor, limit, found: Cell::new(None) };
    buffer.inplace_op1(&op)?;
    Ok(op.found.get().expect("candle runs the operation"))
}

/// `buffer *= factor`.
pub(crate) fn scale(buffer: &Tensor, factor: f64) -> Result<()> {
    Ok(buffer.inplace_op1(&Scale(factor))?)
}

#[derive(Clone, Copy)]
enum Put {
    Write,
    Add,
}

impl Put {
    fn run<A: Element, S: Element>(self, buffer: &mut [A], grad: &[S]) {
        match self {
            Put::Write => cast(buffer, grad),
            Put::Add => accum::add(buffer, grad),
        }
    }
}

impl InplaceOp2 for Put {
    fn name(&self) -> &'static str {
        "accumulate"
    }

    fn cpu_fwd(
        &self,
        buffer: &mut CpuStorage,
        buffer_layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> candle_core::Result<()> {
        with_floats!("accumulate", buffer, buffer_layout, mutable, buffer => {
            with_floats!("accumulate", grad, grad_layout, shared, grad => self.run(buffer, grad))
        });
        Ok(())
    }
}

struct Finish {
    divisor: f64,
    limit: f64,
    found: Cell<Option<Finished>>,
}

impl InplaceOp1 for Finish {
    fn name(&self) -> &'static str {
        "finish"
    }

    fn cpu_fwd(&self, buffer: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let found = with_floats!("finish", buffer, layout, mutable, buffer => {
            accum::finish(buffer, self.divisor, self.limit)
        });
        self.found.set(Some(found));
        Ok(())
    }
}

struct Scale(f64);

impl InplaceOp1 for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn cpu_fwd(&self, buffer: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        with_floats!("scale", buffer, layout, mutable, buffer => accum::scale(buffer, self.0));
        Ok(())
    }
}

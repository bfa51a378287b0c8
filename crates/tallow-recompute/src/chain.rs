//! A model as a list of segments with one tensor between them.

use crate::{
    Check, NoReplay, Plan, Replay, Result, Saved,
    ops::seed,
    run::{Flow, Run},
    tape::Tape,
};
use candle_core::Tensor;
use std::sync::Arc;

type Forward<'a> = dyn Fn(&Tensor) -> candle_core::Result<Tensor> + Send + Sync + 'a;

/// A named piece of a model, which may borrow it.
pub struct Segment<'a> {
    /// Its name in errors and policies.
    pub name: String,
    /// What it computes.
    pub forward: Box<Forward<'a>>,
}

impl<'a> Segment<'a> {
    /// The segment `name` that computes `forward`.
    pub fn new<F>(name: impl Into<String>, forward: F) -> Self
    where
        F: Fn(&Tensor) -> candle_core::Result<Tensor> + Send + Sync + 'a,
    {
        Self { name: name.into(), forward: Box::new(forward) }
    }
}

/// Segments that run one after another, without candle's graph between them.
///
/// Within one segment everything candle's graph holds is alive, in an untracked forward too: the
/// segment's variables are tracked. It goes when the segment ends.
pub struct Chain<'a> {
    /// In order; the last usually ends in the loss.
    pub segments: Vec<Segment<'a>>,
    /// Hidden state of what the segments call.
    pub replay: Arc<dyn Replay>,
    /// What a recomputed output must agree in with the first.
    pub check: Check,
    /// How the inputs of recomputed segments wait.
    pub saved: Saved,
    /// Who else may hold the gradient of a segment's input.
    pub aside: Arc<dyn Aside>,
}

/// Keeps gradients of segments' inputs and outputs out of candle's store, which makes zeros for each
/// and adds to them.
pub trait Aside: Send + Sync {
    /// A root of `[1]` in f32, whose backward is that of a segment's output `y` from its gradient; `None`
    /// where candle's store is to have it.
    fn seed(&self, y: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>>;
    /// Backward of the segment that reads the variable `x` begins.
    fn want(&self, x: &Tensor);
    /// It has ended: what of the gradient of `x` is not in candle's store.
    fn take(&self, x: &Tensor) -> Option<Tensor>;
}

/// All gradients are in candle's store.
pub struct NoAside;

impl Aside for NoAside {
    fn seed(&self, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(None)
    }
    fn want(&self, _: &Tensor) {}
    fn take(&self, _: &Tensor) -> Option<Tensor> {
        None
    }
}

impl<'a> Chain<'a> {
    /// No hidden state, shapes checked, inputs kept as they are.
    pub fn new(segments: Vec<Segment<'a>>) -> Self {
        let (replay, aside) = (Arc::new(NoReplay), Arc::new(NoAside));
        Self { segments, replay, check: Check::Shape, saved: Saved::AsIs, aside }
    }

    /// What backward of a segment starts from, given the gradient of its output `y`.
    pub(crate) fn root(&self, y: &Tensor, grad: Tensor) -> candle_core::Result<Tensor> {
        match self.aside.seed(y, &grad)? {
            Some(root) => Ok(root),
            None => seed(y, grad),
        }
    }

    /// Runs the chain as planned; the output, detached, and the tape that differentiates it.
    ///
    /// *Bytes held* by the tape: [`crate::simulate`]'s `saved_bytes`, less the output.
    pub fn forward<'c>(&'c self, x: &Tensor, plan: &'c Plan) -> Result<(Tensor, Tape<'c, 'a>)> {
        plan.validate(self.segments.len())?;
        let run = Run::new(self);
        let mut items = Vec::new();
        let y = run.forward(plan, Flow::input(x), true, &mut items)?;
        Ok((y, Tape { run, items }))
    }

    /// Forward only: nothing is kept.
    pub fn infer(&self, x: &Tensor) -> Result<Tensor> {
        let run = Run::new(self);
        let mut x = x.detach();
        for i in 0..self.segments.len() {
            x = run.call(i, &x)?.detach();
        }
        Ok(x)
    }
}

//! Running a plan: forward pushes items, backward pops them.

use crate::{
    Chain, Error, GradSink, Plan, Result, Step,
    ops::{is_tracked, join, lock, seed, variables},
    replay::{self, Again},
    saved::Held,
    segment::Trace,
};
use candle_core::{Tensor, Var, backprop::GradStore};
use std::{ops::Range, sync::Mutex};

/// What stands between two segments.
pub(crate) struct Flow {
    /// Detached.
    x: Tensor,
    /// Whether anything before wants the gradient of `x`.
    tracked: bool,
}

impl Flow {
    pub(crate) fn input(x: &Tensor) -> Flow {
        Flow { x: x.detach(), tracked: is_tracked(x) }
    }
}

/// What a step left for backward.
pub(crate) enum Item<'p> {
    /// The graph from `x`, a variable if its gradient is wanted, to `y`.
    Kept { segment: usize, x: Tensor, wanted: bool, y: Tensor },
    /// Segments to be run again.
    Redo { first: usize, x: Held, wanted: bool, again: &'p Plan, mark: Again },
}

/// A chain, and what its segments gave when they first ran.
pub(crate) struct Run<'c, 'a> {
    chain: &'c Chain<'a>,
    first: Vec<Mutex<Option<Trace>>>,
}

impl<'c, 'a> Run<'c, 'a> {
    pub(crate) fn new(chain: &'c Chain<'a>) -> Self {
        Self { chain, first: chain.segments.iter().map(|_| Mutex::new(None)).collect() }
    }

    fn name(&self, segment: usize) -> &str {
        &self.chain.segments[segment].name
    }

    /// Runs one segment.
    pub(crate) fn call(&self, segment: usize, x: &Tensor) -> Result<Tensor> {
        let pass = if replay::is_recomputing() { "recomputation" } else { "forward" };
        let y = (self.chain.segments[segment].forward)(x);
        y.map_err(|error| Error::segment(self.name(segment), pass, error))
    }

    /// Runs one segment and compares its output with the first.
    fn checked(&self, segment: usize, x: &Tensor) -> Result<Tensor> {
        let y = self.call(segment, x)?;
        let mut first = lock(&self.first[segment]);
        match &*first {
            Some(trace) => trace.compare(self.name(segment), 0, &y)?,
            None => *first = Some(Trace::of(&y, self.chain.check)?),
        }
        drop(first);
        Ok(y)
    }

    /// Runs `plan`. Unless the output is `needed`, a last step that would drop it does not run.
    pub(crate) fn forward<'p>(
        &self,
        plan: &'p Plan,
        mut flow: Flow,
        needed: bool,
        items: &mut Vec<Item<'p>>,
    ) -> Result<Tensor> {
        for (i, step) in plan.0.iter().enumerate() {
            flow = match step {
                Step::Keep(segment) => self.keep(*segment, flow, items)?,
                Step::Redo { first, end, again } => {
                    let runs = needed || i + 1 < plan.0.len();
                    self.redo(*first..if runs { *end } else { *first }, again, flow, items)?
                }
            };
        }
        Ok(flow.x)
    }

    fn keep(&self, segment: usize, flow: Flow, items: &mut Vec<Item>) -> Result<Flow> {
        let Flow { x, tracked: wanted } = flow;
        // Candle makes a variable by copying; unless a graph before holds it, the original goes.
        let leaf = if wanted { Var::from_tensor(&x)?.into_inner() } else { x.clone() };
        drop(x);
        let y = self.checked(segment, &leaf)?;
        let flow = Flow { x: y.detach(), tracked: is_tracked(&y) };
        if flow.tracked {
            items.push(Item::Kept { segment, x: leaf, wanted, y });
        } else {
            items.clear(); // no gradient comes through here
        }
        Ok(flow)
    }

    /// Runs `segments` untracked, or none of them where only backward will.
    fn redo<'p>(
        &self,
        segments: Range<usize>,
        again: &'p Plan,
        flow: Flow,
        items: &mut Vec<Item<'p>>,
    ) -> Result<Flow> {
        let mark = self.chain.replay.mark();
        let Flow { x, tracked: wanted } = flow;
        let (held, seen) = Held::new(&x, &self.chain.saved)?;
        drop(x);
        let first = segments.start;
        let mut flow = Flow { x: seen, tracked: wanted || segments.is_empty() };
        for segment in segments {
            let y = self.checked(segment, &flow.x)?;
            let tracked = (flow.tracked || y.track_op()) && y.dtype().is_float();
            flow = Flow { x: y.detach(), tracked };
        }
        if flow.tracked {
            items.push(Item::Redo { first, x: held, wanted, again, mark });
        } else {
            items.clear();
        }
        Ok(flow)
    }

    /// Pops the items, last first; the gradient of the input of the first, if that is wanted.
    pub(crate) fn backward(
        &self,
        mut items: Vec<Item>,
        grad: Tensor,
        sink: &mut impl GradSink,
    ) -> Result<Option<Tensor>> {
        let mut grad = Some(grad);
        if items.is_empty() {
            return Ok(None);
        }
        while let Some(item) = items.pop() {
            // A segment that detaches its input ends the walk.
            let Some(grad_y) = grad.take() else { break };
            grad = match item {
                Item::Kept { segment, x, wanted, y } => {
                    self.differentiate(segment, (x, wanted), y, grad_y, sink)?
                }
                Item::Redo { first, x, wanted, again, mark } => {
                    let mut inner = Vec::new();
                    let flow = Flow { x: x.load()?, tracked: wanted };
                    drop(x);
                    let forward = || self.forward(again, flow, false, &mut inner);
                    drop(replay::at(&mark, self.name(first), forward)??);
                    self.backward(inner, grad_y, sink)?
                }
            };
        }
        Ok(grad)
    }

    /// Backward through one graph, which is gone when the sink is called.
    fn differentiate(
        &self,
        segment: usize,
        (x, wanted): (Tensor, bool),
        y: Tensor,
        grad: Tensor,
        sink: &mut impl GradSink,
    ) -> Result<Option<Tensor>> {
        let mut params = variables(std::slice::from_ref(&y));
        params.retain(|param| param.id() != x.id());
        let mut roots = vec![self.chain.root(&y, grad)?];
        drop(y);
        for param in &params {
            // Candle visits the last root first: what a tied parameter has is there before more is
            // added.
            if let Some(so_far) = sink.so_far(param) {
                roots.push(seed(param, so_far)?);
            }
        }
        let root = join(&roots)?;
        drop(roots);
        let aside = &self.chain.aside;
        if wanted {
            aside.want(&x);
        }
        let grads = root.backward();
        drop(root);
        let mut grads =
            grads.map_err(|error| Error::segment(self.name(segment), "backward", error))?;
        // Candle's gradients have a graph of their own, which holds activations: it goes here.
        let grad_x = match wanted.then(|| (grads.remove(&x), aside.take(&x))) {
            Some((Some(one), Some(two))) => Some((one + two)?.detach()),
            Some((one, two)) => one.or(two).map(|grad| grad.detach()),
            None => None,
        };
        drop(x);
        // Candle also leaves gradients of untracked operands.
        let mut of_params = GradStore::default();
        for param in &params {
            if let Some(grad) = grads.remove(param) {
                of_params.insert(param, grad.detach());
            }
        }
        drop(grads);
        if !params.is_empty() {
            sink.add(self.name(segment), of_params)?;
        }
        Ok(grad_x)
    }
}

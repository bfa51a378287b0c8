//! Recomputation inside candle's own autograd.
//!
//! A segment is put into the graph as links of one element: a *bundle* for each tracked input and
//! each variable it uses, their *join*, and the outputs, whose values were computed beforehand.
//! Candle walks backwards, so it passes every output, then the join, then every bundle. Outputs
//! leave their gradients in an exchange, the join runs the segment again and differentiates it, the
//! bundles hand out what that gave.

use crate::{
    Error, NoReplay, Replay, Result,
    digest::digest,
    ops::{given, is_tracked, join, link, lock, seed, variables},
    replay::{self, Again},
};
use candle_core::{DType, Shape, Tensor, TensorId, Var, backprop::GradStore};
use std::{
    collections::HashSet,
    mem,
    sync::{Arc, Mutex},
};

/// What a recomputation is compared with the first forward by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Shapes and dtypes of the outputs.
    Shape,
    /// Their bits too, by a hash of 16 bytes an output.
    Bitwise,
}

/// How a segment is recomputed.
#[derive(Clone)]
pub struct Recompute {
    /// The segment's name in errors.
    pub name: String,
    /// Hidden state of what the closure calls.
    pub replay: Arc<dyn Replay>,
    /// What the recomputation must agree in.
    pub check: Check,
}

type Forward = dyn Fn(&[Tensor]) -> candle_core::Result<Vec<Tensor>> + Send + Sync;

/// Runs `f(x)` and keeps nothing of it but `x`: `backward` of any loss runs `f` again for the
/// gradients of `x` and of every variable `f` uses. One graph takes one `backward` at a time; a
/// later one recomputes again.
///
/// *Bytes held* until the graph goes: the input and the output. During its recomputation, also what
/// plain candle would hold for `f`, and one copy of `x` if a gradient of it is wanted.
pub fn recompute<F>(x: &Tensor, f: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> candle_core::Result<Tensor> + Send + Sync + 'static,
{
    Recompute::named("recompute").run(x, f)
}

/// [`recompute`] for any number of inputs and outputs. Inputs and outputs may be integers; no
/// gradient goes through those.
pub fn recompute_many<F>(xs: &[&Tensor], f: F) -> Result<Vec<Tensor>>
where
    F: Fn(&[Tensor]) -> candle_core::Result<Vec<Tensor>> + Send + Sync + 'static,
{
    Recompute::named("recompute").run_many(xs, f)
}

impl Recompute {
    /// No hidden state, shapes checked.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), replay: Arc::new(NoReplay), check: Check::Shape }
    }

    /// [`recompute`] in this way.
    pub fn run<F>(&self, x: &Tensor, f: F) -> Result<Tensor>
    where
        F: Fn(&Tensor) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    {
        let mut ys = self.run_many(&[x], move |xs| Ok(vec![f(&xs[0])?]))?;
        Ok(ys.swap_remove(0))
    }

    /// [`recompute_many`] in this way.
    pub fn run_many<F>(&self, xs: &[&Tensor], f: F) -> Result<Vec<Tensor>>
    where
        F: Fn(&[Tensor]) -> candle_core::Result<Vec<Tensor>> + Send + Sync + 'static,
    {
        let again = self.replay.mark();
        // Candle's graph holds the inputs anyway: they are kept as they are.
        let inputs: Vec<Tensor> = xs.iter().map(|x| x.detach()).collect();
        let ys = f(&inputs).map_err(|error| Error::segment(&self.name, "first forward", error))?;
        let params = variables(&ys);
        let outputs: Vec<Tensor> = ys.iter().map(Tensor::detach).collect();
        drop(ys); // the inner graph ends here
        let tracked: Vec<bool> = xs.iter().map(|x| is_tracked(x)).collect();
        let of_inputs = xs.iter().copied().filter(|x| is_tracked(x));
        let args: Vec<Tensor> = of_inputs.chain(&params).cloned().collect();
        if args.is_empty() {
            return Ok(outputs);
        }
        let first = outputs.iter().map(|y| Trace::of(y, self.check)).collect::<Result<_>>()?;
        let (name, forward) = (self.name.clone(), Box::new(f));
        let segment = Segment { name, forward, inputs, tracked, params, first, again };
        Ok(attach(segment, &args, outputs)?)
    }
}

/// What the outputs and the bundles hand to each other within one backward.
struct Exchange {
    /// Gradients of the outputs.
    upstream: Mutex<Vec<Option<Tensor>>>,
    /// Gradients of the arguments.
    downstream: Mutex<Vec<Option<Tensor>>>,
}

fn attach(
    segment: Segment,
    args: &[Tensor],
    outputs: Vec<Tensor>,
) -> candle_core::Result<Vec<Tensor>> {
    let n_outputs = outputs.len();
    let exchange = Arc::new(Exchange {
        upstream: Mutex::new(vec![None; n_outputs]),
        downstream: Mutex::new(vec![None; args.len()]),
    });
    let mut bundles = Vec::new();
    for (i, arg) in args.iter().enumerate() {
        let (exchange, like) = (exchange.clone(), (!arg.is_variable()).then(|| arg.detach()));
        bundles.push(given(arg, link(arg)?, move |_| {
            let grad = lock(&exchange.downstream)[i].take();
            match (grad, &like) {
                (Some(grad), _) => Ok(Some(grad)),
                // Candle wants a gradient in every node on its way.
                (None, Some(like)) => Ok(Some(like.zeros_like()?)),
                (None, None) => Ok(None),
            }
        })?);
    }
    let bundle = join(&bundles)?;
    let flags = Tensor::zeros(n_outputs, DType::F32, bundle.device())?;
    let n_args = args.len();
    let joined = given(&bundle, flags.clone(), {
        let exchange = exchange.clone();
        move |passed| {
            // An earlier backward may have ended half way: only what this one passed counts.
            let passed = passed.to_vec1::<f32>()?;
            let left = mem::replace(&mut *lock(&exchange.upstream), vec![None; n_outputs]);
            let upstream = left.into_iter().zip(passed).map(|(g, p)| g.filter(|_| p != 0.0));
            let grads = segment.differentiate(upstream.collect())?;
            *lock(&exchange.downstream) = grads;
            Ok(Some(Tensor::zeros(n_args, DType::F32, flags.device())?))
        }
    })?;
    let attach_one = |(i, y): (usize, Tensor)| {
        if !y.dtype().is_float() {
            return Ok(y);
        }
        let (exchange, device) = (exchange.clone(), joined.device().clone());
        given(&joined, y, move |grad| {
            lock(&exchange.upstream)[i] = Some(grad.clone());
            let mut flags = vec![0f32; n_outputs];
            flags[i] = 1.0;
            Ok(Some(Tensor::new(flags, &device)?))
        })
    };
    outputs.into_iter().enumerate().map(attach_one).collect()
}

/// What is remembered of an output.
pub(crate) struct Trace {
    shape: Shape,
    dtype: DType,
    bits: Option<u128>,
}

impl Trace {
    pub(crate) fn of(y: &Tensor, check: Check) -> Result<Trace> {
        let bits = match check {
            Check::Shape => None,
            Check::Bitwise => Some(digest(y)?),
        };
        Ok(Trace { shape: y.shape().clone(), dtype: y.dtype(), bits })
    }

    /// Fails unless `y` is what was seen first.
    pub(crate) fn compare(&self, segment: &str, output: usize, y: &Tensor) -> Result<()> {
        let differs = |what, first: String, again: String| {
            let (segment, first, again) = (segment.to_string(), first.into(), again.into());
            Err(Error::Differs { segment, output, what, first, again })
        };
        if self.shape != *y.shape() {
            return differs("shape", format!("{:?}", self.shape), format!("{:?}", y.shape()));
        }
        if self.dtype != y.dtype() {
            return differs("dtype", format!("{:?}", self.dtype), format!("{:?}", y.dtype()));
        }
        match self.bits {
            Some(first) => match digest(y)? {
                again if again == first => Ok(()),
                again => differs("hash", format!("{first:032x}"), format!("{again:032x}")),
            },
            None => Ok(()),
        }
    }
}

/// All that is left of a segment after its forward.
struct Segment {
    name: String,
    forward: Box<Forward>,
    inputs: Vec<Tensor>,
    tracked: Vec<bool>,
    params: Vec<Tensor>,
    first: Vec<Trace>,
    again: Again,
}

impl Segment {
    /// Runs the segment again; gradients of the tracked inputs, then of the variables.
    fn differentiate(&self, upstream: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut xs = Vec::new();
        for (x, tracked) in self.inputs.iter().zip(&self.tracked) {
            xs.push(if *tracked { Var::from_tensor(x)?.into_inner() } else { x.clone() });
        }
        let ys = replay::at(&self.again, &self.name, || (self.forward)(&xs))?
            .map_err(|error| Error::segment(&self.name, "recomputation", error))?;
        self.compare(&xs, &ys)?;
        let mut roots = Vec::new();
        for (y, grad) in ys.iter().zip(upstream) {
            if let Some(grad) = grad.filter(|_| is_tracked(y)) {
                roots.push(seed(y, grad)?);
            }
        }
        drop(ys);
        let mut grads = if roots.is_empty() {
            GradStore::default()
        } else {
            let root = join(&roots)?;
            drop(roots);
            let grads = root.backward();
            grads.map_err(|error| Error::segment(&self.name, "backward", error))?
        };
        let inputs = xs.iter().zip(&self.tracked).filter(|(_, tracked)| **tracked);
        let args = inputs.map(|(x, _)| x).chain(&self.params);
        // Candle's gradients have a graph of their own, which holds activations.
        Ok(args.map(|arg| grads.remove(arg).map(|grad| grad.detach())).collect())
    }

    fn compare(&self, xs: &[Tensor], ys: &[Tensor]) -> Result<()> {
        if self.first.len() != ys.len() {
            let [first, again] = [self.first.len(), ys.len()].map(|n| n.to_string().into());
            let segment = self.name.clone();
            return Err(Error::Differs { segment, output: 0, what: "number", first, again });
        }
        for (output, (first, y)) in self.first.iter().zip(ys).enumerate() {
            first.compare(&self.name, output, y)?;
        }
        let known: HashSet<TensorId> = xs.iter().chain(&self.params).map(Tensor::id).collect();
        match variables(ys).iter().filter(|var| !known.contains(&var.id())).count() {
            0 => Ok(()),
            n_new => Err(Error::NewVariables { segment: self.name.clone(), n_new }),
        }
    }
}

//! Forward and backward of one micro-batch.

use crate::{Error, Network, Result};
use candle_core::{Tensor, backprop::GradStore};
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};
use tallow_models::{Score, Segments};
use tallow_recompute::{Again, Aside, Chain, Check, Plan, Saved, Segment};
use tallow_tensor::{aside, ops::CrossEntropy, pass};

/// Targets are classes; PyTorch's mark of rows that do not count.
const IGNORED: i64 = -100;

/// A micro-batch's loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MicroLoss {
    /// Over counted rows.
    pub sum: f64,
    /// Rows whose target is not ignored: samples, or tokens.
    pub n_counted: u64,
}

impl MicroLoss {
    /// Over counted rows; NaN where there is none.
    pub fn mean(&self) -> f64 {
        self.sum / self.n_counted as f64
    }
}

/// How forward and backward go.
#[derive(Clone, Copy, Debug)]
pub struct Passes<'a> {
    /// Which segments keep their activations; the head with the loss is the last.
    pub plan: &'a Plan,
    /// How the inputs of the others wait for backward.
    pub saved: &'a Saved,
    /// What a segment that runs again must agree in with its first run.
    pub check: Check,
    /// Weight of the uniform distribution in the loss, from 0 to 1.
    pub label_smoothing: f64,
}

impl Passes<'_> {
    fn loss(&self) -> CrossEntropy {
        CrossEntropy { ignore_index: IGNORED, label_smoothing: self.label_smoothing }
    }
}

/// A walk over one micro-batch: the model's segments, then the head with the loss.
///
/// *Memory:* activations as [`tallow_recompute::simulate_saved`] says of the plan, and one segment's gradients.
pub struct Walk<'a, M> {
    pub(crate) network: &'a Network<M>,
    passes: Passes<'a>,
    /// Whether a parameter has been updated.
    committed: AtomicBool,
}

impl<'a, M> Walk<'a, M> {
    pub(crate) fn new(network: &'a Network<M>, passes: Passes<'a>) -> Self {
        Self { network, passes, committed: AtomicBool::new(false) }
    }

    /// From here on nothing that the memory says ends the walk.
    pub(crate) fn commit(&self) {
        self.committed.store(true, Relaxed);
    }

    fn check(&self, enter: impl FnOnce(u64)) -> Result<()> {
        let checked = self.network.watch.check(enter);
        match self.committed.load(Relaxed) {
            true => Ok(()),
            false => checked,
        }
    }
}

impl<M: Segments> Walk<'_, M> {
    /// The loss sum of `inputs` `[B, ...]` against classes `targets`; `seed(loss)` is the gradient that
    /// backward starts from, and `take` gets the gradients of each segment's master parameters, the last
    /// segment's first.
    /// # Errors
    /// If the model refuses the batch, the [`crate::Watch`] ends the walk, or `seed` or `take` fail: their
    /// error comes back as it was.
    pub fn run<E: From<Error> + fmt::Display + Send>(
        &self,
        (inputs, targets): (&Tensor, &Tensor),
        seed: impl FnOnce(MicroLoss) -> std::result::Result<f64, E>,
        mut take: impl FnMut(GradStore) -> std::result::Result<(), E>,
    ) -> std::result::Result<MicroLoss, E> {
        let (n_counted, failure) = (AtomicU64::new(0), Failure::<E>::default());
        let chain = self.chain(targets, &n_counted, &failure);
        let Network { watch, books, variables, .. } = self.network;
        let _ends = books.begun(watch.meter);
        let (loss, tape) = chain.forward(inputs, self.passes.plan).map_err(|e| failure.or(e))?;
        let sum = loss.to_dtype(candle_core::DType::F64).and_then(|sum| sum.to_scalar());
        let found =
            MicroLoss { sum: sum.map_err(Error::Candle)?, n_counted: n_counted.load(Relaxed) };
        let mut sink = |name: &str, mut grads: GradStore| {
            aside::take_aside(&mut grads)?;
            let segment = chain.segments.iter().position(|segment| segment.name == name);
            let enter = |live| books.after(segment.unwrap_or(0), &grads, live);
            failure.keep(self.check(enter).map_err(E::from))?;
            failure.keep(self.network.gather(&mut grads).map_err(E::from))?;
            Ok(failure.keep(take(grads))?)
        };
        let seed = seed(found)?;
        let back = || tape.backward_from_loss(&loss, seed, &mut sink);
        aside::set_aside(variables.clone(), back).map_err(|e| failure.or(e))?;
        Ok(found)
    }

    /// The score of `inputs` `[B, ...]` against classes `targets`, with batch statistics and dropout if
    /// `train`.
    ///
    /// *Memory:* two segments' outputs and what one needs on its way.
    /// # Errors
    /// If the model refuses the batch, or the [`crate::Watch`] ends the walk.
    pub fn infer(&self, inputs: &Tensor, targets: &Tensor, train: bool) -> Result<Score> {
        let mut x = inputs.detach();
        let Network { watch, .. } = self.network;
        let model = self.network.model();
        for i in 0..model.names().len() {
            watch.check(|_| ())?;
            x = model.run(i, &x, train)?.detach();
        }
        Ok(model.score(&x, targets, &self.passes.loss())?)
    }

    /// The model's segments, then the head with the loss.
    pub(crate) fn chain<'a, E: From<Error> + fmt::Display + Send>(
        &'a self,
        targets: &'a Tensor,
        n_counted: &'a AtomicU64,
        failure: &'a Failure<E>,
    ) -> Chain<'a> {
        let (model, books) = (self.network.model(), &self.network.books);
        let checked = move |segment| {
            let checked = self.check(|live| books.before(segment, live));
            failure.keep(checked.map_err(E::from))
        };
        let segment = |(i, name)| {
            Segment::new(name, move |x: &Tensor| {
                checked(i)?;
                model.run(i, x, true)
            })
        };
        let mut segments: Vec<_> = model.names().into_iter().enumerate().map(segment).collect();
        let head = segments.len();
        segments.push(Segment::new(model.head_name(), move |x: &Tensor| {
            checked(head)?;
            let loss = model.loss(x, targets, &self.passes.loss())?;
            n_counted.store(loss.n_counted, Relaxed);
            Ok(loss.sum)
        }));
        let Passes { check, saved, .. } = self.passes;
        Chain {
            segments,
            replay: Arc::new(here),
            check,
            saved: saved.clone(),
            aside: Arc::new(OfTensor),
        }
    }
}

/// Where tallow's operations leave gradients.
struct OfTensor;

impl Aside for OfTensor {
    fn seed(&self, y: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        aside::seed(y, grad)
    }
    fn want(&self, x: &Tensor) {
        aside::want_one(x);
    }
    fn take(&self, x: &Tensor) -> Option<Tensor> {
        aside::take_one(x)
    }
}

/// The hidden state of tallow's layers: their random draws, and statistics that move once.
fn here() -> Again {
    let at = pass::position();
    Box::new(move |again| pass::replay(at, again))
}

/// An error on its way through candle, whose error type would keep its message only.
pub(crate) struct Failure<E>(Mutex<Option<E>>);

impl<E> Default for Failure<E> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<E: From<Error> + fmt::Display> Failure<E> {
    fn keep<T>(&self, result: std::result::Result<T, E>) -> candle_core::Result<T> {
        result.map_err(|error| {
            let message = candle_core::Error::Msg(error.to_string());
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            message
        })
    }

    /// What was kept, or `error`.
    pub(crate) fn or(&self, error: tallow_recompute::Error) -> E {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        kept.unwrap_or_else(|| Error::Recompute(error).into())
    }
}

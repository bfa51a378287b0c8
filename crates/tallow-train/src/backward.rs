//! Forward and backward of one micro-batch, a segment at a time.

use crate::{Error, Result};
use candle_core::{Tensor, backprop::GradStore};
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use tallow_memory::{Meter, Watermark};
use tallow_models::{Score, Segments};
use tallow_recompute::{Again, Bytes, Chain, Plan, Segment, SegmentCost};
use tallow_tensor::{ops::CrossEntropy, pass};

/// Looks at the memory between segments, so that a step ends with an error before the process ends.
pub struct Watch {
    /// The mark, and what the bytes are for.
    pub guard: Watermark,
    /// What is measured.
    pub meter: &'static dyn Meter,
}

impl Watch {
    pub(crate) fn check(&self) -> std::result::Result<(), tallow_memory::Error> {
        self.guard.check(self.meter)
    }
}

/// A micro-batch's loss.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MicroLoss {
    /// Over counted rows.
    pub(crate) sum: f64,
    /// Rows whose target is not ignored.
    pub(crate) n_counted: u64,
}

/// What a micro-batch runs on.
pub(crate) struct Work<'a, M> {
    pub(crate) model: &'a M,
    pub(crate) plan: &'a Plan,
    pub(crate) cfg: CrossEntropy,
    pub(crate) watch: &'a Watch,
}

impl<M: Segments> Work<'_, M> {
    /// The loss sum of `inputs`; `seed(loss)` is the gradient that backward starts from, and `take`
    /// gets the gradients of each segment's parameters, the last segment's first.
    pub(crate) fn run(
        &self,
        (inputs, targets): (&Tensor, &Tensor),
        seed: impl FnOnce(MicroLoss) -> f64,
        mut take: impl FnMut(GradStore) -> Result<()>,
    ) -> Result<MicroLoss> {
        let (n_counted, failure) = (AtomicU64::new(0), Failure::default());
        let chain = self.chain(targets, &n_counted, &failure);
        let (loss, tape) = chain.forward(inputs, self.plan).map_err(|e| failure.or(e))?;
        let sum = loss.to_dtype(candle_core::DType::F64)?.to_scalar()?;
        let found = MicroLoss { sum, n_counted: n_counted.load(Relaxed) };
        let mut sink = |_: &str, grads: GradStore| Ok(failure.keep(take(grads))?);
        tape.backward_from_loss(&loss, seed(found), &mut sink).map_err(|e| failure.or(e))?;
        Ok(found)
    }

    /// What each segment costs on `inputs`.
    pub(crate) fn measure(
        &self,
        (inputs, targets): (&Tensor, &Tensor),
        bytes: &dyn Bytes,
    ) -> Result<Vec<SegmentCost>> {
        let (n_counted, failure) = (AtomicU64::new(0), Failure::default());
        let chain = self.chain(targets, &n_counted, &failure);
        chain.measure(inputs, bytes).map_err(|e| failure.or(e))
    }

    /// The score of `inputs`; nothing is kept.
    pub(crate) fn infer(&self, inputs: &Tensor, targets: &Tensor, train: bool) -> Result<Score> {
        let mut x = inputs.detach();
        for i in 0..self.model.names().len() {
            self.watch.check()?;
            x = self.model.run(i, &x, train)?.detach();
        }
        Ok(self.model.score(&x, targets, &self.cfg)?)
    }

    /// The model's segments, then the head with the loss.
    fn chain<'a>(
        &'a self,
        targets: &'a Tensor,
        n_counted: &'a AtomicU64,
        failure: &'a Failure,
    ) -> Chain<'a> {
        let checked = move || failure.keep(self.watch.check().map_err(Error::from));
        let segment = |(i, name)| {
            Segment::new(name, move |x: &Tensor| {
                checked()?;
                self.model.run(i, x, true)
            })
        };
        let mut segments: Vec<_> =
            self.model.names().into_iter().enumerate().map(segment).collect();
        segments.push(Segment::new(self.model.head_name(), move |x: &Tensor| {
            checked()?;
            let loss = self.model.loss(x, targets, &self.cfg)?;
            n_counted.store(loss.n_counted, Relaxed);
            Ok(loss.sum)
        }));
        Chain { replay: Arc::new(here), ..Chain::new(segments) }
    }
}

/// The hidden state of tallow's layers: their random draws, and statistics that move once.
fn here() -> Again {
    let at = pass::position();
    Box::new(move |again| pass::replay(at, again))
}

/// Our own error on its way through candle, whose error type would keep its message only.
#[derive(Default)]
struct Failure(Mutex<Option<Error>>);

impl Failure {
    fn keep<T>(&self, result: Result<T>) -> candle_core::Result<T> {
        result.map_err(|error| {
            let message = candle_core::Error::Msg(error.to_string());
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            message
        })
    }

    /// What was kept, or `error`.
    fn or(&self, error: tallow_recompute::Error) -> Error {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        kept.unwrap_or(Error::Recompute(error))
    }
}

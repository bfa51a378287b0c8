//! Forward and backward of one micro-batch, a segment at a time.

use crate::{Error, Result, books::Books};
use candle_core::{Tensor, TensorId, backprop::GradStore};
use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};
use tallow_memory::{Meter, Watermark};
use tallow_models::{Score, Segments};
use tallow_precision::Masters;
use tallow_recompute::{
    Again, Aside, Bytes, Chain, Check as RecomputeCheck, Plan, Saved, Segment, SegmentCost,
};
use tallow_tensor::{aside, ops::CrossEntropy, pass};

/// Targets are classes; PyTorch's mark of rows that do not count.
const IGNORED: i64 = -100;

/// Looks at the memory between segments, so that a step ends with an error before the process ends.
pub struct Watch {
    /// The mark, and what the bytes are for.
    pub guard: Watermark,
    /// What is measured.
    pub meter: &'static dyn Meter,
    /// Called at every look, when the ledger of [`crate::Trainer::account`] is up to date: to draw memory
    /// over time, or to end the update before it is made.
    pub tick: Box<dyn Fn() -> Flow + Send + Sync>,
}

/// Whether a run goes on.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// It does.
    Go,
    /// It ends here.
    Stop,
}

impl Watch {
    /// Without anything called.
    pub fn new(guard: Watermark, meter: &'static dyn Meter) -> Self {
        Self { guard, meter, tick: Box::new(|| Flow::Go) }
    }

    /// `enter` brings the ledger up to what is live now.
    fn check(&self, enter: impl FnOnce(u64)) -> Result<()> {
        let live_bytes = self.meter.current_bytes();
        enter(live_bytes);
        match (self.tick)() {
            Flow::Go => Ok(self.guard.check_at(live_bytes, self.meter)?),
            Flow::Stop => Err(Error::Interrupted),
        }
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

/// How forward and backward go.
#[derive(Clone, Copy)]
pub(crate) struct Passes<'a> {
    /// Which segments keep their activations.
    pub(crate) plan: &'a Plan,
    /// How the inputs of the others wait.
    pub(crate) saved: &'a Saved,
    /// What repeated segments are compared by.
    pub(crate) check: RecomputeCheck,
    /// Of the loss.
    pub(crate) label_smoothing: f64,
}

impl Passes<'_> {
    fn loss(&self) -> CrossEntropy {
        CrossEntropy { ignore_index: IGNORED, label_smoothing: self.label_smoothing }
    }
}

/// What a micro-batch runs on.
pub(crate) struct Work<'a, M> {
    model: &'a M,
    passes: Passes<'a>,
    watch: &'a Watch,
    books: &'a Books,
    params: &'a Arc<HashSet<TensorId>>,
    /// Whether a parameter has been updated.
    committed: AtomicBool,
}

impl<'a, M> Work<'a, M> {
    /// `params` are the variables whose gradients are kept out of candle's store.
    pub(crate) fn new(
        model: &'a M,
        passes: Passes<'a>,
        (watch, books): (&'a Watch, &'a Books),
        params: &'a Arc<HashSet<TensorId>>,
    ) -> Self {
        Self { model, passes, watch, books, params, committed: AtomicBool::new(false) }
    }

    /// From here on nothing that the memory says ends the update.
    pub(crate) fn commit(&self) {
        self.committed.store(true, Relaxed);
    }

    fn check(&self, enter: impl FnOnce(u64)) -> Result<()> {
        let checked = self.watch.check(enter);
        match self.committed.load(Relaxed) {
            true => Ok(()),
            false => checked,
        }
    }
}

impl<M: Segments> Work<'_, M> {
    /// The loss sum of `inputs`; `seed(loss)` is the gradient that backward starts from, and `take`
    /// gets the gradients of each segment's parameters, the last segment's first.
    pub(crate) fn run(
        &self,
        (inputs, targets): (&Tensor, &Tensor),
        seed: impl FnOnce(MicroLoss) -> Result<f64>,
        mut take: impl FnMut(GradStore) -> Result<()>,
    ) -> Result<MicroLoss> {
        let (n_counted, failure) = (AtomicU64::new(0), Failure::default());
        let chain = self.chain(targets, &n_counted, &failure);
        let _ends = self.books.begun(self.watch.meter);
        let (loss, tape) = chain.forward(inputs, self.passes.plan).map_err(|e| failure.or(e))?;
        let sum = loss.to_dtype(candle_core::DType::F64)?.to_scalar()?;
        let found = MicroLoss { sum, n_counted: n_counted.load(Relaxed) };
        let mut sink = |name: &str, mut grads: GradStore| {
            aside::take_aside(&mut grads)?;
            let segment = chain.segments.iter().position(|segment| segment.name == name);
            let enter = |live| self.books.after(segment.unwrap_or(0), &grads, live);
            failure.keep(self.check(enter))?;
            Ok(failure.keep(take(grads))?)
        };
        let (params, seed) = (self.params.clone(), seed(found)?);
        let done = aside::set_aside(params, || tape.backward_from_loss(&loss, seed, &mut sink));
        done.map_err(|e| failure.or(e))?;
        Ok(found)
    }

    /// What each segment costs on `inputs`.
    pub(crate) fn measure(
        &self,
        (inputs, targets): (&Tensor, &Tensor),
        bytes: &dyn Bytes,
    ) -> Result<Vec<SegmentCost>> {
        let (n_counted, failure) = (AtomicU64::new(0), Failure::default());
        let n_segments = self.model.names().len() + 1;
        let taken = Taken { ran: AtomicUsize::new(0), of_params: zeros(n_segments) };
        let mut chain = self.chain(targets, &n_counted, &failure);
        for (i, segment) in chain.segments.iter_mut().enumerate() {
            let forward = std::mem::replace(&mut segment.forward, Box::new(|x| Ok(x.clone())));
            let taken = &taken;
            segment.forward = Box::new(move |x| {
                taken.take();
                taken.ran.store(i, Relaxed);
                forward(x)
            });
        }
        let measured = {
            let bytes = Drain { bytes, taken: &taken };
            aside::set_aside(self.params.clone(), || chain.measure(inputs, &bytes))
        };
        let mut costs = measured.map_err(|e| failure.or(e))?;
        for (cost, of_params) in costs.iter_mut().zip(&taken.of_params) {
            cost.param_grad_bytes += of_params.load(Relaxed);
        }
        Ok(costs)
    }

    /// The score of `inputs`; nothing is kept.
    pub(crate) fn infer(&self, inputs: &Tensor, targets: &Tensor, train: bool) -> Result<Score> {
        let mut x = inputs.detach();
        for i in 0..self.model.names().len() {
            self.watch.check(|_| ())?;
            x = self.model.run(i, &x, train)?.detach();
        }
        Ok(self.model.score(&x, targets, &self.passes.loss())?)
    }

    /// The model's segments, then the head with the loss.
    fn chain<'a>(
        &'a self,
        targets: &'a Tensor,
        n_counted: &'a AtomicU64,
        failure: &'a Failure,
    ) -> Chain<'a> {
        let checked =
            move |segment| failure.keep(self.check(|live| self.books.before(segment, live)));
        let segment = |(i, name)| {
            Segment::new(name, move |x: &Tensor| {
                checked(i)?;
                self.model.run(i, x, true)
            })
        };
        let mut segments: Vec<_> =
            self.model.names().into_iter().enumerate().map(segment).collect();
        let head = segments.len();
        segments.push(Segment::new(self.model.head_name(), move |x: &Tensor| {
            checked(head)?;
            let loss = self.model.loss(x, targets, &self.passes.loss())?;
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

/// Takes what a segment's backward set aside, where the sink would take it: before anything else is
/// measured.
struct Taken {
    /// The segment that ran last.
    ran: AtomicUsize,
    /// Bytes of each segment's parameter gradients.
    of_params: Vec<AtomicU64>,
}

fn zeros(n: usize) -> Vec<AtomicU64> {
    (0..n).map(|_| AtomicU64::new(0)).collect()
}

impl Taken {
    fn take(&self) {
        // Candle has nothing to add: these go nowhere.
        let n_bytes = aside::take_aside(&mut GradStore::default()).unwrap_or(0);
        self.of_params[self.ran.load(Relaxed)].fetch_max(n_bytes, Relaxed);
    }
}

/// A meter that does so whenever it starts anew.
struct Drain<'a> {
    bytes: &'a dyn Bytes,
    taken: &'a Taken,
}

impl Bytes for Drain<'_> {
    fn live(&self) -> u64 {
        self.bytes.live()
    }

    fn peak(&self) -> u64 {
        self.bytes.peak()
    }

    fn reset_peak(&self) {
        self.taken.take();
        self.bytes.reset_peak();
    }
}

/// The variables that a model of `masters` computes with.
pub(crate) fn variables(masters: &Masters) -> Arc<HashSet<TensorId>> {
    let all = masters.params().into_iter().chain(masters.copies());
    Arc::new(all.map(|(_, var)| var.as_tensor().id()).collect())
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

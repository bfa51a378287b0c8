//! Epochs of updates.

use crate::{Error, Progress, Result};
use std::time::Instant;
use tallow_data::{Cursor, Dataset, Order, Tail};
use tallow_models::Segments;
use tallow_train::{Evaluation, Flow, Trainer, Update};

/// How long and on what a run trains.
#[derive(Clone, Copy)]
pub struct Epochs<'a> {
    /// Samples to learn from.
    pub train: &'a dyn Dataset,
    /// Samples to judge by.
    pub held_out: &'a dyn Dataset,
    /// Samples an update.
    pub batch: usize,
    /// Passes over the training samples.
    pub epochs: u64,
    /// Stops after this many batches even within an epoch; skipped ones count.
    pub max_updates: Option<u64>,
    /// Ends after so many judgements in a row that were not the best so far.
    pub early_stop_epochs: Option<u64>,
    /// Seed of the order.
    pub seed: u64,
}

impl Epochs<'_> {
    /// Updates of one epoch: the last batch may be smaller.
    pub fn updates_per_epoch(&self) -> u64 {
        self.train.n_samples().div_ceil(self.batch.max(1)) as u64
    }

    /// Updates of the whole run.
    pub fn n_updates(&self) -> u64 {
        let all = self.epochs.saturating_mul(self.updates_per_epoch());
        all.min(self.max_updates.unwrap_or(u64::MAX))
    }

    /// Whether the run has ended because it did not get better.
    pub fn has_stalled(&self, progress: &Progress) -> bool {
        self.early_stop_epochs.is_some_and(|n| progress.n_since_best >= n)
    }

    /// That the plan makes updates at all; [`fit`] asks first.
    /// # Errors
    /// If the run would make no update, or no batch can be filled.
    pub fn check(&self) -> Result<()> {
        let n_samples = self.train.n_samples();
        if self.batch == 0 || self.held_out.n_samples() == 0 {
            let (batch, held_out) = (self.batch, self.held_out.n_samples());
            let reason = format!("a batch of {batch}, {held_out} held-out samples");
            return Err(Error::NoUpdates { reason });
        }
        if self.batch > n_samples {
            let reason = format!("a batch of {} is more than the {n_samples} samples", self.batch);
            return Err(Error::NoUpdates { reason });
        }
        for (name, n) in [
            ("epochs", Some(self.epochs)),
            ("max_updates", self.max_updates),
            ("early_stop_epochs", self.early_stop_epochs),
        ] {
            if n == Some(0) {
                return Err(Error::NoUpdates { reason: format!("{name} is 0") });
            }
        }
        Ok(())
    }
}

/// What an observer of [`fit`] is told.
#[derive(Clone, Debug)]
pub enum Event {
    /// A batch was learnt from, or skipped.
    Updated {
        /// Batches so far, this one included.
        n_windows: u64,
        /// This one.
        update: Update,
    },
    /// The held-out samples were judged after an epoch, or at the end.
    Evaluated {
        /// Epochs begun so far.
        epoch: u64,
        /// The judgement.
        evaluation: Evaluation,
    },
    /// The run was told to stop, and ends after this.
    Stopped,
}

/// How a run ended.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// How far it came.
    pub progress: Progress,
    /// Updates applied.
    pub n_updates: u64,
    /// Updates skipped because gradients overflowed.
    pub n_skipped: u64,
    /// The held-out samples after the last update; `None` if the run was stopped.
    pub held_out: Option<Evaluation>,
}

/// Trains `trainer` as `plan` says, from `start` on, and tells `observe` of every update and
/// evaluation: the place for callbacks, such as metrics, checkpoints and the user's own end of a run. An observer that answers [`Flow::Stop`] ends the run, and
/// is told so once more.
///
/// The order of epoch `e` is a function of `(seed, e)`. Beside what the data set reads ahead, one
/// batch is on the device at a time.
/// # Errors
/// If the plan makes no update, or the trainer, the data or the observer fail.
pub fn fit<M: Segments>(
    trainer: &mut Trainer<M>,
    plan: &Epochs<'_>,
    start: Progress,
    mut observe: impl FnMut(&Trainer<M>, &Progress, Event) -> Result<Flow>,
) -> Result<Outcome> {
    plan.check()?;
    let mut progress = start;
    let result = rehearse(trainer, plan)
        .and_then(|()| run_epochs(trainer, plan, &mut progress, &mut observe));
    let held_out = match result {
        Ok(held_out) => held_out,
        Err(Error::Train(tallow_train::Error::Interrupted)) => None,
        Err(error) => return Err(error),
    };
    let n_updates = trainer.n_updates();
    let n_skipped = trainer.n_windows() - n_updates;
    if held_out.is_none() {
        let _ends = observe(trainer, &progress, Event::Stopped)?;
    } else if n_updates == 0 {
        let reason =
            format!("the gradients of all {n_skipped} batches overflowed or were too large");
        return Err(Error::NoUpdates { reason });
    }
    Ok(Outcome { progress, n_updates, n_skipped, held_out })
}

/// The judgement after the last update, or `None` if the observer stopped the run.
fn run_epochs<M: Segments>(
    trainer: &mut Trainer<M>,
    plan: &Epochs<'_>,
    progress: &mut Progress,
    observe: &mut impl FnMut(&Trainer<M>, &Progress, Event) -> Result<Flow>,
) -> Result<Option<Evaluation>> {
    loop {
        let epoch = progress.cursor.epoch;
        let is_over = epoch >= plan.epochs
            || trainer.n_windows() >= plan.n_updates()
            || plan.has_stalled(progress);
        if !is_over && run_epoch(trainer, plan, progress, observe)? == Flow::Stop {
            return Ok(None);
        }
        let is_whole = progress.cursor.position >= plan.train.n_samples() as u64;
        let evaluation = evaluate(trainer, plan)?;
        if !evaluation.loss.is_finite() {
            let (loss, n_updates) = (evaluation.loss, trainer.n_updates());
            return Err(Error::Exploded { loss, n_updates });
        }
        if is_over && progress.held_out_loss.is_some() {
            return Ok(Some(evaluation)); // of a run that was over when it was taken up again
        }
        progress.judged(evaluation.loss);
        let ended = trainer.n_windows() >= plan.n_updates() || plan.has_stalled(progress);
        if is_whole {
            progress.cursor = Cursor::epoch(epoch + 1);
        }
        let event = Event::Evaluated { epoch: epoch + 1, evaluation };
        let flow = observe(trainer, progress, event)?;
        if ended || epoch + 1 == plan.epochs {
            return Ok(Some(evaluation));
        }
        if flow == Flow::Stop {
            return Ok(None);
        }
    }
}

/// The rest of the epoch that `progress` is in.
fn run_epoch<M: Segments>(
    trainer: &mut Trainer<M>,
    plan: &Epochs<'_>,
    progress: &mut Progress,
    observe: &mut impl FnMut(&Trainer<M>, &Progress, Event) -> Result<Flow>,
) -> Result<Flow> {
    let order = Order::Shuffled { seed: plan.seed, epoch: progress.cursor.epoch };
    let mut batches = plan.train.resume(plan.batch, order, Tail::Keep, progress.cursor)?;
    while trainer.n_windows() < plan.n_updates() {
        let start = Instant::now();
        let Some(batch) = batches.next() else {
            // What is left of the epoch, if anything, cannot be read and was passed over.
            progress.cursor.position = plan.train.n_samples() as u64;
            break;
        };
        let update = trainer.update(&batch?)?;
        progress.training += start.elapsed();
        progress.cursor = batches.cursor();
        progress.n_samples += update.n_samples;
        progress.last_loss = update.loss;
        progress.held_out_loss = None;
        progress.first_loss.get_or_insert(update.loss);
        let event = Event::Updated { n_windows: trainer.n_windows(), update };
        if observe(trainer, progress, event)? == Flow::Stop {
            return Ok(Flow::Stop);
        }
    }
    Ok(Flow::Go)
}

/// Runs the smallest micro-batch of the plan once: a model that needs several values a channel, or
/// data that cannot be read, refuses here and not at the end of the first epoch.
fn rehearse<M: Segments>(trainer: &Trainer<M>, plan: &Epochs<'_>) -> Result<()> {
    let split = trainer.split();
    let last = plan.train.n_samples() % plan.batch;
    let smallest = [plan.batch, last].into_iter().filter_map(|n| split.pieces(n).last());
    let n_samples = smallest.map(|piece| piece.len()).min().unwrap_or(0);
    let mut batches = plan.train.epoch(n_samples, Order::Sequential, Tail::Keep)?;
    match batches.next() {
        None => Ok(()),
        Some(batch) => trainer.rehearse(&batch?).map_err(|error| refused(n_samples, error)),
    }
}

/// What the model says of a micro-batch; memory and the user may end this too.
fn refused(n_samples: usize, error: tallow_train::Error) -> Error {
    match error {
        tallow_train::Error::Memory(_) | tallow_train::Error::Interrupted => error.into(),
        error => Error::MicroBatch { n_samples, error: Box::new(error) },
    }
}

/// In micro-batches: evaluation needs no more memory than training.
fn evaluate<M: Segments>(trainer: &Trainer<M>, plan: &Epochs<'_>) -> Result<Evaluation> {
    let batch = trainer.split().micro_batch().min(plan.held_out.n_samples().max(1));
    Ok(trainer.evaluate(plan.held_out.epoch(batch, Order::Sequential, Tail::Keep)?)?)
}

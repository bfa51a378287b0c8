//! Epochs of updates.

use crate::{Error, Evaluation, Result, Trainer, Update};
use std::time::{Duration, Instant};
use tallow_data::{Dataset, Order, Tail};
use tallow_models::Segments;

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
        for (name, n) in [("epochs", Some(self.epochs)), ("max_updates", self.max_updates)] {
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
}

/// How a run ended.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Updates applied.
    pub n_updates: u64,
    /// Updates skipped because gradients overflowed.
    pub n_skipped: u64,
    /// Mean training loss of the first batch.
    pub first_loss: f64,
    /// Mean training loss of the last update.
    pub last_loss: f64,
    /// The held-out samples after the last update.
    pub held_out: Evaluation,
    /// Time spent in updates, evaluation excluded.
    pub training: Duration,
    /// Training samples seen, repetitions counted.
    pub n_samples: u64,
}

/// Trains `trainer` as `plan` says and tells `observe` of every update and evaluation.
///
/// The order of epoch `e` is a function of `(seed, e)`. One batch is on the device at a time.
/// # Errors
/// If the plan makes no update, or the trainer or the data fail.
pub fn fit<M: Segments>(
    trainer: &mut Trainer<M>,
    plan: &Epochs<'_>,
    mut observe: impl FnMut(Event),
) -> Result<Outcome> {
    plan.check()?;
    rehearse(trainer, plan)?;
    let (mut training, mut n_samples) = (Duration::ZERO, 0);
    let (mut first_loss, mut last_loss) = (None, f64::NAN);
    for epoch in 0..plan.epochs {
        let order = Order::Shuffled { seed: plan.seed, epoch };
        let mut batches = plan.train.epoch(plan.batch, order, Tail::Keep)?;
        while trainer.n_windows() < plan.n_updates() {
            let start = Instant::now();
            let Some(batch) = batches.next() else { break };
            let update = trainer.update(&batch?)?;
            training += start.elapsed();
            n_samples += update.n_samples;
            last_loss = update.loss;
            first_loss.get_or_insert(update.loss);
            observe(Event::Updated { n_windows: trainer.n_windows(), update });
        }
        let evaluation = evaluate(trainer, plan)?;
        if !evaluation.loss.is_finite() {
            let (loss, n_updates) = (evaluation.loss, trainer.n_updates());
            return Err(Error::Exploded { loss, n_updates });
        }
        observe(Event::Evaluated { epoch: epoch + 1, evaluation });
        if trainer.n_windows() >= plan.n_updates() {
            let n_updates = trainer.n_updates();
            if n_updates == 0 {
                let n = trainer.n_windows();
                let reason =
                    format!("the gradients of all {n} batches overflowed or were too large");
                return Err(Error::NoUpdates { reason });
            }
            let n_skipped = trainer.n_windows() - n_updates;
            let held_out = evaluation;
            let first_loss = first_loss.unwrap_or(f64::NAN);
            return Ok(Outcome {
                n_updates,
                n_skipped,
                first_loss,
                last_loss,
                held_out,
                training,
                n_samples,
            });
        }
    }
    unreachable!("the last epoch reaches the last update")
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
        Some(batch) => trainer.rehearse(&batch?),
    }
}

/// In micro-batches: evaluation needs no more memory than training.
fn evaluate<M: Segments>(trainer: &Trainer<M>, plan: &Epochs<'_>) -> Result<Evaluation> {
    let batch = trainer.split().micro_batch().min(plan.held_out.n_samples().max(1));
    trainer.evaluate(plan.held_out.epoch(batch, Order::Sequential, Tail::Keep)?)
}

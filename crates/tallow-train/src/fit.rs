//! Epochs of updates.

use crate::{Error, Evaluation, Result, Trainer, Update};
use candle_core::{ModuleT, Tensor};
use std::time::{Duration, Instant};
use tallow_data::{ImageSet, Order, Pixels, Tail};
use tallow_tensor::pass;

/// How long and on what a run trains.
#[derive(Clone, Debug)]
pub struct Epochs {
    /// Images to learn from.
    pub train: ImageSet,
    /// Images to judge by.
    pub held_out: ImageSet,
    /// What pixels become.
    pub pixels: Pixels,
    /// Samples an update.
    pub batch: usize,
    /// Passes over the training images.
    pub epochs: u64,
    /// Stops after this many batches even within an epoch; skipped ones count.
    pub max_updates: Option<u64>,
    /// Seed of the order.
    pub seed: u64,
}

impl Epochs {
    /// Updates of one epoch: the last batch may be smaller.
    pub fn updates_per_epoch(&self) -> u64 {
        self.train.n_images().div_ceil(self.batch.max(1)) as u64
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
        let n_images = self.train.n_images();
        if self.batch == 0 || self.held_out.n_images() == 0 {
            let (batch, held_out) = (self.batch, self.held_out.n_images());
            let reason = format!("a batch of {batch}, {held_out} held-out images");
            return Err(Error::NoUpdates { reason });
        }
        if self.batch > n_images {
            let reason = format!("a batch of {} is more than the {n_images} images", self.batch);
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
    /// The held-out images were judged after an epoch, or at the end.
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
    /// Mean training loss of the last update.
    pub last_loss: f64,
    /// The held-out images after the last update.
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
pub fn fit<M: ModuleT>(
    trainer: &mut Trainer<M>,
    plan: &Epochs,
    mut observe: impl FnMut(Event),
) -> Result<Outcome> {
    plan.check()?;
    rehearse(trainer, plan)?;
    let (mut training, mut n_samples, mut last_loss) = (Duration::ZERO, 0, f64::NAN);
    for epoch in 0..plan.epochs {
        let order = Order::Shuffled { seed: plan.seed, epoch };
        let mut batches = plan.train.batches(plan.batch, order, Tail::Keep, plan.pixels.clone())?;
        while trainer.n_windows() < plan.n_updates() {
            let start = Instant::now();
            let Some(batch) = batches.next() else { break };
            let update = trainer.update(&batch?)?;
            training += start.elapsed();
            n_samples += update.n_samples;
            last_loss = update.loss;
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
                let reason = format!("the gradients of all {n} batches overflowed");
                return Err(Error::NoUpdates { reason });
            }
            let n_skipped = trainer.n_windows() - n_updates;
            let held_out = evaluation;
            return Ok(Outcome { n_updates, n_skipped, last_loss, held_out, training, n_samples });
        }
    }
    unreachable!("the last epoch reaches the last update")
}

/// Runs the smallest micro-batch of the plan once, on zeros: a model that needs several values a
/// channel refuses here and not at the end of the first epoch.
fn rehearse<M: ModuleT>(trainer: &Trainer<M>, plan: &Epochs) -> Result<()> {
    let split = trainer.split();
    let last = plan.train.n_images() % plan.batch;
    let smallest = [plan.batch, last].into_iter().filter_map(|n| split.pieces(n).last());
    let n_samples = smallest.map(|piece| piece.len()).min().unwrap_or(0);
    let dims = (n_samples, 1, plan.train.height(), plan.train.width());
    let zeros = Tensor::zeros(dims, plan.pixels.dtype, &plan.pixels.device)?;
    let forward = || trainer.model().forward_t(&zeros, true);
    match pass::replay(pass::position(), forward) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::MicroBatch { n_samples, error }),
    }
}

fn evaluate<M: ModuleT>(trainer: &Trainer<M>, plan: &Epochs) -> Result<Evaluation> {
    let batch = plan.batch.min(plan.held_out.n_images().max(1));
    let pixels = plan.pixels.clone();
    let batches = plan.held_out.batches(batch, Order::Sequential, Tail::Keep, pixels)?;
    trainer.evaluate(batches)
}

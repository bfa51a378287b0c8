//! One update, and one evaluation.

use crate::{BatchSplit, Error, Result};
use candle_core::{DType, ModuleT, Tensor, Var};
use tallow_accum::{AccumConfig, Clip, Finish, GradientAccumulator, LossSum};
use tallow_data::Batch;
use tallow_optim::{Optimizer, Schedule};
use tallow_precision::{LossScale, Masters, Rule};
use tallow_tensor::{missing_gradients, ops, pass};

/// Targets are classes; none is ignored.
const NO_CLASS: i64 = -100;

/// How updates are made. What is not wanted is a value: one micro-batch, `LossScale::off()`,
/// `Clip::Off`, `Shape::Constant`.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Batch and micro-batch.
    pub split: BatchSplit,
    /// The optimizer; its learning rate is the schedule's.
    pub optimizer: tallow_optim::Config,
    /// The learning rate over applied updates.
    pub schedule: Schedule,
    /// What losses are multiplied by before backward.
    pub loss_scale: LossScale,
    /// How gradients are summed over micro-batches.
    pub accum: AccumConfig,
    /// Limit of the mean gradients.
    pub clip: Clip,
    /// Weight of the uniform distribution in the loss, from 0 to 1.
    pub label_smoothing: f64,
}

/// What one batch did.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// Mean loss over the batch, before the update.
    pub loss: f64,
    /// Samples of the batch.
    pub n_samples: u64,
    /// Whether the weights moved.
    pub outcome: Applied,
}

/// Whether a batch moved the weights.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied {
    /// They moved.
    Yes,
    /// Gradients overflowed: nothing moved but the loss scale and the position in the data.
    Skipped {
        /// The first parameter whose gradient is not finite, by name.
        overflowed: String,
    },
}

/// How a model does on data it does not learn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss.
    pub loss: f64,
    /// Share of samples whose largest logit is their label's.
    pub accuracy: f64,
    /// Samples.
    pub n_samples: u64,
}

/// A model in training.
pub struct Trainer<M> {
    model: M,
    masters: Masters,
    /// Master parameters, sorted by name.
    params: Vec<(String, Var)>,
    /// Running statistics, which forward passes move.
    buffers: Vec<(String, Var)>,
    optimizer: Optimizer,
    accum: GradientAccumulator,
    scale: LossScale,
    recipe: Recipe,
    n_windows: u64,
    n_updates: u64,
}

impl<M: ModuleT> Trainer<M> {
    /// `model` took its parameters from `masters` and maps images `[N, C, H, W]` to logits
    /// `[N, classes]`; `buffers` are its running statistics, if it has any.
    /// # Errors
    /// If a setting is out of its range.
    pub fn new(
        model: M,
        masters: Masters,
        buffers: Vec<(String, Var)>,
        recipe: Recipe,
    ) -> Result<Self> {
        if !(0.0..=1.0).contains(&recipe.label_smoothing) {
            let (name, value) = ("label_smoothing", recipe.label_smoothing);
            return Err(Error::Setting { name, value, expected: "from 0 to 1" });
        }
        recipe.schedule.check()?;
        let params = masters.params();
        let optimizer = Optimizer::new(&params, recipe.optimizer.clone())?;
        let accum = GradientAccumulator::new(&params, recipe.accum)?;
        let scale = recipe.loss_scale.clone();
        let (n_windows, n_updates) = (0, 0);
        Ok(Self {
            model,
            masters,
            params,
            buffers,
            optimizer,
            accum,
            scale,
            recipe,
            n_windows,
            n_updates,
        })
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// How a batch is cut.
    pub fn split(&self) -> BatchSplit {
        self.recipe.split
    }

    /// Batches seen so far, skipped ones included.
    pub fn n_windows(&self) -> u64 {
        self.n_windows
    }

    /// Updates applied so far.
    pub fn n_updates(&self) -> u64 {
        self.n_updates
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The loss scale, with its counts of skipped updates.
    pub fn loss_scale(&self) -> &LossScale {
        &self.scale
    }

    /// Bytes kept between updates beside the master parameters: low-precision copies, optimizer
    /// state, gradient sums.
    pub fn held_bytes(&self) -> u64 {
        self.masters.copies_bytes()
            + self.optimizer.resident_state_bytes()
            + self.accum.held_bytes()
    }

    /// Learns from one batch: the gradient is that of the batch's mean loss however it is cut into
    /// micro-batches (batch norms see one micro-batch at a time).
    /// # Errors
    /// If the model or an engine fails, a gradient is not finite under a scale that is not dynamic,
    /// the dynamic one is stuck, or, before the first update, a parameter got no gradient. Weights,
    /// optimizer, scale and statistics are then as before, and the next batch starts afresh.
    pub fn update(&mut self, batch: &Batch) -> Result<Update> {
        pass::begin_step(self.n_windows);
        self.n_windows += 1;
        let (statistics, scale) = (statistics(&self.buffers)?, self.scale.clone());
        let update = self.window(batch);
        if !matches!(&update, Ok(Update { outcome: Applied::Yes, .. })) {
            restore(&self.buffers, &statistics)?;
        }
        if update.is_err() {
            self.accum.reset();
            self.scale = scale;
        }
        update
    }

    /// Micro-batches, then [`Trainer::apply`].
    fn window(&mut self, batch: &Batch) -> Result<Update> {
        let mut loss_sum = LossSum::default();
        for piece in self.recipe.split.pieces(batch.labels.dim(0)?) {
            let n_samples = piece.len() as f64;
            let images = batch.images.narrow(0, piece.start, piece.len())?;
            let labels = batch.labels.narrow(0, piece.start, piece.len())?;
            let loss = self.loss(&self.model.forward_t(&images, true)?, &labels)?;
            loss_sum.add(scalar(&loss.sum)?, n_samples);
            let mut grads = self.scale.apply(&loss.sum)?.backward()?;
            self.masters.gather(&mut grads)?;
            self.accum.add(grads, n_samples)?;
        }
        let outcome = self.apply(loss_sum)?;
        let loss = loss_sum.mean().unwrap_or(f64::NAN);
        Ok(Update { loss, n_samples: loss_sum.weight as u64, outcome })
    }

    /// Ends the window: one division, one verdict, and the step if it is good.
    fn apply(&mut self, loss: LossSum) -> Result<Applied> {
        let loss_scale = f64::from(self.scale.value());
        let window = self.accum.take_mean(Finish { loss_scale, clip: self.recipe.clip })?;
        if self.n_updates == 0 {
            let names = missing_gradients(window.grads(), &self.params);
            if !names.is_empty() {
                return Err(Error::MissingGradients { names });
            }
        }
        if let tallow_accum::Verdict::NonFinite { name } = window.verdict() {
            let Rule::Dynamic(_) = self.scale.state().rule else {
                let loss = loss.mean().unwrap_or(f64::NAN);
                return Err(Error::NonFinite { update: self.n_windows, loss, name: name.clone() });
            };
            let name = name.clone();
            let overflow = tallow_precision::Verdict::Overflow { name: name.clone() };
            return match self.scale.record(overflow)? {
                tallow_precision::Verdict::Finite => unreachable!("an overflow stays one"),
                tallow_precision::Verdict::Overflow { .. } => {
                    Ok(Applied::Skipped { overflowed: name })
                }
            };
        }
        let _finite = self.scale.record(tallow_precision::Verdict::Finite)?;
        self.optimizer.set_learning_rate(self.recipe.schedule.rate(self.n_updates));
        self.optimizer.step(window.grads())?;
        self.masters.publish()?;
        self.n_updates += 1;
        Ok(Applied::Yes)
    }

    /// Loss and accuracy over `batches`, without learning.
    /// # Errors
    /// If a batch cannot be made or the model cannot run it.
    pub fn evaluate(
        &self,
        batches: impl Iterator<Item = tallow_data::Result<Batch>>,
    ) -> Result<Evaluation> {
        let (mut loss_sum, mut n_right, mut n_samples) = (0.0, 0, 0);
        for batch in batches {
            let batch = batch?;
            // Outputs of a model in evaluation still record a graph; it dies with each batch.
            let logits = self.model.forward_t(&batch.images, false)?.detach();
            loss_sum += scalar(&self.loss(&logits, &batch.labels)?.sum)?;
            let right = logits.argmax(1)?.eq(&batch.labels)?;
            n_right += right.to_vec1::<u8>()?.iter().map(|&r| u64::from(r)).sum::<u64>();
            n_samples += batch.labels.dim(0)? as u64;
        }
        let n = n_samples as f64;
        Ok(Evaluation { loss: loss_sum / n, accuracy: n_right as f64 / n, n_samples })
    }

    fn loss(&self, logits: &Tensor, labels: &Tensor) -> Result<ops::Loss> {
        let label_smoothing = self.recipe.label_smoothing;
        let cfg = ops::CrossEntropy { ignore_index: NO_CLASS, label_smoothing };
        Ok(ops::cross_entropy(logits, labels, &cfg)?)
    }
}

/// Copies of the running statistics.
fn statistics(buffers: &[(String, Var)]) -> Result<Vec<Tensor>> {
    Ok(buffers.iter().map(|(_, var)| var.copy()).collect::<candle_core::Result<_>>()?)
}

fn restore(buffers: &[(String, Var)], before: &[Tensor]) -> Result<()> {
    for ((_, var), before) in buffers.iter().zip(before) {
        var.set(before)?;
    }
    Ok(())
}

fn scalar(x: &Tensor) -> Result<f64> {
    Ok(x.to_dtype(DType::F64)?.to_scalar()?)
}

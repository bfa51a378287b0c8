//! Updates and evaluations.

use crate::{
    Applied, BatchSplit, Error, Evaluation, Gradients, Recipe, Result, Sizing, Skip, Update,
    backward::{Passes, Watch, Work, variables},
    books::Books,
    release::Ties,
};
use candle_core::{Tensor, TensorId, Var, backprop::GradStore};
use std::{collections::HashSet, sync::Arc};
use tallow_accum::{Finish, GradientAccumulator, LossSum, accumulator_bytes};
use tallow_data::Batch;
use tallow_memory::{Category, Held, Ledger, NoMeter, Watermark, peak_during};
use tallow_models::{Score, Segments};
use tallow_optim::{Average, Optimizer};
use tallow_precision::{LossScale, Masters, Rule, Verdict};
use tallow_tensor::{missing_gradients, pass};

/// A model in training.
pub struct Trainer<M> {
    pub(crate) model: M,
    pub(crate) watch: Watch,
    pub(crate) books: Books,
    pub(crate) sizing: Sizing,
    /// In the ledger, if there is one.
    pub(crate) entries: Vec<Held>,
    /// Those that the model computes with.
    pub(crate) variables: Arc<HashSet<TensorId>>,
    pub(crate) masters: Masters,
    /// Master parameters that are trained, sorted by name.
    pub(crate) params: Vec<(String, Var)>,
    /// Running statistics, which forward passes move.
    pub(crate) buffers: Vec<(String, Var)>,
    pub(crate) optimizer: Optimizer,
    pub(crate) average: Average,
    pub(crate) accum: GradientAccumulator,
    pub(crate) scale: LossScale,
    pub(crate) recipe: Recipe,
    pub(crate) n_windows: u64,
    pub(crate) n_updates: u64,
    pub(crate) ties: Ties,
}

impl<M: Segments> Trainer<M> {
    /// `model` took its parameters from `masters`; `buffers` are its running statistics, if it has
    /// any. A candle model that is not cut into segments is [`tallow_models::Whole`].
    /// # Errors
    /// If a setting is out of its range, two contradict each other, or the plan is not of this model.
    pub fn new(
        model: M,
        masters: Masters,
        buffers: Vec<(String, Var)>,
        recipe: Recipe,
    ) -> Result<Self> {
        recipe.check()?;
        recipe.recompute.validate(model.names().len() + 1)?;
        let mut params = masters.params();
        let optimizer = Optimizer::new(&params, recipe.optimizer.clone())?;
        // What no group trains needs no sum and has no part in the norm.
        params.retain(|(name, _)| optimizer.n_updates(name).is_some());
        let accum = GradientAccumulator::new(&params, recipe.accum)?;
        let scale = recipe.loss_scale.clone();
        let average = match recipe.ema_decay {
            None => Average::none(),
            Some(decay) => Average::new(&params, decay)?,
        };
        let watch = Watch::new(Watermark::off(Ledger::new()), &NoMeter);
        let sizing = Sizing::fixed(recipe.split.micro_batch());
        let (n_windows, n_updates) = (0, 0);
        Ok(Self {
            model,
            watch,
            books: Books::new(&Ledger::new()),
            sizing,
            entries: Vec::new(),
            variables: variables(&masters),
            masters,
            params,
            buffers,
            optimizer,
            average,
            accum,
            scale,
            recipe,
            n_windows,
            n_updates,
            ties: Ties::default(),
        })
    }

    /// Ends updates that pass the mark, between two segments; nothing has moved then.
    pub fn watch(&mut self, watch: Watch) {
        self.watch = watch;
    }

    /// Enters what the trainer holds into `ledger`, for as long as it lives: weights, gradient sums and
    /// optimizer state; and, as the meter of [`Trainer::watch`] finds them at each checkpoint of an
    /// update, the batch, saved activations, gradients, and transients.
    pub fn account(&mut self, ledger: &Ledger) {
        let weights_bytes = bytes_of(&self.masters.params()) + bytes_of(&self.buffers);
        let sums_bytes = match self.recipe.gradients {
            Gradients::Summed => accumulator_bytes(&self.params, self.recipe.accum.dtype),
            Gradients::Released => 0,
        };
        self.books = Books::new(ledger);
        self.entries = vec![
            ledger.hold(
                Category::Weights,
                weights_bytes + self.masters.copies_bytes() + self.average.held_bytes(),
            ),
            ledger.hold(Category::Accumulators, sums_bytes),
            ledger.hold(Category::OptimizerState, self.optimizer.resident_state_bytes()),
        ];
    }

    /// Lets the size of micro-batches change; the recipe's is then only a start.
    /// # Errors
    /// If gradients are released: that needs one micro-batch an update.
    pub fn size_by(&mut self, sizing: Sizing) -> Result<()> {
        if self.recipe.gradients == Gradients::Released {
            let (name, value) = ("sizing", sizing.micro_batch() as f64);
            let expected = "absent where gradients are released: one micro-batch is an update";
            return Err(Error::Setting { name, value, expected });
        }
        if sizing.limit_bytes == 0 {
            let (name, value) = ("limit_bytes", 0.0);
            return Err(Error::Setting { name, value, expected: "above 0" });
        }
        self.sizing = sizing;
        Ok(())
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// How a batch is cut now.
    pub fn split(&self) -> BatchSplit {
        self.recipe.split.with_micro_batch(self.sizing.micro_batch())
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
    /// state, gradient sums, the average.
    pub fn held_bytes(&self) -> u64 {
        self.masters.copies_bytes()
            + self.optimizer.resident_state_bytes()
            + self.accum.held_bytes()
            + self.average.held_bytes()
    }

    /// Learns from one batch: the gradient is that of the batch's mean loss however it is cut into
    /// micro-batches (batch norms see one micro-batch at a time).
    /// # Errors
    /// If the model or an engine fails, a gradient is not finite under a scale that is not dynamic,
    /// the dynamic one is stuck, or, before the first update, a parameter got no gradient. Weights,
    /// optimizer, scale and statistics are then as before, and the next batch starts afresh. An update
    /// that passes the [`Watch`] is tried again in smaller micro-batches if the [`Sizing`] has any. One
    /// that the watch stops is [`Error::Interrupted`], and its batch has not been seen.
    /// (Except where [`Gradients::Released`] says otherwise.)
    pub fn update(&mut self, batch: &Batch) -> Result<Update> {
        self.n_windows += 1;
        self.books.batch(&[&batch.inputs, &batch.targets]);
        loop {
            let meter = self.watch.meter;
            let start_bytes = meter.current_bytes();
            let (update, peak_bytes) = peak_during(meter, || self.attempt(batch));
            match update {
                // Again from the start, as if the smaller size had been used all along.
                Err(Error::Memory(error)) => self.sizing.shrink(error)?,
                Err(Error::Interrupted) => {
                    self.n_windows -= 1; // this batch comes again
                    return Err(Error::Interrupted);
                }
                Err(error) => return Err(error),
                Ok(update) => {
                    // What was granted above the cap is in the peak, which the sizing judges.
                    let _judged = meter.take_trip();
                    self.sizing.observe(start_bytes.saturating_add(peak_bytes))?;
                    return Ok(update);
                }
            }
        }
    }

    /// An update that leaves nothing behind if it fails.
    fn attempt(&mut self, batch: &Batch) -> Result<Update> {
        pass::begin_step(self.n_windows - 1);
        self.accum.reset(); // a panic that was caught may have left a part
        let (statistics, scale) = (statistics(&self.buffers)?, self.scale.clone());
        let update = match self.recipe.gradients {
            Gradients::Summed => self.summed(batch),
            Gradients::Released => self.released(batch),
        };
        if update.is_err() {
            self.accum.reset();
            self.scale = scale;
        }
        if !matches!(&update, Ok(Update { outcome: Applied::Yes, .. })) {
            restore(&self.buffers, &statistics)?;
        }
        update
    }

    /// Sums over micro-batches, then the step.
    fn summed(&mut self, batch: &Batch) -> Result<Update> {
        let (mut loss_sum, mut n_micro_batches) = (LossSum::default(), 0);
        for piece in self.split().pieces(batch.targets.dim(0)?) {
            let inputs = batch.inputs.narrow(0, piece.start, piece.len())?;
            let targets = batch.targets.narrow(0, piece.start, piece.len())?;
            let scale = self.scale.seed();
            let work = work(&self.model, &self.recipe, (&self.watch, &self.books), &self.variables);
            let (masters, accum) = (&self.masters, &mut self.accum);
            let found = work.run(
                (&inputs, &targets),
                |_| Ok(scale),
                |mut grads| {
                    gather(masters, &mut grads)?;
                    Ok(accum.add_part(grads)?)
                },
            )?;
            self.accum.end_micro_batch(found.n_counted as f64)?;
            loss_sum.add(found.sum, found.n_counted as f64);
            n_micro_batches += 1;
        }
        let loss = loss_sum.mean().unwrap_or(f64::NAN);
        let outcome = self.apply(loss)?;
        let n_samples = batch.targets.dim(0)? as u64;
        Ok(Update { loss, n_samples, n_micro_batches, outcome })
    }

    /// Ends the window: one division, one verdict, and the step if it is good.
    fn apply(&mut self, loss: f64) -> Result<Applied> {
        let loss_scale = f64::from(self.scale.value());
        let window = self.accum.take_mean(Finish { loss_scale, clip: self.recipe.clip })?;
        if self.n_updates == 0 {
            let names = missing_gradients(window.grads(), &self.params);
            if !names.is_empty() {
                return Err(Error::MissingGradients { names });
            }
        }
        let overflowed = match window.verdict() {
            tallow_accum::Verdict::Finite => None,
            tallow_accum::Verdict::NonFinite { name } => Some(name.clone()),
        };
        let limit = self.recipe.skip_above_norm;
        let judged =
            judge(&mut self.scale, overflowed, window.report().norm, limit, loss, self.n_windows)?;
        if judged == Applied::Yes {
            self.optimizer.set_learning_rate(self.recipe.schedule.rate(self.n_updates));
            self.optimizer.step(window.grads())?;
            self.masters.publish()?;
            self.n_updates += 1;
            self.average.update(self.n_updates)?;
        }
        Ok(judged)
    }

    /// Runs a batch as training does, without learning and without moving anything.
    /// # Errors
    /// If the model refuses it.
    pub fn rehearse(&self, batch: &Batch) -> Result<()> {
        let n_samples = batch.targets.dim(0)?;
        let work = work(&self.model, &self.recipe, (&self.watch, &self.books), &self.variables);
        pass::replay(pass::position(), || work.infer(&batch.inputs, &batch.targets, true))
            .map_err(|error| match error {
                Error::Memory(_) | Error::Interrupted => error,
                error => Error::MicroBatch { n_samples, error: Box::new(error) },
            })
            .map(|_| ())
    }

    /// Loss and accuracy over `batches`, without learning: of the average of the weights, if there is
    /// one.
    /// # Errors
    /// If a batch cannot be made or the model cannot run it.
    pub fn evaluate(
        &self,
        batches: impl Iterator<Item = tallow_data::Result<Batch>>,
    ) -> Result<Evaluation> {
        self.exchange()?;
        let judged = self.judge_by(batches);
        self.exchange()?;
        judged
    }

    /// Puts the average in the place of the weights, or back.
    fn exchange(&self) -> Result<()> {
        if self.recipe.ema_decay.is_some() {
            self.average.swap()?;
            self.masters.publish()?;
        }
        Ok(())
    }

    fn judge_by(
        &self,
        batches: impl Iterator<Item = tallow_data::Result<Batch>>,
    ) -> Result<Evaluation> {
        let mut all = Score { loss_sum: 0.0, n_counted: 0, n_right: 0 };
        for batch in batches {
            let batch = batch?;
            let work = work(&self.model, &self.recipe, (&self.watch, &self.books), &self.variables);
            let score = work.infer(&batch.inputs, &batch.targets, false)?;
            all.loss_sum += score.loss_sum;
            all.n_counted += score.n_counted;
            all.n_right += score.n_right;
        }
        let n = all.n_counted as f64;
        Ok(Evaluation {
            loss: all.loss_sum / n,
            accuracy: all.n_right as f64 / n,
            n_samples: all.n_counted,
        })
    }
}

/// Bytes of variables.
pub(crate) fn bytes_of(vars: &[(String, Var)]) -> u64 {
    let bytes = |v: &Var| (v.elem_count() * v.dtype().size_in_bytes()) as u64;
    vars.iter().map(|(_, var)| bytes(var)).sum()
}

/// Gives the masters their gradients; a segment without parameters of theirs has none to give.
pub(crate) fn gather(masters: &Masters, grads: &mut GradStore) -> Result<()> {
    match masters.gather(grads) {
        Ok(()) | Err(tallow_precision::Error::NoGradients { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// What a micro-batch runs on, borrowed apart from what its gradients change.
pub(crate) fn work<'a, M>(
    model: &'a M,
    recipe: &'a Recipe,
    looks: (&'a Watch, &'a Books),
    params: &'a Arc<HashSet<TensorId>>,
) -> Work<'a, M> {
    let Recipe { recompute: plan, saved, check, label_smoothing, .. } = recipe;
    let (check, label_smoothing) = (*check, *label_smoothing);
    Work::new(model, Passes { plan, saved, check, label_smoothing }, looks, params)
}

/// Tells the scale, and says whether to go on.
pub(crate) fn judge(
    scale: &mut LossScale,
    overflowed: Option<String>,
    norm: f64,
    limit: f64,
    loss: f64,
    update: u64,
) -> Result<Applied> {
    let Some(name) = overflowed else {
        if norm > limit {
            scale.skip(tallow_precision::Skip::NormLimit)?;
            return Ok(Applied::Skipped(Skip::Norm { norm, limit }));
        }
        let _finite = scale.record(Verdict::Finite)?;
        return Ok(Applied::Yes);
    };
    match scale.state().rule {
        Rule::Fixed { .. } => Err(Error::NonFinite { update, loss, name }),
        Rule::Dynamic(_) => {
            let _overflow = scale.record(Verdict::Overflow { name: name.clone() })?;
            Ok(Applied::Skipped(Skip::Overflow { name }))
        }
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

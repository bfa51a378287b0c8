//! One update.

use crate::{Applied, Error, Recipe, Result, Skip, Trainer, Update};
use candle_core::Tensor;
use tallow_accum::{Clip, Finish, LossSum};
use tallow_backward::{Error as BackwardError, Gradients};
use tallow_data::Batch;
use tallow_memory::peak_during;
use tallow_models::Segments;
use tallow_precision::{LossScale, Rule, Verdict};
use tallow_tensor::{missing_gradients, pass};

impl<M: Segments> Trainer<M> {
    /// Learns from one batch: the gradient is that of the batch's mean loss however it is cut into
    /// micro-batches (batch norms see one micro-batch at a time).
    /// # Errors
    /// If the model or an engine fails, a gradient is not finite under a scale that is not dynamic,
    /// the dynamic one is stuck, or, before the first update, a parameter got no gradient. Weights,
    /// optimizer, scale and statistics are then as before, and the next batch starts afresh. An update
    /// that passes the [`crate::Watch`] is tried again in smaller micro-batches if the [`crate::Sizing`]
    /// has any. One that the watch stops is [`Error::Interrupted`], and its batch has not been seen.
    /// (Except where [`Gradients::Released`] says otherwise.)
    pub fn update(&mut self, batch: &Batch) -> Result<Update> {
        self.n_windows += 1;
        self.network.begin_batch(&[&batch.inputs, &batch.targets]);
        let meter = self.network.meter();
        loop {
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
        let (statistics, scale) = (self.network.statistics()?, self.scale.clone());
        let update = match self.recipe.gradients {
            Gradients::Summed => self.step(batch),
            Gradients::Released => self.step_in_backward(batch),
        };
        if update.is_err() {
            self.accum.reset();
            self.scale = scale;
        }
        if !matches!(&update, Ok(Update { outcome: Applied::Yes, .. })) {
            self.network.restore(&statistics)?;
        }
        update
    }

    /// Sums gradients over micro-batches, then moves the weights.
    fn step(&mut self, batch: &Batch) -> Result<Update> {
        let (mut losses, mut n_micro_batches) = (LossSum::default(), 0);
        let n_samples = batch.targets.dim(0)?;
        for piece in self.split().pieces(n_samples) {
            let inputs = batch.inputs.narrow(0, piece.start, piece.len())?;
            let targets = batch.targets.narrow(0, piece.start, piece.len())?;
            let (scale, accum) = (self.scale.seed(), &mut self.accum);
            let walk = self.network.walk(self.recipe.passes());
            // Each segment's gradients are added to the sums, and die.
            let add = |grads| Ok(accum.add_part(grads)?);
            let found = walk.run::<Error>((&inputs, &targets), |_| Ok(scale), add)?;
            self.accum.end_micro_batch(found.n_counted as f64)?;
            losses.add(found.sum, found.n_counted as f64);
            n_micro_batches += 1;
        }
        let loss = losses.mean().unwrap_or(f64::NAN);
        let outcome = self.apply(loss)?;
        Ok(Update { loss, n_samples: n_samples as u64, n_micro_batches, outcome })
    }

    /// Ends the window: one division, one verdict, and the optimizer's step if it is good.
    fn apply(&mut self, loss: f64) -> Result<Applied> {
        let loss_scale = f64::from(self.scale.value());
        let window = self.accum.take_mean(Finish { loss_scale, clip: self.recipe.clip })?;
        if self.n_updates == 0 {
            let names = missing_gradients(window.grads(), &self.params);
            if !names.is_empty() {
                return Err(BackwardError::MissingGradients { names }.into());
            }
        }
        let overflowed = window.verdict().not_finite().map(str::to_string);
        let (norm, update) = (window.report().norm, self.n_windows);
        let outcome = judge(&mut self.scale, &self.recipe, overflowed, norm, loss, update)?;
        if outcome == Applied::Yes {
            self.optimizer.set_learning_rate(self.recipe.schedule.rate(self.n_updates));
            self.optimizer.step(window.grads())?;
            self.moved()?;
        }
        Ok(outcome)
    }

    /// The weights are others now.
    fn moved(&mut self) -> Result<()> {
        self.network.masters().publish()?;
        self.n_updates += 1;
        Ok(self.average.update(self.n_updates)?)
    }

    /// Moves the weights during backward, after a backward for the verdict where one is needed.
    fn step_in_backward(&mut self, batch: &Batch) -> Result<Update> {
        let (n_samples, n_micro_batches) = (batch.targets.dim(0)? as u64, 1);
        let (batch, position) = ((&batch.inputs, &batch.targets), pass::position());
        // The verdict closes the window, and the scale may grow with that.
        let (scale, mut factor) = (self.scale.seed(), None);
        if self.needs_verdict() {
            let (loss, outcome, found) = self.verdict(batch, scale)?;
            if outcome != Applied::Yes {
                return Ok(Update { loss, n_samples, n_micro_batches, outcome });
            }
            factor = found;
        }
        self.optimizer.set_learning_rate(self.recipe.schedule.rate(self.n_updates));
        let walk = self.network.walk(self.recipe.passes());
        let (params, optimizer) = (&self.params, &mut self.optimizer);
        let (by, update) = ((scale, factor), self.n_windows);
        // From the first parameter on there is no way back.
        let mut go = || self.release.update(&walk, params, optimizer, batch, by, update);
        let found = match factor {
            // The same draws, and statistics that have moved already.
            Some(_) => pass::replay(position, go)?,
            None => {
                let found = go()?;
                let _finite = self.scale.record(Verdict::Finite)?;
                found
            }
        };
        self.moved()?;
        Ok(Update { loss: found.mean(), n_samples, n_micro_batches, outcome: Applied::Yes })
    }

    /// The mean loss of a batch, what its gradients say, and what each is then multiplied by.
    fn verdict(
        &mut self,
        batch: (&Tensor, &Tensor),
        scale: f64,
    ) -> Result<(f64, Applied, Option<f64>)> {
        let (walk, first) = (self.network.walk(self.recipe.passes()), self.n_updates == 0);
        let (found, norm) = self.release.norm(&walk, &self.params, batch, scale, first)?;
        let max = if let Clip::Norm(max) = self.recipe.clip { max } else { f64::INFINITY };
        let (overflowed, factor, norm) = match norm.verdict(scale * found.n_counted as f64, max) {
            tallow_optim::Verdict::Overflow { name } => (Some(name), None, f64::NAN),
            tallow_optim::Verdict::Finite { factor, norm } => (None, Some(factor), norm),
        };
        let (loss, update) = (found.mean(), self.n_windows);
        let outcome = judge(&mut self.scale, &self.recipe, overflowed, norm, loss, update)?;
        Ok((loss, outcome, factor))
    }

    /// Whether an update needs the verdict over all gradients before the first of them is applied.
    fn needs_verdict(&self) -> bool {
        let fixed = matches!(self.scale.state().rule, Rule::Fixed { .. });
        let limits = self.recipe.clip != Clip::Off || self.recipe.skip_above_norm.is_finite();
        !fixed || limits || self.n_updates == 0
    }
}

/// Tells the scale, and says whether to go on.
fn judge(
    scale: &mut LossScale,
    recipe: &Recipe,
    overflowed: Option<String>,
    norm: f64,
    loss: f64,
    update: u64,
) -> Result<Applied> {
    let limit = recipe.skip_above_norm;
    match (overflowed, scale.state().rule) {
        (None, _) if norm > limit => {
            scale.skip(tallow_precision::Skip::NormLimit)?;
            Ok(Applied::Skipped(Skip::Norm { norm, limit }))
        }
        (None, _) => {
            let _finite = scale.record(Verdict::Finite)?;
            Ok(Applied::Yes)
        }
        (Some(name), Rule::Fixed { .. }) => {
            Err(BackwardError::NonFinite { update, loss, name }.into())
        }
        (Some(name), Rule::Dynamic(_)) => {
            let _overflow = scale.record(Verdict::Overflow { name: name.clone() })?;
            Ok(Applied::Skipped(Skip::Overflow { name }))
        }
    }
}

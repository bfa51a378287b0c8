//! Updates during backward: no gradient outlives its segment.

use crate::{
    Applied, Error, Result, Update,
    backward::MicroLoss,
    trainer::{Trainer, gather, judge, work},
};
use candle_core::{Tensor, TensorId, Var, backprop::GradStore};
use std::collections::HashMap;
use tallow_accum::Clip;
use tallow_data::Batch;
use tallow_models::Segments;
use tallow_optim::{GradientNorm, Stepped};
use tallow_precision::{Rule, Verdict};
use tallow_tensor::pass;

impl<M: Segments> Trainer<M> {
    /// Whether an update needs the verdict over all gradients before the first of them is applied.
    fn needs_verdict(&self) -> bool {
        let fixed = matches!(self.scale.state().rule, Rule::Fixed { .. });
        let limits = self.recipe.clip != Clip::Off || self.recipe.skip_above_norm.is_finite();
        !fixed || limits || self.n_updates == 0
    }

    /// Updates parameters during backward.
    pub(crate) fn released(&mut self, batch: &Batch) -> Result<Update> {
        let (n_samples, n_micro_batches) = (batch.targets.dim(0)? as u64, 1);
        let (position, mut factor) = (pass::position(), None);
        // The verdict closes the window, and the scale may grow with that.
        let scale = f64::from(self.scale.value());
        self.optimizer.set_learning_rate(self.recipe.schedule.rate(self.n_updates));
        if self.needs_verdict() {
            let (found, norm) = self.norm_of(batch)?;
            let loss = found.sum / found.n_counted as f64;
            let max_norm = if let Clip::Norm(max) = self.recipe.clip { max } else { f64::INFINITY };
            let divisor = scale * found.n_counted as f64;
            let (overflowed, norm) = match norm.verdict(divisor, max_norm) {
                tallow_optim::Verdict::Overflow { name } => (Some(name), f64::NAN),
                tallow_optim::Verdict::Finite { factor: f, norm } => {
                    factor = Some(f);
                    (None, norm)
                }
            };
            let limit = self.recipe.skip_above_norm;
            let outcome = judge(&mut self.scale, overflowed, norm, limit, loss, self.n_windows)?;
            if outcome != Applied::Yes {
                return Ok(Update { loss, n_samples, n_micro_batches, outcome });
            }
        }
        // From the first parameter on there is no way back.
        let found = match factor {
            // The same draws, and statistics that have moved already.
            Some(_) => pass::replay(position, || self.release(batch, scale, factor))?,
            None => {
                let scale = self.scale.seed();
                let found = self.release(batch, scale, None)?;
                let _finite = self.scale.record(Verdict::Finite)?;
                found
            }
        };
        self.masters.publish()?;
        self.n_updates += 1;
        self.average.update(self.n_updates)?;
        let loss = found.sum / found.n_counted as f64;
        Ok(Update { loss, n_samples, n_micro_batches, outcome: Applied::Yes })
    }

    /// The norm of the gradients, none of which is kept.
    fn norm_of(&mut self, batch: &Batch) -> Result<(MicroLoss, GradientNorm)> {
        let position = pass::position();
        let (found, norm, n_parts) = self.norm_pass(batch)?;
        if self.n_updates > 0 {
            return Ok((found, norm));
        }
        let id = |var: &Var| var.as_tensor().id();
        let missing = self.params.iter().filter(|(_, var)| !n_parts.contains_key(&id(var)));
        let names: Vec<String> = missing.map(|(name, _)| name.clone()).collect();
        if !names.is_empty() {
            return Err(Error::MissingGradients { names });
        }
        let ties: Ties = n_parts.into_iter().filter(|(_, n)| *n > 1).collect();
        if ties == self.ties {
            return Ok((found, norm));
        }
        // The norm was that of the parts: again, now that they are known.
        self.ties = ties;
        let (_, norm, _) = pass::replay(position, || self.norm_pass(batch))?;
        Ok((found, norm))
    }

    /// One backward for the norm; in how many segments each parameter got a gradient.
    fn norm_pass(&mut self, batch: &Batch) -> Result<(MicroLoss, GradientNorm, Ties)> {
        let (mut norm, mut parts) = (GradientNorm::new(), Parts::of(&self.ties));
        let (masters, params) = (&self.masters, &self.params);
        let scale = self.scale.seed();
        let found = work(&self.model, &self.recipe, (&self.watch, &self.books), &self.variables)
            .run(
                (&batch.inputs, &batch.targets),
                |found| counted(found).map(|_| scale),
                |mut grads| {
                    gather(masters, &mut grads)?;
                    parts.whole(grads, params, |name, _, grad| Ok(norm.add(name, &grad)?))
                },
            )?;
        let n_parts = parts.finish(params)?;
        Ok((found, norm, n_parts))
    }

    /// One backward, each gradient times `factor` and then gone. Without a factor, gradients are
    /// looked at one by one.
    fn release(&mut self, batch: &Batch, scale: f64, factor: Option<f64>) -> Result<MicroLoss> {
        let (masters, params, optimizer) = (&self.masters, &self.params, &mut self.optimizer);
        let (update, mut parts) = (self.n_windows, Parts::of(&self.ties));
        // Set by the forward, before any gradient comes.
        let loss = std::cell::Cell::new(MicroLoss { sum: f64::NAN, n_counted: 0 });
        let work = work(&self.model, &self.recipe, (&self.watch, &self.books), &self.variables);
        let found = work.run(
            (&batch.inputs, &batch.targets),
            |found| {
                loss.set(counted(found)?);
                Ok(scale)
            },
            |mut grads: GradStore| {
                // What is granted from here on is used: half an update would be worse.
                work.commit();
                gather(masters, &mut grads)?;
                let MicroLoss { sum, n_counted } = loss.get();
                parts.whole(grads, params, |name, var, grad| {
                    let judged = match factor {
                        Some(factor) => Some(factor),
                        None => finite_factor(name, &grad, scale * n_counted as f64)?,
                    };
                    let Some(factor) = judged else {
                        let (loss, name) = (sum / n_counted as f64, name.to_string());
                        return Err(Error::NonFinite { update, loss, name });
                    };
                    match optimizer.step_var(var, &grad, factor)? {
                        Stepped::Updated | Stepped::NotTrained => Ok(()),
                    }
                })
            },
        )?;
        parts.finish(params)?;
        Ok(found)
    }
}

/// There is no mean over nothing.
fn counted(found: MicroLoss) -> Result<MicroLoss> {
    match found.n_counted {
        0 => Err(tallow_accum::Error::ZeroWeight { n_micro_batches: 1 }.into()),
        _ => Ok(found),
    }
}

/// Parameters whose gradients come from several segments, and from how many.
pub(crate) type Ties = HashMap<TensorId, usize>;

/// Gradients as segments give them, those of tied parameters held until the last part is there.
struct Parts<'a> {
    ties: &'a Ties,
    /// Parts so far, of every parameter.
    n_parts: Ties,
    held: HashMap<TensorId, Tensor>,
}

impl<'a> Parts<'a> {
    fn of(ties: &'a Ties) -> Self {
        Self { ties, n_parts: Ties::default(), held: HashMap::new() }
    }

    /// Calls `each` with every parameter whose gradient is whole now.
    fn whole(
        &mut self,
        mut grads: GradStore,
        params: &[(String, Var)],
        mut each: impl FnMut(&str, &Var, Tensor) -> Result<()>,
    ) -> Result<()> {
        for (name, var) in params {
            let Some(part) = grads.remove(var) else { continue };
            let id = var.as_tensor().id();
            let n_parts = self.n_parts.entry(id).or_default();
            *n_parts += 1;
            let sum = match self.held.remove(&id) {
                None => part,
                Some(sum) => (sum + part)?,
            };
            match self.ties.get(&id) {
                Some(n_wanted) if n_parts != n_wanted => drop(self.held.insert(id, sum)),
                _ => each(name, var, sum)?,
            }
        }
        Ok(())
    }

    /// In how many segments each parameter got a gradient; that no part was waited for in vain.
    fn finish(self, params: &[(String, Var)]) -> Result<Ties> {
        let waiting = |var: &Var| self.held.contains_key(&var.as_tensor().id());
        match params.iter().find(|(_, var)| waiting(var)) {
            None => Ok(self.n_parts),
            Some((name, _)) => Err(Error::Tied { name: name.clone() }),
        }
    }
}

/// What makes a mean of a sum, if the gradient is finite.
fn finite_factor(name: &str, grad: &Tensor, divisor: f64) -> Result<Option<f64>> {
    let mut norm = GradientNorm::new();
    norm.add(name, grad)?;
    Ok(match norm.verdict(divisor, f64::INFINITY) {
        tallow_optim::Verdict::Finite { factor, .. } => Some(factor),
        tallow_optim::Verdict::Overflow { .. } => None,
    })
}

//! Updates during backward: no gradient outlives its segment.

use crate::{Error, MicroLoss, Result, Walk};
use candle_core::{Tensor, TensorId, Var, backprop::GradStore};
use std::{cell::Cell, collections::HashMap};
use tallow_models::Segments;
use tallow_optim::{GradientNorm, Optimizer, Stepped};
use tallow_tensor::pass;

/// How gradients reach the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradients {
    /// Each segment's are added to the sums of the window and die; the window updates at its end.
    Summed,
    /// Each segment's update their parameters during backward and die: no gradient outlives its
    /// segment, but those of a parameter that several segments use are summed until the last is there.
    /// Needs one micro-batch an update. A verdict over all gradients (clipping by the norm,
    /// a dynamic loss scale, a norm limit, the first update) needs a backward of its own before, so
    /// that an update takes twice the time; without one, a gradient that is not finite ends the run
    /// with the segments after it already updated. So does memory that runs out in a recomputation.
    Released,
}

/// Parameters whose gradients come from several segments, and from how many.
type Ties = HashMap<TensorId, usize>;

/// Updates parameters as backward gives their gradients. It knows which of them several segments share
/// once it has seen the norm of one batch.
///
/// *Memory:* of shared parameters the gradient, until its last part is there.
#[derive(Clone, Debug, Default)]
pub struct Release {
    ties: Ties,
}

impl Release {
    /// The loss of a micro-batch and the norm of its gradients, none of which is kept: the verdict that
    /// an update may need before its first parameter moves. Random draws and statistics move as in any
    /// forward. `params` are the trained masters, sorted by name; the `first` time of a run finds out
    /// which of them segments share, and that none is without a gradient.
    /// # Errors
    /// [`Error::MissingGradients`], [`Error::NothingCounted`], or those of [`Walk::run`].
    pub fn norm<M: Segments>(
        &mut self,
        walk: &Walk<M>,
        params: &[(String, Var)],
        batch: (&Tensor, &Tensor),
        scale: f64,
        first: bool,
    ) -> Result<(MicroLoss, GradientNorm)> {
        let position = pass::position();
        let (found, norm, n_parts) = self.norm_pass(walk, params, batch, scale)?;
        if !first {
            return Ok((found, norm));
        }
        let id = |var: &Var| var.as_tensor().id();
        let missing = params.iter().filter(|(_, var)| !n_parts.contains_key(&id(var)));
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
        let again = || self.norm_pass(walk, params, batch, scale);
        let (_, norm, _) = pass::replay(position, again)?;
        Ok((found, norm))
    }

    /// One backward for the norm; in how many segments each parameter got a gradient.
    fn norm_pass<M: Segments>(
        &self,
        walk: &Walk<M>,
        params: &[(String, Var)],
        batch: (&Tensor, &Tensor),
        scale: f64,
    ) -> Result<(MicroLoss, GradientNorm, Ties)> {
        let (mut norm, mut parts) = (GradientNorm::new(), Parts::of(&self.ties));
        let found = walk.run(
            batch,
            |found| counted(found).map(|_| scale),
            |grads| parts.whole(grads, params, |name, _, grad| Ok(norm.add(name, &grad)?)),
        )?;
        let n_parts = parts.finish(params)?;
        Ok((found, norm, n_parts))
    }

    /// Update `update` by one backward: each gradient times `factor`, and then gone. Without a factor it
    /// is what makes a mean of a sum, and gradients are looked at one by one.
    /// # Errors
    /// [`Error::NonFinite`] where there is no factor, [`Error::Tied`], [`Error::NothingCounted`], or those
    /// of [`Walk::run`]. From the first parameter on there is no way back.
    pub fn update<M: Segments>(
        &self,
        walk: &Walk<M>,
        params: &[(String, Var)],
        optimizer: &mut Optimizer,
        batch: (&Tensor, &Tensor),
        (scale, factor): (f64, Option<f64>),
        update: u64,
    ) -> Result<MicroLoss> {
        let mut parts = Parts::of(&self.ties);
        // Set by the forward, before any gradient comes.
        let loss = Cell::new(MicroLoss { sum: f64::NAN, n_counted: 0 });
        let found = walk.run(
            batch,
            |found| {
                loss.set(counted(found)?);
                Ok(scale)
            },
            |grads: GradStore| {
                // What is granted from here on is used: half an update would be worse.
                walk.commit();
                parts.whole(grads, params, |name, var, grad| {
                    let judged = match factor {
                        Some(factor) => Some(factor),
                        None => finite_factor(name, &grad, scale * loss.get().n_counted as f64)?,
                    };
                    let Some(factor) = judged else {
                        let (loss, name) = (loss.get().mean(), name.to_string());
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
        0 => Err(Error::NothingCounted),
        _ => Ok(found),
    }
}
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

//! A model in training: what it is made of, what it holds, how it is judged.

use crate::{Error, Evaluation, Recipe, Result};
use candle_core::Var;
use tallow_accum::{BatchSplit, GradientAccumulator, accumulator_bytes};
use tallow_backward::{Built, Gradients, Network, Release, Watch};
use tallow_data::Batch;
use tallow_memory::{Category, Held, Ledger, batch::Sizing};
use tallow_models::{Score, Segments};
use tallow_optim::{Average, Optimizer};
use tallow_precision::{LossScale, Masters};
use tallow_tensor::pass;

/// A model in training.
///
/// *Memory:* [`Trainer::held_bytes`] beside the master parameters, and while a batch is computed what a
/// [`tallow_backward::Walk`] over one micro-batch holds.
pub struct Trainer<M> {
    pub(crate) network: Network<M>,
    /// Master parameters that are trained, sorted by name.
    pub(crate) params: Vec<(String, Var)>,
    pub(crate) optimizer: Optimizer,
    pub(crate) average: Average,
    pub(crate) accum: GradientAccumulator,
    pub(crate) release: Release,
    pub(crate) scale: LossScale,
    pub(crate) sizing: Sizing,
    pub(crate) recipe: Recipe,
    pub(crate) n_windows: u64,
    pub(crate) n_updates: u64,
    /// In the ledger, if there is one.
    entries: Vec<Held>,
}

impl<M: Segments> Trainer<M> {
    /// `model` took its parameters from `masters`; `buffers` are its running statistics, if it has
    /// any. A candle model that is not cut into segments is [`tallow_models::Whole`].
    /// [`Trainer::builder`] is the short way.
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
        let average = match recipe.ema_decay {
            None => Average::none(),
            Some(decay) => Average::new(&params, decay)?,
        };
        Ok(Self {
            network: Network::new(Built { model, masters, buffers }),
            accum: GradientAccumulator::new(&params, recipe.accum)?,
            params,
            optimizer,
            average,
            release: Release::default(),
            scale: recipe.loss_scale.clone(),
            sizing: Sizing::fixed(recipe.split.micro_batch()),
            recipe,
            n_windows: 0,
            n_updates: 0,
            entries: Vec::new(),
        })
    }

    /// Ends updates that pass the mark, between two segments; nothing has moved then.
    pub fn watch(&mut self, watch: Watch) {
        self.network.watch(watch);
    }

    /// Enters what the trainer holds into `ledger`, for as long as it lives: weights, gradient sums and
    /// optimizer state; and, as the meter of [`Trainer::watch`] finds them at each checkpoint of an
    /// update, the batch, saved activations, gradients, and transients.
    pub fn account(&mut self, ledger: &Ledger) {
        let sums_bytes = match self.recipe.gradients {
            Gradients::Summed => accumulator_bytes(&self.params, self.recipe.accum.dtype),
            Gradients::Released => 0,
        };
        let weights_bytes = self.network.weights_bytes() + self.average.held_bytes();
        self.network.account(ledger);
        self.entries = vec![
            ledger.hold(Category::Weights, weights_bytes),
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
        self.network.model()
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
        self.network.masters().copies_bytes()
            + self.optimizer.resident_state_bytes()
            + self.accum.held_bytes()
            + self.average.held_bytes()
    }

    /// Runs a batch as training does, without learning and without moving anything.
    /// # Errors
    /// If the model refuses it.
    pub fn rehearse(&self, batch: &Batch) -> Result<()> {
        let walk = self.network.walk(self.recipe.passes());
        pass::replay(pass::position(), || walk.infer(&batch.inputs, &batch.targets, true))?;
        Ok(())
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
            self.network.masters().publish()?;
        }
        Ok(())
    }

    fn judge_by(
        &self,
        batches: impl Iterator<Item = tallow_data::Result<Batch>>,
    ) -> Result<Evaluation> {
        let mut all = Score::NONE;
        for batch in batches {
            let batch = batch?;
            let walk = self.network.walk(self.recipe.passes());
            all += walk.infer(&batch.inputs, &batch.targets, false)?;
        }
        let n = all.n_counted as f64;
        let (loss, accuracy) = (all.loss_sum / n, all.n_right as f64 / n);
        Ok(Evaluation { loss, accuracy, n_samples: all.n_counted })
    }
}

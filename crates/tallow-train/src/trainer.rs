//! One update, and one evaluation.

use crate::{BatchSplit, Error, Result};
use candle_core::{ModuleT, Tensor, Var, backprop::GradStore};
use candle_nn::{Optimizer, ParamsAdamW};
use tallow_data::Batch;
use tallow_tensor::{missing_gradients, ops, pass};

/// Targets are classes; none is ignored.
const NO_CLASS: i64 = -100;

/// Settings of AdamW (Loshchilov & Hutter 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Step size.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl AdamW {
    /// PyTorch's defaults with this step size.
    pub fn default_for(learning_rate: f64) -> Self {
        Self { learning_rate, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }

    fn checked(self) -> Result<ParamsAdamW> {
        let positive = |x: f64| x > 0.0 && x.is_finite();
        let share = |x: f64| (0.0..1.0).contains(&x);
        let rules = [
            ("learning_rate", self.learning_rate, positive(self.learning_rate), "above 0"),
            ("beta1", self.beta1, share(self.beta1), "from 0 to below 1"),
            ("beta2", self.beta2, share(self.beta2), "from 0 to below 1"),
            ("eps", self.eps, positive(self.eps), "above 0"),
            (
                "weight_decay",
                self.weight_decay,
                self.weight_decay == 0.0 || positive(self.weight_decay),
                "0 or more",
            ),
        ];
        for (name, value, good, expected) in rules {
            if !good {
                return Err(Error::Setting { name, value, expected });
            }
        }
        let Self { learning_rate: lr, beta1, beta2, eps, weight_decay } = self;
        Ok(ParamsAdamW { lr, beta1, beta2, eps, weight_decay })
    }
}

/// The learning rate over a run, counted in applied updates from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// The same throughout.
    Constant,
    /// Falls evenly: update `k` of `n` has `1 - k / n` of the rate.
    Linear {
        /// Updates of the run, `n`.
        n_updates: u64,
    },
    /// Falls along half a cosine: update `k` of `n` has `(1 + cos(pi k / n)) / 2` of the rate
    /// (Loshchilov & Hutter 2017).
    Cosine {
        /// Updates of the run, `n`.
        n_updates: u64,
    },
}

impl Schedule {
    /// The share of the rate that update `k` has; 0 beyond the run.
    pub fn share(self, k: u64) -> f64 {
        let done = |n: u64| (k as f64 / n.max(1) as f64).min(1.0);
        match self {
            Schedule::Constant => 1.0,
            Schedule::Linear { n_updates } => 1.0 - done(n_updates),
            Schedule::Cosine { n_updates } => {
                0.5 * (1.0 + (std::f64::consts::PI * done(n_updates)).cos())
            }
        }
    }
}

/// How updates are made.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// Batch and micro-batch.
    pub split: BatchSplit,
    /// The optimizer.
    pub optimizer: AdamW,
    /// How its learning rate changes.
    pub schedule: Schedule,
    /// Weight of the uniform distribution in the loss, from 0 to 1.
    pub label_smoothing: f64,
}

/// What one update was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Mean loss over the batch, before the update.
    pub loss: f64,
    /// Samples of the batch.
    pub n_samples: u64,
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
    params: Vec<(String, Var)>,
    optimizer: candle_nn::AdamW,
    recipe: Recipe,
    n_updates: u64,
}

impl<M: ModuleT> Trainer<M> {
    /// `params` are the trainable parameters of `model`, sorted by name.
    ///
    /// `model` maps images `[N, C, H, W]` to logits `[N, classes]`.
    /// # Errors
    /// If a setting is out of its range.
    pub fn new(model: M, params: Vec<(String, Var)>, recipe: Recipe) -> Result<Self> {
        if !(0.0..=1.0).contains(&recipe.label_smoothing) {
            let (name, value) = ("label_smoothing", recipe.label_smoothing);
            return Err(Error::Setting { name, value, expected: "from 0 to 1" });
        }
        let vars = params.iter().map(|(_, var)| var.clone()).collect();
        let optimizer = candle_nn::AdamW::new(vars, recipe.optimizer.checked()?)?;
        Ok(Self { model, params, optimizer, recipe, n_updates: 0 })
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Updates made so far.
    pub fn n_updates(&self) -> u64 {
        self.n_updates
    }

    /// Learns from one batch: the gradient is that of the batch's mean loss however it is cut into
    /// micro-batches (batch norms see one micro-batch at a time).
    /// # Errors
    /// If the loss is not finite or, in the first update, a parameter got no gradient; the weights
    /// are then as before.
    pub fn update(&mut self, batch: &Batch) -> Result<Update> {
        pass::begin_step(self.n_updates);
        let n_samples = batch.labels.dim(0)?;
        let (mut loss_sum, mut sums) = (0.0, GradientSums::default());
        for piece in self.recipe.split.pieces(n_samples) {
            let images = batch.images.narrow(0, piece.start, piece.len())?;
            let labels = batch.labels.narrow(0, piece.start, piece.len())?;
            let loss = self.loss(&self.model.forward_t(&images, true)?, &labels)?;
            loss_sum += scalar(&loss.sum)?;
            sums.add(&self.params, loss.sum.backward()?)?;
        }
        let update = Update { loss: loss_sum / n_samples as f64, n_samples: n_samples as u64 };
        if !update.loss.is_finite() {
            return Err(Error::NonFinite { update: self.n_updates + 1, loss: update.loss });
        }
        let grads = sums.mean(&self.params, n_samples)?;
        let names = missing_gradients(&grads, &self.params);
        if self.n_updates == 0 && !names.is_empty() {
            return Err(Error::MissingGradients { names });
        }
        let Recipe { optimizer, schedule, .. } = self.recipe;
        self.optimizer.set_learning_rate(optimizer.learning_rate * schedule.share(self.n_updates));
        self.optimizer.step(&grads)?;
        self.n_updates += 1;
        Ok(update)
    }

    /// Loss and accuracy over `batches`, without learning; micro-batches bound the memory here too.
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

fn scalar(x: &Tensor) -> Result<f64> {
    Ok(x.to_dtype(candle_core::DType::F64)?.to_scalar()?)
}

/// Gradient sums over the micro-batches of one batch.
#[derive(Default)]
struct GradientSums(GradStore);

impl GradientSums {
    /// Consumes `grads`: a micro-batch's gradients die here.
    fn add(&mut self, params: &[(String, Var)], mut grads: GradStore) -> Result<()> {
        for (_, var) in params {
            let Some(grad) = grads.remove(var) else { continue };
            let sum = match self.0.remove(var) {
                None => grad,
                Some(sum) => (sum + grad)?,
            };
            self.0.insert(var, sum);
        }
        Ok(())
    }

    fn mean(mut self, params: &[(String, Var)], n_samples: usize) -> Result<GradStore> {
        for (_, var) in params {
            if let Some(sum) = self.0.remove(var) {
                self.0.insert(var, (sum / n_samples as f64)?);
            }
        }
        Ok(self.0)
    }
}

//! A trainer from what its user sets; the rest has defaults.

use crate::{Error, Recipe, Result, Trainer};
use candle_core::DType;
use tallow_accum::{ADVISED_MICRO_BATCHES, AccumConfig, AccumDType, BatchSplit, Clip};
use tallow_backward::{Built, Gradients};
use tallow_memory::Meter;
use tallow_models::Segments;
use tallow_optim::{Algorithm, Config, Schedule, Shape};
use tallow_plan::{Candidate, Recomputation, Space, Workload};
use tallow_precision::{DynamicScale, LossScale};
use tallow_recompute::{Check, Plan, Policy, Saved};

/// What a plan under a budget is called where a setting contradicts it.
const PLAN: &str = "a plan under a budget";
/// What such a plan has decided.
const PLANNED: [&str; 7] =
    ["batch", "micro_batch", "accumulate", "optimizer", "recompute", "plan", "released"];
/// Settings that decide the same.
const RIVALS: [(&str, &str); 4] = [
    ("learning_rate", "optimizer"),
    ("learning_rate", "schedule"),
    ("warmup_cosine", "schedule"),
    ("recompute", "plan"),
];

/// A trainer to be. Unless told otherwise: AdamW at a constant 1e-3 with weight decay 0.01, a batch in one
/// micro-batch, sums in f32, no clipping, every activation kept, and a loss scale only where the precision
/// is f16, which needs one.
///
/// Of a setting that is given twice the last counts; two that decide the same are refused.
#[must_use = "a trainer comes of Builder::build"]
pub struct Builder<M> {
    built: Built<M>,
    /// Of which [`Builder::build`] replaces the split and the plan.
    recipe: Recipe,
    batch: Option<usize>,
    micro_batch: Option<usize>,
    accumulate: Option<usize>,
    rule: Policy,
    plan: Option<Plan>,
    /// Names of what was set.
    given: Vec<&'static str>,
    /// Names of what must not be set.
    decided: Vec<&'static str>,
}

impl<M: Segments> Trainer<M> {
    /// A trainer of `built`, which [`Built::new`] makes of a closure. A candle model that is not cut into
    /// segments is [`tallow_models::Whole`].
    pub fn builder(built: Built<M>) -> Builder<M> {
        let is_f16 = built.masters.policy().compute == DType::F16;
        let scale = LossScale::dynamic(DynamicScale::STANDARD).ok().filter(|_| is_f16);
        let adamw = Config::new(Algorithm::ADAMW, 1e-3);
        let recipe = Recipe {
            split: BatchSplit::ONE,
            optimizer: Config { weight_decay: 0.01, ..adamw },
            schedule: Schedule { peak: 1e-3, warmup_updates: 0, shape: Shape::Constant },
            loss_scale: scale.unwrap_or(LossScale::off()),
            accum: AccumConfig { dtype: AccumDType::F32, warn_above: ADVISED_MICRO_BATCHES },
            clip: Clip::Off,
            skip_above_norm: f64::INFINITY,
            gradients: Gradients::Summed,
            recompute: Plan::keep_all(built.model.names().len() + 1),
            saved: Saved::AsIs,
            check: Check::Shape,
            label_smoothing: 0.0,
            ema_decay: None,
        };
        let (batch, micro_batch, accumulate, rule, plan) = (None, None, None, Policy::None, None);
        let (given, decided) = (Vec::new(), Vec::new());
        Builder { built, recipe, batch, micro_batch, accumulate, rule, plan, given, decided }
    }

    /// A trainer of the fastest way in `space` to train `work` that fits `budget_bytes`.
    ///
    /// *Memory:* what [`tallow_plan::plan`] says; then the model.
    /// # Errors
    /// If nothing fits, or the model cannot be built.
    pub fn planned<W: Workload<Model = M>>(
        work: &W,
        space: &Space,
        budget_bytes: Option<u64>,
        meter: &dyn Meter,
    ) -> Result<Builder<M>> {
        let found = tallow_plan::plan(work, space, budget_bytes, meter)?;
        let chosen = &found.candidates[found.chosen];
        Ok(Self::builder(work.build(&space.policies[chosen.policy])?).chosen(space, chosen))
    }
}

impl<M: Segments> Builder<M> {
    /// Samples an update.
    pub fn batch(mut self, batch: usize) -> Self {
        self.batch = Some(batch);
        self.given("batch")
    }

    /// Samples of a micro-batch: what is in memory at once.
    pub fn micro_batch(mut self, micro_batch: usize) -> Self {
        self.micro_batch = Some(micro_batch);
        self.given("micro_batch")
    }

    /// Micro-batches an update.
    pub fn accumulate(mut self, accumulate: usize) -> Self {
        self.accumulate = Some(accumulate);
        self.given("accumulate")
    }

    /// The highest rate of the schedule.
    pub fn learning_rate(mut self, peak: f64) -> Self {
        self.recipe.schedule.peak = peak;
        self.given("learning_rate")
    }

    /// The rate grows over `warmup_updates`, then falls on half a cosine to 0 at `total_updates`.
    pub fn warmup_cosine(mut self, warmup_updates: u64, total_updates: u64) -> Self {
        let shape = Shape::Cosine { total_updates, end: 0.0 };
        self.recipe.schedule = Schedule { warmup_updates, shape, ..self.recipe.schedule };
        self.given("warmup_cosine")
    }

    /// Any other schedule, its rate included.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.recipe.schedule = schedule;
        self.given("schedule")
    }

    /// The optimizer; its rate is the highest of the schedule unless a schedule is given.
    pub fn optimizer(mut self, optimizer: Config) -> Self {
        self.set_optimizer(optimizer);
        self.given("optimizer")
    }

    fn set_optimizer(&mut self, optimizer: Config) {
        if !self.given.contains(&"schedule") {
            self.recipe.schedule.peak = optimizer.learning_rate;
        }
        self.recipe.optimizer = optimizer;
    }

    /// The most that the norm of an update's mean gradients may be: larger ones are scaled down to it.
    pub fn clip_norm(mut self, max: f64) -> Self {
        self.recipe.clip = Clip::Norm(max);
        self.given("clip_norm")
    }

    /// Parameters are updated during backward: see [`Gradients::Released`].
    pub fn released(mut self) -> Self {
        self.recipe.gradients = Gradients::Released;
        self.given("released")
    }

    /// Which segments are run again in backward, by a rule that needs no costs.
    pub fn recompute(mut self, rule: Policy) -> Self {
        self.rule = rule;
        self.given("recompute")
    }

    /// Which segments are run again in backward; the head with the loss is the last.
    pub fn plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self.given("plan")
    }

    /// Decay of a running average of the weights, which evaluations then use.
    pub fn ema_decay(mut self, decay: f64) -> Self {
        self.recipe.ema_decay = Some(decay);
        self.given("ema_decay")
    }

    /// Whatever else a recipe has. Its split and its plan are replaced by what the builder was told.
    pub fn adjust(mut self, adjust: impl FnOnce(&mut Recipe)) -> Self {
        adjust(&mut self.recipe);
        self
    }

    /// What a plan over `space` has chosen. The model must have been built under its policy.
    /// # Panics
    /// If `chosen` is of another space.
    pub fn chosen(mut self, space: &Space, chosen: &Candidate) -> Self {
        self.set_optimizer(space.optimizers[chosen.optimizer].clone());
        (self.batch, self.micro_batch) = (Some(space.batch), Some(chosen.micro_batch));
        self.plan = Some(chosen.recompute.clone());
        let recipe = &mut self.recipe;
        recipe.accum.dtype = space.accum;
        (recipe.saved, recipe.gradients) = (space.saved.clone(), space.gradients);
        recipe.label_smoothing = space.label_smoothing;
        self.decided = PLANNED.to_vec();
        // An average that is not in the price.
        self.decided.extend((!space.has_average).then_some("ema_decay"));
        self
    }

    fn given(mut self, name: &'static str) -> Self {
        self.given.push(name);
        self
    }

    /// The trainer.
    /// # Errors
    /// [`Error::Contradiction`], [`Error::Split`] where batch numbers do not fit together or none is given,
    /// a rule of recomputation that needs costs, or those of [`Trainer::new`].
    pub fn build(self) -> Result<Trainer<M>> {
        let is_given = |name: &'static str| self.given.contains(&name);
        let rivals = RIVALS.into_iter().find(|(first, second)| is_given(first) && is_given(second));
        let decided = self.decided.iter().find(|name| is_given(name)).map(|name| (*name, PLAN));
        if let Some((first, second)) = rivals.or(decided) {
            return Err(Error::Contradiction { first, second });
        }
        let split = BatchSplit::derive(self.batch, self.micro_batch, self.accumulate, 1)?;
        let Built { model, masters, buffers } = self.built;
        let recompute = match self.plan {
            Some(plan) => plan,
            None => {
                let (mut names, recomputation) = (model.names(), Recomputation::Rule(self.rule));
                names.push(model.head_name());
                let space = Space { recomputation, ..Space::new(split.batch()) };
                space.unplanned(&names)?.recompute
            }
        };
        Trainer::new(model, masters, buffers, Recipe { split, recompute, ..self.recipe })
    }
}

//! What a configuration trains, for the planner and for the run.

use crate::{
    config::{Config, DataShape, Opened},
    scratch,
};
use anyhow::Context;
use std::fs;
use tallow_data::{Batch, Order, Tail};
use tallow_memory::Meter;
use tallow_models::Segments;
use tallow_train::{
    accum::AccumDType,
    optim::Place,
    plan::{Built, Error, Found, Recomputation, Result, Space, Workload, plan},
    precision,
    recompute::{Policy, Saved, SegmentCost},
};

/// A network that the configuration can name.
type Model = Box<dyn Segments>;
/// Such a network with its parameters.
pub(crate) type BuiltModel = Built<Model>;

/// What gradients are summed in.
pub(crate) const SUMS: AccumDType = AccumDType::F32;

/// A configuration and its data.
pub(crate) struct Work<'a> {
    pub(crate) config: &'a Config,
    pub(crate) opened: &'a Opened,
}

impl Work<'_> {
    /// The model's segments and its head, which the configuration's patterns must match.
    /// # Errors
    /// If one matches none.
    pub(crate) fn segment_names(&self, built: &BuiltModel) -> anyhow::Result<Vec<String>> {
        let mut names = built.model.names();
        names.push(built.model.head_name());
        let costs: Vec<_> = names.iter().map(SegmentCost::unmeasured).collect();
        let Recomputation::Rule(Policy::Named(patterns)) = &self.config.recomputation else {
            return Ok(names);
        };
        for pattern in patterns {
            let plan = Policy::Named(vec![pattern.clone()]).plan(&costs)?;
            anyhow::ensure!(
                plan.n_redone() > 0,
                "memory.recompute: `{pattern}` matches no segment; there are {}",
                names.join(", ")
            );
        }
        Ok(names)
    }

    /// What the planner makes of it.
    /// # Errors
    /// If a pattern matches nothing, or nothing fits.
    pub(crate) fn plan(&self, meter: &dyn Meter) -> anyhow::Result<Found> {
        if let Recomputation::Rule(Policy::Named(_)) = &self.config.recomputation {
            self.segment_names(&self.built(&self.config.precisions[0].policy)?)?;
        }
        self.naming_weights(plan(self, &self.space(), self.config.budget, meter))
    }

    /// The model under `policy`.
    /// # Errors
    /// If it cannot be built, or the weights that it starts from are of another.
    pub(crate) fn built(&self, policy: &precision::Policy) -> anyhow::Result<BuiltModel> {
        self.naming_weights(self.build(policy))
    }

    /// What is wrong with weights to start from says which these are.
    fn naming_weights<T>(&self, result: Result<T>) -> anyhow::Result<T> {
        match (result, &self.config.model.weights) {
            (Err(error @ Error::Models(_)), Some(weights)) => {
                let name = format!("model.weights `{}`", weights.path().display());
                Err(anyhow::Error::from(error).context(name))
            }
            (result, _) => Ok(result?),
        }
    }

    /// That the data fill a batch, and that a state file can be made; removes those of killed runs.
    /// # Errors
    /// Those that do not.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let (batch, n_samples) = (self.config.batch, self.opened.train.n_samples());
        anyhow::ensure!(
            batch <= n_samples,
            "a run of 0 updates: a batch of {batch} is more than the {n_samples} samples"
        );
        if let Some(Place::File { path, .. }) =
            self.config.optimizers.last().map(|optimizer| &optimizer.config.place)
        {
            let folder = path.parent().unwrap_or(path);
            fs::write(path, b"")
                .and_then(|()| fs::remove_file(path))
                .with_context(|| format!("memory.offload_dir `{}`", folder.display()))?;
            scratch::sweep(folder);
        }
        if let Saved::File(folder) = &self.config.saved {
            scratch::sweep(folder);
        }
        Ok(())
    }

    /// What the planner may choose from.
    pub(crate) fn space(&self) -> Space {
        let config = self.config;
        Space {
            batch: config.batch,
            micro_batches: config.micro_batches.clone(),
            policies: config.precisions.iter().map(|p| p.policy.clone()).collect(),
            optimizers: config.optimizers.iter().map(|o| o.config.clone()).collect(),
            recomputation: config.recomputation.clone(),
            saved: config.saved.clone(),
            accum: SUMS,
            gradients: config.gradients,
            prefer: config.prefer.clone(),
            forbid: config.forbid.clone(),
            label_smoothing: config.label_smoothing,
            has_average: config.ema_decay.is_some(),
        }
    }
}

impl Workload for Work<'_> {
    type Model = Model;

    fn build(&self, policy: &precision::Policy) -> Result<BuiltModel> {
        let Opened { channels, n_classes, size, .. } = self.opened;
        let shape = DataShape { channels: *channels, n_classes: *n_classes, size };
        self.config.model.build(policy, self.config.seed, &shape)
    }

    fn batch(&self, policy: &precision::Policy, n_samples: usize) -> Result<Batch> {
        let set = self.opened.train.dataset(policy.compute);
        let mut batches = set.epoch(n_samples, Order::Sequential, Tail::Keep)?;
        Ok(batches.next().expect("an epoch has a batch")?)
    }

    fn batch_bytes(&self, policy: &precision::Policy, n_samples: usize) -> u64 {
        self.opened.train.held_bytes(policy.compute, n_samples)
    }
}

//! What a configuration trains, for the planner and for the run.

use crate::config::{Config, Model, Opened};
use anyhow::Context;
use candle_core::Device;
use std::fs;
use tallow_data::{Batch, Order, Tail};
use tallow_models::Segments;
use tallow_train::{
    Params, Result,
    optim::Place,
    plan::{Built, Recomputation, Space, Workload},
    precision::{self, Masters},
    recompute::{Policy, SegmentCost},
};

/// A configuration and its data.
pub(crate) struct Work<'a> {
    pub(crate) config: &'a Config,
    pub(crate) opened: &'a Opened,
}

impl Work<'_> {
    /// The model's segments and its head.
    /// # Errors
    /// If it cannot be built.
    pub(crate) fn segment_names(&self) -> Result<Vec<String>> {
        let model = self.build(&self.config.precisions[0].policy)?.model;
        let mut names = model.names();
        names.push(model.head_name());
        Ok(names)
    }

    /// That the data fill a batch, and that patterns match.
    /// # Errors
    /// Those that do not.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let (batch, n_samples) = (self.config.batch, self.opened.train.n_samples());
        anyhow::ensure!(
            batch <= n_samples,
            "a run of 0 updates: a batch of {batch} is more than the {n_samples} samples"
        );
        let config = self.config;
        if let Place::File { path, .. } =
            &config.optimizers[config.optimizers.len() - 1].config.place
        {
            let folder = path.parent().unwrap_or(path);
            fs::write(path, b"")
                .and_then(|()| fs::remove_file(path))
                .with_context(|| format!("memory.offload_dir `{}`", folder.display()))?;
        }
        if let Recomputation::Rule(Policy::Named(patterns)) = &self.config.recomputation {
            let names = self.segment_names()?;
            let costs: Vec<_> = names.iter().map(SegmentCost::unmeasured).collect();
            for pattern in patterns {
                let plan = Policy::Named(vec![pattern.clone()]).plan(&costs)?;
                anyhow::ensure!(
                    plan.n_redone() > 0,
                    "memory.recompute: `{pattern}` matches no segment; there are {}",
                    names.join(", ")
                );
            }
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
            accum: tallow_train::accum::AccumDType::F32,
            gradients: config.gradients,
            forbid: config.forbid.clone(),
            label_smoothing: config.label_smoothing,
        }
    }
}

impl Workload for Work<'_> {
    type Model = Box<dyn Segments>;

    fn build(&self, policy: &precision::Policy) -> Result<Built<Box<dyn Segments>>> {
        let params = Params::new(self.config.seed);
        let masters = Masters::new(policy.clone(), params.clone())?;
        let vb = masters.builder(&Device::Cpu);
        let model: Box<dyn Segments> = match &self.config.model {
            Model::ResNet(kind) => {
                let config = kind.config(self.opened.channels, self.opened.n_classes);
                Box::new(config.build(vb)?)
            }
            Model::Gpt2(config) => Box::new(config.build(vb)?),
        };
        Ok(Built { model, masters, buffers: params.buffers() })
    }

    fn batch(&self, policy: &precision::Policy, n_samples: usize) -> Result<Batch> {
        let set = self.opened.train.dataset(policy.compute);
        let mut batches = set.epoch(n_samples, Order::Sequential, Tail::Keep)?;
        Ok(batches.next().expect("an epoch has a batch")?)
    }

    fn batch_bytes(&self, policy: &precision::Policy, n_samples: usize) -> u64 {
        self.opened.train.dataset(policy.compute).batch_bytes(n_samples)
    }
}

//! What a configuration trains, for the planner and for the run.

use crate::config::{Config, Model, Opened};
use candle_core::Device;
use tallow_data::{Batch, Order, Tail};
use tallow_models::Segments;
use tallow_train::{
    Params, Result,
    plan::{Built, Space, Workload},
    precision::{Masters, Policy},
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

    fn build(&self, policy: &Policy) -> Result<Built<Box<dyn Segments>>> {
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

    fn batch(&self, policy: &Policy, n_samples: usize) -> Result<Batch> {
        let set = self.opened.train.dataset(policy.compute);
        let mut batches = set.epoch(n_samples, Order::Sequential, Tail::Keep)?;
        Ok(batches.next().expect("an epoch has a batch")?)
    }

    fn batch_bytes(&self, policy: &Policy, n_samples: usize) -> u64 {
        self.opened.train.dataset(policy.compute).batch_bytes(n_samples)
    }
}

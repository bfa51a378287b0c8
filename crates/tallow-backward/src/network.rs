//! A model with all that it computes with.

use crate::{Passes, Result, Walk, Watch, books::Books};
use candle_core::{Device, Tensor, TensorId, Var, backprop::GradStore};
use candle_nn::VarBuilder;
use std::{collections::HashSet, sync::Arc};
use tallow_memory::{Ledger, Meter, NoMeter, Watermark};
use tallow_precision::{Masters, Policy};
use tallow_tensor::Params;

/// A model with what it computes with, as whoever has built it hands it over.
pub struct Built<M> {
    /// The model.
    pub model: M,
    /// What it took its parameters from.
    pub masters: Masters,
    /// Its running statistics, sorted by name; empty if it has none.
    pub buffers: Vec<(String, Var)>,
}

impl<M> Built<M> {
    /// What `make` builds on `device` from parameters that are drawn by `seed` and computed with under
    /// `policy`.
    /// # Errors
    /// If the policy makes no sense, or those of `make`.
    pub fn new(
        policy: Policy,
        seed: u64,
        device: &Device,
        make: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        let params = Params::new(seed);
        let masters = Masters::new(policy, params.clone())?;
        let model = make(masters.builder(device))?;
        Ok(Self { model, masters, buffers: params.buffers() })
    }
}

/// A model in segments, its parameters and statistics, and who looks at the memory while it runs.
///
/// *Memory:* the parameters, which it shares with the model.
pub struct Network<M> {
    model: M,
    masters: Masters,
    buffers: Vec<(String, Var)>,
    /// Those that the model computes with.
    pub(crate) variables: Arc<HashSet<TensorId>>,
    pub(crate) watch: Watch,
    pub(crate) books: Books,
}

impl<M> Network<M> {
    /// With nobody looking at the memory. A candle model that is not cut into segments is
    /// [`tallow_models::Whole`].
    pub fn new(Built { model, masters, buffers }: Built<M>) -> Self {
        let all = masters.params().into_iter().chain(masters.copies());
        let variables = Arc::new(all.map(|(_, var)| var.as_tensor().id()).collect());
        let watch = Watch::new(Watermark::off(Ledger::new()), &NoMeter);
        Self { model, masters, buffers, variables, watch, books: Books::new(&Ledger::new()) }
    }

    /// Ends walks that pass the mark, between two segments.
    pub fn watch(&mut self, watch: Watch) {
        self.watch = watch;
    }

    /// Enters into `ledger` what walks hold, as the meter of [`Network::watch`] finds it before each
    /// segment and after each segment's backward: the batch, saved activations, gradients, transients.
    pub fn account(&mut self, ledger: &Ledger) {
        self.books = Books::new(ledger);
    }

    /// The batch that the following walks are over: its tensors are entered into the ledger.
    pub fn begin_batch(&self, tensors: &[&Tensor]) {
        self.books.batch(tensors);
    }

    /// A walk over one micro-batch.
    pub fn walk<'a>(&'a self, passes: Passes<'a>) -> Walk<'a, M> {
        Walk::new(self, passes)
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// What the model took its parameters from.
    pub fn masters(&self) -> &Masters {
        &self.masters
    }

    /// What is measured between segments.
    pub fn meter(&self) -> &'static dyn Meter {
        self.watch.meter
    }

    /// Master parameters and running statistics, sorted by name: what a file of weights holds.
    pub fn variables(&self) -> Vec<(String, Var)> {
        let mut all = self.masters.params();
        all.extend(self.buffers.iter().cloned());
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all.dedup_by(|a, b| a.0 == b.0);
        all
    }

    /// Bytes of the master parameters, of the copies that the model computes with, and of the statistics.
    pub fn weights_bytes(&self) -> u64 {
        bytes_of(&self.masters.params()) + bytes_of(&self.buffers) + self.masters.copies_bytes()
    }

    /// Copies of the running statistics, which every forward in training moves.
    ///
    /// *Memory:* that of the statistics.
    /// # Errors
    /// Only candle's own.
    pub fn statistics(&self) -> Result<Vec<Tensor>> {
        Ok(self.buffers.iter().map(|(_, var)| var.copy()).collect::<candle_core::Result<_>>()?)
    }

    /// Puts back what [`Network::statistics`] has copied.
    /// # Errors
    /// Only candle's own.
    pub fn restore(&self, statistics: &[Tensor]) -> Result<()> {
        for ((_, var), before) in self.buffers.iter().zip(statistics) {
            var.set(before)?;
        }
        Ok(())
    }

    /// Gives the masters their gradients; a segment without parameters of theirs has none to give.
    pub(crate) fn gather(&self, grads: &mut GradStore) -> Result<()> {
        match self.masters.gather(grads) {
            Ok(()) | Err(tallow_precision::Error::NoGradients { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Bytes of variables.
pub fn bytes_of(vars: &[(String, Var)]) -> u64 {
    vars.iter().map(|(_, var)| tensor_bytes(var)).sum()
}

pub(crate) fn tensor_bytes(x: &Tensor) -> u64 {
    (x.elem_count() * x.dtype().size_in_bytes()) as u64
}

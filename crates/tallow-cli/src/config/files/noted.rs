//! Loaders whose epochs tell what they left out.

use super::Spent;
use std::sync::{Arc, Mutex, PoisonError};
use tallow_data::{
    Batch, BatchIter, Collate, Cursor, Dataset, Epoch, Loader, Order, Tail, pipeline::Skip,
};

/// Samples that could not be read, in the epochs that have ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct LeftOut {
    pub(crate) n: u64,
    /// What was wrong with the first.
    first: Option<String>,
}

impl LeftOut {
    /// For a person, if there are any; `what` names the samples.
    pub(crate) fn text(&self, what: &str) -> Option<String> {
        let first = self.first.as_ref()?;
        Some(format!("{what} left out: {} over all epochs, the first: {first}", self.n))
    }
}

/// Of epochs in the order of the samples, and of shuffled ones.
#[derive(Debug, Default)]
pub(super) struct Ledger([Mutex<LeftOut>; 2]);

impl Ledger {
    pub(super) fn of(&self, is_shuffled: bool) -> LeftOut {
        self.0[usize::from(is_shuffled)].lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, is_shuffled: bool, epoch: &Epoch<'_>) {
        let ledger = &self.0[usize::from(is_shuffled)];
        let mut left_out = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        left_out.n += epoch.n_skipped();
        if left_out.first.is_none() {
            left_out.first = epoch.skipped().into_iter().next().map(|skip| skip.reason);
        }
    }
}

/// A loader whose epochs tell what they left out.
pub(super) struct Noted<C: Collate> {
    pub(super) loader: Loader<C>,
    pub(super) spent: Arc<Spent>,
}

impl<C: Collate> Dataset for Noted<C> {
    fn n_samples(&self) -> usize {
        Dataset::n_samples(&self.loader)
    }

    fn resume(
        &self,
        batch: usize,
        order: Order,
        tail: Tail,
        cursor: Cursor,
    ) -> tallow_data::Result<Epoch<'_>> {
        let epoch = self.loader.resume(batch, order, tail, cursor)?;
        let is_shuffled = matches!(order, Order::Shuffled { .. });
        Ok(Box::new(NotedEpoch { epoch, is_shuffled, ledger: &self.spent.left_out }))
    }

    fn batch_bytes(&self, n_samples: usize) -> u64 {
        self.loader.batch_bytes(n_samples)
    }
}

struct NotedEpoch<'a> {
    epoch: Epoch<'a>,
    is_shuffled: bool,
    ledger: &'a Ledger,
}

impl Iterator for NotedEpoch<'_> {
    type Item = tallow_data::Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        self.epoch.next()
    }
}

impl BatchIter for NotedEpoch<'_> {
    fn cursor(&self) -> Cursor {
        self.epoch.cursor()
    }

    fn n_skipped(&self) -> u64 {
        self.epoch.n_skipped()
    }

    fn skipped(&self) -> Vec<Skip> {
        self.epoch.skipped()
    }
}

impl Drop for NotedEpoch<'_> {
    fn drop(&mut self) {
        self.ledger.add(self.is_shuffled, &self.epoch);
    }
}

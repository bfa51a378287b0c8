//! Which micro-batches make an update.

use crate::{Error, Result};

/// How the micro-batches of an epoch fall into windows: whole ones, then the rest in a shorter one.
/// A window never reaches into the next epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    n_micro_batches: u64,
    per_window: u64,
}

impl Windows {
    /// Of an epoch of `n_micro_batches`, `per_window` of them an update.
    /// # Errors
    /// If a number is 0.
    pub fn new(n_micro_batches: u64, per_window: u64) -> Result<Self> {
        at_least_one("n_micro_batches", n_micro_batches)?;
        at_least_one("per_window", per_window)?;
        Ok(Self { n_micro_batches, per_window })
    }

    /// Of an epoch of `n_samples` in micro-batches of `micro_batch`, the last one smaller where it
    /// does not divide.
    /// # Errors
    /// If a number is 0.
    pub fn of_samples(n_samples: u64, micro_batch: u64, per_window: u64) -> Result<Self> {
        at_least_one("n_samples", n_samples)?;
        at_least_one("micro_batch", micro_batch)?;
        Self::new(n_samples.div_ceil(micro_batch), per_window)
    }

    /// Micro-batches of an epoch.
    pub fn n_micro_batches(self) -> u64 {
        self.n_micro_batches
    }

    /// Updates of an epoch: the short last window is one too.
    pub fn updates_per_epoch(self) -> u64 {
        self.n_micro_batches.div_ceil(self.per_window)
    }

    /// Updates of a run of `n_epochs` that stops after `max_updates`: the unit of a schedule.
    pub fn n_updates(self, n_epochs: u64, max_updates: Option<u64>) -> u64 {
        let all = n_epochs.saturating_mul(self.updates_per_epoch());
        all.min(max_updates.unwrap_or(u64::MAX))
    }

    /// Micro-batches of each window of one epoch.
    pub fn sizes(self) -> impl Iterator<Item = u64> {
        (0..self.updates_per_epoch()).map(move |window| self.size(window))
    }

    /// Micro-batches of each window of a run: [`Windows::n_updates`] of them.
    pub fn run(self, n_epochs: u64, max_updates: Option<u64>) -> impl Iterator<Item = u64> {
        let per_epoch = self.updates_per_epoch();
        (0..self.n_updates(n_epochs, max_updates)).map(move |update| self.size(update % per_epoch))
    }

    fn size(self, window: u64) -> u64 {
        self.per_window.min(self.n_micro_batches - window * self.per_window)
    }
}

fn at_least_one(name: &'static str, n: u64) -> Result<()> {
    if n == 0 {
        return Err(Error::Setting { name, value: 0.0, expected: "1 or more" });
    }
    Ok(())
}

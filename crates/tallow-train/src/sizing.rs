//! The size of micro-batches while training goes on.

use crate::{Error, Result};
use std::time::Instant;
use tallow_memory::batch::{Controller, ControllerConfig, Decision};

/// Who decides on the size of micro-batches. The batch, its division and the schedule stay: only the
/// split changes.
pub struct Sizing {
    /// Moves the size with the peak of each update.
    pub controller: Controller,
    /// What the peak is a share of.
    pub limit_bytes: u64,
    /// Seconds, from any start.
    pub clock: Box<dyn Fn() -> f64 + Send>,
}

impl Sizing {
    /// Every micro-batch has `micro_batch` samples; an update that runs out of memory fails.
    pub fn fixed(micro_batch: usize) -> Self {
        let controller = Controller::new(ControllerConfig::fixed(micro_batch.max(1)));
        Self::of(controller.expect("a size of at least 1"), u64::MAX)
    }

    /// `controller` under `limit_bytes`, by the system's clock.
    pub fn of(controller: Controller, limit_bytes: u64) -> Self {
        let start = Instant::now();
        Self { controller, limit_bytes, clock: Box::new(move || start.elapsed().as_secs_f64()) }
    }

    /// Samples of a micro-batch.
    pub(crate) fn micro_batch(&self) -> usize {
        self.controller.piece_items()
    }

    /// After an update that held `used_bytes` at its peak.
    pub(crate) fn observe(&mut self, used_bytes: u64) -> Result<()> {
        let now = (self.clock)();
        match self.controller.observe(now, used_bytes, self.limit_bytes)? {
            Decision::Stay | Decision::Halve { .. } | Decision::Double { .. } => Ok(()),
        }
    }

    /// After an update that ran out of memory: a smaller size, or `error` if there is none.
    pub(crate) fn shrink(&mut self, error: tallow_memory::Error) -> Result<()> {
        match self.controller.out_of_memory((self.clock)())? {
            Decision::Halve { .. } | Decision::Double { .. } => Ok(()),
            Decision::Stay => Err(Error::Memory(error)),
        }
    }
}

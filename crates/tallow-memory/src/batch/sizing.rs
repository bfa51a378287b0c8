//! A controller with its limit and its clock.

use super::{Controller, ControllerConfig, Decision};
use crate::Error;
use std::time::Instant;

/// Who decides on the size of micro-batches while training goes on. The batch, its division and the
/// schedule stay: only the split changes.
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
    pub fn micro_batch(&self) -> usize {
        self.controller.piece_items()
    }

    /// After an update that held `used_bytes` at its peak: the next may be cut otherwise.
    ///
    /// # Errors
    /// [`Error::BadValue`] for a clock that is not finite or a limit of 0.
    pub fn observe(&mut self, used_bytes: u64) -> Result<(), Error> {
        let now = (self.clock)();
        match self.controller.observe(now, used_bytes, self.limit_bytes)? {
            Decision::Stay | Decision::Halve { .. } | Decision::Double { .. } => Ok(()),
        }
    }

    /// After an update that ran out of memory, as `error` says: a smaller size.
    ///
    /// # Errors
    /// `error` where there is no smaller size; [`Error::BadValue`] for a clock that is not finite.
    pub fn shrink(&mut self, error: Error) -> Result<(), Error> {
        match self.controller.out_of_memory((self.clock)())? {
            Decision::Halve { .. } | Decision::Double { .. } => Ok(()),
            Decision::Stay => Err(error),
        }
    }
}

//! Looks at the memory between two segments.

use crate::{Error, Result};
use tallow_memory::{Meter, Watermark};

/// Looks at the memory between segments, so that a step ends with an error before the process ends.
pub struct Watch {
    /// The mark, and what the bytes are for.
    pub guard: Watermark,
    /// What is measured.
    pub meter: &'static dyn Meter,
    /// Called at every look, when the ledger of [`crate::Network::account`] is up to date: to draw
    /// memory over time, or to end the update before it is made.
    pub tick: Box<dyn Fn() -> Flow + Send + Sync>,
}

/// Whether a run goes on.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// It does.
    Go,
    /// It ends here.
    Stop,
}

impl Watch {
    /// Without anything called.
    pub fn new(guard: Watermark, meter: &'static dyn Meter) -> Self {
        Self { guard, meter, tick: Box::new(|| Flow::Go) }
    }

    /// `enter` brings the ledger up to what is live now.
    pub(crate) fn check(&self, enter: impl FnOnce(u64)) -> Result<()> {
        let live_bytes = self.meter.current_bytes();
        enter(live_bytes);
        match (self.tick)() {
            Flow::Go => Ok(self.guard.check_at(live_bytes, self.meter)?),
            Flow::Stop => Err(Error::Interrupted),
        }
    }
}

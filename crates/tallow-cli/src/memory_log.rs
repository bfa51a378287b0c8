//! Memory over the run: the file `memory.jsonl`, and a word if it grows.

use crate::{report, signals::Signals, view::say};
use anyhow::Result;
use serde_json::json;
use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};
use tallow_memory::{
    Ledger, Meter,
    leak::{Growth, LeakCheck},
    timeline::Timeline,
};
use tallow_run::Event;
use tallow_train::Flow;

/// Lines of the file at most.
const N_SLOTS: usize = 512;
const LOG: &str = "memory.jsonl";

/// Live bytes by category at the checkpoints of updates; of many, the highest.
pub(crate) struct MemoryLog {
    start: Instant,
    timeline: Arc<Mutex<Timeline>>,
}

impl MemoryLog {
    /// An empty one, which takes all of its memory now.
    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), timeline: Arc::new(Mutex::new(Timeline::new(N_SLOTS))) }
    }

    /// Records one moment at each call, and says what `signals` say.
    pub(crate) fn ticker(
        &self,
        ledger: Ledger,
        meter: &'static dyn Meter,
        signals: Signals,
    ) -> Box<dyn Fn() -> Flow + Send + Sync> {
        let (start, timeline) = (self.start, Arc::clone(&self.timeline));
        Box::new(move || {
            let mut timeline = timeline.lock().unwrap_or_else(PoisonError::into_inner);
            timeline.record(start.elapsed().as_secs_f64(), meter, &ledger);
            signals.flow()
        })
    }

    /// Writes `memory.jsonl`: a line a moment, its time, and bytes by category.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        for sample in timeline.samples() {
            let mut line = json!({
                "elapsed_secs": sample.elapsed_secs,
                "live_bytes": sample.live_bytes,
            });
            for (category, bytes) in sample.terms.iter() {
                line[report::bytes_key(category)] = json!(bytes);
            }
            text += &format!("{line}\n");
        }
        report::write_text(folder, LOG, &text)
    }
}

/// Says once that live bytes grow from update to update.
pub(crate) struct LeakWatch {
    check: LeakCheck,
    has_said: bool,
}

impl LeakWatch {
    /// Growth below this is bookkeeping.
    const TOLERANCE_BYTES: u64 = 4096;

    /// From the sixth update on, over thirty.
    pub(crate) fn new() -> Self {
        let check = LeakCheck::new(5, 30, Self::TOLERANCE_BYTES).expect("a multiple of three");
        Self { check, has_said: false }
    }

    /// Looks at the memory after an update.
    pub(crate) fn show(&mut self, event: &Event, meter: &dyn Meter) {
        let Event::Updated { n_windows, .. } = event else { return };
        if let Growth::Growing { bytes_per_step } = self.check.observe(meter.current_bytes())
            && !self.has_said
        {
            self.has_said = true;
            say!(
                "memory grows by {bytes_per_step} bytes an update since update {}",
                n_windows - 30
            );
        }
    }
}

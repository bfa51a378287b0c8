//! Ctrl-C and its kin.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
};
use tallow_train::Flow;

/// Which signal has asked the run to end, if one has. The second ends the process at once, and so does the
/// first before there is something to save.
#[derive(Clone, Default)]
pub(crate) struct Signals {
    number: Arc<AtomicUsize>,
    /// Whether the next one ends the process.
    at_once: Arc<AtomicBool>,
}

impl Signals {
    /// Listens from now on: to end the process at once.
    ///
    /// # Errors
    /// If the system refuses, which no test can make it do for these two.
    pub(crate) fn listen() -> Result<Self> {
        let signals = Self::default();
        signals.at_once.store(true, Relaxed);
        for signal in [SIGINT, SIGTERM] {
            let (code, number) = (128 + signal, Arc::clone(&signals.number));
            let at_once = || Arc::clone(&signals.at_once);
            // In this order: the first sets the flag after it was looked at.
            signal_hook::flag::register_conditional_shutdown(signal, code, at_once())
                .and_then(|_| signal_hook::flag::register(signal, at_once()))
                .and_then(|_| signal_hook::flag::register_usize(signal, number, signal as usize))
                .context("listening for signals")?;
        }
        Ok(signals)
    }

    /// There is something to save from now on: the first signal waits for that.
    pub(crate) fn save_first(&self) {
        self.at_once.store(false, Relaxed);
    }

    /// Whether to go on.
    pub(crate) fn flow(&self) -> Flow {
        match self.number.load(Relaxed) {
            0 => Flow::Go,
            _ => Flow::Stop,
        }
    }

    /// The exit code of a process that a signal ended; 0 if none did.
    pub(crate) fn exit_code(&self) -> u8 {
        match self.number.load(Relaxed) {
            0 => 0,
            number => 128 + number as u8,
        }
    }
}

//! Ctrl-C and its kin.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
};
use tallow_train::Flow;

/// Which signal has asked the run to end, if one has. The second ends the process at once.
#[derive(Clone, Default)]
pub(crate) struct Signals {
    number: Arc<AtomicUsize>,
}

impl Signals {
    /// Listens from now on.
    ///
    /// # Errors
    /// If the system refuses, which no test can make it do for these two.
    pub(crate) fn listen() -> Result<Self> {
        let signals = Self::default();
        for signal in [SIGINT, SIGTERM] {
            let asked = Arc::new(AtomicBool::new(false));
            let (code, number) = (128 + signal, Arc::clone(&signals.number));
            // In this order: the first sets the flag after it was looked at.
            signal_hook::flag::register_conditional_shutdown(signal, code, Arc::clone(&asked))
                .and_then(|_| signal_hook::flag::register(signal, asked))
                .and_then(|_| signal_hook::flag::register_usize(signal, number, signal as usize))
                .context("listening for signals")?;
        }
        Ok(signals)
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

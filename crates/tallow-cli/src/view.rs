//! What a person sees of a run.

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{ErrorKind, IsTerminal, Write};
use tallow_memory::Meter;
use tallow_run::{Event, Outcome, Progress};
use tallow_train::Evaluation;

/// [`print_line`] with a format.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::view::print_line(&format!($($text)*))
    };
}
pub(crate) use say;

/// [`answer_line`] with a format.
macro_rules! answer {
    ($($text:tt)*) => {
        $crate::view::answer_line(&format!($($text)*))
    };
}
pub(crate) use answer;

/// A progress bar on a terminal, a line an epoch elsewhere.
pub(crate) struct View<'a> {
    bar: Option<ProgressBar>,
    meter: &'a dyn Meter,
    budget: Option<u64>,
    epochs: u64,
    /// Sum of training losses and samples of the epoch so far.
    epoch: (f64, u64),
}

impl<'a> View<'a> {
    /// For a run of `n_updates` in `epochs` under `budget`, if there is one.
    pub(crate) fn new(
        n_updates: u64,
        epochs: u64,
        budget: Option<u64>,
        meter: &'a dyn Meter,
    ) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = "{bar:30} {pos}/{len} updates, {msg}, {eta} left";
            let style = ProgressStyle::with_template(style).expect("a fixed template");
            ProgressBar::new(n_updates).with_style(style)
        });
        Self { bar, meter, budget, epochs, epoch: (0.0, 0) }
    }

    /// Shows one event, after which the run has come as far as `progress`.
    pub(crate) fn show(&mut self, event: &Event, progress: &Progress) {
        match event {
            Event::Updated { n_windows, update } => {
                self.epoch.0 += update.loss * update.n_samples as f64;
                self.epoch.1 += update.n_samples;
                if let Some(bar) = &self.bar {
                    let per_sec = progress.n_samples as f64 / progress.training.as_secs_f64();
                    let bytes = (self.meter.current_bytes(), self.meter.peak_bytes());
                    bar.set_message(message(update.loss, per_sec, bytes, self.budget));
                    bar.set_position(*n_windows);
                }
            }
            Event::Evaluated { epoch, evaluation } => {
                let (loss_sum, n_samples) = std::mem::take(&mut self.epoch);
                // A run that was over when it was taken up again has learnt from nothing.
                let loss = match n_samples {
                    0 => String::new(),
                    n => format!("loss {:.4}, ", loss_sum / n as f64),
                };
                let line = format!(
                    "epoch {epoch}/{}: {loss}held-out loss {:.4}, accuracy {:.2} %, peak {}",
                    self.epochs,
                    evaluation.loss,
                    100.0 * evaluation.accuracy,
                    mib(self.meter.peak_bytes()),
                );
                match &self.bar {
                    Some(bar) => bar.suspend(|| print_line(&line)),
                    None => print_line(&line),
                }
            }
            Event::Stopped => {}
        }
    }

    /// Takes the bar away.
    pub(crate) fn stop(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Ends the bar and sums the run up.
    pub(crate) fn finish(
        self,
        outcome: &Outcome,
        held_out: &Evaluation,
        peak_bytes: u64,
        rss_peak_bytes: Option<u64>,
        budget_bytes: Option<u64>,
    ) {
        self.stop();
        let secs = outcome.progress.training.as_secs_f64();
        say!(
            "{} updates in {secs:.1} s ({:.0} samples/s)",
            outcome.n_updates,
            outcome.progress.n_samples as f64 / secs,
        );
        if outcome.n_skipped > 0 {
            say!("{} updates skipped: gradients overflowed or were too large", outcome.n_skipped);
        }
        say!(
            "held-out loss {:.6}, accuracy {:.2} % of {} samples",
            held_out.loss,
            100.0 * held_out.accuracy,
            held_out.n_samples,
        );
        let resident = rss_peak_bytes.map_or("unknown".to_string(), mib);
        let budget = budget_bytes.map_or(String::new(), |b| format!(" of a budget of {}", mib(b)));
        say!("peak {} counted ({peak_bytes} bytes){budget}, {resident} resident", mib(peak_bytes));
    }
}

/// What the bar says of an update: bytes are those live now, and the most so far.
fn message(loss: f64, per_sec: f64, (live, peak): (u64, u64), budget: Option<u64>) -> String {
    let of = budget.map_or(String::new(), |budget| format!(" of {}", mib(budget)));
    format!("loss {loss:.4}, {per_sec:.1} samples/s, {} now, peak {}{of}", mib(live), mib(peak))
}

/// A line to standard output. A reader that has gone away does not end a run: its report is still
/// written.
pub(crate) fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// A line of what was asked for, to standard output. A reader that has gone away wants no more.
///
/// # Errors
/// If it cannot be written: then there is no answer.
pub(crate) fn answer_line(line: &str) -> Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("standard output")
        }
        _ => Ok(()),
    }
}

/// A line to standard error: what is no part of an answer. If that is gone, the exit code has to do.
pub(crate) fn note_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Bytes as a person reads them.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_says_how_fast_and_in_how_much() {
        let bytes = (3 << 20, 5 << 20);
        assert_eq!(
            message(1.23456, 78.91, bytes, Some(8 << 20)),
            "loss 1.2346, 78.9 samples/s, 3.0 MiB now, peak 5.0 MiB of 8.0 MiB"
        );
        assert!(message(1.0, 2.0, bytes, None).ends_with("peak 5.0 MiB"));
    }
}

//! `metrics.jsonl`: a line an update and a line an evaluation.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};
use tallow_memory::Meter;
use tallow_run::{Event, Progress};
use tallow_train::{Applied, Skip};

const METRICS: &str = "metrics.jsonl";

/// The open file.
pub(crate) struct Metrics {
    path: PathBuf,
    file: File,
    /// Of the update that a run goes on after.
    newest: Vec<Value>,
}

/// What a line says beside what happened.
pub(crate) struct Moment<'a> {
    pub(crate) progress: &'a Progress,
    pub(crate) n_windows: u64,
    pub(crate) learning_rate: f64,
    pub(crate) loss_scale: f64,
    pub(crate) meter: &'a dyn Meter,
}

impl Metrics {
    /// Opens the file in `folder` to go on after `n_windows` updates and the judgement at epoch
    /// `epoch`: what a run that was killed wrote after its checkpoint goes.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub(crate) fn open(folder: &Path, n_windows: u64, epoch: u64) -> Result<Self> {
        let path = folder.join(METRICS);
        let name = || format!("`{}`", path.display());
        let old = match n_windows {
            0 => String::new(),
            _ => match fs::read_to_string(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
                text => text.with_context(name)?,
            },
        };
        let number = |line: &Value, key: &str| line[key].as_u64().unwrap_or(u64::MAX);
        let is_before = |line: &Value| {
            let is_judgement = line.get("held_out_loss").is_some();
            number(line, "update") <= n_windows && (!is_judgement || number(line, "epoch") <= epoch)
        };
        let mut newest = Vec::new();
        let mut kept = String::new();
        for text in old.lines() {
            let Ok(line) = serde_json::from_str(text) else { continue };
            if is_before(&line) {
                kept += &format!("{text}\n");
                if number(&line, "update") == n_windows {
                    newest.push(line);
                }
            }
        }
        fs::write(&path, kept).with_context(name)?;
        let file = OpenOptions::new().append(true).open(&path).with_context(name)?;
        Ok(Self { path, file, newest })
    }

    /// The lines of the last update that stay.
    pub(crate) fn newest(&self) -> &[Value] {
        &self.newest
    }

    /// Adds a line.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn write(&mut self, line: &Value) -> Result<()> {
        // One call: a kill leaves whole lines, or one that is cut and is left out later.
        let written = self.file.write_all(format!("{line}\n").as_bytes());
        written.with_context(|| format!("`{}`", self.path.display()))
    }
}

/// What happened as a line; `None` where nothing did.
pub(crate) fn line(event: &Event, moment: &Moment) -> Option<Value> {
    let Moment { progress, n_windows, learning_rate, loss_scale, meter } = moment;
    match event {
        Event::Updated { update, .. } => Some(json!({
            "update": n_windows,
            "epoch": progress.cursor.epoch,
            "samples": progress.n_samples,
            "elapsed_secs": progress.training.as_secs_f64(),
            "loss": update.loss,
            "applied": update.outcome == Applied::Yes,
            "skipped": skipped(&update.outcome),
            "micro_batches": update.n_micro_batches,
            "learning_rate": learning_rate,
            "loss_scale": loss_scale,
            "live_bytes": meter.current_bytes(),
            "peak_bytes": meter.peak_bytes(),
        })),
        Event::Evaluated { epoch, evaluation } => Some(json!({
            "update": n_windows,
            "epoch": epoch,
            "samples": progress.n_samples,
            "elapsed_secs": progress.training.as_secs_f64(),
            "held_out_loss": evaluation.loss,
            "accuracy": evaluation.accuracy,
        })),
        Event::Stopped => None,
    }
}

fn skipped(outcome: &Applied) -> Value {
    match outcome {
        Applied::Yes => Value::Null,
        Applied::Skipped(Skip::Overflow { name }) => json!({ "overflow": name }),
        Applied::Skipped(Skip::Norm { norm, limit }) => json!({ "norm": norm, "limit": limit }),
    }
}

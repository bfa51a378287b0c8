//! PyTorch on the same work, if there is one.

use super::binary::output_of;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

const SCRIPT: &str = include_str!("../../python/torch_step.py");
const READ_SCRIPT: &str = include_str!("../../python/torch_data.py");

/// A Python that has torch.
pub(super) struct Torch {
    python: PathBuf,
}

impl Torch {
    /// The one that `python` has.
    /// # Errors
    /// Why there is none, in a few words.
    pub(super) fn of(python: Option<&Path>) -> Result<Self, String> {
        let Some(python) = python else { return Err("no --python was given".to_string()) };
        let found = output_of(Command::new(python).args(["-c", "import torch"]));
        found.map_err(|error| format!("--python `{}`: {error:#}", python.display()))?;
        Ok(Self { python: python.to_path_buf() })
    }

    /// A process of `script` with as many threads. Its allocator keeps what it has, so that a result
    /// taken anew is not paid for with page faults.
    pub(super) fn command(&self, script: &str, n_threads: &Value) -> Command {
        let mut command = Command::new(&self.python);
        command.args(["-u", "-c", script]).env("OMP_NUM_THREADS", n_threads.to_string());
        command.env("MALLOC_MMAP_MAX_", "0").env("MALLOC_TRIM_THRESHOLD_", "-1");
        command
    }

    /// A few steps of `work` in `modes`, as the script reports them.
    /// # Errors
    /// What it complained about.
    pub(super) fn train(&self, work: &Value, modes: &[&str]) -> Result<Value> {
        let mut work = work.clone();
        work["modes"] = json!(modes);
        let mut report = self.report(SCRIPT, &work)?;
        report["precision"] = json!(if modes.contains(&"bf16") { "bf16" } else { "f32" });
        Ok(report)
    }

    /// The loss of the batch of `work` in f32, in pieces of `micro_batch` samples.
    /// # Errors
    /// What the script complained about, or that it said nothing.
    pub(super) fn first_loss(&self, work: &Value, micro_batch: u64) -> Result<f64> {
        let mut work = work.clone();
        work["modes"] = json!(["fp32"]);
        work["micro_batch"] = json!(micro_batch);
        self.report(SCRIPT, &work)?["first_loss"].as_f64().context("torch gave no loss")
    }

    /// An epoch of the files in `work`, as the script reports it.
    /// # Errors
    /// What it complained about.
    pub(super) fn read(&self, work: &Value) -> Result<Value> {
        self.report(READ_SCRIPT, work)
    }

    fn report(&self, script: &str, work: &Value) -> Result<Value> {
        let mut command = Command::new(&self.python);
        let output = output_of(command.args(["-c", script, &work.to_string()]))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.trim().lines().last().context("torch printed nothing")?;
        serde_json::from_str(line).with_context(|| line.to_string())
    }
}

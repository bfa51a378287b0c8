//! What a run leaves behind.

use anyhow::{Context, Result};
use serde::Serialize;
use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};
use tallow_memory::{Category, Terms};

/// `report.json`. A field is `null` where this version has nothing to say.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// The run: its data set and model.
    pub(crate) name: String,
    /// The model.
    pub(crate) model: String,
    /// Trainable elements.
    pub(crate) params: u64,
    /// Samples an update.
    pub(crate) batch: u64,
    /// Samples of a micro-batch.
    pub(crate) micro_batch: u64,
    /// Height, width of the images; or tokens of a sequence.
    pub(crate) size: Vec<usize>,
    /// Compute dtype.
    pub(crate) precision: String,
    /// Recomputation policy.
    pub(crate) recompute: String,
    /// Optimizer.
    pub(crate) optimizer: String,
    /// Bytes of the optimizer's state.
    pub(crate) optimizer_state_bytes: u64,
    /// Of these, what is in memory.
    pub(crate) optimizer_resident_bytes: u64,
    /// How gradients reach the optimizer.
    pub(crate) gradients: String,
    /// Seed of weights and order.
    pub(crate) seed: u64,
    /// Updates made.
    pub(crate) updates: u64,
    /// The counting allocator's high-water mark over the whole process.
    pub(crate) peak_bytes: u64,
    /// What was foreseen.
    pub(crate) predicted_peak_bytes: Option<u64>,
    /// What was allowed.
    pub(crate) budget_bytes: Option<u64>,
    /// The system's resident peak.
    pub(crate) rss_peak_bytes: Option<u64>,
    /// Seconds an update, evaluation excluded, and the first update too where there are others.
    pub(crate) secs_per_step: f64,
    /// Training samples a second.
    pub(crate) samples_per_sec: f64,
    /// Mean loss over the held-out images.
    pub(crate) loss: f64,
    /// Mean training loss of the first batch.
    pub(crate) first_loss: f64,
    /// Mean training loss of the last batch.
    pub(crate) train_loss: f64,
    /// Share of held-out images classified right.
    pub(crate) accuracy: f64,
    /// Updates skipped for overflow.
    pub(crate) skipped_steps: u64,
    /// How often a sample to learn from could not be read and was left out, since this process began.
    pub(crate) skipped_samples: u64,
}

const REPORT: &str = "report.json";

/// Where this process writes a file before it takes its name.
fn part(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.{}.part", std::process::id()))
}

/// A category as a key of JSON.
pub(crate) fn bytes_key(category: Category) -> String {
    format!("{}_bytes", category.name().replace(' ', "_"))
}

/// Bytes by category.
pub(crate) fn by_category(terms: &Terms) -> serde_json::Map<String, serde_json::Value> {
    terms.iter().map(|(category, bytes)| (bytes_key(category), bytes.into())).collect()
}

/// Sees that the folder can be written before the run.
///
/// # Errors
/// If it cannot.
pub(crate) fn prepare(folder: &Path) -> Result<()> {
    let path = part(folder, REPORT);
    fs::write(&path, b"").with_context(|| format!("`{}`", path.display()))?;
    fs::remove_file(&path).with_context(|| format!("`{}`", path.display()))
}

/// Removes the report of an earlier run, which would pass for this one's if this one failed.
///
/// # Errors
/// If something that is no file stands in its way.
pub(crate) fn forget(folder: &Path) -> Result<()> {
    let path = folder.join(REPORT);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("`{}`", path.display()))
        }
        _ => Ok(()),
    }
}

/// Writes `report.json` whole or not at all.
///
/// # Errors
/// If the folder cannot be written.
pub(crate) fn write(folder: &Path, report: &Report) -> Result<()> {
    write_text(folder, REPORT, &(serde_json::to_string_pretty(report)? + "\n"))
}

/// Writes a file whole or not at all.
///
/// # Errors
/// If the folder cannot be written.
pub(crate) fn write_text(folder: &Path, name: &str, text: &str) -> Result<()> {
    let (path, part) = (folder.join(name), part(folder, name));
    fs::write(&part, text).with_context(|| format!("`{}`", part.display()))?;
    fs::rename(&part, &path).with_context(|| format!("`{}`", path.display()))
}

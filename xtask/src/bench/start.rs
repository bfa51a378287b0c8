//! That rivals do the same work: weights and a batch that all begin with, and what the first loss of
//! each must be.

use super::{
    binary::{built, output_of},
    torch::Torch,
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::PathBuf, process::Command};

/// How far rounding takes a first loss from PyTorch's in f32, as a share of it.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) f32: f64,
    pub(super) bf16: f64,
}

/// What every mode begins with; the files go with this.
pub(super) struct Start {
    folder: PathBuf,
    /// The work, and where these files are.
    work: Value,
    bounds: Bounds,
    /// PyTorch's losses of the batch, by samples of a micro-batch.
    losses: BTreeMap<u64, f64>,
}

impl Start {
    /// Writes weights and a batch of `work`.
    /// # Errors
    /// If they cannot be made or written.
    pub(super) fn make(work: &Value, bounds: Bounds) -> Result<Self> {
        let folder =
            std::env::temp_dir().join(format!("tallow-bench-start-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let mut work = work.clone();
        work["start"] = json!(folder);
        let start = Self { folder, work, bounds, losses: BTreeMap::new() };
        let mut command = Command::new(built("start")?);
        output_of(command.arg(start.work.to_string()).arg(&start.folder))?;
        Ok(start)
    }

    /// The work, as scripts and the binaries of `benches` take it.
    pub(super) fn work(&self) -> &Value {
        &self.work
    }

    /// tallow's settings beside the work's.
    pub(super) fn settings(&self) -> Vec<String> {
        vec![format!("model.weights={}", self.folder.join("weights.safetensors").display())]
    }

    /// How far the first loss of a mode is from PyTorch's in f32 on the same micro-batches, as a
    /// share of it.
    /// # Errors
    /// If it is farther than rounding takes it: then the mode did other work.
    pub(super) fn off(&mut self, torch: &Torch, report: &Value) -> Result<f64> {
        let micro_batch = report["micro_batch"].as_u64().context("no micro-batch was reported")?;
        let wanted = match self.losses.get(&micro_batch) {
            Some(&loss) => loss,
            None => {
                let loss = torch.first_loss(&self.work, micro_batch)?;
                self.losses.insert(micro_batch, loss);
                loss
            }
        };
        off(report, wanted, self.bounds)
    }
}

impl Drop for Start {
    fn drop(&mut self) {
        // Another run makes its own.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn off(report: &Value, wanted: f64, bounds: Bounds) -> Result<f64> {
    let found = report["first_loss"].as_f64().context("no first loss was reported")?;
    let bound = if report["precision"] == "f32" { bounds.f32 } else { bounds.bf16 };
    let off = (found - wanted).abs() / wanted.abs();
    ensure!(
        off <= bound,
        "other work: the loss of step 1 is {found}, PyTorch's is {wanted}; off by {off:.1e}, {bound:.1e} \
         is the most"
    );
    Ok(off)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_near_or_it_is_other_work() {
        let bounds = Bounds { f32: 1e-5, bf16: 0.01 };
        let report =
            |precision: &str, loss: f64| json!({"precision": precision, "first_loss": loss});
        let near = off(&report("f32", 7.000_035), 7.0, bounds).expect("near");
        assert!((near - 5e-6).abs() < 1e-9, "{near}");
        assert!(off(&report("bf16", 7.06), 7.0, bounds).is_ok());
        for other in
            [report("f32", 7.0001), report("bf16", 7.08), report("f32", f64::NAN), json!({})]
        {
            assert!(off(&other, 7.0, bounds).is_err(), "{other}");
        }
    }
}

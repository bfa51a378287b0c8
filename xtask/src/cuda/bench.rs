//! `cargo xtask cuda-bench`: operations checked, and training steps measured, on a GPU.

use super::build::Built;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{path::PathBuf, process::Command};

/// Options of `cuda-bench`.
#[derive(clap::Args)]
pub(crate) struct CudaBench {
    /// Steps of each row.
    #[arg(long, default_value_t = 10)]
    steps: u64,
    /// Also write one JSON object a row to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only build, which needs no GPU, and put what is run, and this program, into this folder: for a
    /// machine that has a GPU and no compiler.
    #[arg(long, value_name = "DIR", conflicts_with = "carried")]
    build_only: Option<PathBuf>,
    /// Build nothing: run what --build-only put into this folder. The loader must find the toolkit's
    /// libraries (those that PyTorch brings along will do).
    #[arg(long, value_name = "DIR")]
    carried: Option<PathBuf>,
}

/// Builds with the feature `cuda`, checks the operations against the CPU, and measures a GPT and a
/// ResNet-50; false if a check or a row failed.
/// # Errors
/// If there is no GPU, or what is there cannot be built for.
pub(crate) fn bench(options: &CudaBench) -> Result<bool> {
    if let Some(folder) = &options.build_only {
        Built::here()?.carry(folder)?;
        println!("there, run in a copy of {}: ./xtask cuda-bench --carried .", folder.display());
        return Ok(true);
    }
    println!("{}", gpu()?);
    let built = match &options.carried {
        Some(folder) => Built::carried(folder)?,
        None => Built::here()?,
    };
    let env = || built.env.iter().map(|(name, value)| (name, value));
    let checked = Command::new(&built.tests).envs(env()).status();
    let checked = checked.with_context(|| built.tests.display().to_string())?.success();
    let mut rows = Vec::new();
    println!(
        "| model | precision | recompute | s/step | peak MiB, the driver's | loss of step 1 |"
    );
    println!("|---|---|---|---|---|---|");
    for work in works(options.steps) {
        let mut command = Command::new(&built.steps);
        let output = command.arg(work.to_string()).envs(env()).output();
        let output = output.with_context(|| built.steps.display().to_string())?;
        let row: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        let what = format!(
            "| {} | {} | {}",
            text(&work["model"]),
            text(&work["precision"]),
            work["recompute"]
        );
        match &row {
            Some(row) => println!("{what} | {} |", cells(row)),
            None => {
                let complaint = String::from_utf8_lossy(&output.stderr);
                let last = complaint.trim().lines().last().unwrap_or_default().to_string();
                println!("{what} | did not run: {last} | | |");
            }
        }
        rows.push(row);
    }
    if let Some(path) = &options.json {
        let lines = rows.iter().flatten().map(|row| format!("{row}\n"));
        std::fs::write(path, lines.collect::<String>())
            .with_context(|| path.display().to_string())?;
    }
    Ok(checked && rows.iter().all(Option::is_some))
}

/// What the driver says there is.
fn gpu() -> Result<String> {
    let query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"];
    let output = Command::new("nvidia-smi").args(query).output();
    let output = output.context("no GPU to measure: `nvidia-smi` is not here")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let first = text.lines().next().unwrap_or_default().trim().to_string();
    ensure!(
        output.status.success() && !first.is_empty(),
        "no GPU to measure: nvidia-smi lists none"
    );
    Ok(first)
}

/// The GPT and the ResNet-50 of the benchmarks on the CPU, in each precision, kept and recomputed.
fn works(steps: u64) -> Vec<Value> {
    let gpt = json!({
        "model": "gpt", "vocab": 50257, "dim": 384, "layers": 6, "heads": 6, "context": 1024,
        "batch": 8, "size": 512,
    });
    let resnet = json!({"model": "resnet50", "batch": 32, "size": 224});
    let mut works = Vec::new();
    for model in [gpt, resnet] {
        for (precision, recompute) in [("f32", false), ("bf16", false), ("bf16", true)] {
            let mut work = model.clone();
            work["precision"] = json!(precision);
            work["recompute"] = json!(recompute);
            work["steps"] = json!(steps);
            works.push(work);
        }
    }
    works
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("-")
}

fn cells(row: &Value) -> String {
    let number = |value: &Value, digits: usize, unit: f64| {
        value.as_f64().map_or("-".to_string(), |x| format!("{:.digits$}", x / unit))
    };
    [
        number(&row["secs_per_step"], 4, 1.0),
        number(&row["peak_bytes"], 1, f64::from(1 << 20)),
        number(&row["losses"][0], 4, 1.0),
    ]
    .join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn works_are_both_models_in_each_mode() {
        let works = works(3);
        assert_eq!(works.len(), 6);
        assert!(works.iter().all(|work| work["steps"] == 3));
        assert_eq!(cells(&json!({"secs_per_step": 0.5, "losses": [2.25]})), "0.5000 | - | 2.2500");
    }
}

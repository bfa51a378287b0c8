//! Benchmarks: each mode in its own process, a table for people, a JSON object a row for machines.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

/// What can be measured.
#[derive(clap::Subcommand)]
pub(crate) enum Bench {
    /// Held-out accuracy of the digits model in each precision and optimizer format.
    Accuracy(Accuracy),
}

/// Options of `bench accuracy`.
#[derive(clap::Args)]
pub(crate) struct Accuracy {
    /// Runs of each mode, with seeds 0, 1, ...
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Epochs of each run.
    #[arg(long, default_value_t = 5)]
    epochs: u64,
    /// Only the modes whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// One update of each mode: that the rows run at all.
    #[arg(long)]
    quick: bool,
    /// Also write one JSON object a run to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The name of a mode and the settings that make it.
type Mode = (&'static str, &'static [&'static str]);

const MODES: [Mode; 8] = [
    ("f32", &[]),
    ("bf16", &["precision.compute=bf16"]),
    ("f16, dynamic loss scale", &["precision.compute=f16", "precision.loss_scale=dynamic"]),
    ("fp8-stored weights", &["precision.compute=fp8"]),
    ("bf16 moments", &["optimizer.state=bf16"]),
    ("8-bit AdamW", &["optimizer.state=8bit"]),
    ("bf16 weights, stochastic rounding", &["precision.compute=bf16", "precision.masters=false"]),
    (
        "bf16, 8-bit AdamW, accumulate 4",
        &["precision.compute=bf16", "optimizer.state=8bit", "train.accumulate=4"],
    ),
];

/// Runs one benchmark; false if a row failed to run, never because it was slow.
pub(crate) fn run(bench: &Bench) -> Result<bool> {
    match bench {
        Bench::Accuracy(options) => accuracy(options),
    }
}

fn accuracy(options: &Accuracy) -> Result<bool> {
    let binary = build()?;
    let mut json = options.json.as_deref().map(File::create).transpose()?;
    let seeds = if options.quick { 1 } else { options.seeds };
    ensure!(seeds > 0, "--seeds is 0, a mean needs 1 at least");
    println!("| mode | held-out accuracy, mean of {seeds} | worst | peak bytes | s/update |");
    println!("|---|---|---|---|---|");
    let mut all_ran = true;
    let wanted = |mode: &&Mode| options.only.as_ref().is_none_or(|only| mode.0.contains(only));
    for &(name, settings) in MODES.iter().filter(wanted) {
        let mut reports = Vec::new();
        for seed in 0..seeds {
            let mut settings: Vec<String> = settings.iter().map(|s| (*s).to_string()).collect();
            settings.push(format!("train.seed={seed}"));
            settings.push(format!("train.epochs={}", options.epochs));
            if options.quick {
                settings.push("train.max_updates=1".to_string());
            }
            match train(&binary, &settings) {
                Ok(mut report) => {
                    report["mode"] = json!(name);
                    if let Some(file) = &mut json {
                        writeln!(file, "{report}")?;
                    }
                    reports.push(report);
                }
                Err(error) => {
                    all_ran = false;
                    println!("| {name} | did not run: {error:#} | | | |");
                }
            }
        }
        if !reports.is_empty() {
            println!("{}", row(name, &reports));
        }
    }
    Ok(all_ran)
}

fn row(name: &str, reports: &[Value]) -> String {
    let all = |key: &str| reports.iter().filter_map(|r| r[key].as_f64()).collect::<Vec<_>>();
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    let accuracy = all("accuracy");
    let worst = accuracy.iter().fold(f64::INFINITY, |a, &b| a.min(b));
    let peak = all("peak_bytes").into_iter().fold(0.0, f64::max);
    format!(
        "| {name} | {:.2} % | {:.2} % | {peak:.0} | {:.3} |",
        100.0 * mean(&accuracy),
        100.0 * worst,
        mean(&all("secs_per_step")),
    )
}

/// The release binary, built.
fn build() -> Result<PathBuf> {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--release", "--quiet", "--package", "tallow-cli"])
        .status()?;
    ensure!(status.success(), "cargo build --release --package tallow-cli: {status}");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or("target".into(), PathBuf::from);
    Ok(target.join("release").join("tallow"))
}

/// One run in a process of its own, and what it reported.
fn train(binary: &Path, settings: &[String]) -> Result<Value> {
    let folder = std::env::temp_dir().join(format!("tallow-bench-{}", std::process::id()));
    let mut command = Command::new(binary);
    command.arg("train").arg("--out").arg(&folder);
    settings.iter().for_each(|s| {
        command.args(["--set", s]);
    });
    let output = command.output().with_context(|| binary.display().to_string())?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", error.trim());
    let report = fs::read_to_string(folder.join("report.json"))?;
    fs::remove_dir_all(&folder)?;
    Ok(serde_json::from_str(&report)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_the_mean_and_the_worst() {
        let report = |accuracy: f64, peak: u64| json!({"accuracy": accuracy, "peak_bytes": peak, "secs_per_step": 0.5});
        let row = row("x", &[report(0.98, 10), report(0.99, 30), report(1.0, 20)]);
        assert_eq!(row, "| x | 99.00 % | 98.00 % | 30 | 0.500 |");
    }
}

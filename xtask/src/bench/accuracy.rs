//! `bench accuracy`.

use super::{Common, owned};
use anyhow::{Result, ensure};
use serde_json::{Value, json};

/// Options of `bench accuracy`.
#[derive(clap::Args)]
pub(crate) struct Accuracy {
    /// Runs of each mode, with seeds 0, 1, ...
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Epochs of each run.
    #[arg(long, default_value_t = 5)]
    epochs: u64,
    /// Only the rows whose name contains this.
    #[arg(long)]
    only: Option<String>,
    #[command(flatten)]
    common: Common,
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
    ("bf16, 8-bit AdamW", &["precision.compute=bf16", "optimizer.state=8bit"]),
];

/// Micro-batches that each mode's batches are cut into.
const ACCUMULATE: [usize; 2] = [1, 4];

/// Name and settings of every row.
fn rows() -> impl Iterator<Item = (String, Vec<String>)> {
    ACCUMULATE.into_iter().flat_map(|n| {
        MODES.iter().map(move |(name, settings)| {
            let mut settings = owned(settings);
            settings.push(format!("train.accumulate={n}"));
            let name = if n == 1 { (*name).to_string() } else { format!("{name}, accumulate {n}") };
            (name, settings)
        })
    })
}

/// A row a mode; false if one failed to run.
pub(super) fn run(options: &Accuracy) -> Result<bool> {
    let quick = options.common.quick;
    let seeds = if quick { 1 } else { options.seeds };
    ensure!(seeds > 0, "--seeds is 0, a mean needs 1 at least");
    let (binary, mut lines) = options.common.open()?;
    println!("| mode | held-out accuracy, mean of {seeds} | worst | peak bytes | s/update |");
    println!("|---|---|---|---|---|");
    let mut all_ran = true;
    let wanted = |name: &str| options.only.as_ref().is_none_or(|only| name.contains(only));
    for (name, settings) in rows().filter(|(name, _)| wanted(name)) {
        let mut reports = Vec::new();
        for seed in 0..seeds {
            let mut settings = settings.clone();
            settings.push(format!("train.seed={seed}"));
            settings.push(format!("train.epochs={}", options.epochs));
            if quick {
                settings.push("train.max_updates=1".to_string());
            }
            match binary.train(&settings, None) {
                Ok(mut report) => {
                    report["mode"] = json!(name);
                    lines.write(&report)?;
                    reports.push(report);
                }
                Err(error) => {
                    all_ran = false;
                    println!("| {name} | did not run: {error:#} | | | |");
                }
            }
        }
        if !reports.is_empty() {
            println!("{}", row(&name, &reports));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_is_also_accumulated() {
        let all: Vec<_> = rows().collect();
        assert_eq!(all.len(), 2 * MODES.len());
        let (name, settings) = &all[MODES.len()];
        assert_eq!(
            (name.as_str(), settings[0].as_str()),
            ("f32, accumulate 4", "train.accumulate=4")
        );
    }

    #[test]
    fn a_row_is_the_mean_and_the_worst() {
        let report = |accuracy: f64, peak: u64| json!({"accuracy": accuracy, "peak_bytes": peak, "secs_per_step": 0.5});
        let row = row("x", &[report(0.98, 10), report(0.99, 30), report(1.0, 20)]);
        assert_eq!(row, "| x | 99.00 % | 98.00 % | 30 | 0.500 |");
    }
}

//! `bench offload`: the optimizer's state in a file beside the same in memory.

use super::{
    Common, gpt, owned,
    stats::{cell, largest, median, mib},
};
use anyhow::{Result, ensure};
use serde_json::{Value, json};

/// Options of `bench offload`.
#[derive(clap::Args)]
pub(crate) struct Offload {
    #[command(flatten)]
    common: Common,
    /// Updates of each run.
    #[arg(long, default_value_t = 3)]
    steps: u64,
    /// Runs of each mode, in turns; times are medians over them.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

const MODES: [(&str, &[&str]); 2] =
    [("in memory", &[]), ("in a file", &["memory.offload_dir={folder}"])];

/// What was aimed at: the share of the state in memory, and the time beside it all being there.
const AIM: (f64, f64) = (1.0 / 8.0, 1.3);

/// Measures and prints; false if a run failed.
pub(super) fn run(options: &Offload) -> Result<bool> {
    let quick = options.common.quick;
    let (steps, rounds) = if quick { (2, 1) } else { (options.steps, options.rounds) };
    ensure!(rounds > 0, "--rounds is 0, a median needs 1 at least");
    let (binary, mut lines) = options.common.open()?;
    let work = gpt::Sizes::of(quick).settings(steps);
    let mut reports: [Vec<Value>; 2] = Default::default();
    for round in 0..rounds {
        for ((name, settings), reports) in MODES.iter().zip(&mut reports) {
            eprintln!("round {}: {name}", round + 1);
            match binary.train(&[&work[..], &owned(settings)].concat(), None) {
                Ok(mut report) => {
                    report["bench"] = json!("offload");
                    report["mode"] = json!(name);
                    report["round"] = json!(round + 1);
                    lines.write(&report)?;
                    reports.push(report);
                }
                Err(error) => {
                    println!("state {name} did not run: {error:#}");
                    return Ok(false);
                }
            }
        }
    }
    println!("{}", table(&reports));
    Ok(true)
}

/// Medians of each mode, and how the file compares.
fn table(reports: &[Vec<Value>; 2]) -> String {
    let all = |mode: usize, key: &str| -> Vec<f64> {
        reports[mode].iter().filter_map(|report| report[key].as_f64()).collect()
    };
    let most = |mode: usize, key: &str| largest(&all(mode, key));
    let secs = [0, 1].map(|mode| median(&all(mode, "secs_per_step")));
    let mut lines = vec![
        "| state | s/update | state MiB | of it in memory MiB | counted peak MiB |".to_string(),
        "|---|---|---|---|---|".to_string(),
    ];
    for (mode, (name, _)) in MODES.iter().enumerate() {
        lines.push(format!(
            "| {name} | {} | {} | {} | {} |",
            cell(secs[mode], 3),
            mib(most(mode, "optimizer_state_bytes")),
            mib(most(mode, "optimizer_resident_bytes")),
            mib(most(mode, "peak_bytes")),
        ));
    }
    let share = most(1, "optimizer_resident_bytes") / most(0, "optimizer_state_bytes");
    let ratio = secs[0].zip(secs[1]).map_or(f64::NAN, |(memory, file)| file / memory);
    let met = |is_met: bool| if is_met { "met" } else { "MISSED" };
    lines.push(format!(
        "\nin memory 1/{:.1} of the state (aim 1/{:.0}: {}), {ratio:.2} times the time (aim {}: {})",
        1.0 / share,
        1.0 / AIM.0,
        met(share <= AIM.0),
        AIM.1,
        met(ratio <= AIM.1),
    ));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_compared_with_the_memory() {
        const M: u64 = 1 << 20;
        let report = |secs: f64, resident: u64| {
            json!({
                "secs_per_step": secs, "optimizer_state_bytes": 80 * M,
                "optimizer_resident_bytes": resident * M, "peak_bytes": 100 * M,
            })
        };
        let reports = [
            vec![report(1.0, 80), report(3.0, 80), report(2.0, 80)],
            vec![report(2.0, 8), report(2.5, 8), report(9.0, 8)],
        ];
        let table = table(&reports);
        assert!(table.contains("| in memory | 2.000 | 80.0 | 80.0 | 100.0 |"), "{table}");
        assert!(table.contains("| in a file | 2.500 | 80.0 | 8.0 | 100.0 |"), "{table}");
        let verdict =
            "in memory 1/10.0 of the state (aim 1/8: met), 1.25 times the time (aim 1.3: met)";
        assert!(table.ends_with(verdict), "{table}");
    }
}

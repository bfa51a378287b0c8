//! Modes of tallow beside those of PyTorch on the same work, run in turns.

use super::{
    Common, Lines,
    binary::{Binary, built, output_of},
    owned,
    start::{Bounds, Start},
    stats::{cell, largest, median, mib},
    torch::Torch,
};
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::{path::Path, process::Command};

/// One way to do the work.
pub(super) enum Mode {
    /// tallow's: a name, settings beside the work's, a budget.
    Tallow(String, Vec<String>, Option<String>),
    /// PyTorch's: a name, and what the script calls it.
    Torch(&'static str, &'static [&'static str]),
    /// Plain candle's, by a binary of `benches`.
    Candle(&'static str),
}

use Mode::{Candle, Tallow, Torch as Peer};

/// What all others are compared with.
const BASELINE: &str = "PyTorch fp32";

/// What the losses of tallow's other modes are compared with.
const PLAIN: &str = "f32";

/// PyTorch's modes.
const PEERS: [Mode; 5] = [
    Peer(BASELINE, &["fp32"]),
    Peer("PyTorch bf16", &["bf16"]),
    Peer("PyTorch bf16, accumulate 4", &["bf16", "accum4"]),
    Peer("PyTorch bf16, checkpoint", &["bf16", "ckpt"]),
    Peer("PyTorch fp32, checkpoint", &["fp32", "ckpt"]),
];

/// The same work for all.
pub(super) struct Work {
    /// The name of the benchmark.
    pub(super) bench: &'static str,
    /// As tallow's settings.
    pub(super) settings: Vec<String>,
    /// As the script's argument.
    pub(super) torch: Value,
    /// The binary of `benches` that takes the same argument, where plain candle can do the work.
    pub(super) candle: Option<&'static str>,
    /// Of the first loss.
    pub(super) bounds: Bounds,
}

/// The settings of `steps` updates on `batch` made-up samples each.
pub(super) fn synthetic(batch: u64, steps: u64) -> Vec<String> {
    vec![
        "data.source=synthetic".to_string(),
        // The same batch again and again, as the script does: the loss falls.
        format!("data.n_samples={batch}"),
        "data.held_out=1".to_string(),
        format!("train.batch={batch}"),
        format!("train.epochs={steps}"),
        "train.learning_rate=1e-4".to_string(),
        "train.schedule=constant".to_string(),
    ]
}

/// How it is measured.
pub(super) struct Plan<'a> {
    pub(super) common: &'a Common,
    pub(super) python: Option<&'a Path>,
    /// Runs of each mode.
    pub(super) rounds: usize,
    /// Only the modes of these names, or whose names contain them; none: all.
    pub(super) only: &'a [String],
}

/// A mode and what came of it.
struct Entry {
    mode: Mode,
    reports: Vec<Value>,
    error: Option<String>,
}

/// Measures and prints a row a mode; false if one failed to run.
pub(super) fn run(work: &Work, plan: &Plan, modes: Vec<Mode>) -> Result<bool> {
    ensure!(plan.rounds > 0, "--rounds is 0, a median needs 1 at least");
    let (binary, mut lines) = plan.common.open()?;
    let torch = Torch::of(plan.python);
    let mut start = Start::make(&work.torch, work.bounds)?;
    let mut peers = if torch.is_ok() { Vec::from(PEERS) } else { Vec::new() };
    peers.extend(work.candle.map(Candle));
    let mut entries: Vec<Entry> =
        wanted(in_turns(modes, peers), plan.only).into_iter().map(Entry::new).collect();
    ensure!(!entries.is_empty(), "--only {:?} is in no mode's name", plan.only);
    let torch_or_none = torch.as_ref().ok();
    for round in 0..plan.rounds {
        for entry in &mut entries {
            entry.measure(work, &mut start, &binary, torch_or_none, round, &mut lines)?;
        }
    }
    println!("{}", table(&entries, torch.is_ok()));
    match torch {
        Ok(_) => println!(
            "\nRatios are to {BASELINE} of this run; PyTorch's bytes are not counted. All begin with the \
             same weights and batch: beyond {} of PyTorch's f32 loss in f32, {} in bf16, a row fails.",
            work.bounds.f32, work.bounds.bf16,
        ),
        Err(why) => println!("\nPyTorch was not measured: {why}."),
    }
    Ok(entries.iter().all(|entry| entry.error.is_none()))
}

/// tallow's modes: a name and the settings that make it.
const OURS: [(&str, &[&str]); 8] = [
    ("f32", &[]),
    ("bf16", &["precision.compute=bf16"]),
    ("f32, recompute all", &["memory.recompute=all"]),
    ("f32, accumulate 4", &["train.accumulate=4"]),
    ("bf16, accumulate 4", &["precision.compute=bf16", "train.accumulate=4"]),
    ("f32, 8-bit state", &["optimizer.state=8bit"]),
    ("f32, state in a file", &["memory.offload_dir={folder}"]),
    ("f32, released gradients", &["optimizer.release_gradients=true"]),
];

impl Mode {
    /// tallow's modes, the last one planned within `budget`.
    pub(super) fn all(budget: &str) -> Vec<Mode> {
        let fixed =
            OURS.iter().map(|&(name, settings)| Tallow(name.to_string(), owned(settings), None));
        let name = format!("planned, budget {budget}");
        fixed.chain([Tallow(name, Vec::new(), Some(budget.to_string()))]).collect()
    }

    fn name(&self) -> &str {
        match self {
            Tallow(name, ..) => name,
            Peer(name, _) => name,
            Candle(_) => "plain candle f32",
        }
    }
}

/// The modes that are asked for.
fn wanted(modes: Vec<Mode>, only: &[String]) -> Vec<Mode> {
    let names: Vec<String> = modes.iter().map(|mode| mode.name().to_string()).collect();
    let is_wanted = |name: &str| {
        only.is_empty()
            || only.iter().any(|only| match names.contains(only) {
                true => name == only,
                false => name.contains(only.as_str()),
            })
    };
    modes.into_iter().filter(|mode| is_wanted(mode.name())).collect()
}

/// One of the first, one of the second, and so on.
fn in_turns(first: Vec<Mode>, second: Vec<Mode>) -> Vec<Mode> {
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut all = Vec::new();
    loop {
        let n_before = all.len();
        all.extend(first.next().into_iter().chain(second.next()));
        if all.len() == n_before {
            return all;
        }
    }
}

impl Entry {
    fn new(mode: Mode) -> Self {
        Self { mode, reports: Vec::new(), error: None }
    }

    /// One run. A mode that did not run is not tried again.
    fn measure(
        &mut self,
        work: &Work,
        start: &mut Start,
        binary: &Binary,
        torch: Option<&Torch>,
        round: usize,
        lines: &mut Lines,
    ) -> Result<()> {
        if self.error.is_some() {
            return Ok(());
        }
        let name = self.mode.name();
        eprintln!("round {}: {name}", round + 1);
        let result = match (&self.mode, torch) {
            (Tallow(_, settings, budget), _) => {
                let settings = [&work.settings[..], &start.settings(), settings].concat();
                binary.train(&settings, budget.as_deref())
            }
            (Peer(_, modes), Some(torch)) => torch.train(start.work(), modes),
            (Candle(binary), _) => candle(binary, start.work()),
            (Peer(..), None) => return Ok(()),
        };
        let checked = |mut report: Value| {
            report["first_loss_off"] = json!(torch.map(|t| start.off(t, &report)).transpose()?);
            Ok(report)
        };
        match result.and_then(checked) {
            Ok(mut report) => {
                report["bench"] = json!(work.bench);
                report["mode"] = json!(name);
                report["round"] = json!(round + 1);
                lines.write(&report)?;
                self.reports.push(report);
            }
            Err(error) => self.error = Some(format!("{error:#}")),
        }
        Ok(())
    }

    fn all(&self, key: &str) -> Vec<f64> {
        self.reports.iter().filter_map(|report| report[key].as_f64()).collect()
    }

    /// Losses of all updates of the first run.
    fn losses(&self) -> Vec<f64> {
        let losses = self.reports.first().and_then(|report| report["losses"].as_array());
        losses.map_or(Vec::new(), |all| all.iter().filter_map(Value::as_f64).collect())
    }

    /// The largest distance of a loss from that of `plain`, as a share of it.
    fn off(&self, plain: &[f64]) -> Option<f64> {
        let off = self.losses().into_iter().zip(plain).map(|(a, b)| (a - b).abs() / b.abs());
        off.reduce(f64::max)
    }

    fn row(&self, baseline_secs: Option<f64>, plain: &[f64]) -> String {
        let name = self.mode.name();
        if let Some(error) = &self.error {
            return format!("| {name} | did not run: {error} | | | | | | |");
        }
        let secs = median(&self.all("secs_per_step"));
        let ratio = secs.zip(baseline_secs).map(|(secs, base)| secs / base);
        let peak = |key: &str| match &self.all(key)[..] {
            [] => "-".to_string(),
            bytes => mib(largest(bytes)),
        };
        format!(
            "| {name} | {} | {} | {} | {} | {} | {} | {} |",
            cell(secs, 3),
            cell(ratio, 2),
            peak("peak_bytes"),
            peak("rss_peak_bytes"),
            cell(self.all("first_loss").first().copied(), 4),
            cell(self.all("first_loss_off").first().map(|off| 100.0 * off), 4),
            cell(self.off(plain).map(|off| 100.0 * off), 3),
        )
    }
}

/// The work in plain candle.
fn candle(binary: &str, work: &Value) -> Result<Value> {
    let output = output_of(Command::new(built(binary)?).arg(work.to_string()))?;
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn table(entries: &[Entry], has_torch: bool) -> String {
    let baseline = entries.iter().find(|entry| entry.mode.name() == BASELINE);
    let baseline_secs = baseline.and_then(|entry| median(&entry.all("secs_per_step")));
    let ratio =
        if has_torch { format!("ratio to {BASELINE}") } else { "ratio (no PyTorch)".to_string() };
    let head = [
        format!(
            "| mode | s/step | {ratio} | counted peak MiB | resident peak MiB | loss of step 1 | \
             off PyTorch's, % | losses off tallow's f32 by at most, % |"
        ),
        format!("|{}", "---|".repeat(8)),
    ];
    // tallow's rows first.
    let is_tallow = |entry: &&Entry| matches!(entry.mode, Tallow(..));
    let (ours, theirs): (Vec<&Entry>, Vec<&Entry>) = entries.iter().partition(is_tallow);
    let plain = entries.iter().find(|entry| entry.mode.name() == PLAIN);
    let plain = plain.map_or(Vec::new(), Entry::losses);
    let rows = ours.into_iter().chain(theirs).map(|entry| entry.row(baseline_secs, &plain));
    head.into_iter().chain(rows).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tallow(name: &str) -> Mode {
        Tallow(name.to_string(), Vec::new(), None)
    }

    fn entry(mode: Mode, secs: &[f64]) -> Entry {
        let reports = secs.iter().map(|secs| json!({"secs_per_step": secs, "first_loss": 2.5}));
        Entry { reports: reports.collect(), ..Entry::new(mode) }
    }

    #[test]
    fn modes_take_turns() {
        let peers = vec![Peer("p", &[]), Peer("q", &[])];
        let modes = in_turns(vec![tallow("a"), tallow("b"), tallow("c")], peers);
        let names: Vec<&str> = modes.iter().map(Mode::name).collect();
        assert_eq!(names, ["a", "p", "b", "q", "c"]);
    }

    #[test]
    fn a_whole_name_is_that_mode_alone() {
        let modes = || vec![tallow("f32"), tallow("f32, accumulate 4"), tallow("planned")];
        let names = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|only| only.to_string()).collect();
            let found = wanted(modes(), &only);
            found.iter().map(|mode| mode.name().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(&[]).len(), 3);
        assert_eq!(names(&["f32", "plan"]), ["f32", "planned"]);
        assert_eq!(names(&["accum"]), ["f32, accumulate 4"]);
    }

    #[test]
    fn rows_are_medians_and_ratios() {
        let entries = [entry(Peer(BASELINE, &[]), &[4.0]), entry(tallow("f32"), &[1.0, 9.0, 2.0])];
        let table = table(&entries, true);
        let rows: Vec<&str> = table.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "| f32 | 2.000 | 0.50 | - | - | 2.5000 | - | - |",
                "| PyTorch fp32 | 4.000 | 1.00 | - | - | 2.5000 | - | - |"
            ]
        );
    }

    #[test]
    fn without_torch_the_columns_say_so() {
        let mut failed = entry(tallow("bf16"), &[]);
        failed.error = Some("no".to_string());
        let entries = [entry(tallow("f32"), &[2.0]), failed];
        let table = table(&entries, false);
        assert!(table.contains("| ratio (no PyTorch) |"), "{table}");
        assert!(table.contains("| f32 | 2.000 | - | - | - | 2.5000 | - | - |"), "{table}");
        assert!(table.contains("| bf16 | did not run: no |"), "{table}");
    }

    #[test]
    fn curves_are_compared_where_they_are_farthest() {
        let mut entry = entry(tallow("bf16"), &[]);
        entry.reports = vec![json!({"losses": [2.0, 1.0, 0.55]})];
        let off = entry.off(&[2.0, 1.01, 0.5]).expect("losses");
        assert!((off - 0.1).abs() < 1e-12, "{off}");
        assert_eq!(entry.off(&[]), None);
    }

    #[test]
    fn peaks_are_the_largest() {
        let mut entry = entry(tallow("f32"), &[]);
        entry.reports = [1u64 << 20, 3 << 20, 2 << 20].map(|b| json!({"peak_bytes": b})).to_vec();
        assert_eq!(entry.row(None, &[]), "| f32 | - | - | 3.0 | - | - | - | - |");
    }
}

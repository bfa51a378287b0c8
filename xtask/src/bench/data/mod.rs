//! `bench data`: samples a second and peak memory, beside `torch.utils.data.DataLoader`.

mod made;

use super::{
    Common, Lines,
    binary::Binary,
    stats::{cell, largest, median, mib},
    torch::Torch,
};
use anyhow::{Result, ensure};
use made::Made;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Options of `bench data`.
#[derive(clap::Args)]
pub(crate) struct Data {
    #[command(flatten)]
    common: Common,
    /// A Python with torch and torchvision, measured beside.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Runs of each, in turns; rates are medians over them, peaks the largest.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Images read.
    #[arg(long, default_value_t = 500)]
    images: usize,
}

const BATCH: usize = 32;
const SEQ_TOKENS: usize = 512;
/// Processes that PyTorch reads in; tallow has a thread for each core.
const TORCH_WORKERS: usize = 2;
/// Rate and memory in PyTorch's that are aimed at.
const AIM: (f64, f64) = (1.5, 0.5);

/// What is read, and its settings for each side.
struct Work {
    name: &'static str,
    settings: Vec<String>,
    /// PyTorch's ways: name, arguments.
    torch: Vec<(&'static str, Value)>,
}

fn works(made: &Made) -> Vec<Work> {
    let common = |path: &Path| {
        vec![
            format!("data.source={}", path.display()),
            "data.prefetch_bytes=32MiB".to_string(),
            format!("train.batch={BATCH}"),
        ]
    };
    let images = |path: &Path| {
        let model = ["model.name=resnet18", "data.augment=true"].map(str::to_string);
        [common(path), model.to_vec()].concat()
    };
    let torch = |work: &str, path: &Path, decoder: &str| {
        json!({
            "work": work, "path": path, "batch": BATCH, "workers": TORCH_WORKERS,
            "decoder": decoder, "seq_tokens": SEQ_TOKENS,
        })
    };
    let decoders = |work: &'static str, path: &Path| {
        vec![
            ("PyTorch, PIL", torch(work, path, "pil")),
            ("PyTorch, torchvision.io", torch(work, path, "torchvision")),
        ]
    };
    let tokens = [
        common(&made.tokens()),
        vec![
            "model.name=gpt2".to_string(),
            "model.vocab=50257".to_string(),
            format!("data.seq_tokens={SEQ_TOKENS}"),
        ],
    ];
    vec![
        Work {
            name: "images",
            settings: images(&made.images()),
            torch: decoders("images", &made.images()),
        },
        Work {
            name: "tar shards",
            settings: images(&made.shards()),
            torch: decoders("tar", &made.shards()),
        },
        Work {
            name: "tokens",
            settings: tokens.concat(),
            torch: vec![("PyTorch", torch("tokens", &made.tokens(), ""))],
        },
    ]
}

/// Reports of one way of one work.
struct Row {
    work: &'static str,
    who: &'static str,
    reports: Vec<Value>,
}

impl Row {
    fn rate(&self) -> Option<f64> {
        median(&self.all("samples_per_sec"))
    }

    fn all(&self, key: &str) -> Vec<f64> {
        self.reports.iter().filter_map(|report| report[key].as_f64()).collect()
    }
}

const TALLOW: &str = "tallow";

/// Measures and prints; false if a row failed to run.
pub(super) fn run(options: &Data) -> Result<bool> {
    let quick = options.common.quick;
    let (rounds, n_images) = if quick { (1, 64) } else { (options.rounds, options.images) };
    ensure!(rounds > 0, "--rounds is 0, a median needs 1 at least");
    ensure!(n_images >= 2 * BATCH, "--images is {n_images}, {} are the least", 2 * BATCH);
    let (binary, mut lines) = options.common.open()?;
    let torch = Torch::of(options.python.as_deref());
    if let Err(why) = &torch {
        println!("PyTorch is not measured: {why}");
    }
    let made = Made::new(n_images, if quick { 1 << 20 } else { 32 << 20 })?;
    let mut rows: Vec<Row> = Vec::new();
    let mut all_ran = true;
    for round in 1..=rounds {
        for work in works(&made) {
            eprintln!("round {round}: {}", work.name);
            let mut results = vec![(TALLOW, binary.bench_data(&work.settings))];
            for (who, arguments) in work.torch.iter().filter(|_| torch.is_ok()) {
                let report = torch.as_ref().map(|torch| torch.read(arguments));
                results.extend(report.ok().map(|report| (*who, report)));
            }
            for (who, result) in results {
                match result {
                    Ok(report) => note(&mut rows, &mut lines, (work.name, who, round), report)?,
                    Err(error) => {
                        println!("{}, {who} did not run: {error:#}", work.name);
                        all_ran = false;
                    }
                }
            }
        }
    }
    println!("{}", table(&rows));
    Ok(all_ran)
}

fn note(
    rows: &mut Vec<Row>,
    lines: &mut Lines,
    (work, who, round): (&'static str, &'static str, usize),
    mut report: Value,
) -> Result<()> {
    report["bench"] = json!("data");
    report["work"] = json!(work);
    report["mode"] = json!(who);
    report["round"] = json!(round);
    lines.write(&report)?;
    match rows.iter_mut().find(|row| (row.work, row.who) == (work, who)) {
        Some(row) => row.reports.push(report),
        None => rows.push(Row { work, who, reports: vec![report] }),
    }
    Ok(())
}

/// Rates and peaks, and tallow's in those of the fastest of the others.
fn table(rows: &[Row]) -> String {
    let mut lines = vec![
        "| work | by | samples/s | resident peak MiB | counted peak MiB |".to_string(),
        "|---|---|---|---|---|".to_string(),
    ];
    for row in rows {
        let peak = |key: &str| match &row.all(key)[..] {
            [] => "-".to_string(),
            bytes => mib(largest(bytes)),
        };
        lines.push(format!(
            "| {} | {} | {} | {} | {} |",
            row.work,
            row.who,
            cell(row.rate(), 0),
            peak("rss_peak_bytes"),
            peak("peak_bytes")
        ));
    }
    let ours = rows.iter().filter(|row| row.who == TALLOW);
    lines.extend(ours.filter_map(|ours| verdict(ours, rows)));
    lines.join("\n")
}

fn verdict(ours: &Row, rows: &[Row]) -> Option<String> {
    let others = rows.iter().filter(|row| row.work == ours.work && row.who != TALLOW);
    let best = others.max_by(|a, b| a.rate().unwrap_or(0.0).total_cmp(&b.rate().unwrap_or(0.0)))?;
    let rate = ours.rate()? / best.rate()?;
    let memory = largest(&ours.all("rss_peak_bytes")) / largest(&best.all("rss_peak_bytes"));
    let met = |is_met: bool| if is_met { "met" } else { "MISSED" };
    Some(format!(
        "\n{}: {rate:.2} times the rate of {} (aim {}: {}), {memory:.2} times its memory (aim {}: {})",
        ours.work,
        best.who,
        AIM.0,
        met(rate >= AIM.0),
        AIM.1,
        met(memory <= AIM.1),
    ))
}

impl Binary {
    /// What `tallow data bench --json` prints.
    /// # Errors
    /// What it complained about.
    fn bench_data(&self, settings: &[String]) -> Result<Value> {
        self.json(&["data", "bench"], settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_of_the_others_is_the_measure() {
        const M: u64 = 1 << 20;
        let row = |who, rates: &[f64], peak: u64| Row {
            work: "images",
            who,
            reports: rates
                .iter()
                .map(|rate| json!({"samples_per_sec": rate, "rss_peak_bytes": peak * M}))
                .collect(),
        };
        let rows = [
            row(TALLOW, &[900.0, 100.0, 800.0], 100),
            row("PyTorch, PIL", &[300.0], 500),
            row("PyTorch, torchvision.io", &[400.0], 400),
        ];
        let table = table(&rows);
        assert!(table.contains("| images | tallow | 800 | 100.0 | - |"), "{table}");
        let verdict = "images: 2.00 times the rate of PyTorch, torchvision.io (aim 1.5: met), \
                       0.25 times its memory (aim 0.5: met)";
        assert!(table.ends_with(verdict), "{table}");
    }
}

//! `bench kernels`: each kernel beside its rivals and the machine's limits.
//!
//! Two processes wait for questions: the workspace's `kernels`, which does a case with tallow, candle
//! and the `gemm` crate, and a Python that does it with PyTorch. They are asked in turns, a fraction
//! of a second each, so that what else the machine does falls on all of them; the fastest run counts.

mod row;
mod table;
mod worker;

use super::{
    Lines,
    binary::{built, output_of},
    torch::Torch,
};
use anyhow::{Context, Result, ensure};
use row::Row;
use serde_json::Value;
use std::{path::PathBuf, process::Command};
use worker::Worker;

const SCRIPT: &str = include_str!("../../../python/torch_kernels.py");

/// Options of `bench kernels`.
#[derive(clap::Args)]
pub(crate) struct Kernels {
    /// Small shapes and one short round: that the rows run at all, in less than a minute.
    #[arg(long)]
    quick: bool,
    /// Also write one JSON object a row to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// A Python whose torch is measured beside.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Rounds of each row; the fastest run of all counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds that each column of a row runs in a round.
    #[arg(long, default_value_t = 0.2)]
    secs: f64,
    /// Only the rows whose name contains this; may be given several times.
    #[arg(long)]
    only: Vec<String>,
}

/// Who does a case, as they are asked and as the table has them.
const COLUMNS: [(&str, &str); 5] = [
    ("tallow", "tallow"),
    ("candle", "candle"),
    ("gemm", "gemm crate"),
    (TORCH, "PyTorch"),
    ("limit", "limit"),
];

/// The one that the script does.
const TORCH: &str = "torch";

/// Measures and prints; false if a row failed to run.
pub(super) fn run(options: &Kernels) -> Result<bool> {
    let (rounds, secs) = if options.quick { (1, 0.005) } else { (options.rounds, options.secs) };
    ensure!(rounds > 0, "--rounds is 0, a row needs 1 at least");
    ensure!(secs >= 0.0, "--secs is {secs}, it must be 0 or more");
    let mut lines = Lines::open(options.json.as_deref())?;
    let path = built("kernels")?;
    let quick = if options.quick { &["--quick"][..] } else { &[] };
    let cases = wanted(&output_of(Command::new(&path).arg("list").args(quick))?.stdout, options)?;

    let (mut ours, machine) = Worker::start(Command::new(&path).arg("serve").args(quick))?;
    let torch = Torch::of(options.python.as_deref());
    let mut torch_worker = match &torch {
        Ok(torch) => Some(Worker::start(&mut torch.command(SCRIPT, &machine["threads"]))?),
        Err(_) => None,
    };
    let mut rows: Vec<Row> = cases.into_iter().map(Row::new).collect();
    let n_rows = rows.len();
    for (i, row) in rows.iter_mut().enumerate() {
        eprintln!("{} of {n_rows}: {}", i + 1, row.name());
        for _ in 0..rounds {
            for (who, _) in COLUMNS {
                let question = match (who, &torch_worker) {
                    (TORCH, None) => continue,
                    (TORCH, Some(_)) => format!("{secs} {}", row.case),
                    _ => format!("{secs} {who} {}", row.name()),
                };
                let worker = match (&mut torch_worker, who) {
                    (Some((worker, _)), TORCH) => worker,
                    _ => &mut ours,
                };
                row.hear(who, worker.ask(&question)?);
            }
        }
        lines.write(&row.json())?;
    }
    let torch = match (&torch, &torch_worker) {
        (_, Some((_, about))) => Ok(about["torch"].as_str().unwrap_or("?")),
        (Err(why), _) => Err(why.as_str()),
        (Ok(_), None) => Err("it was not started"),
    };
    println!("{}", table::table(&rows, &machine, torch));
    Ok(rows.iter().all(|row| row.errors().is_empty()))
}

/// The cases of a list that are asked for.
fn wanted(list: &[u8], options: &Kernels) -> Result<Vec<Value>> {
    let parsed = |line: &str| serde_json::from_str::<Value>(line).with_context(|| line.to_string());
    let all: Result<Vec<Value>> = String::from_utf8_lossy(list).lines().map(parsed).collect();
    let only = &options.only;
    let is_wanted = |case: &Value| {
        let name = case["name"].as_str().unwrap_or_default();
        only.is_empty() || only.iter().any(|only| name.contains(only.as_str()))
    };
    let cases: Vec<Value> = all?.into_iter().filter(is_wanted).collect();
    ensure!(!cases.is_empty(), "--only {only:?} is in no row's name");
    Ok(cases)
}

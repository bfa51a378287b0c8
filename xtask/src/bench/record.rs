//! `bench record`, `bench compare` and `bench readme`: measurements that are kept.
//!
//! A record is a CSV file of rows that benchmarks wrote with `--json`, with the commit, the processor
//! and its flags in each. Runs of the same mode are one row: the median of times, the largest of peaks.

use super::{
    host::Host,
    stats::{cell, largest, median},
};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Options of `bench record`.
#[derive(clap::Args)]
pub(crate) struct Record {
    /// What benchmarks wrote with `--json`.
    #[arg(required = true, value_name = "JSONL")]
    files: Vec<PathBuf>,
    /// Where it goes; `benches/record/PROCESSOR/DATE.csv` where it is not given.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Options of `bench compare`.
#[derive(clap::Args)]
pub(crate) struct Compare {
    before: PathBuf,
    after: PathBuf,
}

/// What says where and of what a row is.
const ABOUT: [&str; 6] = ["commit", "cpu", "threads", "flags", "bench", "mode"];
/// What a row is of, as benchmarks write it.
const WORDS: [&str; 7] =
    ["model", "params", "size", "batch", "micro_batch", "precision", "optimizer"];
/// What is measured; times are medians, the rest is the largest.
const TIMES: [&str; 2] = ["secs_per_step", "accuracy"];
const PEAKS: [&str; 6] = [
    "peak_bytes",
    "rss_peak_bytes",
    "predicted_peak_bytes",
    "budget_bytes",
    "first_loss",
    "first_loss_off",
];
/// A kernel's, in its unit a second.
const RATE: &str = "rate";
/// Changes below this share are not pointed out.
const NOISE: f64 = 0.05;

/// The columns of a record.
fn columns() -> Vec<&'static str> {
    let groups: [&[&'static str]; 5] = [&ABOUT, &WORDS, &TIMES, &PEAKS, &[RATE]];
    groups.concat()
}

/// A record's row, by column.
pub(super) type Row = BTreeMap<String, String>;

/// Writes a record; true.
pub(super) fn record(options: &Record) -> Result<bool> {
    let host = Host::get();
    let mut rows = Vec::new();
    for file in &options.files {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let parsed: Result<Vec<Value>, _> = text.lines().map(serde_json::from_str).collect();
        rows.extend(parsed.with_context(|| file.display().to_string())?);
    }
    ensure!(!rows.is_empty(), "no row is in {:?}", options.files);
    let default =
        || Path::new("benches/record").join(host.slug()).join(format!("{}.csv", host.date));
    let path = options.out.clone().unwrap_or_else(default);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.map_or(Ok(()), fs::create_dir_all).with_context(|| path.display().to_string())?;
    write(&path, &summed(&rows, &host))?;
    println!("{}", path.display());
    Ok(true)
}

/// One row a benchmark and mode, in the order of their first runs.
fn summed(runs: &[Value], host: &Host) -> Vec<Row> {
    let runs: Vec<Value> = runs.iter().flat_map(flat).collect();
    let mut kinds: Vec<[String; 3]> = Vec::new();
    let kind = |run: &Value| ["bench", "mode", "size"].map(|key| text(&run[key]));
    for run in &runs {
        if !kinds.contains(&kind(run)) {
            kinds.push(kind(run));
        }
    }
    let row = |of: &[String; 3]| {
        let runs: Vec<&Value> = runs.iter().filter(|run| kind(run) == *of).collect();
        let all = |key: &str| runs.iter().filter_map(|run| run[key].as_f64()).collect::<Vec<f64>>();
        let mut row: Row = [
            ("commit", host.commit.clone()),
            ("cpu", host.cpu.clone()),
            ("threads", host.n_threads.to_string()),
            ("flags", host.flags.clone()),
            ("bench", of[0].clone()),
            ("mode", of[1].clone()),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into();
        let number = |number: f64| number.to_string();
        row.extend(WORDS.map(|key| (key.to_string(), text(&runs[0][key]))));
        row.extend(
            TIMES.map(|key| (key.to_string(), median(&all(key)).map_or(String::new(), number))),
        );
        row.extend(PEAKS.into_iter().chain([RATE]).map(|key| {
            let all = all(key);
            (key.to_string(), if all.is_empty() { String::new() } else { number(largest(&all)) })
        }));
        row
    };
    kinds.iter().map(row).collect()
}

/// A kernel's row holds a column for everybody who did it; they are modes here.
fn flat(run: &Value) -> Vec<Value> {
    let Some(columns) = run["columns"].as_object() else { return vec![run.clone()] };
    let measured = columns.iter().filter(|(_, column)| !column["rate"].is_null());
    let one = |(who, column): (&String, &Value)| {
        let mut row = serde_json::json!({"bench": run["bench"], "precision": run["precision"]});
        row["mode"] = format!("{}, {who}", text(&run["name"])).into();
        row["secs_per_step"] = column["best_secs"].clone();
        row["rate"] = column["rate"].clone();
        row
    };
    measured.map(one).collect()
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(all) => all.iter().map(text).collect::<Vec<_>>().join("x"),
        other => other.to_string(),
    }
}

fn write(path: &Path, rows: &[Row]) -> Result<()> {
    let mut out = csv::Writer::from_path(path).with_context(|| path.display().to_string())?;
    out.write_record(columns())?;
    for row in rows {
        out.write_record(columns().iter().map(|column| row.get(*column).map_or("", |v| v)))?;
    }
    Ok(out.flush()?)
}

/// The rows of a record.
/// # Errors
/// If it cannot be read, or has no columns that say what a row is.
pub(super) fn read(path: &Path) -> Result<Vec<Row>> {
    let name = || path.display().to_string();
    let mut reader = csv::Reader::from_path(path).with_context(name)?;
    let columns = reader.headers().with_context(name)?.clone();
    for column in ["bench", "mode"] {
        ensure!(columns.iter().any(|c| c == column), "{}: no column `{column}`", name());
    }
    let row = |record: csv::Result<csv::StringRecord>| -> Result<Row> {
        let record = record.with_context(name)?;
        Ok(columns.iter().map(str::to_string).zip(record.iter().map(str::to_string)).collect())
    };
    reader.records().map(row).collect()
}

/// Prints how the rows of two records differ; true.
pub(super) fn compare(options: &Compare) -> Result<bool> {
    let (before, after) = (read(&options.before)?, read(&options.after)?);
    if before.is_empty() || after.is_empty() {
        bail!("one of the records has no rows");
    }
    println!("{}", compared(&before, &after));
    Ok(true)
}

fn compared(before: &[Row], after: &[Row]) -> String {
    let mut lines = vec![
        "| bench | mode | time after / before | counted peak after / before | |".to_string(),
        "|---|---|---|---|---|".to_string(),
    ];
    let kind =
        |row: &Row| ["bench", "mode", "size"].map(|key| row.get(key).cloned().unwrap_or_default());
    let mut n_alone = 0;
    for row in after {
        let Some(old) = before.iter().find(|old| kind(old) == kind(row)) else {
            n_alone += 1;
            continue;
        };
        let number = |row: &Row, key: &str| row.get(key)?.parse::<f64>().ok();
        let ratio = |key: &str| Some(number(row, key)? / number(old, key)?);
        let (time, peak) = (ratio("secs_per_step"), ratio("peak_bytes"));
        let worse = [time, peak].into_iter().flatten().any(|ratio| ratio > 1.0 + NOISE);
        let better = [time, peak].into_iter().flatten().any(|ratio| ratio < 1.0 - NOISE);
        let verdict = match (better, worse) {
            (true, true) => "better and worse",
            (true, false) => "better",
            (false, true) => "WORSE",
            (false, false) => "",
        };
        let [bench, mode, size] = kind(row);
        let size = if size.is_empty() { size } else { format!(" ({size})") };
        lines.push(format!(
            "| {bench} | {mode}{size} | {} | {} | {verdict} |",
            cell(time, 3),
            cell(peak, 3)
        ));
    }
    lines.push(format!("\n{n_alone} rows are in the second record alone"));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn host() -> Host {
        let text = str::to_string;
        Host {
            cpu: text("c, 1"),
            n_threads: 2,
            flags: text("avx2"),
            commit: text("abc"),
            date: text("d"),
        }
    }

    fn run(mode: &str, secs: f64, peak: u64) -> Value {
        json!({"bench": "gpt", "mode": mode, "size": [512], "secs_per_step": secs, "peak_bytes": peak})
    }

    #[test]
    fn runs_of_a_mode_are_one_row() {
        let rows = summed(
            &[run("f32", 1.0, 5), run("bf16", 9.0, 1), run("f32", 3.0, 7), run("f32", 2.0, 6)],
            &host(),
        );
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0]["mode"].as_str(), rows[0]["secs_per_step"].as_str()), ("f32", "2"));
        assert_eq!((rows[0]["peak_bytes"].as_str(), rows[0]["size"].as_str()), ("7", "512"));
        assert_eq!(rows[1]["accuracy"], "");
    }

    #[test]
    fn a_kernel_is_a_mode_for_everybody() {
        let column = json!({"best_secs": 0.5, "rate": 4.0});
        let columns = json!({"tallow": column, "candle": {"rate": null, "absent": "no"}});
        let rows =
            summed(&[json!({"bench": "kernels", "name": "f32 x", "columns": columns})], &host());
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0]["mode"].as_str(), rows[0]["rate"].as_str()), ("f32 x, tallow", "4"));
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let path = std::env::temp_dir().join(format!("xtask-record-{}.csv", std::process::id()));
        let rows = summed(&[run("a \"b\", c", 1.5, 5)], &host());
        write(&path, &rows).expect("the folder can be written");
        assert_eq!(read(&path).expect("it was written"), rows);
        fs::remove_file(&path).expect("it is ours");
    }

    #[test]
    fn changes_are_pointed_out() {
        let before = summed(&[run("a", 1.0, 100), run("b", 1.0, 100), run("c", 1.0, 100)], &host());
        let after = summed(
            &[run("a", 1.01, 100), run("b", 0.5, 100), run("c", 0.9, 200), run("d", 1.0, 1)],
            &host(),
        );
        let text = compared(&before, &after);
        for line in [
            "| gpt | a (512) | 1.010 | 1.000 |  |",
            "| gpt | b (512) | 0.500 | 1.000 | better |",
            "| gpt | c (512) | 0.900 | 2.000 | better and worse |",
            "1 rows are in the second record alone",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}

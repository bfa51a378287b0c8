//! `tallow report`: a run as one page that needs nothing else.

mod chart;

use anyhow::{Context, Result, ensure};
use chart::{Axes, Line};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};

const PAGE: &str = "report.html";
const MIB: f64 = (1u64 << 20) as f64;

/// Categories of memory, as `memory.jsonl` and `plan.json` have them; the largest changes least.
const CATEGORIES: [&str; 8] = [
    "weights",
    "optimizer_state",
    "accumulators",
    "data",
    "other",
    "gradients",
    "saved_activations",
    "transient",
];

/// Rows of the summary: a key of `report.json`, and what it is called.
const SUMMARY: [(&str, &str); 25] = [
    ("name", "data"),
    ("model", "model"),
    ("params", "parameters trained"),
    ("size", "size of a sample"),
    ("batch", "batch"),
    ("micro_batch", "micro-batch"),
    ("precision", "precision"),
    ("recompute", "recomputed"),
    ("optimizer", "optimizer"),
    ("gradients", "gradients"),
    ("seed", "seed"),
    ("updates", "updates"),
    ("skipped_steps", "updates not applied"),
    ("skipped_samples", "samples left out"),
    ("first_loss", "first training loss"),
    ("train_loss", "last training loss"),
    ("loss", "held-out loss"),
    ("accuracy", "held-out accuracy"),
    ("peak_bytes", "peak, counted"),
    ("predicted_peak_bytes", "peak, foreseen"),
    ("budget_bytes", "budget"),
    ("rss_peak_bytes", "peak, resident"),
    ("optimizer_state_bytes", "optimizer state"),
    ("secs_per_step", "seconds an update"),
    ("samples_per_sec", "samples a second"),
];

/// Text between tags or in a quoted attribute.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The files of a run; those that are not there are empty.
struct Run {
    config: String,
    plan: Value,
    report: Value,
    metrics: Vec<Value>,
    memory: Vec<Value>,
}

impl Run {
    fn read(folder: &Path) -> Result<Self> {
        let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
        let value = |name: &str| match text(name) {
            text if text.is_empty() => Ok(Value::Null),
            text => serde_json::from_str(&text)
                .with_context(|| format!("`{}`", folder.join(name).display())),
        };
        // The last line may be cut where a run was killed.
        let lines = |name: &str| -> Vec<Value> {
            text(name).lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
        };
        let config = match text("effective.toml") {
            text if text.is_empty() => Self::given(folder),
            text => text,
        };
        let metrics = lines("metrics.jsonl");
        ensure!(
            !metrics.is_empty(),
            "`{}` holds no run: there are no lines in metrics.jsonl",
            folder.display()
        );
        let (plan, report) = (value("plan.json")?, value("report.json")?);
        Ok(Self { config, plan, report, metrics, memory: lines("memory.jsonl") })
    }

    fn given(folder: &Path) -> String {
        fs::read_to_string(crate::run_dir::config_path(folder)).unwrap_or_default()
    }

    /// `key` of every line that has it as a number, over updates.
    fn over_updates(&self, key: &str) -> Vec<(f64, f64)> {
        let point = |line: &Value| Some((line["update"].as_f64()?, line.get(key)?.as_f64()?));
        self.metrics.iter().filter_map(point).collect()
    }

    /// The first update and the last.
    fn updates(&self) -> (f64, f64) {
        let updates = self.metrics.iter().filter_map(|line| line["update"].as_f64());
        updates.fold((1.0, 1.0), |(first, last), update| (first, last.max(update)))
    }

    /// Updates that were not applied.
    fn skipped(&self) -> Vec<f64> {
        let lines = self.metrics.iter().filter(|line| line["applied"] == false);
        lines.filter_map(|line| line["update"].as_f64()).collect()
    }
}

/// Writes `report.html` into the run's folder; its path.
///
/// # Errors
/// If there is no run, or the folder cannot be written.
pub(crate) fn write(folder: &Path) -> Result<PathBuf> {
    ensure!(folder.is_dir(), "`{}` is no folder", folder.display());
    let page = page(&Run::read(folder)?);
    crate::report::write_text(folder, PAGE, &page)?;
    Ok(folder.join(PAGE))
}

fn page(run: &Run) -> String {
    let title = match (run.report["model"].as_str(), run.report["name"].as_str()) {
        (Some(model), Some(name)) => format!("{model} on {name}"),
        _ => "A run that has not ended".to_string(),
    };
    let sections = [
        ("Summary", summary(&run.report)),
        ("Loss", loss(run)),
        ("Accuracy, held out", single(run, "accuracy", 2, true)),
        ("Memory", memory(run)),
        ("Plan against measured", against_plan(run)),
        ("Learning rate", single(run, "learning_rate", 3, true)),
        ("Loss scale", single(run, "loss_scale", 4, false)),
        ("Configuration in force", format!("<pre>{}</pre>", escaped(&run.config))),
    ];
    let section =
        |(name, body): &(&str, String)| format!("<section><h2>{name}</h2>{body}</section>");
    let shown = sections.iter().filter(|(_, body)| !body.is_empty());
    let body: String = shown.map(section).collect();
    let (title, style) = (escaped(&title), include_str!("style.css"));
    format!(
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>\
         <meta name=viewport content=\"width=device-width\"><title>{title}</title>\
         <style>{style}</style></head><body><h1>{title}</h1>{body}</body></html>\n"
    )
}

/// A figure of `report.json`, as a person reads it.
fn shown(key: &str, value: &Value) -> String {
    let by =
        |items: &Vec<Value>| items.iter().map(Value::to_string).collect::<Vec<_>>().join(" x ");
    match (value, value.as_f64()) {
        (Value::String(text), _) => text.clone(),
        (Value::Array(items), _) => by(items),
        (_, Some(bytes)) if key.ends_with("_bytes") => format!("{:.1} MiB", bytes / MIB),
        (_, Some(share)) if key == "accuracy" => format!("{:.2} %", 100.0 * share),
        (_, Some(x)) if value.is_f64() => format!("{x:.4}"),
        _ => value.to_string(),
    }
}

fn summary(report: &Value) -> String {
    let row = |(key, name): &(&str, &str)| {
        let value = report.get(key).filter(|value| !value.is_null())?;
        let (shown, exact) = (escaped(&shown(key, value)), escaped(&value.to_string()));
        Some(format!(
            "<div><dt>{name}</dt><dd data-key={key} data-value=\"{exact}\" title=\"{exact}\">{shown}</dd></div>"
        ))
    };
    let rows: String = SUMMARY.iter().filter_map(row).collect();
    if rows.is_empty() { rows } else { format!("<dl>{rows}</dl>") }
}

fn loss(run: &Run) -> String {
    let line = |name: &str, colour, key, has_dots| Line {
        name: name.to_string(),
        colour,
        points: run.over_updates(key),
        has_dots,
    };
    let lines = [
        line("training, before each update", 0, "loss", false),
        line("held out", 1, "held_out_loss", true),
    ];
    let axes = Axes { x_name: "update", xs: run.updates(), from_zero: false };
    chart::lines(&axes, &lines, &run.skipped())
}

fn single(run: &Run, key: &str, colour: usize, from_zero: bool) -> String {
    let (points, name) = (run.over_updates(key), key.replace('_', " "));
    let has_dots = key == "accuracy";
    let lines = [Line { name, colour, points, has_dots }];
    chart::lines(&Axes { x_name: "update", xs: run.updates(), from_zero }, &lines, &[])
}

fn bytes(value: &Value, category: &str) -> Option<f64> {
    value[format!("{category}_bytes")].as_f64()
}

fn memory(run: &Run) -> String {
    let xs: Vec<f64> = run.memory.iter().filter_map(|line| line["elapsed_secs"].as_f64()).collect();
    let mib = |line: &Value, category: &str| bytes(line, category).unwrap_or(0.0) / MIB;
    let layer = |category: &&str| {
        let heights = run.memory.iter().map(|line| mib(line, category)).collect();
        (category.replace('_', " "), heights)
    };
    let mut layers: Vec<(String, Vec<f64>)> = CATEGORIES.iter().map(layer).collect();
    // What is live and in no category: threads, data sets, the program's own.
    let in_none = |line: &Value| {
        let known: f64 = CATEGORIES.iter().map(|category| mib(line, category)).sum();
        (line["live_bytes"].as_f64().unwrap_or(0.0) / MIB - known).max(0.0)
    };
    layers[4].1 = run.memory.iter().map(|line| mib(line, "other") + in_none(line)).collect();
    let budget = run.report["budget_bytes"].as_f64().map(|bytes| bytes / MIB);
    if xs.len() != run.memory.len() || xs.is_empty() {
        return String::new();
    }
    format!("<p class=unit>MiB</p>{}", chart::stacked("seconds", &xs, &layers, budget))
}

/// What was foreseen, beside the most that was entered under each category.
fn against_plan(run: &Run) -> String {
    let terms = &run.plan["terms"];
    let Some(foreseen) = run.plan["predicted_peak_bytes"].as_f64().filter(|&bytes| bytes > 0.0)
    else {
        return String::new();
    };
    let cell = |bytes: Option<f64>| match bytes {
        Some(bytes) => format!("<td>{:.1} MiB</td>", bytes / MIB),
        None => "<td></td>".to_string(),
    };
    let mut rows = String::new();
    for category in CATEGORIES {
        let most = run.memory.iter().filter_map(|line| bytes(line, category)).reduce(f64::max);
        let (planned, most) = (bytes(terms, category), most.filter(|_| category != "other"));
        if planned.unwrap_or(0.0) + most.unwrap_or(0.0) > 0.0 {
            let name = category.replace('_', " ");
            rows += &format!("<tr><th>{name}</th>{}{}</tr>", cell(planned), cell(most));
        }
    }
    let peak = run.report["peak_bytes"].as_f64();
    format!(
        "<table><tr><th></th><th>foreseen at the peak</th><th>measured, the most</th></tr>{rows}\
         <tr class=sum><th>peak</th>{}{}</tr></table>",
        cell(Some(foreseen)),
        cell(peak)
    )
}

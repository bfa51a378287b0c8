//! What a run leaves to be looked at: the page, and TensorBoard's events.

use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn tallow(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.args(args).current_dir(env!("CARGO_TARGET_TMPDIR")).output().expect("the binary runs")
}

/// A short run with a budget and updates that are not applied.
fn run(name: &str) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("seeing-{name}"));
    let _ = fs::remove_dir_all(&out);
    let settings = [
        "data.source=synthetic",
        "data.image_size=[12, 12]",
        "data.n_samples=48",
        "train.batch=8",
        "train.epochs=2",
        "precision.compute=f16",
        "train.skip_above_norm=2.8",
    ];
    let mut args = vec!["train", "--budget", "64MiB", "--out", out.to_str().expect("a path")];
    settings.iter().for_each(|setting| args.extend(["--set", setting]));
    let output = tallow(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    out
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON")
}

fn refused(args: &[&str], needle: &str) {
    let output = tallow(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
    assert!(error.contains(needle) && error.lines().count() == 1, "{args:?}: {error}");
}

/// What lies between `start` and the next `end`, for each `start`.
fn between<'a>(text: &'a str, start: &str, end: &str) -> Vec<&'a str> {
    let ends = |rest: &'a str| rest.split(end).next().unwrap_or("");
    text.split(start).skip(1).map(ends).collect()
}

#[test]
fn the_page_shows_the_figures_of_the_report() {
    let out = run("page");
    let path = out.to_str().expect("a path");
    let output = tallow(&["report", path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = fs::read_to_string(out.join("report.html")).expect("a page");
    let report = json(&out.join("report.json"));
    let figures = between(&page, "data-key=", "</dd>");
    assert!(figures.len() > 20, "{figures:?}");
    for figure in figures {
        let key = figure.split(' ').next().expect("a key");
        let exact = between(figure, "data-value=\"", "\"")[0].replace("&quot;", "\"");
        assert_eq!(serde_json::from_str::<Value>(&exact).expect("JSON"), report[key], "{key}");
        let shown = figure.split('>').nth(1).expect("a text");
        let number = shown.split(' ').next().and_then(|word| word.parse::<f64>().ok());
        let (scale, digits) = match key {
            _ if key.ends_with("_bytes") => (1.0 / f64::from(1 << 20), 0.05),
            "accuracy" => (100.0, 0.005),
            _ => (1.0, 0.00005),
        };
        if let Some(exact) = report[key].as_f64() {
            let number = number.expect("a number");
            assert!((number - scale * exact).abs() <= digits + 1e-12, "{key}: {shown} of {exact}");
        }
    }
    // Nothing is fetched, and every update that was not applied has a mark.
    assert!(!page.contains("http") && !page.contains("<script") && !page.contains("src="));
    let skipped = report["skipped_steps"].as_u64().expect("a count") as usize;
    assert!(skipped > 0, "{report}");
    assert_eq!(page.matches("<line class=mark").count(), skipped);
    for part in
        ["Loss", "Accuracy", "Memory", "Plan against measured", "Learning rate", "Loss scale"]
    {
        assert!(page.contains(&format!("<h2>{part}")), "{part}");
    }
    assert!(page.contains("line limit"), "the budget");
    let plan = json(&out.join("plan.json"));
    let terms = plan["terms"].as_object().expect("terms").values();
    let sum: u64 = terms.map(|bytes| bytes.as_u64().expect("bytes")).sum();
    assert_eq!(sum, report["predicted_peak_bytes"], "{plan}");
    refused(&["report", "/no/such/run"], "`/no/such/run` is no folder");
    refused(&["report", env!("CARGO_MANIFEST_DIR")], "holds no run");
}

/// The fields of a protobuf message: number, and bytes or a number.
fn fields(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut fields = Vec::new();
    let varint = |bytes: &mut &[u8]| {
        let mut x = 0u64;
        for shift in (0..).step_by(7) {
            let (first, rest) = bytes.split_first().expect("a byte");
            *bytes = rest;
            x |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                break;
            }
        }
        x
    };
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => varint(&mut bytes).to_le_bytes().to_vec(),
            wire => {
                let n = match wire {
                    1 => 8,
                    5 => 4,
                    _ => varint(&mut bytes) as usize,
                };
                let (value, rest) = bytes.split_at(n);
                bytes = rest;
                value.to_vec()
            }
        };
        fields.push(((key >> 3) as u8, value));
    }
    fields
}

#[test]
fn tensorboard_gets_every_number() {
    let out = run("events");
    let entries = fs::read_dir(&out).expect("the run");
    let names = entries.map(|entry| entry.expect("an entry").path());
    let files: Vec<PathBuf> =
        names.filter(|path| path.to_string_lossy().contains("events.out.tfevents")).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let mut rest = &fs::read(&files[0]).expect("events")[..];
    let mut losses = Vec::new();
    let mut n_records = 0;
    while !rest.is_empty() {
        let n = u64::from_le_bytes(rest[..8].try_into().expect("eight bytes")) as usize;
        let event = fields(&rest[12..12 + n]);
        rest = &rest[12 + n + 4..];
        n_records += 1;
        let find = |number: u8, of: &[(u8, Vec<u8>)]| {
            of.iter().find(|(field, _)| *field == number).map(|(_, value)| value.clone())
        };
        let Some(summary) = find(5, &event) else { continue };
        let step = u64::from_le_bytes(find(2, &event).expect("a step").try_into().expect("eight"));
        for (_, value) in fields(&summary) {
            let value = fields(&value);
            if find(1, &value).expect("a tag") == b"loss/train" {
                let x = find(2, &value).expect("a value");
                losses.push((step, f32::from_le_bytes(x.try_into().expect("four bytes"))));
            }
        }
    }
    let metrics = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let want: Vec<(u64, f32)> = lines
        .filter_map(|line| Some((line["update"].as_u64()?, line.get("loss")?.as_f64()? as f32)))
        .collect();
    assert_eq!(losses, want);
    assert_eq!(n_records, 1 + metrics.lines().count());
}

//! What a run leaves to be looked at: the page, and TensorBoard's events.

use serde_json::Value;
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output},
};
use tallow_data::image;

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
    let mut args = vec!["train", "--budget", "6MiB", "--out", out.to_str().expect("a path")];
    settings.iter().for_each(|setting| args.extend(["--set", setting]));
    let output = tallow(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    out
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON")
}

/// What lies between `start` and the next `end`, for each `start`.
fn between<'a>(text: &'a str, start: &str, end: &str) -> Vec<&'a str> {
    let ends = |rest: &'a str| rest.split(end).next().unwrap_or("");
    text.split(start).skip(1).map(ends).collect()
}

/// A run, and its page.
fn drawn(name: &str) -> (PathBuf, String) {
    let out = run(name);
    let output = tallow(&["report", out.to_str().expect("a path")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = fs::read_to_string(out.join("report.html")).expect("a page");
    (out, page)
}

/// Every figure of the summary is the report's: as it is shown, and as it is exactly.
fn has_the_figures(page: &str, report: &Value) {
    let figures = between(page, "data-key=", "</dd>");
    assert!(figures.len() > 20, "{figures:?}");
    for figure in figures {
        let key = figure.split(' ').next().expect("a key").trim_matches('"');
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
}

#[test]
fn the_page_shows_the_figures_of_the_report() {
    let (out, page) = drawn("page");
    let report = json(&out.join("report.json"));
    has_the_figures(&page, &report);
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
}

/// The first of the usual names on the path.
fn browser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let names = BROWSERS.iter().flat_map(|name| folders.iter().map(move |dir| dir.join(name)));
    names.into_iter().find(|path| path.is_file())
}

const BROWSERS: [&str; 4] =
    ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// What a browser makes of `page`, offline and without an earlier user's settings.
fn opened(browser: &Path, page: &Path, profile: &Path, more: &[&str]) -> Output {
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--hide-scrollbars", "--window-size=1000,3200"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .args(more)
        .arg(format!("file://{}", page.display()))
        .output()
        .expect("starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The page as Chromium has read it shows the report's figures, and as it has drawn it, all of the charts:
/// colours of categories and of the budget cover some of it.
#[test]
fn a_browser_shows_the_figures_of_the_report() {
    let Some(browser) = browser() else {
        let why = format!("none of {} is on the path", BROWSERS.join(", "));
        // Past the harness, which keeps what a test that passes prints.
        let _ = writeln!(std::io::stderr(), "skipped: the page in a browser: {why}");
        return;
    };
    let (out, page) = drawn("browser");
    let report = json(&out.join("report.json"));
    let (html, profile, picture) =
        (out.join("report.html"), out.join("profile"), out.join("report.png"));
    let output = opened(&browser, &html, &profile, &["--dump-dom"]);
    let dom = String::from_utf8_lossy(&output.stdout);
    has_the_figures(&dom, &report);
    for part in ["<section>", "<svg ", "<path ", "<circle ", "<tr"] {
        assert_eq!(dom.matches(part).count(), page.matches(part).count(), "{part}");
    }
    let screenshot = format!("--screenshot={}", picture.display());
    opened(&browser, &html, &profile, &[&screenshot]);
    let content = fs::read(&picture).expect("a screenshot");
    let drawn = image::decode(&picture, &content, &image::Decode::rgb()).expect("a PNG");
    let style = include_str!("../src/page/style.css");
    for name in ["c0", "c1", "c5", "c6", "limit"] {
        let colour = between(style, &format!("\n.{name} {{ stroke: #"), ";")[0];
        let colour = colour.split(' ').next().map(|hex| u32::from_str_radix(hex, 16));
        let colour = colour.expect("a colour").expect("hexadecimal").to_be_bytes();
        let n_pixels = drawn.pixels().chunks(3).filter(|pixel| *pixel == &colour[1..]).count();
        assert!(n_pixels > 100, "{n_pixels} pixels of {name}");
    }
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

/// What TensorBoard keeps of the event files in `run`: it reads them by name, and forgets at each start
/// what there was from its step on.
fn scalars(run: &Path) -> Vec<(String, u64, f32)> {
    let entries = fs::read_dir(run).expect("the run");
    let names = entries.map(|entry| entry.expect("an entry").path());
    let mut files: Vec<PathBuf> =
        names.filter(|path| path.to_string_lossy().contains("events.out.tfevents")).collect();
    files.sort();
    let mut kept = Vec::new();
    for file in files {
        let content = fs::read(file).expect("events");
        let mut rest = &content[..];
        while !rest.is_empty() {
            let n = u64::from_le_bytes(rest[..8].try_into().expect("eight bytes")) as usize;
            let event = fields(&rest[12..12 + n]);
            rest = &rest[12 + n + 4..];
            let find = |number: u8, of: &[(u8, Vec<u8>)]| {
                of.iter().find(|(field, _)| *field == number).map(|(_, value)| value.clone())
            };
            let step = find(2, &event).expect("a step").try_into().expect("eight bytes");
            let step = u64::from_le_bytes(step);
            if find(7, &event).is_some() {
                kept.retain(|(_, at, _)| *at < step);
            }
            for (_, value) in fields(&find(5, &event).unwrap_or_default()) {
                let value = fields(&value);
                let tag = String::from_utf8(find(1, &value).expect("a tag")).expect("UTF-8");
                let x = find(2, &value).expect("a value").try_into().expect("four bytes");
                kept.push((tag, step, f32::from_le_bytes(x)));
            }
        }
    }
    kept
}

/// `xtask/reference/tensorboard_events.py` compares what TensorBoard itself reads.
#[test]
fn tensorboard_gets_every_number() {
    let out = run("events");
    let has_every_number = || {
        let metrics = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
        let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let lines: Vec<Value> = lines.collect();
        let scalars = scalars(&out);
        for (tag, key) in [
            ("loss/train", "loss"),
            ("learning_rate", "learning_rate"),
            ("loss_scale", "loss_scale"),
            ("memory/live_bytes", "live_bytes"),
            ("memory/peak_bytes", "peak_bytes"),
            ("loss/held_out", "held_out_loss"),
            ("accuracy/held_out", "accuracy"),
        ] {
            let of =
                |line: &Value| Some((line["update"].as_u64()?, line.get(key)?.as_f64()? as f32));
            let want: Vec<(u64, f32)> = lines.iter().filter_map(of).collect();
            let got = scalars.iter().filter(|(name, ..)| name == tag);
            let got: Vec<(u64, f32)> = got.map(|(_, step, x)| (*step, *x)).collect();
            assert!(!want.is_empty());
            assert_eq!(got, want, "{tag}");
        }
        lines.len()
    };
    let n_lines = has_every_number();
    // The judgement in the midst of an epoch, where the run ended, is not one of the run that goes on.
    let path = out.to_str().expect("a path");
    for (n_updates, n_more) in [("15", 4), ("24", 12)] {
        let set = format!("train.max_updates={n_updates}");
        let output = tallow(&["train", "--resume", path, "--set", "train.epochs=4", "--set", &set]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(has_every_number() >= n_lines + n_more);
    }
}

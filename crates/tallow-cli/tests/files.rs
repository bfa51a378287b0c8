//! Runs on files: photographs, text, tokens.

mod refusal;

use refusal::refused;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};
use tallow_data::image::{Channels, Image, encode_png};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tallow-files-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn train(source: &Path, out: &Path, settings: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.args(["train", "--out"]).arg(out).stdin(Stdio::null());
    command.args(["--set", &format!("data.source={}", source.display())]);
    settings.iter().for_each(|setting| {
        command.args(["--set", setting]);
    });
    command.output().expect("starts")
}

fn report(output: &Output, out: &Path) -> serde_json::Value {
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    let text = fs::read_to_string(out.join("report.json")).expect("a report");
    serde_json::from_str(&text).expect("JSON")
}

/// Two classes: bright on the left, bright on the right.
fn photographs(folder: &Path, n: usize) {
    for class in 0..2usize {
        let class_folder = folder.join(["left", "right"][class]);
        fs::create_dir_all(&class_folder).expect("a folder");
        for i in 0..n {
            let pixel = |place: usize| {
                let column = place % 20;
                let bright = (column < 10) == (class == 0);
                let value = (if bright { 180 } else { 60 }) + (i * 7 + place * 13) % 40;
                [value as u8; 3]
            };
            let pixels = (0..18 * 20).flat_map(pixel).collect();
            let image = Image::new([18, 20], Channels::Rgb, pixels).expect("an image");
            let png = encode_png(&image).expect("a PNG");
            // Known by content, not by name.
            fs::write(class_folder.join(format!("{i}.jpg")), png).expect("written");
        }
    }
}

const SMALL: [&str; 4] =
    ["data.image_size=[16, 16]", "train.batch=16", "train.epochs=8", "data.held_out=16"];

#[test]
fn a_folder_of_photographs_is_learnt() {
    let folder = Folder::new("photos");
    let source = folder.path("set");
    photographs(&source, 40);
    let out = folder.path("run");
    let report = report(&train(&source, &out, &SMALL), &out);
    assert!(report["accuracy"].as_f64().expect("a share") > 0.9, "{report}");
    assert_eq!(report["size"], serde_json::json!([16, 16]));

    // Read ahead in threads, cut and flipped by chance: the same twice.
    let [first, second] = ["a", "b"].map(|name| {
        let out = folder.path(name);
        let more = ["data.augment=true", "data.prefetch_bytes=64KiB", "train.epochs=2"];
        let report = self::report(&train(&source, &out, &[&SMALL[..], &more].concat()), &out);
        (report["loss"].to_string(), report["train_loss"].to_string())
    });
    assert_eq!(first, second);
    assert_ne!(first.1, report["train_loss"].to_string());
}

#[test]
fn a_damaged_photograph_ends_the_run_by_name_or_is_left_out() {
    let folder = Folder::new("damaged");
    let source = folder.path("set");
    photographs(&source, 20);
    // One to learn from, one that is held out.
    for name in ["left/7.jpg", "right/3.jpg"] {
        let bad = source.join(name);
        let whole = fs::read(&bad).expect("bytes");
        fs::write(&bad, &whole[..whole.len() / 2]).expect("written");
    }
    let settings = ["data.image_size=[16, 16]", "train.batch=8", "train.epochs=1"];
    refused(&train(&source, &folder.path("fail"), &settings), ".jpg`: PNG: ");
    let skip = [&settings[..], &["data.on_corrupt=skip"]].concat();
    let out = folder.path("skip");
    let output = train(&source, &out, &skip);
    assert_eq!(report(&output, &out)["skipped_samples"], 1);
    let said = String::from_utf8_lossy(&output.stdout);
    for (what, name) in [("\nsamples", "right/3.jpg"), ("\nheld-out samples", "left/7.jpg")] {
        let place = source.join(name);
        let line =
            format!("{what} left out: 1 over all epochs, the first: `{}`: PNG: ", place.display());
        assert!(said.contains(&line), "{said}");
    }
    let none = [&settings[..], &["data.max_skipped=3"]].concat();
    refused(&train(&source, &folder.path("x"), &none), "data.on_corrupt is not skip");
    let tokens = [&settings[..], &["data.seq_tokens=3"]].concat();
    refused(&train(&source, &folder.path("x"), &tokens), "data.seq_tokens is given");
    let gpt = train(&source, &folder.path("x"), &["model.name=gpt2"]);
    refused(&gpt, "which learns tokens");
}

#[test]
fn a_text_is_learnt_byte_by_byte() {
    let folder = Folder::new("text");
    let source = folder.path("text.txt");
    fs::write(&source, "a candle gives light; tallow gives the candle. ".repeat(200))
        .expect("written");
    let out = folder.path("run");
    let settings = [
        "model.name=gpt2",
        "model.model_dim=32",
        "model.n_layers=2",
        "model.n_heads=2",
        "model.context=32",
        "train.batch=16",
        "train.epochs=12",
        "train.learning_rate=0.01",
    ];
    let report = report(&train(&source, &out, &settings), &out);
    assert!(report["loss"].as_f64().expect("a loss") < 2.0, "{report}");
    assert_eq!(report["size"], serde_json::json!([32]));

    let with = |more: &[&str]| train(&source, &folder.path("x"), &[&settings[..], more].concat());
    refused(&with(&["model.vocab=100"]), "outside the 100 of the vocabulary");
    refused(&with(&["data.format=u64"]), "data.format `u64` is unknown");
    refused(&with(&["data.image_size=[8, 8]"]), "data.image_size is given");
    refused(&with(&["data.held_out=100000"]), "leaves nothing of the");
    let digits = train(&source, &folder.path("x"), &["train.epochs=1"]);
    refused(&digits, "is a file of tokens, but resnet-digits learns images");
    fs::write(folder.path("short.bin"), [1, 2, 3]).expect("written");
    let odd = train(&folder.path("short.bin"), &folder.path("x"), &settings);
    refused(&odd, "no whole number");
}

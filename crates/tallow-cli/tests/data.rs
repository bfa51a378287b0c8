//! `tallow data inspect`, as a person meets it.

mod refusal;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("data").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a temporary folder");
    folder
}

fn inspect(path: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tallow"))
        .args(["data", "inspect"])
        .arg(path)
        .args(more)
        .output()
        .expect("the binary runs")
}

/// What went to standard output all the same.
#[track_caller]
fn refused(path: &Path, more: &[&str], needle: &str) -> String {
    let output = inspect(path, more);
    refusal::refused(&output, needle);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_good_file() {
    let path = folder("good").join("t.csv");
    fs::write(&path, "name,x\na,1\nb,2\n").expect("written");
    let output = inspect(&path, &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success()
            && text.contains("t.csv: CSV")
            && text.contains("samples          2"),
        "{text}"
    );
    let output = inspect(&path, &["--json"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&value["samples"], &value["bad_samples"]), (&2.into(), &0.into()));
    assert_eq!(value["fields"][1]["dtype"], "number");
}

#[test]
fn a_missing_path_an_empty_folder_and_a_bad_file() {
    let root = folder("bad");
    refused(&root.join("none"), &[], "none` does not exist");
    refused(&root, &[], "holds no file `*.jpg");
    let path = root.join("x.npy");
    fs::write(&path, b"\x93NUMPY\x01\x00\xff\xff{").expect("written");
    refused(&path, &[], "x.npy` at byte 10: cut short");
    let path = root.join("x.jsonl");
    fs::write(&path, "{}\n{\n").expect("written");
    let text = refused(&path, &[], "1 of 2 samples cannot be read");
    assert!(text.contains("bad samples      1"), "{text}");
    let text = refused(&path, &["--json"], "1 of 2 samples");
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON, bad samples or not");
    assert_eq!(value["bad_samples"], 1);
}

/// A black PNG of one pixel.
const PIXEL: &[u8] = b"\x89\x50\x4e\x47\x0d\x0a\x1a\x0a\x00\x00\x00\x0d\x49\x48\x44\x52\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00\x3a\x7e\x9b\x55\x00\x00\x00\x0a\x49\x44\x41\x54\x78\x9c\x63\x60\x00\x00\x00\x02\x00\x01\x48\xaf\xa4\x71\x00\x00\x00\x00\x49\x45\x4e\x44\xae\x42\x60\x82";

#[test]
fn a_sheet_of_a_folder_with_a_bad_image() {
    let root = folder("sheet");
    fs::create_dir(root.join("cats")).expect("made");
    fs::write(root.join("cats/a.jpg"), PIXEL).expect("written");
    fs::write(root.join("cats/b.png"), &PIXEL[..40]).expect("written");
    let sheet = root.join("sheet.png");
    let text = refused(&root, &["--sheet", sheet.to_str().expect("a path")], "cats/b.png`: PNG: ");
    assert!(text.contains("class cats       2"), "{text}");
    assert!(fs::read(&sheet).expect("a sheet").starts_with(b"\x89PNG"));
    let file = root.join("t.txt");
    fs::write(&file, "words\n").expect("written");
    refused(
        &file,
        &["--sheet", sheet.to_str().expect("a path")],
        "t.txt`: no images that a sheet could show",
    );
}

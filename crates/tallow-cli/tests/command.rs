//! The binary, as a person meets it: what it prints, what it leaves, and how it refuses.

mod refusal;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A folder of this test's own, empty, under the build's temporary folder.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a temporary folder");
    folder
}

fn tallow(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tallow"))
        .args(args)
        .current_dir(refusal::place()) // refused runs leave nothing in the sources
        .env("RUST_BACKTRACE", "1")
        .output()
        .expect("the binary runs")
}

/// Refused, and nothing trained.
#[track_caller]
fn refused(args: &[&str], needle: &str) {
    refusal::refused(&tallow(args), needle);
}

/// An IDX file of `dims` with element type `code`.
fn idx(code: u8, dims: &[u32], n_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0, 0, code, dims.len() as u8];
    bytes.extend(dims.iter().flat_map(|d| d.to_be_bytes()));
    bytes.extend((0..n_bytes).map(|i| (i % 10) as u8));
    bytes
}

const IMAGES: &str = "a-images-idx3-ubyte";
const LABELS: &str = "a-labels-idx1-ubyte";

/// A folder of `n` 28x28 images and labels.
fn image_folder(name: &str, n: u32) -> PathBuf {
    let folder = folder(name);
    fs::write(folder.join(IMAGES), idx(8, &[n, 28, 28], n as usize * 784)).expect("written");
    fs::write(folder.join(LABELS), idx(8, &[n], n as usize)).expect("written");
    folder
}

fn source(folder: &Path) -> String {
    format!("data.source={}", folder.display())
}

#[test]
fn a_short_run_reports_and_repeats_itself() {
    let out = folder("short");
    // The second run on one thread: the number of threads changes nothing.
    let run = |name: &str, threads: &str| {
        let out = out.join(name);
        let output = Command::new(env!("CARGO_BIN_EXE_tallow"))
            .args(["train", "--set", "train.max_updates=3", "--out"])
            .arg(&out)
            .env("RAYON_NUM_THREADS", threads)
            .output()
            .expect("the binary runs");
        let (text, error) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{error}");
        assert!(
            text.contains("77754 parameters, on 9000 samples of 28 x 28 (1000 held out)"),
            "{text}"
        );
        assert!(text.contains("bytes"), "{text}");
        let report = fs::read_to_string(out.join("report.json")).expect("a report");
        serde_json::from_str::<serde_json::Value>(&report).expect("JSON")
    };
    let (a, b) = (run("a", "2"), run("b", "1"));
    for key in ["loss", "train_loss", "accuracy", "updates", "params", "seed"] {
        assert_eq!(a[key], b[key], "{key}");
    }
    assert_eq!(a["updates"], 3);
    assert_eq!(a["batch"], 32);
    let peak = a["peak_bytes"].as_u64().expect("a count");
    // The embedded images alone are 7.8 MB; a batch of activations is some dozen.
    assert!((8_000_000..200_000_000).contains(&peak), "{peak}");
    assert!(a["rss_peak_bytes"].as_u64().expect("a count") >= peak / 2);
}

#[test]
fn another_seed_is_another_run() {
    let out = folder("seeds");
    let loss = |seed: &str| {
        let path = out.join(seed);
        let set = format!("train.seed={seed}");
        let path = path.to_str().expect("a path");
        let output =
            tallow(&["train", "--set", &set, "--set", "train.max_updates=1", "--out", path]);
        assert!(output.status.success());
        fs::read_to_string(Path::new(path).join("report.json")).expect("a report")
    };
    let line = |report: &str| {
        report.lines().find(|l| l.contains("\"train_loss\"")).expect("a loss").to_string()
    };
    assert_ne!(line(&loss("1")), line(&loss("2")));
}

#[test]
fn a_configuration_file_is_read_and_overridden() {
    let folder = folder("config");
    let config = folder.join("c.toml");
    fs::write(&config, "[train]\nbatch = 10\nmicro_batch = 4\nmax_updates = 9\n").expect("written");
    let out = folder.join("out");
    let (config, out) = (config.to_str().expect("a path"), out.to_str().expect("a path"));
    let output = tallow(&["train", config, "--set", "train.max_updates=2", "--out", out]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report = fs::read_to_string(Path::new(out).join("report.json")).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!((&report["batch"], &report["micro_batch"]), (&10.into(), &4.into()));
    assert_eq!(report["updates"], 2);
}

#[test]
fn cli_1_batch_arithmetic_is_refused_with_the_numbers() {
    let set = |settings: &[&str], needle: &str| {
        let mut args = vec!["train"];
        settings.iter().for_each(|s| args.extend(["--set", s]));
        refused(&args, needle);
    };
    set(&["train.batch=0"], "batch is 0, 1 is the least");
    set(&["train.micro_batch=0"], "micro_batch is 0");
    set(&["train.batch=8", "train.accumulate=0"], "accumulate is 0");
    set(
        &["train.batch=8", "train.micro_batch=16"],
        "micro_batch 16 is larger than the 8 samples of a batch on one rank; the largest that fits is 8",
    );
    set(&["train.batch=10", "train.micro_batch=4", "train.accumulate=2"], "makes 3 of them");
    set(&["train.batch=9001"], "a batch of 9001 is more than the 9000 samples");
    set(&["train.epochs=0"], "epochs is 0");
    set(&["train.max_updates=0"], "max_updates is 0");
    let five = image_folder("five", 5);
    set(&[&source(&five), "train.batch=8"], "a batch of 8 is more than the 4 samples");
}

#[test]
fn bad_data_is_refused_by_name() {
    let with = |name: &str, change: &dyn Fn(&Path), needle: &str| {
        let folder = image_folder(name, 20);
        change(&folder);
        refused(&["train", "--set", &source(&folder), "--set", "train.batch=4"], needle);
    };
    refused(&["train", "--set", "data.source=/no/such/folder"], "`/no/such/folder` does not exist");
    let write = |file: &'static str, bytes: Vec<u8>| {
        move |folder: &Path| fs::write(folder.join(file), &bytes).expect("written")
    };
    with("missing", &|f| fs::remove_file(f.join(LABELS)).expect("removed"), "holds no file");
    with("truncated", &write(IMAGES, idx(8, &[20, 28, 28], 20 * 784 - 1)), IMAGES);
    with("empty", &write(IMAGES, vec![]), IMAGES);
    with("not-idx", &write(IMAGES, b"hello, world, this is text".to_vec()), IMAGES);
    with("floats", &write(IMAGES, idx(13, &[20, 28, 28], 20 * 784 * 4)), "f32");
    with("labels-for-images", &write(IMAGES, idx(8, &[20], 20)), IMAGES);
    with("fewer-labels", &write(LABELS, idx(8, &[19], 19)), "19");
    refused(
        &[
            "train",
            "--set",
            &source(&image_folder("all-held-out", 20)),
            "--set",
            "data.held_out=20",
        ],
        "data.held_out 20 leaves nothing of the 20 images",
    );
}

/// Two updates with these settings, and the report.
fn report_of(name: &str, settings: &[&str]) -> serde_json::Value {
    let out = folder(name);
    let path = out.to_str().expect("a path");
    let mut args = vec!["train", "--out", path, "--set", "train.max_updates=2"];
    settings.iter().for_each(|s| args.extend(["--set", s]));
    let output = tallow(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report = fs::read_to_string(out.join("report.json")).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert!(report["updates"].as_u64().expect("a count") > 0, "{settings:?} trained nothing");
    report
}

#[test]
fn cli_2_every_memory_option_is_reported_and_moves_bytes() {
    let bytes = |report: &serde_json::Value, key: &str| report[key].as_u64().expect("a count");
    let plain = report_of("plain", &[]);
    assert_eq!(
        (&plain["precision"], &plain["optimizer"]),
        (&"f32".into(), &"adamw, f32 state".into())
    );
    for (name, settings, key, value, moved) in [
        ("bf16", &["precision.compute=bf16"][..], "precision", "bf16", "peak_bytes"),
        (
            "f16",
            &["precision.compute=f16", "precision.loss_scale=1024"][..],
            "precision",
            "f16",
            "peak_bytes",
        ),
        (
            "8bit",
            &["optimizer.state=8bit"][..],
            "optimizer",
            "adamw, 8bit state",
            "optimizer_state_bytes",
        ),
        (
            "state-bf16",
            &["optimizer.state=bf16"][..],
            "optimizer",
            "adamw, bf16 state",
            "optimizer_state_bytes",
        ),
        (
            "sgd",
            &["optimizer.name=sgd"][..],
            "optimizer",
            "sgd, f32 state",
            "optimizer_state_bytes",
        ),
        (
            "lion",
            &["optimizer.name=lion"][..],
            "optimizer",
            "lion, f32 state",
            "optimizer_state_bytes",
        ),
        ("accumulate", &["train.accumulate=4"][..], "precision", "f32", "peak_bytes"),
        (
            "recompute",
            &["memory.recompute=all"][..],
            "recompute",
            "all, 4 of 5 segments",
            "peak_bytes",
        ),
        (
            "offload",
            &["memory.offload_dir=."][..],
            "optimizer",
            "adamw, f32 state in a file",
            "optimizer_resident_bytes",
        ),
        (
            "release",
            &["optimizer.release_gradients=true"][..],
            "gradients",
            "released",
            "peak_bytes",
        ),
    ] {
        let report = report_of(name, settings);
        assert_eq!(report[key], value, "{settings:?}");
        let (got, before) = (bytes(&report, moved), bytes(&plain, moved));
        assert!(got < before, "{settings:?}: {moved} is {got}, without it {before}");
    }
    let bare = report_of("bare", &["precision.compute=bf16", "precision.masters=false"]);
    assert_eq!(bare["precision"], "bf16 without masters");
}

#[test]
fn an_out_folder_that_cannot_be_written_ends_the_run_at_once() {
    let file = folder("out-is-a-file").join("file");
    fs::write(&file, "x").expect("written");
    refused(&["train", "--out", file.to_str().expect("a path")], "--out");
}

#[test]
fn a_run_that_explodes_names_the_gradient() {
    let out = folder("explodes");
    let out = out.to_str().expect("a path");
    let output = tallow(&["train", "--set", "train.learning_rate=1e30", "--out", out]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("is not finite"), "{error}");
}

#[test]
fn a_batch_that_cannot_be_normalised_is_refused_before_the_first_update() {
    // 37 training images in batches of 4 leave a last batch of one, and 4x4 images one pixel a plane
    // in the last stage.
    let folder = folder("tiny");
    fs::write(folder.join(IMAGES), idx(8, &[41, 4, 4], 41 * 16)).expect("written");
    fs::write(folder.join(LABELS), idx(8, &[41], 41)).expect("written");
    refused(
        &["train", "--set", &source(&folder), "--set", "train.batch=4"],
        "a micro-batch of 1 samples cannot be trained on: batch norm: one value per channel",
    );
}

#[test]
fn a_run_that_applies_nothing_or_explodes_fails() {
    let folder = image_folder("applies-nothing", 40);
    let args = |settings: &[&'static str]| {
        let mut args = vec!["train".to_string(), "--set".to_string(), source(&folder)];
        settings.iter().for_each(|s| args.extend(["--set".to_string(), s.to_string()]));
        args
    };
    let huge = args(&["train.batch=4", "train.max_updates=1", "train.learning_rate=1e30"]);
    let huge: Vec<&str> = huge.iter().map(String::as_str).collect();
    let output = tallow(&huge);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("the weights have exploded"), "{error}");
}

#[test]
fn a_report_of_an_earlier_run_does_not_survive_a_failed_one() {
    let out = folder("stale");
    fs::write(out.join("report.json"), "{}").expect("written");
    let path = out.to_str().expect("a path");
    let output = tallow(&["train", "--set", "train.learning_rate=1e30", "--out", path]);
    assert_eq!(output.status.code(), Some(2));
    assert!(!out.join("report.json").exists());
}

#[test]
fn a_reader_that_goes_away_does_not_end_a_run() {
    use std::process::Stdio;
    let out = folder("pipe");
    let mut child = Command::new(env!("CARGO_BIN_EXE_tallow"))
        .args(["train", "--set", "train.max_updates=2", "--out"])
        .arg(&out)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    drop(child.stdout.take());
    assert!(child.wait().expect("it ends").success());
    assert!(out.join("report.json").exists());
}

/// An answer that could not be written is none, and nothing says that it was given.
#[test]
#[cfg(target_os = "linux")]
fn an_answer_that_cannot_be_written_is_an_error() {
    let out = folder("unwritten");
    let path = out.to_str().expect("a path");
    let output = tallow(&["train", "--set", "train.max_updates=1", "--out", path]);
    assert!(output.status.success());
    for args in [
        &["plan", "--set", "precision.compute=f32"][..],
        &["plan", "--json", "--set", "precision.compute=f32"],
        &["config", "--print-defaults"],
        &["config", "--schema"],
        &["report", path],
        &["data", "inspect", path],
        &["data", "inspect", path, "--json"],
        &["data", "bench", "--batches", "1"],
        &["data", "bench", "--batches", "1", "--json"],
        &["--help"],
        &["train", "--help"],
        &["--version"],
    ] {
        fs::write(out.join("words.txt"), "words\n").expect("written"); // for `data inspect`
        let full = fs::File::options().write(true).open("/dev/full").expect("opened");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
        let output = command.args(args).stdout(full).output().expect("the binary runs");
        println!("{args:?}");
        refusal::refused(&output, "standard output: No space left on device");
    }
}

#[test]
fn it_helps() {
    let output = tallow(&["--help"]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("train"));
    let output = tallow(&["--version"]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("tallow "));
}

#[test]
fn a_budget_is_kept_and_its_peak_foreseen() {
    let report = report_of("budget", &["memory.budget=20MiB"]);
    let bytes = |key: &str| report[key].as_u64().expect("a count") as f64;
    let (peak, foreseen) = (bytes("peak_bytes"), bytes("predicted_peak_bytes"));
    assert!(peak <= 20.0 * 1024.0 * 1024.0, "{peak}");
    assert!((foreseen / peak - 1.0).abs() < 0.05, "{foreseen} foreseen, {peak} held");
}

#[test]
fn a_plan_is_printed_without_training() {
    let output = tallow(&["plan", "--budget", "20MiB"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("chosen") && text.contains("saved activations"), "{text}");
    let output = tallow(&["plan", "--json", "--set", "precision.compute=f32"]);
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(plan["predicted_peak_bytes"].as_u64().expect("a count") > 20_000_000, "{plan}");
    assert_eq!(plan["precision"], "f32");
}

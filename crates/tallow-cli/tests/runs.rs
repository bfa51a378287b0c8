//! Runs that are stopped, killed and taken up again.
#![cfg(unix)]

mod refusal;
mod support;

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};
use support::{Folder, Left, ends, resume, tallow, what_is_left};

const N_UPDATES: usize = 24;

/// A small network on small made-up images: dropout-free, but f16 with a dynamic scale, 8-bit moments and
/// sums over four micro-batches.
const SETTINGS: [&str; 11] = [
    "data.source=synthetic",
    "data.image_size=[12, 12]",
    "data.n_samples=48",
    "data.held_out=8",
    "train.batch=8",
    "train.accumulate=4",
    "train.epochs=4",
    "precision.compute=f16",
    "optimizer.state=8bit",
    "checkpoint.every=1",
    "checkpoint.keep=3",
];

fn begin(folder: &Path) -> Command {
    let mut command = tallow(&["train", "--out"]);
    command.arg(folder);
    SETTINGS.iter().for_each(|setting| {
        command.args(["--set", setting]);
    });
    command
}

fn straight(name: &str) -> (Folder, Left) {
    let folder = Folder::new(name);
    ends(&mut begin(&folder.0));
    let left = what_is_left(&folder.0);
    assert_eq!(left.2.len(), N_UPDATES);
    (folder, left)
}

/// Killed without a word at moments that a generator of numbers chooses, also within a save.
#[test]
fn a_killed_run_goes_on_to_the_same_bits() {
    let (_straight, want) = straight("straight");
    let folder = Folder::new("killed");
    let (mut n_kills, mut state, mut has_begun) = (0, 1u64, false);
    loop {
        let mut command = if has_begun { resume(&folder.0) } else { begin(&folder.0) };
        let mut run = command.stdout(Stdio::null()).spawn().expect("starts");
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Later each time, so that slow machines come to the end too.
        let wait = 20 + (state >> 33) % 150 + 20 * n_kills;
        thread::sleep(Duration::from_millis(wait));
        if let Some(status) = run.try_wait().expect("a child") {
            assert!(status.success(), "{status}");
            break;
        }
        run.kill().expect("killed");
        run.wait().expect("ends");
        has_begun = folder.0.join("config.toml").is_file();
        n_kills += 1;
    }
    assert!(n_kills > 2, "{n_kills} kills");
    let got = what_is_left(&folder.0);
    assert_eq!(got.2, want.2, "losses after {n_kills} kills");
    assert!(got.0 == want.0, "weights after {n_kills} kills");
    assert!(got.1 == want.1, "moments after {n_kills} kills");
}

#[test]
fn a_signal_saves_and_says_so() {
    let (_straight, want) = straight("unsignalled");
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let folder = Folder::new(signal);
        let metrics = folder.0.join("metrics.jsonl");
        let mut command = begin(&folder.0);
        // It would go on for long.
        command.args(["--set", "train.epochs=1000"]);
        let run = command.stdout(Stdio::piped()).spawn().expect("starts");
        while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 5 {
            thread::sleep(Duration::from_millis(5));
        }
        send(signal, &run);
        let output = run.wait_with_output().expect("ends");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains("stopped; `tallow train --resume"), "{said}");
        // The schedule counts the run's updates, so only the updates before are those of another length.
        let losses = what_is_left(&folder.0).2;
        assert!(losses.len() >= 5);
        let output = ends(tallow(&["train", "--set", "train.epochs=1", "--resume"]).arg(&folder.0));
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("going on after update"), "{said}");
        assert!(what_is_left(&folder.0).2.len() >= losses.len());
    }
    assert_eq!(want.2.len(), N_UPDATES);
}

fn send(signal: &str, run: &Child) {
    let kill = Command::new("kill").args(["-s", signal, &run.id().to_string()]).status();
    assert!(kill.expect("sent").success());
}

/// Before the first update there is nothing to save, and a store that never answers is not waited for.
#[test]
fn a_signal_before_the_first_update_ends_the_run_at_once() {
    let folder = Folder::new("unanswered");
    let store = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("data.source=http://{}/s.tar", store.local_addr().expect("an address"));
    let cache = format!("data.cache_dir={}", folder.0.join("cache").display());
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let mut command = tallow(&["train", "--set", "model.name=resnet18", "--set", &url]);
        command.args(["--set", &cache, "--out"]).arg(&folder.0).stdout(Stdio::piped());
        let run = command.spawn().expect("starts");
        let _asked = store.accept().expect("a request"); // and no answer
        send(signal, &run);
        assert_eq!(run.wait_with_output().expect("ends").status.code(), Some(code));
    }
}

/// The second signal does not wait, whatever the first was.
#[test]
fn a_second_signal_ends_the_run_at_once() {
    let folder = Folder::new("twice");
    let metrics = folder.0.join("metrics.jsonl");
    let mut command = begin(&folder.0);
    command.args(["--set", "train.epochs=1000"]);
    let run = command.stdout(Stdio::piped()).spawn().expect("starts");
    while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 2 {
        thread::sleep(Duration::from_millis(5));
    }
    send("STOP", &run); // both are there before it can answer one
    send("INT", &run);
    send("TERM", &run);
    send("CONT", &run);
    let output = run.wait_with_output().expect("ends");
    let (code, said) = (output.status.code(), String::from_utf8_lossy(&output.stdout));
    assert!(code == Some(130) || code == Some(143), "{code:?}");
    assert!(!said.contains("stopped;"), "{said}");
}

/// Two runs in one folder would write over each other's files.
#[test]
fn a_folder_in_use_is_not_taken_over() {
    let folder = Folder::new("shared");
    let (path, metrics) = (folder.0.display().to_string(), folder.0.join("metrics.jsonl"));
    let mut command = begin(&folder.0);
    command.args(["--set", "train.epochs=1000"]);
    let run = command.stdout(Stdio::piped()).spawn().expect("starts");
    while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 2 {
        thread::sleep(Duration::from_millis(5));
    }
    for args in [&["train", "--overwrite", "--out", &path][..], &["train", "--resume", &path]] {
        refused(args, "is in use by another run");
    }
    send("INT", &run);
    assert_eq!(run.wait_with_output().expect("ends").status.code(), Some(130));
    let updates: Vec<u64> =
        what_is_left(&folder.0).2.into_iter().map(|(update, _)| update).collect();
    assert!(updates.iter().copied().eq(1..=updates.len() as u64), "{updates:?}");
}

#[track_caller]
fn refused(arguments: &[&str], needle: &str) {
    refusal::refused(&tallow(arguments).output().expect("starts"), needle);
}

#[test]
fn a_folder_with_checkpoints_is_not_taken_over_by_chance() {
    let (folder, _) = straight("taken");
    let path = folder.0.display().to_string();
    refused(&["train", "--out", &path], "holds the checkpoints of another run");
    refused(&["train", "--resume", "/no/such/run"], "there is no run");
    // Another optimizer's moments are named, not taken.
    let other = ["train", "--resume", &path, "--set", "optimizer.name=lion"];
    refused(&other, "no longer allows");
    ends(begin(&folder.0).arg("--overwrite"));
}

/// Every damaged checkpoint is passed over, and said.
#[test]
fn a_damaged_checkpoint_is_passed_over() {
    let (folder, want) = straight("damaged");
    let entries = fs::read_dir(folder.0.join("checkpoints")).expect("checkpoints");
    let newest = entries.map(|entry| entry.expect("an entry").path()).max().expect("one");
    let weights = newest.join("weights.safetensors");
    let whole = fs::read(&weights).expect("bytes");
    fs::write(&weights, &whole[..whole.len() / 2]).expect("written");
    let output = ends(&mut resume(&folder.0));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("passed over") && said.contains("weights.safetensors"), "{said}");
    let got = what_is_left(&folder.0);
    assert_eq!(got.2, want.2, "losses");
    assert!(got.0 == want.0, "weights: {said}");
    assert!(got.1 == want.1, "moments");
}

//! What tests of stopped runs share.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

/// A folder of its own, gone with the test.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tallow-runs-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn tallow(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.args(arguments).env("RAYON_NUM_THREADS", "1").stdin(Stdio::null());
    command
}

pub(crate) fn resume(folder: &Path) -> Command {
    let mut command = tallow(&["train", "--resume"]);
    command.arg(folder);
    command
}

pub(crate) fn ends(command: &mut Command) -> Output {
    let output = command.output().expect("starts");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    output
}

/// The bytes of a safetensors file after its header, whose metadata are in any order.
fn tensors(file: &[u8]) -> Vec<u8> {
    let n_bytes = u64::from_le_bytes(file[..8].try_into().expect("eight bytes"));
    file[8 + n_bytes as usize..].to_vec()
}

/// Weights, moments, and (update, loss) of every line of the metrics.
pub(crate) type Left = (Vec<u8>, Vec<u8>, Vec<(u64, String)>);

/// The files of the newest checkpoint, and (update, loss) of every line.
pub(crate) fn what_is_left(folder: &Path) -> Left {
    let entries = fs::read_dir(folder.join("checkpoints")).expect("checkpoints");
    let newest = entries.map(|entry| entry.expect("an entry").path()).max().expect("one at least");
    let read = |name: &str| tensors(&fs::read(newest.join(name)).expect(name));
    let metrics = fs::read_to_string(folder.join("metrics.jsonl")).expect("metrics");
    let line = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).expect("whole lines");
        Some((value["update"].as_u64()?, value.get("loss")?.to_string()))
    };
    let losses = metrics.lines().filter_map(line).collect();
    (read("weights.safetensors"), read("optimizer.safetensors"), losses)
}

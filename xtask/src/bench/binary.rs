//! The `tallow` binary: a process a run.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Stands for a folder of the run's own in a setting's value.
const FOLDER: &str = "{folder}";

/// The binary, and a folder for what its runs leave.
pub(super) struct Binary {
    path: PathBuf,
    folder: PathBuf,
}

impl Binary {
    /// The one at `given`, or the release binary, built.
    pub(super) fn get(given: Option<&Path>) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("tallow-bench-{}", std::process::id()));
        if let Some(path) = given {
            ensure!(path.is_file(), "--binary `{}` is no file", path.display());
            return Ok(Self { path: path.to_path_buf(), folder });
        }
        Ok(Self { path: built("tallow")?, folder })
    }

    /// One run, and what it reported.
    /// # Errors
    /// What it complained about, or that it left no report.
    pub(super) fn train(&self, settings: &[String], budget: Option<&str>) -> Result<Value> {
        fs::create_dir_all(&self.folder)?;
        let result = self.trained(settings, budget);
        // A state file goes too, whether the run ended well or not.
        fs::remove_dir_all(&self.folder)?;
        result
    }

    fn trained(&self, settings: &[String], budget: Option<&str>) -> Result<Value> {
        let mut command = self.command("train", settings, budget);
        // Nobody goes on with such a run.
        command.args(["--set", "checkpoint.keep=0"]);
        output_of(command.arg("--out").arg(&self.folder))?;
        let read = |name: &str| {
            let path = self.folder.join(name);
            fs::read_to_string(&path).with_context(|| path.display().to_string())
        };
        let mut report: Value = serde_json::from_str(&read("report.json")?)?;
        report["losses"] = losses(&read("metrics.jsonl")?).into();
        if report["name"] == "synthetic" {
            // Noise cannot be learnt.
            report["accuracy"] = Value::Null;
        }
        Ok(report)
    }

    /// The plan, as `tallow plan --json` has it.
    /// # Errors
    /// What it complained about.
    pub(super) fn plan(&self, settings: &[String], budget: Option<&str>) -> Result<Value> {
        let output = output_of(self.command("plan", settings, budget).arg("--json"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        // Notices may stand before the object.
        let start = text.find('{').context("tallow plan --json printed no object")?;
        Ok(serde_json::from_str(&text[start..])?)
    }

    /// What `tallow WORDS --json` prints.
    /// # Errors
    /// What it complained about.
    pub(super) fn json(&self, words: &[&str], settings: &[String]) -> Result<Value> {
        let mut command = Command::new(&self.path);
        command.args(words).arg("--json");
        settings.iter().for_each(|setting| {
            command.args(["--set", setting]);
        });
        Ok(serde_json::from_slice(&output_of(&mut command)?.stdout)?)
    }

    fn command(&self, verb: &str, settings: &[String], budget: Option<&str>) -> Command {
        let mut command = Command::new(&self.path);
        command.arg(verb);
        for setting in settings {
            let setting = setting.replace(FOLDER, &self.folder.display().to_string());
            command.args(["--set", &setting]);
        }
        budget.iter().for_each(|budget| {
            command.args(["--budget", budget]);
        });
        command
    }
}

/// What everything is built as: with one selection of packages, what they share is compiled once.
const SELECTION: [&str; 6] =
    ["--package", "tallow-cli", "--package", "tallow-bench", "--features", "tallow-bench/train"];

/// Where the release binary `name` is, after it has been built.
/// # Errors
/// How the build ended.
pub(super) fn built(name: &str) -> Result<PathBuf> {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--release", "--quiet", "--bin", name])
        .args(SELECTION)
        .status()?;
    ensure!(status.success(), "cargo build --release --bin {name}: {status}");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or("target".into(), PathBuf::from);
    Ok(target.join("release").join(format!("{name}{}", std::env::consts::EXE_SUFFIX)))
}

/// The mean loss of every update.
fn losses(metrics: &str) -> Vec<f64> {
    let loss = |line: &str| serde_json::from_str::<Value>(line).ok()?["loss"].as_f64();
    metrics.lines().filter_map(loss).collect()
}

/// What a successful process printed.
/// # Errors
/// How it ended, and the last of what it complained about.
pub(super) fn output_of(command: &mut Command) -> Result<Output> {
    let program = command.get_program().to_owned();
    let output = command.output().with_context(|| program.display().to_string())?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    let last = complaint.trim().lines().last().unwrap_or_default().trim();
    ensure!(output.status.success(), "{}: {last}", output.status);
    Ok(output)
}

//! What `cuda-bench` runs, and how it gets to a machine that has a GPU.

use super::{cargo, toolkit::Toolkit};
use crate::metadata::Metadata;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Stdio,
};

/// One selection of packages: what they share is compiled once.
const BUILD: &str = "build --release --locked -p tallow-tensor -p tallow-bench \
                     --features tallow-tensor/cuda,tallow-bench/cuda --test device --bin device";

/// The driver's functions are in no library that is linked: the one here stands for it.
const WITHOUT_DRIVER: &str = "-Clink-arg=-Wl,--unresolved-symbols=ignore-all";

/// Programs, and what they need in their environment.
pub(super) struct Built {
    /// The tests of the operations.
    pub(super) tests: PathBuf,
    /// Training steps.
    pub(super) steps: PathBuf,
    pub(super) env: Vec<(String, String)>,
}

/// File names in a folder that is carried.
const TESTS: &str = "device-tests";
const STEPS: &str = "device-steps";

impl Built {
    /// Builds them.
    /// # Errors
    /// If the toolkit cannot be had, or they do not build.
    pub(super) fn here() -> Result<Self> {
        let metadata = Metadata::load()?;
        let toolkit = Toolkit::get(&metadata.workspace_root.join("target"), "python3")?;
        let mut cargo = cargo(&metadata, &toolkit)?;
        if toolkit.is_ours {
            cargo.env("RUSTFLAGS", WITHOUT_DRIVER);
        }
        println!("cargo {BUILD}");
        let args = BUILD.split_whitespace().chain(["--message-format", "json-render-diagnostics"]);
        let output = cargo.args(args).stderr(Stdio::inherit()).output();
        let output = output.context("starting cargo")?;
        ensure!(output.status.success(), "cargo {BUILD}: {}", output.status);
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(Self {
            tests: executable(&text, "test").context("cargo names no test that it has built")?,
            steps: executable(&text, "bin").context("cargo names no binary that it has built")?,
            env: toolkit.env()?,
        })
    }

    /// Those that [`Built::carry`] put into `folder`; libraries are found by the environment.
    /// # Errors
    /// If one is missing.
    pub(super) fn carried(folder: &Path) -> Result<Self> {
        let file = |name: &str| {
            let path = folder.join(name);
            ensure!(path.is_file(), "--carried: there is no `{}`", path.display());
            Ok(path)
        };
        Ok(Self { tests: file(TESTS)?, steps: file(STEPS)?, env: Vec::new() })
    }

    /// Copies them and this program into `folder`.
    /// # Errors
    /// If a file cannot be copied.
    pub(super) fn carry(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let this = env::current_exe()?;
        for (from, name) in [(&self.tests, TESTS), (&self.steps, STEPS), (&this, "xtask")] {
            let to = folder.join(name);
            fs::copy(from, &to).with_context(|| to.display().to_string())?;
        }
        Ok(())
    }
}

/// The executable of the target of a kind, as cargo's messages name it.
fn executable(messages: &str, kind: &str) -> Option<PathBuf> {
    let of_kind = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let is_it = message["target"]["kind"][0] == kind && message["target"]["name"] == "device";
        message["executable"].as_str().filter(|_| is_it).map(PathBuf::from)
    };
    messages.lines().find_map(of_kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_found_among_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"device"},"executable":null}
no message
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"start"},"executable":"/t/start"}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"device"},"executable":"/t/device"}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"device"},"executable":"/t/deps/device-1"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executable(messages, "bin"), Some(PathBuf::from("/t/device")));
        assert_eq!(executable(messages, "test"), Some(PathBuf::from("/t/deps/device-1")));
        assert_eq!(executable(messages, "example"), None);
    }

    #[test]
    fn what_is_carried_is_found_there() {
        let folder = env::temp_dir().join(format!("xtask-carried-{}", std::process::id()));
        let source = folder.join("source");
        fs::create_dir_all(&folder).unwrap();
        fs::write(&source, "x").unwrap();
        let missing = Built::carried(&folder).map(|_| ()).unwrap_err();
        assert!(missing.to_string().contains(TESTS), "{missing}");
        let built = Built { tests: source.clone(), steps: source, env: Vec::new() };
        built.carry(&folder).unwrap();
        let found = Built::carried(&folder).unwrap();
        assert_eq!(fs::read_to_string(found.steps).unwrap(), "x");
        assert!(folder.join("xtask").is_file() && found.tests.is_file());
        fs::remove_dir_all(&folder).unwrap();
    }
}

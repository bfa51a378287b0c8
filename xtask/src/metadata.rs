//! The part of `cargo metadata` that the checks read.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The workspace as `cargo metadata --no-deps` describes it.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) workspace_root: PathBuf,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
}

/// One line of a manifest. Renames, features and targets do not matter: `name` is the package.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `None` is a plain dependency.
    pub(crate) kind: Option<Kind>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Dev,
    Build,
}

impl Metadata {
    /// Asks cargo about the workspace of the current folder.
    pub(crate) fn load() -> Result<Metadata> {
        let output = Command::new("cargo")
            .args(["metadata", "--format-version", "1", "--no-deps"])
            .output()
            .context("starting `cargo metadata`")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`cargo metadata` says: {stderr}");
        Metadata::parse(&output.stdout)
    }

    pub(crate) fn parse(json: &[u8]) -> Result<Metadata> {
        serde_json::from_slice(json).context("reading the output of `cargo metadata`")
    }

    /// `path` as seen from the root, for messages.
    pub(crate) fn relative<'a>(&self, path: &'a Path) -> std::path::Display<'a> {
        path.strip_prefix(&self.workspace_root).unwrap_or(path).display()
    }
}

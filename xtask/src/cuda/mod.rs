//! `cargo xtask cuda-check` and `cargo xtask cuda-bench`: the workspace with its feature `cuda`.

mod bench;
mod build;
mod toolkit;

use crate::metadata::Metadata;
use anyhow::{Context, Result};
use std::process::Command;
use toolkit::Toolkit;

pub(crate) use bench::{CudaBench, bench};

/// Options of `cuda-check`.
#[derive(clap::Args)]
pub(crate) struct CudaCheck {
    /// A Python 3 that installs the toolkit where `CUDA_HOME` names none.
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: String,
}

/// Type-checks the workspace for CUDA; false if it does not pass. Needs no GPU: a toolkit that is not
/// there is installed below `target`.
pub(crate) fn check(metadata: &Metadata, options: &CudaCheck) -> Result<bool> {
    let toolkit = Toolkit::get(&metadata.workspace_root.join("target"), &options.python)?;
    println!("toolkit: {}", toolkit.root.display());
    let args = "check --locked --workspace --features cuda --lib --bins --test device";
    println!("cargo {args}");
    let mut cargo = cargo(metadata, &toolkit)?;
    let status = cargo.args(args.split(' ')).status().context("starting cargo")?;
    Ok(status.success())
}

/// Cargo with the toolkit, building beside the ordinary build, which keeps its own features.
fn cargo(metadata: &Metadata, toolkit: &Toolkit) -> Result<Command> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(&metadata.workspace_root).envs(toolkit.env()?);
    cargo.env("CARGO_TARGET_DIR", metadata.workspace_root.join("target").join("cuda"));
    Ok(cargo)
}

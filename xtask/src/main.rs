//! The workspace's own commands, run as `cargo xtask COMMAND`.

mod bench;
mod check;
mod cuda;
mod layers;
mod metadata;
mod source;
mod tidy;

use anyhow::Result;
use clap::{Parser, Subcommand};
use metadata::Metadata;
use std::process::ExitCode;

/// The workspace's own commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run every check: format, lints, layers, crates alone, documentation, licences.
    Check,
    /// Check manifests against the arrows of the design, and sources against the written rules.
    Layers,
    /// Type-check each library with nothing else selected.
    Alone,
    /// Type-check the workspace with its feature `cuda`; needs no GPU, and fetches a toolkit where
    /// there is none.
    CudaCheck(cuda::CudaCheck),
    /// On a machine with a GPU: build, check the operations against the CPU, measure; on one without: build
    /// what is carried there.
    CudaBench(cuda::CudaBench),
    /// Measure; each mode in its own process.
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    match run(&Args::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the command and says whether it found nothing wrong.
fn run(command: &Verb) -> Result<bool> {
    match command {
        Verb::Check => check::check(&Metadata::load()?),
        Verb::Layers => tidy::layers(&Metadata::load()?),
        Verb::Alone => check::alone(&Metadata::load()?),
        Verb::CudaCheck(options) => cuda::check(&Metadata::load()?, options),
        Verb::CudaBench(options) => cuda::bench(options),
        Verb::Bench(bench) => bench::run(bench),
    }
}

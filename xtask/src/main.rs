//! The workspace's own commands, run as `cargo xtask COMMAND`.

mod check;
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
    let metadata = Metadata::load()?;
    match command {
        Verb::Check => check::check(&metadata),
        Verb::Layers => tidy::layers(&metadata),
        Verb::Alone => check::alone(&metadata),
    }
}

//! The `tallow` binary.

mod config;
mod report;
mod train;
mod view;

use anyhow::Result;
use clap::{Parser, Subcommand, error::ErrorKind};
use std::{path::PathBuf, process::ExitCode};
use tallow_memory::CountingAllocator;

/// Counts every byte that the process asks for. mimalloc keeps freed pages mapped, which saves the
/// page faults that dominate elementwise work under the system allocator.
#[global_allocator]
static ALLOCATOR: CountingAllocator<mimalloc::MiMalloc> =
    CountingAllocator::new(mimalloc::MiMalloc);

/// Train networks in the memory you have.
#[derive(Parser)]
#[command(name = "tallow", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model; without a configuration, a small ResNet on 10 000 real handwritten digits.
    Train(TrainArguments),
}

#[derive(clap::Args)]
struct TrainArguments {
    /// Configuration file (TOML).
    config: Option<PathBuf>,
    /// Override one setting: section.key=value.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Folder for report.json; made if missing.
    #[arg(long, value_name = "DIR", default_value = "runs/latest")]
    out: PathBuf,
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", one_line(&format!("{error:#}")));
            ExitCode::from(2)
        }
    }
}

fn run(arguments: Arguments) -> Result<()> {
    match arguments.command {
        Command::Train(TrainArguments { config, set, out }) => {
            let config = config::load(config.as_deref(), &set)?;
            train::run(&config, &out, &ALLOCATOR)
        }
    }
}

/// Help and version go to standard output; a wrong argument is one line that names it.
fn usage(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            print!("{error}");
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            eprint!("{error}");
            ExitCode::from(2)
        }
        _ => {
            let text = error.to_string();
            eprintln!("{} (see `tallow --help`)", text.lines().next().unwrap_or("error"));
            ExitCode::from(2)
        }
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

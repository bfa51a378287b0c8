//! The `tallow` binary.

mod config;
mod data;
mod plan;
mod report;
mod train;
mod view;
mod workload;

use anyhow::Result;
use clap::{Parser, Subcommand, error::ErrorKind};
use std::{io::Write, path::PathBuf, process::ExitCode};
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
    /// Say how a model would be trained within a budget and what its peak would be, without training.
    Plan(PlanArguments),
    /// Look at data sets.
    #[command(subcommand)]
    Data(DataCommand),
}

#[derive(Subcommand)]
enum DataCommand {
    /// Say what is at a path, read every sample once, and name the bad ones; exit code 2 if there are any.
    Inspect(InspectArguments),
}

#[derive(clap::Args)]
struct InspectArguments {
    /// A file, a folder of IDX files, or a folder of images.
    path: PathBuf,
    /// As JSON.
    #[arg(long)]
    json: bool,
    /// Write a sheet of the images as PNG.
    #[arg(long, value_name = "FILE.png")]
    sheet: Option<PathBuf>,
}

#[derive(clap::Args)]
struct PlanArguments {
    /// Configuration file (TOML).
    config: Option<PathBuf>,
    /// Override one setting: section.key=value.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The most memory to use, such as 512MiB.
    #[arg(long, value_name = "BYTES")]
    budget: Option<String>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct TrainArguments {
    /// Configuration file (TOML).
    config: Option<PathBuf>,
    /// Override one setting: section.key=value.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The most memory to use, such as 512MiB; what the configuration leaves open is then planned.
    #[arg(long, value_name = "BYTES")]
    budget: Option<String>,
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
            complain(&format!("error: {}", one_line(&format!("{error:#}"))));
            ExitCode::from(2)
        }
    }
}

fn run(arguments: Arguments) -> Result<()> {
    match arguments.command {
        Command::Train(TrainArguments { config, set, budget, out }) => {
            let config = config::load(config.as_deref(), &set, budget.as_deref())?;
            if let Some(budget) = config.budget {
                ALLOCATOR.set_cap(budget);
            }
            train::run(&config, &out, &ALLOCATOR)
        }
        Command::Plan(PlanArguments { config, set, budget, json }) => {
            let config = config::load(config.as_deref(), &set, budget.as_deref())?;
            plan::run(&config, json, &ALLOCATOR)
        }
        Command::Data(DataCommand::Inspect(InspectArguments { path, json, sheet })) => {
            data::inspect(&path, json, sheet.as_deref())
        }
    }
}

/// To standard error; if that is gone, the exit code has to do.
fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Help and version go to standard output; a wrong argument is one line that names it.
fn usage(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            view::print_line(error.to_string().trim_end());
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            complain(error.to_string().trim_end());
            ExitCode::from(2)
        }
        _ => {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or("error");
            complain(&format!("{line} (see `tallow --help`)"));
            ExitCode::from(2)
        }
    }
}

/// The message alone: candle appends a backtrace where the environment asks for one.
fn one_line(text: &str) -> String {
    let message = text.split("\n   0: ").next().unwrap_or(text);
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

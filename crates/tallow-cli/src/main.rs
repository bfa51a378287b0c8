//! The `tallow` binary.

mod config;
mod data;
mod data_bench;
mod memory_log;
mod metrics;
mod observer;
mod page;
mod plan;
mod report;
mod run_dir;
mod sample;
mod scratch;
mod signals;
mod tensorboard;
mod train;
mod view;
mod workload;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand, error::ErrorKind};
use run_dir::Start;
use signals::Signals;
use std::{path::PathBuf, process::ExitCode};
use tallow_memory::CountingAllocator;
use view::{answer, note_line};

/// Counts every byte that the process asks for. mimalloc keeps freed pages mapped, which saves the
/// page faults that dominate elementwise work under the system allocator.
#[global_allocator]
static ALLOCATOR: CountingAllocator<mimalloc::MiMalloc> =
    CountingAllocator::new(mimalloc::MiMalloc);

/// Keeps what a step frees for the next step: mimalloc would give it back to the system after a
/// tenth of a second, and each page that comes anew must be cleared first. `MIMALLOC_PURGE_DELAY` in the
/// environment goes before.
fn keep_freed_pages() {
    /// `mi_option_purge_delay`, which the bindings do not name; milliseconds, tenfold for large blocks.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: sets a number that mimalloc reads; no thread but this one runs yet.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, 10_000) };
}

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
    /// Draw a run as one HTML page, report.html in its folder.
    Report {
        /// Folder of the run.
        folder: PathBuf,
    },
    /// Go on with a text: a look at what a language model has learned.
    Sample(SampleArguments),
    /// Say what can be configured.
    Config(ConfigArguments),
    /// Look at data sets.
    #[command(subcommand)]
    Data(DataCommand),
}

#[derive(Subcommand)]
enum DataCommand {
    /// Say what is at a path, read every sample once, and name the bad ones; exit code 2 if there are any.
    Inspect(InspectArguments),
    /// Read an epoch as `train` would: samples and bytes a second, peak bytes, and where the time goes.
    Bench(BenchArguments),
}

#[derive(clap::Args)]
struct BenchArguments {
    /// Configuration file (TOML), or data: a path or an address.
    what: Option<PathBuf>,
    /// Override one setting: section.key=value.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Stop after this many batches.
    #[arg(long)]
    batches: Option<usize>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct SampleArguments {
    /// Folder of a run, or weights with their config.json: a file or a folder.
    path: PathBuf,
    /// What to go on with.
    #[arg(long, default_value = "\n")]
    prompt: String,
    /// Tokens to add; 200, or as many as the model has positions for, if not given.
    #[arg(long)]
    tokens: Option<usize>,
    /// Divides the logits; 0: always the likeliest token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Draw from so many of the likeliest only.
    #[arg(long)]
    top_k: Option<usize>,
    /// Of the draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The tokenizer, a tokenizer.json; that beside the weights, or bytes, if not given.
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

#[derive(clap::Args)]
#[group(required = true)]
struct ConfigArguments {
    /// Every key with its default and what it is for, as TOML.
    #[arg(long)]
    print_defaults: bool,
    /// A JSON schema.
    #[arg(long, conflicts_with = "print_defaults")]
    schema: bool,
}

#[derive(clap::Args)]
struct InspectArguments {
    /// A file, a folder of IDX files, a folder of images, or a folder of shards.
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
    /// Folder of the run, made if missing; `runs/latest`, which each run takes over, if not given.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Take over a folder given by --out that holds checkpoints of another run: they are removed.
    #[arg(long, requires = "out")]
    overwrite: bool,
    /// Go on with the run in this folder from its newest checkpoint; --set changes its configuration,
    /// --budget plans anew.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "config"])]
    resume: Option<PathBuf>,
}

/// Where a run without a name leaves its files.
const LATEST: &str = "runs/latest";

fn main() -> ExitCode {
    keep_freed_pages();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    ended(run(arguments))
}

/// The exit code; an error is one line.
fn ended(result: Result<u8>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            note_line(&format!("error: {}", one_line(&all_of(&error))));
            ExitCode::from(2)
        }
    }
}

/// The exit code, where there is no error.
fn run(arguments: Arguments) -> Result<u8> {
    match arguments.command {
        Command::Train(arguments) => train(arguments),
        Command::Plan(PlanArguments { config, set, budget, json }) => {
            let config = config::load(config.as_deref(), &set, budget.as_deref())?;
            plan::run(&config, json, &ALLOCATOR).map(|()| 0)
        }
        Command::Report { folder } => answer!("{}", page::write(&folder)?.display()).map(|()| 0),
        Command::Sample(SampleArguments {
            path,
            prompt,
            tokens,
            temperature,
            top_k,
            seed,
            tokenizer,
        }) => {
            let sampling = sample::sampling(temperature, top_k, seed);
            sample::run(&path, &prompt, tokens, &sampling, tokenizer.as_deref()).map(|()| 0)
        }
        Command::Config(ConfigArguments { schema, .. }) => {
            match schema {
                true => answer!("{:#}", config::schema()?)?,
                false => answer!("{}", config::documented_defaults()?)?,
            }
            Ok(0)
        }
        Command::Data(DataCommand::Inspect(InspectArguments { path, json, sheet })) => {
            data::inspect(&path, json, sheet.as_deref()).map(|()| 0)
        }
        Command::Data(DataCommand::Bench(BenchArguments { what, set, batches, json })) => {
            let (what, set) = (what.as_deref(), &set[..]);
            let asked = data_bench::Asked { what, set, batches, as_json: json };
            data_bench::run(&asked, &ALLOCATOR).map(|()| 0)
        }
    }
}

fn train(arguments: TrainArguments) -> Result<u8> {
    let TrainArguments { config, set, budget, out, overwrite, resume } = arguments;
    let (path, start) = match &resume {
        Some(folder) => {
            let path = run_dir::config_path(folder);
            ensure!(path.is_file(), "--resume `{}`: there is no run", folder.display());
            (Some(path), Start::Resume)
        }
        None if out.is_none() || overwrite => (config, Start::Over),
        None => (config, Start::New),
    };
    let folder = resume.or(out).unwrap_or_else(|| PathBuf::from(LATEST));
    let plans_anew = budget.is_some();
    let config = config::load(path.as_deref(), &set, budget.as_deref())?;
    if let Some(budget) = config.budget {
        ALLOCATOR.set_cap(budget);
    }
    let signals = Signals::listen()?;
    train::run(&config, train::Where { folder: &folder, start, plans_anew }, &signals, &ALLOCATOR)
}

/// Help and version go to standard output; a wrong argument is one line that names it.
fn usage(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            ended(view::answer_line(error.to_string().trim_end()).map(|()| 0))
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            note_line(error.to_string().trim_end());
            ExitCode::from(2)
        }
        _ => {
            let text = error.to_string();
            // What is wrong, without the usage after it.
            let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
            let line = lines.collect::<Vec<_>>().join(" ");
            note_line(&format!("{line} (see `tallow --help`)"));
            ExitCode::from(2)
        }
    }
}

/// The message and its causes, but those that a message has repeated.
fn all_of(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
}

/// The message alone: candle appends a backtrace where the environment asks for one.
fn one_line(text: &str) -> String {
    let message = text.split("\n   0: ").next().unwrap_or(text);
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

//! Benchmarks: each mode in its own process, a table for people, a JSON object a row for machines.

mod accuracy;
mod binary;
mod cases;
mod data;
mod figure;
mod fit;
mod gpt;
mod host;
mod kernels;
mod large;
mod offload;
mod readme;
mod record;
mod resnet50;
mod scaling;
mod seed;
mod start;
mod stats;
mod sweep;
mod torch;
mod versus;

use anyhow::{Context, Result};
use binary::Binary;
use serde_json::Value;
use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

/// What can be measured.
#[derive(clap::Subcommand)]
pub(crate) enum Bench {
    /// Held-out accuracy of the digits model in each precision and optimizer format.
    Accuracy(accuracy::Accuracy),
    /// Whether budgets are kept, and peaks foreseen: models x batches x budgets.
    PlanSweep(sweep::PlanSweep),
    /// A GPT of 30M parameters: tallow's modes beside PyTorch's.
    Gpt(gpt::Gpt),
    /// ResNet-50: tallow's modes beside PyTorch's.
    Resnet50(resnet50::ResNet50),
    /// Samples a second from images, shards and tokens, beside PyTorch's loader.
    Data(data::Data),
    /// That GPT with its optimizer state in a file, beside the same in memory.
    Offload(offload::Offload),
    /// Each kernel beside candle's, the `gemm` crate's and PyTorch's, and the machine's limits.
    Kernels(kernels::Kernels),
    /// The reference table: ResNet-50 with each technique added, and each alone.
    SeedTable(seed::SeedTable),
    /// Training steps of Llama-shaped models of up to 1.1B parameters, under a budget.
    Large(large::Large),
    /// Peak and time against batch, image, sequence and depth, with figures and laws.
    Scaling(scaling::Scaling),
    /// Keep what benchmarks wrote with `--json`, with commit, processor and flags.
    Record(record::Record),
    /// How two records differ.
    Compare(record::Compare),
    /// Make a page's tables from a record.
    Readme(readme::Readme),
}

/// Options of every benchmark.
#[derive(clap::Args)]
pub(crate) struct Common {
    /// Little work: that the rows run at all, in about a minute.
    #[arg(long)]
    quick: bool,
    /// Also write one JSON object a run to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure this `tallow` instead of building one.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

impl Common {
    /// The binary to measure, and where its rows go.
    fn open(&self) -> Result<(Binary, Lines)> {
        // The file first: a path that cannot be written shall not cost a build.
        let lines = Lines::open(self.json.as_deref())?;
        Ok((Binary::get(self.binary.as_deref())?, lines))
    }
}

/// JSON lines, if they are wanted.
struct Lines(Option<File>);

impl Lines {
    fn open(path: Option<&Path>) -> Result<Self> {
        let file = path
            .map(|path| File::create(path).with_context(|| format!("--json `{}`", path.display())));
        Ok(Self(file.transpose()?))
    }

    fn write(&mut self, row: &Value) -> Result<()> {
        match &mut self.0 {
            Some(file) => Ok(writeln!(file, "{row}")?),
            None => Ok(()),
        }
    }
}

/// Runs one benchmark; false if a row failed to run, never because it was slow.
pub(crate) fn run(bench: &Bench) -> Result<bool> {
    match bench {
        Bench::Accuracy(options) => accuracy::run(options),
        Bench::PlanSweep(options) => sweep::run(options),
        Bench::Gpt(options) => gpt::run(options),
        Bench::Resnet50(options) => resnet50::run(options),
        Bench::Data(options) => data::run(options),
        Bench::Offload(options) => offload::run(options),
        Bench::Kernels(options) => kernels::run(options),
        Bench::SeedTable(options) => seed::run(options),
        Bench::Large(options) => large::run(options),
        Bench::Scaling(options) => scaling::run(options),
        Bench::Record(options) => record::record(options),
        Bench::Compare(options) => record::compare(options),
        Bench::Readme(options) => readme::run(options),
    }
}

/// Settings as `--set` takes them.
fn owned(settings: &[&str]) -> Vec<String> {
    settings.iter().map(|setting| (*setting).to_string()).collect()
}

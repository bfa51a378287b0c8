//! The configuration: a file, overrides, and what they mean once checked.
//!
//! Without a budget every choice is made: by the file, or by a default. With one, what the file
//! leaves open is the planner's: precision, micro-batch, recomputation, optimizer state.

mod data;
mod effective;
mod files;
mod keys;
mod known;
mod memory;
mod network;
mod optimizer;
mod precision;
mod sampled;
mod schema;
mod source;
mod weights;

pub(crate) use effective::Choice;
pub(crate) use files::{Format, LeftOut, Spent};
pub(crate) use network::{Model, Shape as DataShape};
pub(crate) use optimizer::Optimizer;
pub(crate) use precision::Precision;
pub(crate) use sampled::{Tokenized, network_of, network_of_weights};
pub(crate) use source::Opened;

use anyhow::{Context, Result, ensure};
use data::DataSection;
use memory::{Memory, MemorySection};
use network::ModelSection;
use optimizer::{OptimizerSection, State};
use precision::{Compute, PrecisionSection};
use serde::Deserialize;
use source::Source;
use std::path::Path;
use tallow_train::{
    BatchSplit, Gradients,
    accum::Clip,
    optim::{self, Place, Shape},
    plan::{Knob, Recomputation},
    recompute::{Check, Saved},
};

/// Bytes of a state file in memory at once.
const WINDOW_BYTES: u64 = 16 << 20;

/// A checked configuration: nothing below asks again.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    /// The network.
    pub(crate) model: Model,
    /// Where samples come from.
    pub(crate) source: Source,
    /// Samples an update.
    pub(crate) batch: usize,
    /// Samples a micro-batch that may be chosen, the largest first.
    pub(crate) micro_batches: Vec<usize>,
    /// Whether micro-batches follow the memory that the system has left.
    pub(crate) auto_micro_batch: bool,
    /// Passes over the data.
    pub(crate) epochs: u64,
    /// Batches after which to stop.
    pub(crate) max_updates: Option<u64>,
    /// Seed of weights and order.
    pub(crate) seed: u64,
    /// Weight of the uniform distribution in the loss.
    pub(crate) label_smoothing: f64,
    /// Decay of the weights' average.
    pub(crate) ema_decay: Option<f64>,
    /// Epochs without a lower held-out loss after which to stop.
    pub(crate) early_stop_epochs: Option<u64>,
    /// Optimizers that may be chosen, the preferred one first.
    pub(crate) optimizers: Vec<Optimizer>,
    /// Updates of warm-up.
    pub(crate) warmup_updates: u64,
    /// What follows them.
    pub(crate) decay: Decay,
    /// Limit of the gradients.
    pub(crate) clip: Clip,
    /// Gradients with a norm above this are not applied.
    pub(crate) skip_above_norm: f64,
    /// How gradients reach the optimizer.
    pub(crate) gradients: Gradients,
    /// Precisions that may be chosen, the preferred one first.
    pub(crate) precisions: Vec<Precision>,
    /// The most bytes the process may hold.
    pub(crate) budget: Option<u64>,
    /// Which segments are recomputed.
    pub(crate) recomputation: Recomputation,
    /// The same, as written.
    pub(crate) recompute_name: String,
    /// How the inputs of segments that run again wait.
    pub(crate) saved: Saved,
    /// What segments that run again are compared by.
    pub(crate) check: Check,
    /// In which order the planner turns knobs.
    pub(crate) prefer: Vec<Knob>,
    /// What the planner must leave alone.
    pub(crate) forbid: Vec<Knob>,
    /// Batches between two checkpoints, beside those after each epoch.
    pub(crate) checkpoint_every: Option<u64>,
    /// Checkpoints that stay; 0 is none at all.
    pub(crate) keep: usize,
    /// What was given, overrides included.
    pub(crate) given: toml::Table,
}

/// Section `checkpoint`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct CheckpointSection {
    every: Option<u64>,
    keep: Option<usize>,
}

impl CheckpointSection {
    /// The newest, and the one before in case that is damaged.
    const KEEP: usize = 2;

    fn checked(&self) -> Result<(Option<u64>, usize)> {
        ensure!(self.every != Some(0), "checkpoint.every is 0 updates, 1 is the least");
        let keep = self.keep.unwrap_or(Self::KEEP);
        ensure!(
            keep > 0 || self.every.is_none(),
            "checkpoint.every is given, but checkpoint.keep is 0: none would stay"
        );
        Ok((self.every, keep))
    }
}

/// The name of a schedule; the length of the run is not known yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Decay {
    /// None.
    Constant,
    /// Evenly to 0.
    Linear,
    /// Along half a cosine to 0.
    Cosine,
}

impl Decay {
    /// Over a run of `total_updates`.
    pub(crate) fn shape(self, total_updates: u64) -> Shape {
        let end = 0.0;
        match self {
            Decay::Constant => Shape::Constant,
            Decay::Linear => Shape::Linear { total_updates, end },
            Decay::Cosine => Shape::Cosine { total_updates, end },
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Train {
    batch: Option<usize>,
    micro_batch: Option<MicroBatch>,
    accumulate: Option<usize>,
    epochs: Option<u64>,
    max_updates: Option<u64>,
    seed: Option<u64>,
    learning_rate: Option<f64>,
    schedule: Option<Decay>,
    warmup_updates: Option<u64>,
    clip_norm: Option<f64>,
    skip_above_norm: Option<f64>,
    label_smoothing: Option<f64>,
    ema_decay: Option<f64>,
    early_stop_epochs: Option<u64>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(untagged, expecting = "micro_batch is \"auto\" or a number")]
enum MicroBatch {
    Samples(usize),
    Word(MicroBatchWord),
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum MicroBatchWord {
    Auto,
}

impl Train {
    /// Samples of a micro-batch, if they are given as a number.
    fn micro_batch(&self) -> Option<usize> {
        match self.micro_batch {
            Some(MicroBatch::Samples(n)) => Some(n),
            Some(MicroBatch::Word(MicroBatchWord::Auto)) | None => None,
        }
    }
}

/// All sections.
struct Sections {
    model: ModelSection,
    data: DataSection,
    train: Train,
    precision: PrecisionSection,
    memory: MemorySection,
    optimizer: OptimizerSection,
    checkpoint: CheckpointSection,
}

/// Reads `path` if there is one, applies the overrides in order, and checks the whole. `budget`
/// stands before the file's.
///
/// # Errors
/// One line that names the file, section and key, and says what would be right.
pub(crate) fn load(
    path: Option<&Path>,
    overrides: &[String],
    budget: Option<&str>,
) -> Result<Config> {
    let mut table = match path {
        None => toml::Table::new(),
        Some(path) => read(path)?,
    };
    for text in overrides {
        apply(&mut table, text).with_context(|| format!("--set {text}"))?;
    }
    let name = path.map_or(String::new(), |path| format!("configuration `{}`", path.display()));
    if let Some(budget) = budget {
        apply(&mut table, &format!("memory.budget=\"{budget}\""))?;
    }
    match checked_table(table) {
        Err(error) if path.is_some() => Err(error.context(name)),
        result => result,
    }
}

/// Every key with its default and what it is for, as TOML.
///
/// # Errors
/// None: the defaults are a configuration.
pub(crate) fn documented_defaults() -> Result<String> {
    Ok(schema::documented(&load(None, &[], None)?.effective(None)))
}

/// The JSON schema of configurations.
///
/// # Errors
/// None: the defaults are a configuration.
pub(crate) fn schema() -> Result<serde_json::Value> {
    Ok(schema::schema(&load(None, &[], None)?.effective(None)))
}

/// What a table of sections means.
fn checked_table(mut table: toml::Table) -> Result<Config> {
    known::check(&table)?;
    let given = table.clone();
    let sections = Sections {
        model: section(&mut table, "model")?,
        data: section(&mut table, "data")?,
        train: section(&mut table, "train")?,
        precision: section(&mut table, "precision")?,
        memory: section(&mut table, "memory")?,
        optimizer: section(&mut table, "optimizer")?,
        checkpoint: section(&mut table, "checkpoint")?,
    };
    checked(sections, given)
}

fn checked(sections: Sections, given: toml::Table) -> Result<Config> {
    let Sections { model, data, train, precision, memory, optimizer, checkpoint } = sections;
    let (checkpoint_every, keep) = checkpoint.checked()?;
    let Memory { budget, recomputation, recompute_name, saved, check, prefer, forbid } =
        memory.checked()?;
    for (key, knobs) in [("forbid", &forbid), ("prefer", &prefer)] {
        ensure!(
            knobs.is_empty() || budget.is_some(),
            "memory.{key} is given, but without memory.budget nothing is planned"
        );
    }
    let seed = train.seed.unwrap_or(0);
    let (model, source) = data::checked(model, data, seed)?;
    if let Some(budget) = budget {
        let weights = model.weights_bytes();
        ensure!(
            weights < budget,
            "nothing fits {budget} bytes: the weights of the model alone are {weights}"
        );
        for (knob, given, key) in [
            (Knob::Bf16, precision.compute.is_some(), "precision.compute"),
            (Knob::LowState, optimizer.state.is_some(), "optimizer.state"),
            (Knob::Accumulate, train.micro_batch().is_some(), "train.micro_batch"),
            (Knob::Accumulate, train.accumulate.is_some(), "train.accumulate"),
            (Knob::Recompute, recomputation != Recomputation::Planned, "memory.recompute"),
        ] {
            let name = knob.name();
            let both = given && forbid.contains(&knob);
            ensure!(!both, "memory.forbid has `{name}`, but {key} is given and not planned");
        }
    }
    let (batch, micro_batches) = micro_batches(&train, budget.is_some(), &optimizer)?;
    let auto_micro_batch = train.micro_batch == Some(MicroBatch::Word(MicroBatchWord::Auto));
    ensure!(
        !auto_micro_batch || optimizer.release_gradients != Some(true),
        "train.micro_batch is auto, but optimizer.release_gradients needs one micro-batch"
    );
    if let Some(decay) = train.ema_decay {
        ensure!(
            (0.0..1.0).contains(&decay),
            "train.ema_decay is {decay}, it must be at least 0 and below 1"
        );
        ensure!(
            precision.masters != Some(false),
            "train.ema_decay is given, but precision.masters is false: an average needs f32 weights"
        );
    }
    let learning_rate = positive("learning_rate", train.learning_rate)?;
    let learning_rate = learning_rate.unwrap_or(model.network.learning_rate());
    let release = optimizer.release_gradients == Some(true);
    let precisions = precisions(&precision, budget.is_some())?;
    let optimizers = optimizers(&optimizer, &memory, budget.is_some(), learning_rate)?;
    let optimizers = optimizers.into_iter().map(|o| Optimizer {
        config: optim::Config { seed, weights: precisions[0].weights, ..o.config },
        ..o
    });
    Ok(Config {
        model,
        source,
        batch,
        micro_batches,
        auto_micro_batch,
        epochs: train.epochs.unwrap_or(5),
        max_updates: train.max_updates,
        seed,
        label_smoothing: train.label_smoothing.unwrap_or(0.0),
        ema_decay: train.ema_decay,
        early_stop_epochs: train.early_stop_epochs,
        optimizers: optimizers.collect(),
        warmup_updates: train.warmup_updates.unwrap_or(0),
        decay: train.schedule.unwrap_or(Decay::Linear),
        clip: positive("clip_norm", train.clip_norm)?.map_or(Clip::Off, Clip::Norm),
        skip_above_norm: positive("skip_above_norm", train.skip_above_norm)?
            .unwrap_or(f64::INFINITY),
        gradients: if release { Gradients::Released } else { Gradients::Summed },
        precisions,
        budget,
        recomputation,
        recompute_name,
        saved,
        check,
        prefer,
        forbid,
        checkpoint_every,
        keep,
        given,
    })
}

fn positive(key: &str, given: Option<f64>) -> Result<Option<f64>> {
    if let Some(x) = given {
        ensure!(x > 0.0 && x.is_finite(), "train.{key} is {x}, it must be above 0 and finite");
    }
    Ok(given)
}

/// Samples an update, and the micro-batches that may be chosen.
fn micro_batches(
    train: &Train,
    has_budget: bool,
    optimizer: &OptimizerSection,
) -> Result<(usize, Vec<usize>)> {
    let micro_batch = train.micro_batch();
    // A batch that micro_batch and accumulate do not already determine.
    let derived = micro_batch.is_some() && train.accumulate.is_some();
    let batch = train.batch.or((!derived).then_some(32));
    let split =
        BatchSplit::derive(batch, micro_batch, train.accumulate, 1).context("section `train`")?;
    let fixed = micro_batch.is_some() || train.accumulate.is_some();
    let auto = train.micro_batch.is_some() && micro_batch.is_none();
    ensure!(
        !auto || train.accumulate.is_none(),
        "train.micro_batch is auto, but train.accumulate fixes it"
    );
    let release = optimizer.release_gradients == Some(true);
    ensure!(
        !release || split.accumulate() == 1,
        "optimizer.release_gradients is true, but a batch of {} in micro-batches of {} keeps sums",
        split.batch(),
        split.micro_batch()
    );
    if !has_budget || fixed || release {
        return Ok((split.batch(), vec![split.micro_batch()]));
    }
    let halves = std::iter::successors(Some(split.batch()), |n| (*n > 1).then(|| n.div_ceil(2)));
    Ok((split.batch(), halves.collect()))
}

fn precisions(given: &PrecisionSection, has_budget: bool) -> Result<Vec<Precision>> {
    match given.compute {
        Some(compute) => Ok(vec![given.checked(compute)?]),
        // Other keys of the section speak of one precision.
        None if has_budget && given.is_empty() => {
            [Compute::F32, Compute::Bf16].into_iter().map(|c| given.checked(c)).collect()
        }
        None => Ok(vec![given.checked(Compute::F32)?]),
    }
}

fn optimizers(
    given: &OptimizerSection,
    memory: &MemorySection,
    has_budget: bool,
    learning_rate: f64,
) -> Result<Vec<Optimizer>> {
    let states = match given.state {
        Some(state) => vec![state],
        None if has_budget && given.keeps_state() => vec![State::F32, State::Bits8],
        None => vec![State::F32],
    };
    let in_ram = states.into_iter().map(|state| given.checked(state, learning_rate));
    let in_ram: Vec<Optimizer> = in_ram.collect::<Result<_>>()?;
    let Some(folder) = &memory.offload_dir else { return Ok(in_ram) };
    ensure!(
        given.keeps_state(),
        "memory.offload_dir is given, but sgd without momentum keeps no state"
    );
    let path = folder.join(format!("tallow-state-{}.bin", std::process::id()));
    let in_file = in_ram.iter().cloned().map(|optimizer| Optimizer {
        name: format!("{} in a file", optimizer.name),
        config: optim::Config {
            place: Place::File { path: path.clone(), window_bytes: WINDOW_BYTES },
            ..optimizer.config
        },
    });
    let in_file: Vec<Optimizer> = in_file.collect();
    Ok(if has_budget { in_ram.into_iter().chain(in_file).collect() } else { in_file })
}

fn read(path: &Path) -> Result<toml::Table> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("configuration `{}`", path.display()))?;
    text.parse::<toml::Table>().map_err(|error| {
        let at = error.span().map_or(0, |span| span.start).min(text.len());
        let line = text.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count() + 1;
        anyhow::anyhow!("configuration `{}`, line {line}: {}", path.display(), error.message())
    })
}

/// Writes `section.key=value` into the table; a value that is no TOML is a string.
fn apply(table: &mut toml::Table, text: &str) -> Result<()> {
    let (key, value) = text.split_once('=').context("an override is section.key=value")?;
    let (name, key) = key.split_once('.').context("an override is section.key=value")?;
    let (name, key) = (name.trim(), key.trim());
    let value = value.trim();
    let parsed = format!("value = {value}").parse::<toml::Table>();
    let parsed = parsed.ok().filter(|t| t.len() == 1).and_then(|mut t| t.remove("value"));
    let value = parsed.unwrap_or_else(|| toml::Value::String(value.to_string()));
    let section = table.entry(name).or_insert_with(|| toml::Value::Table(toml::Table::new()));
    let section = section.as_table_mut().with_context(|| format!("`{name}` is not a section"))?;
    section.insert(key.to_string(), value);
    Ok(())
}

/// Takes the section `name` out of the table.
fn section<T: Default + for<'de> Deserialize<'de>>(
    table: &mut toml::Table,
    name: &str,
) -> Result<T> {
    match table.remove(name) {
        None => Ok(T::default()),
        // Toml's own text names the key after the message.
        Some(value) => value.try_into().map_err(|error: toml::de::Error| {
            anyhow::anyhow!("section `{name}`: {}", error.to_string().trim())
        }),
    }
}

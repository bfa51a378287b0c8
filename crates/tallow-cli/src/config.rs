//! The configuration: a file, overrides, and what they mean once checked.

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use tallow_train::{AdamW, BatchSplit};

const DIGITS: &str = "digits";
const RESNET_DIGITS: &str = "resnet-digits";
/// Digits held out of the embedded 10 000.
const DIGITS_HELD_OUT: usize = 1000;

/// A checked configuration: nothing below asks again.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    /// Where images come from.
    pub(crate) source: Source,
    /// Images held out; a tenth if `None`.
    pub(crate) held_out: Option<usize>,
    /// Batch and micro-batch.
    pub(crate) split: BatchSplit,
    /// Passes over the data.
    pub(crate) epochs: u64,
    /// Updates after which to stop.
    pub(crate) max_updates: Option<u64>,
    /// Seed of weights and order.
    pub(crate) seed: u64,
    /// Weight of the uniform distribution in the loss.
    pub(crate) label_smoothing: f64,
    /// The optimizer.
    pub(crate) optimizer: AdamW,
    /// How its learning rate changes.
    pub(crate) schedule: Decay,
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

/// Where images come from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Source {
    /// The embedded digits.
    Digits,
    /// A folder with one IDX image file and one IDX label file.
    Folder(PathBuf),
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Model {
    name: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Data {
    source: Option<String>,
    held_out: Option<usize>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Train {
    batch: Option<usize>,
    micro_batch: Option<usize>,
    accumulate: Option<usize>,
    epochs: Option<u64>,
    max_updates: Option<u64>,
    seed: Option<u64>,
    learning_rate: Option<f64>,
    schedule: Option<Decay>,
    label_smoothing: Option<f64>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct OptimizerSection {
    name: Option<String>,
    weight_decay: Option<f64>,
    beta1: Option<f64>,
    beta2: Option<f64>,
    eps: Option<f64>,
}

/// Reads `path` if there is one, applies the overrides in order, and checks the whole.
///
/// # Errors
/// One line that names the file, section and key, and says what would be right.
pub(crate) fn load(path: Option<&Path>, overrides: &[String]) -> Result<Config> {
    let mut table = match path {
        None => toml::Table::new(),
        Some(path) => read(path)?,
    };
    for text in overrides {
        apply(&mut table, text).with_context(|| format!("--set {text}"))?;
    }
    let model: Model = section(&mut table, "model")?;
    let data: Data = section(&mut table, "data")?;
    let train: Train = section(&mut table, "train")?;
    let optimizer: OptimizerSection = section(&mut table, "optimizer")?;
    if let Some(key) = table.keys().next() {
        bail!("section `{key}` is unknown; there are `model`, `data`, `train` and `optimizer`");
    }
    let model = model.name.as_deref().unwrap_or(RESNET_DIGITS);
    ensure!(model == RESNET_DIGITS, "model.name `{model}` is unknown; there is `{RESNET_DIGITS}`");
    let name = optimizer.name.as_deref().unwrap_or("adamw");
    ensure!(name == "adamw", "optimizer.name `{name}` is unknown; there is `adamw`");
    checked(data, train, &optimizer)
}

fn checked(data: Data, train: Train, optimizer: &OptimizerSection) -> Result<Config> {
    let source = match data.source.as_deref() {
        None | Some(DIGITS) => Source::Digits,
        Some(path) => Source::Folder(PathBuf::from(path)),
    };
    let held_out = match (data.held_out, &source) {
        (None, Source::Digits) => Some(DIGITS_HELD_OUT),
        (given, _) => given,
    };
    ensure!(held_out != Some(0), "data.held_out is 0, accuracy needs at least 1 image");
    // A batch that micro_batch and accumulate do not already determine.
    let derived = train.micro_batch.is_some() && train.accumulate.is_some();
    let batch = train.batch.or((!derived).then_some(32));
    let split = BatchSplit::derive(batch, train.micro_batch, train.accumulate, 1)
        .context("section `train`")?;
    let defaults = AdamW::default_for(train.learning_rate.unwrap_or(4e-3));
    Ok(Config {
        source,
        held_out,
        split,
        epochs: train.epochs.unwrap_or(5),
        max_updates: train.max_updates,
        seed: train.seed.unwrap_or(0),
        label_smoothing: train.label_smoothing.unwrap_or(0.0),
        schedule: train.schedule.unwrap_or(Decay::Linear),
        optimizer: AdamW {
            weight_decay: optimizer.weight_decay.unwrap_or(defaults.weight_decay),
            beta1: optimizer.beta1.unwrap_or(defaults.beta1),
            beta2: optimizer.beta2.unwrap_or(defaults.beta2),
            eps: optimizer.eps.unwrap_or(defaults.eps),
            ..defaults
        },
    })
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
    let (name, key) = key.trim().split_once('.').context("an override is section.key=value")?;
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
        Some(value) => value.try_into().map_err(|error: toml::de::Error| {
            anyhow::anyhow!("section `{name}`: {}", error.message())
        }),
    }
}

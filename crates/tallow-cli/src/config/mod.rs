//! The configuration: a file, overrides, and what they mean once checked.

use anyhow::{Context, Result, bail, ensure};
use candle_core::DType;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use tallow_train::{
    BatchSplit,
    accum::Clip,
    optim::{self, Algorithm, Rounding, Shape, StateFormat},
    precision::{DynamicScale, LossScale, Policy},
};

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
    pub(crate) optimizer: optim::Config,
    /// The optimizer and its state, as written.
    pub(crate) optimizer_name: String,
    /// Updates of warm-up.
    pub(crate) warmup_updates: u64,
    /// What follows them.
    pub(crate) decay: Decay,
    /// Limit of the gradients.
    pub(crate) clip: Clip,
    /// What computes in what.
    pub(crate) policy: Policy,
    /// The precision, as written.
    pub(crate) precision_name: String,
    /// The loss scale at the start.
    pub(crate) loss_scale: LossScale,
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
    warmup_updates: Option<u64>,
    clip_norm: Option<f64>,
    label_smoothing: Option<f64>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct OptimizerSection {
    name: Option<AlgorithmName>,
    state: Option<State>,
    weight_decay: Option<f64>,
    beta1: Option<f64>,
    beta2: Option<f64>,
    eps: Option<f64>,
    momentum: Option<f64>,
    nesterov: Option<bool>,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum AlgorithmName {
    AdamW,
    Adam,
    Sgd,
    Lion,
    Adafactor,
}

#[derive(Clone, Copy, Deserialize)]
enum State {
    #[serde(rename = "f32")]
    F32,
    #[serde(rename = "bf16")]
    Bf16,
    #[serde(rename = "8bit")]
    Bits8,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Precision {
    compute: Option<Compute>,
    loss_scale: Option<Scale>,
    masters: Option<bool>,
    keep_f32: Option<Vec<String>>,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Compute {
    F32,
    Bf16,
    F16,
    Fp8,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "loss_scale is \"dynamic\", \"off\" or a number")]
enum Scale {
    Number(f64),
    Word(ScaleWord),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum ScaleWord {
    Dynamic,
    Off,
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
    let name = path.map_or(String::new(), |path| format!("configuration `{}`", path.display()));
    match checked_table(table) {
        Err(error) if path.is_some() => Err(error.context(name)),
        result => result,
    }
}

/// What a table of sections means.
fn checked_table(mut table: toml::Table) -> Result<Config> {
    let model: Model = section(&mut table, "model")?;
    let data: Data = section(&mut table, "data")?;
    let train: Train = section(&mut table, "train")?;
    let precision: Precision = section(&mut table, "precision")?;
    let optimizer: OptimizerSection = section(&mut table, "optimizer")?;
    if let Some(key) = table.keys().next() {
        bail!(
            "section `{key}` is unknown; there are `model`, `data`, `train`, `precision` and \
             `optimizer`"
        );
    }
    let model = model.name.as_deref().unwrap_or(RESNET_DIGITS);
    ensure!(model == RESNET_DIGITS, "model.name `{model}` is unknown; there is `{RESNET_DIGITS}`");
    checked(data, train, precision, optimizer)
}

fn checked(
    data: Data,
    train: Train,
    precision: Precision,
    optimizer: OptimizerSection,
) -> Result<Config> {
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
    let seed = train.seed.unwrap_or(0);
    let learning_rate = train.learning_rate.unwrap_or(4e-3);
    let positive = |x: f64| x > 0.0 && x.is_finite();
    ensure!(
        positive(learning_rate),
        "train.learning_rate is {learning_rate}, it must be above 0 and finite"
    );
    let clip = match train.clip_norm {
        None => Clip::Off,
        Some(norm) => {
            ensure!(positive(norm), "train.clip_norm is {norm}, it must be above 0 and finite");
            Clip::Norm(norm)
        }
    };
    let compute = precision.compute.unwrap_or(Compute::F32);
    let (policy, weights) = policy(&precision, compute)?;
    let (optimizer_name, optimizer) = algorithm(&optimizer, learning_rate)?;
    Ok(Config {
        source,
        held_out,
        split,
        epochs: train.epochs.unwrap_or(5),
        max_updates: train.max_updates,
        seed,
        label_smoothing: train.label_smoothing.unwrap_or(0.0),
        optimizer: optim::Config { weights, seed, ..optimizer },
        optimizer_name,
        warmup_updates: train.warmup_updates.unwrap_or(0),
        decay: train.schedule.unwrap_or(Decay::Linear),
        clip,
        policy,
        precision_name: compute.name(precision.masters != Some(false)),
        loss_scale: loss_scale(precision.loss_scale, compute)?,
    })
}

impl Compute {
    fn name(self, masters: bool) -> String {
        let name = match self {
            Compute::F32 => "f32",
            Compute::Bf16 => "bf16",
            Compute::F16 => "f16",
            Compute::Fp8 => "fp8",
        };
        if masters { name.to_string() } else { format!("{name} without masters") }
    }
}

/// What computes in what, and how weights without master copies are rounded.
fn policy(precision: &Precision, compute: Compute) -> Result<(Policy, Rounding)> {
    let mut policy = match compute {
        Compute::F32 => Policy::f32(),
        Compute::Bf16 => Policy::bf16(),
        Compute::F16 => Policy::f16(),
        Compute::Fp8 => Policy::fp8_stored(DType::BF16),
    };
    ensure!(
        compute != Compute::F32 || precision.keep_f32.is_none(),
        "precision.keep_f32 is given, but everything computes in f32"
    );
    for pattern in precision.keep_f32.iter().flatten() {
        policy = policy.with(pattern, DType::F32);
    }
    match (precision.masters, compute) {
        (None | Some(true), _) => Ok((policy, Rounding::Nearest)),
        (Some(false), Compute::Bf16 | Compute::F16) => {
            Ok((Policy { parameter: policy.compute, ..policy }, Rounding::Stochastic))
        }
        (Some(false), Compute::F32) => {
            bail!("precision.masters is false, but f32 weights are their own masters")
        }
        (Some(false), Compute::Fp8) => {
            bail!("precision.masters is false, but fp8 weights need masters; use bf16")
        }
    }
}

fn loss_scale(scale: Option<Scale>, compute: Compute) -> Result<LossScale> {
    let dynamic = || LossScale::dynamic(DynamicScale::STANDARD).context("precision.loss_scale");
    match scale {
        None if compute == Compute::F16 => dynamic(),
        None | Some(Scale::Word(ScaleWord::Off)) => Ok(LossScale::off()),
        Some(Scale::Word(ScaleWord::Dynamic)) => dynamic(),
        Some(Scale::Number(scale)) => {
            LossScale::fixed(scale as f32).context("precision.loss_scale")
        }
    }
}

/// The optimizer; a number that its formula does not have is refused, not ignored.
fn algorithm(given: &OptimizerSection, learning_rate: f64) -> Result<(String, optim::Config)> {
    use AlgorithmName as Name;
    let name = given.name.unwrap_or(Name::AdamW);
    let betas = |beta1: f64, beta2: f64| {
        (given.beta1.unwrap_or(beta1), given.beta2.unwrap_or(beta2), given.eps.unwrap_or(1e-8))
    };
    let (text, algorithm, decay) = match name {
        Name::AdamW => {
            let (beta1, beta2, eps) = betas(0.9, 0.999);
            ("adamw", Algorithm::AdamW { beta1, beta2, eps }, 0.01)
        }
        Name::Adam => {
            let (beta1, beta2, eps) = betas(0.9, 0.999);
            ("adam", Algorithm::Adam { beta1, beta2, eps }, 0.0)
        }
        Name::Lion => {
            let (beta1, beta2, _) = betas(0.9, 0.99);
            ("lion", Algorithm::Lion { beta1, beta2 }, 0.0)
        }
        Name::Sgd => {
            let (momentum, nesterov) =
                (given.momentum.unwrap_or(0.0), given.nesterov.unwrap_or(false));
            ("sgd", Algorithm::Sgd { momentum, nesterov }, 0.0)
        }
        Name::Adafactor => ("adafactor", Algorithm::ADAFACTOR, 0.0),
    };
    let adam = matches!(name, Name::AdamW | Name::Adam);
    for (key, given, known) in [
        ("beta1", given.beta1.is_some(), adam || name == Name::Lion),
        ("beta2", given.beta2.is_some(), adam || name == Name::Lion),
        ("eps", given.eps.is_some(), adam),
        ("momentum", given.momentum.is_some(), name == Name::Sgd),
        ("nesterov", given.nesterov.is_some(), name == Name::Sgd),
    ] {
        ensure!(!given || known, "optimizer.{key} is given, but {text} has none");
    }
    let (state, format) = match given.state {
        None | Some(State::F32) => ("f32", StateFormat::F32),
        Some(State::Bf16) => ("bf16", StateFormat::Bf16(Rounding::Stochastic)),
        Some(State::Bits8) => ("8bit", StateFormat::BITS8),
    };
    let no_state = matches!(algorithm, Algorithm::Sgd { momentum: 0.0, .. });
    ensure!(
        !no_state || given.state.is_none(),
        "optimizer.state is {state}, but sgd without momentum keeps none"
    );
    let weight_decay = given.weight_decay.unwrap_or(decay);
    let config = optim::Config::new(algorithm, learning_rate);
    Ok((format!("{text}, {state} state"), optim::Config { weight_decay, format, ..config }))
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

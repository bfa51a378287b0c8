//! What is known of a network that is trained already: for `tallow sample`.

use super::{Model, Train, data::DataSection, known, network::ModelSection, read, section};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};

/// What made the tokens that a run learnt.
pub(crate) enum Tokenized {
    /// Each byte is one.
    Bytes,
    /// A `tokenizer.json`.
    By(PathBuf),
    /// Something before the run.
    Unknown,
}

/// The network of the run whose values in force are in `path`, its seed, and what made its tokens.
///
/// # Errors
/// If the file cannot be read, or the network learns no text.
pub(crate) fn network_of(path: &Path) -> Result<(Model, u64, Tokenized)> {
    let table = read(path)?;
    of_run(table).with_context(|| format!("configuration `{}`", path.display()))
}

fn of_run(mut table: toml::Table) -> Result<(Model, u64, Tokenized)> {
    known::check(&table)?;
    let train: Train = section(&mut table, "train")?;
    let model: ModelSection = section(&mut table, "model")?;
    let data: DataSection = section(&mut table, "data")?;
    let seed = train.seed.unwrap_or(0);
    Ok((of_text(model.checked(&data, seed)?)?, seed, data.tokenized()))
}

/// The network of published weights: its configuration lies beside them.
///
/// # Errors
/// If they cannot be read, nothing says which network they are of, or it learns no text.
pub(crate) fn network_of_weights(path: &Path) -> Result<Model> {
    let model = ModelSection::of_weights(path).checked(&DataSection::default(), 0)?;
    let weights = model.weights.as_ref().and_then(|weights| weights.model_type());
    ensure!(weights.is_some(), "`{}`: no config.json beside it names a network", path.display());
    of_text(model)
}

fn of_text(model: Model) -> Result<Model> {
    let name = model.network.name();
    ensure!(model.network.tokens().is_some(), "{name} learns images, there is no text to sample");
    Ok(model)
}

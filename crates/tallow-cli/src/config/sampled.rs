//! What is known of a network that is trained already: for `tallow sample`.

use super::{Model, Train, data::DataSection, network::ModelSection, read, section};
use anyhow::{Result, ensure};
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
/// If the file cannot be read.
pub(crate) fn network_of(path: &Path) -> Result<(Model, u64, Tokenized)> {
    let mut table = read(path)?;
    let train: Train = section(&mut table, "train")?;
    let model: ModelSection = section(&mut table, "model")?;
    let data: DataSection = section(&mut table, "data")?;
    let seed = train.seed.unwrap_or(0);
    Ok((model.checked(&data, seed)?, seed, data.tokenized()))
}

/// The network of published weights: its configuration lies beside them.
///
/// # Errors
/// If they cannot be read, or nothing says which network they are of.
pub(crate) fn network_of_weights(path: &Path) -> Result<Model> {
    let model = ModelSection::of_weights(path).checked(&DataSection::default(), 0)?;
    let weights = model.weights.as_ref().and_then(|weights| weights.model_type());
    ensure!(weights.is_some(), "`{}`: no config.json beside it names a network", path.display());
    Ok(model)
}

//! Section `data`: what the network learns from.

mod files;

use super::{
    Tokenized,
    files::{Format, Place, Reading, tokenizer},
    memory::Bytes,
    network::{MOST, Model, ModelSection, Network},
    source::{DIGITS, SYNTHETIC, Source},
};
use anyhow::{Context, Result, ensure};
use candle_core::DType;
use serde::Deserialize;
use std::{collections::BTreeMap, path::PathBuf};
use tallow_data::{Kind, OnCorrupt, formats::Token};

/// Digits held out of the embedded 10 000.
const DIGITS_HELD_OUT: usize = 1000;
/// Tokens where each byte is one.
const N_BYTES: usize = 256;
/// The longest sequence that is taken without being asked for.
const SEQ_TOKENS: usize = 1024;

/// Where objects of stores and tokens of texts are kept unless a folder is named.
const CACHE: &str = "runs/cache";
/// The most bytes of objects there, unless told otherwise.
const CACHE_BYTES: u64 = 8 << 30;

/// Section `data`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct DataSection {
    source: Option<String>,
    held_out: Option<usize>,
    n_samples: Option<usize>,
    image_size: Option<[usize; 2]>,
    n_classes: Option<usize>,
    seq_tokens: Option<usize>,
    format: Option<String>,
    augment: Option<bool>,
    on_corrupt: Option<OnCorruptWord>,
    max_skipped: Option<u64>,
    prefetch_bytes: Option<Bytes>,
    image_column: Option<String>,
    label_column: Option<String>,
    text_column: Option<String>,
    labels: Option<PathBuf>,
    tokenizer: Option<PathBuf>,
    separator: Option<String>,
    cache_dir: Option<PathBuf>,
    cache_bytes: Option<Bytes>,
    store: Option<BTreeMap<String, String>>,
}

/// What becomes of samples that cannot be read.
#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum OnCorruptWord {
    Fail,
    Skip,
}

impl DataSection {
    /// More corrupt samples than this are no accident.
    const MAX_SKIPPED: u64 = 100;

    fn reading(&self, seed: u64) -> Result<Reading> {
        let skips = self.on_corrupt == Some(OnCorruptWord::Skip);
        ensure!(
            skips || self.max_skipped.is_none(),
            "data.max_skipped is given, but data.on_corrupt is not skip"
        );
        let limit = self.max_skipped.unwrap_or(Self::MAX_SKIPPED);
        let prefetch_bytes = self.prefetch_bytes.as_ref().map(Bytes::checked).transpose();
        Ok(Reading {
            augment: self.augment.unwrap_or(false),
            on_corrupt: if skips { OnCorrupt::Skip { limit } } else { OnCorrupt::Fail },
            prefetch_bytes: prefetch_bytes.context("data.prefetch_bytes")?.unwrap_or(0),
            seed,
        })
    }

    /// Where the samples are.
    fn place(&self, name: &str) -> Result<Place> {
        let cache_bytes = self.cache_bytes.as_ref().map(Bytes::checked).transpose();
        let options = self.store.iter().flatten();
        Ok(Place {
            name: name.to_string(),
            cache_dir: self.cache_dir.clone().unwrap_or_else(|| PathBuf::from(CACHE)),
            cache_bytes: cache_bytes.context("data.cache_bytes")?.unwrap_or(CACHE_BYTES),
            options: options.map(|(key, value)| (key.clone(), value.clone())).collect(),
        })
    }

    /// As given, or as the source's name says.
    fn format(&self, name: &str) -> Result<Format> {
        match &self.format {
            Some(word) => Format::named(word),
            None => Format::of(name, self.tokenizer.is_some()),
        }
    }

    /// Tokens that the data may have, where they say so: those of a tokenizer, or bytes.
    /// # Errors
    /// If the tokenizer cannot be read, or nothing says what format the source has.
    pub(super) fn vocab(&self) -> Result<Option<usize>> {
        if let Some(path) = &self.tokenizer {
            return Ok(Some(tokenizer(path)?.vocab() as usize));
        }
        let name = self.source.as_deref().filter(|name| ![SYNTHETIC, DIGITS].contains(name));
        let format = name.map(|name| self.format(name)).transpose()?;
        Ok((format == Some(Format::Raw(Token::U8))).then_some(N_BYTES))
    }

    /// What makes its tokens.
    pub(super) fn tokenized(&self) -> Tokenized {
        match (&self.tokenizer, self.format.as_deref()) {
            (Some(path), _) => Tokenized::By(path.clone()),
            (None, Some("bytes")) => Tokenized::Bytes,
            (None, _) => Tokenized::Unknown,
        }
    }
}

/// What the sections mean together.
pub(super) fn checked(
    model: ModelSection,
    data: DataSection,
    seed: u64,
) -> Result<(Model, Source)> {
    let model = model.checked(&data, seed)?;
    let network = &model.network;
    let source = match data.source.as_deref() {
        Some(SYNTHETIC) => synthetic(network, &data)?,
        Some(source) if source != DIGITS => files::source(network, &data, source, seed)?,
        _ => {
            only_has(&data, DIGITS, &[])?;
            learns_images(network, DIGITS)?;
            let held_out = data.held_out.or(Some(DIGITS_HELD_OUT));
            Source::Images { folder: None, held_out }
        }
    };
    ensure!(data.held_out != Some(0), "data.held_out is 0, accuracy needs at least 1 sample");
    Ok((model, source))
}

/// That no key is given but those in `allowed`, which a source of this kind has.
fn only_has(data: &DataSection, kind: &str, allowed: &[&str]) -> Result<()> {
    for (key, given) in [
        ("n_samples", data.n_samples.is_some()),
        ("image_size", data.image_size.is_some()),
        ("n_classes", data.n_classes.is_some()),
        ("seq_tokens", data.seq_tokens.is_some()),
        ("format", data.format.is_some()),
        ("augment", data.augment.is_some()),
        ("on_corrupt", data.on_corrupt.is_some()),
        ("max_skipped", data.max_skipped.is_some()),
        ("prefetch_bytes", data.prefetch_bytes.is_some()),
        ("image_column", data.image_column.is_some()),
        ("label_column", data.label_column.is_some()),
        ("text_column", data.text_column.is_some()),
        ("labels", data.labels.is_some()),
        ("tokenizer", data.tokenizer.is_some()),
        ("separator", data.separator.is_some()),
        ("cache_dir", data.cache_dir.is_some()),
        ("cache_bytes", data.cache_bytes.is_some()),
        ("store", data.store.is_some()),
    ] {
        let is_allowed = !given || allowed.contains(&key);
        ensure!(is_allowed, "data.{key} is given, but data.source {kind} has none");
    }
    Ok(())
}

/// Channels of the images, and their size if none is given.
fn learns_images(network: &Network, source: &str) -> Result<(usize, [usize; 2])> {
    network.images().with_context(|| {
        format!(
            "model.name is {}, which learns tokens; data.source `{source}` has images: give a file \
             of text or tokens, or `{SYNTHETIC}`",
            network.name()
        )
    })
}

/// Height and width, if any machine has room for them.
fn image_size(data: &DataSection, default: [usize; 2]) -> Result<[usize; 2]> {
    let [height, width] = data.image_size.unwrap_or(default);
    ensure!(height > 0 && width > 0, "data.image_size is {height} x {width}");
    let large = height > 1 << 16 || width > 1 << 16;
    ensure!(!large, "data.image_size is {height} x {width}, 65536 is the most");
    Ok([height, width])
}

/// Tokens of a sequence, if the network has room for them.
fn seq_tokens(data: &DataSection, context: usize) -> Result<usize> {
    let seq_tokens = data.seq_tokens.unwrap_or(context.min(SEQ_TOKENS));
    ensure!(seq_tokens > 0, "data.seq_tokens is 0, 1 is the least");
    ensure!(
        seq_tokens <= context,
        "data.seq_tokens {seq_tokens} is more than model.context {context}"
    );
    Ok(seq_tokens)
}

fn synthetic(network: &Network, data: &DataSection) -> Result<Source> {
    let kind = format!("{SYNTHETIC} for {}", network.name());
    let samples = match (network.tokens(), network.images()) {
        (Some((vocab, context)), _) => {
            only_has(data, &kind, &["n_samples", "seq_tokens"])?;
            Kind::Tokens { n_tokens: seq_tokens(data, context)?, vocab }
        }
        (None, images) => {
            only_has(data, &kind, &["n_samples", "image_size", "n_classes"])?;
            let (channels, default) = images.expect("what learns no tokens learns images");
            let [height, width] = image_size(data, default)?;
            let n_classes = data.n_classes.unwrap_or(if channels == 1 { 10 } else { 1000 });
            ensure!(n_classes > 1, "data.n_classes is {n_classes}, 2 is the least");
            Kind::Images { dims: [channels, height, width], n_classes, dtype: DType::F32 }
        }
    };
    let n_samples = data.n_samples.unwrap_or(1024);
    ensure!(n_samples > 0, "data.n_samples is 0, 1 is the least");
    ensure!(n_samples <= MOST, "data.n_samples is {n_samples}, {MOST} is the most");
    let held_out = data.held_out.unwrap_or((n_samples / 10).max(1));
    Ok(Source::Synthetic { n_samples: [n_samples, held_out], kind: samples })
}

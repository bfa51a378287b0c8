//! Section `data`: what the network learns from.

use super::{
    files::{self, Photos, Reading, Sequences, TokenFormat},
    memory::Bytes,
    network::{MOST, Model, ModelSection, Network},
};
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use tallow_data::{Dataset, ImageSet, Images, Kind, OnCorrupt, Pixels, Synthetic, formats::Token};

const DIGITS: &str = "digits";
const SYNTHETIC: &str = "synthetic";
/// Digits held out of the embedded 10 000.
const DIGITS_HELD_OUT: usize = 1000;
/// Tokens where each byte is one.
pub(super) const N_BYTES: usize = 256;
/// The longest sequence that is taken without being asked for.
const SEQ_TOKENS: usize = 1024;

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
}

/// Where samples come from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Source {
    /// The embedded digits, or a folder with one IDX image file and one IDX label file.
    Images {
        /// `None`: the digits.
        folder: Option<PathBuf>,
        /// Images held out; a tenth if `None`.
        held_out: Option<usize>,
    },
    /// A folder with a folder of photographs for each class.
    Photos {
        folder: PathBuf,
        held_out: Option<usize>,
        /// Channels, height, width.
        dims: [usize; 3],
        reading: Reading,
    },
    /// A file of tokens.
    Tokens {
        path: PathBuf,
        format: TokenFormat,
        held_out: Option<usize>,
        /// Tokens of a sequence, and of the model's vocabulary.
        sizes: (usize, usize),
        reading: Reading,
    },
    /// Made up.
    Synthetic {
        /// Learnt from, and held out.
        n_samples: [usize; 2],
        /// What each is; the dtype is the precision's.
        kind: Kind,
    },
}

/// Samples, before it is known what dtype they are wanted in.
#[derive(Clone)]
pub(crate) enum Samples {
    /// Bytes of images.
    Images(ImageSet),
    /// Files of images.
    Photos(Photos),
    /// A file of tokens.
    Tokens(Sequences),
    /// Made up.
    Synthetic(Synthetic),
}

impl Samples {
    /// How many.
    pub(crate) fn n_samples(&self) -> usize {
        match self {
            Samples::Images(set) => set.n_images(),
            Samples::Photos(set) => set.n_samples(),
            Samples::Tokens(set) => set.n_samples(),
            Samples::Synthetic(set) => set.n_samples,
        }
    }

    /// Bytes of a batch of `n_samples`, and of what is read ahead of it.
    pub(crate) fn held_bytes(&self, dtype: DType, n_samples: usize) -> u64 {
        match self {
            Samples::Photos(set) => set.held_bytes(dtype, n_samples),
            Samples::Tokens(set) => set.held_bytes(n_samples),
            Samples::Images(_) | Samples::Synthetic(_) => {
                self.dataset(dtype).batch_bytes(n_samples)
            }
        }
    }

    /// Batches of them in `dtype`, where they are floats. Shares the bytes.
    pub(crate) fn dataset(&self, dtype: DType) -> Box<dyn Dataset> {
        match self {
            Samples::Images(set) => {
                let pixels = Pixels::digits(dtype, &Device::Cpu);
                Box::new(Images { set: set.clone(), pixels })
            }
            Samples::Photos(set) => set.dataset(dtype),
            Samples::Tokens(set) => set.dataset(),
            Samples::Synthetic(set) => Box::new(match set.kind {
                Kind::Images { dims, n_classes, .. } => {
                    Synthetic { kind: Kind::Images { dims, n_classes, dtype }, ..set.clone() }
                }
                Kind::Tokens { .. } => set.clone(),
            }),
        }
    }
}

/// Samples to learn from and to judge by, and what the model must know of them.
pub(crate) struct Opened {
    pub(crate) train: Samples,
    pub(crate) held_out: Samples,
    /// Channels of the images, and their classes; 0 for tokens.
    pub(crate) channels: usize,
    pub(crate) n_classes: usize,
    /// Height and width, or tokens.
    pub(crate) size: Vec<usize>,
}

impl Source {
    /// As `report.json` has it.
    pub(crate) fn name(&self) -> String {
        match self {
            Source::Images { folder: None, .. } => DIGITS.to_string(),
            Source::Images { folder: Some(path), .. }
            | Source::Photos { folder: path, .. }
            | Source::Tokens { path, .. } => path.display().to_string(),
            Source::Synthetic { .. } => SYNTHETIC.to_string(),
        }
    }

    /// Opens it.
    /// # Errors
    /// If there is nothing to learn from or nothing to judge by.
    pub(crate) fn open(&self, seed: u64) -> Result<Opened> {
        match self {
            Source::Images { folder, held_out } => open_images(folder.as_deref(), *held_out),
            Source::Photos { folder, held_out, dims, reading } => {
                files::open_photos(folder, *held_out, *dims, reading)
            }
            Source::Tokens { path, format, held_out, sizes, reading } => {
                files::open_tokens(path, *format, *held_out, *sizes, reading)
            }
            Source::Synthetic { n_samples: [n_train, n_held_out], kind } => {
                let device = Device::Cpu;
                let (size, channels, n_classes) = match *kind {
                    Kind::Images { dims, n_classes, .. } => {
                        (dims[1..].to_vec(), dims[0], n_classes)
                    }
                    Kind::Tokens { n_tokens, .. } => (vec![n_tokens], 0, 0),
                };
                let train = Synthetic { kind: kind.clone(), n_samples: *n_train, seed, device };
                // Other samples than those learnt from.
                let held_out = Synthetic { n_samples: *n_held_out, seed: !seed, ..train.clone() };
                let (train, held_out) = (Samples::Synthetic(train), Samples::Synthetic(held_out));
                Ok(Opened { train, held_out, channels, n_classes, size })
            }
        }
    }
}

fn open_images(folder: Option<&Path>, held_out: Option<usize>) -> Result<Opened> {
    let set = match folder {
        None => ImageSet::digits()?,
        Some(folder) => ImageSet::open_dir(folder).context("data.source")?,
    };
    let n_images = set.n_images();
    let held_out = held_out.unwrap_or(n_images / 10).max(1);
    ensure!(
        held_out < n_images,
        "data.held_out {held_out} leaves nothing of the {n_images} images to learn from"
    );
    let (first, classes) = (set.label(0), set.n_classes());
    ensure!(
        (0..n_images).any(|i| set.label(i) != first),
        "data.source: all {n_images} images have label {first} of {classes}, there is nothing to learn"
    );
    let size = vec![set.height(), set.width()];
    let (train, held_out) = set.split(n_images - held_out)?;
    let n_classes = train.n_classes().max(held_out.n_classes());
    let (train, held_out) = (Samples::Images(train), Samples::Images(held_out));
    Ok(Opened { train, held_out, channels: 1, n_classes, size })
}

/// What the sections mean together.
pub(super) fn checked(
    model: ModelSection,
    data: DataSection,
    seed: u64,
) -> Result<(Model, Source)> {
    let model = model.checked(is_text(&data), seed)?;
    let network = &model.network;
    let source = match data.source.as_deref() {
        Some(SYNTHETIC) => synthetic(network, &data)?,
        Some(source) if source != DIGITS => in_files(network, &data, Path::new(source), seed)?,
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

/// By what is at `path`: a file of tokens, a pair of IDX files, or folders of photographs.
fn in_files(network: &Network, data: &DataSection, path: &Path, seed: u64) -> Result<Source> {
    let (name, held_out) = (path.display().to_string(), data.held_out);
    let reading = data.reading(seed)?;
    if path.is_file() {
        only_has(data, "a file", &["seq_tokens", "format", "prefetch_bytes"])?;
        let Some((vocab, context)) = network.tokens() else {
            bail!("data.source `{name}` is a file of tokens, but {} learns images", network.name())
        };
        let format = match &data.format {
            Some(word) => TokenFormat::named(word)?,
            None => TokenFormat::of(path),
        };
        let (sizes, path) = ((seq_tokens(data, context)?, vocab), path.to_path_buf());
        return Ok(Source::Tokens { path, format, held_out, sizes, reading });
    }
    let (channels, default) = learns_images(network, &name)?;
    let folder = path.to_path_buf();
    let entries = std::fs::read_dir(path);
    let is_idx = entries.map_or(true, |entries| {
        entries.flatten().any(|e| e.file_name().to_string_lossy().contains("idx3-ubyte"))
    });
    if is_idx {
        only_has(data, "with IDX files", &[])?;
        return Ok(Source::Images { folder: Some(folder), held_out });
    }
    let keys = ["image_size", "augment", "on_corrupt", "max_skipped", "prefetch_bytes"];
    only_has(data, "with folders of images", &keys)?;
    let size = image_size(data, default)?;
    Ok(Source::Photos { folder, held_out, dims: [channels, size[0], size[1]], reading })
}

/// Height and width, if any machine has room for them.
fn image_size(data: &DataSection, default: [usize; 2]) -> Result<[usize; 2]> {
    let [height, width] = data.image_size.unwrap_or(default);
    ensure!(height > 0 && width > 0, "data.image_size is {height} x {width}");
    let large = height > 1 << 16 || width > 1 << 16;
    ensure!(!large, "data.image_size is {height} x {width}, 65536 is the most");
    Ok([height, width])
}

/// Whether the tokens are the bytes of a file.
fn is_text(data: &DataSection) -> bool {
    let path = data.source.as_deref().map(Path::new).filter(|path| path.is_file());
    path.is_some_and(|path| match &data.format {
        Some(word) => word == "bytes",
        None => TokenFormat::of(path) == TokenFormat::Raw(Token::U8),
    })
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
    let only = |key: &str, given: bool, name: &str| {
        ensure!(!given, "data.{key} is given, but {name} has none");
        Ok(())
    };
    let kind = match (network.tokens(), network.images()) {
        (Some((vocab, context)), _) => {
            only("image_size", data.image_size.is_some(), network.name())?;
            only("n_classes", data.n_classes.is_some(), network.name())?;
            Kind::Tokens { n_tokens: seq_tokens(data, context)?, vocab }
        }
        (None, images) => {
            only("seq_tokens", data.seq_tokens.is_some(), network.name())?;
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
    Ok(Source::Synthetic { n_samples: [n_samples, held_out], kind })
}

//! Sections `model` and `data`: which network, on what.

use super::{
    files::{
        Columns, Format, PhotoSource, Photos, Place, Reader, Reading, Sequences, Spent,
        TokenSource, tokenizer,
    },
    memory::Bytes,
};
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};
use tallow_data::{Dataset, ImageSet, Images, Kind, OnCorrupt, Pixels, Synthetic, formats::Token};
use tallow_models::{Gpt2Config, ResNetConfig};

const DIGITS: &str = "digits";
const SYNTHETIC: &str = "synthetic";
/// Digits held out of the embedded 10 000.
const DIGITS_HELD_OUT: usize = 1000;
/// Tokens where each byte is one.
const N_BYTES: usize = 256;
const MODELS: &str = "`resnet-digits`, `resnet18`, `resnet50` and `gpt2`";

/// Where objects of stores and tokens of texts are kept unless a folder is named.
const CACHE: &str = "runs/cache";
/// The most bytes of objects there, unless told otherwise.
const CACHE_BYTES: u64 = 8 << 30;

/// The most that one size of a model or of data may be.
const MOST: usize = 1 << 31;
/// More parameters than any machine that this runs on holds.
const MOST_PARAMS: f64 = 1e12;

/// Section `model`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ModelSection {
    name: Option<String>,
    vocab: Option<usize>,
    context: Option<usize>,
    model_dim: Option<usize>,
    n_layers: Option<usize>,
    n_heads: Option<usize>,
    dropout: Option<f64>,
}

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
}

/// A network, before the data have told it their classes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Model {
    /// Images to classes.
    ResNet(ResNetKind),
    /// Tokens to the next.
    Gpt2(Gpt2Config),
}

/// The residual networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResNetKind {
    Digits,
    ResNet18,
    ResNet50,
}

impl ResNetKind {
    /// Channels of its images, and their size if none is given.
    fn images(self) -> (usize, [usize; 2]) {
        match self {
            ResNetKind::Digits => (1, [28, 28]),
            ResNetKind::ResNet18 | ResNetKind::ResNet50 => (3, [224, 224]),
        }
    }

    /// For images of `channels` and `n_classes`.
    pub(crate) fn config(self, in_channels: usize, n_classes: usize) -> ResNetConfig {
        let config = match self {
            ResNetKind::Digits => ResNetConfig { n_classes, ..ResNetConfig::digits() },
            ResNetKind::ResNet18 => ResNetConfig::resnet18(n_classes),
            ResNetKind::ResNet50 => ResNetConfig::resnet50(n_classes),
        };
        ResNetConfig { in_channels, ..config }
    }
}

impl Model {
    /// Bytes of its weights in f32, before anything is built; 0 for networks that are small.
    pub(crate) fn weights_bytes(&self) -> u64 {
        match self {
            Model::ResNet(_) => 0,
            Model::Gpt2(config) => config.n_params().saturating_mul(4),
        }
    }

    /// What it learns at unless told otherwise.
    pub(crate) fn learning_rate(&self) -> f64 {
        match self {
            Model::ResNet(_) => 4e-3,
            // From 2e-3 on small ones stay with the frequencies of single tokens for long.
            Model::Gpt2(_) => 5e-4,
        }
    }

    /// As `model.name` has it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Model::ResNet(ResNetKind::Digits) => "resnet-digits",
            Model::ResNet(ResNetKind::ResNet18) => "resnet18",
            Model::ResNet(ResNetKind::ResNet50) => "resnet50",
            Model::Gpt2(_) => "gpt2",
        }
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
    /// Images and their classes, of any format.
    Photos(PhotoSource),
    /// Tokens, or texts that become some.
    Tokens(TokenSource),
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

    /// What reading them came to; nothing is read of those in memory.
    pub(crate) fn spent(&self) -> Option<&Spent> {
        match self {
            Samples::Photos(set) => Some(set.spent()),
            Samples::Tokens(set) => Some(set.spent()),
            Samples::Images(_) | Samples::Synthetic(_) => None,
        }
    }

    /// Threads that read ahead.
    pub(crate) fn n_threads(&self) -> usize {
        match self {
            Samples::Photos(set) => set.n_threads(),
            Samples::Tokens(set) => set.n_threads(),
            Samples::Images(_) | Samples::Synthetic(_) => 0,
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
            Source::Images { folder: Some(path), .. } => path.display().to_string(),
            Source::Photos(PhotoSource { place, .. })
            | Source::Tokens(TokenSource { place, .. }) => place.name.clone(),
            Source::Synthetic { .. } => SYNTHETIC.to_string(),
        }
    }

    /// Opens it.
    /// # Errors
    /// If there is nothing to learn from or nothing to judge by.
    pub(crate) fn open(&self, seed: u64) -> Result<Opened> {
        match self {
            Source::Images { folder, held_out } => open_images(folder.as_deref(), *held_out),
            Source::Photos(photos) => photos.open(),
            Source::Tokens(tokens) => tokens.open(),
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
    let network = network(&model, &data, seed)?;
    let source = match data.source.as_deref() {
        Some(SYNTHETIC) => synthetic(&network, &data)?,
        Some(source) if source != DIGITS => in_files(&network, &data, source, seed)?,
        _ => {
            only_has(&data, DIGITS, &[])?;
            learns_images(&network, DIGITS)?;
            let held_out = data.held_out.or(Some(DIGITS_HELD_OUT));
            Source::Images { folder: None, held_out }
        }
    };
    ensure!(data.held_out != Some(0), "data.held_out is 0, accuracy needs at least 1 sample");
    Ok((network, source))
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

fn learns_images(network: &Model, source: &str) -> Result<()> {
    match network {
        Model::ResNet(_) => Ok(()),
        Model::Gpt2(_) => bail!(
            "model.name is gpt2, which learns tokens; data.source `{source}` has images: give a file of \
             text or tokens, or `{SYNTHETIC}`"
        ),
    }
}

/// By what the source's name or `data.format` says, and what the network learns.
fn in_files(network: &Model, data: &DataSection, name: &str, seed: u64) -> Result<Source> {
    if Path::new(name).is_dir() && data.format.is_none() && has_idx(Path::new(name)) {
        learns_images(network, name)?;
        only_has(data, "with IDX files", &[])?;
        let folder = Some(PathBuf::from(name));
        return Ok(Source::Images { folder, held_out: data.held_out });
    }
    let is_one_path = !Place::is_url(name) && !name.contains('{');
    ensure!(!is_one_path || Path::new(name).exists(), "data.source: `{name}` does not exist");
    let format = data.format(name)?;
    match network {
        Model::Gpt2(config) => {
            ensure!(!format.is_images(), learns_images(network, name).unwrap_err());
            let sizes = (data.seq_tokens.unwrap_or(config.context), config.vocab);
            tokens(data, name, format, sizes, seed)
        }
        Model::ResNet(kind) => {
            ensure!(
                !format.is_tokens(),
                "data.source `{name}` is a file of tokens, but {} learns images",
                network.name()
            );
            photos(data, name, format, kind.images(), seed)
        }
    }
}

fn has_idx(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|entries| {
        entries.flatten().any(|e| e.file_name().to_string_lossy().contains("idx3-ubyte"))
    })
}

/// Keys that a source in a store has beside the others.
const STORE_KEYS: [&str; 3] = ["cache_dir", "cache_bytes", "store"];

fn tokens(
    data: &DataSection,
    name: &str,
    format: Format,
    sizes: (usize, usize),
    seed: u64,
) -> Result<Source> {
    let mut keys = vec!["seq_tokens", "format", "prefetch_bytes"];
    match (&data.tokenizer, format.has_texts()) {
        (None, true) => bail!(
            "data.source `{name}` holds texts ({}): name a tokenizer.json as data.tokenizer",
            format.name()
        ),
        (Some(_), false) => bail!(
            "data.tokenizer is given, but data.source `{name}` ({}) holds no texts",
            format.name()
        ),
        (Some(_), true) => keys.extend(["tokenizer", "separator", "cache_dir"]),
        (None, false) => {}
    }
    match format {
        Format::Text | Format::Raw(_) | Format::Npy => {}
        _ => keys.push("text_column"),
    }
    if Place::is_url(name) {
        keys.extend(STORE_KEYS);
    }
    only_has(data, &format!("`{name}` ({})", format.name()), &keys)?;
    ensure!(sizes.0 > 0, "data.seq_tokens is 0, 1 is the least");
    let reader = data.tokenizer.clone().map(|tokenizer| Reader {
        tokenizer,
        separator: data.separator.clone(),
        column: data.text_column.clone(),
    });
    Ok(Source::Tokens(TokenSource {
        place: data.place(name)?,
        format,
        reader,
        column: data.text_column.clone(),
        held_out: data.held_out,
        sizes,
        reading: data.reading(seed)?,
    }))
}

fn photos(
    data: &DataSection,
    name: &str,
    format: Format,
    (channels, size): (usize, [usize; 2]),
    seed: u64,
) -> Result<Source> {
    let mut keys =
        vec!["format", "image_size", "augment", "on_corrupt", "max_skipped", "prefetch_bytes"];
    match format {
        Format::Images => {}
        Format::List => keys.push("n_classes"),
        Format::Npy => keys.extend(["n_classes", "labels"]),
        _ => keys.extend(["n_classes", "image_column", "label_column"]),
    }
    if Place::is_url(name) {
        ensure!(
            !format.is_images(),
            "data.source `{name}`: data.format {} is read from paths alone",
            format.name()
        );
        keys.extend(STORE_KEYS);
    }
    only_has(data, &format!("`{name}` ({})", format.name()), &keys)?;
    ensure!(
        data.n_classes.is_none_or(|n| (2..=MOST).contains(&n)),
        "data.n_classes is {}, 2 is the least and {MOST} the most",
        data.n_classes.unwrap_or(0)
    );
    let [height, width] = image_size(data, size)?;
    Ok(Source::Photos(PhotoSource {
        place: data.place(name)?,
        format,
        columns: Columns {
            image: data.image_column.clone(),
            label: data.label_column.clone(),
            labels: data.labels.clone(),
            dims: [channels, height, width],
        },
        n_classes: data.n_classes,
        held_out: data.held_out,
        reading: data.reading(seed)?,
    }))
}

/// Height and width, if any machine has room for them.
fn image_size(data: &DataSection, default: [usize; 2]) -> Result<[usize; 2]> {
    let [height, width] = data.image_size.unwrap_or(default);
    ensure!(height > 0 && width > 0, "data.image_size is {height} x {width}");
    let large = height > 1 << 16 || width > 1 << 16;
    ensure!(!large, "data.image_size is {height} x {width}, 65536 is the most");
    Ok([height, width])
}

fn network(model: &ModelSection, data: &DataSection, seed: u64) -> Result<Model> {
    let name = model.name.as_deref().unwrap_or("resnet-digits");
    let kind = match name {
        "resnet-digits" => ResNetKind::Digits,
        "resnet18" => ResNetKind::ResNet18,
        "resnet50" => ResNetKind::ResNet50,
        "gpt2" => return gpt2(model, data, seed),
        _ => bail!("model.name `{name}` is unknown; there are {MODELS}"),
    };
    for (key, given) in [
        ("vocab", model.vocab.is_some()),
        ("context", model.context.is_some()),
        ("model_dim", model.model_dim.is_some()),
        ("n_layers", model.n_layers.is_some()),
        ("n_heads", model.n_heads.is_some()),
        ("dropout", model.dropout.is_some()),
    ] {
        ensure!(!given, "model.{key} is given, but {name} has none");
    }
    Ok(Model::ResNet(kind))
}

/// Tokens that the data may have, where they say so: those of a tokenizer, or bytes.
fn data_vocab(data: &DataSection) -> Result<Option<usize>> {
    if let Some(path) = &data.tokenizer {
        return Ok(Some(tokenizer(path)?.vocab() as usize));
    }
    let Some(name) = data.source.as_deref().filter(|&name| name != SYNTHETIC && name != DIGITS)
    else {
        return Ok(None);
    };
    Ok((data.format(name)? == Format::Raw(Token::U8)).then_some(N_BYTES))
}

fn gpt2(model: &ModelSection, data: &DataSection, seed: u64) -> Result<Model> {
    let small = Gpt2Config::small();
    let config = Gpt2Config {
        vocab: model.vocab.or(data_vocab(data)?).unwrap_or(small.vocab),
        context: model.context.unwrap_or(small.context),
        model_dim: model.model_dim.unwrap_or(small.model_dim),
        n_layers: model.n_layers.unwrap_or(small.n_layers),
        n_heads: model.n_heads.unwrap_or(small.n_heads),
        dropout: model.dropout.unwrap_or(small.dropout),
        dropout_seed: seed,
    };
    for (key, value) in [
        ("vocab", config.vocab),
        ("context", config.context),
        ("model_dim", config.model_dim),
        ("n_layers", config.n_layers),
        ("n_heads", config.n_heads),
    ] {
        ensure!(value > 0, "model.{key} is 0, 1 is the least");
        ensure!(value <= MOST, "model.{key} is {value}, {MOST} is the most");
    }
    let [vocab, dim, layers] = [config.vocab, config.model_dim, config.n_layers].map(|n| n as f64);
    let n_params = vocab * dim + layers * 12.0 * dim * dim;
    ensure!(
        n_params < MOST_PARAMS,
        "model: {n_params:.1e} parameters, {MOST_PARAMS:.0e} is the most"
    );
    let (dim, heads, dropout) = (config.model_dim, config.n_heads, config.dropout);
    ensure!(dim % heads == 0, "model.n_heads {heads} does not divide model.model_dim {dim}");
    ensure!(
        (0.0..1.0).contains(&dropout),
        "model.dropout is {dropout}, it must be from 0 to below 1"
    );
    let (n_tokens, context) = (data.seq_tokens.unwrap_or(config.context), config.context);
    ensure!(n_tokens <= context, "data.seq_tokens {n_tokens} is more than model.context {context}");
    Ok(Model::Gpt2(config))
}

fn synthetic(network: &Model, data: &DataSection) -> Result<Source> {
    let only = |key: &str, given: bool, name: &str| {
        ensure!(!given, "data.{key} is given, but {name} has none");
        Ok(())
    };
    let kind = match network {
        Model::Gpt2(config) => {
            only("image_size", data.image_size.is_some(), "gpt2")?;
            only("n_classes", data.n_classes.is_some(), "gpt2")?;
            let n_tokens = data.seq_tokens.unwrap_or(config.context);
            ensure!(n_tokens > 0, "data.seq_tokens is 0, 1 is the least");
            Kind::Tokens { n_tokens, vocab: config.vocab }
        }
        Model::ResNet(kind) => {
            only("seq_tokens", data.seq_tokens.is_some(), network.name())?;
            let (channels, default) = kind.images();
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

//! Sections `model` and `data`: which network, on what.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use tallow_data::{Dataset, ImageSet, Images, Kind, Pixels, Synthetic};
use tallow_models::{Gpt2Config, ResNetConfig};

const DIGITS: &str = "digits";
const SYNTHETIC: &str = "synthetic";
/// Digits held out of the embedded 10 000.
const DIGITS_HELD_OUT: usize = 1000;
const MODELS: &str = "`resnet-digits`, `resnet18`, `resnet50` and `gpt2`";

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
    /// Made up.
    Synthetic {
        /// Learnt from, and held out.
        n_samples: [usize; 2],
        /// What each is; the dtype is the precision's.
        kind: Kind,
    },
}

/// Samples, before it is known what dtype they are wanted in.
#[derive(Clone, Debug)]
pub(crate) enum Samples {
    /// Bytes of images.
    Images(ImageSet),
    /// Made up.
    Synthetic(Synthetic),
}

impl Samples {
    /// How many.
    pub(crate) fn n_samples(&self) -> usize {
        match self {
            Samples::Images(set) => set.n_images(),
            Samples::Synthetic(set) => set.n_samples,
        }
    }

    /// Batches of them in `dtype`, where they are floats. Shares the bytes.
    pub(crate) fn dataset(&self, dtype: DType) -> Box<dyn Dataset> {
        match self {
            Samples::Images(set) => {
                let pixels = Pixels::digits(dtype, &Device::Cpu);
                Box::new(Images { set: set.clone(), pixels })
            }
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
            Source::Images { folder: Some(folder), .. } => folder.display().to_string(),
            Source::Synthetic { .. } => SYNTHETIC.to_string(),
        }
    }

    /// Opens it.
    /// # Errors
    /// If there is nothing to learn from or nothing to judge by.
    pub(crate) fn open(&self, seed: u64) -> Result<Opened> {
        match self {
            Source::Images { folder, held_out } => open_images(folder.as_deref(), *held_out),
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
        source => {
            for (key, given) in [
                ("n_samples", data.n_samples.is_some()),
                ("image_size", data.image_size.is_some()),
                ("n_classes", data.n_classes.is_some()),
                ("seq_tokens", data.seq_tokens.is_some()),
            ] {
                ensure!(!given, "data.{key} is given, but only source `{SYNTHETIC}` has one");
            }
            if let Model::Gpt2(_) = network {
                bail!("model.name is gpt2, which learns tokens; data.source must be `{SYNTHETIC}`");
            }
            let folder = source.filter(|source| *source != DIGITS).map(PathBuf::from);
            let default = folder.is_none().then_some(DIGITS_HELD_OUT);
            Source::Images { folder, held_out: data.held_out.or(default) }
        }
    };
    ensure!(data.held_out != Some(0), "data.held_out is 0, accuracy needs at least 1 sample");
    Ok((network, source))
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

fn gpt2(model: &ModelSection, data: &DataSection, seed: u64) -> Result<Model> {
    let small = Gpt2Config::small();
    let config = Gpt2Config {
        vocab: model.vocab.unwrap_or(small.vocab),
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
            let (channels, default) = match kind {
                ResNetKind::Digits => (1, [28, 28]),
                ResNetKind::ResNet18 | ResNetKind::ResNet50 => (3, [224, 224]),
            };
            let [height, width] = data.image_size.unwrap_or(default);
            ensure!(height > 0 && width > 0, "data.image_size is {height} x {width}");
            let large = height > 1 << 16 || width > 1 << 16;
            ensure!(!large, "data.image_size is {height} x {width}, 65536 is the most");
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

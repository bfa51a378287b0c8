//! Section `model`: which network, where it starts from, and what of it is trained.

use super::{data::DataSection, weights::Weights};
use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_nn::VarBuilder;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use tallow_models::{
    Decoder, Gpt2, Gpt2Config, LinearSize, Llama, LlamaConfig, Lora, ResNetConfig, Segments,
    VitConfig,
};
use tallow_train::{
    Params,
    plan::{Built, Result as BuildResult},
    precision::{Masters, Policy},
};

const MODELS: &str = "`resnet-digits`, `resnet18`, `resnet50`, `gpt2`, `llama` and `vit`";

/// The most that one size of a model or of data may be.
pub(super) const MOST: usize = 1 << 31;
/// More parameters than any machine that this runs on holds.
const MOST_PARAMS: f64 = 1e12;
/// Patches of small images, whose short side is below [`SMALL`], and of others.
const PATCHES: [usize; 2] = [4, 16];
const SMALL: usize = 64;

/// Section `model`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ModelSection {
    name: Option<String>,
    vocab: Option<usize>,
    context: Option<usize>,
    model_dim: Option<usize>,
    hidden_dim: Option<usize>,
    n_layers: Option<usize>,
    n_heads: Option<usize>,
    n_kv_heads: Option<usize>,
    tied: Option<bool>,
    patch: Option<usize>,
    dropout: Option<f64>,
    weights: Option<PathBuf>,
    lora_rank: Option<usize>,
    lora_alpha: Option<f64>,
    lora_targets: Option<Vec<String>>,
    lora_dropout: Option<f64>,
}

/// A network, where its weights start, and what of it is trained.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Model {
    pub(crate) network: Network,
    /// `None`: drawn by the seed.
    pub(crate) weights: Option<Weights>,
    /// `None`: all of it is trained.
    pub(crate) lora: Option<Lora>,
}

/// A network, before the data have told it their classes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Network {
    /// Images to classes.
    ResNet(ResNetKind),
    /// Images to classes; its patch, if one is given. Images and classes are the data's.
    Vit(VitConfig, Option<usize>),
    /// Tokens to the next.
    Gpt2(Gpt2Config),
    /// Tokens to the next.
    Llama(LlamaConfig),
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
    fn config(self, in_channels: usize, n_classes: usize) -> ResNetConfig {
        let config = match self {
            ResNetKind::Digits => ResNetConfig { n_classes, ..ResNetConfig::digits() },
            ResNetKind::ResNet18 => ResNetConfig::resnet18(n_classes),
            ResNetKind::ResNet50 => ResNetConfig::resnet50(n_classes),
        };
        ResNetConfig { in_channels, ..config }
    }
}

/// What a network has to know of the data.
pub(crate) struct Shape<'a> {
    /// Of images.
    pub(crate) channels: usize,
    /// Of images.
    pub(crate) n_classes: usize,
    /// Height and width, or tokens.
    pub(crate) size: &'a [usize],
}

/// A network of text, to train and to go on with text.
pub(crate) trait Text: Segments + Decoder {}

impl<M: Segments + Decoder> Text for M {}

/// A network of either kind.
type Net = Box<dyn Segments>;

impl Network {
    /// As `model.name` has it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Network::ResNet(ResNetKind::Digits) => "resnet-digits",
            Network::ResNet(ResNetKind::ResNet18) => "resnet18",
            Network::ResNet(ResNetKind::ResNet50) => "resnet50",
            Network::Vit(..) => "vit",
            Network::Gpt2(_) => "gpt2",
            Network::Llama(_) => "llama",
        }
    }

    /// Vocabulary and context, if it learns tokens.
    pub(crate) fn tokens(&self) -> Option<(usize, usize)> {
        match self {
            Network::Gpt2(config) => Some((config.vocab, config.context)),
            Network::Llama(config) => Some((config.vocab, config.context)),
            Network::ResNet(_) | Network::Vit(..) => None,
        }
    }

    /// Channels of its images, and their size if none is given, if it learns images.
    pub(super) fn images(&self) -> Option<(usize, [usize; 2])> {
        match self {
            Network::ResNet(ResNetKind::Digits) => Some((1, [28, 28])),
            Network::ResNet(ResNetKind::ResNet18 | ResNetKind::ResNet50) => Some((3, [224, 224])),
            Network::Vit(config, _) => Some((config.channels, config.image_size)),
            Network::Gpt2(_) | Network::Llama(_) => None,
        }
    }

    /// What it learns at unless told otherwise.
    pub(crate) fn learning_rate(&self) -> f64 {
        match self {
            Network::ResNet(_) => 4e-3,
            // From 2e-3 on small ones stay with the frequencies of single tokens for long.
            Network::Gpt2(_) | Network::Llama(_) | Network::Vit(..) => 5e-4,
        }
    }

    /// Elements of its weights, before anything is built; 0 for networks that are small.
    fn n_params(&self) -> u64 {
        match self {
            Network::ResNet(_) => 0,
            Network::Vit(config, _) => config.n_params(),
            Network::Gpt2(config) => config.n_params(),
            Network::Llama(config) => config.n_params(),
        }
    }

    /// What precedes its names in files of Hugging Face.
    fn prefix(&self) -> &'static str {
        match self {
            Network::Gpt2(_) => Gpt2Config::PREFIX,
            Network::ResNet(_) | Network::Llama(_) | Network::Vit(..) => "",
        }
    }

    /// The linear layers that adapters may stand on; `None` if it takes none.
    fn linears(&self) -> Option<Vec<LinearSize>> {
        match self {
            Network::ResNet(_) => None,
            Network::Vit(config, _) => Some(config.linears()),
            Network::Gpt2(config) => Some(config.linears()),
            Network::Llama(config) => Some(config.linears()),
        }
    }
}

/// Sizes of `config` for images of `shape`.
fn vit(config: &VitConfig, patch: Option<usize>, shape: &Shape) -> VitConfig {
    let image_size = [shape.size[0], shape.size[1]];
    let is_small = image_size[0].min(image_size[1]) < SMALL;
    let patch = patch.unwrap_or(PATCHES[usize::from(!is_small)]);
    let (channels, classes) = (shape.channels, shape.n_classes);
    VitConfig { image_size, patch, channels, classes, ..config.clone() }
}

impl Model {
    /// Bytes of its weights in memory at least, before anything is built.
    pub(crate) fn weights_bytes(&self) -> u64 {
        let bytes_per_elem = if self.lora.is_some() { 2 } else { 4 };
        self.network.n_params().saturating_mul(bytes_per_elem)
    }

    /// Builds it under `policy`: parameters that are trained are masters, drawn by `seed` or read;
    /// what adapters stand on is constant, in the dtype it computes in.
    pub(crate) fn build(
        &self,
        policy: &Policy,
        seed: u64,
        shape: &Shape,
    ) -> BuildResult<Built<Net>> {
        self.built(policy, seed, |vb| match &self.network {
            Network::ResNet(kind) => {
                Ok(Box::new(kind.config(shape.channels, shape.n_classes).build(vb)?) as Net)
            }
            Network::Vit(config, patch) => {
                let config = vit(config, *patch, shape);
                Ok(Box::new(match self.base(policy)? {
                    None => config.build(vb)?,
                    Some((lora, base)) => config.build_lora(base, lora, vb)?,
                }))
            }
            Network::Gpt2(config) => Ok(Box::new(self.gpt2(config, policy, vb)?)),
            Network::Llama(config) => Ok(Box::new(self.llama(config, policy, vb)?)),
        })
    }

    /// The same of a network of text.
    /// # Panics
    /// If it is none.
    pub(crate) fn build_text(
        &self,
        policy: &Policy,
        seed: u64,
    ) -> BuildResult<Built<Box<dyn Text>>> {
        self.built(policy, seed, |vb| match &self.network {
            Network::Gpt2(config) => Ok(Box::new(self.gpt2(config, policy, vb)?) as Box<dyn Text>),
            Network::Llama(config) => Ok(Box::new(self.llama(config, policy, vb)?)),
            Network::ResNet(_) | Network::Vit(..) => unreachable!("asked for text of images"),
        })
    }

    fn gpt2(&self, config: &Gpt2Config, policy: &Policy, vb: VarBuilder) -> BuildResult<Gpt2> {
        Ok(match self.base(policy)? {
            None => config.build(vb)?,
            Some((lora, base)) => config.build_lora(base, lora, vb)?,
        })
    }

    fn llama(&self, config: &LlamaConfig, policy: &Policy, vb: VarBuilder) -> BuildResult<Llama> {
        Ok(match self.base(policy)? {
            None => config.build(vb)?,
            Some((lora, base)) => config.build_lora(base, lora, vb)?,
        })
    }

    /// What adapters stand on.
    fn base(&self, policy: &Policy) -> BuildResult<Option<(&Lora, VarBuilder<'static>)>> {
        let (Some(lora), Some(weights)) = (&self.lora, &self.weights) else { return Ok(None) };
        Ok(Some((lora, weights.constants(self.network.prefix(), policy)?)))
    }

    fn built<M>(
        &self,
        policy: &Policy,
        seed: u64,
        build: impl FnOnce(VarBuilder) -> BuildResult<M>,
    ) -> BuildResult<Built<M>> {
        let params = Params::new(seed);
        let masters = Masters::new(policy.clone(), params.clone())?;
        let model = build(masters.builder(&Device::Cpu))?;
        if let (None, Some(weights)) = (&self.lora, &self.weights) {
            weights.read_into(&params.all(), self.network.prefix())?;
            masters.publish()?;
        }
        Ok(Built { model, masters, buffers: params.buffers() })
    }
}

impl ModelSection {
    /// All that weights say of themselves.
    pub(super) fn of_weights(path: &Path) -> Self {
        Self { weights: Some(path.to_path_buf()), ..Self::default() }
    }

    /// What the section means; `data` may say how many tokens there are.
    /// # Errors
    /// If a size is out of its range, does not go with the others, or the network has none such.
    pub(super) fn checked(&self, data: &DataSection, seed: u64) -> Result<Model> {
        let weights = self.weights.as_deref().map(Weights::open).transpose();
        let weights = weights.context("model.weights")?;
        let name = match (&self.name, &weights) {
            (Some(name), _) => name.as_str(),
            (None, Some(weights)) => weights.model_type().unwrap_or("resnet-digits"),
            (None, None) => "resnet-digits",
        };
        let network = self.network(name, weights.as_ref(), data, seed)?;
        self.only_has(&network)?;
        let n_params = network.n_params() as f64;
        ensure!(
            n_params < MOST_PARAMS,
            "model: {n_params:.1e} parameters, {MOST_PARAMS:.0e} is the most"
        );
        let lora = self.lora(&network, weights.is_some(), seed)?;
        Ok(Model { network, weights, lora })
    }

    fn network(
        &self,
        name: &str,
        weights: Option<&Weights>,
        data: &DataSection,
        seed: u64,
    ) -> Result<Network> {
        let of_file = weights.and_then(Weights::config);
        Ok(match name {
            "resnet-digits" => Network::ResNet(ResNetKind::Digits),
            "resnet18" => Network::ResNet(ResNetKind::ResNet18),
            "resnet50" => Network::ResNet(ResNetKind::ResNet50),
            "gpt2" => {
                let small = Gpt2Config::small();
                let start = match of_file {
                    Some(file) => Gpt2Config::from_hf(file).context("model.weights")?,
                    None => Gpt2Config { vocab: self.vocab(data, small.vocab)?, ..small },
                };
                Network::Gpt2(self.gpt2(&start, of_file.is_some(), seed)?)
            }
            "llama" => {
                let small = LlamaConfig::small();
                let start = match of_file {
                    Some(file) => LlamaConfig::from_hf(file).context("model.weights")?,
                    None => LlamaConfig { vocab: self.vocab(data, small.vocab)?, ..small },
                };
                Network::Llama(self.llama(&start, of_file.is_some())?)
            }
            "vit" => {
                let start = of_file.map(VitConfig::from_hf).transpose().context("model.weights")?;
                let patch = self.patch.or(start.as_ref().map(|config| config.patch));
                let start = start.unwrap_or(VitConfig::base16(1000));
                Network::Vit(self.vit(&start, of_file.is_some(), seed)?, patch)
            }
            // A word of model.name has been looked at before.
            _ => bail!("model.weights: its config.json is of `{name}`; there are {MODELS}"),
        })
    }

    /// As given, or as the data say, or else `small`.
    fn vocab(&self, data: &DataSection, small: usize) -> Result<usize> {
        match self.vocab {
            Some(vocab) => Ok(vocab),
            None => Ok(data.vocab()?.unwrap_or(small)),
        }
    }

    fn gpt2(&self, start: &Gpt2Config, is_of_file: bool, seed: u64) -> Result<Gpt2Config> {
        let size = |key, given, start| size(key, given, start, is_of_file);
        let config = Gpt2Config {
            vocab: size("vocab", self.vocab, start.vocab)?,
            context: size("context", self.context, start.context)?,
            model_dim: size("model_dim", self.model_dim, start.model_dim)?,
            n_layers: size("n_layers", self.n_layers, start.n_layers)?,
            n_heads: size("n_heads", self.n_heads, start.n_heads)?,
            dropout: self.dropout.unwrap_or(start.dropout),
            dropout_seed: seed,
        };
        heads(config.model_dim, config.n_heads)?;
        dropout("dropout", config.dropout)?;
        config.check().context("section `model`")?;
        Ok(config)
    }

    fn llama(&self, start: &LlamaConfig, is_of_file: bool) -> Result<LlamaConfig> {
        let size = |key, given, start| size(key, given, start, is_of_file);
        let model_dim = size("model_dim", self.model_dim, start.model_dim)?;
        let n_heads = size("n_heads", self.n_heads, start.n_heads)?;
        heads(model_dim, n_heads)?;
        // Where nothing but the heads is given, each has keys and values of its own.
        let n_kv_heads = if self.n_heads.is_some() { n_heads } else { start.n_kv_heads };
        let hidden_dim = match self.model_dim {
            Some(dim) if !is_of_file => (dim.saturating_mul(8) / 3).next_multiple_of(16),
            _ => start.hidden_dim,
        };
        let tied = self.tied.unwrap_or(start.tied);
        ensure!(
            !is_of_file || tied == start.tied,
            "model.tied is {tied}, but the configuration beside model.weights says {}",
            start.tied
        );
        let config = LlamaConfig {
            vocab: size("vocab", self.vocab, start.vocab)?,
            context: size("context", self.context, start.context)?,
            model_dim,
            hidden_dim: size("hidden_dim", self.hidden_dim, hidden_dim)?,
            n_layers: size("n_layers", self.n_layers, start.n_layers)?,
            n_heads,
            n_kv_heads: size("n_kv_heads", self.n_kv_heads, n_kv_heads)?,
            head_dim: if is_of_file { start.head_dim } else { model_dim / n_heads },
            tied,
            ..start.clone()
        };
        config.check().context("section `model`")?;
        Ok(config)
    }

    fn vit(&self, start: &VitConfig, is_of_file: bool, seed: u64) -> Result<VitConfig> {
        let size = |key, given, start| size(key, given, start, is_of_file);
        let model_dim = size("model_dim", self.model_dim, start.model_dim)?;
        let hidden_dim = if is_of_file { start.hidden_dim } else { model_dim.saturating_mul(4) };
        let config = VitConfig {
            patch: size("patch", self.patch, start.patch)?,
            model_dim,
            hidden_dim: size("hidden_dim", self.hidden_dim, hidden_dim)?,
            n_layers: size("n_layers", self.n_layers, start.n_layers)?,
            n_heads: size("n_heads", self.n_heads, start.n_heads)?,
            dropout: self.dropout.unwrap_or(start.dropout),
            dropout_seed: seed,
            ..start.clone()
        };
        heads(model_dim, config.n_heads)?;
        dropout("dropout", config.dropout)?;
        Ok(config)
    }

    fn lora(&self, network: &Network, has_weights: bool, seed: u64) -> Result<Option<Lora>> {
        let Some(rank) = self.lora_rank else {
            for (key, given) in [
                ("lora_alpha", self.lora_alpha.is_some()),
                ("lora_targets", self.lora_targets.is_some()),
                ("lora_dropout", self.lora_dropout.is_some()),
            ] {
                ensure!(!given, "model.{key} is given, but model.lora_rank is not");
            }
            return Ok(None);
        };
        let name = network.name();
        let linears = network.linears();
        let linears =
            linears.with_context(|| format!("model.lora_rank: {name} takes no adapters"))?;
        ensure!(
            has_weights,
            "model.lora_rank is {rank}, but model.weights names no weights that adapters could stand on"
        );
        let lora = Lora {
            rank,
            alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64),
            rank_stabilized: false,
            targets: self.lora_targets.clone().unwrap_or_else(|| vec!["*".to_string()]),
            dropout: self.lora_dropout.unwrap_or(0.0),
            dropout_seed: seed,
        };
        lora.check(&linears).context("section `model`")?;
        Ok(Some(lora))
    }

    /// That no key is given that `network` does not have.
    fn only_has(&self, network: &Network) -> Result<()> {
        let (text, vit) = (network.tokens().is_some(), matches!(network, Network::Vit(..)));
        let llama = matches!(network, Network::Llama(_));
        for (key, given, has) in [
            ("vocab", self.vocab.is_some(), text),
            ("context", self.context.is_some(), text),
            ("model_dim", self.model_dim.is_some(), text || vit),
            ("hidden_dim", self.hidden_dim.is_some(), llama || vit),
            ("n_layers", self.n_layers.is_some(), text || vit),
            ("n_heads", self.n_heads.is_some(), text || vit),
            ("n_kv_heads", self.n_kv_heads.is_some(), llama),
            ("tied", self.tied.is_some(), llama),
            ("patch", self.patch.is_some(), vit),
            ("dropout", self.dropout.is_some(), vit || (text && !llama)),
        ] {
            ensure!(!given || has, "model.{key} is given, but {} has none", network.name());
        }
        Ok(())
    }
}

/// The size under `key`: as given, or else `start`, which a file beside the weights may have fixed.
fn size(key: &str, given: Option<usize>, start: usize, is_of_file: bool) -> Result<usize> {
    let size = given.unwrap_or(start);
    ensure!(size > 0, "model.{key} is 0, 1 is the least");
    ensure!(size <= MOST, "model.{key} is {size}, {MOST} is the most");
    ensure!(
        !is_of_file || size == start,
        "model.{key} is {size}, but the configuration beside model.weights says {start}"
    );
    Ok(size)
}

fn heads(dim: usize, heads: usize) -> Result<()> {
    ensure!(
        dim.is_multiple_of(heads),
        "model.n_heads {heads} does not divide model.model_dim {dim}"
    );
    Ok(())
}

fn dropout(key: &str, dropout: f64) -> Result<()> {
    let fits = (0.0..1.0).contains(&dropout);
    ensure!(fits, "model.{key} is {dropout}, it must be from 0 to below 1");
    Ok(())
}

//! Vision transformer (Dosovitskiy et al. 2020), under the parameter names of Hugging Face's
//! `ViTForImageClassification`.

// B batch · C channels · D model · N patches · T = 1 + N tokens · H heads

use crate::{
    error::{self, Error, addressable, at_least_one, divides, dropout_range, positive},
    hf::{HfValue, refuse},
    lora::{LinearSize, Lora, Projection, Source, WeightLayout, elems},
    segments::{Score, Segments},
};
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use tallow_tensor::{
    layers::{Dropout, LayerNorm, Linear, layer_norm},
    ops::{self, Conv2dConfig, CrossEntropy, Loss, Mask},
};

const INIT_STDEV: f64 = 0.02;

/// Sizes of a vision transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct VitConfig {
    /// Height and width of images; multiples of `patch`.
    pub image_size: [usize; 2],
    /// Side of a patch, which becomes one token.
    pub patch: usize,
    /// Channels of images.
    pub channels: usize,
    /// Classes told apart.
    pub classes: usize,
    /// Width of the residual stream.
    pub model_dim: usize,
    /// Width of the feed-forward.
    pub hidden_dim: usize,
    /// Blocks.
    pub n_layers: usize,
    /// Heads of each block; a divisor of `model_dim`.
    pub n_heads: usize,
    /// Added to the variance in norms.
    pub norm_eps: f64,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Probability of dropout on the embedding and on what each block adds, `0 <= p < 1`.
    pub dropout: f64,
    /// Seed of its masks.
    pub dropout_seed: u64,
}

impl VitConfig {
    /// What precedes the names of Hugging Face's files: nothing, they are this model's own.
    pub const PREFIX: &str = "";
    /// How its linear weights lie.
    pub const LAYOUT: WeightLayout = WeightLayout::OutIn;
    /// What trains whole beside adapters: a new task needs a new classifier.
    pub const LORA_ALSO_TRAINS: &[&str] = &["classifier"];

    /// ViT-B/16 for images of 224 x 224, 86M parameters.
    pub fn base16(classes: usize) -> Self {
        Self {
            image_size: [224, 224],
            patch: 16,
            channels: 3,
            classes,
            model_dim: 768,
            hidden_dim: 3072,
            n_layers: 12,
            n_heads: 12,
            norm_eps: 1e-12,
            qkv_bias: true,
            dropout: 0.0,
            dropout_seed: 0,
        }
    }

    /// From the value of a `config.json`, whose classes are the entries of `id2label`; the seed of
    /// dropout is this crate's own and 0. Dropout of attention weights does not exist here.
    /// # Errors
    /// If a field is missing, of another type, or asks for what this crate has not.
    pub fn from_hf(config: &HfValue) -> error::Result<Self> {
        config.one_of("model_type", &["vit"])?;
        config.one_of("hidden_act", &["gelu"])?;
        let classes = match (config.get("id2label"), config.get("num_labels")) {
            (Some(HfValue::Map(labels)), _) => labels.len(),
            (None, Some(_)) => config.size("num_labels")?,
            (None, None) => 2, // what `transformers` then assumes
            (found, _) => return Err(refuse("id2label", found, "an object")),
        };
        let pair = |name: &str| match config.get(name) {
            Some(HfValue::List(items)) => match items[..] {
                [HfValue::Int(h), HfValue::Int(w)] if h >= 0 && w >= 0 => {
                    Ok([h as usize, w as usize])
                }
                _ => Err(refuse(name, config.get(name), "one size or two")),
            },
            _ => config.size(name).map(|side| [side, side]),
        };
        let [patch, patch_width] = pair("patch_size")?;
        if patch != patch_width {
            return Err(refuse("patch_size", config.get("patch_size"), "square"));
        }
        let this = Self {
            image_size: pair("image_size")?,
            patch,
            channels: config.size_or("num_channels", Some(3))?,
            classes,
            model_dim: config.size("hidden_size")?,
            hidden_dim: config.size("intermediate_size")?,
            n_layers: config.size("num_hidden_layers")?,
            n_heads: config.size("num_attention_heads")?,
            norm_eps: config.number_or("layer_norm_eps", 1e-12)?,
            qkv_bias: config.flag_or("qkv_bias", true)?,
            dropout: config.number_or("hidden_dropout_prob", 0.0)?,
            dropout_seed: 0,
        };
        this.check()?;
        Ok(this)
    }

    /// The value of a `config.json`; classes are called `LABEL_0` and so on.
    pub fn to_hf(&self) -> HfValue {
        let [height, width] = self.image_size;
        let image_size = match height == width {
            true => height.into(),
            false => HfValue::List(vec![height.into(), width.into()]),
        };
        let label = |i: usize| (i.to_string(), HfValue::Text(format!("LABEL_{i}")));
        let id = |i: usize| (format!("LABEL_{i}"), HfValue::from(i));
        HfValue::map([
            ("model_type", "vit".into()),
            ("architectures", HfValue::List(vec!["ViTForImageClassification".into()])),
            ("hidden_act", "gelu".into()),
            ("image_size", image_size),
            ("patch_size", self.patch.into()),
            ("num_channels", self.channels.into()),
            ("id2label", HfValue::Map((0..self.classes).map(label).collect())),
            ("label2id", HfValue::Map((0..self.classes).map(id).collect())),
            ("hidden_size", self.model_dim.into()),
            ("intermediate_size", self.hidden_dim.into()),
            ("num_hidden_layers", self.n_layers.into()),
            ("num_attention_heads", self.n_heads.into()),
            ("layer_norm_eps", self.norm_eps.into()),
            ("qkv_bias", self.qkv_bias.into()),
            ("hidden_dropout_prob", self.dropout.into()),
            ("attention_probs_dropout_prob", 0.0.into()),
        ])
    }

    /// Refuses sizes that do not fit together.
    /// # Errors
    /// If a size is 0, patches do not divide the image or heads the width, or a number is out of its
    /// range.
    pub fn check(&self) -> error::Result<()> {
        at_least_one(&[
            ("image height", self.image_size[0]),
            ("image width", self.image_size[1]),
            ("patch", self.patch),
            ("channels", self.channels),
            ("classes", self.classes),
            ("model_dim", self.model_dim),
            ("hidden_dim", self.hidden_dim),
            ("n_heads", self.n_heads),
        ])?;
        divides(("patch", self.patch), ("image height", self.image_size[0]))?;
        divides(("patch", self.patch), ("image width", self.image_size[1]))?;
        divides(("n_heads", self.n_heads), ("model_dim", self.model_dim))?;
        positive("norm_eps", self.norm_eps)?;
        dropout_range("dropout", self.dropout)?;
        addressable(self.n_params())
    }

    /// Patches of an image.
    pub fn n_patches(&self) -> usize {
        let [height, width] = self.image_size;
        let [rows, cols] = [height, width].map(|side| side / self.patch.max(1));
        rows.saturating_mul(cols)
    }

    /// The linear layers that a LoRA may adapt.
    pub fn linears(&self) -> Vec<LinearSize> {
        let (d, f) = (self.model_dim, self.hidden_dim);
        let of_block = [
            ("attention.attention.query", d, d),
            ("attention.attention.key", d, d),
            ("attention.attention.value", d, d),
            ("attention.output.dense", d, d),
            ("intermediate.dense", d, f),
            ("output.dense", f, d),
        ];
        let block = |i: usize| {
            of_block.map(|(name, in_features, out_features)| {
                let name = format!("vit.encoder.layer.{i}.{name}");
                LinearSize { name, in_features, out_features }
            })
        };
        (0..self.n_layers).flat_map(block).collect()
    }

    /// Number of trainable elements, without building the model.
    pub fn n_params(&self) -> u64 {
        let d = self.model_dim;
        let bias = |l: &LinearSize| {
            let has = self.qkv_bias || !l.name.contains(".attention.attention.");
            if has { l.out_features as u64 } else { 0 }
        };
        // One block stands for all: their number is a user's.
        let block = Self { n_layers: 1, ..self.clone() }.linears();
        let block = block.iter().flat_map(|l| [l.n_elems(), bias(l)]).fold(0, u64::saturating_add);
        let blocks = block.saturating_mul(self.n_layers as u64);
        let others = [
            elems(&[self.channels, self.patch, self.patch, d]),
            elems(&[self.n_patches(), d]), // their positions
            elems(&[3, d]),                // the patches' bias, the class token and its position
            elems(&[4, self.n_layers, d]), // norms of blocks
            elems(&[2, d]),                // the last norm
            elems(&[d, self.classes]).saturating_add(self.classes as u64),
        ];
        others.into_iter().fold(blocks, u64::saturating_add)
    }

    /// Builds the model.
    /// # Errors
    /// As [`VitConfig::check`], or if the builder has no such parameters.
    pub fn build(&self, vb: VarBuilder) -> Result<Vit> {
        self.build_from(&Source::whole(vb.clone()), &vb)
    }

    /// Builds the model of constants from `base`, with trainable adapters from `adapters`. The
    /// classifier comes from `adapters` too and trains ([`VitConfig::LORA_ALSO_TRAINS`]).
    ///
    /// Adapters are named after `transformers` 4; PEFT with version 5 knows the same layers by other
    /// names (`vit.layers.0.attention.q_proj`), and maps only those of whole models.
    /// # Errors
    /// As [`VitConfig::build`] and [`Lora::check`].
    pub fn build_lora<'a>(
        &self,
        base: VarBuilder<'a>,
        lora: &'a Lora,
        adapters: VarBuilder<'a>,
    ) -> Result<Vit> {
        let source = Source::adapted(base, lora, adapters.clone(), &self.linears())?;
        self.build_from(&source, &adapters)
    }

    fn build_from(&self, source: &Source, head: &VarBuilder) -> Result<Vit> {
        self.check()?;
        let (d, n) = (self.model_dim, self.n_patches());
        let vit = source.pp("vit");
        let (embeddings, head) = (vit.base.pp("embeddings"), head.pp("classifier"));
        let projection = embeddings.pp("patch_embeddings.projection");
        let normal = Init::Randn { mean: 0.0, stdev: INIT_STDEV };
        let zero = Init::Const(0.0);
        let patch = (d, self.channels, self.patch, self.patch);
        let dropout = Dropout::new(self.dropout, self.dropout_seed)?;
        let block = |i: usize| Block::new(self, dropout, &vit.pp(format!("encoder.layer.{i}")));
        Ok(Vit {
            config: self.clone(),
            class_token: embeddings.get_with_hints((1, 1, d), "cls_token", normal)?,
            position: embeddings.get_with_hints((1, 1 + n, d), "position_embeddings", normal)?,
            patch_weight: projection.get_with_hints(patch, "weight", normal)?,
            patch_bias: projection.get_with_hints(d, "bias", zero)?,
            dropout,
            blocks: (0..self.n_layers).map(block).collect::<Result<_>>()?,
            norm: layer_norm(d, self.norm_eps, vit.base.pp("layernorm"))?,
            classifier: Linear::new(
                head.get_with_hints((self.classes, d), "weight", normal)?,
                Some(head.get_with_hints(self.classes, "bias", zero)?),
            ),
        })
    }
}

/// A vision transformer that classifies by its first token.
///
/// As [`Segments`]: the patches, attention and feed-forward of each block, then norm, classifier and
/// loss.
#[derive(Clone, Debug)]
pub struct Vit {
    config: VitConfig,
    class_token: Tensor,
    position: Tensor,
    patch_weight: Tensor,
    patch_bias: Tensor,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: LayerNorm,
    classifier: Linear,
}

impl Vit {
    /// `[B, C, height, width]` → `[B, T, D]`.
    fn embed(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let VitConfig { image_size: [height, width], channels, patch, .. } = self.config;
        match *images.dims() {
            [_, c, h, w] if [c, h, w] == [channels, height, width] => (),
            ref dims => {
                let expected = format!("[batch, {channels}, {height}, {width}]");
                return Err(Error::Input { found: dims.to_vec(), expected }.into());
            }
        }
        let dtype = self.patch_weight.dtype();
        let cfg = Conv2dConfig { stride: [patch, patch], ..Conv2dConfig::UNIT };
        let images = images.to_dtype(dtype)?;
        let grid = ops::conv2d(&images, &self.patch_weight, Some(&self.patch_bias), cfg)?;
        let patches_bnd = grid.flatten_from(2)?.transpose(1, 2)?;
        // The class token is the same for all images: it is added where its position is, so that its
        // gradient is summed over the batch once, in f32, and nothing of the batch's size is made.
        let (b, _, d) = patches_bnd.dims3()?;
        let nothing = Tensor::zeros((b, 1, d), dtype, images.device())?;
        let tokens_btd = Tensor::cat(&[&nothing, &patches_bnd], 1)?;
        let first = ops::add(&self.position.narrow(1, 0, 1)?, &self.class_token)?;
        let rest = self.position.narrow(1, 1, self.config.n_patches())?;
        let position_td = Tensor::cat(&[&first, &rest], 1)?.squeeze(0)?.to_dtype(dtype)?;
        self.dropout.forward_t(&ops::add(&tokens_btd, &position_td)?, train)
    }

    /// `[B, T, D]` → logits `[B, classes]`.
    fn classify(&self, x_btd: &Tensor) -> Result<Tensor> {
        let first_bd = x_btd.narrow(1, 0, 1)?.squeeze(1)?;
        self.classifier.forward(&self.norm.forward(&first_bd)?)
    }
}

impl ModuleT for Vit {
    /// `images` `[B, C, height, width]` → logits `[B, classes]`.
    fn forward_t(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let mut x_btd = self.embed(images, train)?;
        for block in &self.blocks {
            x_btd = block.feed_forward(&block.attend(&x_btd, train)?, train)?;
        }
        self.classify(&x_btd)
    }
}

impl Segments for Vit {
    fn names(&self) -> Vec<String> {
        let block = |i| [format!("layer.{i}.attention"), format!("layer.{i}.mlp")];
        let blocks = (0..self.blocks.len()).flat_map(block);
        ["embeddings".to_string()].into_iter().chain(blocks).collect()
    }

    fn head_name(&self) -> String {
        "classifier".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, train: bool) -> Result<Tensor> {
        match index.checked_sub(1) {
            None => self.embed(x, train),
            Some(i) if i % 2 == 0 => self.blocks[i / 2].attend(x, train),
            Some(i) => self.blocks[i / 2].feed_forward(x, train),
        }
    }

    fn loss(&self, x_btd: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        Ok(ops::cross_entropy(&self.classify(x_btd)?, targets, cfg)?)
    }

    fn score(&self, x_btd: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        Score::of_logits(&self.classify(x_btd)?, targets, cfg)
    }
}

/// Attention and feed-forward, each behind a norm and added to the residual stream.
#[derive(Clone, Debug)]
struct Block {
    norm_before: LayerNorm,
    query: Projection,
    key: Projection,
    value: Projection,
    attention_output: Projection,
    norm_after: LayerNorm,
    intermediate: Projection,
    output: Projection,
    dropout: Dropout,
    n_heads: usize,
}

impl Block {
    fn new(config: &VitConfig, dropout: Dropout, source: &Source) -> Result<Self> {
        let (d, f) = (config.model_dim, config.hidden_dim);
        let linear = |name: &str, sizes, bias| {
            source.pp(name).linear(sizes, bias, VitConfig::LAYOUT, INIT_STDEV)
        };
        let qkv =
            |name: &str| linear(&format!("attention.attention.{name}"), (d, d), config.qkv_bias);
        let norm = |name: &str| layer_norm(d, config.norm_eps, source.base.pp(name));
        Ok(Self {
            norm_before: norm("layernorm_before")?,
            query: qkv("query")?,
            key: qkv("key")?,
            value: qkv("value")?,
            attention_output: linear("attention.output.dense", (d, d), true)?,
            norm_after: norm("layernorm_after")?,
            intermediate: linear("intermediate.dense", (d, f), true)?,
            output: linear("output.dense", (f, d), true)?,
            dropout,
            n_heads: config.n_heads,
        })
    }

    fn attend(&self, x_btd: &Tensor, train: bool) -> Result<Tensor> {
        let (_, _, d) = x_btd.dims3()?;
        let normed = self.norm_before.forward(x_btd)?;
        let (q, k) = (self.query.forward_t(&normed, train)?, self.key.forward_t(&normed, train)?);
        let v = self.value.forward_t(&normed, train)?;
        let scale = 1.0 / ((d / self.n_heads) as f64).sqrt();
        let heads = (self.n_heads, self.n_heads);
        let out_btd = ops::attention_rows(&q, &k, &v, heads, Mask::Full, scale)?;
        let added = self.attention_output.forward_t(&out_btd, train)?;
        Ok(ops::add(x_btd, &self.dropout.forward_t(&added, train)?)?)
    }

    fn feed_forward(&self, x_btd: &Tensor, train: bool) -> Result<Tensor> {
        let hidden = self.intermediate.forward_t(&self.norm_after.forward(x_btd)?, train)?;
        let added = self.output.forward_t(&ops::gelu_erf(&hidden)?, train)?;
        Ok(ops::add(x_btd, &self.dropout.forward_t(&added, train)?)?)
    }
}

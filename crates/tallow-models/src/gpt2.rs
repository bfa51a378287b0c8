//! GPT-2 (Radford et al. 2019), under the parameter names and layouts of Hugging Face.

// B batch · T tokens · D model · H heads · V vocabulary

use crate::{
    error::{self, addressable, at_least_one, divides, dropout_range},
    hf::{HfValue, refuse},
    lora::{LinearSize, Lora, Projection, Source, WeightLayout, elems},
    segments::{Score, Segments},
    text::{self, Cache, Decoder},
};
use candle_core::{D, Device, Module, ModuleT, Result, Tensor};
use candle_nn::{Init, VarBuilder, kv_cache::KvCache};
use tallow_tensor::{
    layers::{Dropout, Embedding, LayerNorm, layer_norm},
    ops::{self, CrossEntropy, Loss, Mask},
};

const NORM_EPS: f64 = 1e-5;
const INIT_STDEV: f64 = 0.02;

/// Sizes of a GPT-2.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Tokens known.
    pub vocab: usize,
    /// The longest sequence.
    pub context: usize,
    /// Width of the residual stream.
    pub model_dim: usize,
    /// Blocks.
    pub n_layers: usize,
    /// Heads of each block; a divisor of `model_dim`.
    pub n_heads: usize,
    /// Probability of dropout on the embedding and on what each block adds, `0 <= p < 1`.
    pub dropout: f64,
    /// Seed of its masks.
    pub dropout_seed: u64,
}

impl Gpt2Config {
    /// What precedes this model's names in files of `transformers`; the published ones of the bare
    /// model have nothing.
    pub const PREFIX: &str = "transformer.";
    /// How its linear weights lie.
    pub const LAYOUT: WeightLayout = WeightLayout::InOut;

    /// The smallest published one, 124M parameters.
    pub fn small() -> Self {
        Self {
            vocab: 50257,
            context: 1024,
            model_dim: 768,
            n_layers: 12,
            n_heads: 12,
            dropout: 0.1,
            dropout_seed: 0,
        }
    }

    /// Number of trainable elements, without building the model. The head is the token embedding.
    pub fn n_params(&self) -> u64 {
        let d = self.model_dim;
        // One block stands for all: their number is a user's.
        let block = Self { n_layers: 1, ..self.clone() }.linears();
        let block = block.iter().flat_map(|l| [l.n_elems(), l.out_features as u64]);
        let block = block.fold(0, u64::saturating_add);
        let blocks = block.saturating_mul(self.n_layers as u64);
        let tables = [elems(&[self.vocab, d]), elems(&[self.context, d])];
        let norms = [elems(&[4, self.n_layers, d]), elems(&[2, d])];
        tables.into_iter().chain(norms).fold(blocks, u64::saturating_add)
    }

    /// From the value of a `config.json`; the seed of dropout is this crate's own and 0. Dropout of
    /// attention weights (`attn_pdrop`) does not exist here.
    /// # Errors
    /// If a field is missing, of another type, or asks for what this crate has not.
    pub fn from_hf(config: &HfValue) -> error::Result<Self> {
        config.one_of("model_type", &["gpt2"])?;
        config.one_of("activation_function", &["gelu_new", "gelu_pytorch_tanh"])?;
        for (name, wanted) in [
            ("scale_attn_by_inverse_layer_idx", false),
            ("scale_attn_weights", true),
            ("tie_word_embeddings", true),
            ("add_cross_attention", false),
        ] {
            if config.flag_or(name, wanted)? != wanted {
                return Err(refuse(name, config.get(name), &format!("{wanted} or absent")));
            }
        }
        if config.number_or("layer_norm_epsilon", NORM_EPS)? != NORM_EPS {
            let found = config.get("layer_norm_epsilon");
            return Err(refuse("layer_norm_epsilon", found, "0.00001 or absent"));
        }
        let model_dim = config.size("n_embd")?;
        let hidden_dim = model_dim.saturating_mul(4);
        if config.size_or("n_inner", Some(hidden_dim))? != hidden_dim {
            let expected = format!("{hidden_dim} (four times n_embd) or absent");
            return Err(refuse("n_inner", config.get("n_inner"), &expected));
        }
        let dropout = config.number_or("resid_pdrop", 0.1)?;
        if config.number_or("embd_pdrop", 0.1)? != dropout {
            let expected = format!("{dropout} like resid_pdrop");
            return Err(refuse("embd_pdrop", config.get("embd_pdrop"), &expected));
        }
        let this = Self {
            vocab: config.size("vocab_size")?,
            context: config.size("n_positions")?,
            model_dim,
            n_layers: config.size("n_layer")?,
            n_heads: config.size("n_head")?,
            dropout,
            dropout_seed: 0,
        };
        this.check()?;
        Ok(this)
    }

    /// The value of a `config.json`.
    pub fn to_hf(&self) -> HfValue {
        HfValue::map([
            ("model_type", "gpt2".into()),
            ("architectures", HfValue::List(vec!["GPT2LMHeadModel".into()])),
            ("activation_function", "gelu_new".into()),
            ("vocab_size", self.vocab.into()),
            ("n_positions", self.context.into()),
            ("n_embd", self.model_dim.into()),
            ("n_layer", self.n_layers.into()),
            ("n_head", self.n_heads.into()),
            ("layer_norm_epsilon", NORM_EPS.into()),
            ("resid_pdrop", self.dropout.into()),
            ("embd_pdrop", self.dropout.into()),
            ("attn_pdrop", 0.0.into()),
        ])
    }

    /// Refuses sizes that do not fit together.
    /// # Errors
    /// If a size is 0, the heads do not divide the width, or the dropout is out of its range.
    pub fn check(&self) -> error::Result<()> {
        at_least_one(&[
            ("vocab", self.vocab),
            ("context", self.context),
            ("model_dim", self.model_dim),
            ("n_heads", self.n_heads),
        ])?;
        divides(("n_heads", self.n_heads), ("model_dim", self.model_dim))?;
        dropout_range("dropout", self.dropout)?;
        addressable(self.n_params())
    }

    /// The linear layers that a LoRA may adapt.
    pub fn linears(&self) -> Vec<LinearSize> {
        let d = self.model_dim;
        let of_block = [
            ("attn.c_attn", d, d.saturating_mul(3)),
            ("attn.c_proj", d, d),
            ("mlp.c_fc", d, d.saturating_mul(4)),
            ("mlp.c_proj", d.saturating_mul(4), d),
        ];
        let block = |i: usize| {
            of_block.map(|(name, in_features, out_features)| LinearSize {
                name: format!("h.{i}.{name}"),
                in_features,
                out_features,
            })
        };
        (0..self.n_layers).flat_map(block).collect()
    }

    /// Builds the model.
    /// # Errors
    /// As [`Gpt2Config::check`], or if the builder has no such parameters.
    pub fn build(&self, vb: VarBuilder) -> Result<Gpt2> {
        self.build_from(&Source::whole(vb))
    }

    /// Builds the model of constants from `base`, with trainable adapters from `adapters`.
    /// # Errors
    /// As [`Gpt2Config::build`] and [`Lora::check`].
    pub fn build_lora<'a>(
        &self,
        base: VarBuilder<'a>,
        lora: &'a Lora,
        adapters: VarBuilder<'a>,
    ) -> Result<Gpt2> {
        self.build_from(&Source::adapted(base, lora, adapters, &self.linears())?)
    }

    fn build_from(&self, source: &Source) -> Result<Gpt2> {
        self.check()?;
        let (d, vb) = (self.model_dim, &source.base);
        let normal = Init::Randn { mean: 0.0, stdev: INIT_STDEV };
        let wte = vb.pp("wte").get_with_hints((self.vocab, d), "weight", normal)?;
        let wpe = vb.pp("wpe").get_with_hints((self.context, d), "weight", normal)?;
        let dropout = Dropout::new(self.dropout, self.dropout_seed)?;
        let block = |i: usize| Block::new(self, dropout, &source.pp(format!("h.{i}")));
        Ok(Gpt2 {
            token: Embedding::new(wte, None),
            position: wpe,
            dropout,
            blocks: (0..self.n_layers).map(block).collect::<Result<_>>()?,
            norm: layer_norm(d, NORM_EPS, vb.pp("ln_f"))?,
        })
    }
}

/// A GPT-2 whose head is its token embedding.
///
/// As [`Segments`]: the embedding, attention and feed-forward of each block, then norm, head and
/// loss, whose logits exist in chunks of 8 MiB.
#[derive(Clone, Debug)]
pub struct Gpt2 {
    token: Embedding,
    position: Tensor,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

impl Gpt2 {
    /// `first` is where the first token stands.
    fn embed(&self, ids_bt: &Tensor, first: usize, train: bool) -> Result<Tensor> {
        let (_, n_tokens) = ids_bt.dims2()?;
        text::within(first + n_tokens, self.position.dim(0)?)?;
        let token_btd = self.token.forward(ids_bt)?;
        let position_td = self.position.narrow(0, first, n_tokens)?;
        self.dropout.forward_t(&ops::add(&token_btd, &position_td)?, train)
    }
}

impl ModuleT for Gpt2 {
    /// `ids_bt` `[B, T]` → logits `[B, T, V]`, held whole.
    fn forward_t(&self, ids_bt: &Tensor, train: bool) -> Result<Tensor> {
        let mut x_btd = self.embed(ids_bt, 0, train)?;
        for block in &self.blocks {
            x_btd = block.feed_forward(&block.attend(&x_btd, train, None)?, train)?;
        }
        let x_btd = self.norm.forward(&x_btd)?;
        Ok(ops::linear(&x_btd, &self.token.weight().to_dtype(x_btd.dtype())?, None)?)
    }
}

impl Segments for Gpt2 {
    fn names(&self) -> Vec<String> {
        let blocks =
            (0..self.blocks.len()).flat_map(|i| [format!("h.{i}.attn"), format!("h.{i}.mlp")]);
        ["embed".to_string()].into_iter().chain(blocks).collect()
    }

    fn head_name(&self) -> String {
        "head".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, train: bool) -> Result<Tensor> {
        match index.checked_sub(1) {
            None => self.embed(x, 0, train),
            Some(i) if i % 2 == 0 => self.blocks[i / 2].attend(x, train, None),
            Some(i) => self.blocks[i / 2].feed_forward(x, train),
        }
    }

    fn loss(&self, x_btd: &Tensor, targets_bt: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        let rows = self.norm.forward(x_btd)?.flatten_to(1)?;
        text::loss(&rows, self.token.weight(), targets_bt, cfg)
    }

    fn score(&self, x_btd: &Tensor, targets_bt: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        let rows = self.norm.forward(x_btd)?.flatten_to(1)?;
        text::score(&rows, self.token.weight(), targets_bt, cfg)
    }
}

impl Decoder for Gpt2 {
    fn context(&self) -> usize {
        self.position.dims()[0]
    }

    fn device(&self) -> &Device {
        self.position.device()
    }

    fn cache(&self, capacity: usize) -> Cache {
        Cache::new(self.blocks.len(), capacity)
    }

    fn next_logits(&self, ids_bt: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        let (n_new, first) = cache.admit(ids_bt, Decoder::context(self))?;
        let mut x_btd = self.embed(ids_bt, first, false)?.detach();
        for (block, kept) in self.blocks.iter().zip(&mut cache.blocks) {
            x_btd = block.attend(&x_btd, false, Some(kept))?;
            x_btd = block.feed_forward(&x_btd, false)?.detach();
        }
        let last_bd = x_btd.narrow(1, n_new - 1, 1)?.squeeze(1)?;
        let last_bd = self.norm.forward(&last_bd)?.detach();
        let head = self.token.weight().detach().to_dtype(last_bd.dtype())?;
        Ok(ops::linear(&last_bd, &head, None)?)
    }
}

/// Attention and feed-forward, each behind a norm and added to the residual stream.
#[derive(Clone, Debug)]
struct Block {
    ln_1: LayerNorm,
    c_attn: Projection,
    attn_proj: Projection,
    ln_2: LayerNorm,
    c_fc: Projection,
    mlp_proj: Projection,
    dropout: Dropout,
    n_heads: usize,
}

impl Block {
    fn new(config: &Gpt2Config, dropout: Dropout, source: &Source) -> Result<Self> {
        let (d, vb) = (config.model_dim, &source.base);
        // What is added 2 n times to the stream starts smaller by the square root of it.
        let added = INIT_STDEV / (2.0 * config.n_layers as f64).sqrt();
        let linear = |name: &str, sizes, stdev| {
            source.pp(name).linear(sizes, true, Gpt2Config::LAYOUT, stdev)
        };
        Ok(Self {
            ln_1: layer_norm(d, NORM_EPS, vb.pp("ln_1"))?,
            c_attn: linear("attn.c_attn", (d, 3 * d), INIT_STDEV)?,
            attn_proj: linear("attn.c_proj", (d, d), added)?,
            ln_2: layer_norm(d, NORM_EPS, vb.pp("ln_2"))?,
            c_fc: linear("mlp.c_fc", (d, 4 * d), INIT_STDEV)?,
            mlp_proj: linear("mlp.c_proj", (4 * d, d), added)?,
            dropout,
            n_heads: config.n_heads,
        })
    }

    fn attend(&self, x_btd: &Tensor, train: bool, cache: Option<&mut KvCache>) -> Result<Tensor> {
        let (b, t, d) = x_btd.dims3()?;
        let qkv = self.c_attn.forward_t(&self.ln_1.forward(x_btd)?, train)?;
        let out_btd = match cache {
            None => {
                let scale = 1.0 / ((d / self.n_heads) as f64).sqrt();
                ops::attention_packed(&qkv, (self.n_heads, self.n_heads), Mask::Causal, scale)?
            }
            cache => {
                let part = |i: usize| {
                    let rows = qkv.narrow(D::Minus1, i * d, d)?;
                    rows.reshape((b, t, self.n_heads, ()))?.transpose(1, 2)
                };
                text::attend(&part(0)?, &part(1)?, &part(2)?, cache)?
            }
        };
        let added = self.dropout.forward_t(&self.attn_proj.forward_t(&out_btd, train)?, train)?;
        Ok(ops::add(x_btd, &added)?)
    }

    fn feed_forward(&self, x_btd: &Tensor, train: bool) -> Result<Tensor> {
        let hidden = self.c_fc.forward_t(&self.ln_2.forward(x_btd)?, train)?;
        let added = self.mlp_proj.forward_t(&ops::gelu_tanh(&hidden)?, train)?;
        Ok(ops::add(x_btd, &self.dropout.forward_t(&added, train)?)?)
    }
}

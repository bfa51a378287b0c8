//! Llama (Touvron et al. 2023; Grattafiori et al. 2024), under the parameter names of Hugging Face.

// B batch · T tokens · D model · H query heads · G key-value heads · V vocabulary

use crate::{
    error::{self, addressable, at_least_one, divides, positive},
    hf::{HfValue, refuse},
    lora::{LinearSize, Lora, Projection, Source, WeightLayout, elems},
    rope::RopeScaling,
    segments::{Score, Segments},
    text::{self, Cache, Decoder},
};
use candle_core::{Device, Module, ModuleT, Result, Tensor};
use candle_nn::{Init, VarBuilder, kv_cache::KvCache};
use tallow_tensor::{
    layers::{Embedding, RmsNorm, Rotary, rms_norm},
    ops::{self, CrossEntropy, Loss, Rope},
};

const INIT_STDEV: f64 = 0.02;

/// Sizes of a Llama.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Tokens known.
    pub vocab: usize,
    /// The longest sequence.
    pub context: usize,
    /// Width of the residual stream.
    pub model_dim: usize,
    /// Width of the feed-forward.
    pub hidden_dim: usize,
    /// Blocks.
    pub n_layers: usize,
    /// Query heads of each block.
    pub n_heads: usize,
    /// Key and value heads; a divisor of `n_heads`.
    pub n_kv_heads: usize,
    /// Elements of one head; even.
    pub head_dim: usize,
    /// Added to the mean square in norms.
    pub norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How they are stretched for longer sequences.
    pub rope_scaling: RopeScaling,
    /// Whether the head is the token embedding.
    pub tied: bool,
    /// Whether the four projections of attention have biases.
    pub attention_bias: bool,
    /// Whether the feed-forward has biases.
    pub mlp_bias: bool,
}

impl LlamaConfig {
    /// What precedes the names of Hugging Face's files: nothing, they are this model's own.
    pub const PREFIX: &str = "";
    /// How its linear weights lie.
    pub const LAYOUT: WeightLayout = WeightLayout::OutIn;

    /// A Llama as wide and deep as the smallest GPT-2, with the vocabulary of Llama 2: 100M parameters.
    pub fn small() -> Self {
        Self {
            vocab: 32_000,
            context: 1024,
            model_dim: 768,
            hidden_dim: 2048,
            n_layers: 12,
            n_heads: 12,
            n_kv_heads: 4,
            head_dim: 64,
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::None,
            tied: true,
            attention_bias: false,
            mlp_bias: false,
        }
    }

    /// Llama 3.2 of 1.24 billion parameters.
    pub fn llama3_2_1b() -> Self {
        Self {
            vocab: 128_256,
            context: 131_072,
            model_dim: 2048,
            hidden_dim: 8192,
            n_layers: 16,
            n_heads: 32,
            n_kv_heads: 8,
            head_dim: 64,
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            rope_scaling: RopeScaling::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 8192,
            },
            tied: true,
            attention_bias: false,
            mlp_bias: false,
        }
    }

    /// From the value of a `config.json`.
    /// # Errors
    /// If a field is missing, of another type, or asks for what this crate has not.
    pub fn from_hf(config: &HfValue) -> error::Result<Self> {
        config.one_of("model_type", &["llama"])?;
        config.one_of("hidden_act", &["silu"])?;
        if config.number_or("pretraining_tp", 1.0)? != 1.0 {
            return Err(refuse("pretraining_tp", config.get("pretraining_tp"), "1 or absent"));
        }
        let (model_dim, n_heads) =
            (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let (rope_theta, rope_scaling) = RopeScaling::from_hf(config)?;
        let head_dim = model_dim.checked_div(n_heads).unwrap_or(0);
        let this = Self {
            vocab: config.size("vocab_size")?,
            context: config.size_or("max_position_embeddings", Some(2048))?,
            model_dim,
            hidden_dim: config.size("intermediate_size")?,
            n_layers: config.size("num_hidden_layers")?,
            n_heads,
            n_kv_heads: config.size_or("num_key_value_heads", Some(n_heads))?,
            head_dim: config.size_or("head_dim", Some(head_dim))?,
            norm_eps: config.number_or("rms_norm_eps", 1e-6)?,
            rope_theta,
            rope_scaling,
            tied: config.flag_or("tie_word_embeddings", false)?,
            attention_bias: config.flag_or("attention_bias", false)?,
            mlp_bias: config.flag_or("mlp_bias", false)?,
        };
        if config.get("head_dim").is_none() {
            divides(("num_attention_heads", n_heads), ("hidden_size", model_dim))?;
        }
        this.check()?;
        Ok(this)
    }

    /// The value of a `config.json`.
    pub fn to_hf(&self) -> HfValue {
        let HfValue::Map(mut fields) = HfValue::map([
            ("model_type", "llama".into()),
            ("architectures", HfValue::List(vec!["LlamaForCausalLM".into()])),
            ("hidden_act", "silu".into()),
            ("vocab_size", self.vocab.into()),
            ("max_position_embeddings", self.context.into()),
            ("hidden_size", self.model_dim.into()),
            ("intermediate_size", self.hidden_dim.into()),
            ("num_hidden_layers", self.n_layers.into()),
            ("num_attention_heads", self.n_heads.into()),
            ("num_key_value_heads", self.n_kv_heads.into()),
            ("head_dim", self.head_dim.into()),
            ("rms_norm_eps", self.norm_eps.into()),
            ("tie_word_embeddings", self.tied.into()),
            ("attention_bias", self.attention_bias.into()),
            ("mlp_bias", self.mlp_bias.into()),
        ]) else {
            unreachable!("a map of fields")
        };
        fields.extend(self.rope_scaling.to_hf(self.rope_theta));
        HfValue::Map(fields)
    }

    /// Refuses sizes that do not fit together.
    /// # Errors
    /// If a size is 0, heads cannot be shared out or turned, or a number is out of its range.
    pub fn check(&self) -> error::Result<()> {
        at_least_one(&[
            ("vocab", self.vocab),
            ("context", self.context),
            ("model_dim", self.model_dim),
            ("hidden_dim", self.hidden_dim),
            ("n_heads", self.n_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
        ])?;
        divides(("n_kv_heads", self.n_kv_heads), ("n_heads", self.n_heads))?;
        if !self.head_dim.is_multiple_of(2) {
            let found = self.head_dim as f64;
            return Err(error::Error::Range { name: "head_dim", found, expected: "even" });
        }
        positive("norm_eps", self.norm_eps)?;
        positive("rope_theta", self.rope_theta)?;
        self.rope_scaling.check()?;
        addressable(self.n_params())
    }

    /// The linear layers that a LoRA may adapt.
    pub fn linears(&self) -> Vec<LinearSize> {
        let (d, f) = (self.model_dim, self.hidden_dim);
        let [q, kv] = [self.n_heads, self.n_kv_heads].map(|n| n.saturating_mul(self.head_dim));
        let of_block = [
            ("self_attn.q_proj", d, q),
            ("self_attn.k_proj", d, kv),
            ("self_attn.v_proj", d, kv),
            ("self_attn.o_proj", q, d),
            ("mlp.gate_proj", d, f),
            ("mlp.up_proj", d, f),
            ("mlp.down_proj", f, d),
        ];
        let block = |i: usize| {
            of_block.map(|(name, in_features, out_features)| {
                let name = format!("model.layers.{i}.{name}");
                LinearSize { name, in_features, out_features }
            })
        };
        (0..self.n_layers).flat_map(block).collect()
    }

    /// Number of trainable elements, without building the model.
    pub fn n_params(&self) -> u64 {
        let bias = |l: &LinearSize| {
            let has = if l.name.contains(".mlp.") { self.mlp_bias } else { self.attention_bias };
            if has { l.out_features as u64 } else { 0 }
        };
        // One block stands for all: their number is a user's.
        let block = Self { n_layers: 1, ..self.clone() }.linears();
        let block = block.iter().flat_map(|l| [l.n_elems(), bias(l)]).fold(0, u64::saturating_add);
        let blocks = block.saturating_mul(self.n_layers as u64);
        let tables = elems(&[if self.tied { 1 } else { 2 }, self.vocab, self.model_dim]);
        let norms =
            elems(&[2, self.n_layers, self.model_dim]).saturating_add(self.model_dim as u64);
        [blocks, tables, norms].into_iter().fold(0, u64::saturating_add)
    }

    /// Builds the model.
    /// # Errors
    /// As [`LlamaConfig::check`], or if the builder has no such parameters.
    pub fn build(&self, vb: VarBuilder) -> Result<Llama> {
        self.build_from(&Source::whole(vb))
    }

    /// Builds the model of constants from `base`, with trainable adapters from `adapters`.
    /// # Errors
    /// As [`LlamaConfig::build`] and [`Lora::check`].
    pub fn build_lora<'a>(
        &self,
        base: VarBuilder<'a>,
        lora: &'a Lora,
        adapters: VarBuilder<'a>,
    ) -> Result<Llama> {
        self.build_from(&Source::adapted(base, lora, adapters, &self.linears())?)
    }

    fn build_from(&self, source: &Source) -> Result<Llama> {
        self.check()?;
        let init = Init::Randn { mean: 0.0, stdev: INIT_STDEV };
        let (model, table) = (source.pp("model"), (self.vocab, self.model_dim));
        let token = model.base.pp("embed_tokens").get_with_hints(table, "weight", init)?;
        let head = match self.tied {
            true => token.clone(),
            false => source.base.pp("lm_head").get_with_hints(table, "weight", init)?,
        };
        let freqs = self.rope_scaling.frequencies(self.head_dim, self.rope_theta)?;
        let rotary = Rotary::new(freqs, Rope::Half);
        let block = |i: usize| Block::new(self, &rotary, &model.pp(format!("layers.{i}")));
        Ok(Llama {
            token: Embedding::new(token, None),
            blocks: (0..self.n_layers).map(block).collect::<Result<_>>()?,
            norm: rms_norm(self.model_dim, self.norm_eps, model.base.pp("norm"))?,
            head,
            context: self.context,
        })
    }
}

/// A Llama.
///
/// As [`Segments`]: the embedding, attention and feed-forward of each block, then norm, head and
/// loss, whose logits exist in chunks of 8 MiB.
#[derive(Clone, Debug)]
pub struct Llama {
    token: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    /// `[V, D]`.
    head: Tensor,
    context: usize,
}

impl Llama {
    fn embed(&self, ids_bt: &Tensor) -> Result<Tensor> {
        text::within(ids_bt.dims2()?.1, self.context)?;
        self.token.forward(ids_bt)
    }
}

impl ModuleT for Llama {
    /// `ids_bt` (u32) `[B, T]` → logits `[B, T, V]`, held whole.
    fn forward_t(&self, ids_bt: &Tensor, train: bool) -> Result<Tensor> {
        let mut x_btd = self.embed(ids_bt)?;
        for block in &self.blocks {
            x_btd = block.feed_forward(&block.attend(&x_btd, train, 0, None)?, train)?;
        }
        let x_btd = self.norm.forward(&x_btd)?;
        Ok(ops::linear(&x_btd, &self.head.to_dtype(x_btd.dtype())?, None)?)
    }
}

impl Segments for Llama {
    fn names(&self) -> Vec<String> {
        let block = |i| [format!("layers.{i}.self_attn"), format!("layers.{i}.mlp")];
        let blocks = (0..self.blocks.len()).flat_map(block);
        ["embed".to_string()].into_iter().chain(blocks).collect()
    }

    fn head_name(&self) -> String {
        "head".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, train: bool) -> Result<Tensor> {
        match index.checked_sub(1) {
            None => self.embed(x),
            Some(i) if i % 2 == 0 => self.blocks[i / 2].attend(x, train, 0, None),
            Some(i) => self.blocks[i / 2].feed_forward(x, train),
        }
    }

    fn loss(&self, x_btd: &Tensor, targets_bt: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        text::loss(&self.norm.forward(x_btd)?.flatten_to(1)?, &self.head, targets_bt, cfg)
    }

    fn score(&self, x_btd: &Tensor, targets_bt: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        text::score(&self.norm.forward(x_btd)?.flatten_to(1)?, &self.head, targets_bt, cfg)
    }
}

impl Decoder for Llama {
    fn context(&self) -> usize {
        self.context
    }

    fn device(&self) -> &Device {
        self.token.weight().device()
    }

    fn cache(&self, capacity: usize) -> Cache {
        Cache::new(self.blocks.len(), capacity)
    }

    fn next_logits(&self, ids_bt: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        let (n_new, first) = cache.admit(ids_bt, self.context)?;
        let mut x_btd = self.token.forward(ids_bt)?.detach();
        for (block, kept) in self.blocks.iter().zip(&mut cache.blocks) {
            x_btd = block.attend(&x_btd, false, first, Some(kept))?;
            x_btd = block.feed_forward(&x_btd, false)?.detach();
        }
        let last_bd = x_btd.narrow(1, n_new - 1, 1)?.squeeze(1)?;
        let last_bd = self.norm.forward(&last_bd)?.detach();
        Ok(ops::linear(&last_bd, &self.head.detach().to_dtype(last_bd.dtype())?, None)?)
    }
}

/// Attention and feed-forward, each behind a norm and added to the residual stream.
#[derive(Clone, Debug)]
struct Block {
    input_norm: RmsNorm,
    q_proj: Projection,
    k_proj: Projection,
    v_proj: Projection,
    o_proj: Projection,
    post_norm: RmsNorm,
    gate_proj: Projection,
    up_proj: Projection,
    down_proj: Projection,
    rotary: Rotary,
    head_dim: usize,
}

impl Block {
    fn new(config: &LlamaConfig, rotary: &Rotary, source: &Source) -> Result<Self> {
        let (d, f) = (config.model_dim, config.hidden_dim);
        let q = config.n_heads * config.head_dim;
        let kv = config.n_kv_heads * config.head_dim;
        let linear = |name: &str, sizes, bias| {
            source.pp(name).linear(sizes, bias, LlamaConfig::LAYOUT, INIT_STDEV)
        };
        let attn =
            |name: &str, sizes| linear(&format!("self_attn.{name}"), sizes, config.attention_bias);
        let mlp = |name: &str, sizes| linear(&format!("mlp.{name}"), sizes, config.mlp_bias);
        let norm = |name: &str| rms_norm(d, config.norm_eps, source.base.pp(name));
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            q_proj: attn("q_proj", (d, q))?,
            k_proj: attn("k_proj", (d, kv))?,
            v_proj: attn("v_proj", (d, kv))?,
            o_proj: attn("o_proj", (q, d))?,
            post_norm: norm("post_attention_layernorm")?,
            gate_proj: mlp("gate_proj", (d, f))?,
            up_proj: mlp("up_proj", (d, f))?,
            down_proj: mlp("down_proj", (f, d))?,
            rotary: rotary.clone(),
            head_dim: config.head_dim,
        })
    }

    /// `first` is where the first token of `x_btd` stands.
    fn attend(
        &self,
        x_btd: &Tensor,
        train: bool,
        first: usize,
        cache: Option<&mut KvCache>,
    ) -> Result<Tensor> {
        let (b, t, _) = x_btd.dims3()?;
        let normed = self.input_norm.forward(x_btd)?;
        let heads = |proj: &Projection| {
            proj.forward_t(&normed, train)?.reshape((b, t, (), self.head_dim))?.transpose(1, 2)
        };
        let q = self.rotary.forward(&heads(&self.q_proj)?, first)?;
        let k = self.rotary.forward(&heads(&self.k_proj)?, first)?;
        let out = text::attend(&q, &k, &heads(&self.v_proj)?, cache)?;
        Ok(ops::add(x_btd, &self.o_proj.forward_t(&out, train)?)?)
    }

    fn feed_forward(&self, x_btd: &Tensor, train: bool) -> Result<Tensor> {
        let normed = self.post_norm.forward(x_btd)?;
        let gate = self.gate_proj.forward_t(&normed, train)?;
        let hidden = ops::swiglu(&gate, &self.up_proj.forward_t(&normed, train)?)?;
        Ok(ops::add(x_btd, &self.down_proj.forward_t(&hidden, train)?)?)
    }
}

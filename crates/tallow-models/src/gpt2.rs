//! GPT-2 (Radford et al. 2019), under the parameter names and layouts of Hugging Face.

// B batch · T tokens · D model · H heads · V vocabulary

use crate::segments::{Score, Segments};
use candle_core::{D, DType, Error, Module, ModuleT, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use tallow_tensor::{
    layers::{Dropout, Embedding, LayerNorm, layer_norm},
    ops::{self, CrossEntropy, Loss, Mask},
};

/// Logits that exist at once while a loss is computed.
const LOGITS_BYTES: u64 = 8 << 20;
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
        let d = self.model_dim as u64;
        let block = 12 * d * d + 13 * d;
        (self.vocab + self.context) as u64 * d + self.n_layers as u64 * block + 2 * d
    }

    /// Builds the model.
    /// # Errors
    /// If the heads do not divide the width, the dropout is out of its range, or the builder has no
    /// such parameters.
    pub fn build(&self, vb: VarBuilder) -> Result<Gpt2> {
        let d = self.model_dim;
        if self.n_heads == 0 || !d.is_multiple_of(self.n_heads) {
            let heads = self.n_heads;
            return Err(Error::Msg(format!("n_heads {heads} does not divide model_dim {d}")));
        }
        let normal = Init::Randn { mean: 0.0, stdev: INIT_STDEV };
        let wte = vb.pp("wte").get_with_hints((self.vocab, d), "weight", normal)?;
        let wpe = vb.pp("wpe").get_with_hints((self.context, d), "weight", normal)?;
        let dropout = Dropout::new(self.dropout, self.dropout_seed)?;
        let block = |i: usize| Block::new(self, dropout, vb.pp(format!("h.{i}")));
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
    fn embed(&self, ids_bt: &Tensor, train: bool) -> Result<Tensor> {
        let (_, n_tokens) = ids_bt.dims2()?;
        let context = self.position.dim(0)?;
        if n_tokens > context {
            let found = format!("{n_tokens} tokens, the model has positions for {context}");
            return Err(Error::Msg(found));
        }
        let token_btd = self.token.forward(ids_bt)?;
        let position_td = self.position.narrow(0, 0, n_tokens)?;
        self.dropout.forward_t(&token_btd.broadcast_add(&position_td)?, train)
    }

    /// The norm before the head, and the rows of tokens flattened: `[B, T, D]` → `[B T, D]`.
    fn rows(&self, x_btd: &Tensor) -> Result<Tensor> {
        self.norm.forward(x_btd)?.flatten_to(1)
    }

    /// The head's weight in the dtype of `x`.
    fn head(&self, x: &Tensor) -> Result<Tensor> {
        self.token.weight().to_dtype(x.dtype())
    }
}

impl ModuleT for Gpt2 {
    /// `ids_bt` `[B, T]` → logits `[B, T, V]`, held whole.
    fn forward_t(&self, ids_bt: &Tensor, train: bool) -> Result<Tensor> {
        let mut x_btd = self.embed(ids_bt, train)?;
        for block in &self.blocks {
            x_btd = block.feed_forward(&block.attend(&x_btd, train)?, train)?;
        }
        let x_btd = self.norm.forward(&x_btd)?;
        Ok(ops::linear(&x_btd, &self.head(&x_btd)?, None)?)
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
            None => self.embed(x, train),
            Some(i) if i % 2 == 0 => self.blocks[i / 2].attend(x, train),
            Some(i) => self.blocks[i / 2].feed_forward(x, train),
        }
    }

    fn loss(&self, x_btd: &Tensor, targets_bt: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        let (rows, targets) = (self.rows(x_btd)?, targets_bt.flatten_all()?);
        let head = self.head(&rows)?;
        Ok(ops::linear_cross_entropy(&rows, &head, None, &targets, cfg, LOGITS_BYTES)?)
    }

    fn score(&self, x_btd: &Tensor, targets_bt: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        let (rows, targets) = (self.rows(x_btd)?.detach(), targets_bt.flatten_all()?);
        let head = self.head(&rows)?.detach();
        let logit_bytes = DType::F32.size_in_bytes() * head.dim(0)?;
        let chunk = (LOGITS_BYTES as usize / logit_bytes).max(1);
        let mut score = Score { loss_sum: 0.0, n_counted: 0, n_right: 0 };
        for start in (0..rows.dim(0)?).step_by(chunk) {
            let n = chunk.min(rows.dim(0)? - start);
            let logits = ops::linear(&rows.narrow(0, start, n)?, &head, None)?;
            let part = Score::of_logits(&logits, &targets.narrow(0, start, n)?, cfg)?;
            score.loss_sum += part.loss_sum;
            score.n_counted += part.n_counted;
            score.n_right += part.n_right;
        }
        Ok(score)
    }
}

/// Attention and feed-forward, each behind a norm and added to the residual stream.
#[derive(Clone, Debug)]
struct Block {
    ln_1: LayerNorm,
    c_attn: Conv1D,
    attn_proj: Conv1D,
    ln_2: LayerNorm,
    c_fc: Conv1D,
    mlp_proj: Conv1D,
    dropout: Dropout,
    n_heads: usize,
}

impl Block {
    fn new(config: &Gpt2Config, dropout: Dropout, vb: VarBuilder) -> Result<Self> {
        let d = config.model_dim;
        // What is added 2 n times to the stream starts smaller by the square root of it.
        let added = INIT_STDEV / (2.0 * config.n_layers as f64).sqrt();
        let (attn, mlp) = (vb.pp("attn"), vb.pp("mlp"));
        Ok(Self {
            ln_1: layer_norm(d, NORM_EPS, vb.pp("ln_1"))?,
            c_attn: Conv1D::new(d, 3 * d, INIT_STDEV, attn.pp("c_attn"))?,
            attn_proj: Conv1D::new(d, d, added, attn.pp("c_proj"))?,
            ln_2: layer_norm(d, NORM_EPS, vb.pp("ln_2"))?,
            c_fc: Conv1D::new(d, 4 * d, INIT_STDEV, mlp.pp("c_fc"))?,
            mlp_proj: Conv1D::new(4 * d, d, added, mlp.pp("c_proj"))?,
            dropout,
            n_heads: config.n_heads,
        })
    }

    fn attend(&self, x_btd: &Tensor, train: bool) -> Result<Tensor> {
        let (b, t, d) = x_btd.dims3()?;
        let head_dim = d / self.n_heads;
        let qkv = self.c_attn.forward(&self.ln_1.forward(x_btd)?)?;
        let part = |i: usize| {
            qkv.narrow(D::Minus1, i * d, d)?
                .reshape((b, t, self.n_heads, head_dim))?
                .transpose(1, 2)
        };
        let (q_bhtd, k_bhtd, v_bhtd) = (part(0)?, part(1)?, part(2)?);
        let scale = 1.0 / (head_dim as f64).sqrt();
        let out_bhtd = ops::attention(&q_bhtd, &k_bhtd, &v_bhtd, Mask::Causal, scale)?;
        let out_btd = out_bhtd.transpose(1, 2)?.reshape((b, t, d))?;
        x_btd + self.dropout.forward_t(&self.attn_proj.forward(&out_btd)?, train)?
    }

    fn feed_forward(&self, x_btd: &Tensor, train: bool) -> Result<Tensor> {
        let hidden = ops::gelu_tanh(&self.c_fc.forward(&self.ln_2.forward(x_btd)?)?)?;
        x_btd + self.dropout.forward_t(&self.mlp_proj.forward(&hidden)?, train)?
    }
}

/// A linear layer whose weight is `[in, out]`, as GPT-2's files have it.
#[derive(Clone, Debug)]
struct Conv1D {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1D {
    fn new(in_features: usize, out_features: usize, stdev: f64, vb: VarBuilder) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev };
        Ok(Self {
            weight: vb.get_with_hints((in_features, out_features), "weight", init)?,
            bias: vb.get_with_hints(out_features, "bias", Init::Const(0.0))?,
        })
    }
}

impl Module for Conv1D {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let weight = self.weight.to_dtype(x.dtype())?.t()?;
        Ok(ops::linear(x, &weight, Some(&self.bias.to_dtype(x.dtype())?))?)
    }
}

//! A GPT in one file: `cargo run --release -p nano -- TEXT [UPDATES]` learns a text byte by byte.
//!
//! bf16 with f32 masters, four micro-batches an update, every block run again in backward, 8-bit AdamW:
//! each is one line in `main`.

// B batch · T tokens · D width · V vocabulary

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Init, VarBuilder};
use std::sync::Arc;
use tallow::{
    data::{Loader, Loading, Source, TokenBatches},
    models::{Sampling, Score, Segments},
    optim::{Algorithm, Config, StateFormat},
    precision::Policy,
    recompute,
    run::{Epochs, Event, Progress, fit},
    tensor::{
        layers::{
            Embedding, HeadSizes, LayerNorm, Linear, MultiHeadAttention, embedding, layer_norm,
            linear,
        },
        ops::{self, CrossEntropy, Loss, Mask},
    },
    train::{Built, Flow, Trainer},
};

const VOCAB: usize = 256;
const CONTEXT: usize = 64;
const WIDTH: usize = 64;
const N_HEADS: usize = 4;
const N_BLOCKS: usize = 3;
const BATCH: usize = 16;
/// Logits that exist at once while the loss is computed.
const LOGITS_BYTES: u64 = 1 << 20;

struct Block {
    attention_norm: LayerNorm,
    attention: MultiHeadAttention,
    mlp_norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let heads = HeadSizes { n_heads: N_HEADS, n_kv_heads: N_HEADS, head_dim: WIDTH / N_HEADS };
        Ok(Self {
            attention_norm: layer_norm(WIDTH, 1e-5, vb.pp("norm_1"))?,
            attention: MultiHeadAttention::new(WIDTH, heads, Mask::Causal, vb.pp("attention"))?,
            mlp_norm: layer_norm(WIDTH, 1e-5, vb.pp("norm_2"))?,
            up: linear(WIDTH, 4 * WIDTH, vb.pp("up"))?,
            down: linear(4 * WIDTH, WIDTH, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x_btd: &Tensor) -> candle_core::Result<Tensor> {
        let x_btd =
            ops::add(x_btd, &self.attention.forward(&self.attention_norm.forward(x_btd)?)?)?;
        let hidden = ops::gelu_tanh(&self.up.forward(&self.mlp_norm.forward(&x_btd)?)?)?;
        Ok(ops::add(&x_btd, &self.down.forward(&hidden)?)?)
    }
}

struct Gpt {
    token: Embedding,
    /// `[T, D]`.
    position: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let small = Init::Randn { mean: 0.0, stdev: 0.02 };
        Ok(Self {
            token: embedding(VOCAB, WIDTH, vb.pp("token"))?,
            position: vb.get_with_hints((CONTEXT, WIDTH), "position", small)?,
            blocks: (0..N_BLOCKS)
                .map(|i| Block::new(vb.pp(format!("block.{i}"))))
                .collect::<candle_core::Result<_>>()?,
            norm: layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            head: linear(WIDTH, VOCAB, vb.pp("head"))?,
        })
    }

    /// Normed rows `[B T, D]`.
    fn rows(&self, x_btd: &Tensor) -> candle_core::Result<Tensor> {
        self.norm.forward(x_btd)?.flatten_to(1)
    }

    /// The logits `[V]` of what follows `tokens`.
    fn next(&self, tokens: &[u32]) -> candle_core::Result<Vec<f64>> {
        let start = tokens.len().saturating_sub(CONTEXT);
        let mut x = Tensor::new(&tokens[start..], &Device::Cpu)?.unsqueeze(0)?;
        for i in 0..self.names().len() {
            x = self.run(i, &x, false)?.detach();
        }
        let last = self.rows(&x)?.narrow(0, tokens.len() - start - 1, 1)?;
        self.head.forward(&last)?.squeeze(0)?.to_dtype(DType::F64)?.to_vec1()
    }
}

/// What can be run again in backward: the embedding, each block, and the head with the loss.
impl Segments for Gpt {
    fn names(&self) -> Vec<String> {
        let blocks = (0..N_BLOCKS).map(|i| format!("block.{i}"));
        ["embed".to_string()].into_iter().chain(blocks).collect()
    }

    fn head_name(&self) -> String {
        "head".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, _train: bool) -> candle_core::Result<Tensor> {
        match index.checked_sub(1) {
            None => {
                let x_btd = self.token.forward(x)?;
                let position = self.position.narrow(0, 0, x.dim(1)?)?.to_dtype(x_btd.dtype())?;
                Ok(ops::add(&x_btd, &position)?)
            }
            Some(i) => self.blocks[i].forward(x),
        }
    }

    /// The logits never exist whole.
    fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> candle_core::Result<Loss> {
        let (rows, targets) = (self.rows(x)?, targets.flatten_all()?);
        let weight = self.head.weight().to_dtype(rows.dtype())?;
        let bias = self.head.bias().map(|bias| bias.to_dtype(rows.dtype())).transpose()?;
        let bias = bias.as_ref();
        Ok(ops::linear_cross_entropy(&rows, &weight, bias, &targets, cfg, LOGITS_BYTES)?)
    }

    fn score(
        &self,
        x: &Tensor,
        targets: &Tensor,
        cfg: &CrossEntropy,
    ) -> candle_core::Result<Score> {
        Score::of_logits(&self.head.forward(&self.rows(x)?)?, targets, cfg)
    }
}

/// Stretches of a text, a token a byte.
#[derive(Clone)]
struct Text {
    bytes: Arc<Vec<u8>>,
    first: u64,
    n_samples: u64,
}

impl Source for Text {
    type Item = Vec<u32>;

    fn n_samples(&self) -> u64 {
        self.n_samples
    }

    /// One more than the context: the targets are the same, a token on.
    fn get(&self, index: u64) -> tallow::data::Result<Vec<u32>> {
        let start = (self.first + index) as usize * CONTEXT;
        Ok(self.bytes[start..start + CONTEXT + 1].iter().map(|&byte| u32::from(byte)).collect())
    }

    fn name(&self, index: u64) -> String {
        format!("stretch {index}")
    }
}

/// All but the last tenth, and that.
fn split(bytes: Vec<u8>) -> Result<(Text, Text)> {
    let n = (bytes.len().saturating_sub(1) / CONTEXT) as u64;
    ensure!(n >= 10 * BATCH as u64, "{} bytes of text are too few to learn from", bytes.len());
    let (bytes, n_held_out) = (Arc::new(bytes), n / 10);
    let train = Text { bytes, first: 0, n_samples: n - n_held_out };
    Ok((train.clone(), Text { first: n - n_held_out, n_samples: n_held_out, ..train }))
}

fn batches(text: Text) -> Loader<TokenBatches> {
    let collate = TokenBatches { seq_tokens: CONTEXT, device: Device::Cpu };
    Loader::new(text, |tokens, _| Ok(tokens), collate, Loading::PLAIN)
}

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let path = words.next().context("usage: nano TEXT [UPDATES]")?;
    let n_updates: u64 = words.next().map_or(Ok(300), |n| n.parse()).context("UPDATES")?;
    let text = std::fs::read(&path).with_context(|| path.clone())?;
    let (train, held_out) = split(text)?;
    let (train, held_out) = (batches(train), batches(held_out));

    let built = Built::new(Policy::bf16(), 0, &Device::Cpu, Gpt::new)?;
    let params = built.masters.params();
    println!("{} parameters", params.iter().map(|(_, var)| var.elem_count()).sum::<usize>());
    let adamw = Config::new(Algorithm::ADAMW, 2e-3);
    let mut trainer = Trainer::builder(built)
        .batch(BATCH)
        .accumulate(4)
        .optimizer(Config { format: StateFormat::BITS8, ..adamw })
        .warmup_cosine(n_updates / 20, n_updates)
        .clip_norm(1.0)
        .recompute(recompute::Policy::Named(vec!["block.*".to_string()]))
        .build()?;
    let epochs = Epochs {
        train: &train,
        held_out: &held_out,
        batch: BATCH,
        epochs: u64::MAX,
        max_updates: Some(n_updates),
        early_stop_epochs: None,
        seed: 0,
    };
    fit(&mut trainer, &epochs, Progress::START, |_, _, event| {
        match event {
            Event::Updated { n_windows, update } if n_windows % 20 == 1 => {
                println!("update {n_windows}: loss {:.3}", update.loss);
            }
            Event::Evaluated { evaluation, .. } => println!("held out: {:.3}", evaluation.loss),
            _ => {}
        }
        Ok(Flow::Go)
    })?;

    let sampling = Sampling::Random { temperature: 0.8, top_k: None, top_p: None, seed: 0 };
    let mut tokens = vec![u32::from(b'\n')];
    for i in 0..200 {
        tokens.push(sampling.pick(&trainer.model().next(&tokens)?, i)?);
    }
    let bytes: Vec<u8> = tokens.into_iter().map(|token| token as u8).collect();
    println!("{}", String::from_utf8_lossy(&bytes));
    Ok(())
}

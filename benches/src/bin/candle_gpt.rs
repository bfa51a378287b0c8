//! Training steps of a GPT-2 in plain candle, as `cargo xtask bench gpt` compares with.
//!
//! The one argument is a JSON object as `xtask/python/torch_step.py` takes it; weights and batch are read
//! from its folder `start`. Layers are those of candle whose backward exists: the fused norms and softmax
//! have none. Prints one JSON object. One step is made before the clock starts.

use candle_core::{D, DType, Device, Result, Tensor, safetensors};
use candle_nn::{
    AdamW, Embedding, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, init::ZERO, ops,
};
use serde_json::{Value, json};
use std::{path::Path, time::Instant};
use tallow_memory::{CountingAllocator, resident_peak_bytes};

/// As the binary `tallow` has it.
#[global_allocator]
static ALLOCATOR: CountingAllocator<mimalloc::MiMalloc> =
    CountingAllocator::new(mimalloc::MiMalloc);

const EPS: f32 = 1e-5;

/// Sizes of the network.
#[derive(Clone, Copy)]
struct Sizes {
    vocab: usize,
    dim: usize,
    layers: usize,
    heads: usize,
    context: usize,
}

/// Layer norm from operations that have a backward.
struct Norm(Tensor, Tensor);

impl Norm {
    fn new(dim: usize, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints(dim, "weight", ZERO)?;
        Ok(Self(weight, vb.get_with_hints(dim, "bias", ZERO)?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::layer_norm_slow(x, &self.0, &self.1, EPS)
    }
}

fn linear(n_in: usize, n_out: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((n_out, n_in), "weight", ZERO)?;
    Ok(Linear::new(weight, Some(vb.get_with_hints(n_out, "bias", ZERO)?)))
}

/// Attention, then a feed-forward network.
struct Block {
    heads: usize,
    norms: [Norm; 2],
    /// Queries, keys and values; their way out; up; down.
    linears: [Linear; 4],
}

impl Block {
    fn new(dim: usize, heads: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            heads,
            norms: [Norm::new(dim, vb.pp("ln_1"))?, Norm::new(dim, vb.pp("ln_2"))?],
            linears: [
                linear(dim, 3 * dim, vb.pp("attn.c_attn"))?,
                linear(dim, dim, vb.pp("attn.c_proj"))?,
                linear(dim, 4 * dim, vb.pp("mlp.c_fc"))?,
                linear(4 * dim, dim, vb.pp("mlp.c_proj"))?,
            ],
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (b, t, d) = x.dims3()?;
        let [qkv, out, up, down] = &self.linears;
        let qkv = qkv.forward(&self.norms[0].forward(x)?)?;
        let qkv = qkv.reshape((b, t, 3, self.heads, d / self.heads))?.permute((2, 0, 3, 1, 4))?;
        let part = |i: usize| qkv.get(i)?.contiguous();
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let scale = 1.0 / ((d / self.heads) as f64).sqrt();
        let scores = (q.matmul(&k.t()?)? * scale)?.broadcast_add(mask)?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        let mixed = mixed.transpose(1, 2)?.contiguous()?.reshape((b, t, d))?;
        let x = (x + out.forward(&mixed)?)?;
        &x + down.forward(&up.forward(&self.norms[1].forward(&x)?)?.gelu()?)?
    }
}

/// A GPT-2 without dropout whose head is its token embedding.
struct Gpt {
    token: Tensor,
    position: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
}

impl Gpt {
    fn new(sizes: Sizes, vb: VarBuilder) -> Result<Self> {
        let Sizes { vocab, dim, layers, heads, context } = sizes;
        let block = |i: usize| Block::new(dim, heads, vb.pp(format!("h.{i}")));
        Ok(Self {
            token: vb.get_with_hints((vocab, dim), "wte.weight", ZERO)?,
            position: vb.get_with_hints((context, dim), "wpe.weight", ZERO)?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            norm: Norm::new(dim, vb.pp("ln_f"))?,
        })
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (_, t) = tokens.dims2()?;
        let dim = self.token.dim(1)?;
        let embedded = Embedding::new(self.token.clone(), dim).forward(tokens)?;
        let mut x = embedded.broadcast_add(&self.position.narrow(0, 0, t)?)?;
        for block in &self.blocks {
            x = block.forward(&x, mask)?;
        }
        let logits = self.norm.forward(&x)?.flatten_to(1)?.matmul(&self.token.t()?)?;
        candle_nn::loss::cross_entropy(&logits, &targets.flatten_all()?)
    }
}

/// Gives every parameter its value in `path`, whose linear weights lie `[in, out]`.
fn load(vars: &mut VarMap, path: &Path) -> Result<()> {
    let values = safetensors::load(path, &Device::Cpu)?;
    let turned = values.into_iter().map(|(name, value)| {
        let is_linear = name.contains(".c_") && name.ends_with(".weight");
        let value = if is_linear { value.t()?.contiguous()? } else { value };
        Ok((name, value))
    });
    vars.set(turned.collect::<Result<Vec<_>>>()?.into_iter())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let work: Value =
        serde_json::from_str(&std::env::args().nth(1).ok_or("no workload was given")?)?;
    let size = |key: &str| work[key].as_u64().map(|n| n as usize).ok_or(format!("no `{key}`"));
    let sizes = Sizes {
        vocab: size("vocab")?,
        dim: size("dim")?,
        layers: size("layers")?,
        heads: size("heads")?,
        context: size("context")?,
    };
    let steps = size("steps")?;
    let folder = Path::new(work["start"].as_str().ok_or("no `start`")?);
    let mut vars = VarMap::new();
    let model = Gpt::new(sizes, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    load(&mut vars, &folder.join("weights.safetensors"))?;
    let samples = safetensors::load(folder.join("batch.safetensors"), &Device::Cpu)?;
    let (x, y) = (&samples["inputs"], &samples["targets"]);
    let (batch, tokens) = x.dims2()?;
    let hidden = |i| if i % tokens > i / tokens { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..tokens * tokens).map(hidden).collect();
    let mask = Tensor::from_vec(mask, (tokens, tokens), &Device::Cpu)?;
    let mut optimizer =
        AdamW::new(vars.all_vars(), ParamsAdamW { lr: 1e-4, ..Default::default() })?;
    let (mut secs, mut losses) = (Vec::new(), Vec::new());
    for _ in 0..=steps {
        let start = Instant::now();
        let loss = model.loss(x, y, &mask)?;
        optimizer.backward_step(&loss)?;
        losses.push(loss.to_scalar::<f32>()?);
        secs.push(start.elapsed().as_secs_f64());
    }
    let params: usize = vars.all_vars().iter().map(|var| var.elem_count()).sum();
    let report = json!({
        "name": "plain candle", "model": "gpt", "params": params, "batch": batch, "micro_batch": batch, "size": [tokens],
        "updates": steps, "precision": "f32",
        "secs_per_step": secs[1..].iter().sum::<f64>() / steps.max(1) as f64,
        "peak_bytes": ALLOCATOR.peak_bytes(), "rss_peak_bytes": resident_peak_bytes().ok(),
        "first_loss": losses[0], "train_loss": losses[steps], "losses": losses,
    });
    println!("{report}");
    Ok(())
}

//! `bench gpt`: a GPT-2 of 30M parameters on made-up tokens.

use super::{
    Common,
    start::Bounds,
    versus::{self, Mode, Plan, Work},
};
use anyhow::Result;
use serde_json::json;
use std::path::PathBuf;

/// Options of `bench gpt`.
#[derive(clap::Args)]
pub(crate) struct Gpt {
    #[command(flatten)]
    common: Common,
    /// A Python whose torch is measured beside.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Steps of each run.
    #[arg(long, default_value_t = 3)]
    steps: u64,
    /// Runs of each mode, in turns; times are medians over them.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The budget of the row that has one.
    #[arg(long, value_name = "BYTES")]
    budget: Option<String>,
    /// Only the mode of this name, or those whose name contains it; may be given several times.
    #[arg(long)]
    only: Vec<String>,
}

/// Sizes of the network and of its batch.
pub(super) struct Sizes {
    vocab: u64,
    dim: u64,
    layers: u64,
    heads: u64,
    context: u64,
    batch: u64,
    tokens: u64,
}

impl Sizes {
    /// The workload, or one that takes no time.
    pub(super) const fn of(quick: bool) -> Self {
        if quick {
            return Self {
                vocab: 2000,
                dim: 64,
                layers: 2,
                heads: 2,
                context: 64,
                batch: 4,
                tokens: 64,
            };
        }
        Self { vocab: 50257, dim: 384, layers: 6, heads: 6, context: 1024, batch: 8, tokens: 512 }
    }

    /// As tallow's settings, `steps` updates long.
    pub(super) fn settings(&self, steps: u64) -> Vec<String> {
        let Self { vocab, dim, layers, heads, context, batch, tokens } = self;
        let mut settings = vec![
            "model.name=gpt2".to_string(),
            format!("model.vocab={vocab}"),
            format!("model.model_dim={dim}"),
            format!("model.n_layers={layers}"),
            format!("model.n_heads={heads}"),
            format!("model.context={context}"),
            "model.dropout=0.0".to_string(),
            format!("data.seq_tokens={tokens}"),
        ];
        settings.extend(versus::synthetic(*batch, steps));
        settings
    }

    fn work(&self, steps: u64) -> Work {
        let Self { vocab, dim, layers, heads, context, batch, tokens } = self;
        let torch = json!({
            "model": "gpt", "vocab": vocab, "dim": dim, "layers": layers, "heads": heads,
            "context": context, "batch": batch, "size": tokens, "steps": steps,
        });
        Work {
            bench: "gpt",
            settings: self.settings(steps),
            torch,
            candle: Some("candle_gpt"),
            // Before it has learnt anything the loss is near the logarithm of the vocabulary: other
            // weights are off by 6e-4.
            bounds: Bounds { f32: 1e-5, bf16: 1e-4 },
        }
    }
}

/// Measures and prints; false if a row failed to run.
pub(super) fn run(options: &Gpt) -> Result<bool> {
    let quick = options.common.quick;
    let budget = options.budget.as_deref().unwrap_or(if quick { "20MiB" } else { "0.8GiB" });
    let plan = Plan {
        common: &options.common,
        python: options.python.as_deref(),
        rounds: if quick { 1 } else { options.rounds },
        only: &options.only,
    };
    let steps = if quick { 2 } else { options.steps };
    versus::run(&Sizes::of(quick).work(steps), &plan, Mode::all(budget))
}

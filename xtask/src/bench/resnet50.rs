//! `bench resnet50`: ResNet-50 on made-up images.

use super::{
    Common,
    start::Bounds,
    versus::{self, Mode, Plan, Work},
};
use anyhow::Result;
use serde_json::json;
use std::path::PathBuf;

/// Options of `bench resnet50`.
#[derive(clap::Args)]
pub(crate) struct ResNet50 {
    #[command(flatten)]
    common: Common,
    /// A Python whose torch is measured beside.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Side of an image, in pixels.
    #[arg(long, default_value_t = 224)]
    size: u64,
    /// Images a step.
    #[arg(long, default_value_t = 8)]
    batch: u64,
    /// Steps of each run.
    #[arg(long, default_value_t = 3)]
    steps: u64,
    /// Runs of each mode, in turns; times are medians over them.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The budget of the row that has one.
    #[arg(long, value_name = "BYTES", default_value = "0.6GiB")]
    budget: String,
    /// Only the mode of this name, or those whose name contains it; may be given several times.
    #[arg(long)]
    only: Vec<String>,
}

/// Measures and prints; false if a row failed to run.
pub(super) fn run(options: &ResNet50) -> Result<bool> {
    let quick = options.common.quick;
    let (size, batch, steps) =
        if quick { (64, 4, 1) } else { (options.size, options.batch, options.steps) };
    let plan = Plan {
        common: &options.common,
        python: options.python.as_deref(),
        rounds: if quick { 1 } else { options.rounds },
        only: &options.only,
    };
    versus::run(&work(size, batch, steps), &plan, Mode::all(&options.budget))
}

fn work(size: u64, batch: u64, steps: u64) -> Work {
    let image_size = format!("data.image_size=[{size},{size}]");
    let mut settings = vec!["model.name=resnet50".to_string(), image_size];
    settings.extend(versus::synthetic(batch, steps));
    let torch = json!({"model": "resnet50", "batch": batch, "size": size, "steps": steps});
    // Candle has no pooling of 3x3 two apart, and its strided convolutions break in backward.
    // Batch norms of few pixels magnify rounding: of small images PyTorch's own bf16 is six roundings of
    // 2^-8 off.
    let bounds = Bounds { f32: 1e-4, bf16: 8.0 / 256.0 };
    Work { bench: "resnet50", settings, torch, candle: None, bounds }
}

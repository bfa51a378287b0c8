//! What every mode of `cargo xtask bench gpt` and `bench resnet50` begins with.
//!
//! Two arguments: a JSON object as `xtask/python/torch_step.py` takes it, and a folder, where
//! `weights.safetensors` goes, under the names of `tallow-models`, and `batch.safetensors`: `inputs` and
//! `targets`, the first batch of `tallow train` on its synthetic data with seed 0, in its order.

use candle_core::{DType, Device, safetensors};
use serde_json::Value;
use std::{collections::HashMap, path::PathBuf};
use tallow_bench::whole::{Failure, N_CLASSES, model, number};
use tallow_data::{Dataset, Kind, Order, Synthetic, Tail};
use tallow_models::weights;
use tallow_train::Params;

/// `train.seed` where it is not given.
const SEED: u64 = 0;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let work: Value = serde_json::from_str(&arguments.next().ok_or("no workload was given")?)?;
    let folder = PathBuf::from(arguments.next().ok_or("no folder was given")?);

    let params = Params::new(SEED);
    model(&work, params.builder(DType::F32, &Device::Cpu))?;
    weights::save(&params.all(), &folder.join("weights.safetensors"), "")?;

    let (n_samples, size) = (number(&work, "batch")?, number(&work, "size")?);
    let kind = match work["model"] == "gpt" {
        true => Kind::Tokens { n_tokens: size, vocab: number(&work, "vocab")? },
        false => Kind::Images { dims: [3, size, size], n_classes: N_CLASSES, dtype: DType::F32 },
    };
    let samples = Synthetic { kind, n_samples, seed: SEED, device: Device::Cpu };
    let order = Order::Shuffled { seed: SEED, epoch: 0 };
    let batch = samples.epoch(n_samples, order, Tail::Keep)?.next().ok_or("no sample")??;
    let batch = HashMap::from([("inputs", batch.inputs), ("targets", batch.targets)]);
    Ok(safetensors::save(&batch, folder.join("batch.safetensors"))?)
}

//! Training steps of a GPT-2 or a ResNet-50 on a CUDA device, or on the CPU of a build without.
//!
//! The one argument is a JSON object: `model` ("gpt" or "resnet50"), `precision` ("f32" or "bf16"),
//! `recompute` (a boolean), `batch`, `size` (tokens or the side of an image), `steps`, and for "gpt"
//! `vocab`, `dim`, `layers`, `heads` and `context`. Prints one JSON object; the peak is the driver's, or
//! the counting allocator's. One step is made before the clock starts.

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::time::Instant;
use tallow_bench::{
    inputs::{integers, numbers},
    whole::{Failure, model, number},
};
use tallow_data::Batch;
use tallow_memory::CountingAllocator;
use tallow_models::Segments;
use tallow_train::{
    BatchSplit, Gradients, Params, Recipe, Trainer, accum, optim,
    precision::{LossScale, Masters, Policy},
    recompute::{Check, Plan, Saved, Step},
};

/// As the binary `tallow` has it.
#[global_allocator]
static ALLOCATOR: CountingAllocator<mimalloc::MiMalloc> =
    CountingAllocator::new(mimalloc::MiMalloc);

fn main() -> Result<(), Failure> {
    let work = std::env::args().nth(1).ok_or("no workload was given")?;
    let work: Value = serde_json::from_str(&work)?;
    let device = device()?;
    let watched = Watched::start()?;
    let batch = batch(&work, &device)?;
    let mut trainer = trainer(&work, &device)?;
    let steps = number(&work, "steps")?.max(1);
    let (mut secs, mut losses) = (Vec::new(), Vec::new());
    for _ in 0..=steps {
        let start = Instant::now();
        // The loss is a number on the host: the device has done what it was given.
        losses.push(trainer.update(&batch)?.loss);
        device.synchronize()?;
        secs.push(start.elapsed().as_secs_f64());
    }
    let row = json!({
        "name": format!("tallow, {:?}", device.location()), "model": work["model"],
        "batch": work["batch"], "size": [work["size"]], "precision": work["precision"],
        "recompute": work["recompute"], "updates": steps, "losses": losses,
        "secs_per_step": secs[1..].iter().sum::<f64>() / steps as f64,
        "peak_bytes": watched.peak_bytes(),
    });
    println!("{row}");
    Ok(())
}

fn trainer(work: &Value, device: &Device) -> Result<Trainer<Box<dyn Segments>>, Failure> {
    let policy = match work["precision"].as_str() {
        Some("bf16") => Policy::bf16(),
        _ => Policy::f32(),
    };
    let params = Params::new(0);
    let masters = Masters::new(policy, params.clone())?;
    let vb = masters.builder(device);
    let model = model(work, vb)?;
    let n_segments = model.names().len() + 1;
    let plan = match work["recompute"].as_bool() {
        // All but the head, which is the last.
        Some(true) => {
            let again = |i| Step::Redo { first: i, end: i + 1, again: Plan(vec![Step::Keep(i)]) };
            let head = Step::Keep(n_segments - 1);
            Plan((0..n_segments - 1).map(again).chain([head]).collect())
        }
        _ => Plan::keep_all(n_segments),
    };
    let n = number(work, "batch")?;
    let recipe = Recipe {
        split: BatchSplit::derive(Some(n), Some(n), None, 1)?,
        optimizer: optim::Config::new(optim::Algorithm::ADAMW, 1e-4),
        schedule: optim::Schedule { peak: 1e-4, warmup_updates: 0, shape: optim::Shape::Constant },
        loss_scale: LossScale::off(),
        accum: accum::AccumConfig { dtype: accum::AccumDType::F32, warn_above: 8 },
        clip: accum::Clip::Off,
        skip_above_norm: f64::INFINITY,
        gradients: Gradients::Summed,
        recompute: plan,
        saved: Saved::AsIs,
        check: Check::Shape,
        label_smoothing: 0.0,
        ema_decay: None,
    };
    Ok(Trainer::new(model, masters, params.buffers(), recipe)?)
}

fn batch(work: &Value, device: &Device) -> Result<Batch, Failure> {
    let (n, size) = (number(work, "batch")?, number(work, "size")?);
    if work["model"] == "gpt" {
        let ids = integers(n * (size + 1), number(work, "vocab")? as u32, 1);
        let ids = Tensor::from_vec(ids, (n, size + 1), device)?;
        let inputs = ids.narrow(1, 0, size)?.contiguous()?;
        let targets = ids.narrow(1, 1, size)?.contiguous()?;
        return Ok(Batch { inputs, targets, first_index: 0 });
    }
    let pixels = numbers::<f32>(n * 3 * size * size, 1);
    let dtype = if work["precision"] == "bf16" { DType::BF16 } else { DType::F32 };
    let inputs = Tensor::from_vec(pixels, (n, 3, size, size), device)?.to_dtype(dtype)?;
    let targets = Tensor::from_vec(integers(n, 1000, 2), n, device)?;
    Ok(Batch { inputs, targets, first_index: 0 })
}

#[cfg(not(feature = "cuda"))]
fn device() -> Result<Device, Failure> {
    Ok(Device::Cpu)
}

#[cfg(feature = "cuda")]
fn device() -> Result<Device, Failure> {
    Ok(Device::new_cuda(0)?)
}

/// What the work takes: the counting allocator's count.
#[cfg(not(feature = "cuda"))]
struct Watched;

#[cfg(not(feature = "cuda"))]
impl Watched {
    fn start() -> Result<Self, Failure> {
        Ok(Self)
    }

    fn peak_bytes(self) -> u64 {
        ALLOCATOR.peak_bytes()
    }
}

/// What the driver says that this process takes, asked again and again.
#[cfg(feature = "cuda")]
struct Watched {
    meter: std::sync::Arc<tallow_memory::CudaMeter>,
    stop: std::sync::mpsc::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

#[cfg(feature = "cuda")]
impl Watched {
    fn start() -> Result<Self, Failure> {
        use tallow_memory::Meter;
        /// Between two questions.
        const PAUSE: std::time::Duration = std::time::Duration::from_millis(1);
        let meter = std::sync::Arc::new(tallow_memory::CudaMeter::new(0)?);
        let (stop, stopped) = std::sync::mpsc::channel();
        let asked = meter.clone();
        let thread = std::thread::spawn(move || {
            while let Err(std::sync::mpsc::RecvTimeoutError::Timeout) = stopped.recv_timeout(PAUSE)
            {
                asked.current_bytes();
            }
        });
        Ok(Self { meter, stop, thread })
    }

    fn peak_bytes(self) -> u64 {
        use tallow_memory::Meter;
        let _ = self.stop.send(());
        let _ = self.thread.join();
        self.meter.peak_bytes()
    }
}

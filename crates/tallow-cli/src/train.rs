//! `tallow train`.

use crate::{
    config::{Config, Source},
    report::{self, Report},
    view::{View, say},
};
use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use std::path::Path;
use tallow_data::{ImageSet, Pixels};
use tallow_memory::Meter;
use tallow_models::ResNetConfig;
use tallow_train::{
    Epochs, Outcome, Params, Recipe, Trainer,
    accum::{ADVISED_MICRO_BATCHES, AccumConfig, AccumDType},
    fit,
    optim::Schedule,
    precision::Masters,
};

/// Trains, prints what happens, and leaves `report.json` in `out`.
///
/// # Errors
/// If the data cannot be read, the folder cannot be written, or training fails.
pub(crate) fn run(config: &Config, out: &Path, meter: &dyn Meter) -> Result<()> {
    let (train, held_out) = open(config)?;
    let [height, width] = [train.height(), train.width()];
    let model_config = ResNetConfig {
        n_classes: train.n_classes().max(held_out.n_classes()),
        ..ResNetConfig::digits()
    };
    let device = Device::Cpu;
    let params = Params::new(config.seed);
    let masters = Masters::new(config.policy.clone(), params.clone())?;
    let model = model_config.build(masters.builder(&device))?;
    if let Some(pattern) = config.policy.unmatched(&masters.params()).first() {
        bail!("precision.keep_f32 `{pattern}` matches no parameter of the model");
    }
    let plan = Epochs {
        train,
        held_out,
        pixels: Pixels::digits(config.policy.compute, &device),
        batch: config.split.batch(),
        epochs: config.epochs,
        max_updates: config.max_updates,
        seed: config.seed,
    };
    plan.check()?;
    let n_updates = plan.n_updates();
    ensure!(
        config.warmup_updates < n_updates,
        "train.warmup_updates is {}, it must be less than the run's {n_updates} updates",
        config.warmup_updates
    );
    let mut trainer = Trainer::new(model, masters, params.buffers(), recipe(config, n_updates))?;
    report::prepare(out)?;
    say!(
        "resnet-digits, {} parameters, on {} images of {height} x {width} ({} held out), batch {} \
         in micro-batches of {}, {}, {}",
        params.n_trainable(),
        plan.train.n_images(),
        plan.held_out.n_images(),
        plan.batch,
        config.split.micro_batch(),
        config.precision_name,
        config.optimizer_name,
    );
    let mut view = View::new(n_updates, plan.epochs, meter);
    let outcome = fit(&mut trainer, &plan, |event| view.show(event))?;
    let (peak_bytes, rss_peak_bytes) =
        (meter.peak_bytes(), tallow_memory::resident_peak_bytes().ok());
    view.finish(&outcome, peak_bytes, rss_peak_bytes);
    let report = Report {
        peak_bytes,
        rss_peak_bytes,
        optimizer_state_bytes: trainer.optimizer().state_bytes(),
        ..summary(config, &outcome, params.n_trainable(), [height, width])
    };
    report::write(out, &report)?;
    say!("report in {}", out.join("report.json").display());
    Ok(())
}

fn recipe(config: &Config, n_updates: u64) -> Recipe {
    Recipe {
        split: config.split,
        optimizer: config.optimizer.clone(),
        schedule: Schedule {
            peak: config.optimizer.learning_rate,
            warmup_updates: config.warmup_updates,
            shape: config.decay.shape(n_updates),
        },
        loss_scale: config.loss_scale.clone(),
        accum: AccumConfig { dtype: AccumDType::F32, warn_above: ADVISED_MICRO_BATCHES },
        clip: config.clip,
        label_smoothing: config.label_smoothing,
    }
}

/// The images, cut into those to learn from and those to judge by.
fn open(config: &Config) -> Result<(ImageSet, ImageSet)> {
    let set = match &config.source {
        Source::Digits => ImageSet::digits()?,
        Source::Folder(folder) => ImageSet::open_dir(folder).context("data.source")?,
    };
    let n_images = set.n_images();
    let held_out = config.held_out.unwrap_or(n_images / 10).max(1);
    ensure!(
        held_out < n_images,
        "data.held_out {held_out} leaves nothing of the {n_images} images to learn from"
    );
    let (first, classes) = (set.label(0), set.n_classes());
    ensure!(
        (0..n_images).any(|i| set.label(i) != first),
        "data.source: all {n_images} images have label {first} of {classes}, there is nothing to learn"
    );
    Ok(set.split(n_images - held_out)?)
}

fn summary(config: &Config, outcome: &Outcome, params: u64, size: [usize; 2]) -> Report {
    let secs = outcome.training.as_secs_f64();
    Report {
        name: match &config.source {
            Source::Digits => "digits".to_string(),
            Source::Folder(folder) => folder.display().to_string(),
        },
        model: "resnet-digits".to_string(),
        params,
        batch: config.split.batch() as u64,
        micro_batch: config.split.micro_batch() as u64,
        size,
        precision: config.precision_name.clone(),
        recompute: "none".to_string(),
        optimizer: config.optimizer_name.clone(),
        seed: config.seed,
        updates: outcome.n_updates,
        peak_bytes: 0,
        predicted_peak_bytes: None,
        budget_bytes: None,
        rss_peak_bytes: None,
        secs_per_step: secs / outcome.n_updates as f64,
        samples_per_sec: outcome.n_samples as f64 / secs,
        loss: outcome.held_out.loss,
        train_loss: outcome.last_loss,
        accuracy: outcome.held_out.accuracy,
        skipped_steps: outcome.n_skipped,
        optimizer_state_bytes: 0,
    }
}

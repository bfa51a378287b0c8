//! `tallow data bench`: how fast samples come, from what, and in how many bytes.

use crate::{
    config::{self, Config, LeftOut, Spent},
    view::{answer, mib},
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{path::Path, time::Instant};
use tallow_data::{Order, Tail};
use tallow_memory::{Meter, peak_during};

/// What is measured, and how it is shown.
pub(crate) struct Asked<'a> {
    /// A configuration (TOML), or data.
    pub(crate) what: Option<&'a Path>,
    /// Overrides of the configuration.
    pub(crate) set: &'a [String],
    /// The most batches; an epoch if `None`.
    pub(crate) batches: Option<usize>,
    pub(crate) as_json: bool,
}

struct Measured {
    n_samples: u64,
    n_batches: u64,
    secs: f64,
    /// Seconds until the first batch was there.
    first_secs: f64,
    /// Over all threads.
    read_secs: f64,
    prepare_secs: f64,
    read_bytes: u64,
    batch_bytes: u64,
    peak_bytes: u64,
    threads: usize,
    left_out: LeftOut,
}

/// Reads an epoch as `tallow train` would, and says what it took.
/// # Errors
/// If the data cannot be read.
pub(crate) fn run(asked: &Asked, meter: &dyn Meter) -> Result<()> {
    ensure!(asked.batches != Some(0), "--batches is 0, 1 is the least");
    let config = configured(asked)?;
    let measured = measure(&config, asked.batches, meter)?;
    let rss_peak_bytes = tallow_memory::resident_peak_bytes().ok();
    match asked.as_json {
        true => answer!("{:#}", measured.as_value(&config, rss_peak_bytes)),
        false => measured.say(&config, rss_peak_bytes),
    }
}

/// A path that is no configuration is data; the model is then one that learns such data.
fn configured(asked: &Asked) -> Result<Config> {
    let Some(path) = asked.what.filter(|path| path.extension().is_none_or(|e| e != "toml")) else {
        return config::load(asked.what, asked.set, None);
    };
    let name = path.to_str();
    let name = name.with_context(|| format!("the path `{}` is not UTF-8", path.display()))?;
    let given = |key: &str| asked.set.iter().find_map(|text| text.strip_prefix(key));
    let has_tokenizer = given("data.tokenizer=").is_some();
    let format = match given("data.format=") {
        Some(word) => Some(config::Format::named(word)?),
        None if name.contains(['/', '.', '{']) || path.exists() => {
            Some(config::Format::of(name, has_tokenizer)?)
        }
        None => None, // a word, such as `digits`
    };
    let model = match format {
        None => "resnet-digits",
        Some(format) if format.is_tokens() || has_tokenizer => "gpt2",
        Some(_) => "resnet18",
    };
    let mut set = vec![format!("data.source=\"{name}\""), format!("model.name={model}")];
    set.extend_from_slice(asked.set);
    config::load(None, &set, None)
}

fn measure(config: &Config, most: Option<usize>, meter: &dyn Meter) -> Result<Measured> {
    let opened = config.source.open(config.seed)?;
    let set = opened.train.dataset(config.precisions[0].policy.compute);
    let order = Order::Shuffled { seed: config.seed, epoch: 0 };
    let (mut n_samples, mut n_batches, mut first_secs) = (0, 0, 0.0);
    let spent = || opened.train.spent().map_or((0.0, 0.0, 0), Spent::so_far);
    let before = spent(); // some headers were looked at
    let start = Instant::now();
    let (outcome, peak_bytes) = peak_during(meter, || {
        for batch in set.epoch(config.batch, order, Tail::Keep)?.take(most.unwrap_or(usize::MAX)) {
            n_samples += batch?.inputs.dims()[0] as u64;
            n_batches += 1;
            if n_batches == 1 {
                first_secs = start.elapsed().as_secs_f64();
            }
        }
        Ok::<(), tallow_data::Error>(())
    });
    outcome?;
    let secs = start.elapsed().as_secs_f64();
    let after = spent();
    Ok(Measured {
        n_samples,
        n_batches,
        secs,
        first_secs,
        read_secs: after.0 - before.0,
        prepare_secs: after.1 - before.1,
        read_bytes: after.2 - before.2,
        batch_bytes: set.batch_bytes(config.batch),
        peak_bytes,
        threads: opened.train.n_threads(),
        left_out: opened.train.left_out(true),
    })
}

impl Measured {
    fn as_value(&self, config: &Config, rss_peak_bytes: Option<u64>) -> Value {
        json!({
            "name": config.source.name(),
            "batch": config.batch,
            "samples": self.n_samples,
            "skipped": self.left_out.n,
            "batches": self.n_batches,
            "threads": self.threads,
            "secs": self.secs,
            "first_batch_secs": self.first_secs,
            "samples_per_sec": self.n_samples as f64 / self.secs,
            "bytes_per_sec": self.read_bytes as f64 / self.secs,
            "read_bytes": self.read_bytes,
            "read_secs": self.read_secs,
            "prepare_secs": self.prepare_secs,
            "batch_bytes": self.batch_bytes,
            "peak_bytes": self.peak_bytes,
            "rss_peak_bytes": rss_peak_bytes,
        })
    }

    fn say(&self, config: &Config, rss_peak_bytes: Option<u64>) -> Result<()> {
        let per_sec = self.n_samples as f64 / self.secs;
        let read_per_sec = (self.read_bytes as f64 / self.secs) as u64;
        let share = |secs: f64| 100.0 * secs / (self.secs * self.threads.max(1) as f64);
        answer!("{}, batches of {}", config.source.name(), config.batch)?;
        answer!(
            "  samples          {} in {:.2} s, {per_sec:.1} a second",
            self.n_samples,
            self.secs
        )?;
        if let Some(text) = self.left_out.text("samples") {
            answer!("  {text}")?;
        }
        answer!("  read             {}, {} a second", mib(self.read_bytes), mib(read_per_sec))?;
        answer!(
            "  peak in flight   {} (a batch is {})",
            mib(self.peak_bytes),
            mib(self.batch_bytes)
        )?;
        if let Some(bytes) = rss_peak_bytes {
            answer!("  peak resident    {}", mib(bytes))?;
        }
        answer!("  first batch      after {:.3} s", self.first_secs)?;
        let who = match self.threads {
            0 => "the caller's time".to_string(),
            n => format!("the time of {n} threads"),
        };
        answer!(
            "  reading          {:.2} s, {:.1} % of {who}",
            self.read_secs,
            share(self.read_secs)
        )?;
        answer!("  decoding         {:.2} s, {:.1} %", self.prepare_secs, share(self.prepare_secs))
    }
}

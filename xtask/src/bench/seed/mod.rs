//! `bench seed-table`: the reference table. ResNet-50 with each technique added to those before it, and
//! each alone, beside plain f32; the digits judged in the same modes.

mod table;

use super::{
    Binary, Common, Lines, owned,
    stats::mean,
    sweep::{SMALLEST, number_after},
    versus,
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Options of `bench seed-table`.
#[derive(clap::Args)]
pub(crate) struct SeedTable {
    #[command(flatten)]
    common: Common,
    /// Images of 224 x 224, 1080 x 1920 or 2160 x 3840 pixels.
    #[arg(long, value_enum, default_value_t = Size::Small)]
    size: Size,
    /// Images a step; 8 small ones, 1 of 1080p or 4 of 4k where it is not given.
    #[arg(long)]
    batch: Option<u64>,
    /// Steps of each run.
    #[arg(long, default_value_t = 3)]
    steps: u64,
    /// The budget of the last row; where it is not given, 0.21 of the baseline's peak, or
    /// the least that there is a plan for.
    #[arg(long, value_name = "BYTES")]
    budget: Option<String>,
    /// Runs of each mode whose accuracy is averaged; 0: accuracy is not measured.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Epochs of these runs.
    #[arg(long, default_value_t = 5)]
    epochs: u64,
    /// Also judge a ResNet-18 on this folder of images, a folder a class.
    #[arg(long, value_name = "DIR")]
    images: Option<PathBuf>,
    /// Only the rows whose name contains this; may be given several times.
    #[arg(long)]
    only: Vec<String>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Size {
    #[value(name = "224")]
    Small,
    #[value(name = "1080p")]
    Hd,
    #[value(name = "4k")]
    Uhd,
}

impl Size {
    /// Height, width, and the batch where none is given.
    fn sizes(self) -> ([u64; 2], u64) {
        match self {
            Size::Small => ([224, 224], 8),
            Size::Hd => ([1080, 1920], 1),
            Size::Uhd => ([2160, 3840], 4),
        }
    }
}

/// A row: its name, the settings beside the work's, and whether it has a budget.
struct Mode {
    name: &'static str,
    settings: Vec<String>,
    is_budgeted: bool,
}

impl Mode {
    /// Whether its batches are cut into micro-batches.
    fn is_cut(&self) -> bool {
        self.settings.iter().any(|setting| setting.starts_with(ACCUMULATE))
    }
}

/// What all others are compared with.
const BASELINE: &str = "baseline f32";
/// The most micro-batches that a batch is cut into.
const PIECES: u64 = 8;
/// Of the baseline's peak, what the row with a budget is given.
const SHARE: f64 = 0.21;
/// "Barely": above the least that the planner names.
const BARELY: f64 = 1.02;
/// Bytes that plain f32 takes for a pixel, at least: where that is much, it is foreseen before it is tried.
const BYTES_PER_PIXEL: u64 = 2000;
/// What is foreseen to take more of the free bytes than this is not tried.
const MOST_OF_FREE: f64 = 0.9;

/// Mixed precision: products in bf16, on weights and moments in f32.
const MIXED: &str = "precision.compute=bf16";
/// Weights (rounded by chance) and moments in bf16 too; sums of gradients, norms and losses in f32.
const NARROW: [&str; 3] = [MIXED, "precision.masters=false", "optimizer.state=bf16"];
const ACCUMULATE: &str = "train.accumulate=";
const RECOMPUTE: &str = "memory.recompute=all";
const NARROW_STATE: &str = "optimizer.state=8bit";
const RELEASED: &str = "optimizer.release_gradients=true";

/// The rows for batches of `batch`.
fn modes(batch: u64) -> Vec<Mode> {
    let pieces = format!("{ACCUMULATE}{}", most_pieces(batch));
    let mode =
        |name, settings: &[&str]| Mode { name, settings: owned(settings), is_budgeted: false };
    // What comes later goes before: 8 bits in place of bf16.
    let everything = with(&NARROW, &[NARROW_STATE]);
    vec![
        mode(BASELINE, &[]),
        mode("mixed precision", &[MIXED]),
        mode("bf16 throughout", &NARROW),
        mode("bf16 throughout, accumulated", &with(&NARROW, &[&pieces])),
        Mode {
            is_budgeted: true,
            ..mode("everything under a budget", &with(&everything, &["memory.recompute=planned"]))
        },
        mode("everything, accumulated", &with(&everything, &[RECOMPUTE, &pieces])),
        // Of several micro-batches sums are kept: released gradients need one.
        mode("everything, released", &with(&everything, &[RECOMPUTE, RELEASED])),
        mode("alone: accumulation", &[&pieces]),
        mode("alone: recomputation", &[RECOMPUTE]),
        mode("alone: 8-bit state", &[NARROW_STATE]),
        mode("alone: released gradients", &[RELEASED]),
    ]
}

fn with<'a>(settings: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [settings, more].concat()
}

/// The most equal pieces of a batch, of [`PIECES`] at most.
fn most_pieces(batch: u64) -> u64 {
    (1..=PIECES).rev().find(|n| batch.is_multiple_of(*n)).unwrap_or(1)
}

/// What came of a row.
#[derive(Default)]
struct Outcome {
    report: Option<Value>,
    is_predicted: bool,
    /// Mean accuracy on the digits, and on the images.
    accuracy: [Option<f64>; 2],
    error: Option<String>,
}

impl Outcome {
    fn failed(error: &anyhow::Error) -> Self {
        Self { error: Some(format!("{error:#}")), ..Self::default() }
    }
}

/// Measures and prints; false if a row failed to run.
pub(super) fn run(options: &SeedTable) -> Result<bool> {
    let quick = options.common.quick;
    let (image, batch) = options.size.sizes();
    let (image, batch) =
        if quick { ([64, 64], 4) } else { (image, options.batch.unwrap_or(batch)) };
    ensure!(batch > 0, "--batch is 0, it must be 1 at least");
    let (binary, mut lines) = options.common.open()?;
    let steps = if quick { 1 } else { options.steps };
    let work = |batch: u64| {
        let size = format!("data.image_size=[{},{}]", image[0], image[1]);
        [owned(&["model.name=resnet50", &size]), versus::synthetic(batch, steps)].concat()
    };
    let is_wanted = |mode: &Mode| {
        let only = &options.only;
        mode.name == BASELINE
            || only.is_empty()
            || only.iter().any(|only| mode.name.contains(only.as_str()))
    };
    let modes: Vec<Mode> = modes(batch).into_iter().filter(is_wanted).collect();
    let mut outcomes: Vec<Outcome> = Vec::new();
    for mode in &modes {
        eprintln!("{}", mode.name);
        let baseline = outcomes.first().and_then(|outcome| outcome.report.as_ref());
        let mut outcome = trained(mode, &work, baseline, (image, batch), options, &binary);
        if outcome.error.is_none() {
            judge(mode, options, &binary, &mut outcome);
        }
        if let Some(report) = &mut outcome.report {
            report["bench"] = json!("seed-table");
            report["mode"] = json!(mode.name);
            report["size"] = json!(image);
            report["is_predicted"] = json!(outcome.is_predicted);
            report["accuracy"] = json!(outcome.accuracy[0]);
            report["image_accuracy"] = json!(outcome.accuracy[1]);
        }
        write(&mut lines, &outcome)?;
        outcomes.push(outcome);
    }
    println!("ResNet-50, {} x {} pixels, batch {batch}\n", image[0], image[1]);
    println!("{}", table::table(&modes, &outcomes, batch));
    Ok(outcomes.iter().all(|outcome| outcome.error.is_none()))
}

fn write(lines: &mut Lines, outcome: &Outcome) -> Result<()> {
    outcome.report.as_ref().map_or(Ok(()), |report| lines.write(report))
}

/// The work in one mode, in a process of its own, or what is foreseen of it where the machine is too
/// small.
fn trained(
    mode: &Mode,
    work: &dyn Fn(u64) -> Vec<String>,
    baseline: Option<&Value>,
    (image, batch): ([u64; 2], u64),
    options: &SeedTable,
    binary: &Binary,
) -> Outcome {
    let settings = |batch| [&work(batch), &mode.settings[..]].concat();
    let free = free_bytes().unwrap_or(u64::MAX);
    let micro_batch = if mode.is_cut() { batch / most_pieces(batch) } else { batch };
    if !mode.is_budgeted && image[0] * image[1] * micro_batch * BYTES_PER_PIXEL > free / 2 {
        match foreseen(mode, batch, |batch| binary.plan(&settings(batch), None)) {
            Ok(plan)
                if plan["predicted_peak_bytes"].as_f64() < Some(free as f64 * MOST_OF_FREE) => {}
            Ok(plan) => {
                return Outcome { report: Some(plan), is_predicted: true, ..Outcome::default() };
            }
            Err(error) => return Outcome::failed(&error),
        }
    }
    let given = options.budget.clone().or_else(|| {
        let peak = ["peak_bytes", "predicted_peak_bytes"];
        let peak = peak.iter().find_map(|key| baseline?[*key].as_f64())?;
        Some(((peak * SHARE) as u64).to_string())
    });
    let budget = if mode.is_budgeted { given } else { None };
    if mode.is_budgeted && budget.is_none() {
        return Outcome::failed(&anyhow::anyhow!("the baseline gave no budget"));
    }
    let result = binary.train(&settings(batch), budget.as_deref());
    let result = result.or_else(|error| match number_after(&format!("{error:#}"), SMALLEST) {
        // A budget that was asked for is not widened.
        Some(least) if options.budget.is_none() => {
            let budget = ((least as f64 * BARELY) as u64).to_string();
            binary.train(&settings(batch), Some(&budget))
        }
        _ => Err(error),
    });
    match result {
        Ok(report) => Outcome { report: Some(report), ..Outcome::default() },
        Err(error) => Outcome::failed(&error),
    }
}

/// The plan of a batch. Planning runs whole micro-batches: of one that is not cut, the peak is on the line
/// through those of one sample and of two.
fn foreseen(mode: &Mode, batch: u64, plan: impl Fn(u64) -> Result<Value>) -> Result<Value> {
    let is_on_line = batch > 2 && !mode.is_cut();
    let mut of_batch = plan(if is_on_line { 2 } else { batch })?;
    if is_on_line {
        let peak = |plan: &Value| plan["predicted_peak_bytes"].as_u64().context("no peak foreseen");
        let (first, second) = (peak(&plan(1)?)?, peak(&of_batch)?);
        of_batch["predicted_peak_bytes"] =
            json!(first + (batch - 1) * second.saturating_sub(first));
        of_batch["batch"] = json!(batch);
        of_batch["micro_batch"] = json!(batch);
    }
    let secs = of_batch["predicted_secs_per_sample"].as_f64();
    of_batch["secs_per_step"] = json!(secs.map(|secs| secs * batch as f64));
    Ok(of_batch)
}

/// Bytes that the system has left.
fn free_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

/// Trains the digits, and a ResNet-18 on images if there are some, in the same mode.
fn judge(mode: &Mode, options: &SeedTable, binary: &Binary, outcome: &mut Outcome) {
    let seeds = if options.common.quick { options.seeds.min(1) } else { options.seeds };
    let mut works = vec![Vec::new()];
    if let Some(images) = &options.images {
        let source = format!("data.source={}", images.display());
        works.push(owned(&["model.name=resnet18", &source]));
    }
    for (work, accuracy) in works.into_iter().zip(&mut outcome.accuracy) {
        let mut all = Vec::new();
        for seed in 0..seeds {
            let mut settings = [work.clone(), of_digits(mode)].concat();
            settings.push(format!("train.seed={seed}"));
            settings.push(format!("train.epochs={}", options.epochs));
            if options.common.quick {
                settings.push("train.max_updates=1".to_string());
            }
            match binary.train(&settings, None) {
                Ok(report) => all.extend(report["accuracy"].as_f64()),
                Err(error) => outcome.error = Some(format!("accuracy: {error:#}")),
            }
        }
        *accuracy = mean(&all);
    }
}

/// A mode's settings for another work: one with a budget recomputes all, and cuts its batches.
fn of_digits(mode: &Mode) -> Vec<String> {
    let is_ours =
        |setting: &&String| !setting.starts_with(ACCUMULATE) && !setting.contains("=planned");
    let mut settings: Vec<String> = mode.settings.iter().filter(is_ours).cloned().collect();
    let cuts = mode.is_budgeted || mode.settings.len() != settings.len();
    if mode.is_budgeted {
        settings.push(RECOMPUTE.to_string());
    }
    if cuts {
        settings.push(format!("{ACCUMULATE}{PIECES}"));
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_equal() {
        assert_eq!([8, 4, 12, 1, 11].map(most_pieces), [8, 4, 6, 1, 1]);
    }

    #[test]
    fn large_batches_are_on_the_line_unless_they_are_cut() {
        let modes = modes(8);
        let plan = |n: u64| Ok(json!({"predicted_peak_bytes": 100 + 30 * n, "batch": n}));
        let peak = |n| {
            let plan = foreseen(&modes[0], n, plan).expect("there is a plan");
            plan["predicted_peak_bytes"].as_u64()
        };
        assert_eq!([1, 2, 4, 8].map(peak), [Some(130), Some(160), Some(220), Some(340)]);
        assert!(foreseen(&modes[0], 4, |_| Ok(json!({}))).is_err());
        // A plan of few samples says nothing of micro-batches.
        let cut = foreseen(&modes[3], 8, |n| Ok(json!({"asked": n}))).expect("there is a plan");
        let name = "bf16 throughout, accumulated";
        assert_eq!((modes[3].name, cut["asked"].as_u64()), (name, Some(8)));
    }

    #[test]
    fn the_digits_are_judged_in_the_same_mode() {
        let modes = modes(1);
        let of =
            |name: &str| of_digits(modes.iter().find(|mode| mode.name == name).expect("a mode"));
        assert_eq!(of(BASELINE), [""; 0]);
        let pieces = "train.accumulate=8";
        assert_eq!(of("mixed precision"), [MIXED]);
        assert_eq!(of("bf16 throughout, accumulated"), [&NARROW[..], &[pieces]].concat());
        let everything = [&NARROW[..], &[NARROW_STATE, RECOMPUTE, pieces]].concat();
        assert_eq!(of("everything under a budget"), everything);
    }
}

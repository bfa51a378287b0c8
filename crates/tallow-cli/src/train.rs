//! `tallow train`.

use crate::{
    config::{Config, Opened},
    memory_log::MemoryLog,
    observer::Observer,
    plan,
    report::{self, Report},
    run_dir::{RunDir, Start},
    signals::Signals,
    view::{View, say},
    workload::{BuiltModel, SUMS, Work},
};
use anyhow::{Context, Result, bail, ensure};
use std::{path::Path, time::Duration};
use tallow_memory::{
    Ledger, Meter, Watermark,
    batch::{Controller, ControllerConfig},
    peak_during,
    plan::PostMortem,
};
use tallow_run::{Epochs, Outcome, fit};
use tallow_train::{
    BatchSplit, Evaluation, Flow, Gradients, Recipe, Sizing, Trainer, Watch,
    accum::{ADVISED_MICRO_BATCHES, AccumConfig},
    optim::Schedule,
    plan::{Built, Candidate},
};

/// Which folder a run works in, and how it begins.
#[derive(Clone, Copy)]
pub(crate) struct Where<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) start: Start,
    /// Whether a run that goes on plans anew.
    pub(crate) plans_anew: bool,
}

/// Trains, prints what happens, and leaves `report.json` in the run's folder; the exit code.
///
/// # Errors
/// If the data cannot be read, the folder cannot be written, no plan fits, or training fails.
pub(crate) fn run(
    config: &Config,
    place: Where,
    signals: &Signals,
    meter: &'static dyn Meter,
) -> Result<u8> {
    let start_bytes = meter.current_bytes();
    let log = MemoryLog::new();
    let (result, peak_bytes) = peak_during(meter, || train(config, place, &log, signals, meter));
    let (ended, view) = result?;
    let folder = place.folder;
    log.write(folder)?;
    let Some(trained) = ended else {
        view.stop();
        say!("stopped; `tallow train --resume {}` goes on", folder.display());
        return Ok(signals.exit_code());
    };
    let peak_bytes = start_bytes + peak_bytes;
    let rss_peak_bytes = tallow_memory::resident_peak_bytes().ok();
    view.finish(&trained.outcome, &trained.held_out, peak_bytes, rss_peak_bytes, config.budget);
    if let Some(beyond) = config.budget.and_then(|b| peak_bytes.checked_sub(b)).filter(|&b| b > 0) {
        say!("the budget was exceeded by {beyond} bytes");
    }
    report::write(folder, &Report { peak_bytes, rss_peak_bytes, ..trained.report })?;
    say!("report in {}", folder.join("report.json").display());
    Ok(0)
}

struct Trained {
    outcome: Outcome,
    held_out: Evaluation,
    report: Report,
}

/// `None` if the run was stopped.
fn train<'a>(
    config: &'a Config,
    place: Where,
    log: &MemoryLog,
    signals: &Signals,
    meter: &'static dyn Meter,
) -> Result<(Option<Trained>, View<'a>)> {
    let opened = config.source.open(config.seed)?;
    let work = Work { config, opened: &opened };
    let sets = |dtype| (opened.train.dataset(dtype), opened.held_out.dataset(dtype));
    let (train, held_out) = sets(config.precisions[0].policy.compute);
    let epochs = Epochs {
        train: &*train,
        held_out: &*held_out,
        batch: config.batch,
        epochs: config.epochs,
        max_updates: config.max_updates,
        early_stop_epochs: config.early_stop_epochs,
        seed: config.seed,
    };
    epochs.check()?;
    let n_updates = epochs.n_updates();
    ensure!(
        config.warmup_updates < n_updates,
        "train.warmup_updates is {}, it must be less than the run's {n_updates} updates",
        config.warmup_updates
    );
    let dir = RunDir::prepare(place.folder, place.start, config)?;
    work.check()?;
    let goes_by_old_plan = place.start == Start::Resume && !place.plans_anew && dir.has_plan();
    let (weighed, built) = match goes_by_old_plan {
        true => (vec![dir.read_plan(config, &work.space())?], None),
        false => choose(&work, meter)?,
    };
    let chosen = &weighed[0];
    let _of_planning = meter.take_trip(); // foreseen, and over
    let precision = &config.precisions[chosen.policy];
    let (train, held_out) = sets(precision.policy.compute);
    let epochs = Epochs { train: &*train, held_out: &*held_out, ..epochs };
    let Built { model, masters, buffers } = match built {
        Some(built) => built,
        None => work.built(&precision.policy)?,
    };
    if let Some(pattern) = precision.policy.unmatched(&masters.params()).first() {
        bail!("precision.keep_f32 `{pattern}` matches no parameter of the model");
    }
    let params = masters.params();
    let n_params = params.iter().map(|(_, var)| var.elem_count() as u64).sum();
    let recipe = recipe(config, chosen, n_updates)?;
    let schedule = recipe.schedule;
    let mut trainer = Trainer::new(model, masters, buffers, recipe)?;
    let ledger = Ledger::new();
    trainer.account(&ledger);
    let guard = Watermark::off(ledger.clone());
    let tick = log.ticker(ledger.clone(), meter, signals.clone());
    trainer.watch(Watch { tick, ..Watch::new(guard, meter) });
    if let Some(sizing) = sizing(config, chosen, meter)? {
        trainer.size_by(sizing)?;
    }
    introduce(config, &opened, chosen, n_params);
    let view = View::new(n_updates, config.epochs, config.budget, meter);
    let (mut observer, start) = Observer::begin(&dir, config, &mut trainer, view, meter)?;
    dir.write_effective(config, chosen)?;
    if !goes_by_old_plan {
        dir.write_plan(config, chosen)?;
    }
    signals.save_first();
    let mut warm = None;
    let outcome = fit(&mut trainer, &epochs, start, |trainer, progress, event| {
        warm.get_or_insert((trainer.n_windows(), progress.training));
        observer.observe(trainer, progress, &event, &schedule);
        Ok(if observer.has_failed() { Flow::Stop } else { signals.flow() })
    });
    let outcome =
        outcome.inspect_err(|error| post_mortem(error, config, &weighed, &ledger, meter))?;
    let view = observer.end()?;
    let left_out = opened.train.left_out(true).text("samples");
    let judged = opened.held_out.left_out(false).text("held-out samples");
    left_out.iter().chain(&judged).for_each(|text| say!("{text}"));
    let Some(held_out) = outcome.held_out else { return Ok((None, view)) };
    if epochs.has_stalled(&outcome.progress) {
        let n = outcome.progress.n_since_best;
        say!("stopped early: no lower held-out loss in {n} epochs");
    }
    let micro_batch = trainer.split().micro_batch();
    if micro_batch != chosen.micro_batch {
        say!("memory ran out: micro-batches of {micro_batch} in place of {}", chosen.micro_batch);
    }
    let report = Report {
        micro_batch: micro_batch as u64,
        optimizer_state_bytes: trainer.optimizer().state_bytes(),
        optimizer_resident_bytes: trainer.optimizer().resident_state_bytes(),
        secs_per_step: secs_per_step(&outcome, trainer.n_windows(), warm),
        ..summary(config, &opened, chosen, (&outcome, &held_out), n_params)
    };
    Ok((Some(Trained { outcome, held_out, report }), view))
}

/// The planner's choice under a budget, the configuration's own without one; then whatever else was
/// weighed. The model too, where its segments were all there was to know.
fn choose(work: &Work, meter: &dyn Meter) -> Result<(Vec<Candidate>, Option<BuiltModel>)> {
    let config = work.config;
    let space = work.space();
    if config.budget.is_none() && !space.needs_costs() {
        let built = work.built(&config.precisions[0].policy)?;
        let names = work.segment_names(&built)?;
        return Ok((vec![space.unplanned(&names)?], Some(built)));
    }
    let mut found = work.plan(meter)?;
    plan::say_untried(config, &found);
    found.candidates.swap(0, found.chosen);
    Ok((found.candidates, None))
}

/// Where memory ran out: what it was for, and what would have fitted.
fn post_mortem(
    error: &tallow_run::Error,
    config: &Config,
    weighed: &[Candidate],
    ledger: &Ledger,
    meter: &dyn Meter,
) {
    let tallow_run::Error::Train(tallow_train::Error::Memory(_)) = error else { return };
    let Some(budget) = config.budget else { return };
    let allowed = weighed.iter().filter(|candidate| candidate.is_allowed(&config.forbid));
    let priced: Vec<_> = allowed.map(Candidate::priced).collect();
    let at_peak = ledger.at_peak().reconciled(meter.peak_bytes());
    say!("{}", PostMortem::new(at_peak, budget, &priced));
}

/// Under a budget micro-batches may become smaller than planned, never larger. `auto` without a
/// budget follows what the system has left.
fn sizing(config: &Config, chosen: &Candidate, meter: &dyn Meter) -> Result<Option<Sizing>> {
    let start = chosen.micro_batch;
    let (high, limit_bytes) = match config.budget {
        _ if config.gradients == Gradients::Released => return Ok(None),
        Some(budget) => (1.0, budget),
        None if !config.auto_micro_batch => return Ok(None),
        None => {
            let limits = tallow_memory::limits::limits(Path::new("/"));
            for notice in &limits.notices {
                say!("memory limits: {notice}");
            }
            let headroom = limits.headroom_bytes();
            // Of systems without /proc/meminfo.
            let headroom = headroom.context("train.micro_batch: the system names no limit")?;
            say!("micro-batches follow {} of free memory", crate::view::mib(headroom));
            (0.9, meter.current_bytes() + headroom)
        }
    };
    let marks = ControllerConfig { high, min_items: 1, ..ControllerConfig::fixed(start) };
    Ok(Some(Sizing::of(Controller::new(marks)?, limit_bytes)))
}

fn introduce(config: &Config, opened: &Opened, chosen: &Candidate, n_params: u64) {
    let by = |n: &[usize]| n.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
    say!(
        "{}, {n_params} parameters, on {} samples of {} ({} held out), batch {} in micro-batches of \
         {}, {}, {}, recompute {}",
        config.model.network.name(),
        opened.train.n_samples(),
        by(&opened.size),
        opened.held_out.n_samples(),
        config.batch,
        chosen.micro_batch,
        config.precisions[chosen.policy].name,
        config.optimizers[chosen.optimizer].name,
        recompute_name(config, chosen),
    );
    if let Some(budget) = config.budget {
        say!(
            "foreseen peak {} of a budget of {}",
            crate::view::mib(chosen.peak_bytes()),
            crate::view::mib(budget)
        );
    }
}

/// The rule, and what came of it.
fn recompute_name(config: &Config, chosen: &Candidate) -> String {
    let what = &chosen.choice.recompute;
    match chosen.recompute.n_redone() {
        0 => what.clone(),
        _ => format!("{}, {what}", config.recompute_name),
    }
}

fn recipe(config: &Config, chosen: &Candidate, n_updates: u64) -> Result<Recipe> {
    let optimizer = config.optimizers[chosen.optimizer].config.clone();
    Ok(Recipe {
        split: BatchSplit::derive(Some(config.batch), Some(chosen.micro_batch), None, 1)?,
        schedule: Schedule {
            peak: optimizer.learning_rate,
            warmup_updates: config.warmup_updates,
            shape: config.decay.shape(n_updates),
        },
        optimizer,
        loss_scale: config.precisions[chosen.policy].loss_scale.clone(),
        accum: AccumConfig { dtype: SUMS, warn_above: ADVISED_MICRO_BATCHES },
        clip: config.clip,
        skip_above_norm: config.skip_above_norm,
        gradients: config.gradients,
        recompute: chosen.recompute.clone(),
        saved: config.saved.clone(),
        check: config.check,
        label_smoothing: config.label_smoothing,
        ema_decay: config.ema_decay,
    })
}

/// Seconds an update, without the first of this process where there are others: that one finds no
/// page mapped and no thread running. `warm` is what there was after it: updates, and the time they took.
fn secs_per_step(outcome: &Outcome, n_windows: u64, warm: Option<(u64, Duration)>) -> f64 {
    let all = outcome.progress.training;
    match warm {
        Some((n, first)) if n_windows > n => {
            all.saturating_sub(first).as_secs_f64() / (n_windows - n) as f64
        }
        _ => all.as_secs_f64() / n_windows.max(1) as f64,
    }
}

fn summary(
    config: &Config,
    opened: &Opened,
    chosen: &Candidate,
    (outcome, held_out): (&Outcome, &Evaluation),
    params: u64,
) -> Report {
    let progress = &outcome.progress;
    let secs = progress.training.as_secs_f64();
    Report {
        name: config.source.name(),
        model: config.model.network.name().to_string(),
        params,
        batch: config.batch as u64,
        micro_batch: chosen.micro_batch as u64,
        size: opened.size.clone(),
        precision: config.precisions[chosen.policy].name.clone(),
        recompute: recompute_name(config, chosen),
        optimizer: config.optimizers[chosen.optimizer].name.clone(),
        gradients: match config.gradients {
            Gradients::Summed => "summed".to_string(),
            Gradients::Released => "released".to_string(),
        },
        seed: config.seed,
        updates: outcome.n_updates,
        peak_bytes: 0,
        predicted_peak_bytes: (chosen.peak_bytes() > 0).then_some(chosen.peak_bytes()),
        budget_bytes: config.budget,
        rss_peak_bytes: None,
        secs_per_step: 0.0,
        samples_per_sec: progress.n_samples as f64 / secs,
        loss: held_out.loss,
        first_loss: progress.first_loss.unwrap_or(f64::NAN),
        train_loss: progress.last_loss,
        accuracy: held_out.accuracy,
        skipped_steps: outcome.n_skipped,
        skipped_samples: opened.train.left_out(true).n,
        optimizer_state_bytes: 0,
        optimizer_resident_bytes: 0,
    }
}

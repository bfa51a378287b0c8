//! `tallow plan`.

use crate::{
    config::Config,
    report::by_category,
    view::{answer, mib, say},
    workload::Work,
};
use anyhow::Result;
use serde_json::json;
use tallow_memory::Meter;
use tallow_train::plan::{Candidate, Found};

/// Prints the plan for `config`, as a table or as JSON, and what else was weighed.
///
/// # Errors
/// If nothing fits, or the model cannot be built.
pub(crate) fn run(config: &Config, as_json: bool, meter: &dyn Meter) -> Result<()> {
    let opened = config.source.open(config.seed)?;
    let work = Work { config, opened: &opened };
    work.check()?;
    let found = work.plan(meter)?;
    let chosen = &found.candidates[found.chosen];
    if as_json {
        let others = found.candidates.iter().map(|candidate| as_value(config, candidate));
        let mut value = as_value(config, chosen);
        value["budget_bytes"] = json!(config.budget);
        value["candidates"] = others.collect();
        answer!("{value:#}")
    } else {
        table(config, &found)
    }
}

fn as_value(config: &Config, candidate: &Candidate) -> serde_json::Value {
    json!({
        "model": config.model.network.name(),
        "batch": config.batch,
        "micro_batch": candidate.micro_batch,
        "precision": config.precisions[candidate.policy].name,
        "recompute": candidate.choice.recompute,
        "recompute_plan": candidate.recompute.to_string(),
        "optimizer": config.optimizers[candidate.optimizer].name,
        "predicted_peak_bytes": candidate.peak_bytes(),
        "predicted_secs_per_sample": candidate.secs_per_sample,
        "terms": by_category(&candidate.terms),
    })
}

fn table(config: &Config, found: &Found) -> Result<()> {
    let chosen = &found.candidates[found.chosen];
    let budget =
        config.budget.map_or("no budget".to_string(), |b| format!("a budget of {}", mib(b)));
    answer!("{}, batch {}, {budget}; chosen:", config.model.network.name(), config.batch)?;
    answer!("  precision        {}", config.precisions[chosen.policy].name)?;
    answer!("  micro-batch      {}", chosen.micro_batch)?;
    answer!("  recompute        {}   [{}]", chosen.choice.recompute, chosen.recompute)?;
    answer!("  optimizer        {}", config.optimizers[chosen.optimizer].name)?;
    answer!("  foreseen peak    {} ({} bytes)", mib(chosen.peak_bytes()), chosen.peak_bytes())?;
    for (category, bytes) in chosen.terms.iter().filter(|(_, bytes)| *bytes > 0) {
        answer!("    {:<18} {:>12}", category.name(), mib(bytes))?;
    }
    answer!("  foreseen time    {:.3} s an update", chosen.secs_per_sample * config.batch as f64)?;
    answer!("")?;
    answer!("| precision | micro-batch | recompute | state | foreseen peak | s/update |")?;
    answer!("|---|---|---|---|---|---|")?;
    for (i, candidate) in found.candidates.iter().enumerate() {
        answer!(
            "| {} | {} | {} | {} | {}{} | {:.3}{} |",
            candidate.choice.precision,
            candidate.micro_batch,
            candidate.choice.recompute,
            config.optimizers[candidate.optimizer].name,
            mib(candidate.peak_bytes()),
            if config.budget.is_some_and(|b| candidate.peak_bytes() > b) {
                ", too much"
            } else {
                ""
            },
            candidate.secs_per_sample * config.batch as f64,
            if i == found.chosen { ", chosen" } else { "" },
        )?;
    }
    say_untried(config, found);
    Ok(())
}

/// Names the precisions that were left out.
pub(crate) fn say_untried(config: &Config, found: &Found) {
    for &policy in &found.untried {
        say!(
            "{} was not tried: its calibration alone would pass the budget",
            config.precisions[policy].name
        );
    }
}

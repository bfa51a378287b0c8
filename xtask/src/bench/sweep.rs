//! `bench plan-sweep`: is a budget kept, and was the peak foreseen?
//!
//! Each model and batch is planned without a budget (the most it takes) and under a hopeless one (the
//! least it can do with); budgets between, each the same factor above the one before, are then
//! trained under, two updates in a process of their own.

use super::{
    Common, Lines,
    binary::Binary,
    cases::{Case, cases},
    stats::{cell, ladder, largest, median, mib},
};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// A foreseen peak farther than this from the one held is a miss.
const MISS_PERCENT: f64 = 5.0;
/// "Barely": above the least that the planner names.
const BARELY: f64 = 1.02;
/// "Ample": above the most that the preferred choice of everything takes.
const AMPLE: f64 = 1.05;

const COLUMNS: [&str; 12] = [
    "model",
    "batch",
    "budget MiB",
    "foreseen MiB",
    "held MiB",
    "error %",
    "within",
    "precision",
    "micro-batch",
    "recompute",
    "optimizer",
    "s/update",
];

/// What the rows come to.
#[derive(Default)]
struct Sum {
    /// Distance of each foreseen peak from the one held, in percent of that.
    errors: Vec<f64>,
    n_kept: usize,
    n_failed: usize,
    /// Rows that broke their budget or were foreseen badly, with what the planner thought.
    misses: Vec<String>,
}

/// Options of `bench plan-sweep`.
#[derive(clap::Args)]
pub(crate) struct PlanSweep {
    /// Only the models whose name contains this.
    #[arg(long)]
    only: Option<String>,
    #[command(flatten)]
    common: Common,
}

/// A row a model, batch and budget; false if one failed to run.
pub(super) fn run(PlanSweep { only, common: options }: &PlanSweep) -> Result<bool> {
    let (binary, mut lines) = options.open()?;
    let wanted = |case: &Case| only.as_ref().is_none_or(|only| case.name.contains(only));
    println!("| {} |", COLUMNS.join(" | "));
    println!("|{}", "---|".repeat(COLUMNS.len()));
    let mut sum = Sum::default();
    for case in cases(options.quick).into_iter().filter(wanted) {
        match range(&binary, &case) {
            Ok((least, most)) => {
                let first = (least as f64 * BARELY).ceil() as u64;
                let last = ((most as f64 * AMPLE).ceil() as u64).max(first);
                for budget in ladder(first, last, case.n_budgets) {
                    sum.add(&binary, &case, budget, (least, most), &mut lines)?;
                }
            }
            Err(error) => drop(sum.failed(&case, "-", &error)),
        }
    }
    println!("\n{}", sum.line());
    sum.misses.iter().for_each(|miss| println!("\n{miss}"));
    Ok(sum.n_failed == 0)
}

/// The least bytes that a plan can do with, and the most that it takes where nothing limits it.
fn range(binary: &Binary, case: &Case) -> Result<(u64, u64)> {
    let plan = binary.plan(&case.settings, None)?;
    let candidates = plan["candidates"].as_array().context("the plan lists no candidates")?;
    let peaks = candidates.iter().filter_map(|c| c["predicted_peak_bytes"].as_u64());
    let most = peaks.max().context("no candidate has a peak")?;
    let mut hopeless = 1;
    loop {
        let Err(error) = binary.plan(&case.settings, Some(&hopeless.to_string())) else {
            bail!("a budget of {hopeless} bytes was planned for");
        };
        let text = format!("{error:#}");
        match number_after(&text, "the weights of the model alone are ") {
            // Refused before anything was priced: a little more, then.
            Some(weights) if weights >= hopeless => hopeless = weights + 1,
            _ => {
                let least = number_after(&text, SMALLEST);
                return Ok((least.with_context(|| text.clone())?, most));
            }
        }
    }
}

/// What stands before the least bytes in the planner's complaint that nothing fits.
pub(super) const SMALLEST: &str = "the smallest needs ";

/// A number in the planner's complaint that nothing fits.
pub(super) fn number_after(complaint: &str, words: &str) -> Option<u64> {
    let (_, rest) = complaint.split_once(words)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

impl Sum {
    /// Trains under one budget and prints the row.
    fn add(
        &mut self,
        binary: &Binary,
        case: &Case,
        budget: u64,
        (least, most): (u64, u64),
        lines: &mut Lines,
    ) -> Result<()> {
        let mut report = match binary.train(&case.settings, Some(&budget.to_string())) {
            Ok(report) => report,
            Err(error) => {
                let row = self.failed(case, &mib(budget as f64), &error);
                let plan = planned(binary, case, budget);
                self.misses.push(format!("{row}\n{}", thought(&plan)));
                return lines.write(&json!({
                    "bench": "plan-sweep",
                    "case": case.name,
                    "batch": case.batch,
                    "budget_bytes": budget,
                    "smallest_bytes": least,
                    "ample_bytes": most,
                    "error": format!("{error:#}"),
                    "terms": plan["terms"],
                }));
            }
        };
        let row = Row::of(case.name, &report);
        let mut more = json!({
            "bench": "plan-sweep",
            "case": case.name,
            "smallest_bytes": least,
            "ample_bytes": most,
            "error_percent": row.error_percent(),
            "within_budget": row.is_kept(),
        });
        if row.is_miss() {
            let plan = planned(binary, case, budget);
            self.misses.push(format!("{}\n{}", row.line(), thought(&plan)));
            more["terms"] = plan["terms"].clone();
        }
        self.errors.extend(row.error_percent());
        self.n_kept += usize::from(row.is_kept());
        println!("{}", row.line());
        if let (Some(report), Some(more)) = (report.as_object_mut(), more.as_object_mut()) {
            report.append(more);
        }
        lines.write(&report)
    }

    fn failed(&mut self, case: &Case, budget: &str, error: &anyhow::Error) -> String {
        self.n_failed += 1;
        let rest = "| ".repeat(COLUMNS.len() - 4);
        let (name, batch) = (case.name, case.batch);
        let row = format!("| {name} | {batch} | {budget} | did not run: {error:#} {rest}|");
        println!("{row}");
        row
    }

    fn line(&self) -> String {
        let distances: Vec<f64> = self.errors.iter().map(|error| error.abs()).collect();
        let n_rows = self.errors.len();
        let median = median(&distances);
        let mut line = format!(
            "{n_rows} rows, {} budgets kept, worst |error| {:.2} %, median |error| {} %",
            self.n_kept,
            largest(&distances),
            cell(median, 2),
        );
        if self.n_failed > 0 {
            line += &format!(", {} did not run", self.n_failed);
        }
        line
    }
}

/// The plan once more: a report has no terms. Its times are measured anew, so it may choose another
/// way.
fn planned(binary: &Binary, case: &Case, budget: u64) -> Value {
    let plan = binary.plan(&case.settings, Some(&budget.to_string()));
    plan.unwrap_or_else(|error| json!({"error": format!("{error:#}")}))
}

/// The planner's terms of a choice, the largest first.
fn thought(plan: &Value) -> String {
    let terms = plan["terms"].as_object().into_iter().flatten();
    let mut terms: Vec<(&str, u64)> =
        terms.filter_map(|(name, bytes)| Some((name.as_str(), bytes.as_u64()?))).collect();
    terms.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let terms = terms.iter().filter(|(_, bytes)| *bytes > 0);
    let terms: Vec<String> = terms.map(|(name, bytes)| format!("{name} {bytes}")).collect();
    match plan["error"].as_str() {
        Some(error) => format!("planned again: {error}"),
        None => format!(
            "planned again: {} = {} ({} x {}, {})",
            plan["predicted_peak_bytes"],
            terms.join(" + "),
            plan["precision"].as_str().unwrap_or("-"),
            plan["micro_batch"],
            plan["optimizer"].as_str().unwrap_or("-"),
        ),
    }
}

/// A report, as the table has it.
struct Row<'a> {
    name: &'a str,
    report: &'a Value,
    budget: f64,
    foreseen: Option<f64>,
    held: f64,
}

impl<'a> Row<'a> {
    fn of(name: &'a str, report: &'a Value) -> Self {
        let bytes = |key: &str| report[key].as_f64();
        Self {
            name,
            report,
            budget: bytes("budget_bytes").unwrap_or(f64::INFINITY),
            foreseen: bytes("predicted_peak_bytes"),
            held: bytes("peak_bytes").unwrap_or(f64::NAN),
        }
    }

    fn error_percent(&self) -> Option<f64> {
        self.foreseen.map(|foreseen| 100.0 * (foreseen / self.held - 1.0))
    }

    fn is_kept(&self) -> bool {
        self.held <= self.budget
    }

    fn is_miss(&self) -> bool {
        !self.is_kept() || self.error_percent().is_none_or(|error| error.abs() > MISS_PERCENT)
    }

    fn line(&self) -> String {
        let Self { name, report, budget, .. } = self;
        let text = |key: &str| report[key].as_str().unwrap_or("-").to_string();
        let cells = [
            (*name).to_string(),
            report["batch"].to_string(),
            mib(*budget),
            self.foreseen.map_or("-".to_string(), mib),
            mib(self.held),
            self.error_percent().map_or("-".to_string(), |error| format!("{error:+.2}")),
            if self.is_kept() { "yes" } else { "NO" }.to_string(),
            text("precision"),
            report["micro_batch"].to_string(),
            text("recompute"),
            text("optimizer"),
            cell(report["secs_per_step"].as_f64(), 3),
        ];
        format!("| {} |", cells.join(" | "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(budget: u64, foreseen: u64, held: u64) -> Value {
        json!({
            "batch": 8, "micro_batch": 4, "precision": "bf16", "recompute": "none",
            "optimizer": "adamw, f32 state", "secs_per_step": 0.25, "budget_bytes": budget,
            "predicted_peak_bytes": foreseen, "peak_bytes": held,
        })
    }

    #[test]
    fn the_smallest_budget_is_read() {
        for (text, bytes) in [
            (
                "error: nothing fits 1 bytes: the smallest needs 4096 bytes (precision=bf16)",
                Some(4096),
            ),
            ("exit status: 2: the smallest needs 7 bytes; cheapest change: x", Some(7)),
            ("the smallest needs many bytes", None),
            ("the smallest needs 12", Some(12)),
            ("no such file", None),
        ] {
            assert_eq!(number_after(text, SMALLEST), bytes, "{text}");
        }
    }

    #[test]
    fn a_row_says_how_far_off_and_whether_it_is_kept() {
        const M: u64 = 1 << 20;
        let kept = report(10 * M, 102 * M / 10, 10 * M);
        let row = Row::of("x", &kept);
        assert!(row.is_kept() && !row.is_miss());
        assert_eq!(
            row.line(),
            "| x | 8 | 10.0 | 10.2 | 10.0 | +2.00 | yes | bf16 | 4 | none | adamw, f32 state | 0.250 |"
        );
        let broken = report(10 * M, 10 * M, 10 * M + 1);
        assert!(Row::of("x", &broken).is_miss());
        let missed = report(20 * M, 9 * M, 10 * M);
        let row = Row::of("x", &missed);
        assert!(row.is_kept() && row.is_miss());
        assert!(row.line().contains("| -10.00 | yes |"), "{}", row.line());
    }

    #[test]
    fn rows_are_summed_up() {
        let sum = Sum { errors: vec![-3.0, 1.0, 2.0], n_kept: 2, ..Sum::default() };
        let line = "3 rows, 2 budgets kept, worst |error| 3.00 %, median |error| 2.00 %";
        assert_eq!(sum.line(), line);
        assert_eq!(Sum { n_failed: 1, ..sum }.line(), format!("{line}, 1 did not run"));
    }

    #[test]
    fn terms_are_listed_the_largest_first() {
        let plan = json!({
            "predicted_peak_bytes": 30, "precision": "f32", "micro_batch": 4, "optimizer": "sgd",
            "terms": {"data_bytes": 0, "gradients_bytes": 10, "weights_bytes": 20},
        });
        let line = "planned again: 30 = weights_bytes 20 + gradients_bytes 10 (f32 x 4, sgd)";
        assert_eq!(thought(&plan), line);
        assert_eq!(thought(&json!({"error": "no"})), "planned again: no");
    }
}

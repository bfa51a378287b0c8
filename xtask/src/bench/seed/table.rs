//! The table that is printed.

use super::{Mode, Outcome};
use crate::bench::stats::{cell, mib};

/// A row a mode, beside the first one.
pub(super) fn table(modes: &[Mode], outcomes: &[Outcome], batch: u64) -> String {
    let mut lines = vec![
        "| mode | counted peak MiB | resident peak MiB | peak / baseline | s/sample | speed / baseline | \
         accuracy, digits | lost, points | accuracy, images | lost, points |"
            .to_string(),
        format!("|{}", "---|".repeat(10)),
    ];
    let baseline = outcomes.first();
    lines.extend(
        modes.iter().zip(outcomes).map(|(mode, outcome)| row(mode, outcome, baseline, batch)),
    );
    lines.join("\n")
}

fn row(mode: &Mode, outcome: &Outcome, baseline: Option<&Outcome>, batch: u64) -> String {
    if let (Some(error), None) = (&outcome.error, &outcome.report) {
        return format!("| {} | did not run: {error} |{}", mode.name, " |".repeat(8));
    }
    let number = |outcome: &Outcome, key: &str| outcome.report.as_ref()?[key].as_f64();
    let peak = |outcome: &Outcome| match outcome.is_predicted {
        true => number(outcome, "predicted_peak_bytes"),
        false => number(outcome, "peak_bytes"),
    };
    let ratio = |ours: Option<f64>, base: Option<f64>| Some(ours? / base?);
    let base = |f: &dyn Fn(&Outcome) -> Option<f64>| baseline.and_then(f);
    let secs = |outcome: &Outcome| Some(number(outcome, "secs_per_step")? / batch as f64);
    let bytes = |bytes: Option<f64>| bytes.map_or("-".to_string(), mib);
    let budget = number(outcome, "budget_bytes");
    let note = match (&outcome.error, outcome.is_predicted, budget) {
        (Some(error), ..) => format!(" ({error})"),
        (None, true, _) => " (predicted)".to_string(),
        (None, false, Some(budget)) => format!(", {} MiB", mib(budget)),
        (None, false, None) => String::new(),
    };
    let accuracy = |i: usize| {
        let lost = base(&|b| b.accuracy[i]).zip(outcome.accuracy[i]).map(|(b, a)| 100.0 * (b - a));
        format!("{} | {}", cell(outcome.accuracy[i].map(|a| 100.0 * a), 2), cell(lost, 2))
    };
    format!(
        "| {}{note} | {} | {} | {} | {} | {} | {} | {} |",
        mode.name,
        bytes(peak(outcome)),
        bytes(number(outcome, "rss_peak_bytes")),
        cell(ratio(peak(outcome), base(&peak)), 3),
        cell(secs(outcome), 3),
        cell(ratio(base(&secs), secs(outcome)), 2),
        accuracy(0),
        accuracy(1),
    )
}

#[cfg(test)]
mod tests {
    use super::{super::modes, *};
    use serde_json::json;

    #[test]
    fn rows_are_beside_the_baseline() {
        const M: u64 = 1 << 20;
        let outcome = |peak: u64, secs: f64, accuracy: f64| Outcome {
            report: Some(json!({"peak_bytes": peak * M, "secs_per_step": secs})),
            accuracy: [Some(accuracy), None],
            ..Outcome::default()
        };
        let failed = Outcome { error: Some("no".to_string()), ..Outcome::default() };
        let table =
            table(&modes(8)[..3], &[outcome(100, 8.0, 0.99), outcome(50, 4.0, 0.985), failed], 8);
        let line = "| mixed precision | 50.0 | - | 0.500 | 0.500 | 2.00 | 98.50 | 0.50 | - | - |";
        assert!(table.contains(line), "{table}");
        assert!(table.contains("| bf16 throughout | did not run: no |"), "{table}");
        let foreseen = Outcome {
            report: Some(json!({"predicted_peak_bytes": 10 * M})),
            is_predicted: true,
            ..Outcome::default()
        };
        let line = row(&modes(1)[0], &foreseen, Some(&foreseen), 1);
        assert!(line.starts_with("| baseline f32 (predicted) | 10.0 | - | 1.000 | - |"), "{line}");
    }
}

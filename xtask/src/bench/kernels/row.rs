//! A case and what each column came to.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Results farther apart than this share of their root mean square are not the same.
const TOLERANCE: [(&str, f64); 2] = [("f32", 1e-3), ("bf16", 3e-2)];

pub(super) struct Row {
    /// As the list has it.
    pub(super) case: Value,
    /// What each column answered, by whom it was asked.
    heard: BTreeMap<&'static str, Heard>,
}

/// What one column answered in all rounds.
#[derive(Default)]
struct Heard {
    best_secs: Option<f64>,
    /// Medians of the rounds.
    medians: Vec<f64>,
    amount: Option<f64>,
    samples: Vec<f64>,
    temp_bytes: Option<u64>,
    absent: Option<String>,
    error: Option<String>,
}

impl Row {
    pub(super) fn new(case: Value) -> Self {
        Self { case, heard: BTreeMap::new() }
    }

    pub(super) fn name(&self) -> &str {
        self.case["name"].as_str().unwrap_or_default()
    }

    pub(super) fn text(&self, key: &str) -> &str {
        self.case[key].as_str().unwrap_or_default()
    }

    /// How often the case occurs in its network.
    pub(super) fn count(&self) -> f64 {
        self.case["count"].as_f64().unwrap_or(1.0)
    }

    pub(super) fn amount(&self) -> f64 {
        self.case["amount"].as_f64().unwrap_or(f64::NAN)
    }

    /// Takes a round's answer.
    pub(super) fn hear(&mut self, who: &'static str, answer: Value) {
        let heard = self.heard.entry(who).or_default();
        let text = |key: &str| answer[key].as_str().map(str::to_string);
        heard.absent = text("absent").or(heard.absent.take());
        heard.error = heard.error.take().or(text("error"));
        if let Some(secs) = answer["best_secs"].as_f64() {
            heard.best_secs = Some(heard.best_secs.map_or(secs, |best| best.min(secs)));
        }
        heard.medians.extend(answer["median_secs"].as_f64());
        heard.amount = answer["amount"].as_f64().or(heard.amount);
        heard.temp_bytes = answer["temp_bytes"].as_u64().or(heard.temp_bytes);
        if let Some(samples) = answer["samples"].as_array() {
            // What is not a number in JSON is none in an answer either.
            heard.samples = samples.iter().map(|s| s.as_f64().unwrap_or(f64::NAN)).collect();
        }
    }

    /// Seconds of the fastest run.
    pub(super) fn secs(&self, who: &str) -> Option<f64> {
        self.heard.get(who)?.best_secs
    }

    /// The case's unit a second; the limit says itself how much it does.
    pub(super) fn rate(&self, who: &str) -> Option<f64> {
        let heard = self.heard.get(who)?;
        Some(heard.amount.unwrap_or(self.amount()) / heard.best_secs?)
    }

    pub(super) fn temp_bytes(&self, who: &str) -> Option<u64> {
        self.heard.get(who)?.temp_bytes
    }

    /// Who failed, and how.
    pub(super) fn errors(&self) -> Vec<(&'static str, &str)> {
        self.heard.iter().filter_map(|(&who, heard)| Some((who, heard.error.as_deref()?))).collect()
    }

    /// How far tallow's results are from those of `who`, as a share of their root mean square;
    /// `None` where there is nothing to compare.
    pub(super) fn off(&self, who: &str) -> Option<f64> {
        let (ours, theirs) = (&self.heard.get("tallow")?.samples, &self.heard.get(who)?.samples);
        let pairs: Vec<(f64, f64)> = ours.iter().copied().zip(theirs.iter().copied()).collect();
        if pairs.is_empty() {
            return None;
        }
        let mean_square = pairs.iter().map(|(_, b)| b * b).sum::<f64>() / pairs.len() as f64;
        // NaN is the farthest of all.
        let off = |(a, b): &(f64, f64)| (a - b).abs();
        let most = pairs.iter().map(off).fold(0.0, |x, y| if y > x || y.is_nan() { y } else { x });
        Some(most / mean_square.sqrt())
    }

    /// The most that results may be apart.
    pub(super) fn tolerance(&self) -> f64 {
        let precision = self.text("precision");
        TOLERANCE.iter().find(|(name, _)| *name == precision).map_or(0.0, |t| t.1)
    }

    pub(super) fn json(&self) -> Value {
        let mut row = self.case.clone();
        row["bench"] = json!("kernels");
        let column = |heard: &Heard| {
            json!({
                "best_secs": heard.best_secs, "median_secs": heard.medians,
                "rate": heard.amount.or(Some(self.amount())).zip(heard.best_secs).map(|(a, s)| a / s),
                "temp_bytes": heard.temp_bytes, "absent": heard.absent, "error": heard.error,
            })
        };
        let columns: Map<String, Value> =
            self.heard.iter().map(|(who, heard)| (who.to_string(), column(heard))).collect();
        row["columns"] = Value::Object(columns);
        row["off"] = json!({
            "torch": self.off("torch"), "candle": self.off("candle"), "gemm": self.off("gemm"),
        });
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(answers: &[(&'static str, Value)]) -> Row {
        let case =
            json!({"name": "f32 x", "precision": "f32", "unit": "flop", "amount": 100, "count": 2});
        let mut row = Row::new(case);
        answers.iter().for_each(|(who, answer)| row.hear(who, answer.clone()));
        row
    }

    #[test]
    fn the_fastest_round_counts() {
        let answer = |secs: f64| json!({"best_secs": secs, "median_secs": 2.0 * secs});
        let row = row(&[("tallow", answer(2.0)), ("tallow", answer(1.0)), ("tallow", answer(4.0))]);
        assert_eq!((row.secs("tallow"), row.rate("tallow")), (Some(1.0), Some(100.0)));
        assert_eq!(row.rate("candle"), None);
        assert_eq!(row.json()["columns"]["tallow"]["median_secs"], json!([4.0, 2.0, 8.0]));
    }

    #[test]
    fn a_limit_says_how_much_it_did() {
        let row = row(&[("limit", json!({"best_secs": 0.5, "amount": 7}))]);
        assert_eq!(row.rate("limit"), Some(14.0));
    }

    #[test]
    fn results_are_compared_where_they_are_farthest() {
        let samples = |x: &[Option<f64>]| json!({"samples": x});
        let ours = samples(&[Some(1.0), Some(-1.0), Some(1.5)]);
        let theirs = samples(&[Some(1.0), Some(-1.0), Some(1.0), Some(9.0)]);
        let row = row(&[("tallow", ours), ("torch", theirs.clone())]);
        assert_eq!((row.off("torch"), row.off("gemm")), (Some(0.5), None));
        let broken = self::row(&[("tallow", samples(&[None, Some(-1.0)])), ("torch", theirs)]);
        assert!(broken.off("torch").is_some_and(f64::is_nan));
    }

    #[test]
    fn a_column_that_fails_once_has_failed() {
        let fine = json!({"best_secs": 1.0});
        let row = row(&[
            ("candle", json!({"error": "no"})),
            ("candle", fine),
            ("tallow", json!({"absent": "x"})),
        ]);
        assert_eq!(row.errors(), [("candle", "no")]);
    }
}

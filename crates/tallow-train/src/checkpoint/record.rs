//! Numbers and words under names, as lines of text: every bit comes back.

use std::{collections::BTreeMap, fmt::Write, str::FromStr};
use tallow_data::Cursor;
use tallow_precision::{DynamicScale, LossScaleState, Rule, Skip, Skips, Window};

const SKIPS: [Skip; 4] = [Skip::Overflow, Skip::NormLimit, Skip::Empty, Skip::Other];

/// `name value` lines, sorted by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Record(BTreeMap<String, String>);

/// A line that is missing or says nothing of its kind.
#[derive(Debug, PartialEq)]
pub(super) struct Unreadable(pub(super) String);

impl Record {
    pub(super) fn parse(text: &str) -> Result<Self, Unreadable> {
        let pair = |line: &str| {
            let (name, value) = line.split_once(' ').ok_or_else(|| Unreadable(line.to_string()))?;
            Ok((name.to_string(), value.to_string()))
        };
        Ok(Self(text.lines().map(pair).collect::<Result<_, _>>()?))
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.0 {
            let _ = writeln!(text, "{name} {value}"); // a string takes all
        }
        text
    }

    /// Integers, booleans and floats; of these `{:?}` prints the shortest that reads back the same.
    pub(super) fn put(&mut self, name: &str, value: impl std::fmt::Debug) {
        self.0.insert(name.to_string(), format!("{value:?}"));
    }

    pub(super) fn get<T: FromStr>(&self, name: &str) -> Result<T, Unreadable> {
        let value = self.0.get(name).and_then(|value| value.parse().ok());
        value.ok_or_else(|| Unreadable(name.to_string()))
    }

    /// What was put as an `Option`: no line is `None`.
    pub(super) fn find<T: FromStr>(&self, name: &str) -> Result<Option<T>, Unreadable> {
        self.0.contains_key(name).then(|| self.get(name)).transpose()
    }

    pub(super) fn put_cursor(&mut self, cursor: Cursor) {
        let Cursor { epoch, position, within, skipped } = cursor;
        self.put("cursor.epoch", epoch);
        self.put("cursor.position", position);
        self.put("cursor.within", within);
        self.put("cursor.skipped", skipped);
    }

    pub(super) fn cursor(&self) -> Result<Cursor, Unreadable> {
        Ok(Cursor {
            epoch: self.get("cursor.epoch")?,
            position: self.get("cursor.position")?,
            within: self.get("cursor.within")?,
            skipped: self.get("cursor.skipped")?,
        })
    }

    pub(super) fn put_scale(&mut self, state: LossScaleState) {
        match state.rule {
            Rule::Fixed { scale, max_consecutive_skips } => {
                self.put("scale.fixed", scale);
                self.put("scale.max_consecutive_skips", max_consecutive_skips);
            }
            Rule::Dynamic(rule) => {
                self.put("scale.init", rule.init);
                self.put("scale.growth", rule.growth);
                self.put("scale.backoff", rule.backoff);
                self.put("scale.growth_windows", rule.growth_windows);
                self.put("scale.floor", rule.floor);
                self.put("scale.ceiling", rule.ceiling);
                self.put("scale.hysteresis", rule.hysteresis);
                self.put("scale.max_consecutive_skips", rule.max_consecutive_skips);
            }
        }
        self.put("scale.value", state.scale);
        self.put("scale.clean_windows", state.clean_windows);
        self.put("scale.hysteresis_left", state.hysteresis_left);
        self.put("scale.consecutive_skips", state.consecutive_skips);
        self.put("scale.n_windows", state.n_windows);
        self.put("scale.open", state.open);
        if let Some(Window { old_scale, new_scale, skipped }) = state.last {
            self.put("scale.last.old", old_scale);
            self.put("scale.last.new", new_scale);
            if let Some(reason) = skipped {
                self.put("scale.last.skipped", reason);
            }
        }
        self.put("scale.skips.overflow", state.skips.overflow);
        self.put("scale.skips.norm_limit", state.skips.norm_limit);
        self.put("scale.skips.empty", state.skips.empty);
        self.put("scale.skips.other", state.skips.other);
    }

    pub(super) fn scale(&self) -> Result<LossScaleState, Unreadable> {
        let max_consecutive_skips = self.get("scale.max_consecutive_skips")?;
        let rule = match self.find("scale.fixed")? {
            Some(scale) => Rule::Fixed { scale, max_consecutive_skips },
            None => Rule::Dynamic(DynamicScale {
                init: self.get("scale.init")?,
                growth: self.get("scale.growth")?,
                backoff: self.get("scale.backoff")?,
                growth_windows: self.get("scale.growth_windows")?,
                floor: self.get("scale.floor")?,
                ceiling: self.get("scale.ceiling")?,
                hysteresis: self.get("scale.hysteresis")?,
                max_consecutive_skips,
            }),
        };
        Ok(LossScaleState {
            rule,
            scale: self.get("scale.value")?,
            clean_windows: self.get("scale.clean_windows")?,
            hysteresis_left: self.get("scale.hysteresis_left")?,
            consecutive_skips: self.get("scale.consecutive_skips")?,
            n_windows: self.get("scale.n_windows")?,
            skips: Skips {
                overflow: self.get("scale.skips.overflow")?,
                norm_limit: self.get("scale.skips.norm_limit")?,
                empty: self.get("scale.skips.empty")?,
                other: self.get("scale.skips.other")?,
            },
            open: self.get("scale.open")?,
            last: self.last_window()?,
        })
    }

    fn last_window(&self) -> Result<Option<Window>, Unreadable> {
        let Some(old_scale) = self.find("scale.last.old")? else { return Ok(None) };
        let reason: Option<String> = self.find("scale.last.skipped")?;
        let known = |reason: String| {
            let found = SKIPS.into_iter().find(|skip| format!("{skip:?}") == reason);
            found.ok_or_else(|| Unreadable("scale.last.skipped".to_string()))
        };
        let skipped = reason.map(known).transpose()?;
        Ok(Some(Window { old_scale, new_scale: self.get("scale.last.new")?, skipped }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallow_precision::{LossScale, Verdict};

    #[test]
    fn every_bit_comes_back() {
        let mut dynamic = LossScale::dynamic(DynamicScale::STANDARD).expect("valid");
        let _loss = dynamic.seed();
        let _overflow = dynamic.record(Verdict::Overflow { name: "w".into() }).expect("the first");
        for scale in [dynamic, LossScale::off(), LossScale::fixed(1.0 / 3.0).expect("valid")] {
            let mut record = Record::default();
            record.put_scale(scale.state());
            record.put_cursor(Cursor { epoch: 3, position: u64::MAX, within: 7, skipped: 1 });
            record.put("loss", 0.1f64 + 0.2);
            record.put("none", f64::NAN);
            let back = Record::parse(&record.text()).expect("lines");
            assert_eq!(back, record);
            assert_eq!(back.scale().expect("whole"), scale.state());
            assert_eq!(back.cursor().expect("whole").position, u64::MAX);
            assert_eq!(back.get::<f64>("loss").map(f64::to_bits), Ok((0.1f64 + 0.2).to_bits()));
            assert!(back.get::<f64>("none").expect("a float").is_nan());
        }
    }

    #[test]
    fn what_is_missing_or_no_number_is_named() {
        let record = Record::parse("a 1\nb x\n").expect("lines");
        assert_eq!(record.get::<u64>("a"), Ok(1));
        assert_eq!(record.get::<u64>("b"), Err(Unreadable("b".to_string())));
        assert_eq!(record.get::<u64>("c"), Err(Unreadable("c".to_string())));
        assert_eq!(record.find::<u64>("c"), Ok(None));
        assert_eq!(Record::parse("alone\n"), Err(Unreadable("alone".to_string())));
    }
}

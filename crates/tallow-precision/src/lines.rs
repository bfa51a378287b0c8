//! The state of a loss scale as names and values: every bit comes back.

use crate::{DynamicScale, LossScaleState, Rule, Skip, Skips, Window};
use std::{fmt::Debug, str::FromStr};

const SKIPS: [Skip; 4] = [Skip::Overflow, Skip::NormLimit, Skip::Empty, Skip::Other];

impl LossScaleState {
    /// The state as names and values, for a checkpoint that is text. Of a float the value is the
    /// shortest that reads back the same.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        let mut put = |name, value: &dyn Debug| lines.push((name, format!("{value:?}")));
        match &self.rule {
            Rule::Fixed { scale, max_consecutive_skips } => {
                put("fixed", scale);
                put("max_consecutive_skips", max_consecutive_skips);
            }
            Rule::Dynamic(rule) => {
                put("init", &rule.init);
                put("growth", &rule.growth);
                put("backoff", &rule.backoff);
                put("growth_windows", &rule.growth_windows);
                put("floor", &rule.floor);
                put("ceiling", &rule.ceiling);
                put("hysteresis", &rule.hysteresis);
                put("max_consecutive_skips", &rule.max_consecutive_skips);
            }
        }
        put("value", &self.scale);
        put("clean_windows", &self.clean_windows);
        put("hysteresis_left", &self.hysteresis_left);
        put("consecutive_skips", &self.consecutive_skips);
        put("n_windows", &self.n_windows);
        put("open", &self.open);
        if let Some(Window { old_scale, new_scale, skipped }) = &self.last {
            put("last.old", old_scale);
            put("last.new", new_scale);
            if let Some(reason) = skipped {
                put("last.skipped", reason);
            }
        }
        put("skips.overflow", &self.skips.overflow);
        put("skips.norm_limit", &self.skips.norm_limit);
        put("skips.empty", &self.skips.empty);
        put("skips.other", &self.skips.other);
        lines
    }

    /// The state of which [`LossScaleState::lines`] were; `find` gives the value of a name.
    /// # Errors
    /// The first name that has no value, or one that cannot be read.
    pub fn from_lines<'a>(find: impl Fn(&str) -> Option<&'a str>) -> Result<Self, &'static str> {
        let lines = Lines(find);
        let max_consecutive_skips = lines.get("max_consecutive_skips")?;
        let rule = match lines.find("fixed")? {
            Some(scale) => Rule::Fixed { scale, max_consecutive_skips },
            None => Rule::Dynamic(DynamicScale {
                init: lines.get("init")?,
                growth: lines.get("growth")?,
                backoff: lines.get("backoff")?,
                growth_windows: lines.get("growth_windows")?,
                floor: lines.get("floor")?,
                ceiling: lines.get("ceiling")?,
                hysteresis: lines.get("hysteresis")?,
                max_consecutive_skips,
            }),
        };
        Ok(Self {
            rule,
            scale: lines.get("value")?,
            clean_windows: lines.get("clean_windows")?,
            hysteresis_left: lines.get("hysteresis_left")?,
            consecutive_skips: lines.get("consecutive_skips")?,
            n_windows: lines.get("n_windows")?,
            skips: Skips {
                overflow: lines.get("skips.overflow")?,
                norm_limit: lines.get("skips.norm_limit")?,
                empty: lines.get("skips.empty")?,
                other: lines.get("skips.other")?,
            },
            open: lines.get("open")?,
            last: lines.last_window()?,
        })
    }
}

struct Lines<F>(F);

impl<'a, F: Fn(&str) -> Option<&'a str>> Lines<F> {
    fn get<T: FromStr>(&self, name: &'static str) -> Result<T, &'static str> {
        self.find(name)?.ok_or(name)
    }

    fn find<T: FromStr>(&self, name: &'static str) -> Result<Option<T>, &'static str> {
        self.0(name).map(|value| value.parse().map_err(|_| name)).transpose()
    }

    fn last_window(&self) -> Result<Option<Window>, &'static str> {
        let Some(old_scale) = self.find("last.old")? else { return Ok(None) };
        let known = |reason: &str| {
            let found = SKIPS.into_iter().find(|skip| format!("{skip:?}") == reason);
            found.ok_or("last.skipped")
        };
        let skipped = self.0("last.skipped").map(known).transpose()?;
        Ok(Some(Window { old_scale, new_scale: self.get("last.new")?, skipped }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LossScale, Verdict};
    use std::collections::BTreeMap;

    #[test]
    fn every_bit_comes_back() {
        let mut dynamic = LossScale::dynamic(DynamicScale::STANDARD).expect("valid");
        let _loss = dynamic.seed();
        let _overflow = dynamic.record(Verdict::Overflow { name: "w".into() }).expect("the first");
        for scale in [dynamic, LossScale::off(), LossScale::fixed(1.0 / 3.0).expect("valid")] {
            let state = scale.state();
            let lines: BTreeMap<_, _> = state.lines().into_iter().collect();
            let find = |name: &str| lines.get(name).map(String::as_str);
            assert_eq!(LossScaleState::from_lines(find), Ok(state));
        }
    }

    #[test]
    fn what_is_missing_or_no_number_is_named() {
        let lines: BTreeMap<_, _> = LossScale::off().state().lines().into_iter().collect();
        for &missing in lines.keys().filter(|name| **name != "fixed") {
            for instead in [None, Some("x")] {
                let find = |name: &str| match name == missing {
                    true => instead,
                    false => lines.get(name).map(String::as_str),
                };
                assert_eq!(LossScaleState::from_lines(find), Err(missing));
            }
        }
    }
}

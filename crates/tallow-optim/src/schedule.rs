//! Learning rates as a function of how many updates were applied.

use crate::error::ConfigError;
use std::f64::consts::PI;

/// A learning rate for each applied update. A skipped update does not move it, nor does a
/// micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The rate after warm-up.
    pub peak: f64,
    /// Updates that rise to the peak: `peak (k + 1) / (warmup_updates + 1)`. 0 for none.
    pub warmup_updates: u64,
    /// What follows.
    pub shape: Shape,
}

/// What follows the warm-up. `total_updates` counts it in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// The peak for ever.
    Constant,
    /// In a straight line to `end`, which update `total_updates` (the first one too many) would have.
    Linear {
        /// All updates of the run.
        total_updates: u64,
        /// The rate from there on.
        end: f64,
    },
    /// Half a cosine to `end`, reached as by [`Shape::Linear`].
    Cosine {
        /// All updates of the run.
        total_updates: u64,
        /// The rate from there on.
        end: f64,
    },
    /// Times `factor` after every `every_updates` updates.
    Step {
        /// Updates between two changes.
        every_updates: u64,
        /// What the rate is multiplied by.
        factor: f64,
    },
}

impl Schedule {
    /// Checks the numbers.
    /// # Errors
    /// If a rate is negative or not finite, or a count leaves no update to what follows the warm-up.
    pub fn check(&self) -> Result<(), ConfigError> {
        let not = |setting: &str, value, allowed| {
            Err(ConfigError::Setting { setting: setting.into(), value, allowed })
        };
        let positive = |x: f64| x.is_finite() && x >= 0.0;
        if !positive(self.peak) {
            return not("schedule: peak", self.peak, "finite and at least 0");
        }
        match self.shape {
            Shape::Linear { end, .. } | Shape::Cosine { end, .. } if !positive(end) => {
                not("schedule: end", end, "finite and at least 0")
            }
            Shape::Linear { total_updates, .. } | Shape::Cosine { total_updates, .. }
                if total_updates <= self.warmup_updates =>
            {
                not("schedule: total_updates", total_updates as f64, "more than warmup_updates")
            }
            Shape::Step { every_updates: 0, .. } => {
                not("schedule: every_updates", 0.0, "at least 1")
            }
            Shape::Step { factor, .. } if !positive(factor) => {
                not("schedule: factor", factor, "finite and at least 0")
            }
            _ => Ok(()),
        }
    }

    /// The rate of the update that `k` applied updates precede.
    pub fn rate(&self, k: u64) -> f64 {
        if k < self.warmup_updates {
            return self.peak * (k + 1) as f64 / (self.warmup_updates as f64 + 1.0);
        }
        let after = k - self.warmup_updates;
        // What is left of the way, 1 at the peak.
        let left = |total_updates: u64| {
            let n = total_updates.saturating_sub(self.warmup_updates);
            if after >= n { 0.0 } else { (n - after) as f64 / n as f64 }
        };
        match self.shape {
            Shape::Constant => self.peak,
            Shape::Linear { total_updates, end } => end + (self.peak - end) * left(total_updates),
            Shape::Cosine { total_updates, end } => {
                let done = 1.0 - left(total_updates);
                end + (self.peak - end) * 0.5 * (1.0 + (PI * done).cos())
            }
            Shape::Step { every_updates, factor } => {
                self.peak * factor.powf((after / every_updates.max(1)) as f64)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(warmup_updates: u64, shape: Shape) -> Schedule {
        let schedule = Schedule { peak: 1.0, warmup_updates, shape };
        schedule.check().expect("the numbers are sound");
        schedule
    }

    #[test]
    fn acc_3_nine_updates_in_a_line() {
        let line = schedule(0, Shape::Linear { total_updates: 9, end: 0.0 });
        for k in 0..9 {
            assert_eq!(line.rate(k), (9 - k) as f64 / 9.0, "{k}");
        }
        assert_eq!((line.rate(9), line.rate(u64::MAX)), (0.0, 0.0));
    }

    #[test]
    fn warm_up_rises_to_the_peak_and_never_is_zero() {
        let line = schedule(3, Shape::Linear { total_updates: 7, end: 0.0 });
        let rates: Vec<f64> = (0..8).map(|k| line.rate(k)).collect();
        assert_eq!(rates, [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]);
        let flat = schedule(1, Shape::Constant);
        assert_eq!([0, 1, 2, 99].map(|k| flat.rate(k)), [0.5, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn cosine_and_step() {
        let cosine = schedule(0, Shape::Cosine { total_updates: 4, end: 0.5 });
        let eighth = 0.5 + 0.25 * (1.0 + (PI / 4.0).cos());
        for (k, want) in [(0, 1.0), (1, eighth), (2, 0.75), (4, 0.5), (100, 0.5)] {
            assert!((cosine.rate(k) - want).abs() <= f64::EPSILON, "{k}: {}", cosine.rate(k));
        }
        let step = schedule(1, Shape::Step { every_updates: 2, factor: 0.5 });
        assert_eq!([0, 1, 2, 3, 4, 5].map(|k| step.rate(k)), [0.5, 1.0, 1.0, 0.5, 0.5, 0.25]);
    }

    #[test]
    fn bad_numbers_are_named() {
        let bad = |peak, warmup_updates, shape| {
            Schedule { peak, warmup_updates, shape }.check().unwrap_err().to_string()
        };
        assert!(bad(f64::NAN, 0, Shape::Constant).contains("peak is NaN"));
        let line = Shape::Linear { total_updates: 3, end: 0.0 };
        assert!(bad(1.0, 3, line).contains("total_updates is 3"));
        let step = Shape::Step { every_updates: 0, factor: 0.5 };
        assert!(bad(1.0, 0, step).contains("every_updates is 0"));
    }
}

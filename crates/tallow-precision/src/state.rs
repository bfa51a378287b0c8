//! What a loss scale is made of: its rule, its counters, and how they move. Plain values.

use crate::{Error, Result};

/// How a loss scale follows the gradients.
///
/// All of `floor`, `init` and `ceiling` are positive, in this order, and `f32` holds their inverses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicScale {
    /// The first scale.
    pub init: f32,
    /// Factor of growth, more than 1.
    pub growth: f32,
    /// Factor after an overflow, between 0 and 1.
    pub backoff: f32,
    /// Clean windows in a row before the scale grows, at least 1.
    pub growth_windows: u32,
    /// The scale never falls below it. May be below 1: some models need that.
    pub floor: f32,
    /// The scale never grows above it.
    pub ceiling: f32,
    /// The overflow that first lowers the scale: 1 is the first, 2 the second. Refilled when
    /// `growth_windows` windows in a row were clean.
    pub hysteresis: u32,
    /// Windows in a row that may overflow before the run fails, at least 1.
    pub max_consecutive_skips: u32,
}

impl DynamicScale {
    /// 2^16, doubled after 2000 clean windows, halved at each overflow, within 2^-24 and 2^24.
    pub const STANDARD: Self = Self {
        init: 65536.0,
        growth: 2.0,
        backoff: 0.5,
        growth_windows: 2000,
        floor: 1.0 / 16_777_216.0,
        ceiling: 16_777_216.0,
        hysteresis: 1,
        max_consecutive_skips: Rule::MAX_CONSECUTIVE_SKIPS,
    };
}

/// Which loss scale a run has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Always the same.
    Fixed {
        /// The scale; 1 is off.
        scale: f32,
        /// Windows in a row that may overflow before the run fails, at least 1.
        max_consecutive_skips: u32,
    },
    /// Follows what the gradients bear.
    Dynamic(DynamicScale),
}

/// Why a window was not applied.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// A gradient was infinite or NaN.
    Overflow,
    /// The norm of the gradients was over the caller's limit.
    NormLimit,
    /// The window had no weight: nothing to learn from.
    Empty,
    /// The caller's own reason.
    Other,
}

/// Windows skipped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skips {
    /// A gradient was infinite or NaN.
    pub overflow: u64,
    /// The norm of the gradients was over the caller's limit.
    pub norm_limit: u64,
    /// The window had no weight.
    pub empty: u64,
    /// The caller's own reasons.
    pub other: u64,
}

/// What became of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// The scale of its losses.
    pub old_scale: f32,
    /// The scale after it.
    pub new_scale: f32,
    /// Why it was not applied; `None` if it was.
    pub skipped: Option<Skip>,
}

/// Everything a loss scale knows: save it with a checkpoint, and [`crate::LossScale::from_state`]
/// goes on as if nothing had happened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaleState {
    /// The rule.
    pub rule: Rule,
    /// The scale.
    pub scale: f32,
    /// Clean windows since the scale last changed or a window overflowed.
    pub clean_windows: u32,
    /// The overflow, counted from the next one, that lowers the scale: 1 is the next.
    pub hysteresis_left: u32,
    /// Overflows since the newest clean window.
    pub consecutive_skips: u32,
    /// Windows closed.
    pub n_windows: u64,
    /// Windows skipped.
    pub skips: Skips,
    /// Whether a loss was scaled since the last window closed.
    pub open: bool,
    /// The newest closed window.
    pub last: Option<Window>,
}

impl Rule {
    /// Overflows in a row that fail a run unless its rule says otherwise.
    pub const MAX_CONSECUTIVE_SKIPS: u32 = 50;

    /// `Err` if a number is out of its range.
    pub(crate) fn check(&self) -> Result<()> {
        match *self {
            Rule::Fixed { scale, max_consecutive_skips } => {
                check_scale("the loss scale", scale)?;
                at_least_1("max_consecutive_skips", max_consecutive_skips)
            }
            Rule::Dynamic(config) => {
                check_scale("floor of the loss scale", config.floor)?;
                check_scale("ceiling of the loss scale", config.ceiling)?;
                if config.floor > config.ceiling {
                    let expected = format!("at most the ceiling, {}", config.ceiling);
                    return Err(out_of_range("floor of the loss scale", config.floor, &expected));
                }
                self.check_within("initial loss scale", config.init)?;
                if !(config.growth > 1.0 && config.growth.is_finite()) {
                    return Err(out_of_range("growth of the loss scale", config.growth, "over 1"));
                }
                if !(config.backoff > 0.0 && config.backoff < 1.0) {
                    let expected = "between 0 and 1";
                    return Err(out_of_range(
                        "backoff of the loss scale",
                        config.backoff,
                        expected,
                    ));
                }
                at_least_1("growth_windows", config.growth_windows)?;
                at_least_1("hysteresis", config.hysteresis)?;
                at_least_1("max_consecutive_skips", config.max_consecutive_skips)
            }
        }
    }

    /// `Err` if this rule can never have the scale `scale`.
    fn check_within(&self, setting: &'static str, scale: f32) -> Result<()> {
        let (floor, ceiling) = match *self {
            Rule::Fixed { scale, .. } => (scale, scale),
            Rule::Dynamic(config) => (config.floor, config.ceiling),
        };
        if (floor..=ceiling).contains(&scale) {
            return Ok(());
        }
        Err(out_of_range(setting, scale, &format!("within {floor} and {ceiling}")))
    }

    pub(crate) fn is_same_kind(&self, other: &Rule) -> bool {
        match (self, other) {
            (Rule::Fixed { scale, .. }, Rule::Fixed { scale: other, .. }) => scale == other,
            (Rule::Dynamic(_), Rule::Dynamic(_)) => true,
            _ => false,
        }
    }

    pub(crate) fn hysteresis(&self) -> u32 {
        match self {
            Rule::Fixed { .. } => 1,
            Rule::Dynamic(config) => config.hysteresis,
        }
    }

    pub(crate) fn max_consecutive_skips(&self) -> u32 {
        match *self {
            Rule::Fixed { max_consecutive_skips, .. } => max_consecutive_skips,
            Rule::Dynamic(config) => config.max_consecutive_skips,
        }
    }
}

impl Skips {
    /// Windows skipped for any reason.
    pub fn total(&self) -> u64 {
        self.overflow + self.norm_limit + self.empty + self.other
    }

    pub(crate) fn count(&mut self, reason: Skip) {
        *match reason {
            Skip::Overflow => &mut self.overflow,
            Skip::NormLimit => &mut self.norm_limit,
            Skip::Empty => &mut self.empty,
            Skip::Other => &mut self.other,
        } += 1;
    }
}

impl LossScaleState {
    /// The state before the first window.
    pub(crate) fn start(rule: Rule) -> Self {
        let scale = match rule {
            Rule::Fixed { scale, .. } => scale,
            Rule::Dynamic(config) => config.init,
        };
        Self {
            rule,
            scale,
            clean_windows: 0,
            hysteresis_left: rule.hysteresis(),
            consecutive_skips: 0,
            n_windows: 0,
            skips: Skips::default(),
            open: false,
            last: None,
        }
    }

    /// `Err` if no run can have come to this state.
    pub(crate) fn check(&self) -> Result<()> {
        self.rule.check()?;
        self.rule.check_within("saved loss scale", self.scale)?;
        at_least_1("hysteresis_left", self.hysteresis_left)
    }

    /// The gradients of a window were finite.
    pub(crate) fn clean(&mut self) {
        self.consecutive_skips = 0;
        self.clean_windows = self.clean_windows.saturating_add(1);
        let Rule::Dynamic(config) = self.rule else { return };
        if self.clean_windows >= config.growth_windows {
            self.scale = (self.scale * config.growth).min(config.ceiling);
            self.clean_windows = 0;
            self.hysteresis_left = config.hysteresis;
        }
    }

    /// A gradient of a window was not finite.
    pub(crate) fn overflowed(&mut self) {
        self.consecutive_skips = self.consecutive_skips.saturating_add(1);
        self.clean_windows = 0;
        let Rule::Dynamic(config) = self.rule else { return };
        if self.hysteresis_left > 1 {
            self.hysteresis_left -= 1;
        } else {
            self.scale = (self.scale * config.backoff).max(config.floor);
        }
    }

    /// The window is over.
    pub(crate) fn close(&mut self, old_scale: f32, skipped: Option<Skip>) {
        self.open = false;
        self.n_windows += 1;
        self.last = Some(Window { old_scale, new_scale: self.scale, skipped });
        if let Some(reason) = skipped {
            self.skips.count(reason);
        }
    }
}

/// A scale multiplies and divides: it and its inverse must be normal numbers.
fn check_scale(setting: &'static str, scale: f32) -> Result<()> {
    if scale > 0.0 && scale.is_normal() && (1.0 / scale).is_normal() {
        return Ok(());
    }
    Err(out_of_range(setting, scale, "positive, and f32 must hold its inverse"))
}

fn at_least_1(setting: &'static str, count: u32) -> Result<()> {
    match count {
        0 => Err(out_of_range(setting, 0.0, "at least 1")),
        _ => Ok(()),
    }
}

fn out_of_range(setting: &'static str, value: f32, expected: &str) -> Error {
    Error::Setting { setting, value: f64::from(value), expected: expected.to_string() }
}

use crate::terms::Terms;
use std::fmt;

/// A point in the space of settings, as the names and values of its knobs.
pub trait Knobs {
    /// Name and value of every knob, in one order for all points of a space.
    fn knobs(&self) -> Vec<(&'static str, String)>;
}

/// The usual knobs, by the caller's labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// What parameters and layers compute in.
    pub precision: String,
    /// Items that go through the model at once.
    pub micro_batch: usize,
    /// Which activations are computed anew in backward.
    pub recompute: String,
    /// How the optimizer keeps its state.
    pub optimizer_state: String,
    /// What lives elsewhere than on the device.
    pub offload: String,
}

impl Knobs for Choice {
    fn knobs(&self) -> Vec<(&'static str, String)> {
        vec![
            ("precision", self.precision.clone()),
            ("micro_batch", self.micro_batch.to_string()),
            ("recompute", self.recompute.clone()),
            ("optimizer_state", self.optimizer_state.clone()),
            ("offload", self.offload.clone()),
        ]
    }
}

/// A choice and what it costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Priced<C> {
    /// Bytes at the peak, by category.
    pub terms: Terms,
    /// Seconds a sample takes. What is negative or not finite counts as slowest.
    pub secs_per_sample: f64,
    /// The settings.
    pub choice: C,
}

impl<C> Priced<C> {
    fn secs(&self) -> f64 {
        let is_time = self.secs_per_sample.is_finite() && self.secs_per_sample >= 0.0;
        if is_time { self.secs_per_sample } else { f64::INFINITY }
    }
}

/// One knob turned away from the first candidate, and what that is worth.
#[derive(Clone, Debug, PartialEq)]
pub struct Saving {
    /// The knob's name.
    pub knob: &'static str,
    /// Its value in the first candidate.
    pub from: String,
    /// The other value.
    pub to: String,
    /// Bytes less.
    pub saved_bytes: u64,
    /// Seconds more for each sample; below 0 if it is faster.
    pub lost_secs_per_sample: f64,
}

impl Saving {
    /// Bytes saved for each second lost: without end where no time is lost.
    fn bytes_per_sec(&self) -> f64 {
        let lost_secs = self.lost_secs_per_sample;
        if lost_secs > 0.0 { self.saved_bytes as f64 / lost_secs } else { f64::INFINITY }
    }
}

impl fmt::Display for Saving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Saving { knob, from, to, saved_bytes, lost_secs_per_sample } = self;
        write!(
            f,
            "{knob} {from} -> {to} saves {saved_bytes} bytes for {lost_secs_per_sample:.2e} s a sample"
        )
    }
}

/// Why [`pick`] has no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NothingFits {
    /// There was nothing to pick from: every choice was forbidden.
    #[error("there are no choices to fit {budget_bytes} bytes")]
    NoCandidates {
        /// The budget.
        budget_bytes: u64,
    },
    /// Every candidate needs more than the budget.
    #[error(
        "nothing fits {budget_bytes} bytes: the smallest needs {smallest_bytes} bytes ({smallest}){}",
        cheapest(.saving)
    )]
    AllAbove {
        /// The budget.
        budget_bytes: u64,
        /// Total of the smallest candidate, the first on a tie.
        smallest_bytes: u64,
        /// Its settings, as `knob=value` with blanks between.
        smallest: String,
        /// The one change to the first candidate that saves the most bytes for each second lost;
        /// `None` if no candidate that differs in one knob is smaller.
        saving: Option<Box<Saving>>,
    },
}

fn cheapest(saving: &Option<Box<Saving>>) -> String {
    saving.as_ref().map_or_else(String::new, |saving| format!("; cheapest change: {saving}"))
}

/// The fastest candidate whose total is at most `budget_bytes`.
///
/// The slice is in the user's order of preference: of equally fast candidates the earlier wins, and
/// the first stands for the default when nothing fits. A larger budget never gives a slower answer.
///
/// # Errors
/// [`NothingFits`], with what is missing and the cheapest change.
pub fn pick<C: Knobs>(
    candidates: &[Priced<C>],
    budget_bytes: u64,
) -> Result<&Priced<C>, NothingFits> {
    let fitting = candidates.iter().filter(|priced| priced.terms.total_bytes() <= budget_bytes);
    // `min_by` keeps the first of equals.
    let fastest = fitting.min_by(|a, b| a.secs().total_cmp(&b.secs()));
    fastest.ok_or_else(|| nothing_fits(candidates, budget_bytes))
}

pub(super) fn nothing_fits<C: Knobs>(candidates: &[Priced<C>], budget_bytes: u64) -> NothingFits {
    let smallest = candidates.iter().min_by_key(|priced| priced.terms.total_bytes());
    let Some(smallest) = smallest else { return NothingFits::NoCandidates { budget_bytes } };
    NothingFits::AllAbove {
        budget_bytes,
        smallest_bytes: smallest.terms.total_bytes(),
        smallest: settings(&smallest.choice),
        saving: cheapest_saving(candidates).map(Box::new),
    }
}

/// `knob=value`, with blanks between.
pub(super) fn settings<C: Knobs>(choice: &C) -> String {
    let knobs = choice.knobs().into_iter();
    knobs.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

fn cheapest_saving<C: Knobs>(candidates: &[Priced<C>]) -> Option<Saving> {
    let (first, others) = candidates.split_first()?;
    let mut best: Option<Saving> = None;
    for saving in others.iter().filter_map(|other| saving(first, other)) {
        let worth = |saving: &Saving| (saving.bytes_per_sec(), saving.saved_bytes);
        if best.as_ref().is_none_or(|best| worth(&saving) > worth(best)) {
            best = Some(saving);
        }
    }
    best
}

/// `None` unless `other` is smaller and one knob away.
fn saving<C: Knobs>(first: &Priced<C>, other: &Priced<C>) -> Option<Saving> {
    let saved_bytes = first.terms.total_bytes().checked_sub(other.terms.total_bytes())?;
    let pairs = first.choice.knobs().into_iter().zip(other.choice.knobs());
    let mut changes = pairs.filter(|(from, to)| from != to);
    let ((knob, from), (_, to)) = changes.next()?;
    // From one unmeasured candidate to another no time is known to be lost: infinity less infinity.
    let lost_secs = other.secs() - first.secs();
    let lost_secs_per_sample = if lost_secs.is_nan() { 0.0 } else { lost_secs };
    let one_change = changes.next().is_none() && saved_bytes > 0;
    one_change.then_some(Saving { knob, from, to, saved_bytes, lost_secs_per_sample })
}

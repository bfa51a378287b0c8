use super::pick::{Knobs, NothingFits, Priced, nothing_fits, pick, settings};
use crate::terms::Terms;
use std::fmt;

/// What was live when memory ran out, and what would have fitted; [`Display`](fmt::Display) is the
/// text for a user, in bytes and without a final line break.
#[derive(Clone, Debug, PartialEq)]
pub struct PostMortem {
    /// What was held at the peak: [`Ledger::at_peak`](crate::Ledger::at_peak), reconciled with the
    /// meter's peak.
    pub at_peak: Terms,
    /// The limit that was hit.
    pub limit_bytes: u64,
    /// The fastest other settings that would have fitted, with their bytes; or why there are none.
    pub remedy: Result<String, NothingFits>,
}

impl PostMortem {
    /// Looks for the remedy in `candidates`, of which the first is what ran.
    ///
    /// If the peak was above the first candidate's price, the plan was wrong by the difference; the
    /// other candidates must fit with that much added.
    pub fn new<C: Knobs>(at_peak: Terms, limit_bytes: u64, candidates: &[Priced<C>]) -> Self {
        let ran_bytes = candidates.first().map_or(u64::MAX, |ran| ran.terms.total_bytes());
        let missed_bytes = at_peak.total_bytes().saturating_sub(ran_bytes);
        let budget_bytes = limit_bytes.saturating_sub(missed_bytes);
        let others = candidates.get(1..).unwrap_or_default();
        let remedy = match pick(others, budget_bytes) {
            Ok(fits) => {
                let (total_bytes, secs) = (fits.terms.total_bytes(), fits.secs_per_sample);
                let settings = settings(&fits.choice);
                Ok(format!("{settings} ({total_bytes} bytes, {secs:.2e} s a sample)"))
            }
            Err(_) => Err(nothing_fits(candidates, budget_bytes)),
        };
        Self { at_peak, limit_bytes, remedy }
    }
}

impl fmt::Display for PostMortem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (peak_bytes, limit_bytes) = (self.at_peak.total_bytes(), self.limit_bytes);
        writeln!(f, "{peak_bytes} bytes were live at the peak, the limit is {limit_bytes}:")?;
        for (category, n_bytes) in self.at_peak.iter().filter(|(_, n_bytes)| *n_bytes > 0) {
            writeln!(f, "  {category:<17} {n_bytes:>20}")?;
        }
        match &self.remedy {
            Ok(settings) => write!(f, "would have fitted: {settings}"),
            Err(nothing) => write!(f, "{nothing}"),
        }
    }
}

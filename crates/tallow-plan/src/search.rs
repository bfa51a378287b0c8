//! The search: what is calibrated, priced, and chosen.

use crate::{Error, Knob, Result, Space, Workload, calibrate::Calibration, price::Price};
use std::fmt;
use tallow_memory::{
    Meter, Terms, peak_during,
    plan::{Choice, Knobs, NothingFits::AllAbove, Priced, pick},
};
use tallow_recompute::Plan;

/// Candidates within this factor of time are about as fast, and the one that turns milder knobs is
/// taken: less is the noise of the calibration.
const ABOUT: f64 = 1.05;

/// One way to train.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Place in [`Space::policies`].
    pub policy: usize,
    /// Place in [`Space::optimizers`].
    pub optimizer: usize,
    /// Samples a micro-batch.
    pub micro_batch: usize,
    /// Which segments keep their activations.
    pub recompute: Plan,
    /// Knobs turned.
    pub knobs: Vec<Knob>,
    /// The same, as words.
    pub choice: Choice,
    /// The peak, by what it is for: its total is what is foreseen.
    pub terms: Terms,
    /// Seconds a sample, less the optimizer's own.
    pub secs_per_sample: f64,
    /// How many times faster than without its knobs it must be to be chosen where it need not.
    pub must_win: f64,
    /// Whether segments were run on micro-batches of this size, or their figures lie on a line.
    pub measured: bool,
}

impl Candidate {
    /// Whether it turns none of these.
    pub fn is_allowed(&self, forbid: &[Knob]) -> bool {
        self.knobs.iter().all(|knob| !forbid.contains(knob))
    }

    /// With its price, for [`pick`].
    pub fn priced(&self) -> Priced<Candidate> {
        let (terms, secs_per_sample) = (self.terms, self.secs_per_sample);
        Priced { terms, secs_per_sample, choice: self.clone() }
    }

    /// The most held at once, as foreseen; 0 where nothing was priced.
    pub fn peak_bytes(&self) -> u64 {
        self.terms.total_bytes()
    }
}

impl Knobs for Candidate {
    fn knobs(&self) -> Vec<(&'static str, String)> {
        self.choice.knobs()
    }
}

/// What the search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Every candidate that was priced, allowed or not, the preferred ones first.
    pub candidates: Vec<Candidate>,
    /// Precisions that were not calibrated because that alone would pass the budget.
    pub untried: Vec<usize>,
    /// Place of the chosen one.
    pub chosen: usize,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq)]
pub struct NothingFits {
    /// The allowed choices.
    pub allowed: tallow_memory::plan::NothingFits,
    /// The forbidden knob that would help at the least cost of time, and the bytes needed with it.
    pub forbidden: Option<(Knob, u64)>,
}

impl fmt::Display for NothingFits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.allowed)?;
        match self.forbidden {
            None => Ok(()),
            Some((knob, bytes)) => {
                write!(f, "; `{}` is forbidden, with it {bytes} would do", knob.name())
            }
        }
    }
}

/// Prices every choice in `space` and takes the fastest that fits `budget_bytes`. A knob that changes
/// the numbers must win some time ([`Space::must_win`]), else the candidate without it is taken.
///
/// *Memory:* one model and one segment's activations at a time.
/// # Errors
/// [`Error::NothingFits`], or what the model says.
pub fn plan<W: Workload>(
    work: &W,
    space: &Space,
    budget_bytes: Option<u64>,
    meter: &dyn Meter,
) -> Result<Found> {
    space.check()?;
    let budget = budget_bytes.unwrap_or(u64::MAX);
    let (mut calibrations, untried) = calibrated(work, space, budget, meter)?;
    loop {
        // Building and calibrating are part of the process too.
        let floor_bytes = calibrations.iter().map(|c| c.peak_bytes).max().unwrap_or(0);
        let before_bytes = meter.current_bytes();
        let (candidates, planning_bytes) =
            peak_during(meter, || priced(work, space, &calibrations, floor_bytes, budget, meter));
        let mut candidates = candidates?;
        for Candidate { terms, .. } in &mut candidates {
            let beyond = (before_bytes + planning_bytes).saturating_sub(terms.total_bytes());
            terms.transient_bytes = terms.transient_bytes.saturating_add(beyond);
        }
        let Ok(chosen) = choose(&candidates, space, budget) else {
            drop((candidates, calibrations));
            return Err(hopeless(work, space, budget, meter)?);
        };
        let Candidate { policy, micro_batch, measured, .. } = candidates[chosen];
        if measured {
            return Ok(Found { candidates, untried, chosen });
        }
        let calibration = calibrations.iter_mut().find(|c| c.policy == policy);
        calibration.expect("a candidate's").refine(work, space, micro_batch, meter)?;
    }
}

/// What would fit, where nothing does: every precision is calibrated for that, beyond the budget.
fn hopeless<W: Workload>(work: &W, space: &Space, budget: u64, meter: &dyn Meter) -> Result<Error> {
    let all = Space { forbid: Vec::new(), ..space.clone() };
    let (calibrations, _) = calibrated(work, &all, u64::MAX, meter)?;
    // A run under the budget that is reported here may leave out all precisions but the narrowest.
    let width = |policy: usize| space.policies[policy].compute.size_in_bytes();
    let open = calibrations.iter().filter(|c| space.is_open(c.policy));
    let narrowest = open.map(|c| (width(c.policy), c.peak_bytes)).min().unwrap_or((0, 0));
    let candidates = priced(work, space, &calibrations, narrowest.1, 0, meter)?;
    let reachable: Vec<Candidate> = candidates
        .iter()
        .filter(|c| space.is_open(c.policy) && width(c.policy) == narrowest.0)
        .cloned()
        .collect();
    let mut error = choose(&reachable, space, 0).expect_err("nothing fits 0 bytes");
    if let Error::NothingFits(nothing) = &mut error
        && let NothingFits { allowed: AllAbove { budget_bytes, smallest_bytes, .. }, forbidden } =
            &mut **nothing
    {
        *budget_bytes = budget;
        // Where it would fit by a hair's breadth, the calibration under the budget has taken that.
        *smallest_bytes = (*smallest_bytes).max(budget + budget / 50);
        // Where recomputation is forbidden, no candidate has any.
        let forbid = space.forbid.iter().copied().filter(|k| *k != Knob::Recompute).collect();
        let free = Space { forbid, ..space.clone() };
        let mut all = priced(work, &free, &calibrations, narrowest.1, 0, meter)?;
        all.extend(candidates);
        *forbidden = helpful(&all, space, budget);
    }
    Ok(error)
}

/// Every choice with its price.
fn priced<W: Workload>(
    work: &W,
    space: &Space,
    calibrations: &[Calibration],
    floor_bytes: u64,
    budget: u64,
    meter: &dyn Meter,
) -> Result<Vec<Candidate>> {
    // Threads and kernels keep scratch once they have run: what is held now is held later too.
    let before_bytes = meter.current_bytes();
    let mut candidates = Vec::new();
    for calibration in calibrations {
        for optimizer in 0..space.optimizers.len() {
            for &micro_batch in &space.micro_batches {
                let price = Price { work, space, calibration, before_bytes, floor_bytes, budget };
                candidates.extend(price.candidate(optimizer, micro_batch)?);
            }
        }
    }
    // The sort is stable: the user's order stays among those that turn the same knobs.
    candidates.sort_by_key(|c| c.knobs.iter().map(|k| 1u32 << space.place(*k)).sum::<u32>());
    Ok(candidates)
}

/// The precisions that can be calibrated within the budget, and the places of those that cannot.
fn calibrated<W: Workload>(
    work: &W,
    space: &Space,
    budget: u64,
    meter: &dyn Meter,
) -> Result<(Vec<Calibration>, Vec<usize>)> {
    let before_bytes = meter.current_bytes();
    let width = |policy: usize| space.policies[policy].compute.size_in_bytes() as u64;
    let mut order: Vec<usize> = (0..space.policies.len()).filter(|p| space.is_open(*p)).collect();
    // What takes least room first: it foretells what the others take.
    order.sort_by_key(|&policy| width(policy));
    let (mut calibrations, mut untried) = (Vec::<Calibration>::new(), Vec::new());
    for policy in order {
        // The first is tried in any case: it says what would fit.
        let foretold = calibrations.first().map_or(0, |c| {
            let held = before_bytes + c.built_bytes;
            held + c.peak_bytes.saturating_sub(held) / width(c.policy) * width(policy)
        });
        if foretold > budget {
            untried.push(policy);
        } else {
            calibrations.push(Calibration::run(work, space, policy, budget, meter)?);
        }
    }
    calibrations.sort_by_key(|calibration| calibration.policy);
    Ok((calibrations, untried))
}

/// Place of the fastest that fits.
fn choose(candidates: &[Candidate], space: &Space, budget: u64) -> Result<usize> {
    match pick(&allowed(candidates, &space.forbid), budget) {
        Ok(picked) => {
            let is_picked = |c: &Candidate| *c == picked.choice;
            Ok(candidates.iter().position(is_picked).expect("it is one of them"))
        }
        Err(allowed) => {
            let forbidden = helpful(candidates, space, budget);
            Err(Error::NothingFits(Box::new(NothingFits { allowed, forbidden })))
        }
    }
}

/// The forbidden knob that, if it were allowed, would make something fit at the least cost of time.
fn helpful(candidates: &[Candidate], space: &Space, budget: u64) -> Option<(Knob, u64)> {
    let with = |&knob: &Knob| {
        let forbid: Vec<Knob> = space.forbid.iter().copied().filter(|k| *k != knob).collect();
        let candidates = allowed(candidates, &forbid);
        let found = pick(&candidates, budget).ok()?;
        Some((knob, found.terms.total_bytes(), found.secs_per_sample))
    };
    let all = space.forbid.iter().filter_map(with);
    all.min_by(|a, b| a.2.total_cmp(&b.2)).map(|(knob, bytes, _)| (knob, bytes))
}

/// Those that turn no forbidden knob, with what knobs must win added to their time, in steps of
/// [`ABOUT`].
fn allowed(candidates: &[Candidate], forbid: &[Knob]) -> Vec<Priced<Candidate>> {
    let steps = |secs: f64| ABOUT.powf((secs.ln() / ABOUT.ln()).round());
    let priced = |c: &Candidate| Priced {
        secs_per_sample: steps(c.secs_per_sample * c.must_win),
        ..c.priced()
    };
    candidates.iter().filter(|c| c.is_allowed(forbid)).map(priced).collect()
}

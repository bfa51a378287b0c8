//! What is to be trained, and what a plan may choose from.

use crate::{Candidate, Error, Result};
use candle_core::DType;
use std::iter::successors;
use tallow_accum::AccumDType;
use tallow_backward::{Built, Gradients};
use tallow_data::Batch;
use tallow_memory::{Terms, plan::Choice};
use tallow_models::Segments;
use tallow_optim::{Algorithm, Config, Place, StateFormat};
use tallow_precision::Policy;
use tallow_recompute::{Plan, Saved, SegmentCost};

/// What is to be trained.
pub trait Workload {
    /// The network.
    type Model: Segments;

    /// Builds it under `policy`.
    /// # Errors
    /// If it cannot be built.
    fn build(&self, policy: &Policy) -> Result<Built<Self::Model>>;

    /// A batch of `n_samples` as the model takes it under `policy`.
    /// # Errors
    /// If there is none.
    fn batch(&self, policy: &Policy, n_samples: usize) -> Result<Batch>;

    /// Bytes of such a batch.
    fn batch_bytes(&self, policy: &Policy, n_samples: usize) -> u64;
}

/// What saves memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Knob {
    /// Segments run again in backward. Changes no bit.
    Recompute,
    /// Optimizer state in a file. Changes no bit.
    Offload,
    /// 8-bit or bf16 moments.
    LowState,
    /// Micro-batches. Changes rounding, and what batch norms see.
    Accumulate,
    /// Computing in bf16.
    Bf16,
}

impl Knob {
    /// All of them; the least harm to the numbers first.
    pub const ALL: [Knob; 5] =
        [Knob::Recompute, Knob::Offload, Knob::LowState, Knob::Accumulate, Knob::Bf16];

    /// How many times faster a candidate must be to turn a knob where it need not, by the knob's
    /// place in the order of preference.
    pub const MUST_WIN: [f64; 5] = [1.0, 1.0, 1.05, 1.15, 1.15];

    /// The same of micro-batches, where batch norms would see less.
    pub const CUT_STATISTICS_MUST_WIN: f64 = 2.0;

    /// And for each time that such micro-batches are cut in two once more.
    pub const CUT_AGAIN_MUST_WIN: f64 = 1.25;

    /// As configurations spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Knob::Recompute => "recompute",
            Knob::Offload => "offload",
            Knob::Accumulate => "accumulate",
            Knob::LowState => "8bit",
            Knob::Bf16 => "bf16",
        }
    }
}

/// How a plan comes to its recomputation.
#[derive(Clone, Debug, PartialEq)]
pub enum Recomputation {
    /// By the planner, for each candidate.
    Planned,
    /// By this rule.
    Rule(tallow_recompute::Policy),
}

/// What a plan may choose from. Each list holds at least one entry, the preferred one first.
///
/// ```
/// # use tallow_plan::{Knob, Space};
/// let space = Space { forbid: vec![Knob::Bf16], ..Space::new(64) };
/// assert_eq!(space.micro_batches, [64, 32, 16, 8, 4, 2, 1]);
/// ```
#[derive(Clone, Debug)]
pub struct Space {
    /// Samples an update.
    pub batch: usize,
    /// Samples a micro-batch, at most `batch`.
    pub micro_batches: Vec<usize>,
    /// Precisions.
    pub policies: Vec<Policy>,
    /// Optimizers, alike but for the format and place of their state.
    pub optimizers: Vec<tallow_optim::Config>,
    /// How segments are recomputed.
    pub recomputation: Recomputation,
    /// How the inputs of recomputed segments wait.
    pub saved: Saved,
    /// What gradients are summed in.
    pub accum: AccumDType,
    /// How gradients reach the optimizer.
    pub gradients: Gradients,
    /// In which order knobs are turned, the first the most readily; those not named follow in the order
    /// of [`Knob::ALL`].
    pub prefer: Vec<Knob>,
    /// What must not be turned.
    pub forbid: Vec<Knob>,
    /// Weight of the uniform distribution in the loss.
    pub label_smoothing: f64,
    /// Whether an average of the weights is kept.
    pub has_average: bool,
}

impl Space {
    /// All that is planned where nobody says otherwise: batches of `batch` samples, cut in halves again
    /// and again; f32 and bf16; AdamW at 1e-3 with its state in f32 or 8 bits; recomputation as planned.
    pub fn new(batch: usize) -> Self {
        let halves = |n: &usize| (*n > 1).then(|| n.div_ceil(2));
        let adamw =
            |format| Config { format, weight_decay: 0.01, ..Config::new(Algorithm::ADAMW, 1e-3) };
        Self {
            batch,
            micro_batches: successors(Some(batch), halves).collect(),
            policies: vec![Policy::f32(), Policy::bf16()],
            optimizers: vec![adamw(StateFormat::F32), adamw(StateFormat::BITS8)],
            recomputation: Recomputation::Planned,
            saved: Saved::AsIs,
            accum: AccumDType::F32,
            gradients: Gradients::Summed,
            prefer: Vec::new(),
            forbid: Vec::new(),
            label_smoothing: 0.0,
            has_average: false,
        }
    }

    /// That there is something to choose from.
    pub(crate) fn check(&self) -> Result<()> {
        let shortest = [self.micro_batches.len(), self.policies.len(), self.optimizers.len()];
        let smallest = self.micro_batches.iter().copied().min().unwrap_or(0);
        for (name, value) in [
            ("batch", self.batch),
            ("micro_batch", smallest),
            ("choices", shortest.into_iter().min().unwrap_or(0)),
        ] {
            if value == 0 {
                return Err(Error::Setting { name, value: 0.0, expected: "1 or more" });
            }
        }
        Ok(())
    }

    /// How many times faster `knobs` must make a candidate where they need not be turned. Batch norms
    /// see a micro-batch and not the batch: of a model that has any, `has_statistics`, the batch is
    /// cut, and cut in two again, where that is needed, or for a gain that nobody would leave, or
    /// where the user prefers it.
    pub fn must_win(&self, knobs: &[Knob], micro_batch: usize, has_statistics: bool) -> f64 {
        let is_preferred = self.prefer.contains(&Knob::Accumulate);
        let n_cuts = (self.batch as f64 / micro_batch.max(1) as f64).log2().max(1.0);
        let again = Knob::CUT_AGAIN_MUST_WIN.powf(n_cuts - 1.0);
        let of = |knob: &Knob| match knob {
            Knob::Accumulate if has_statistics && !is_preferred => {
                Knob::CUT_STATISTICS_MUST_WIN * again
            }
            knob => Knob::MUST_WIN[self.place(*knob)],
        };
        knobs.iter().map(of).product()
    }

    /// The place of a knob in the order of preference.
    pub(crate) fn place(&self, knob: Knob) -> usize {
        let prefer = &self.prefer;
        prefer.iter().position(|k| *k == knob).unwrap_or_else(|| {
            let rest = Knob::ALL.iter().filter(|k| !prefer.contains(k));
            prefer.len() + rest.take_while(|k| **k != knob).count()
        })
    }

    /// Whether the choice depends on what segments cost.
    pub fn needs_costs(&self) -> bool {
        matches!(
            self.recomputation,
            Recomputation::Planned | Recomputation::Rule(tallow_recompute::Policy::Bytes(_))
        )
    }

    /// The preferred choice of everything, unpriced: for a run without a budget. `names` are the
    /// segments', the head's last.
    /// # Errors
    /// If the recomputation depends on costs.
    pub fn unplanned(&self, names: &[String]) -> Result<Candidate> {
        self.check()?;
        let costs: Vec<_> = names.iter().map(SegmentCost::unmeasured).collect();
        let recompute = match &self.recomputation {
            Recomputation::Rule(rule) if !self.needs_costs() => rule.plan(&costs)?,
            _ => {
                let (name, expected) = ("recompute", "a rule without costs");
                return Err(Error::Setting { name, value: f64::NAN, expected });
            }
        };
        Ok(self.chosen((0, 0, self.micro_batches[0]), recompute, 0))
    }

    /// The choice of an earlier plan over this space: places of policy and optimizer, samples a
    /// micro-batch, and its peak, 0 if that was not foreseen.
    /// # Panics
    /// If there is no such policy or optimizer.
    pub fn chosen(
        &self,
        (policy, optimizer, micro_batch): (usize, usize, usize),
        recompute: Plan,
        peak_bytes: u64,
    ) -> Candidate {
        Candidate {
            policy,
            optimizer,
            micro_batch,
            choice: self.choice(policy, optimizer, micro_batch, &recompute),
            recompute,
            knobs: Vec::new(),
            terms: Terms { other_bytes: peak_bytes, ..Terms::ZERO },
            secs_per_sample: f64::NAN,
            must_win: 1.0,
            measured: false,
        }
    }

    /// Whether a precision is allowed: of several, a narrow one may be forbidden.
    pub(crate) fn is_open(&self, policy: usize) -> bool {
        let is_narrow = self.policies[policy].compute != DType::F32;
        !(is_narrow && self.policies.len() > 1 && self.forbid.contains(&Knob::Bf16))
    }

    /// A choice in words.
    pub(crate) fn choice(
        &self,
        policy: usize,
        optimizer: usize,
        micro_batch: usize,
        recompute: &Plan,
    ) -> Choice {
        let Config { format, place, .. } = &self.optimizers[optimizer];
        let recomputed = match recompute.n_redone() {
            0 => "none".to_string(),
            n => format!("{n} of {} segments", recompute.n_segments()),
        };
        Choice {
            precision: self.policies[policy].compute.as_str().to_string(),
            micro_batch,
            recompute: recomputed,
            optimizer_state: match format {
                StateFormat::F32 => "f32".to_string(),
                StateFormat::Bf16(_) => "bf16".to_string(),
                StateFormat::Bits8 { .. } => "8bit".to_string(),
            },
            offload: if *place == Place::Ram { "none" } else { "state in a file" }.to_string(),
        }
    }

    /// What a choice turns; what the user has fixed is no knob.
    pub(crate) fn knobs(
        &self,
        policy: usize,
        optimizer: usize,
        micro_batch: usize,
        recompute: &Plan,
    ) -> Vec<Knob> {
        let Config { format, place, .. } = &self.optimizers[optimizer];
        let [places, formats] = [
            self.optimizers.iter().any(|o| (o.place == Place::Ram) != (*place == Place::Ram)),
            self.optimizers.iter().any(|o| o.format != *format),
        ];
        let is_planned = self.recomputation == Recomputation::Planned;
        let is_narrow = self.policies[policy].compute != DType::F32;
        let turned = [
            (Knob::Recompute, recompute.n_redone() > 0 && is_planned),
            (Knob::Offload, *place != Place::Ram && places),
            (Knob::Accumulate, micro_batch < self.batch && self.micro_batches.len() > 1),
            (Knob::LowState, *format != StateFormat::F32 && formats),
            (Knob::Bf16, is_narrow && self.policies.len() > 1),
        ];
        turned.into_iter().filter(|(_, turned)| *turned).map(|(knob, _)| knob).collect()
    }
}

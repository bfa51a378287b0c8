//! Puts a price on a choice.

use crate::{Candidate, Knob, Recomputation, Result, Space, Workload, calibrate::Calibration};
use tallow_memory::Terms;
use tallow_optim::Place;
use tallow_recompute::{Plan, SegmentCost, plan_chain, simulate_saved};

/// Bytes a second that a state file is taken to move.
const FILE_BYTES_PER_SEC: f64 = 1e9;

/// Bytes a second at which a micro-batch's gradients are taken to be added to their sums.
const SUM_BYTES_PER_SEC: f64 = 8e9;

/// Share of its activations that a micro-batch may need beyond the line, for each doubling of what
/// ran: kernels' scratch grows in steps.
const BEYOND_LINE: f64 = 0.03;

/// For names, lists and whatever else is of a few bytes, beside `bytes` that are foreseen.
pub(crate) const fn allowance_bytes(bytes: u64) -> u64 {
    (64 << 10) + bytes / 200
}

/// All that a price depends on but the choice.
pub(crate) struct Price<'a, W> {
    pub(crate) work: &'a W,
    pub(crate) space: &'a Space,
    pub(crate) calibration: &'a Calibration,
    /// Held when no model is.
    pub(crate) before_bytes: u64,
    /// The most that was held so far.
    pub(crate) floor_bytes: u64,
    pub(crate) budget: u64,
}

impl<W: Workload> Price<'_, W> {
    /// The choice of `optimizer` and `micro_batch` with the fastest recomputation that fits, or the
    /// smallest if none does; `None` if nothing is known of such micro-batches.
    pub(crate) fn candidate(
        &self,
        optimizer: usize,
        micro_batch: usize,
    ) -> Result<Option<Candidate>> {
        let (space, found, policy) = (self.space, self.calibration, self.calibration.policy);
        let last_piece = space.batch % micro_batch;
        if last_piece > 0 && last_piece < found.smallest() {
            return Ok(None);
        }
        let Some((costs, doublings)) = found.costs_at(micro_batch) else { return Ok(None) };
        let (state_bytes, resident_bytes) = found.state_bytes[optimizer];
        let held = Terms {
            weights_bytes: found.built_bytes + found.average_bytes,
            accumulators_bytes: found.accum_bytes,
            optimizer_state_bytes: resident_bytes,
            data_bytes: self.work.batch_bytes(&space.policies[policy], space.batch),
            other_bytes: self.before_bytes + found.beside_bytes,
            ..Terms::ZERO
        };
        let left = self.budget.saturating_sub(held.total_bytes());
        let left = left.saturating_sub(allowance_bytes(self.budget.min(1 << 50)));
        let recompute = match &space.recomputation {
            Recomputation::Rule(rule) => rule.plan(&costs)?,
            Recomputation::Planned if space.forbid.contains(&Knob::Recompute) => {
                Plan::keep_all(costs.len())
            }
            Recomputation::Planned => planned(&costs, left)?,
        };
        let simulated = simulate_saved(&costs, &recompute, &space.saved)?;
        let mut terms = Terms {
            saved_activations_bytes: simulated.saved_bytes,
            transient_bytes: simulated.peak_bytes.saturating_sub(simulated.saved_bytes),
            ..held
        };
        terms.other_bytes = terms.other_bytes.saturating_add(allowance_bytes(terms.total_bytes()));
        // It will be run before it is chosen, and that must fit.
        let doubt = BEYOND_LINE * doublings * terms.total_bytes() as f64;
        terms.transient_bytes = terms.transient_bytes.saturating_add(doubt.ceil() as u64);
        terms.transient_bytes += self.floor_bytes.saturating_sub(terms.total_bytes());
        let n_micro_batches = space.batch.div_ceil(micro_batch) as f64;
        let is_file = space.optimizers[optimizer].place != Place::Ram;
        let moved_bytes = if is_file { 2.0 * state_bytes as f64 } else { 0.0 };
        let of_micro_batch =
            simulated.secs + summed_bytes(&costs, found.accum_bytes) / SUM_BYTES_PER_SEC;
        let secs = n_micro_batches * of_micro_batch + moved_bytes / FILE_BYTES_PER_SEC;
        let knobs = space.knobs(policy, optimizer, micro_batch, &recompute);
        Ok(Some(Candidate {
            policy,
            optimizer,
            micro_batch,
            must_win: space.must_win(&knobs, micro_batch, found.beside_bytes > 0),
            knobs,
            choice: space.choice(policy, optimizer, micro_batch, &recompute),
            recompute,
            terms,
            secs_per_sample: secs / space.batch as f64,
            measured: doublings == 0.0,
        }))
    }
}

/// What moves when the gradients of a micro-batch are added to sums of `accum_bytes`, 0 where there are none:
/// gradients narrower than the sums are widened first.
fn summed_bytes(costs: &[SegmentCost], accum_bytes: u64) -> f64 {
    let given: u64 = costs.iter().map(|cost| cost.param_grad_bytes).sum();
    let widened = if given < accum_bytes { 2 * accum_bytes } else { 0 };
    if accum_bytes == 0 { 0.0 } else { (given + widened + 2 * accum_bytes) as f64 }
}

/// The fastest plan within `left_bytes`, or else the smallest there is.
fn planned(costs: &[SegmentCost], left_bytes: u64) -> Result<Plan> {
    match plan_chain(costs, left_bytes) {
        Ok(planned) => Ok(planned.plan),
        Err(tallow_recompute::Error::NothingFits { smallest_bytes, .. }) => {
            Ok(plan_chain(costs, smallest_bytes)?.plan)
        }
        Err(error) => Err(error.into()),
    }
}

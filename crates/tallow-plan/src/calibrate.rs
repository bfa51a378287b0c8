//! What a precision's model takes: counted and timed.

use crate::{Result, Space, Workload};
use candle_core::Var;
use std::cell::RefCell;
use tallow_accum::accumulator_bytes;
use tallow_backward::{Gradients, Network, Passes, bytes_of};
use tallow_memory::{Meter, Scope, peak_during};
use tallow_models::Segments;
use tallow_precision::Policy;
use tallow_recompute::{Bytes, Check, Plan, Saved, SegmentCost};
use tallow_tensor::pass;

/// How far a size between two that ran counts as.
const BETWEEN_DOUBLINGS: f64 = 0.5;

/// Figures of one precision.
pub(crate) struct Calibration {
    /// Place in [`Space::policies`].
    pub(crate) policy: usize,
    /// Parameters, copies, statistics.
    pub(crate) built_bytes: u64,
    /// What is held beside while an update runs: copies of the statistics, if the model has any.
    pub(crate) beside_bytes: u64,
    pub(crate) accum_bytes: u64,
    /// Of the weights' average.
    pub(crate) average_bytes: u64,
    /// Of each optimizer: all of its state, and what is in memory.
    pub(crate) state_bytes: Vec<(u64, u64)>,
    /// The most that was held at once while it was built and calibrated.
    pub(crate) peak_bytes: u64,
    /// Segments by size of micro-batch, the smallest first.
    costs: Vec<(usize, Vec<SegmentCost>)>,
}

fn average_of(params: &[(String, Var)]) -> u64 {
    params.iter().map(|(_, var)| tallow_optim::average_bytes(var.elem_count() as u64)).sum()
}

fn trained(params: &[(String, Var)], space: &Space) -> Vec<(String, Var)> {
    params.iter().filter(|(name, _)| space.optimizers[0].is_trained(name)).cloned().collect()
}

/// Of released gradients those that wait for a part from another segment: of tied parameters, which
/// segments give more of than there is.
fn tied_bytes(
    trained: &[(String, Var)],
    copies: &[(String, Var)],
    policy: &Policy,
    costs: &[SegmentCost],
) -> u64 {
    let size = |(name, var): &(String, Var)| {
        let copy = copies.iter().find(|(copied, _)| copied == name);
        let used = copy.map_or(var, |(_, copy)| copy);
        (used.elem_count() * used.dtype().size_in_bytes()) as u64
    };
    let given: u64 = costs.iter().map(|cost| cost.param_grad_bytes).sum();
    let all: u64 = trained.iter().map(size).sum();
    // They wait in the precision of gradients.
    let [from, to] = [policy.compute, policy.gradient].map(|dtype| dtype.size_in_bytes() as u64);
    given.saturating_sub(all) / from * to
}

impl Calibration {
    /// Builds the model and runs its segments on the smallest micro-batches that it takes.
    pub(crate) fn run<W: Workload>(
        work: &W,
        space: &Space,
        policy: usize,
        budget: u64,
        meter: &dyn Meter,
    ) -> Result<Self> {
        let before_bytes = meter.current_bytes();
        let (found, peak_bytes) = peak_during(meter, || -> Result<Self> {
            let built = work.build(&space.policies[policy])?;
            let built_bytes = meter.current_bytes().saturating_sub(before_bytes);
            let params = built.masters.params();
            let state = |config| tallow_optim::state_bytes(&params, config);
            let trained = trained(&params, space);
            let left = budget.saturating_sub(before_bytes);
            let beside_bytes = bytes_of(&built.buffers);
            let network = Network::new(built);
            Ok(Self {
                policy,
                built_bytes,
                beside_bytes,
                accum_bytes: match space.gradients {
                    Gradients::Summed => accumulator_bytes(&trained, space.accum),
                    Gradients::Released => 0,
                },
                average_bytes: if space.has_average { average_of(&trained) } else { 0 },
                state_bytes: space.optimizers.iter().map(state).collect(),
                peak_bytes: 0,
                costs: smallest(work, space, policy, &network, left, meter)?,
            })
        });
        Ok(Self { peak_bytes: before_bytes + peak_bytes, ..found? })
    }

    /// The smallest micro-batch that the model takes.
    pub(crate) fn smallest(&self) -> usize {
        self.costs[0].0
    }

    /// Runs the segments on micro-batches of `n` samples too.
    pub(crate) fn refine<W: Workload>(
        &mut self,
        work: &W,
        space: &Space,
        n: usize,
        meter: &dyn Meter,
    ) -> Result<()> {
        let before_bytes = meter.current_bytes();
        let (costs, peak_bytes) = peak_during(meter, || {
            let network = Network::new(work.build(&space.policies[self.policy])?);
            measure(work, space, self.policy, &network, n, meter)
        });
        self.peak_bytes = self.peak_bytes.max(before_bytes + peak_bytes);
        self.costs.push((n, costs?));
        self.costs.sort_by_key(|(n, _)| *n);
        Ok(())
    }

    /// The segments on micro-batches of `n` samples, and how far that is from what ran, in doublings:
    /// else they are on the line through the nearest two. `None` if there is only one, another.
    pub(crate) fn costs_at(&self, n: usize) -> Option<(Vec<SegmentCost>, f64)> {
        if let Some((_, costs)) = self.costs.iter().find(|(found, _)| *found == n) {
            return Some((costs.clone(), 0.0));
        }
        // Smaller ones were refused by the model.
        if n < self.costs[0].0 {
            return None;
        }
        let above = self.costs.iter().position(|(found, _)| *found > n);
        let last = above.unwrap_or(self.costs.len() - 1).max(1);
        let [(n_1, first), (n_2, second)] = self.costs.get(last - 1..=last)? else { return None };
        let t = (n as f64 - *n_1 as f64) / (*n_2 as f64 - *n_1 as f64);
        let costs = first.iter().zip(second).map(|(a, b)| on_line(a, b, t)).collect();
        let largest = self.costs.last().map_or(n, |(n, _)| *n);
        Some((costs, (n as f64 / largest as f64).log2().max(BETWEEN_DOUBLINGS)))
    }
}

/// Micro-batches of one and two samples, or as many as a batch norm of 1x1 planes takes.
fn smallest<W: Workload>(
    work: &W,
    space: &Space,
    policy: usize,
    network: &Network<W::Model>,
    left_bytes: u64,
    meter: &dyn Meter,
) -> Result<Vec<(usize, Vec<SegmentCost>)>> {
    let most = space.micro_batches.iter().copied().max().unwrap_or(1);
    let measured = |n: usize| -> Result<(Vec<SegmentCost>, u64)> {
        let (costs, peak) = peak_during(meter, || measure(work, space, policy, network, n, meter));
        Ok((costs?, peak))
    };
    let (n, (first, peak)) = match measured(1) {
        Ok(found) => (1, found),
        Err(_) if most > 1 => (2, measured(2)?),
        Err(error) => return Err(error),
    };
    let next_peak = peak / n as u64 * (n as u64 + 1);
    if most == n || next_peak > left_bytes {
        return Ok(vec![(n, first)]);
    }
    let (second, _) = measured(n + 1)?;
    Ok(vec![(n, first), (n + 1, second)])
}

fn measure<W: Workload>(
    work: &W,
    space: &Space,
    policy: usize,
    network: &Network<W::Model>,
    n: usize,
    meter: &dyn Meter,
) -> Result<Vec<SegmentCost>> {
    let batch = work.batch(&space.policies[policy], n)?;
    let plan = Plan::keep_all(network.model().names().len() + 1);
    let passes = Passes {
        plan: &plan,
        saved: &Saved::AsIs,
        check: Check::Shape,
        label_smoothing: space.label_smoothing,
    };
    let walk = network.walk(passes);
    let bytes = Scoped { meter, scope: RefCell::new(None) };
    // Draws and statistics stay as they are.
    let mut costs =
        pass::replay(pass::position(), || walk.measure((&batch.inputs, &batch.targets), &bytes))?;
    let wide = space.policies[policy].compute != space.policies[policy].gradient;
    for i in 0..costs.len() {
        let grad_y = costs.get(i + 1).map_or(costs[i].output_bytes, |next| next.input_grad_bytes);
        let cost = &mut costs[i];
        if wide {
            // Gradients are widened when the graph has gone: all of them in f32, then the narrow
            // ones go.
            let gathered = cost.input_grad_bytes + 3 * cost.param_grad_bytes;
            let gone = cost.kept_bytes + cost.input_grad_bytes + grad_y;
            cost.backward_peak_bytes = cost.backward_peak_bytes.max(gathered.saturating_sub(gone));
        }
    }
    if space.gradients == Gradients::Released {
        let masters = network.masters();
        let (params, copies) = (trained(&masters.params(), space), masters.copies());
        let waiting = tied_bytes(&params, &copies, &space.policies[policy], &costs);
        // From the head's backward on, which gives the first part.
        if let [before_head @ .., _] = &mut costs[..] {
            before_head.iter_mut().for_each(|cost| cost.backward_peak_bytes += waiting);
        }
    }
    Ok(costs)
}

/// A cost at `t` of the way from `a` to `b`.
fn on_line(a: &SegmentCost, b: &SegmentCost, t: f64) -> SegmentCost {
    let real = |a: f64, b: f64| (a + (b - a) * t).max(0.0);
    let bytes = |a: u64, b: u64| real(a as f64, b as f64).ceil() as u64;
    SegmentCost {
        name: a.name.clone(),
        is_view: a.is_view,
        learns: a.learns,
        input_grad_bytes: bytes(a.input_grad_bytes, b.input_grad_bytes),
        input_bytes: bytes(a.input_bytes, b.input_bytes),
        input_bf16_bytes: bytes(a.input_bf16_bytes, b.input_bf16_bytes),
        output_bytes: bytes(a.output_bytes, b.output_bytes),
        kept_bytes: bytes(a.kept_bytes, b.kept_bytes),
        forward_peak_bytes: bytes(a.forward_peak_bytes, b.forward_peak_bytes),
        tracked_forward_peak_bytes: bytes(
            a.tracked_forward_peak_bytes,
            b.tracked_forward_peak_bytes,
        ),
        backward_peak_bytes: bytes(a.backward_peak_bytes, b.backward_peak_bytes),
        param_grad_bytes: bytes(a.param_grad_bytes, b.param_grad_bytes),
        forward_secs: real(a.forward_secs, b.forward_secs),
        backward_secs: real(a.backward_secs, b.backward_secs),
    }
}

/// A meter whose other peaks are left alone.
struct Scoped<'a> {
    meter: &'a dyn Meter,
    scope: RefCell<Option<Scope<'a>>>,
}

impl Bytes for Scoped<'_> {
    fn live(&self) -> u64 {
        self.meter.current_bytes()
    }

    fn peak(&self) -> u64 {
        match &*self.scope.borrow() {
            Some(scope) => scope.start_bytes() + scope.peak_bytes(),
            None => self.meter.peak_bytes(),
        }
    }

    fn reset_peak(&self) {
        self.scope.replace(None);
        match self.meter.peak_scope() {
            Some(scope) => drop(self.scope.replace(Some(scope))),
            None => self.meter.reset_peak(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use tallow_models::Gpt2Config;
    use tallow_precision::Masters;
    use tallow_tensor::Params;

    #[test]
    fn a_tied_weight_waits_in_the_precision_of_gradients() {
        let (vocab, dim) = (500, 64);
        let small = Gpt2Config::small();
        let config =
            Gpt2Config { vocab, context: 64, model_dim: dim, n_heads: 2, n_layers: 1, ..small };
        for policy in [Policy::f32(), Policy::bf16()] {
            let masters = Masters::new(policy.clone(), Params::new(0)).expect("a policy");
            let _model = config.build(masters.builder(&Device::Cpu)).expect("a network");
            let params = masters.params();
            let used = |(name, var): &(String, Var)| {
                let copy = masters.copies().into_iter().find(|(copied, _)| copied == name);
                bytes_of(&[copy.unwrap_or_else(|| (name.clone(), var.clone()))])
            };
            let of_params: u64 = params.iter().map(used).sum();
            let of_head = (vocab * dim * policy.compute.size_in_bytes()) as u64;
            let cost =
                |param_grad_bytes| SegmentCost { param_grad_bytes, ..SegmentCost::default() };
            let twice =
                |costs: &[SegmentCost]| tied_bytes(&params, &masters.copies(), &policy, costs);
            let waiting = (vocab * dim * policy.gradient.size_in_bytes()) as u64;
            assert_eq!(twice(&[cost(of_params), cost(of_head)]), waiting);
            assert_eq!(twice(&[cost(of_params)]), 0);
        }
    }
}

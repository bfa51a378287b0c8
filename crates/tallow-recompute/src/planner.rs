//! The plan of least time within a number of bytes.
//!
//! The dynamic programme is Rotor's (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: *Optimal
//! checkpointing for heterogeneous chains*, 2019). For segments `s..=t` and `m` bytes,
//!
//! ```text
//! opt(s, t, m) = min( keep s, then opt(s + 1, t, m - kept(s)),
//!                     min over s' of: forward s..s', opt(s', t, m - a(s')), opt(s, s' - 1, m) )
//! ```
//!
//! where `a(s')` is the input of `s'`. Bytes are rounded to slots, so its plans are only
//! candidates: each is simulated, and the choice is made among exact figures. The candidates do not
//! depend on the limit, hence a lower limit never gives a faster plan nor one of a higher peak.

use crate::{Error, Plan, Result, SegmentCost, Simulated, Step, policy::groups, simulate};

/// The table may take so much whatever the chain holds.
const TABLE_BYTES: u64 = 256 << 10;

/// A plan and what it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// What it holds and how long it runs, promised before it does.
    pub simulated: Simulated,
}

/// The plan of least time that holds at most `limit_bytes`; of several, the one of least peak.
///
/// Exact if all figures fit the slots (500 for short chains, as few as 32 for long ones), else up to
/// their width. Takes O(n^3) time, about a second for 200 segments, and 4 n^2 bytes a slot: at most a
/// 32nd of what the chain holds if nothing is recomputed, or 256 KiB, or 32 slots.
pub fn plan_chain(costs: &[SegmentCost], limit_bytes: u64) -> Result<Planned> {
    let candidates = candidates(costs)?;
    let smallest = candidates.iter().map(|c| c.simulated.peak_bytes).min().unwrap_or(0);
    let fitting = candidates.into_iter().filter(|c| c.simulated.peak_bytes <= limit_bytes);
    let order = |a: &Planned, b: &Planned| {
        let (a, b) = (a.simulated, b.simulated);
        a.secs.total_cmp(&b.secs).then(a.peak_bytes.cmp(&b.peak_bytes))
    };
    fitting.min_by(order).ok_or(Error::NothingFits { limit_bytes, smallest_bytes: smallest })
}

fn candidates(costs: &[SegmentCost]) -> Result<Vec<Planned>> {
    let n = costs.len();
    let mut plans = vec![Plan::keep_all(n)];
    plans.extend((1..n).map(|k| groups(n, k)));
    let whole_bytes = simulate(costs, &plans[0])?.peak_bytes;
    let in_bytes = TABLE_BYTES.max(whole_bytes / 32) / (4 * (n * n) as u64).max(1);
    let n_slots = (800_000_000 / (n as u64).pow(3).max(1)).min(in_bytes).clamp(32, 500);
    // The whole range in coarse slots; then the low end, where inputs weigh most, in fine ones, and
    // what is between. No plan holds less than its largest segment does.
    let low_bytes = whole_bytes.min(3 * costs.iter().map(largest_bytes).max().unwrap_or(0));
    let between_bytes = (whole_bytes as f64 * low_bytes as f64).sqrt() as u64;
    for range_bytes in [whole_bytes, between_bytes, low_bytes] {
        let slot_bytes = range_bytes.div_ceil(n_slots).max(1);
        Table::filled(costs, slot_bytes, n_slots as usize).plans(&mut plans);
        if slot_bytes == 1 {
            break;
        }
    }
    let simulated = |plan| Ok(Planned { simulated: simulate(costs, &plan)?, plan });
    plans.into_iter().map(simulated).collect()
}

/// What a segment holds at least while it runs forward or backward.
fn largest_bytes(cost: &SegmentCost) -> u64 {
    let backward = cost.input_grad_bytes + cost.kept_bytes + cost.backward_peak_bytes;
    backward.max(cost.tracked_forward_peak_bytes)
}

/// Whether the input of a sub-chain is held by us alone, and so goes when it is copied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Input {
    Loose,
    Held,
}

/// A segment in slots and seconds.
struct Row {
    /// `a`: its input, where nobody else holds it.
    input: usize,
    /// The variable its input is copied into.
    leaf: usize,
    kept: usize,
    forward: usize,
    tracked: usize,
    backward: usize,
    /// The gradient of its output, as its backward starts.
    grad: usize,
    learns: bool,
    forward_secs: f32,
    backward_secs: f32,
}

/// What keeping a segment takes from the segments after it.
struct Kept {
    /// Slots that must be there for the segment itself.
    need: usize,
    /// Slots that are left of `m`: `m + freed - held`.
    freed: usize,
    held: usize,
    /// How the next segment finds its input.
    next: Input,
}

/// `opt`.
struct Table {
    rows: Vec<Row>,
    n_slots: usize,
    /// The chain's output, which its caller holds from the end of the forward on.
    output: usize,
    /// Seconds of `(s, t, input)` at each number of slots, the input of `s` not counted.
    secs: Vec<f32>,
    /// The fewest slots of `(s, t, input)` with which there is a plan.
    fewest: Vec<usize>,
    /// Seconds of `(s, t, _)` if all is kept.
    all_kept: Vec<f32>,
}

impl Table {
    fn filled(costs: &[SegmentCost], slot_bytes: u64, n_slots: usize) -> Table {
        let slots = |bytes: u64| ((bytes + slot_bytes / 2) / slot_bytes) as usize;
        let rows: Vec<Row> = (0..costs.len())
            .map(|i| {
                let cost = &costs[i];
                let next = costs.get(i + 1);
                Row {
                    input: if i == 0 { 0 } else { slots(costs[i - 1].output_bytes) },
                    leaf: slots(cost.input_grad_bytes),
                    kept: slots(cost.kept_bytes),
                    forward: slots(cost.forward_peak_bytes),
                    tracked: slots(cost.tracked_forward_peak_bytes),
                    backward: slots(cost.backward_peak_bytes),
                    grad: slots(next.map_or(cost.output_bytes, |next| next.input_grad_bytes)),
                    learns: cost.learns,
                    forward_secs: cost.forward_secs as f32,
                    backward_secs: cost.backward_secs as f32,
                }
            })
            .collect();
        let n = rows.len();
        let output = slots(costs.last().map_or(0, |cost| cost.output_bytes));
        let secs = vec![f32::INFINITY; n * (n + 1) * (n_slots + 1)];
        let (fewest, all_kept) = (vec![0; n * (n + 1)], vec![0.0; n * (n + 1)]);
        let mut table = Table { rows, n_slots, output, secs, fewest, all_kept };
        for length in 1..=n {
            for s in 0..=n - length {
                for input in [Input::Loose, Input::Held] {
                    table.fill(s, s + length - 1, input);
                }
            }
        }
        table
    }

    fn index(s: usize, t: usize, input: Input) -> usize {
        2 * (t * (t + 1) / 2 + s) + input as usize
    }

    fn opt(&self, s: usize, t: usize, input: Input) -> &[f32] {
        &self.secs[Self::index(s, t, input) * (self.n_slots + 1)..][..=self.n_slots]
    }

    /// What waits while `s..=t` run forward, the gradient of `t` and the chain's output: nothing
    /// yet at the end of the chain.
    fn waiting(&self, t: usize) -> usize {
        if t + 1 == self.rows.len() { 0 } else { self.rows[t].grad + self.output }
    }

    fn keep(&self, s: usize, t: usize, input: Input) -> Kept {
        let row = &self.rows[s];
        let is_loose = input == Input::Loose;
        if !row.learns {
            // Nothing is kept: the output takes the input's place.
            let held = if s == t { 0 } else { self.rows[s + 1].input };
            let need = row.tracked + self.waiting(t);
            return Kept {
                need,
                freed: if is_loose { row.input } else { 0 },
                held,
                next: Input::Loose,
            };
        }
        let leaf = if is_loose { 0 } else { row.leaf };
        let forward = if is_loose { row.leaf.max(row.tracked) } else { row.leaf + row.tracked };
        let held = leaf + row.kept;
        // The last graph holds the output itself.
        let output = if s + 1 == self.rows.len() { 0 } else { self.output };
        let backward = held + row.grad + output + row.backward;
        let need = backward.max(forward + self.waiting(t));
        Kept { need, freed: 0, held, next: Input::Held }
    }

    /// Seconds of `s..=t` with `m` slots if `s` is kept, and the slots left for the rest.
    fn secs_kept(&self, s: usize, t: usize, kept: &Kept, m: usize) -> Option<(f32, usize)> {
        let own = self.rows[s].forward_secs + self.rows[s].backward_secs;
        let left = (m + kept.freed).checked_sub(kept.held)?.min(self.n_slots);
        if m < kept.need {
            return None;
        }
        let rest = if s == t { 0.0 } else { self.opt(s + 1, t, kept.next)[left] };
        Some((own + rest, left))
    }

    /// Calls `option(s', fewest slots, seconds of s..s')` for each place to recompute up to.
    fn splits(&self, s: usize, t: usize, mut option: impl FnMut(usize, usize, f32)) {
        let (mut need, mut secs) = (0, 0.0);
        for split in s + 1..=t {
            let last = &self.rows[split - 1];
            let input = if split - 1 == s { 0 } else { last.input };
            need = need.max(input + last.forward + self.waiting(t));
            secs += last.forward_secs;
            option(split, need.max(self.rows[split].input), secs);
        }
    }

    fn fill(&mut self, s: usize, t: usize, input: Input) {
        let n_slots = self.n_slots;
        let mut best = vec![f32::INFINITY; n_slots + 1];
        let kept = self.keep(s, t, input);
        for (m, best) in best.iter_mut().enumerate() {
            if let Some((secs, _)) = self.secs_kept(s, t, &kept, m) {
                *best = secs;
            }
        }
        let index = Self::index(s, t, input);
        let rest = if s == t { 0.0 } else { self.all_kept[Self::index(s + 1, t, kept.next)] };
        let all_kept = self.rows[s].forward_secs + self.rows[s].backward_secs + rest;
        self.all_kept[index] = all_kept;
        // With so many slots nothing is recomputed, and nothing is faster.
        let most = best.partition_point(|secs| *secs > all_kept);
        self.splits(s, t, |split, need, secs| {
            let fewest = |s, t, input| self.fewest[Self::index(s, t, input)];
            let shift = self.rows[split].input;
            let right_needs = fewest(split, t, Input::Loose) + shift;
            let need = need.max(right_needs).max(fewest(s, split - 1, input));
            if need >= most {
                return;
            }
            let right = &self.opt(split, t, Input::Loose)[need - shift..];
            let left = &self.opt(s, split - 1, input)[need..];
            for ((best, right), left) in best[need..most].iter_mut().zip(right).zip(left) {
                let split_secs = secs + right + left;
                *best = if split_secs < *best { split_secs } else { *best };
            }
        });
        self.fewest[index] = best.partition_point(|secs| secs.is_infinite());
        self.secs[index * (n_slots + 1)..][..=n_slots].copy_from_slice(&best);
    }

    /// One plan for each number of slots at which the time falls.
    fn plans(&self, plans: &mut Vec<Plan>) {
        let Some(last) = self.rows.len().checked_sub(1) else { return };
        let mut fastest = f32::INFINITY;
        for (m, &secs) in self.opt(0, last, Input::Held).iter().enumerate() {
            if secs < fastest {
                fastest = secs;
                let mut steps = Vec::new();
                self.steps(0, last, Input::Held, m, &mut steps); // the caller holds the input
                plans.push(Plan(steps));
            }
        }
    }

    /// The steps behind `opt(s, t, input)[m]`, found by making the same sums again.
    fn steps(&self, s: usize, t: usize, input: Input, m: usize, steps: &mut Vec<Step>) {
        let secs = self.opt(s, t, input)[m];
        let kept = self.keep(s, t, input);
        if let Some((kept_secs, left)) = self.secs_kept(s, t, &kept, m)
            && kept_secs == secs
        {
            steps.push(Step::Keep(s));
            if s < t {
                self.steps(s + 1, t, kept.next, left, steps);
            }
            return;
        }
        let mut found = None;
        self.splits(s, t, |split, need, forward_secs| {
            if found.is_none() && m >= need {
                let rest = m - self.rows[split].input;
                let right = self.opt(split, t, Input::Loose)[rest];
                let left = self.opt(s, split - 1, input)[m];
                found = (forward_secs + right + left == secs).then_some((split, rest));
            }
        });
        let (split, rest) = found.expect("the same sums are made again");
        let mut again = Vec::new();
        self.steps(s, split - 1, input, m, &mut again);
        steps.push(Step::Redo { first: s, end: split, again: Plan(again) });
        self.steps(split, t, Input::Loose, rest, steps);
    }
}

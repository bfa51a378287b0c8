//! Which segments are recomputed, by rule.

use crate::{Plan, Result, SegmentCost, Step, plan_chain};

/// A rule that makes a plan.
///
/// A last group whose backward follows its forward at once is kept by `All`, `Every` and `Bytes`:
/// to recompute it would free nothing at the peak.
#[derive(Clone, Debug, PartialEq)]
pub enum Policy {
    /// Nothing is recomputed.
    None,
    /// Every segment is recomputed from its own input.
    All,
    /// Groups of this many segments (at least 1) are recomputed from the input of their first.
    Every(usize),
    /// Segments whose kept graph is above this many bytes. Needs measured costs.
    Bytes(u64),
    /// Segments whose name matches one of these patterns, in which `*` stands for anything.
    Named(Vec<String>),
    /// The least time within this many bytes. Needs measured costs.
    Planned {
        /// The most a forward and backward may hold, as [`crate::Simulated::peak_bytes`] counts.
        limit_bytes: u64,
    },
}

impl Policy {
    /// The usual limit of `Bytes`: 100 MiB.
    pub const DEFAULT_BYTES: u64 = 100 << 20;

    /// The plan for a chain of these segments.
    pub fn plan(&self, costs: &[SegmentCost]) -> Result<Plan> {
        let n = costs.len();
        Ok(match self {
            Policy::None => Plan::keep_all(n),
            Policy::All => groups(n, 1),
            Policy::Every(k) => groups(n, (*k).max(1)),
            Policy::Bytes(limit_bytes) => {
                each(n, |i| i + 1 < n && costs[i].kept_bytes > *limit_bytes)
            }
            Policy::Named(patterns) => each(n, |i| {
                patterns.iter().any(|pattern| matches(pattern.as_bytes(), costs[i].name.as_bytes()))
            }),
            Policy::Planned { limit_bytes } => plan_chain(costs, *limit_bytes)?.plan,
        })
    }
}

/// Recomputed from its own input, with every graph kept then.
pub(crate) fn redo(first: usize, end: usize) -> Step {
    Step::Redo { first, end, again: Plan((first..end).map(Step::Keep).collect()) }
}

pub(crate) fn groups(n: usize, k: usize) -> Plan {
    let mut steps = Vec::new();
    for first in (0..n).step_by(k) {
        match first + k < n {
            true => steps.push(redo(first, first + k)),
            false => steps.extend((first..n).map(Step::Keep)),
        }
    }
    Plan(steps)
}

fn each(n: usize, is_redone: impl Fn(usize) -> bool) -> Plan {
    Plan((0..n).map(|i| if is_redone(i) { redo(i, i + 1) } else { Step::Keep(i) }).collect())
}

/// `*` matches any run of bytes.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|start| matches(rest, &name[start..])),
        Some((byte, rest)) => name.first() == Some(byte) && matches(rest, &name[1..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(policy: Policy) -> String {
        let names = ["stem", "block.0.conv", "block.1.conv", "block.1.norm", "loss"];
        let mut costs: Vec<_> = names.into_iter().map(SegmentCost::unmeasured).collect();
        for (i, cost) in costs.iter_mut().enumerate() {
            cost.kept_bytes = 10 * i as u64;
        }
        let plan = policy.plan(&costs).unwrap();
        plan.validate(names.len()).unwrap();
        plan.to_string()
    }

    #[test]
    fn rules_make_the_plans_they_say() {
        let named =
            |patterns: &[&str]| Policy::Named(patterns.iter().map(|p| p.to_string()).collect());
        for (policy, plan) in [
            (Policy::None, "0 1 2 3 4"),
            (Policy::All, "[0..1: 0] [1..2: 1] [2..3: 2] [3..4: 3] 4"),
            (Policy::Every(2), "[0..2: 0 1] [2..4: 2 3] 4"),
            (Policy::Every(5), "0 1 2 3 4"),
            (Policy::Every(0), "[0..1: 0] [1..2: 1] [2..3: 2] [3..4: 3] 4"),
            (Policy::Bytes(10), "0 1 [2..3: 2] [3..4: 3] 4"),
            (Policy::Bytes(Policy::DEFAULT_BYTES), "0 1 2 3 4"),
            (named(&["block.*.conv", "loss"]), "0 [1..2: 1] [2..3: 2] 3 [4..5: 4]"),
            (named(&["*"]), "[0..1: 0] [1..2: 1] [2..3: 2] [3..4: 3] [4..5: 4]"),
            (named(&["block", "*.1.*", ""]), "0 1 [2..3: 2] [3..4: 3] 4"),
        ] {
            assert_eq!(printed(policy.clone()), plan, "{policy:?}");
        }
    }
}

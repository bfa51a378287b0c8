//! What a chain keeps and what it computes again, as a value.

use crate::{Error, Result};
use std::{fmt, str::FromStr};

/// Steps that run the segments of a chain once each, in order.
///
/// Printed as `0 [1..4: 1 [2..4: 2 3]] 4`: segments 0 and 4 keep their graph; the input of 1 is
/// kept, and in backward 1 keeps its graph, the input of 2 is kept, and so on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Plan(pub Vec<Step>);

/// One step of a [`Plan`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Runs this segment and keeps its graph: nothing of it is recomputed.
    Keep(usize),
    /// Runs segments `first..end` and keeps the input of the first only.
    Redo {
        /// The first segment.
        first: usize,
        /// One after the last.
        end: usize,
        /// How backward runs them again.
        again: Plan,
    },
}

impl Plan {
    /// Every graph is kept, as plain candle does.
    pub fn keep_all(n_segments: usize) -> Plan {
        Plan((0..n_segments).map(Step::Keep).collect())
    }

    /// Segments that it runs.
    pub fn n_segments(&self) -> usize {
        self.0.iter().map(|step| step.range().len()).sum()
    }

    /// Of these, segments that backward runs again.
    pub fn n_redone(&self) -> usize {
        let redone = self.0.iter().filter(|step| matches!(step, Step::Redo { .. }));
        redone.map(|step| step.range().len()).sum()
    }

    /// Fails unless the plan runs segments `0..n_segments` in order, at every level.
    pub fn validate(&self, n_segments: usize) -> Result<()> {
        self.covers(0, n_segments, n_segments)
    }

    fn covers(&self, first: usize, end: usize, n_segments: usize) -> Result<()> {
        let mut expected = first;
        let at = |found, expected| match found == expected {
            true => Ok(()),
            false => Err(Error::Plan { found, expected, n_segments }),
        };
        for step in &self.0 {
            match step {
                Step::Keep(i) => {
                    at(*i, expected)?;
                    expected += 1;
                }
                Step::Redo { first, end: last, again } => {
                    at(*first, expected)?;
                    if last <= first || *last > end {
                        return Err(Error::Range { first: *first, end: *last });
                    }
                    again.covers(*first, *last, n_segments)?;
                    expected = *last;
                }
            }
        }
        at(expected, end)
    }
}

impl Step {
    fn range(&self) -> std::ops::Range<usize> {
        match *self {
            Step::Keep(segment) => segment..segment + 1,
            Step::Redo { first, end, .. } => first..end.max(first),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            let space = if i == 0 { "" } else { " " };
            match step {
                Step::Keep(segment) => write!(f, "{space}{segment}")?,
                Step::Redo { first, end, again } => write!(f, "{space}[{first}..{end}: {again}]")?,
            }
        }
        Ok(())
    }
}

/// Reads what [`Display`](fmt::Display) prints.
impl FromStr for Plan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut rest = text;
        let plan = steps(&mut rest, 0);
        match plan {
            Some(plan) if rest.is_empty() => Ok(plan),
            _ => Err(Error::Unreadable { text: text.to_string(), at: text.len() - rest.len() }),
        }
    }
}

/// Deeper is no plan of any model.
const MOST_DEPTH: usize = 1000;

/// Steps up to a `]` or the end; `rest` begins where reading stopped.
fn steps(rest: &mut &str, depth: usize) -> Option<Plan> {
    let mut plan = Vec::new();
    loop {
        *rest = rest.trim_start_matches(' ');
        if rest.is_empty() || rest.starts_with(']') {
            return Some(Plan(plan));
        }
        if let Some(inner) = rest.strip_prefix('[') {
            if depth == MOST_DEPTH {
                return None;
            }
            *rest = inner;
            let first = number(rest)?;
            take(rest, "..")?;
            let end = number(rest)?;
            take(rest, ":")?;
            let again = steps(rest, depth + 1)?;
            take(rest, "]")?;
            plan.push(Step::Redo { first, end, again });
        } else {
            plan.push(Step::Keep(number(rest)?));
        }
    }
}

fn number(rest: &mut &str) -> Option<usize> {
    let n_digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (digits, after) = rest.split_at(n_digits);
    let number = digits.parse().ok()?;
    *rest = after;
    Some(number)
}

fn take(rest: &mut &str, word: &str) -> Option<()> {
    *rest = rest.strip_prefix(word)?;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_read() {
        let inner = redo(2, 4, vec![Step::Keep(2), Step::Keep(3)]);
        let deep = Plan(vec![Step::Keep(0), redo(1, 4, vec![Step::Keep(1), inner]), Step::Keep(4)]);
        for plan in [deep, Plan::keep_all(3), Plan(vec![])] {
            assert_eq!(plan.to_string().parse::<Plan>().unwrap(), plan);
        }
        for text in ["a", "1 2]", "[1..2: 1", "[1.2: 1]", "[1..2 1]", "1,2", "99999999999999999999"]
        {
            let error = text.parse::<Plan>().unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
        let bottomless = "[0..1: ".repeat(100_000);
        assert!(bottomless.parse::<Plan>().is_err());
    }

    fn redo(first: usize, end: usize, again: Vec<Step>) -> Step {
        Step::Redo { first, end, again: Plan(again) }
    }

    #[test]
    fn a_plan_prints_as_it_nests() {
        let inner = redo(2, 4, vec![Step::Keep(2), Step::Keep(3)]);
        let plan = Plan(vec![Step::Keep(0), redo(1, 4, vec![Step::Keep(1), inner]), Step::Keep(4)]);
        plan.validate(5).unwrap();
        assert_eq!((plan.n_segments(), plan.n_redone()), (5, 3));
        assert_eq!(plan.to_string(), "0 [1..4: 1 [2..4: 2 3]] 4");
    }

    #[test]
    fn gaps_repeats_and_overruns_are_refused() {
        let keep = Step::Keep;
        for (steps, message) in [
            (vec![], "the plan goes on at segment 0, it must at 3 (of 3)"),
            (vec![keep(0), keep(2)], "the plan goes on at segment 2, it must at 1 (of 3)"),
            (vec![keep(0), keep(0)], "the plan goes on at segment 0, it must at 1 (of 3)"),
            (vec![redo(0, 0, vec![])], "a step of the plan covers segments 0..0"),
            (vec![redo(0, 4, vec![])], "a step of the plan covers segments 0..4"),
            (
                vec![redo(0, 2, vec![keep(0)]), keep(2)],
                "the plan goes on at segment 1, it must at 2 (of 3)",
            ),
            (
                vec![redo(0, 2, vec![redo(0, 3, vec![])]), keep(2)],
                "a step of the plan covers segments 0..3",
            ),
        ] {
            assert_eq!(Plan(steps).validate(3).unwrap_err().to_string(), message);
        }
    }
}

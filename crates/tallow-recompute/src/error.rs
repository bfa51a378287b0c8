//! What a user of recomputation can get wrong.

use std::{io, path::PathBuf};

/// Why a segment cannot be run, rebuilt or planned.
///
/// Converts into [`candle_core::Error`] with its message, so that `?` works in candle code too, and
/// because that is what `backward` returns when a recomputation inside it ends.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The closure of a segment returned an error, or candle did on its behalf.
    #[error("segment `{segment}`, {pass}: {source}")]
    Segment {
        /// The segment.
        segment: String,
        /// What was being computed.
        pass: &'static str,
        /// The closure's own error.
        source: Box<candle_core::Error>,
    },
    /// A recomputation that is not the forward it repeats.
    #[error(
        "segment `{segment}`: {what} of output {output} is {again} in the recomputation, it was \
         {first}; is there hidden state (dropout, statistics) without a replay hook?"
    )]
    Differs {
        /// The segment.
        segment: String,
        /// Which output, from 0.
        output: usize,
        /// Shape, dtype, hash of its bits, ...
        what: &'static str,
        /// What the first forward gave.
        first: Box<str>,
        /// What the recomputation gave.
        again: Box<str>,
    },
    /// A recomputation through other variables than the forward it repeats: their gradients would
    /// be lost.
    #[error(
        "segment `{segment}`: the recomputation uses {n_new} variables that the first forward did not"
    )]
    NewVariables {
        /// The segment.
        segment: String,
        /// How many.
        n_new: usize,
    },
    /// A hook that broke its contract.
    #[error("segment `{segment}`: the replay hook returned without running the forward")]
    Replay {
        /// The segment.
        segment: String,
    },
    /// Text that is no plan.
    #[error("`{text}` is no plan, from byte {at} on: `0 [1..3: 1 2] 3` is one")]
    Unreadable {
        /// The text.
        text: String,
        /// Where reading ended.
        at: usize,
    },
    /// A plan that does not run each segment once, in order.
    #[error("the plan goes on at segment {found}, it must at {expected} (of {n_segments})")]
    Plan {
        /// Where a step starts or the plan ends.
        found: usize,
        /// Where it must.
        expected: usize,
        /// Segments of the chain.
        n_segments: usize,
    },
    /// A step that covers nothing, or more than it may.
    #[error("a step of the plan covers segments {first}..{end}")]
    Range {
        /// First segment.
        first: usize,
        /// One after the last.
        end: usize,
    },
    /// A limit below what any plan needs.
    #[error("no plan fits {limit_bytes} bytes, the smallest needs {smallest_bytes}")]
    NothingFits {
        /// The limit.
        limit_bytes: u64,
        /// The lowest limit for which there is a plan.
        smallest_bytes: u64,
    },
    /// An input that was kept in a file.
    #[error("{path}: {source}")]
    File {
        /// The file, or the folder in which it could not be made.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Candle's own.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// What this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn segment(segment: &str, pass: &'static str, source: candle_core::Error) -> Self {
        Self::Segment { segment: segment.to_string(), pass, source: Box::new(source) }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => Self::Wrapped(Box::new(other)),
        }
    }
}

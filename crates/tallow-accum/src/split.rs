//! How a batch is cut into micro-batches.

use std::ops::Range;

/// Batch numbers that do not fit together, with the nearest that do.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// A number that must be at least 1.
    #[error("{what} is 0, 1 is the least")]
    Zero {
        /// The number.
        what: &'static str,
    },
    /// Nothing from which to derive the rest.
    #[error("batch is not given, and micro_batch and accumulate are not both given to derive it")]
    NoBatch,
    /// A micro-batch larger than the batch of one rank.
    #[error(
        "micro_batch {micro_batch} is larger than the {rank_batch} samples of a batch on one rank; \
         the largest that fits is {rank_batch}"
    )]
    MicroTooLarge {
        /// Samples of a micro-batch.
        micro_batch: usize,
        /// Samples of one batch on one rank.
        rank_batch: usize,
    },
    /// More micro-batches than samples.
    #[error(
        "accumulate {accumulate} cuts a batch of {rank_batch} samples on one rank into more pieces \
         than samples; the most is {rank_batch}"
    )]
    TooManyPieces {
        /// Micro-batches of one batch.
        accumulate: usize,
        /// Samples of one batch on one rank.
        rank_batch: usize,
    },
    /// A batch that ranks cannot share evenly.
    #[error("batch {batch} is no multiple of {ranks} ranks; the nearest are {below} and {above}")]
    Ranks {
        /// Samples of a batch over all ranks.
        batch: usize,
        /// Number of ranks.
        ranks: usize,
        /// Largest multiple below, or the smallest there is.
        below: usize,
        /// Smallest multiple above.
        above: usize,
    },
    /// Three numbers that contradict each other.
    #[error(
        "batch {batch} on {ranks} ranks in micro-batches of {micro_batch} makes {derived} of them, \
         not accumulate {accumulate}"
    )]
    Contradiction {
        /// Samples of a batch over all ranks.
        batch: usize,
        /// Number of ranks.
        ranks: usize,
        /// Samples of a micro-batch.
        micro_batch: usize,
        /// Micro-batches given.
        accumulate: usize,
        /// Micro-batches that follow from the other numbers.
        derived: usize,
    },
    /// A product beyond what a computer can count.
    #[error(
        "micro_batch {micro_batch} times accumulate {accumulate} times {ranks} ranks overflows"
    )]
    Overflow {
        /// Samples of a micro-batch.
        micro_batch: usize,
        /// Micro-batches of one batch.
        accumulate: usize,
        /// Number of ranks.
        ranks: usize,
    },
}

/// A batch and its pieces: `batch` samples an update over all ranks, each rank's share in
/// micro-batches of `micro_batch` samples, the last one smaller where it does not divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSplit {
    batch: usize,
    micro_batch: usize,
    ranks: usize,
}

impl BatchSplit {
    /// Updates of one sample.
    pub const ONE: Self = Self { batch: 1, micro_batch: 1, ranks: 1 };

    /// From any two of `batch`, `micro_batch` and `accumulate` (micro-batches an update), or `batch`
    /// alone, which is then one micro-batch. All three must agree.
    /// # Errors
    /// If a number is 0 or they do not fit together; nothing is rounded silently.
    pub fn derive(
        batch: Option<usize>,
        micro_batch: Option<usize>,
        accumulate: Option<usize>,
        ranks: usize,
    ) -> Result<Self, SplitError> {
        for (what, n) in
            [("batch", batch), ("micro_batch", micro_batch), ("accumulate", accumulate)]
        {
            if n == Some(0) {
                return Err(SplitError::Zero { what });
            }
        }
        if ranks == 0 {
            return Err(SplitError::Zero { what: "ranks" });
        }
        let batch = match (batch, micro_batch, accumulate) {
            (Some(batch), _, _) => batch,
            (None, Some(micro_batch), Some(accumulate)) => micro_batch
                .checked_mul(accumulate)
                .and_then(|n| n.checked_mul(ranks))
                .ok_or(SplitError::Overflow { micro_batch, accumulate, ranks })?,
            _ => return Err(SplitError::NoBatch),
        };
        if !batch.is_multiple_of(ranks) {
            let below = (batch / ranks * ranks).max(ranks);
            let above = (batch / ranks + 1).saturating_mul(ranks);
            return Err(SplitError::Ranks { batch, ranks, below, above });
        }
        let rank_batch = batch / ranks;
        if let Some(accumulate) = accumulate
            && accumulate > rank_batch
        {
            return Err(SplitError::TooManyPieces { accumulate, rank_batch });
        }
        let micro_batch =
            micro_batch.unwrap_or_else(|| rank_batch.div_ceil(accumulate.unwrap_or(1)));
        if micro_batch > rank_batch {
            return Err(SplitError::MicroTooLarge { micro_batch, rank_batch });
        }
        let derived = rank_batch.div_ceil(micro_batch);
        match accumulate {
            Some(accumulate) if accumulate != derived => {
                Err(SplitError::Contradiction { batch, ranks, micro_batch, accumulate, derived })
            }
            _ => Ok(Self { batch, micro_batch, ranks }),
        }
    }

    /// Samples an update, over all ranks.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Samples of a micro-batch, at most.
    pub fn micro_batch(&self) -> usize {
        self.micro_batch
    }

    /// Micro-batches of a whole batch on one rank.
    pub fn accumulate(&self) -> usize {
        (self.batch / self.ranks).div_ceil(self.micro_batch)
    }

    /// The same batch in micro-batches of `micro_batch` samples, at least 1 and at most as many as a
    /// rank has.
    pub fn with_micro_batch(self, micro_batch: usize) -> Self {
        let rank_batch = (self.batch / self.ranks).max(1);
        Self { micro_batch: micro_batch.clamp(1, rank_batch), ..self }
    }

    /// The pieces of `n_samples` at hand (fewer than a batch at the end of an epoch): every sample
    /// once, in order.
    pub fn pieces(&self, n_samples: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let micro_batch = self.micro_batch;
        let starts = (0..n_samples).step_by(micro_batch);
        starts.map(move |start| start..start.saturating_add(micro_batch).min(n_samples))
    }
}

//! Where samples of different lengths start: one mark for many samples.

/// A mark is set after this many samples, so that a reader skips less.
const SAMPLES_PER_MARK: u64 = 64;
/// A mark is also set after this many bytes, so that long samples are not read for others' sake.
const BYTES_PER_MARK: u64 = 64 << 10;

/// Most bytes that the index of `n_samples` lines or records in `n_bytes` of a file holds: 16 bytes
/// for every 64 samples or 64 KiB, whichever is less.
pub const fn index_bytes(n_samples: u64, n_bytes: u64) -> u64 {
    16 * (n_samples / SAMPLES_PER_MARK + n_bytes / BYTES_PER_MARK + 1)
}

#[derive(Clone, Copy, Debug)]
struct Mark {
    sample: u64,
    offset: u64,
}

/// Starts of some samples, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct SparseIndex {
    marks: Vec<Mark>,
    n_samples: u64,
}

impl SparseIndex {
    /// Takes note that the next sample starts at `offset`.
    pub(super) fn push(&mut self, offset: u64) {
        let sample = self.n_samples;
        let is_far = self.marks.last().is_none_or(|last| {
            sample - last.sample >= SAMPLES_PER_MARK || offset - last.offset >= BYTES_PER_MARK
        });
        if is_far {
            self.marks.push(Mark { sample, offset });
        }
        self.n_samples += 1;
    }

    /// No more samples: gives back the room kept for them.
    pub(super) fn finish(mut self) -> Self {
        self.marks.shrink_to_fit();
        self
    }

    pub(super) fn n_samples(&self) -> u64 {
        self.n_samples
    }

    /// Where to start reading for the sample `index`, and how many samples lie between.
    pub(super) fn find(&self, index: u64) -> (u64, u64) {
        let after = self.marks.partition_point(|mark| mark.sample <= index);
        let mark = self.marks[after - 1];
        (mark.offset, index - mark.sample)
    }
}

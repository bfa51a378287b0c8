//! Live bytes over time, in constant memory.
//!
//! A [`Timeline`] has a fixed number of slots for a run of any length. When they are full,
//! neighbours are merged in pairs and each slot from then on covers twice as many samples. Of the
//! samples a slot covers it keeps the one with the most live bytes, so merging never loses a peak;
//! lows are lost first. Time is the caller's: nothing here reads a clock.
//!
//! ```
//! use tallow_memory::{Terms, timeline::Timeline};
//!
//! let mut timeline = Timeline::new(4);
//! for step in 0..1000u64 {
//!     let live_bytes = if step == 617 { 9000 } else { 100 + step % 7 };
//!     timeline.sample(step as f64, live_bytes, Terms::ZERO);
//! }
//! assert!(timeline.samples().len() <= 4);
//! assert_eq!(timeline.peak().map(|s| (s.elapsed_secs, s.live_bytes)), Some((617.0, 9000)));
//! ```

use crate::{ledger::Ledger, meter::Meter, terms::Terms};

/// What was live at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Seconds by the caller's clock.
    pub elapsed_secs: f64,
    /// Bytes live.
    pub live_bytes: u64,
    /// What they were for.
    pub terms: Terms,
}

/// Heap bytes of a timeline of `n_slots`: 80 a slot, all of them from the start.
pub const fn timeline_bytes(n_slots: usize) -> u64 {
    (size_of::<Sample>() * n_slots) as u64
}

/// Samples of a run in a fixed number of slots; see the [module](self).
#[derive(Clone, Debug)]
pub struct Timeline {
    slots: Vec<Sample>,
    n_slots: usize,
    samples_per_slot: u64,
    /// Samples that went into the last slot; the others are full.
    n_in_last: u64,
}

impl Timeline {
    /// An empty timeline.
    ///
    /// # Panics
    /// If `n_slots` is 0 or odd: slots merge in pairs.
    pub fn new(n_slots: usize) -> Self {
        assert!(n_slots > 0 && n_slots.is_multiple_of(2), "Timeline::new: {n_slots} slots");
        Self { slots: Vec::with_capacity(n_slots), n_slots, samples_per_slot: 1, n_in_last: 0 }
    }

    /// Adds a sample.
    pub fn sample(&mut self, elapsed_secs: f64, live_bytes: u64, terms: Terms) {
        let sample = Sample { elapsed_secs, live_bytes, terms };
        match self.slots.last_mut() {
            Some(last) if self.n_in_last < self.samples_per_slot => {
                *last = higher(*last, sample);
                self.n_in_last += 1;
            }
            _ => {
                if self.slots.len() == self.n_slots {
                    self.merge_pairs();
                }
                self.slots.push(sample);
                self.n_in_last = 1;
            }
        }
    }

    /// Adds what `meter` sees now, divided as `ledger` says; the rest is `Other`.
    pub fn record(&mut self, elapsed_secs: f64, meter: &dyn Meter, ledger: &Ledger) {
        let held = ledger.current();
        let live_bytes = meter.current_bytes();
        self.sample(elapsed_secs, live_bytes, held.reconciled(live_bytes));
    }

    /// The kept samples, in the order they came.
    pub fn samples(&self) -> &[Sample] {
        &self.slots
    }

    /// How many samples a full slot stands for: 1, 2, 4, ...
    pub fn samples_per_slot(&self) -> u64 {
        self.samples_per_slot
    }

    /// The sample with the most live bytes of all, the first on a tie; `None` before any.
    pub fn peak(&self) -> Option<Sample> {
        self.slots.iter().copied().reduce(higher)
    }

    /// Called when every slot is full, so each pair covers the same number of samples.
    fn merge_pairs(&mut self) {
        for i in 0..self.n_slots / 2 {
            self.slots[i] = higher(self.slots[2 * i], self.slots[2 * i + 1]);
        }
        self.slots.truncate(self.n_slots / 2);
        self.samples_per_slot *= 2;
    }
}

fn higher(earlier: Sample, later: Sample) -> Sample {
    if later.live_bytes > earlier.live_bytes { later } else { earlier }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Category, Terms};

    /// Whatever the length, the slots are those of a plain maximum over equal stretches.
    #[test]
    fn slots_are_maxima_of_equal_stretches() {
        for n_samples in [0usize, 1, 2, 7, 8, 9, 63, 64, 65, 1000, 4097] {
            let live: Vec<u64> = (0..n_samples as u64).map(|i| i * 7919 % 1009).collect();
            let mut timeline = Timeline::new(8);
            for (i, &live_bytes) in live.iter().enumerate() {
                let terms = Terms { other_bytes: live_bytes, ..Terms::ZERO };
                timeline.sample(i as f64, live_bytes, terms);
            }
            let stretches = live.chunks(timeline.samples_per_slot() as usize);
            let maxima: Vec<u64> = stretches.map(|part| *part.iter().max().unwrap()).collect();
            let kept = timeline.samples();
            assert!(kept.iter().map(|sample| sample.live_bytes).eq(maxima), "{n_samples}");
            assert!(kept.iter().all(|s| s.terms.other_bytes == s.live_bytes));
            assert!(kept.iter().all(|s| live[s.elapsed_secs as usize] == s.live_bytes));
            assert!(kept.is_sorted_by(|a, b| a.elapsed_secs < b.elapsed_secs));
            assert_eq!(timeline.peak().map(|s| s.live_bytes), live.iter().copied().max());
            assert_eq!(timeline.slots.capacity() * 80, timeline_bytes(8) as usize);
        }
    }

    #[test]
    fn a_record_names_what_the_ledger_knows() {
        let (ledger, mut timeline) = (Ledger::new(), Timeline::new(2));
        let _saved = ledger.hold(Category::SavedActivations, 30);
        timeline.record(1.5, &crate::FnMeter::new(|| Some(100)), &ledger);
        let sample = timeline.samples()[0];
        assert_eq!((sample.elapsed_secs, sample.live_bytes), (1.5, 100));
        assert_eq!(sample.terms.to_string(), "saved activations 30 + other 70 = 100 bytes");
    }

    #[test]
    #[should_panic(expected = "3 slots")]
    fn odd_slots_are_a_programmer_error() {
        Timeline::new(3);
    }
}

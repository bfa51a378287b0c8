use crate::guard::Trip;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// How many [`Scope`]s of one allocator may be open at once: one bit of a word each.
pub const MAX_SCOPES: usize = u64::BITS as usize;

/// The counts behind an allocator. Every operation is a relaxed read-modify-write: each count is
/// exact by itself, and a reader that has joined the counting threads sees all of their work.
#[derive(Debug)]
pub(crate) struct Counters {
    current_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    n_allocations: AtomicU64,
    /// Above it an addition leaves a trip behind; `u64::MAX` is none.
    cap_bytes: AtomicU64,
    /// Largest single addition that ended above the cap. Written before `trip_live_bytes`.
    trip_asked_bytes: AtomicU64,
    /// The most bytes held above the cap; 0 is no trip.
    trip_live_bytes: AtomicU64,
    /// Bit `i`: slot `i` belongs to an open scope.
    claimed: AtomicU64,
    /// Bit `i`: slot `i` takes part in counting. Set after its peak was cleared.
    counting: AtomicU64,
    scope_peak_bytes: [AtomicU64; MAX_SCOPES],
}

impl Counters {
    pub(crate) const fn new() -> Self {
        Self {
            current_bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            n_allocations: AtomicU64::new(0),
            cap_bytes: AtomicU64::new(u64::MAX),
            trip_asked_bytes: AtomicU64::new(0),
            trip_live_bytes: AtomicU64::new(0),
            claimed: AtomicU64::new(0),
            counting: AtomicU64::new(0),
            scope_peak_bytes: [const { AtomicU64::new(0) }; MAX_SCOPES],
        }
    }

    pub(crate) fn count_allocation(&self) {
        self.n_allocations.fetch_add(1, Relaxed);
    }

    /// The sum this very addition produced is what the peaks see, so no height is missed between
    /// two threads' additions.
    pub(crate) fn add(&self, n_bytes: u64) {
        let now_bytes = self.current_bytes.fetch_add(n_bytes, Relaxed) + n_bytes;
        self.peak_bytes.fetch_max(now_bytes, Relaxed);
        if now_bytes > self.cap_bytes.load(Relaxed) {
            self.trip(n_bytes, now_bytes);
        }
        let mut slots = self.counting.load(Relaxed);
        while slots != 0 {
            let slot = slots.trailing_zeros() as usize;
            self.scope_peak_bytes[slot].fetch_max(now_bytes, Relaxed);
            slots &= slots - 1;
        }
    }

    #[cold]
    fn trip(&self, asked_bytes: u64, live_bytes: u64) {
        self.trip_asked_bytes.fetch_max(asked_bytes, Relaxed);
        self.trip_live_bytes.fetch_max(live_bytes, Release);
    }

    pub(crate) fn set_cap(&self, cap_bytes: u64) {
        self.cap_bytes.store(cap_bytes, Relaxed);
    }

    pub(crate) fn cap_bytes(&self) -> u64 {
        self.cap_bytes.load(Relaxed)
    }

    pub(crate) fn tripped(&self) -> Option<Trip> {
        self.trip_of(self.trip_live_bytes.load(Acquire))
    }

    pub(crate) fn take_trip(&self) -> Option<Trip> {
        // Every checkpoint of a step that stays within the cap ends at this load.
        if self.trip_live_bytes.load(Relaxed) == 0 {
            return None;
        }
        let trip = self.trip_of(self.trip_live_bytes.swap(0, AcqRel));
        self.trip_asked_bytes.store(0, Relaxed);
        trip
    }

    fn trip_of(&self, live_bytes: u64) -> Option<Trip> {
        let asked_bytes = self.trip_asked_bytes.load(Relaxed);
        (live_bytes > 0).then(|| Trip { asked_bytes, live_bytes, cap_bytes: self.cap_bytes() })
    }

    pub(crate) fn subtract(&self, n_bytes: u64) {
        self.current_bytes.fetch_sub(n_bytes, Relaxed);
    }

    pub(crate) fn current_bytes(&self) -> u64 {
        self.current_bytes.load(Relaxed)
    }

    /// An addition in another thread may have reached the current count and not yet the peak.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Relaxed).max(self.current_bytes())
    }

    pub(crate) fn n_allocations(&self) -> u64 {
        self.n_allocations.load(Relaxed)
    }

    /// Clears before it looks: an addition that comes between is seen by one of the two.
    pub(crate) fn reset_peak(&self) {
        self.peak_bytes.swap(0, Relaxed);
        self.peak_bytes.fetch_max(self.current_bytes(), Relaxed);
    }

    pub(crate) fn scope(&self) -> Scope<'_> {
        let slot = self.claim_slot();
        self.scope_peak_bytes[slot].swap(0, Relaxed);
        self.counting.fetch_or(1 << slot, Relaxed);
        let start_bytes = self.current_bytes();
        self.scope_peak_bytes[slot].fetch_max(start_bytes, Relaxed);
        Scope { counters: self, slot, start_bytes }
    }

    fn claim_slot(&self) -> usize {
        let lowest_free = |claimed: u64| (claimed != u64::MAX).then(|| claimed | (claimed + 1));
        let before = self.claimed.fetch_update(Relaxed, Relaxed, lowest_free);
        let before =
            before.unwrap_or_else(|_| panic!("scope: {MAX_SCOPES} scopes are open already"));
        (!before).trailing_zeros() as usize
    }

    fn release_slot(&self, slot: usize) {
        self.counting.fetch_and(!(1 << slot), Relaxed);
        self.claimed.fetch_and(!(1 << slot), Relaxed);
    }
}

/// The bytes of a stretch of the program: its growth and its own peak, above where it started.
///
/// Each open scope has a slot with its own peak, so scopes may nest, overlap and end in any order,
/// and neither another scope nor [`reset_peak`](crate::CountingAllocator::reset_peak) changes what
/// this one reports. A scope counts the whole process: what *any* thread allocates while it is open.
/// Two scopes open at once in two threads both see the work of both. An allocation under way in
/// another thread at the moment a scope opens may count on either side of the opening.
///
/// Costs no heap, and one atomic maximum for each allocation while it is open.
#[derive(Debug)]
#[must_use = "a scope measures until it is dropped"]
pub struct Scope<'a> {
    counters: &'a Counters,
    slot: usize,
    start_bytes: u64,
}

impl Scope<'_> {
    /// Bytes that were held when the scope opened.
    pub fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Bytes held now above the start; 0 when less is held now than then.
    pub fn current_bytes(&self) -> u64 {
        self.counters.current_bytes().saturating_sub(self.start_bytes)
    }

    /// The most bytes held at once above the start, since the scope opened.
    pub fn peak_bytes(&self) -> u64 {
        let peak_bytes = self.counters.scope_peak_bytes[self.slot].load(Relaxed);
        peak_bytes.max(self.counters.current_bytes()).saturating_sub(self.start_bytes)
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        self.counters.release_slot(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_may_end_in_any_order() {
        let counters = Counters::new();
        counters.add(100);
        let outer = counters.scope();
        counters.add(50);
        let inner = counters.scope();
        counters.add(7);
        counters.subtract(57);
        assert_eq!((outer.peak_bytes(), inner.peak_bytes()), (57, 7));
        drop(outer); // before the inner one
        counters.add(90);
        assert_eq!((inner.current_bytes(), inner.peak_bytes()), (40, 40));
        assert_eq!(counters.peak_bytes(), 190);
    }

    #[test]
    fn a_reused_slot_forgets_its_last_scope() {
        let counters = Counters::new();
        let first = counters.scope();
        counters.add(1000);
        counters.subtract(1000);
        assert_eq!((first.slot, first.peak_bytes()), (0, 1000));
        drop(first);
        let second = counters.scope();
        assert_eq!((second.slot, second.peak_bytes()), (0, 0));
    }

    #[test]
    fn resetting_the_peak_leaves_scopes_alone() {
        let counters = Counters::new();
        let scope = counters.scope();
        counters.add(30);
        counters.subtract(20);
        counters.reset_peak();
        assert_eq!((counters.peak_bytes(), scope.peak_bytes()), (10, 30));
    }

    #[test]
    fn an_addition_above_the_cap_leaves_one_trip() {
        let counters = Counters::new();
        counters.add(u64::MAX / 2); // no cap
        counters.subtract(u64::MAX / 2);
        counters.set_cap(100);
        counters.add(100); // at the cap is within it
        assert_eq!(counters.tripped(), None);
        counters.add(5);
        counters.add(30);
        counters.subtract(135);
        counters.add(101);
        let trip = Trip { asked_bytes: 101, live_bytes: 135, cap_bytes: 100 };
        assert_eq!((counters.tripped(), counters.take_trip()), (Some(trip), Some(trip)));
        assert_eq!((counters.tripped(), counters.take_trip()), (None, None));
        counters.add(1); // still above: the next addition trips anew
        assert_eq!(counters.take_trip().unwrap().asked_bytes, 1);
    }

    #[test]
    fn every_slot_can_be_open_at_once() {
        let counters = Counters::new();
        let mut scopes: Vec<_> = (0..MAX_SCOPES).map(|_| counters.scope()).collect();
        drop(scopes.remove(17));
        assert_eq!(counters.scope().slot, 17);
    }

    #[test]
    #[should_panic(expected = "64 scopes are open already")]
    fn one_scope_too_many_is_a_programmer_error() {
        let counters = Counters::new();
        let _scopes: Vec<_> = (0..=MAX_SCOPES).map(|_| counters.scope()).collect();
    }
}

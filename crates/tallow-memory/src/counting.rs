use crate::{
    counters::{Counters, Scope},
    guard::Trip,
    meter::Meter,
};
use std::alloc::{GlobalAlloc, Layout};

/// An allocator that counts the bytes asked of the one it wraps.
///
/// It counts what the program asked for, not what the inner allocator rounds it up to, and only
/// requests that succeeded. A `realloc` counts by the difference: if the inner allocator moves the
/// block, the moment in which it holds both copies is not seen.
///
/// *Cost:* two relaxed atomic operations and two loads more for an allocation than without it, one
/// operation for a release, one for each open [`Scope`]; nothing is stored beside the blocks.
///
/// # A cap that trips
/// An allocator that refuses ends the process: `Vec` and `Box` abort on a null pointer. So an
/// allocation that ends above [`CountingAllocator::set_cap`] is granted, and leaves a [`Trip`]
/// behind. The next checkpoint, [`Watermark::check`](crate::Watermark::check) between two segments
/// of a step, takes it and returns an error with its numbers; the step unwinds as from any other.
/// Between the two the process holds more than the cap, by what one segment asks at most.
///
/// It is a global counter by nature: install it as a `static` with `#[global_allocator]`.
#[derive(Debug)]
pub struct CountingAllocator<A> {
    inner: A,
    counters: Counters,
}

impl<A> CountingAllocator<A> {
    /// Wraps `inner`, all counts 0.
    pub const fn new(inner: A) -> Self {
        Self { inner, counters: Counters::new() }
    }

    /// Bytes held now.
    pub fn current_bytes(&self) -> u64 {
        self.counters.current_bytes()
    }

    /// The most bytes held at once since the last [`CountingAllocator::reset_peak`], or the start.
    pub fn peak_bytes(&self) -> u64 {
        self.counters.peak_bytes()
    }

    /// Makes what is held now the peak. Open scopes keep theirs.
    pub fn reset_peak(&self) {
        self.counters.reset_peak();
    }

    /// Requests granted so far: `alloc`, `alloc_zeroed` and `realloc`.
    pub fn n_allocations(&self) -> u64 {
        self.counters.n_allocations()
    }

    /// From now on an allocation after which more than `cap_bytes` are held leaves a [`Trip`] behind,
    /// whichever thread made it. `u64::MAX`, the start, is no cap.
    pub fn set_cap(&self, cap_bytes: u64) {
        self.counters.set_cap(cap_bytes);
    }

    /// The cap; `u64::MAX` is none.
    pub fn cap_bytes(&self) -> u64 {
        self.counters.cap_bytes()
    }

    /// What was allocated above the cap since [`Meter::take_trip`] last took it. Left in place.
    pub fn tripped(&self) -> Option<Trip> {
        self.counters.tripped()
    }

    /// Opens a scope: growth and peak from here until it is dropped.
    ///
    /// # Panics
    /// If [`MAX_SCOPES`](crate::MAX_SCOPES) scopes are open already.
    pub fn scope(&self) -> Scope<'_> {
        self.counters.scope()
    }
}

impl<A: Send + Sync> Meter for CountingAllocator<A> {
    fn current_bytes(&self) -> u64 {
        self.counters.current_bytes()
    }

    fn peak_bytes(&self) -> u64 {
        self.counters.peak_bytes()
    }

    fn reset_peak(&self) {
        self.counters.reset_peak();
    }

    fn peak_scope(&self) -> Option<Scope<'_>> {
        Some(self.counters.scope())
    }

    fn take_trip(&self) -> Option<Trip> {
        self.counters.take_trip()
    }
}

// SAFETY: every request goes unchanged to `inner`, a `GlobalAlloc`, and its answer comes back
// unchanged; counting touches neither and never allocates or unwinds.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `alloc`'s contract, which is `inner`'s.
        let block = unsafe { self.inner.alloc(layout) };
        self.count_block(block, layout);
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `alloc_zeroed`'s contract, which is `inner`'s.
        let block = unsafe { self.inner.alloc_zeroed(layout) };
        self.count_block(block, layout);
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // Before the release: another thread may be given this very block as soon as it is free.
        self.counters.subtract(layout.size() as u64);
        // SAFETY: the caller vouches that `block` came from here with `layout`, thus from `inner`.
        unsafe { self.inner.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller vouches that `block` came from here with `layout`, thus from `inner`,
        // and that `new_size` is allowed.
        let moved = unsafe { self.inner.realloc(block, layout, new_size) };
        if !moved.is_null() {
            self.counters.count_allocation();
            let (old_bytes, new_bytes) = (layout.size() as u64, new_size as u64);
            match new_bytes.checked_sub(old_bytes) {
                Some(grown_bytes) => self.counters.add(grown_bytes),
                None => self.counters.subtract(old_bytes - new_bytes),
            }
        }
        moved
    }
}

impl<A> CountingAllocator<A> {
    fn count_block(&self, block: *mut u8, layout: Layout) {
        if !block.is_null() {
            self.counters.count_allocation();
            self.counters.add(layout.size() as u64);
        }
    }
}

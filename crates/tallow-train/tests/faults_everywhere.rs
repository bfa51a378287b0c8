//! Memory that runs out at every single allocation of an update. One test: it has the process to
//! itself.

mod support;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};
use support::{Net, Setup, State, dynamic, nested};
use tallow_memory::{
    Error as MemoryError, Ledger, Meter, Trip, Watermark,
    batch::{Controller, ControllerConfig},
};
use tallow_train::{Error, Recipe, Sizing, Watch, precision::Policy, recompute::Plan};

const N_SEGMENTS: usize = 4;
const BATCH: usize = 4;

/// Grants everything, and notes that the `at`th request was one too many.
struct Faulty {
    n_requests: AtomicU64,
    at: AtomicU64,
    tripped: AtomicBool,
}

#[global_allocator]
static ALLOCATOR: Faulty = Faulty {
    n_requests: AtomicU64::new(0),
    at: AtomicU64::new(0),
    tripped: AtomicBool::new(false),
};

impl Faulty {
    fn count(&self) {
        if self.n_requests.fetch_add(1, Relaxed) + 1 == self.at.load(Relaxed) {
            self.tripped.store(true, Relaxed);
        }
    }

    /// The `at`th request from now on trips; 0 is none.
    fn arm(&self, at: u64) {
        self.tripped.store(false, Relaxed);
        self.n_requests.store(0, Relaxed);
        self.at.store(at, Relaxed);
    }
}

// SAFETY: every request goes unchanged to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Faulty {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count();
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.count();
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller vouches for the block.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        self.count();
        // SAFETY: the caller vouches for the block and the size.
        unsafe { System.realloc(block, layout, new_size) }
    }
}

impl Meter for Faulty {
    fn current_bytes(&self) -> u64 {
        0
    }

    fn peak_bytes(&self) -> u64 {
        0
    }

    fn reset_peak(&self) {}

    fn take_trip(&self) -> Option<Trip> {
        let (asked_bytes, live_bytes, cap_bytes) = (1, 101, 100);
        let tripped = self.tripped.swap(false, Relaxed);
        tripped.then_some(Trip { asked_bytes, live_bytes, cap_bytes })
    }
}

/// In the midst of training: one update is behind it.
fn started(micro_batch: usize, plan: &Plan) -> Setup {
    let mut setup = Setup::new(Net::Mixed, &Policy::f32(), (BATCH, micro_batch), |recipe| Recipe {
        loss_scale: dynamic(1024.0),
        recompute: plan.clone(),
        ..recipe
    });
    let guard = Watermark::off(Ledger::new());
    setup.trainer.watch(Watch::new(guard, &ALLOCATOR));
    setup.trainer.size_by(Sizing::fixed(BATCH)).expect("sums are kept");
    let _update = setup.update(BATCH, 0).expect("updates");
    setup
}

fn shrinking() -> Sizing {
    let config = ControllerConfig { min_items: 1, ..ControllerConfig::fixed(BATCH) };
    let controller = Controller::new(config).expect("sizes in order");
    Sizing { controller, limit_bytes: u64::MAX, clock: Box::new(|| 0.0) }
}

/// The state after the second update in micro-batches of `size`.
fn straight(size: usize, plan: &Plan) -> State {
    let mut setup = started(BATCH, plan);
    setup.trainer.size_by(Sizing::fixed(size)).expect("sums are kept");
    let _update = setup.update(BATCH, 1).expect("updates");
    setup.state()
}

#[test]
fn at_every_allocation_an_update_is_made_smaller_or_not_at_all() {
    tallow_testkit::with_one_worker();
    for plan in [Plan::keep_all(N_SEGMENTS), nested(0, N_SEGMENTS)] {
        let (whole, halves) = (straight(BATCH, &plan), straight(BATCH / 2, &plan));
        let before = started(BATCH, &plan).state();
        let (mut n_shrunk, mut n_failed, mut n_late) = (0, 0, 0);
        let mut at = 1;
        loop {
            let mut smaller = started(BATCH, &plan);
            smaller.trainer.size_by(shrinking()).expect("sums are kept");
            ALLOCATOR.arm(at);
            let update = smaller.update(BATCH, 1).expect("fits in the end");
            let n_requests = ALLOCATOR.n_requests.load(Relaxed);
            ALLOCATOR.arm(0);
            let want = if update.n_micro_batches == 2 { &halves } else { &whole };
            smaller.state().assert_same(want, &format!("{plan}, allocation {at}"));
            n_shrunk += u64::from(update.n_micro_batches == 2);

            let mut fixed = started(BATCH, &plan);
            ALLOCATOR.arm(at);
            let result = fixed.update(BATCH, 1);
            ALLOCATOR.arm(0);
            match result {
                Err(Error::Memory(MemoryError::OverCap { .. })) => {
                    n_failed += 1;
                    fixed.state().assert_same(&before, &format!("{plan}, allocation {at} failed"));
                }
                Err(error) => panic!("{error}"),
                // Granted after the last checkpoint: in the step itself, which is never half made.
                Ok(_) => {
                    n_late += 1;
                    fixed.state().assert_same(&whole, &format!("{plan}, allocation {at} late"));
                }
            }
            if n_requests < at {
                break;
            }
            at += 1;
        }
        println!("{plan}: {at} allocations, {n_shrunk} shrunk, {n_failed} failed, {n_late} late");
        assert!(n_failed > 100 && n_late > 1, "{n_failed} failed, {n_late} late");
        assert_eq!(n_shrunk, n_failed, "{plan}");
    }
}

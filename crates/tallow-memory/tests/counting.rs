//! Exact counts, with the allocator installed. No test harness: the counters are the process's, and
//! the harness allocates in threads of its own.
use std::{
    alloc::{GlobalAlloc, Layout, System},
    hint::black_box,
    sync::Barrier,
    thread,
};
use tallow_memory::{CountingAllocator, Meter, Trip, peak_during};

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

fn main() {
    assert_eq!(size_of::<CountingAllocator<System>>(), 576); // the figure the documentation names
    vec_growth();
    realloc_down_and_up();
    zeroed_and_zero_sized();
    nested_scopes();
    scope_after_free();
    peak_reset();
    a_meter_behind_a_reference();
    threads_at_once();
    peak_across_threads();
    a_refused_request_is_not_counted();
    peaks_of_nested_calls();
    a_cap_trips_once_whoever_passes_it();
    println!("counts are exact");
}

fn vec_growth() {
    let (scope, before) = (ALLOC.scope(), ALLOC.n_allocations());
    let mut grown: Vec<u64> = Vec::with_capacity(4);
    assert_eq!((scope.current_bytes(), ALLOC.n_allocations() - before), (32, 1));
    grown.extend([1, 2, 3, 4]);
    grown.push(5); // doubles by `realloc`
    assert_eq!((grown.capacity(), scope.current_bytes()), (8, 64));
    assert_eq!((scope.peak_bytes(), ALLOC.n_allocations() - before), (64, 2));
    drop(black_box(grown));
    assert_eq!((scope.current_bytes(), scope.peak_bytes()), (0, 64));
}

fn realloc_down_and_up() {
    let scope = ALLOC.scope();
    let mut bytes: Vec<u8> = Vec::with_capacity(1000);
    bytes.extend_from_slice(&[7; 100]);
    bytes.shrink_to_fit();
    assert_eq!((scope.current_bytes(), scope.peak_bytes()), (100, 1000));
    bytes.reserve_exact(400);
    assert_eq!((scope.current_bytes(), scope.peak_bytes()), (500, 1000));
    bytes.reserve_exact(2900);
    assert_eq!((scope.current_bytes(), scope.peak_bytes()), (3000, 3000));
}

fn zeroed_and_zero_sized() {
    let (scope, before) = (ALLOC.scope(), ALLOC.n_allocations());
    let zeroed = black_box(vec![0u8; 12_345]);
    assert_eq!(scope.current_bytes(), 12_345);
    drop(zeroed);
    drop(black_box((Vec::<u8>::new(), Box::new(()), vec![(); 1 << 40])));
    assert_eq!((scope.current_bytes(), ALLOC.n_allocations() - before), (0, 1));
}

fn nested_scopes() {
    ALLOC.reset_peak();
    let outer = ALLOC.scope();
    let kept = black_box(vec![0u8; 1000]);
    drop(black_box(vec![0u8; 5000]));
    for inner_bytes in [300, 100, 200] {
        let inner = ALLOC.scope();
        drop(black_box(vec![0u8; inner_bytes as usize]));
        assert_eq!((inner.current_bytes(), inner.peak_bytes()), (0, inner_bytes));
        assert_eq!(inner.start_bytes(), outer.start_bytes() + 1000);
    }
    assert_eq!((outer.current_bytes(), outer.peak_bytes()), (1000, 6000));
    assert_eq!(ALLOC.peak_bytes(), outer.start_bytes() + 6000);
    drop(kept);
    {
        let inner = ALLOC.scope();
        drop(black_box(vec![0u8; 9000]));
        assert_eq!((inner.peak_bytes(), outer.peak_bytes()), (9000, 9000));
    }
    assert_eq!((outer.current_bytes(), outer.peak_bytes()), (0, 9000));
}

fn scope_after_free() {
    let held = black_box(vec![0u8; 4000]);
    let scope = ALLOC.scope();
    drop(held);
    assert_eq!((scope.current_bytes(), scope.peak_bytes()), (0, 0));
    drop(black_box(vec![0u8; 3000])); // still below the start
    assert_eq!(scope.peak_bytes(), 0);
    drop(black_box(vec![0u8; 4500]));
    assert_eq!(scope.peak_bytes(), 500);
}

fn peak_reset() {
    drop(black_box(vec![0u8; 1 << 20]));
    assert!(ALLOC.peak_bytes() >= ALLOC.current_bytes() + (1 << 20));
    ALLOC.reset_peak();
    assert_eq!(ALLOC.peak_bytes(), ALLOC.current_bytes());
}

fn a_meter_behind_a_reference() {
    let meter: &dyn Meter = &ALLOC;
    meter.reset_peak();
    let start_bytes = meter.current_bytes();
    drop(black_box(vec![0u8; 777]));
    assert_eq!(meter.peak_bytes(), start_bytes + 777);
}

/// Many threads allocate, grow and free; when they are joined nothing is left over.
fn threads_at_once() {
    const N_THREADS: usize = 8;
    let counter = CountingAllocator::new(System);
    let scope = counter.scope();
    let before = counter.n_allocations();
    thread::scope(|threads| {
        for seed in 1..=N_THREADS {
            let counter = &counter;
            threads.spawn(move || {
                (0..2000).for_each(|round| grow_and_free(counter, seed * 64 + round % 50))
            });
        }
    });
    assert_eq!((counter.current_bytes(), scope.current_bytes()), (0, 0));
    assert_eq!(counter.n_allocations() - before, 2 * 2000 * N_THREADS as u64);
    assert!(
        scope.peak_bytes() >= 2 * 64 * N_THREADS as u64
            && scope.peak_bytes() == counter.peak_bytes()
    );
}

fn grow_and_free(counter: &CountingAllocator<System>, n_bytes: usize) {
    let layout = Layout::from_size_align(n_bytes, 8).unwrap();
    let doubled = Layout::from_size_align(2 * n_bytes, 8).unwrap();
    // SAFETY: sizes are not zero, and each block is used with the layout it was last given.
    unsafe {
        let block = counter.alloc(layout);
        let block = counter.realloc(block, layout, doubled.size());
        counter.dealloc(block, doubled);
    }
}

/// All threads hold their block at the barrier: the peak is the exact sum, also seen by the scope.
fn peak_across_threads() {
    const N_THREADS: u64 = 6;
    let counter = CountingAllocator::new(System);
    let (scope, barrier) = (counter.scope(), Barrier::new(N_THREADS as usize));
    thread::scope(|threads| {
        for thread_bytes in (1..=N_THREADS).map(|i| 1000 * i) {
            let (counter, barrier) = (&counter, &barrier);
            threads.spawn(move || {
                let layout = Layout::from_size_align(thread_bytes as usize, 16).unwrap();
                // SAFETY: the size is not zero; the block is freed once, with its layout.
                let block = unsafe { counter.alloc_zeroed(layout) };
                barrier.wait();
                // SAFETY: as above.
                unsafe { counter.dealloc(block, layout) };
            });
        }
    });
    assert_eq!((counter.peak_bytes(), scope.peak_bytes()), (21_000, 21_000));
    assert_eq!(counter.current_bytes(), 0);
}

/// An allocator that never has memory.
struct Exhausted;

// SAFETY: null is the documented answer of an allocator that has no memory; nothing is ever given.
unsafe impl GlobalAlloc for Exhausted {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        std::ptr::null_mut()
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {
        unreachable!("nothing was given")
    }

    unsafe fn realloc(&self, _: *mut u8, _: Layout, _: usize) -> *mut u8 {
        std::ptr::null_mut()
    }
}

fn a_refused_request_is_not_counted() {
    let counter = CountingAllocator::new(Exhausted);
    let layout = Layout::from_size_align(1 << 20, 8).unwrap();
    // SAFETY: the size is not zero; `Exhausted::realloc` looks at nothing behind the pointer.
    unsafe {
        assert!(counter.alloc(layout).is_null());
        assert!(counter.alloc_zeroed(layout).is_null());
        assert!(counter.realloc(std::ptr::dangling_mut(), layout, 1 << 21).is_null());
    }
    assert_eq!((counter.current_bytes(), counter.peak_bytes(), counter.n_allocations()), (0, 0, 0));
}

fn peaks_of_nested_calls() {
    let outer = || {
        drop(black_box(vec![0u8; 5000]));
        let _kept = black_box(vec![0u8; 1000]);
        peak_during(&ALLOC, || drop(black_box(vec![0u8; 300]))).1
    };
    assert_eq!(peak_during(&ALLOC, outer), (300, 5000));
}

/// Threads pass the cap by `alloc` and by `realloc`; all is granted, and one trip is left behind.
fn a_cap_trips_once_whoever_passes_it() {
    let counter = CountingAllocator::new(System);
    counter.set_cap(1000);
    grow_and_free(&counter, 500); // 500, then 1000: at the cap
    assert_eq!((counter.cap_bytes(), counter.tripped()), (1000, None));
    thread::scope(|threads| {
        for n_bytes in [501, 700, 1200] {
            let counter = &counter;
            threads.spawn(move || grow_and_free(counter, n_bytes)).join().unwrap();
        }
    });
    let trip = Trip { asked_bytes: 1200, live_bytes: 2400, cap_bytes: 1000 };
    assert_eq!((counter.tripped(), counter.take_trip()), (Some(trip), Some(trip)));
    assert_eq!((counter.take_trip(), counter.current_bytes()), (None, 0));
    counter.set_cap(u64::MAX);
    grow_and_free(&counter, 5000);
    assert_eq!(counter.take_trip(), None);
}

//! What the ledger says at every checkpoint of an update, against the counting allocator. One test:
//! it has the process to itself.

mod support;

use std::{
    alloc::System,
    sync::{Arc, Mutex},
};
use support::{Net, Setup, nested};
use tallow_memory::{Category, CountingAllocator, Ledger, Terms, Watermark};
use tallow_train::{Flow, Gradients, Recipe, Watch, precision::Policy, recompute::Plan};

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator::new(System);

const N_SEGMENTS: usize = 4;
const BATCH: usize = 64;
/// Weight and bias of `first`, the segment with the most parameters.
const MOST_GRADIENTS: u64 = (12 * 16 + 16) * 4;
const BATCH_BYTES: u64 = (BATCH * (12 + 1) * 4) as u64;

/// Terms at each checkpoint of the third update, and what is left after it.
fn seen(plan: &Plan, gradients: Gradients) -> (Vec<(Terms, u64)>, Terms) {
    let mut setup = Setup::new(Net::Mixed, &Policy::f32(), (BATCH, BATCH), |recipe| Recipe {
        recompute: plan.clone(),
        gradients,
        ..recipe
    });
    let ledger = Ledger::new();
    setup.trainer.account(&ledger);
    let moments = Arc::new(Mutex::new(Vec::with_capacity(100)));
    let tick = {
        let (moments, ledger) = (Arc::clone(&moments), ledger.clone());
        Box::new(move || {
            let moment = (ledger.current(), ALLOCATOR.current_bytes());
            moments.lock().expect("no panic").push(moment);
            Flow::Go
        })
    };
    let guard = Watermark::off(ledger.clone());
    setup.trainer.watch(Watch { tick, ..Watch::new(guard, &ALLOCATOR) });
    for seed in 0..3 {
        moments.lock().expect("no panic").clear();
        let _update = setup.update(BATCH, seed).expect("updates");
    }
    let moments = moments.lock().expect("no panic").clone();
    (moments, ledger.current())
}

fn most(moments: &[(Terms, u64)], category: Category) -> u64 {
    moments.iter().map(|(terms, _)| terms[category]).max().expect("checkpoints")
}

#[test]
fn every_category_is_fed() {
    tallow_testkit::with_one_worker();
    let (kept, after) = seen(&Plan::keep_all(N_SEGMENTS), Gradients::Summed);
    let (redone, _) = seen(&nested(0, N_SEGMENTS), Gradients::Summed);
    // Forward of each segment, then backward of the three that have parameters.
    assert_eq!(kept.len(), 7);
    for (terms, live_bytes) in kept.iter().chain(&redone) {
        assert!(terms.total_bytes() <= *live_bytes, "{terms} of {live_bytes}");
        assert_eq!(terms[Category::Data], BATCH_BYTES);
        assert_eq!(terms[Category::OptimizerState], 2 * terms[Category::Accumulators]);
    }
    for moments in [&kept, &redone] {
        assert_eq!(most(moments, Category::Gradients), MOST_GRADIENTS);
        // Lists of the pass itself.
        let first = moments[0].0[Category::SavedActivations];
        assert!(first < 1024, "{first} before the first segment");
    }
    // tanh and dropout keep rows of 16 numbers, and so do their inputs.
    let saved = [&kept, &redone].map(|moments| most(moments, Category::SavedActivations));
    assert!(saved[0] > 2 * (BATCH * 16 * 4) as u64, "{saved:?}");
    assert!(saved[1] < saved[0] / 2, "{saved:?}");
    assert!(most(&redone, Category::Transient) > most(&kept, Category::Transient));

    let (released, _) = seen(&Plan::keep_all(N_SEGMENTS), Gradients::Released);
    assert_eq!(most(&released, Category::Accumulators), 0);
    assert_eq!(most(&released, Category::Gradients), MOST_GRADIENTS);

    // Between updates only what the trainer holds is left, and the size of the last batch.
    for category in [Category::SavedActivations, Category::Gradients, Category::Transient] {
        assert_eq!(after[category], 0, "{category}");
    }
    assert!(after[Category::Weights] > 0);
}

//! Back-off and search over fake memory.
use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
    io,
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use tallow_memory::batch::{Failed, Fitted, Largest, Tried, largest_fitting, with_backoff};

/// Sums the items of a batch in pieces, as gradients are; runs out at the first piece above the
/// limit, with some of the sum already made.
struct Batch {
    values: Vec<f64>,
    limit_items: usize,
    sum: Cell<f64>,
    seen: RefCell<Vec<usize>>,
}

impl Batch {
    fn new(n_items: usize, limit_items: usize) -> Self {
        let values = (0..n_items).map(|i| i as f64).collect();
        Batch { values, limit_items, sum: Cell::new(0.0), seen: RefCell::default() }
    }

    fn run(&self, start_items: usize) -> Result<Fitted<Vec<f64>>, Failed<Infallible>> {
        let restore = || {
            self.sum.set(0.0);
            self.seen.borrow_mut().clear();
            Ok(())
        };
        with_backoff(self.values.len(), start_items, restore, |pieces| {
            let mut weights = Vec::new();
            for piece in pieces {
                // The work is dirty before it fails: a part of the sum is there.
                self.seen.borrow_mut().extend(piece.range());
                self.sum.set(self.sum.get() + self.values[piece.range()].iter().sum::<f64>());
                if piece.n_items() > self.limit_items {
                    return Ok(Tried::OutOfMemory);
                }
                weights.push(piece.weight());
            }
            Ok(Tried::Fits(weights))
        })
    }
}

#[test]
fn mem_4_sizes_fall_from_the_original_batch() {
    let batch = Batch::new(16, 1);
    let fitted = batch.run(16).unwrap();
    assert_eq!((fitted.tried, fitted.piece_items), (vec![16, 8, 4, 2, 1], 1));
    assert_eq!(batch.sum.get(), 120.0);
    assert!(batch.seen.borrow().iter().copied().eq(0..16), "each of the 16 items once");
}

#[test]
fn mem_4_no_item_of_an_uneven_batch_is_lost() {
    let batch = Batch::new(10, 4);
    let fitted = batch.run(4).unwrap();
    assert_eq!((fitted.tried, fitted.value), (vec![4], vec![0.4, 0.4, 0.2]));
    assert_eq!((batch.sum.get(), batch.seen.borrow().len()), (45.0, 10));
    let batch = Batch::new(10, 4);
    let fitted = batch.run(10).unwrap();
    assert_eq!((fitted.tried, fitted.value), (vec![10, 5, 2], vec![0.2; 5]));
    assert_eq!(batch.sum.get(), 45.0);
}

#[test]
fn mem_4_the_edges_end() {
    let error = Batch::new(10, 0).run(64).unwrap_err();
    assert_eq!(error.to_string(), "not even 1 item fits, of 10; tried [10, 5, 2, 1]");
    assert!(matches!(Batch::new(0, 1).run(4), Err(Failed::NoWork { .. })));
    assert!(matches!(Batch::new(4, 1).run(0), Err(Failed::NoWork { .. })));
    assert_eq!(Batch::new(4, 4).run(1000).unwrap().tried, [4]);
    let tried = Cell::new(0);
    let other = with_backoff(
        8,
        8,
        || Ok(()),
        |_| -> Result<Tried<()>, io::Error> {
            tried.set(tried.get() + 1);
            Err(io::Error::other("the disk is gone"))
        },
    );
    assert_eq!(other.unwrap_err().to_string(), "the disk is gone");
    assert_eq!(tried.get(), 1);
}

/// Two ranks, one of them short of memory: both reduce the verdict, end at one size, and none
/// waits for the other.
#[test]
fn mem_4_two_ranks_end_at_the_same_size() {
    let (barrier, ran_out) = (Barrier::new(2), AtomicBool::new(false));
    let rank = |limit_items: usize| {
        with_backoff(
            16,
            16,
            || Ok::<(), Infallible>(()),
            |pieces| {
                if pieces.piece_items() > limit_items {
                    ran_out.store(true, Ordering::SeqCst);
                }
                barrier.wait(); // every rank has said so
                let any = ran_out.load(Ordering::SeqCst);
                barrier.wait(); // every rank has read it
                ran_out.store(false, Ordering::SeqCst);
                barrier.wait(); // and no rank clears a later one
                Ok(if any { Tried::OutOfMemory } else { Tried::Fits(()) })
            },
        )
        .unwrap()
        .tried
    };
    thread::scope(|threads| {
        let other = threads.spawn(|| rank(3));
        assert_eq!(rank(100), [16, 8, 4, 2]);
        assert_eq!(other.join().unwrap(), [16, 8, 4, 2]);
    });
}

/// A run whose state is its step, its position and its random state.
#[derive(Clone, Copy, Debug, PartialEq)]
struct State {
    step: u64,
    position: usize,
    random: u64,
    weight_bits: u32,
}

type Found = Result<Largest, Failed<Infallible>>;

/// Searches over a run that stands at step 37; how many updates each trial ran, and what is left.
fn search(max_items: usize, fixed_bytes: u64) -> (Found, Vec<(usize, u64)>) {
    let before = State { step: 37, position: 5, random: 99, weight_bits: 1.5f32.to_bits() };
    let state = Cell::new(before);
    let trials = RefCell::new(Vec::new());
    let restore = || {
        state.set(before);
        Ok(())
    };
    let found = largest_fitting(max_items, restore, |n_items| {
        let mut now = state.get();
        assert_eq!(now, before, "a trial starts from a clean state");
        // Two updates, counted from where the run stands.
        while now.step < before.step + 2 {
            now.step += 1;
            now.position += n_items;
            now.random = now.random.wrapping_mul(6_364_136_223_846_793_005) + 1;
            now.weight_bits = (f32::from_bits(now.weight_bits) * 0.9).to_bits();
            state.set(now);
            let used_bytes = fixed_bytes + 10 * n_items as u64;
            if used_bytes > 2000 {
                trials.borrow_mut().push((n_items, now.step - before.step));
                return Ok(Tried::OutOfMemory);
            }
        }
        trials.borrow_mut().push((n_items, now.step - before.step));
        Ok(Tried::Fits(()))
    });
    assert_eq!(state.get(), before, "the search leaves nothing behind");
    (found, trials.into_inner())
}

#[test]
fn mem_6_the_largest_that_fits_and_the_next_that_does_not() {
    let (found, trials) = search(1000, 1000);
    let found = found.unwrap();
    assert_eq!((found.fits_items, found.fails_items), (100, Some(101)));
    assert!(found.tried.contains(&100) && found.tried.contains(&101));
    assert!(trials.iter().all(|(_, n_updates)| *n_updates >= 1));
    assert!(trials.contains(&(100, 2)) && trials.contains(&(101, 1)));
    assert!(trials.iter().map(|(n_items, _)| n_items).eq(&found.tried));
}

#[test]
fn mem_6_a_small_dataset_is_the_end() {
    let (found, _) = search(64, 1000);
    let found = found.unwrap();
    assert_eq!((found.fits_items, found.fails_items), (64, None));
    assert_eq!(found.tried, [1, 2, 4, 8, 16, 32, 64]);
}

#[test]
fn mem_6_nothing_fits_after_one_trial() {
    let (found, trials) = search(1000, 1991);
    let Failed::NothingFits { n_items: 1000, tried } = found.unwrap_err() else { panic!() };
    assert_eq!((tried, trials), (vec![1], vec![(1, 1)]));
    let none = largest_fitting(0, || Ok::<(), Infallible>(()), |_| unreachable!());
    assert!(matches!(none, Err(Failed::NoWork { .. })));
}

#[test]
fn mem_6_every_edge_is_found_in_few_trials() {
    for max_items in 1..=70usize {
        for limit_items in 1..=75 {
            let trial = |n_items| {
                assert!((1..=max_items).contains(&n_items));
                Ok(if n_items <= limit_items { Tried::Fits(()) } else { Tried::OutOfMemory })
            };
            let found = largest_fitting(max_items, || Ok::<(), Infallible>(()), trial).unwrap();
            assert_eq!(found.fits_items, limit_items.min(max_items));
            let fails_items = (limit_items < max_items).then_some(limit_items + 1);
            assert_eq!(found.fails_items, fails_items);
            assert!(found.tried.len() <= 2 * max_items.ilog2() as usize + 2, "{found:?}");
        }
    }
    let fits_all = |_| Ok::<_, Infallible>(Tried::Fits(()));
    let found = largest_fitting(usize::MAX, || Ok(()), fits_all).unwrap();
    assert_eq!((found.fits_items, found.fails_items), (usize::MAX, None));
}

#[test]
fn mem_6_the_state_is_put_back_after_an_error_too() {
    let n_restored = Cell::new(0);
    let restore = || {
        n_restored.set(n_restored.get() + 1);
        Err(io::Error::other("clean-up"))
    };
    let failed = largest_fitting(8, restore, |_| Err(io::Error::other("trial")));
    assert_eq!((failed.unwrap_err().to_string(), n_restored.get()), ("trial".to_owned(), 1));
}

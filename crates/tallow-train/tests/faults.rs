//! Memory that runs out at every checkpoint of an update, and micro-batches that follow it.

mod support;

use candle_core::{DType, Device, Result, Tensor};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};
use support::{Net, Setup, constant, dynamic, nested, recipe, seen};
use tallow_data::Batch;
use tallow_memory::{
    Error as MemoryError, FaultMeter, FnMeter, Ledger, Meter, NoMeter, Watermark,
    batch::{Controller, ControllerConfig},
};
use tallow_models::{Score, Segments};
use tallow_tensor::{
    Params,
    ops::{CrossEntropy, Loss},
    pass,
};
use tallow_train::{
    Applied, BatchSplit, Error, Recipe, Sizing, Trainer, Watch, optim,
    precision::{Masters, Policy},
    recompute::Plan,
};

const N_SEGMENTS: usize = 4;
const BATCH: usize = 8;

/// A mark that only a fault passes.
fn watch(meter: &'static dyn Meter) -> Watch {
    let guard = Watermark::new(1 << 40, 0.9, Ledger::new()).expect("a share");
    Watch::new(guard, meter)
}

/// Sizes from 1 to `start`, at a clock that stands still.
fn shrinking(start: usize) -> Sizing {
    let config = ControllerConfig { min_items: 1, ..ControllerConfig::fixed(start) };
    let controller = Controller::new(config).expect("sizes in order");
    Sizing { controller, limit_bytes: u64::MAX, clock: Box::new(|| 0.0) }
}

fn setup(micro_batch: usize, plan: &Plan) -> Setup {
    Setup::new(Net::Mixed, &Policy::f32(), (BATCH, micro_batch), |recipe| Recipe {
        loss_scale: dynamic(1024.0),
        recompute: plan.clone(),
        ..recipe
    })
}

fn plans() -> [Plan; 2] {
    [Plan::keep_all(N_SEGMENTS), nested(0, N_SEGMENTS)]
}

/// Runs `work` with a fault at the 1st, 2nd, ... reading until one is not reached; the readings.
fn at_each_reading(mut work: impl FnMut(&'static FaultMeter<NoMeter>)) -> u64 {
    for at in 1.. {
        let meter: &'static _ = Box::leak(Box::new(FaultMeter::new(NoMeter, at)));
        work(meter);
        if meter.n_readings() < at {
            return at - 1;
        }
    }
    unreachable!("an update ends")
}

#[test]
fn an_update_that_runs_out_anywhere_is_made_in_smaller_micro_batches() {
    for (plan, n_checks) in plans().iter().zip([7, 17]) {
        let (mut n_shrunk, mut n_draws) = (0, Vec::new());
        at_each_reading(|meter| {
            let mut faulted = setup(BATCH, plan);
            faulted.trainer.watch(watch(meter));
            faulted.trainer.size_by(shrinking(BATCH)).expect("sums are kept");
            let first = faulted.update(BATCH, 0).expect("fits in the end");
            let draws = pass::position();
            n_shrunk += u64::from(first.n_micro_batches == 2);
            let second = faulted.update(BATCH, 1).expect("goes on");
            let micro_batches =
                [&first, &second].map(|update| BATCH / update.n_micro_batches as usize);

            let mut straight = setup(micro_batches[0], plan);
            let want_first = straight.update(BATCH, 0).expect("updates");
            assert_eq!(pass::position(), draws, "draws");
            straight.trainer.size_by(Sizing::fixed(micro_batches[1])).expect("sums are kept");
            let want_second = straight.update(BATCH, 1).expect("updates");
            let what = format!("{plan}, micro-batches of {micro_batches:?}");
            assert_eq!(seen(&[first, second]), seen(&[want_first, want_second]), "{what}");
            faulted.state().assert_same(&straight.state(), &what);
            n_draws.push(draws.draws);
        });
        // Every segment of the first try is a checkpoint, also where it is recomputed, and so is
        // every sink: three of the four have parameters.
        assert_eq!(n_shrunk, n_checks, "{plan}");
        n_draws.sort_unstable();
        n_draws.dedup();
        assert_eq!(n_draws, [1, 2], "{plan}: one mask a micro-batch, none of a failed try");
    }
}

#[test]
fn with_a_fixed_size_it_is_an_error_and_nothing_has_moved() {
    for (plan, n_checks) in plans().iter().zip([7, 17]) {
        let mut n_failed = 0;
        // A window that was refused for another reason: the position in the data moves on.
        let mut untouched = setup(BATCH, plan);
        let mut bad = Net::Mixed.batch(BATCH, 9, &Policy::f32());
        bad.targets = (bad.targets * 1000.0).expect("classes that there are not");
        untouched.trainer.update(&bad).expect_err("no such class");
        let start = untouched.state();
        let want = untouched.update(BATCH, 1).expect("updates");

        at_each_reading(|meter| {
            let mut faulted = setup(BATCH, plan);
            faulted.trainer.watch(watch(meter));
            match faulted.update(BATCH, 0) {
                Err(Error::Memory(MemoryError::AboveMark { live_bytes: u64::MAX, .. })) => {}
                Err(error) => panic!("{error}"),
                Ok(_) => return,
            }
            n_failed += 1;
            faulted.state().assert_same(&start, "failed");
            assert_eq!((faulted.trainer.n_windows(), faulted.trainer.n_updates()), (1, 0));
            let got = faulted.update(BATCH, 1).expect("as if nothing had happened");
            assert_eq!(seen(&[got]), seen(std::slice::from_ref(&want)));
            faulted.state().assert_same(&untouched.state(), "the update after");
        });
        assert_eq!(n_failed, n_checks, "{plan}");
    }
}

/// In the midst of training moments, scale and statistics are there to be damaged.
#[test]
fn a_failure_after_some_updates_leaves_moments_and_scale_alone() {
    let plan = nested(0, N_SEGMENTS);
    let started = || {
        let mut setup = setup(4, &plan);
        for seed in 0..2 {
            let _update = setup.update(BATCH, seed).expect("updates");
        }
        setup
    };
    let mut straight = started();
    let mut bad = Net::Mixed.batch(BATCH, 9, &Policy::f32());
    bad.targets = (bad.targets * 1000.0).expect("classes that there are not");
    straight.trainer.update(&bad).expect_err("no such class");
    let want = straight.update(BATCH, 3).expect("updates");
    let n_readings = at_each_reading(|meter| {
        let mut faulted = started();
        let before = faulted.state();
        faulted.trainer.watch(watch(meter));
        if faulted.update(BATCH, 2).is_ok() {
            return;
        }
        faulted.state().assert_same(&before, "failed");
        let got = faulted.update(BATCH, 3).expect("as if nothing had happened");
        assert_eq!(seen(&[got]), seen(std::slice::from_ref(&want)));
        faulted.state().assert_same(&straight.state(), "the update after");
    });
    assert!(n_readings >= 28, "two micro-batches of 14 checks, {n_readings} readings");
}

/// A reading that claims everything, of a meter whose peak is above its start, is no overflow.
#[test]
fn the_largest_reading_is_a_reading() {
    let rising = AtomicU64::new(0);
    let meter = FnMeter::new(move || Some(100 * rising.fetch_add(1, Relaxed)));
    let meter: &'static _ = Box::leak(Box::new(FaultMeter::new(meter, 1)));
    let mut faulted = setup(BATCH, &Plan::keep_all(N_SEGMENTS));
    faulted.trainer.watch(watch(meter));
    faulted.trainer.size_by(shrinking(BATCH)).expect("sums are kept");
    let update = faulted.update(BATCH, 0).expect("updates");
    assert_eq!((update.n_micro_batches, faulted.trainer.split().micro_batch()), (1, 4));
}

/// `sum(x w)`: the gradient of the sum is the sum of the inputs. Notes each micro-batch's size.
struct Items {
    w: Tensor,
    sizes: Arc<Mutex<Vec<usize>>>,
    last: Arc<AtomicUsize>,
}

impl Segments for Items {
    fn names(&self) -> Vec<String> {
        vec!["product".to_string()]
    }

    fn head_name(&self) -> String {
        "sum".to_string()
    }

    fn run(&self, _: usize, x: &Tensor, _: bool) -> Result<Tensor> {
        self.sizes.lock().expect("no panic").push(x.dim(0)?);
        self.last.store(x.dim(0)?, Relaxed);
        x.broadcast_mul(&self.w)
    }

    fn loss(&self, x: &Tensor, _: &Tensor, _: &CrossEntropy) -> Result<Loss> {
        Ok(Loss { sum: x.sum_all()?, n_counted: x.dim(0)? as u64 })
    }

    fn score(&self, _: &Tensor, _: &Tensor, _: &CrossEntropy) -> Result<Score> {
        unreachable!("never judged")
    }
}

const ITEM_BYTES: u64 = 1000;

/// Sizes tried, the weight after one update at rate 1 from 0, and the size kept, where only
/// `most_items` fit and sizes start at `start`.
fn tried(n_items: usize, start: usize, most_items: u64) -> (Vec<usize>, f32, usize) {
    let params = Params::new(0);
    let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
    let w = masters.builder(&Device::Cpu).get_with_hints(1, "w", candle_nn::Init::Const(0.0));
    let (sizes, last) = (Arc::default(), Arc::default());
    let model = Items { w: w.expect("builds"), sizes: Arc::clone(&sizes), last: Arc::clone(&last) };
    let recipe = Recipe {
        split: BatchSplit::derive(Some(n_items), None, None, 1).expect("they fit"),
        optimizer: optim::Config::new(optim::Algorithm::SGD, 1.0),
        schedule: constant(1.0),
        ..recipe(1, 1, 1)
    };
    let mut trainer = Trainer::new(model, masters, vec![], recipe).expect("valid");
    // What the newest micro-batch holds is live until it is looked at.
    let meter = FnMeter::new(move || Some(last.swap(0, Relaxed) as u64 * ITEM_BYTES));
    let guard = Watermark::new(most_items * ITEM_BYTES, 1.0, Ledger::new()).expect("a share");
    trainer.watch(Watch::new(guard, Box::leak(Box::new(meter))));
    trainer.size_by(shrinking(start)).expect("sums are kept");
    let x: Vec<f32> = (0..n_items).map(|i| i as f32).collect();
    let batch = Batch {
        inputs: Tensor::from_vec(x, (n_items, 1), &Device::Cpu).expect("items"),
        targets: Tensor::zeros(n_items, DType::U32, &Device::Cpu).expect("targets"),
        first_index: 0,
    };
    let update = trainer.update(&batch).expect("fits in the end");
    assert_eq!((update.outcome, update.n_samples), (Applied::Yes, n_items as u64));
    let w = params.all()[0].1.to_vec1::<f32>().expect("values")[0];
    let sizes = sizes.lock().expect("no panic").clone();
    (sizes, w, trainer.split().micro_batch())
}

#[test]
fn mem_4_the_back_off_starts_from_the_whole_batch() {
    let (sizes, w, kept) = tried(16, 16, 1);
    assert_eq!(sizes[..4], [16, 8, 4, 2]);
    assert_eq!(sizes[4..], [1; 16]);
    // All items once: their sum is 120, the mean's gradient a sixteenth of it.
    assert_eq!((w, kept), (-120.0 / 16.0, 1));

    let (sizes, w, kept) = tried(10, 16, 4);
    assert_eq!((sizes, w, kept), (vec![10, 8, 4, 4, 2], -45.0 / 10.0, 4));
    let (sizes, w, kept) = tried(10, 10, 100);
    assert_eq!((sizes, w, kept), (vec![10], -4.5, 10));
}

#[test]
fn micro_batches_grow_back_once_a_hysteresis() {
    let (used, secs) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut setup = setup(BATCH, &Plan::keep_all(N_SEGMENTS));
    let meter = FnMeter::new({
        let used = Arc::clone(&used);
        move || Some(used.load(Relaxed))
    });
    let guard = Watermark::off(Ledger::new());
    setup.trainer.watch(Watch::new(guard, Box::leak(Box::new(meter))));
    let config = ControllerConfig { min_items: 1, ..ControllerConfig::fixed(BATCH) };
    let clock = {
        let secs = Arc::clone(&secs);
        Box::new(move || secs.load(Relaxed) as f64)
    };
    let controller = Controller::new(config).expect("sizes in order");
    let sizing = Sizing { controller, limit_bytes: 1000, clock };
    setup.trainer.size_by(sizing).expect("sums are kept");
    // (seconds, bytes in use, micro-batches of this update, size after it); 5 s between changes.
    for (i, (now, bytes, n_micro_batches, size)) in [
        (0, 950, 1, 4),
        (1, 950, 2, 4),
        (4, 950, 2, 4),
        (5, 950, 2, 2),
        (6, 100, 4, 2),
        (9, 100, 4, 2),
        (10, 100, 4, 4),
        (14, 100, 2, 4),
        (15, 800, 2, 4),
        (16, 100, 2, 8),
        (60, 100, 1, 8),
    ]
    .into_iter()
    .enumerate()
    {
        secs.store(now, Relaxed);
        used.store(bytes, Relaxed);
        let update = setup.update(BATCH, i as u64).expect("updates");
        let got = (update.n_micro_batches, setup.trainer.split().micro_batch());
        assert_eq!(got, (n_micro_batches, size), "at {now} s");
    }
    assert_eq!(setup.trainer.n_updates(), 11);
}

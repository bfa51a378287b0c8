//! A run that is stopped and taken up again ends with the same bits.

#[path = "../../tallow-train/tests/support/mod.rs"]
mod support;

use candle_core::{DType, Device};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use support::{Net, Setup, State, dynamic};
use tallow_data::{ImageSet, Images, Pixels};
use tallow_memory::{Ledger, NoMeter, Watermark};
use tallow_run::{
    Epochs, Event, Outcome, Progress,
    checkpoint::{Checkpoints, Error as CheckpointError},
    fit, load, save,
};
use tallow_train::{
    CHECKPOINTS, Error, Flow, Recipe, Trainer, Watch, optim,
    precision::{DynamicScale, LossScale, Policy},
};

/// A folder of its own, gone with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tallow-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn checkpoints(&self) -> Checkpoints {
        Checkpoints::open(CHECKPOINTS, &self.0, 99).expect("a folder")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// 20 images to train on, 5 held out.
fn sets() -> (Images, Images) {
    let pixels = (0..25u16 * 12).map(|i| (i * 37 % 251) as u8).collect::<Vec<_>>();
    let labels = (0..25u8).map(|i| i % 3).collect::<Vec<_>>();
    let set = ImageSet::from_pixels(pixels, labels, [3, 4]).expect("images");
    let (train, held_out) = set.split(20).expect("two parts");
    let pixels =
        Pixels { dtype: DType::F32, device: Device::Cpu, mean: vec![0.5], std: vec![0.25] };
    (Images { set: train, pixels: pixels.clone() }, Images { set: held_out, pixels })
}

/// 10 micro-batches of 2 an epoch, 4 an update: 3 updates an epoch.
fn epochs(sets: &(Images, Images), epochs: u64) -> Epochs<'_> {
    Epochs {
        train: &sets.0,
        held_out: &sets.1,
        batch: 8,
        epochs,
        max_updates: None,
        early_stop_epochs: None,
        seed: 3,
    }
}

/// Dropout, batch norm, 8-bit moments, sums over four micro-batches.
fn setup(change: impl FnOnce(Recipe) -> Recipe) -> Setup {
    Setup::new(Net::Mixed, &Policy::f32(), (8, 2), |mut recipe| {
        recipe.optimizer.format = optim::StateFormat::BITS8;
        change(recipe)
    })
}

fn plain(recipe: Recipe) -> Recipe {
    recipe
}

/// Trains to the end; what was seen, by first sample of each batch, and what came of it.
fn run(setup: &mut Setup, epochs: &Epochs, start: Progress) -> (Vec<(u64, u64)>, Outcome) {
    let mut seen = Vec::new();
    let outcome = fit(&mut setup.trainer, epochs, start, |_, progress, event| {
        if let Event::Updated { update, .. } = event {
            seen.push((progress.cursor.epoch, update.loss.to_bits()));
        }
        Ok(Flow::Go)
    });
    (seen, outcome.expect("trains"))
}

#[test]
fn res_1_a_run_goes_on_from_every_update_of_every_epoch() {
    let (sets, folder) = (sets(), Folder::new("res-1"));
    let epochs = epochs(&sets, 4);
    let checkpoints = folder.checkpoints();
    let mut straight = setup(plain);
    let (mut paths, mut seen) = (vec![], vec![]);
    let outcome =
        fit(&mut straight.trainer, &epochs, Progress::START, |trainer, progress, event| {
            if let Event::Updated { update, .. } = &event {
                seen.push((progress.cursor.epoch, update.loss.to_bits()));
            }
            paths.push((seen.len(), save(&checkpoints, trainer, progress)?));
            Ok(Flow::Go)
        });
    let want = outcome.expect("trains").held_out.expect("the end");
    assert_eq!(seen.len(), 12);
    // After each of 12 updates, and once more after each of 4 judgements.
    assert_eq!(paths.len(), 16);
    for (n_seen, path) in paths {
        let mut resumed = setup(plain);
        let progress = load(&mut resumed.trainer, &path).expect("a checkpoint");
        assert_eq!(
            (resumed.trainer.n_windows(), progress.n_samples / 8),
            (n_seen as u64, {
                let (whole, rest) = (n_seen as u64 / 3, n_seen as u64 % 3);
                (whole * 20 + rest * 8) / 8
            })
        );
        let (rest, outcome) = run(&mut resumed, &epochs, progress);
        assert_eq!(rest, seen[n_seen..], "after {n_seen} updates");
        resumed.state().assert_same(&straight.state(), &format!("after {n_seen} updates"));
        let got = outcome.held_out.expect("the end");
        assert_eq!((got.loss.to_bits(), outcome.n_updates), (want.loss.to_bits(), 12));
        assert_eq!(outcome.progress.first_loss.map(f64::to_bits), Some(seen[0].1));
    }
}

#[test]
fn res_2_the_loss_scale_goes_on() {
    let folder = Folder::new("res-2");
    let checkpoints = folder.checkpoints();
    let scaled = |recipe| {
        let growing = DynamicScale { init: 256.0, growth_windows: 5, ..DynamicScale::STANDARD };
        Recipe { loss_scale: LossScale::dynamic(growing).expect("valid"), ..recipe }
    };
    let mut first = setup(scaled);
    for seed in 0..3 {
        let _update = first.update(8, seed).expect("updates");
    }
    let path = save(&checkpoints, &first.trainer, &Progress::START).expect("saves");
    let mut resumed = setup(scaled);
    load(&mut resumed.trainer, &path).expect("a checkpoint");
    for setup in [&mut first, &mut resumed] {
        assert_eq!(setup.trainer.loss_scale().value(), 256.0);
        for seed in 3..5 {
            let _update = setup.update(8, seed).expect("updates");
        }
        assert_eq!(setup.trainer.loss_scale().value(), 512.0);
    }
    resumed.state().assert_same(&first.state(), "scale and counters");

    // A checkpoint without a scale says nothing about where a dynamic one should start.
    let mut unscaled = setup(plain);
    let _update = unscaled.update(8, 0).expect("updates");
    let path = save(&checkpoints, &unscaled.trainer, &Progress::START).expect("saves");
    let before = setup(scaled).state();
    let mut other = setup(scaled);
    let error = load(&mut other.trainer, &path).expect_err("another kind of scale");
    assert!(matches!(error, Error::Precision(_)), "{error}");
    other.state().assert_same(&before, "refused before anything moved");
}

/// A checkpoint after each of two updates, and what they hold.
fn two(folder: &Folder) -> (Checkpoints, Vec<(PathBuf, State)>) {
    let checkpoints = folder.checkpoints();
    let mut setup = setup(plain);
    let saved = (0..2).map(|seed| {
        let _update = setup.update(8, seed).expect("updates");
        (save(&checkpoints, &setup.trainer, &Progress::START).expect("saves"), setup.state())
    });
    let saved = saved.collect();
    (checkpoints, saved)
}

fn assert_goes_on_from(path: &Path, want: &State) {
    let mut resumed = setup(plain);
    load(&mut resumed.trainer, path).expect("whole");
    resumed.state().assert_same(want, "what was saved");
    let _update = resumed.update(8, 7).expect("goes on");
}

#[test]
fn res_3_a_torn_or_damaged_checkpoint_is_passed_over() {
    let folder = Folder::new("res-3");
    let (checkpoints, saved) = two(&folder);
    let [(old, old_state), (new, new_state)] = &saved[..] else { panic!("two") };
    assert_eq!(&checkpoints.newest().expect("whole").path, new);
    assert_goes_on_from(new, new_state);
    for entry in fs::read_dir(new).expect("a folder").map(|e| e.expect("an entry").path()) {
        let whole = fs::read(&entry).expect("bytes");
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        let cuts = [0, 1, whole.len() / 2, whole.len() - 1].map(|n| whole[..n].to_vec());
        for damaged in cuts.into_iter().chain([flipped]) {
            fs::write(&entry, &damaged).expect("written");
            let newest = checkpoints.newest().expect("the one before");
            assert_eq!((&newest.path, newest.passed_over.len()), (old, 1), "{}", entry.display());
            assert!(newest.passed_over[0].to_string().contains("update-0000000002"));
            let error = load(&mut setup(plain).trainer, new).expect_err("damaged");
            assert!(matches!(error, Error::Checkpoint(_)), "{error}");
        }
        fs::remove_file(&entry).expect("removed");
        assert_eq!(&checkpoints.newest().expect("the one before").path, old);
        fs::write(&entry, &whole).expect("written");
    }
    assert_goes_on_from(&checkpoints.newest().expect("whole again").path, new_state);
    // Damaged, and then replaced by the save at that update.
    fs::write(new.join("weights.safetensors"), b"torn").expect("written");
    let mut again = setup(plain);
    load(&mut again.trainer, old).expect("whole");
    again.state().assert_same(old_state, "the one before");
    let _update = again.update(8, 1).expect("goes on");
    assert_eq!(&save(&checkpoints, &again.trainer, &Progress::START).expect("saves"), new);
    assert_goes_on_from(&checkpoints.newest().expect("whole").path, new_state);
}

#[test]
fn res_3_what_a_crash_leaves_half_written_is_nothing() {
    let folder = Folder::new("res-3-part");
    let (_, saved) = two(&folder);
    let part = folder.0.join("update-0000000003-0.part");
    fs::create_dir(&part).expect("a folder");
    fs::write(part.join("weights.safetensors"), b"half").expect("written");
    // Opened by the run that comes after the crash.
    let checkpoints = folder.checkpoints();
    assert!(!part.exists());
    assert_eq!(checkpoints.newest().expect("whole").path, saved[1].0);
}

#[test]
fn a_save_that_fails_leaves_the_old_ones() {
    let folder = Folder::new("res-3-full");
    let (checkpoints, saved) = two(&folder);
    // A file stands where the new folder should be made: as a full disk, it can only be refused.
    fs::write(folder.0.join("update-0000000003-0.part"), b"in the way").expect("written");
    let mut setup = setup(plain);
    load(&mut setup.trainer, &saved[1].0).expect("whole");
    let _update = setup.update(8, 2).expect("updates");
    let error = save(&checkpoints, &setup.trainer, &Progress::START).expect_err("in the way");
    let Error::Checkpoint(CheckpointError::Io { path, .. }) = &error else { panic!("{error}") };
    assert!(path.ends_with("update-0000000003-0.part"), "{error}");
    assert_goes_on_from(&checkpoints.newest().expect("whole").path, &saved[1].1);
}

#[test]
fn the_last_and_the_best_are_kept() {
    let folder = Folder::new("kept");
    let checkpoints = Checkpoints::open(CHECKPOINTS, &folder.0, 2).expect("a folder");
    let mut setup = setup(plain);
    for (seed, held_out_loss) in
        [Some(3.0), Some(1.0), None, Some(2.0), None].into_iter().enumerate()
    {
        let _update = setup.update(8, seed as u64).expect("updates");
        let progress = Progress { held_out_loss, ..Progress::START };
        save(&checkpoints, &setup.trainer, &progress).expect("saves");
    }
    let mut names: Vec<String> = fs::read_dir(&folder.0)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["update-0000000002-0", "update-0000000004-0", "update-0000000005-0"]);
}

/// Stopped between any two segments of an update, and taken up from what is saved then.
#[test]
fn res_4_a_run_may_be_stopped_anywhere() {
    let (sets, folder) = (sets(), Folder::new("res-4"));
    let epochs = epochs(&sets, 2);
    let noisy =
        |recipe| Recipe { loss_scale: dynamic(1024.0), recompute: support::nested(0, 4), ..recipe };
    let mut straight = setup(noisy);
    let (_, outcome) = run(&mut straight, &epochs, Progress::START);
    let (want, want_held_out) = (straight.state(), outcome.held_out.expect("the end").loss);
    let mut n_stopped = 0;
    for at in (0..).step_by(7) {
        let _ = fs::remove_dir_all(&folder.0);
        let checkpoints = folder.checkpoints();
        let mut first = setup(noisy);
        let n_looks = Arc::new(AtomicU64::new(0));
        let looks = Arc::clone(&n_looks);
        let tick = Box::new(move || match looks.fetch_add(1, Relaxed) {
            n if n == at => Flow::Stop,
            _ => Flow::Go,
        });
        let guard = Watermark::off(Ledger::new());
        first.trainer.watch(Watch { tick, ..Watch::new(guard, &NoMeter) });
        let saved = Mutex::new(None);
        let outcome =
            fit(&mut first.trainer, &epochs, Progress::START, |trainer, progress, event| {
                if let Event::Stopped = event {
                    *saved.lock().expect("no panic") = Some(save(&checkpoints, trainer, progress)?);
                }
                Ok(Flow::Go)
            });
        let outcome = outcome.expect("stopped, not failed");
        let Some(path) = saved.into_inner().expect("no panic") else {
            assert!(n_looks.load(Relaxed) <= at, "it was not stopped");
            break;
        };
        assert!(outcome.held_out.is_none());
        n_stopped += 1;
        let mut resumed = setup(noisy);
        let progress = load(&mut resumed.trainer, &path).expect("a checkpoint");
        let (_, outcome) = run(&mut resumed, &epochs, progress);
        resumed.state().assert_same(&want, &format!("stopped at look {at}"));
        let loss = outcome.held_out.expect("the end").loss;
        assert_eq!(loss.to_bits(), want_held_out.to_bits());
    }
    assert!(n_stopped > 40, "{n_stopped}");
}

#[test]
fn a_checkpoint_of_something_else_is_refused_by_name() {
    let folder = Folder::new("foreign");
    let (checkpoints, saved) = two(&folder);
    let path = &saved[0].0;
    let mut other = Setup::new(Net::Gpt2, &Policy::f32(), (8, 2), plain);
    let error = load(&mut other.trainer, path).expect_err("another model").to_string();
    assert!(error.contains("wte.weight") || error.contains("h.0"), "{error}");
    let mut other = Setup::new(Net::Mixed, &Policy::f32(), (8, 2), plain);
    let error = load(&mut other.trainer, path).expect_err("another state format").to_string();
    assert!(error.contains("optimizer.safetensors"), "{error}");
    let empty = Folder::new("empty");
    let error = empty.checkpoints().newest().expect_err("none").to_string();
    assert!(error.contains("holds no whole checkpoint"), "{error}");
    drop(checkpoints);
}

/// Weights without masters: rounding by chance goes on where it was.
#[test]
fn bf16_weights_go_on_with_the_same_chances() {
    let folder = Folder::new("bf16");
    let checkpoints = folder.checkpoints();
    let policy = Policy { parameter: DType::BF16, ..Policy::bf16() };
    let build = || {
        let (model, masters, params) = Net::Gpt2.build(&policy);
        let mut recipe = support::recipe(4, 2, model.names().len());
        recipe.optimizer.weights = optim::Rounding::Stochastic;
        let trainer = Trainer::new(model, masters, params.buffers(), recipe).expect("valid");
        (trainer, params)
    };
    let values = |params: &tallow_train::Params| -> Vec<Vec<f32>> {
        let value = |(_, var): &(String, candle_core::Var)| {
            let flat = var.flatten_all().and_then(|v| v.to_dtype(DType::F32));
            flat.and_then(|v| v.to_vec1()).expect("floats")
        };
        params.all().iter().map(value).collect()
    };
    let (mut straight, params) = build();
    let update = |trainer: &mut Trainer<support::Boxed>, seed| {
        let _update = trainer.update(&Net::Gpt2.batch(4, seed, &policy)).expect("updates");
    };
    update(&mut straight, 0);
    let path = save(&checkpoints, &straight, &Progress::START).expect("saves");
    update(&mut straight, 1);
    let (mut resumed, resumed_params) = build();
    load(&mut resumed, &path).expect("a checkpoint");
    update(&mut resumed, 1);
    assert_eq!(values(&resumed_params), values(&params));
}

/// The average is saved, judged by, and goes on to the same bits.
#[test]
fn an_average_of_weights_goes_on_to_the_same_bits() {
    let (sets, folder) = (sets(), Folder::new("average"));
    let (epochs, checkpoints) = (epochs(&sets, 3), folder.checkpoints());
    let average = |recipe: Recipe| Recipe { ema_decay: Some(0.9), ..recipe };
    let tensors = |path: &Path| {
        let bytes = fs::read(path.join("average.safetensors")).expect("an average");
        let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        bytes[8 + header as usize..].to_vec()
    };
    let mut straight = setup(average);
    let mut paths = Vec::new();
    let outcome = fit(&mut straight.trainer, &epochs, Progress::START, |trainer, progress, _| {
        paths.push(save(&checkpoints, trainer, progress)?);
        Ok(Flow::Go)
    });
    let want = outcome.expect("trains").held_out.expect("the end");
    let last = tensors(paths.last().expect("one"));
    for path in [&paths[1], &paths[4]] {
        let mut resumed = setup(average);
        let progress = load(&mut resumed.trainer, path).expect("a checkpoint");
        let (_, outcome) = run(&mut resumed, &epochs, progress);
        let got = outcome.held_out.expect("the end");
        assert_eq!(got.loss.to_bits(), want.loss.to_bits());
        resumed.state().assert_same(&straight.state(), "weights");
        let again =
            save(&folder.checkpoints(), &resumed.trainer, &outcome.progress).expect("saved");
        assert_eq!(tensors(&again), last);
    }
    // Weights move as without, and are judged otherwise.
    let mut plain = setup(plain);
    let (_, outcome) = run(&mut plain, &epochs, Progress::START);
    plain.state().assert_same(&straight.state(), "weights");
    assert_ne!(outcome.held_out.expect("the end").loss.to_bits(), want.loss.to_bits());
}

/// A run that learns nothing ends early, and stays ended when it is taken up again.
#[test]
fn a_run_that_gets_no_better_stops() {
    let (sets, folder) = (sets(), Folder::new("early"));
    let epochs = Epochs { early_stop_epochs: Some(2), ..epochs(&sets, 9) };
    let still = |mut recipe: Recipe| {
        recipe.schedule.peak = 1e-30;
        recipe
    };
    let mut net = setup(still);
    let (mut judged, mut path) = (Vec::new(), PathBuf::new());
    let outcome = fit(&mut net.trainer, &epochs, Progress::START, |trainer, progress, event| {
        if let Event::Evaluated { evaluation, .. } = event {
            judged.push(evaluation.loss);
            path = save(&folder.checkpoints(), trainer, progress)?;
        }
        Ok(Flow::Go)
    });
    let outcome = outcome.expect("trains");
    let best = judged.iter().copied().fold(f64::INFINITY, f64::min);
    let n_since = judged.iter().rev().position(|loss| *loss == best);
    assert_eq!(outcome.progress.best_loss, Some(best));
    assert!(epochs.has_stalled(&outcome.progress), "{judged:?}");
    // Of equal judgements the first is the best.
    assert!(judged.len() < 9 && n_since <= Some(2), "{judged:?}");
    assert_eq!(outcome.progress.n_since_best, 2, "{judged:?}");
    let mut resumed = setup(still);
    let progress = load(&mut resumed.trainer, &path).expect("a checkpoint");
    let (more, outcome) = run(&mut resumed, &epochs, progress);
    assert!(more.is_empty() && outcome.held_out.is_some());
}

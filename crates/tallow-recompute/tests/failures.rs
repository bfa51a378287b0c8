//! What goes wrong is said with the segment's name, and leaves nothing half done.

mod support;
use candle_core::{DType, Device, Tensor, Var};
use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};
use support::{bits, models, state, var};
use tallow_recompute::*;

#[derive(Clone, Copy)]
enum Fault {
    Error,
    Panic,
}

/// A layer that counts its calls, and does something else at one of them.
fn faulty(fault: Fault, at: u32) -> impl Fn(&Tensor) -> candle_core::Result<Tensor> + Clone {
    let n_calls = Arc::new(AtomicU32::new(0));
    move |x| match (n_calls.fetch_add(1, Ordering::Relaxed) == at, fault) {
        (true, Fault::Error) => Err(candle_core::Error::Msg("out of paper".to_string())),
        (true, Fault::Panic) => panic!("out of ink"),
        (false, _) => state::dropout(&x.tanh()?),
    }
}

/// The thread's state is as it should be between steps.
fn nothing_is_half_done(n_draws: u64) {
    assert!(!is_recomputing());
    assert_eq!(state::n_draws(), n_draws);
}

#[test]
fn an_error_in_the_first_forward() {
    state::begin();
    let options = Recompute { replay: state::hook(), ..Recompute::named("block.3") };
    let error = options.run(&var(1, &[2, 2]), faulty(Fault::Error, 0)).unwrap_err();
    assert_eq!(error.to_string(), "segment `block.3`, first forward: out of paper");
    nothing_is_half_done(0);
    let chain = Chain::new(vec![Segment::new("only", faulty(Fault::Error, 0))]);
    let x = var(1, &[2, 2]);
    let error = chain.forward(&x, &Plan::keep_all(1)).map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "segment `only`, forward: out of paper");
    assert!(chain.forward(&x, &Plan::keep_all(1)).is_ok(), "the next step runs");
}

#[test]
fn a_fault_in_the_recomputation() {
    for fault in [Fault::Error, Fault::Panic] {
        state::begin();
        let x = var(1, &[2, 2]);
        let options = Recompute { replay: state::hook(), ..Recompute::named("block.3") };
        let loss = options.run(&x, faulty(fault, 1)).unwrap().sum_all().unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| loss.backward()));
        match (fault, outcome) {
            (Fault::Error, Ok(result)) => assert_eq!(
                result.unwrap_err().to_string(),
                "segment `block.3`, recomputation: out of paper"
            ),
            (Fault::Panic, outcome) => assert!(outcome.is_err()),
            (Fault::Error, Err(_)) => panic!("an error is no panic"),
        }
        nothing_is_half_done(1);
        // The same graph again: the fault was a single one.
        let grad = loss.backward().unwrap().remove(&x).unwrap();
        state::begin();
        let plain = state::dropout(&x.tanh().unwrap()).unwrap().sum_all().unwrap();
        assert_eq!(bits(&grad), bits(plain.backward().unwrap().get(&x).unwrap()));
    }
}

#[test]
fn a_fault_in_a_chain_s_recomputation() {
    for fault in [Fault::Error, Fault::Panic] {
        state::begin();
        let x = var(1, &[2, 2]);
        let segments = vec![
            Segment::new("a", faulty(fault, 1)),
            Segment::new("loss", |x: &Tensor| x.sum_all()),
        ];
        let chain = Chain { replay: state::hook(), ..Chain::new(segments) };
        let plan = Policy::All.plan(&["a", "loss"].map(SegmentCost::unmeasured)).unwrap();
        let (loss, tape) = chain.forward(&x, &plan).unwrap();
        let mut sink = Collect::default();
        let backward = || tape.backward_from_loss(&loss, 1.0, &mut sink);
        match catch_unwind(AssertUnwindSafe(backward)) {
            Ok(result) => assert_eq!(
                result.unwrap_err().to_string(),
                "segment `a`, recomputation: out of paper"
            ),
            Err(_) => assert!(matches!(fault, Fault::Panic)),
        }
        nothing_is_half_done(1);
        let (loss, tape) = chain.forward(&x, &plan).unwrap();
        assert!(tape.backward_from_loss(&loss, 1.0, &mut Collect::default()).unwrap().is_some());
    }
}

#[test]
fn a_half_finished_backward_leaves_no_gradient_behind() {
    let x = var(1, &[2, 2]);
    let ys = recompute_many(&[&x], |xs| Ok(vec![xs[0].exp()?, xs[0].tanh()?])).unwrap();
    // Passes the second output, then fails at an op without a backward before the first.
    let image = ys[0].reshape((1, 1, 2, 2)).unwrap();
    let bad = image.upsample_bilinear2d(4, 4, false).unwrap().sum_all().unwrap();
    let loss = (bad + ys[1].sum_all().unwrap()).unwrap();
    assert!(loss.backward().is_err());
    let grad = ys[0].sum_all().unwrap().backward().unwrap().remove(&x).unwrap();
    let plain = x.exp().unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!(bits(&grad), bits(plain.get(&x).unwrap()));
}

/// Candle's own dropout cannot be replayed: the check says so.
#[test]
fn candle_s_dropout_is_found_out() {
    let x = Var::ones(4096, DType::F32, &Device::Cpu).unwrap();
    let dropout = candle_nn::Dropout::new(0.5);
    let run = move |x: &Tensor| dropout.forward(x, true);
    let options = Recompute { check: Check::Bitwise, ..Recompute::named("mlp.drop") };
    let loss = options.run(&x, run.clone()).unwrap().sum_all().unwrap();
    let message = loss.backward().unwrap_err().to_string();
    assert!(message.starts_with("segment `mlp.drop`: hash of output 0 is "), "{message}");
    assert!(message.ends_with("without a replay hook?"), "{message}");
    let segments = vec![Segment::new("drop", run), Segment::new("loss", |x: &Tensor| x.sum_all())];
    let chain = Chain { check: Check::Bitwise, ..Chain::new(segments) };
    let plan = Policy::All.plan(&["drop", "loss"].map(SegmentCost::unmeasured)).unwrap();
    let (loss, tape) = chain.forward(&x, &plan).unwrap();
    let error = tape.backward_from_loss(&loss, 1.0, &mut Collect::default()).unwrap_err();
    assert!(matches!(error, Error::Differs { what: "hash", output: 0, .. }), "{error}");
}

#[test]
fn a_recomputation_of_another_kind_is_found_out() {
    let (x, v, w) = (var(1, &[2, 3]), var(2, &[2, 3]), var(3, &[2, 3]));
    type Second = fn(&Tensor, &Var) -> candle_core::Result<Vec<Tensor>>;
    let seconds: [(Second, &str); 4] = [
        (|x, _| Ok(vec![x.narrow(1, 0, 2)?]), "shape of output 0 is [2, 2]"),
        (|x, _| Ok(vec![x.to_dtype(DType::F64)?]), "dtype of output 0 is F64"),
        (|_, _| Ok(vec![]), "number of output 0 is 0"),
        (|x, w| Ok(vec![(x * w.as_tensor())?]), "uses 1 variables that the first forward did not"),
    ];
    for (second, message) in seconds {
        let (v, w) = (v.clone(), w.clone());
        let run = move |xs: &[Tensor]| {
            if is_recomputing() { second(&xs[0], &w) } else { Ok(vec![(&xs[0] * v.as_tensor())?]) }
        };
        let ys = Recompute::named("odd").run_many(&[&x], run).unwrap();
        let found = ys[0].sum_all().unwrap().backward().unwrap_err().to_string();
        assert!(found.starts_with("segment `odd`") && found.contains(message), "{found}");
    }
}

#[test]
fn a_hook_that_does_not_run_the_forward() {
    let replay: Arc<dyn Replay> = Arc::new(|| Box::new(|_: &mut dyn FnMut()| ()) as Again);
    let options = Recompute { replay, ..Recompute::named("lazy") };
    let loss = options.run(&var(1, &[2]), |x| x.exp()).unwrap().sum_all().unwrap();
    let message = loss.backward().unwrap_err().to_string();
    assert_eq!(message, "segment `lazy`: the replay hook returned without running the forward");
}

#[test]
fn a_plan_for_another_chain() {
    let model = models::mlp(2, &[2, 2, 2]);
    let error = model.chain().forward(&model.x, &Plan::keep_all(3)).map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "the plan goes on at segment 3, it must at 2 (of 2)");
    assert!(matches!(simulate(&[], &Plan::keep_all(1)), Err(Error::Plan { .. })));
}

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("tallow-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn n_files(&self) -> usize {
        fs::read_dir(&self.0).unwrap().count()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn every_two(n: usize) -> Plan {
    let costs: Vec<_> = (0..n).map(|i| SegmentCost::unmeasured(i.to_string())).collect();
    Policy::Every(2).plan(&costs).unwrap()
}

#[test]
fn inputs_in_files_come_back_whole_and_the_files_go() {
    let folder = Folder::new("saved");
    let model = models::mlp(37, &[4, 700, 3000, 5, 6, 2]); // beyond one chunk
    let plain = model.plain();
    let chain = Chain { saved: Saved::File(folder.0.clone()), ..model.chain() };
    let plan = every_two(5);
    let (loss, tape) = chain.forward(&model.x, &plan).unwrap();
    assert_eq!(folder.n_files(), 2);
    let mut sink = Collect::default();
    tape.backward_from_loss(&loss, 1.0, &mut sink).unwrap();
    assert_eq!(folder.n_files(), 0);
    let grads = sink.into_grads();
    for ((name, var), (_, grad)) in model.params.iter().zip(&plain.grads) {
        assert_eq!(Some(bits(grads.get(var).unwrap())), *grad, "{name}");
    }
    drop(chain.forward(&model.x, &plan).unwrap()); // a tape that is never used
    assert_eq!(folder.n_files(), 0);
}

#[test]
fn a_file_that_cannot_be_used_is_named() {
    let model = models::mlp(3, &[4, 5, 5, 2]);
    let nowhere = Path::new("no-such-folder").to_path_buf();
    let chain = Chain { saved: Saved::File(nowhere), ..model.chain() };
    let error = chain.forward(&model.x, &every_two(3)).map(|_| ()).unwrap_err();
    assert!(matches!(&error, Error::File { path, .. } if path.starts_with("no-such-folder")));
    let folder = Folder::new("cut");
    let chain = Chain { saved: Saved::File(folder.0.clone()), ..model.chain() };
    for damage in [|path: &Path| fs::write(path, [0; 7]), |path: &Path| fs::remove_file(path)] {
        let plan = every_two(3);
        let (loss, tape) = chain.forward(&model.x, &plan).unwrap();
        let path = fs::read_dir(&folder.0).unwrap().next().unwrap().unwrap().path();
        damage(&path).unwrap();
        let error = tape.backward_from_loss(&loss, 1.0, &mut Collect::default()).unwrap_err();
        assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
    }
    assert_eq!(folder.n_files(), 0);
}

/// Forward and recomputation see the same rounded input, bit for bit; the loss is near the exact
/// one, by one rounding to 8 bits.
#[test]
fn inputs_in_bf16_are_rounded_for_both_passes() {
    let model = models::mlp(8, &[4, 6, 6, 2]);
    let chain = Chain { saved: Saved::Bf16, ..model.chain() }; // checks bits
    let again = Plan(vec![Step::Keep(1), Step::Keep(2)]);
    let plan = Plan(vec![Step::Keep(0), Step::Redo { first: 1, end: 3, again }]);
    let (loss, tape) = chain.forward(&model.x, &plan).unwrap();
    let mut sink = Collect::default();
    tape.backward_from_loss(&loss, 1.0, &mut sink).unwrap();
    let grads = sink.into_grads();
    // Plain candle with the rounding written out, straight through.
    let h = (model.pieces[0].1)(&model.x).unwrap();
    let rounded = h.detach().to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
    let rounded = Var::from_tensor(&rounded).unwrap();
    let y = (model.pieces[2].1)(&(model.pieces[1].1)(&rounded).unwrap()).unwrap();
    assert_eq!(bits(&loss), bits(&y));
    let plain = y.backward().unwrap();
    for (name, var) in &model.params[2..] {
        assert_eq!(bits(grads.get(var).unwrap()), bits(plain.get(var).unwrap()), "{name}");
    }
    assert!(grads.get(&model.params[0].1).is_some());
}

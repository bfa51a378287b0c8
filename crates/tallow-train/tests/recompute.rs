//! Recomputation changes nothing: weights, losses and statistics bit for bit, in every precision.

mod support;

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use std::sync::{Arc, Mutex};
use support::{Net, Setup, State, dynamic, here, nested, plans, seen};
use tallow_data::Batch;
use tallow_models::{Score, Segments, Whole};
use tallow_tensor::{
    Params,
    layers::{self, BatchNorm2d, Dropout, Linear},
    ops::{self, CrossEntropy, Loss, Then},
    pass,
};
use tallow_train::{
    Applied, Gradients, Recipe, Trainer, optim,
    precision::{LossScale, Masters, Policy},
    recompute::{Chain, Check, Collect, NoReplay, Plan, Replay, Saved, Segment, Step},
};

/// After `n_updates` updates: outcomes and losses, then all that moved.
fn train(
    net: Net,
    policy: &Policy,
    split: (usize, usize),
    n_updates: u64,
    change: impl FnOnce(Recipe) -> Recipe,
) -> (Vec<(u64, String)>, State) {
    let mut setup = Setup::new(net, policy, split, change);
    let updates: Vec<_> =
        (0..n_updates).map(|seed| setup.update(split.0, seed).expect("updates")).collect();
    (seen(&updates), setup.state())
}

/// Each plan against the one that keeps everything.
fn check(net: Net, policy: &Policy, split: (usize, usize), scale: &LossScale, plans: &[Plan]) {
    // Under a dynamic scale the first window overflows.
    let n_updates = if *scale == LossScale::off() { 3 } else { 4 };
    let scaled = |recipe| Recipe { loss_scale: scale.clone(), ..recipe };
    let (want_seen, want) = train(net, policy, split, n_updates, scaled);
    let n_applied = want_seen.iter().filter(|(_, outcome)| outcome == "Yes").count();
    assert_eq!(n_applied, 3, "{net:?} {policy:?}: {want_seen:?}");
    for plan in plans {
        let redone = |recipe| Recipe { recompute: plan.clone(), ..scaled(recipe) };
        let (got_seen, got) = train(net, policy, split, n_updates, redone);
        let what = format!("{net:?}, {:?}, {split:?}, {plan}", policy.compute);
        assert_eq!(got_seen, want_seen, "{what}: losses");
        got.assert_same(&want, &what);
    }
}

fn in_every_precision(net: Net) {
    let plans = plans(net, 4);
    for split in [(4, 4), (4, 2)] {
        check(net, &Policy::f32(), split, &LossScale::off(), &plans);
    }
    check(net, &Policy::bf16(), (4, 2), &LossScale::off(), &plans);
    check(net, &Policy::f16(), (4, 2), &dynamic(2f32.powi(24)), &plans);
}

#[test]
fn rec_every_plan_trains_the_digits_resnet_alike() {
    in_every_precision(Net::Digits);
}

/// The head is tied to the embedding: its sums over segments and micro-batches are made in the
/// order in which backward visits them, which no plan changes.
#[test]
fn rec_every_plan_trains_a_gpt2_with_dropout_alike() {
    in_every_precision(Net::Gpt2);
}

#[test]
fn rec_every_plan_trains_a_resnet_18_alike() {
    let plans = plans(Net::ResNet18, 2);
    let [all, .., tightest] = &plans[..] else { panic!("{plans:?}") };
    check(
        Net::ResNet18,
        &Policy::f32(),
        (2, 2),
        &LossScale::off(),
        &[all.clone(), tightest.clone()],
    );
}

/// What the comparison would see if it did not hold: other masks give other weights.
#[test]
fn other_masks_are_other_weights() {
    let run = |n_before: u64| {
        let mut setup = Setup::new(Net::Gpt2, &Policy::f32(), (4, 4), |recipe| recipe);
        for _ in 0..n_before {
            // Refused, so that only the position of the draws moves.
            let nowhere = Batch {
                targets: Tensor::full(1000u32, (4, 8), &Device::Cpu).expect("targets"),
                ..Net::Gpt2.batch(4, 0, &Policy::f32())
            };
            setup.trainer.update(&nowhere).expect_err("no such token");
        }
        let _update = setup.update(4, 0).expect("updates");
        setup.state().values
    };
    assert!(run(0) == run(0));
    assert!(run(0) != run(1));
}

/// One feature, normed, and a row of logits.
struct Feature {
    norm: BatchNorm2d,
    last: Linear,
}

impl Segments for Feature {
    fn names(&self) -> Vec<String> {
        vec!["norm".to_string()]
    }

    fn head_name(&self) -> String {
        "last".to_string()
    }

    fn run(&self, _: usize, x: &Tensor, train: bool) -> Result<Tensor> {
        self.norm.forward_t(x, train)
    }

    fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        Ok(ops::cross_entropy(&self.last.forward(&x.flatten_from(1)?)?, targets, cfg)?)
    }

    fn score(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        Score::of_logits(&self.last.forward(&x.flatten_from(1)?)?, targets, cfg)
    }
}

fn feature() -> (Feature, Masters, Params) {
    let params = Params::new(1);
    let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
    let vb = masters.builder(&Device::Cpu);
    let norm = layers::batch_norm2d(1, Then::Identity, vb.pp("bn")).expect("builds");
    let last = layers::linear(1, 2, vb.pp("fc")).expect("builds");
    (Feature { norm, last }, masters, params)
}

/// Mean and variance.
fn statistics(params: &Params) -> [f32; 2] {
    let values = params.buffers().into_iter().map(|(_, var)| {
        let values = var.flatten_all().and_then(|v| v.to_vec1::<f32>()).expect("values");
        values[0]
    });
    <[f32; 2]>::try_from(values.collect::<Vec<_>>()).expect("mean and variance")
}

/// `[1, 3]`, `n` times.
fn ones_and_threes(n: usize) -> Batch {
    let x: Vec<f32> = (0..n).flat_map(|_| [1.0, 3.0]).collect();
    let y: Vec<u32> = (0..n).flat_map(|_| [0, 1]).collect();
    Batch {
        inputs: Tensor::from_vec(x, (2 * n, 1, 1, 1), &Device::Cpu).expect("inputs"),
        targets: Tensor::from_vec(y, 2 * n, &Device::Cpu).expect("targets"),
        first_index: 0,
    }
}

#[test]
fn rec_1_statistics_move_once_a_micro_batch_however_often_it_is_recomputed() {
    let redo = |first, end, again| Step::Redo { first, end, again: Plan(again) };
    let twice = Plan(vec![redo(0, 2, vec![redo(0, 1, vec![Step::Keep(0)]), Step::Keep(1)])]);
    let thrice = Plan(vec![redo(0, 2, twice.0.clone())]);
    for plan in [Plan::keep_all(2), nested(0, 2), twice, thrice] {
        // (mean, variance) after n updates of the statistics: 2 - 2 * 0.9^n and 2 - 0.9^n.
        for (n, want) in [(1, [0.2f32, 1.1]), (2, [0.38, 1.19]), (3, [0.542, 1.271])] {
            for gradients in [Gradients::Summed, Gradients::Released] {
                let (model, masters, params) = feature();
                let (batch, n_updates) =
                    if gradients == Gradients::Summed { (2 * n, 1) } else { (2, n) };
                let recipe =
                    Recipe { recompute: plan.clone(), gradients, ..support::recipe(batch, 2, 1) };
                let trainer = Trainer::new(model, masters, params.buffers(), recipe);
                let mut trainer = trainer.expect("valid");
                for _ in 0..n_updates {
                    let _update = trainer.update(&ones_and_threes(batch / 2)).expect("updates");
                }
                let [mean, var] = statistics(&params);
                let what = format!("{plan}, {n} updates, {gradients:?}");
                // Each update rounds once to f32.
                let tol = tallow_testkit::Tol::Ulps(n as u32 - 1);
                let got = [f64::from(mean), f64::from(var)];
                tallow_testkit::assert_close(&what, &got, &want.map(f64::from), tol);
            }
        }
    }
}

#[test]
fn rec_1_a_forward_alone_moves_them_too_and_a_rehearsal_does_not() {
    let (model, masters, params) = feature();
    let x = ones_and_threes(1).inputs;
    let _y = model.run(0, &x, false).expect("runs");
    assert_eq!(statistics(&params), [0.0, 1.0]);
    let trainer = Trainer::new(model, masters, params.buffers(), support::recipe(2, 2, 1));
    let trainer = trainer.expect("valid");
    trainer.rehearse(&ones_and_threes(1)).expect("runs");
    assert_eq!(statistics(&params), [0.0, 1.0]);
    let _y = trainer.model().run(0, &x, true).expect("runs");
    assert_eq!(statistics(&params), [0.2, 1.1]);
}

/// The gradient of `x` under `sum(dropouts(x) * a)` and what the first forward of the dropouts gave.
fn dropped(plan: &Plan, replay: Arc<dyn Replay>, n_dropouts: usize) -> (Vec<f32>, Vec<f32>) {
    let cpu = Device::Cpu;
    let x = Var::ones(64, DType::F32, &cpu).expect("ones");
    let a = Tensor::arange(1f32, 65.0, &cpu).expect("1 to 64");
    let dropout = Dropout::new(0.5, 9).expect("a probability");
    let (first, a) = (Mutex::new(None), &a);
    let masked = |x: &Tensor| {
        let mut y = x.clone();
        for _ in 0..n_dropouts {
            y = dropout.forward_t(&y, true)?;
        }
        first.lock().expect("no panic").get_or_insert(y.to_vec1::<f32>()?);
        Ok(y)
    };
    let segments = vec![
        Segment::new("drop", masked),
        Segment::new("loss", move |y: &Tensor| (y * a)?.sum_all()),
    ];
    let chain = Chain { replay, ..Chain::new(segments) };
    pass::begin_step(7);
    let (loss, tape) = chain.forward(&x, plan).expect("runs");
    let grad = tape.backward_from_loss(&loss, 1.0, &mut Collect::default()).expect("runs");
    let grad = grad.expect("x is a variable").to_vec1().expect("values");
    drop(chain); // it borrows what is taken out next
    (grad, first.into_inner().expect("no panic").expect("it ran"))
}

#[test]
fn rec_2_a_recomputed_dropout_draws_the_mask_of_its_forward() {
    let plans =
        [Plan::keep_all(2), nested(0, 2), Plan(vec![nested(0, 1).0[0].clone(), Step::Keep(1)])];
    for n_dropouts in [1, 2] {
        let (want, _) = dropped(&plans[0], Arc::new(here), n_dropouts);
        for plan in &plans {
            let (grad, first) = dropped(plan, Arc::new(here), n_dropouts);
            assert_eq!(grad, want, "{plan}");
            for (i, (g, y)) in grad.iter().zip(&first).enumerate() {
                // Kept values are multiplied by 2 at each dropout; so are their gradients.
                assert_eq!(*g, y * (i + 1) as f32, "{plan}: element {i}");
                assert!(
                    [0.0, 2f32.powi(n_dropouts as i32)].contains(y),
                    "{plan}: element {i}: {y}"
                );
            }
        }
        // Two dropouts have two masks: fewer survive both.
        let n_kept = want.iter().filter(|g| **g != 0.0).count();
        let expected = if n_dropouts == 1 { 20..44 } else { 5..28 };
        assert!(expected.contains(&n_kept), "{n_kept} of 64 kept by {n_dropouts} dropouts");
    }
    // Without the hook the recomputation draws anew, and the comparison above would see it.
    let (grad, _) = dropped(&plans[1], Arc::new(NoReplay), 1);
    assert_ne!(grad, dropped(&plans[0], Arc::new(here), 1).0);
}

/// A cast by the policy, a matrix and a note of the dtypes that came in.
struct Probe {
    layers: Vec<(String, DType, Linear)>,
    last: Linear,
    notes: Arc<Mutex<Vec<Note>>>,
}

/// (segment, whether it is a recomputation, dtypes of input and weight)
type Note = (usize, bool, [DType; 2]);

impl Segments for Probe {
    fn names(&self) -> Vec<String> {
        self.layers.iter().map(|(name, ..)| name.clone()).collect()
    }

    fn head_name(&self) -> String {
        "last".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, _: bool) -> Result<Tensor> {
        let (_, compute, layer) = &self.layers[index];
        let x = x.to_dtype(*compute)?;
        let dtypes = [x.dtype(), layer.weight().dtype()];
        self.notes.lock().expect("no panic").push((index, pass::is_replay(), dtypes));
        layer.forward(&x)?.tanh()
    }

    fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        let logits = self.last.forward(&x.to_dtype(self.last.weight().dtype())?)?;
        Ok(ops::cross_entropy(&logits, targets, cfg)?)
    }

    fn score(&self, _: &Tensor, _: &Tensor, _: &CrossEntropy) -> Result<Score> {
        unreachable!("never judged")
    }
}

/// Bits after three updates, and the notes.
fn probed(policy: Policy, plan: &Plan) -> (Vec<(String, Vec<u32>)>, Vec<Note>) {
    let params = Params::new(1);
    let masters = Masters::new(policy.clone(), params.clone()).expect("a valid policy");
    let vb = masters.builder(&Device::Cpu);
    let layer = |name: &str| {
        let layer = layers::linear(12, 12, vb.pp(name)).expect("builds");
        (name.to_string(), policy.dtype_of(name), layer)
    };
    let notes = Arc::default();
    let layers = ["first", "middle", "third"].map(layer).into();
    let last = layers::linear(12, 3, vb.pp("last")).expect("builds");
    let model = Probe { layers, last, notes: Arc::clone(&notes) };
    drop(policy); // backward knows it from the model alone
    let recipe = Recipe { recompute: plan.clone(), ..support::recipe(4, 4, 3) };
    let mut trainer = Trainer::new(model, masters, Vec::new(), recipe).expect("valid");
    for seed in 0..3 {
        let mut batch = Net::Mixed.batch(4, seed, &Policy::f32());
        batch.inputs = batch.inputs.flatten_from(1).expect("rows");
        let _update = trainer.update(&batch).expect("updates");
    }
    let found = std::mem::take(&mut *notes.lock().expect("no panic"));
    (support::bits(&params.all()), found)
}

#[test]
fn rec_5_the_precision_policy_holds_in_recomputation() {
    for (policy, middle, others) in [
        (Policy::f32().with("middle*", DType::BF16), DType::BF16, DType::F32),
        (Policy::bf16().uniform().with("middle*", DType::F16), DType::F16, DType::BF16),
    ] {
        let (want, kept) = probed(policy.clone(), &Plan::keep_all(4));
        assert!(kept.iter().all(|(_, again, _)| !again));
        let (got, notes) = probed(policy, &nested(0, 4));
        assert!(got == want, "{middle:?} inside {others:?}: the weights differ");
        let dtype = |i: usize| [if i == 1 { middle } else { others }; 2];
        for (i, again, dtypes) in &notes {
            assert_eq!(*dtypes, dtype(*i), "segment {i}, recomputed: {again}");
        }
        for i in 0..3 {
            let n = notes.iter().filter(|(j, again, _)| *j == i && *again).count();
            // Of four segments, the first is run again at every level, the last but one at two.
            assert_eq!(n, 3 * (4 - i), "recomputations of segment {i}");
        }
    }
}

#[test]
fn spare_8_frozen_parameters_stay_bit_equal() {
    let frozen = ["h.0.*", "wpe.*", "ln_f.bias"];
    let group = |pattern: &str| optim::Group {
        pattern: pattern.to_string(),
        treatment: optim::Treatment::Frozen,
    };
    let start = Setup::new(Net::Gpt2, &Policy::f32(), (4, 2), |recipe| recipe).state();
    for gradients in [Gradients::Summed, Gradients::Released] {
        for plan in [Plan::keep_all(6), nested(0, 6)] {
            let micro = if gradients == Gradients::Summed { 2 } else { 4 };
            let mut setup = Setup::new(Net::Gpt2, &Policy::f32(), (4, micro), |mut recipe| {
                recipe.optimizer.groups = frozen.map(group).to_vec();
                Recipe { recompute: plan.clone(), gradients, ..recipe }
            });
            for seed in 0..3 {
                let update = setup.update(4, seed).expect("updates");
                assert_eq!(update.outcome, Applied::Yes);
            }
            let end = setup.state();
            let mut n_frozen = 0;
            for ((name, before), (_, after)) in start.values.iter().zip(&end.values) {
                let is_frozen =
                    name.starts_with("h.0.") || name.starts_with("wpe.") || name == "ln_f.bias";
                n_frozen += usize::from(is_frozen);
                assert_eq!(before == after, is_frozen, "{plan}, {gradients:?}: {name}");
            }
            assert_eq!(n_frozen, 14);
        }
    }
}

/// Any candle model is a chain of one segment and its loss; both can be recomputed.
#[test]
fn a_whole_model_is_recomputed_too() {
    struct Flat(Linear);
    impl ModuleT for Flat {
        fn forward_t(&self, x: &Tensor, _: bool) -> Result<Tensor> {
            self.0.forward(&x.flatten_from(1)?)
        }
    }
    let run = |plan: Plan| {
        let params = Params::new(1);
        let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
        let model = Flat(layers::linear(12, 3, masters.builder(&Device::Cpu)).expect("builds"));
        let recipe = Recipe { recompute: plan, ..support::recipe(4, 2, 1) };
        let mut trainer = Trainer::new(Whole(model), masters, vec![], recipe).expect("valid");
        for seed in 0..3 {
            let batch = Net::Mixed.batch(4, seed, &Policy::f32());
            let _update = trainer.update(&batch).expect("updates");
        }
        support::bits(&params.all())
    };
    assert_eq!(run(Plan::keep_all(2)), run(nested(0, 2)));
}

/// Inputs that wait in a file come back bit for bit; rounded to bf16 they differ by that rounding.
#[test]
fn rec_inputs_may_wait_elsewhere() {
    let folder = std::env::temp_dir().join(format!("tallow-inputs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let plan = nested(0, 4);
    let run = |saved: Saved| {
        train(Net::Mixed, &Policy::f32(), (4, 2), 3, |recipe| Recipe {
            recompute: plan.clone(),
            saved,
            ..recipe
        })
    };
    let (want_seen, want) = run(Saved::AsIs);
    let (got_seen, got) = run(Saved::File(folder.clone()));
    assert_eq!(got_seen, want_seen, "losses");
    got.assert_same(&want, "inputs in a file");
    std::fs::remove_dir(&folder).expect("every file has gone");

    let (_, rounded) = run(Saved::Bf16);
    let [want, got] = [want.floats(), rounded.floats()];
    let largest = want.iter().fold(0f64, |a, b| a.max(b.abs()));
    let far = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    // Three updates, each of at most twice the rate where a gradient changes its sign.
    let bound = 3.0 * 2.0 * support::RATE + largest / 256.0;
    assert!(far > 0.0 && far <= bound, "{far} of {bound}");
}

/// A segment that does not repeat itself is named; without the check nobody would know.
#[test]
fn rec_a_segment_that_does_not_repeat_itself_is_named() {
    struct Drifting(Linear, Mutex<f64>);
    impl ModuleT for Drifting {
        fn forward_t(&self, x: &Tensor, _: bool) -> Result<Tensor> {
            let mut by = self.1.lock().expect("no panic");
            *by += 1e-3;
            self.0.forward(&x.flatten_from(1)?)? + *by
        }
    }
    let run = |check: Check| {
        let params = Params::new(1);
        let masters = Masters::new(Policy::f32(), params.clone()).expect("a valid policy");
        let linear = layers::linear(12, 3, masters.builder(&Device::Cpu)).expect("builds");
        let model = Drifting(linear, Mutex::new(0.0));
        let recipe = Recipe { recompute: nested(0, 2), check, ..support::recipe(4, 4, 1) };
        let mut trainer = Trainer::new(Whole(model), masters, vec![], recipe).expect("valid");
        let before = support::bits(&params.all());
        let result = trainer.update(&Net::Mixed.batch(4, 0, &Policy::f32()));
        (result, before == support::bits(&params.all()))
    };
    let (result, is_untouched) = run(Check::Bitwise);
    let message = result.expect_err("it drifts").to_string();
    assert!(message.contains("model") && is_untouched, "{message}");
    let (result, is_untouched) = run(Check::Shape);
    assert!(result.is_ok() && !is_untouched);
}

//! Known failures of recomputation elsewhere, one test each.

mod support;
use candle_core::{DType, Device, Tensor, Var};
use std::{
    cell::Cell,
    sync::{Arc, Mutex},
};
use support::{
    bits, models,
    state::{self, BatchNorm, dropout},
    var,
};
use tallow_recompute::*;

/// Mean and variance as in the case, and the number of updates.
fn running(norm: &BatchNorm) -> (f64, f64, u32) {
    let running = norm.running.lock().unwrap();
    ((running.0 * 1e6).round() / 1e6, (running.1 * 1e6).round() / 1e6, running.2)
}

fn one_and_three() -> Tensor {
    Tensor::new(&[1f32, 3.0], &Device::Cpu).unwrap()
}

/// `w * norm(x)` in as many recomputed segments, one in the other.
fn nested(norm: &Arc<BatchNorm>, w: &Var, x: &Tensor, depth: usize) -> Result<Tensor> {
    let (norm, w) = (norm.clone(), w.clone());
    recompute(x, move |x| match depth {
        1 => norm.forward(x)?.broadcast_mul(&w),
        _ => Ok(nested(&norm, &w, x, depth - 1)?),
    })
}

#[test]
fn rec_1_statistics_move_once() {
    let w = Var::new(0.5f32, &Device::Cpu).unwrap();
    let norm = BatchNorm::new();
    let plain = norm.forward(&one_and_three()).unwrap().broadcast_mul(&w).unwrap();
    let plain_grads = plain.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!(running(&norm), (0.2, 1.1, 1));
    for depth in 1..=3 {
        let norm = BatchNorm::new();
        let y = nested(&norm, &w, &one_and_three(), depth).unwrap();
        let loss = y.sqr().unwrap().sum_all().unwrap();
        assert_eq!(running(&norm), (0.2, 1.1, 1), "forward alone, depth {depth}");
        let grads = loss.backward().unwrap();
        assert_eq!(running(&norm), (0.2, 1.1, 1), "depth {depth}");
        assert_eq!(bits(grads.get(&w).unwrap()), bits(plain_grads.get(&w).unwrap()));
    }
}

#[test]
fn rec_1_n_micro_batches_are_n_updates() {
    let w = Var::new(0.5f32, &Device::Cpu).unwrap();
    let norm = BatchNorm::new();
    for n in 1..=4 {
        let y = nested(&norm, &w, &one_and_three(), 2).unwrap();
        y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(running(&norm).2, n);
    }
}

/// Three normed segments and a loss; plans two deep.
#[test]
fn rec_1_in_a_chain_at_any_depth() {
    let w = Var::new(0.5f32, &Device::Cpu).unwrap();
    let norms: Vec<_> = (0..3).map(|_| BatchNorm::new()).collect();
    let mut segments: Vec<_> = norms
        .iter()
        .map(|norm| Segment::new("norm", |x: &Tensor| norm.forward(x)?.broadcast_mul(&w)))
        .collect();
    segments.push(Segment::new("loss", |x: &Tensor| x.sqr()?.sum_all()));
    let chain = Chain::new(segments);
    let inner = Step::Redo { first: 1, end: 3, again: Plan(vec![Step::Keep(1), Step::Keep(2)]) };
    let deep = Step::Redo { first: 0, end: 3, again: Plan(vec![Step::Keep(0), inner]) };
    let plans = [Plan::keep_all(4), Plan(vec![deep, Step::Keep(3)])];
    for (n, plan) in (1..).zip(&plans) {
        let (loss, tape) = chain.forward(&one_and_three(), plan).unwrap();
        tape.backward_from_loss(&loss, 1.0, &mut Collect::default()).unwrap();
        for norm in &norms {
            assert_eq!(running(norm).2, n, "{plan}");
        }
    }
    chain.estimate_kept_bytes(&one_and_three()).unwrap();
    assert_eq!(running(&norms[2]).2, 2, "looking moves nothing");
    chain.infer(&one_and_three()).unwrap();
    assert_eq!(running(&norms[2]).2, 3, "a forward in training mode does");
}

fn options() -> Recompute {
    Recompute { replay: state::hook(), check: Check::Bitwise, ..Recompute::named("dropout") }
}

#[test]
fn rec_2_the_mask_of_the_gradient_is_that_of_the_forward() {
    let x = Var::from_tensor(&Tensor::ones(64, DType::F32, &Device::Cpu).unwrap()).unwrap();
    let a = Tensor::arange(1f32, 65.0, &Device::Cpu).unwrap();
    let step = |redo: bool| {
        state::begin();
        let y = if redo { options().run(&x, dropout).unwrap() } else { dropout(&x).unwrap() };
        let loss = (&y * &a).unwrap().sum_all().unwrap();
        dropout(&a).unwrap(); // draws go on before backward
        let grads = loss.backward().unwrap();
        (y.to_vec1::<f32>().unwrap(), grads.get(&x).unwrap().to_vec1::<f32>().unwrap())
    };
    let (y, grad) = step(true);
    for i in 0..64 {
        assert_eq!(grad[i], if y[i] == 0.0 { 0.0 } else { 2.0 * (i + 1) as f32 });
    }
    assert!(grad.contains(&0.0) && grad.iter().any(|g| *g != 0.0));
    assert_eq!(step(false), (y, grad));
}

#[test]
fn rec_2_each_draw_has_a_mask_of_its_own() {
    state::begin();
    let x = Var::from_tensor(&Tensor::ones(64, DType::F32, &Device::Cpu).unwrap()).unwrap();
    let both = |x: &Tensor| Tensor::stack(&[dropout(x)?, dropout(x)?], 0);
    let [y, z] = [(); 2].map(|()| options().run(&x, both).unwrap());
    let masks: Vec<_> = [&y, &z].iter().flat_map(|t| t.to_vec2::<f32>().unwrap()).collect();
    for i in 0..4 {
        for j in 0..i {
            assert_ne!(masks[i], masks[j], "draws {i} and {j}");
        }
    }
    let loss = (y + z).unwrap().sum_all().unwrap();
    let grad = loss.backward().unwrap().get(&x).unwrap().to_vec1::<f32>().unwrap();
    for i in 0..64 {
        assert_eq!(grad[i], masks.iter().map(|mask| mask[i]).sum::<f32>());
    }
    assert_eq!(state::n_draws(), 4, "backward draws nothing of its own");
}

thread_local! {
    /// The dtype in which layers compute: a policy as guards set it.
    static POLICY: Cell<DType> = const { Cell::new(DType::F32) };
}

fn with_policy<R>(dtype: DType, run: impl FnOnce() -> R) -> R {
    struct Back(DType);
    impl Drop for Back {
        fn drop(&mut self) {
            POLICY.set(self.0);
        }
    }
    let _back = Back(POLICY.replace(dtype));
    run()
}

#[test]
fn rec_5_the_cast_policy_is_that_of_the_forward() {
    let w = var(1, &[4, 4]);
    let x = var(2, &[3, 4]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let layer = {
        let (seen, w) = (seen.clone(), w.clone());
        move |x: &Tensor| {
            let x = x.to_dtype(POLICY.get())?;
            seen.lock().unwrap().push(x.dtype());
            // Candle multiplies no matrices in f16: the product is made of rounded values in f32.
            let w = w.to_dtype(POLICY.get())?.to_dtype(DType::F32)?;
            x.to_dtype(DType::F32)?.matmul(&w)?.tanh()
        }
    };
    let hook: Arc<dyn Replay> = Arc::new(|| {
        let dtype = POLICY.get();
        Box::new(move |again: &mut dyn FnMut()| with_policy(dtype, again)) as Again
    });
    // f32, then bf16, then f16 inside it; all backward outside of any guard.
    let step = |redo: bool| {
        let run = |x: &Tensor| match redo {
            true => Recompute { replay: hook.clone(), ..options() }.run(x, layer.clone()).unwrap(),
            false => layer(x).unwrap(),
        };
        let y = run(&x);
        let y = with_policy(DType::BF16, || {
            let y = run(&y);
            with_policy(DType::F16, || run(&y))
        });
        y.sum_all().unwrap().backward().unwrap()
    };
    let plain = step(false);
    let forward = [DType::F32, DType::BF16, DType::F16];
    assert_eq!(*seen.lock().unwrap(), forward);
    seen.lock().unwrap().clear();
    let again = step(true);
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen[..3], forward);
    assert_eq!(seen[3..], [DType::F16, DType::BF16, DType::F32], "recomputed last first");
    for param in [&w, &x] {
        // `w` is tied across the segments: three terms in the same order.
        assert_eq!(bits(again.get(param).unwrap()), bits(plain.get(param).unwrap()));
    }
    assert_eq!(POLICY.get(), DType::F32);
}

#[test]
fn spare_8_frozen_layers_stay() {
    let mut model = models::mlp(4, &[4, 5, 6, 7, 2]);
    // The first two layers and the third's bias are frozen: candle then sees plain tensors.
    let frozen: Vec<_> = model.params.drain(..4).collect();
    let (w3, b3) = (model.params[0].1.clone(), model.params[1].1.as_tensor().detach());
    for i in 0..2 {
        let [w, b] = [0, 1].map(|j| frozen[2 * i + j].1.as_tensor().detach());
        let layer = move |x: &Tensor| x.matmul(&w)?.broadcast_add(&b)?.tanh();
        model.pieces[i].1 = support::piece(layer);
    }
    model.pieces[2].1 = support::piece(move |x| x.matmul(&w3)?.broadcast_add(&b3)?.relu());
    model.params.remove(1);
    let before: Vec<_> = frozen.iter().map(|(_, var)| bits(var)).collect();
    let plain = model.plain();
    assert!(plain.grads.iter().all(|(_, grad)| grad.is_some()));
    for k in [1, 2, 4] {
        assert_eq!(model.graph(k), plain);
    }
    let costs: Vec<_> = model.names().into_iter().map(SegmentCost::unmeasured).collect();
    for policy in [Policy::None, Policy::All, Policy::Every(2), Policy::Every(3)] {
        let plan = policy.plan(&costs).unwrap();
        assert_eq!(model.planned(&plan), plain, "{plan}");
    }
    let grads = {
        let chain = model.chain();
        let plan = Plan::keep_all(4);
        let (loss, tape) = chain.forward(&model.x, &plan).unwrap();
        let mut names = Vec::new();
        let mut sink = |name: &str, grads: candle_core::backprop::GradStore| {
            names.push((name.to_string(), grads.get_ids().count()));
            Ok(())
        };
        tape.backward_from_loss(&loss, 1.0, &mut sink).unwrap();
        names
    };
    assert_eq!(grads, [("layer.3".to_string(), 2), ("layer.2".to_string(), 1)]);
    assert_eq!(frozen.iter().map(|(_, var)| bits(var)).collect::<Vec<_>>(), before);
}

//! Recomputation changes nothing: the bits of the loss and of every gradient are plain candle's.

mod support;
use candle_core::{Device, Result, Tensor, Var};
use support::{Model, bits, models, smallest_bytes, state, tensor, var};
use tallow_recompute::*;

/// Every policy, and the deepest plan there is.
fn plans(model: &Model) -> Vec<(String, Plan)> {
    let costs = model.rough_costs();
    let n = costs.len();
    let middle_bytes = costs.iter().map(|c| c.kept_bytes).sum::<u64>() / n as u64;
    let policies = [
        Policy::None,
        Policy::All,
        Policy::Every(2),
        Policy::Every(n),
        Policy::Bytes(middle_bytes),
        Policy::Named(vec!["*1*".to_string(), "head".to_string()]),
        Policy::Named(vec!["*".to_string()]),
        Policy::Planned { limit_bytes: smallest_bytes(&costs) },
        Policy::Planned { limit_bytes: u64::MAX },
    ];
    let of_policy = |policy: Policy| (format!("{policy:?}"), policy.plan(&costs).unwrap());
    let mut plans: Vec<_> = policies.into_iter().map(of_policy).collect();
    plans.push(("deep".to_string(), Plan(vec![deep(0, n)])));
    plans
}

/// A redo of all but the first segment, inside a redo of all.
fn deep(first: usize, end: usize) -> Step {
    let again = match end - first {
        1 => vec![Step::Keep(first)],
        _ => vec![Step::Keep(first), deep(first + 1, end)],
    };
    Step::Redo { first, end, again: Plan(again) }
}

fn check(model: &Model) {
    let plain = model.plain();
    for k in [1, 2, model.pieces.len()] {
        assert_eq!(model.graph(k), plain, "groups of {k}");
    }
    assert_eq!(model.nested_graph(), plain, "nested");
    check_chain(model);
}

fn check_chain(model: &Model) {
    let plain = model.plain();
    for (policy, plan) in plans(model) {
        assert_eq!(model.planned(&plan), plain, "{policy}: {plan}");
    }
}

#[test]
fn an_mlp() {
    check(&models::mlp(5, &[4, 7, 3, 9, 6, 2]));
}

#[test]
fn an_mlp_whose_input_is_a_variable() {
    let model = models::mlp(3, &[4, 5, 6, 2]);
    check(&Model { x: var(5, &[3, 4]).into_inner(), ..model });
}

#[test]
fn a_convolutional_net() {
    check(&models::conv());
}

#[test]
fn a_transformer_with_dropout() {
    check(&models::gpt(4, false));
}

/// In a chain, tied gradients are added where plain candle adds them. Within candle's graph they
/// are added in another order when tokens repeat, which the README says.
#[test]
fn tied_weights() {
    check_chain(&models::gpt(3, true));
    let mut model = models::gpt(3, true);
    model.x = Tensor::new(&[[1u32, 4, 2], [3, 9, 0]], &Device::Cpu).unwrap(); // none repeats
    check(&model);
}

/// A chain whose segments recompute by themselves.
#[test]
fn recomputation_within_a_chain() {
    let mut model = models::gpt(3, false);
    let plain = model.plain();
    for (_, piece) in &mut model.pieces {
        let inner = piece.clone();
        *piece = support::piece(move |x| {
            let inner = inner.clone();
            let options = Recompute { replay: state::hook(), ..Recompute::named("inner") };
            Ok(options.run(x, move |x| inner(x))?)
        });
    }
    assert_eq!(model.plain(), plain);
    check_chain(&model);
}

#[test]
fn a_scaled_loss_scales_the_gradients() {
    let model = models::mlp(3, &[4, 5, 2]);
    let chain = model.chain();
    let plan = Plan::keep_all(2);
    let (loss, tape) = chain.forward(&model.x, &plan).unwrap();
    let mut sink = Collect::default();
    assert!(tape.backward_from_loss(&loss, 0.25, &mut sink).unwrap().is_none());
    let grads = sink.into_grads();
    let plain = (chain_plain(&model) * 0.25).unwrap().backward().unwrap();
    for (name, var) in &model.params {
        assert_eq!(bits(grads.get(var).unwrap()), bits(plain.get(var).unwrap()), "{name}");
    }
}

fn chain_plain(model: &Model) -> Tensor {
    model.pieces.iter().fold(model.x.clone(), |x, (_, piece)| piece(&x).unwrap())
}

/// Gradients of `params` by `loss`, with and without recomputation.
fn same(params: &[&Var], loss: impl Fn(bool) -> Result<Tensor>) {
    let [plain, again] = [false, true].map(|redo| loss(redo).unwrap().backward().unwrap());
    for (i, param) in params.iter().enumerate() {
        assert_eq!(again.get(param).map(bits), plain.get(param).map(bits), "parameter {i}");
    }
    assert!(again.get_ids().count() <= plain.get_ids().count(), "nothing else is in the store");
}

#[test]
fn two_inputs_and_two_outputs() {
    let (a, b, w) = (var(1, &[4, 3]), var(2, &[4, 3]), var(3, &[3, 3]));
    let run = {
        let w = w.clone();
        move |xs: &[Tensor]| {
            let y = (xs[0].matmul(&w)? * &xs[1])?;
            Ok(vec![y.tanh()?, xs[1].exp()?, y.argmax(1)?])
        }
    };
    for used in [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]] {
        let loss = |redo: bool| {
            let xs = [a.as_tensor(), &b.affine(2.0, 0.5)?];
            let ys = match redo {
                true => recompute_many(&xs, run.clone())?,
                false => run(&xs.map(Tensor::clone))?,
            };
            assert!(!ys[2].dtype().is_float() && ys.len() == 3);
            let mut loss = Tensor::zeros((), candle_core::DType::F32, &Device::Cpu)?;
            for (y, used) in ys.iter().zip(used) {
                if used != 0.0 {
                    loss = (loss + y.sqr()?.sum_all()?)?;
                }
            }
            Ok(loss)
        };
        match used {
            [0.0, _] => assert_b_only(&a, &b, &w, loss),
            _ => same(&[&a, &b, &w], loss),
        }
    }
}

/// The second output depends on `b` alone: nothing else gets a gradient.
fn assert_b_only(a: &Var, b: &Var, w: &Var, loss: impl Fn(bool) -> Result<Tensor>) {
    let grads = loss(true).unwrap().backward().unwrap();
    assert!(grads.get(a).is_none() && grads.get(w).is_none());
    let plain = loss(false).unwrap().backward().unwrap();
    assert_eq!(grads.get(b).map(bits), plain.get(b).map(bits));
}

#[test]
fn integer_inputs_beside_float_ones() {
    let (table, scale) = (var(1, &[5, 3]), var(2, &[3]));
    let ids = Tensor::new(&[4u32, 1, 0], &Device::Cpu).unwrap();
    same(&[&table, &scale], |redo| {
        let table = table.clone();
        let run =
            move |xs: &[Tensor]| Ok(vec![table.index_select(&xs[0], 0)?.broadcast_mul(&xs[1])?]);
        let xs = [&ids, scale.as_tensor()];
        let ys = if redo { recompute_many(&xs, run)? } else { run(&xs.map(Tensor::clone))? };
        ys[0].sqr()?.sum_all()
    });
}

#[test]
fn a_tensor_captured_from_outside() {
    let (w, v) = (var(1, &[3, 3]), var(2, &[3, 3]));
    let x = tensor(3, &[2, 3]);
    same(&[&v, &w], |redo| {
        let outside = w.tanh()?; // has a graph of its own, and is no argument
        let v = v.clone();
        let run = move |x: &Tensor| x.matmul(&outside)?.matmul(&v)?.sqr();
        (if redo { recompute(&x, run)? } else { run(&x)? }).sum_all()
    });
}

#[test]
fn views_and_offsets() {
    let (x, w) = (var(1, &[6, 4]), var(2, &[4, 4]));
    same(&[&x, &w], |redo| {
        let w = w.clone();
        let run = move |x: &Tensor| x.matmul(&w)?.narrow(1, 1, 2)?.t();
        let part = x.narrow(0, 2, 3)?;
        let y = if redo { recompute(&part, run)? } else { run(&part)? };
        (y.contiguous()?.exp()? * 0.5)?.sum_all()
    });
}

#[test]
fn nothing_to_learn_is_no_graph() {
    let x = tensor(1, &[2, 2]);
    assert!(!recompute(&x, |x| x.exp()).unwrap().track_op());
    let y = recompute(var(1, &[2, 2]).as_tensor(), |x| x.argmax(1)).unwrap();
    assert!(!y.track_op());
}

#[test]
fn a_second_backward_gives_the_same() {
    let (x, w) = (var(1, &[2, 3]), var(2, &[3, 3]));
    let y = recompute(&x, {
        let w = w.clone();
        move |x| x.matmul(&w)?.tanh()
    });
    let loss = y.unwrap().sum_all().unwrap();
    let [first, second] = [(); 2].map(|()| loss.backward().unwrap());
    for param in [&x, &w] {
        assert_eq!(bits(first.get(param).unwrap()), bits(second.get(param).unwrap()));
    }
}

#[test]
fn a_segment_that_detaches_ends_the_walk() {
    let (w, v) = (var(1, &[3, 3]), var(2, &[3, 3]));
    let segments = |detaches: bool| {
        let (w, v) = (w.clone(), v.clone());
        vec![
            Segment::new("a", move |x: &Tensor| x.matmul(&w)),
            Segment::new(
                "b",
                move |x: &Tensor| {
                    if detaches { x.detach().matmul(&v) } else { Ok(x.detach()) }
                },
            ),
            Segment::new("loss", |x: &Tensor| x.sqr()?.sum_all()),
        ]
    };
    for (detaches, n_grads) in [(true, 1), (false, 0)] {
        let chain = Chain::new(segments(detaches));
        for plan in [Policy::None, Policy::All, Policy::Every(2)] {
            let costs = ["a", "b", "loss"].map(SegmentCost::unmeasured);
            let plan = plan.plan(&costs).unwrap();
            let (loss, tape) = chain.forward(&tensor(3, &[2, 3]), &plan).unwrap();
            let mut sink = Collect::default();
            assert!(tape.backward_from_loss(&loss, 1.0, &mut sink).unwrap().is_none());
            assert_eq!(sink.into_grads().get_ids().count(), n_grads, "{plan}");
        }
    }
}

#[test]
fn infer_is_forward_alone() {
    let model = models::mlp(3, &[4, 5, 6, 2]);
    let y = model.chain().infer(&model.x).unwrap();
    assert!(!y.track_op());
    assert_eq!(bits(&y), model.plain().loss);
}

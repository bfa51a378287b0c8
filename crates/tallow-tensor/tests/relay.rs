//! Gradients that pass between this crate's operations and candle's in every mixture.

mod support;

use candle_core::{DType, Result, Tensor, Var};
use support::{host, tensor};
use tallow_tensor::{composed, ops};
use tallow_testkit::{Tol, assert_close, values};

fn variable(seed: u64) -> Var {
    let x = tensor(&values(seed, 12), &[3, 4], DType::F64);
    Var::from_tensor(&x).expect("a variable")
}

/// The gradient of `x` by candle's operations alone, and by `ours`.
fn check(
    what: &str,
    ours: impl Fn(&Tensor) -> Result<Tensor>,
    plain: impl Fn(&Tensor) -> Result<Tensor>,
) {
    let x = variable(1);
    let grad = |f: &dyn Fn(&Tensor) -> Result<Tensor>| {
        let loss = f(x.as_tensor()).and_then(|y| y.sum_all()).expect("it runs");
        let mut all = Vec::new();
        // Twice: a gradient that stayed somewhere would count again.
        for _ in 0..2 {
            let grads = loss.backward().expect("it has a gradient");
            all.push(host(grads.get(&x).expect("x has a gradient")));
        }
        assert_eq!(all[0], all[1], "{what}: backward twice");
        all.swap_remove(0)
    };
    assert_close(what, &grad(&|x| ours(x)), &grad(&|x| plain(x)), Tol::Rel(1e-12));
}

#[test]
fn one_output_has_users_of_both_kinds() {
    check(
        "silu, then candle's square beside relu",
        |x| {
            let y = ops::silu(x)?;
            y.sqr()? + ops::add_relu(&y, &y)?
        },
        |x| {
            let y = composed::silu(x)?;
            y.sqr()? + composed::add_relu(&y, &y)?
        },
    );
}

#[test]
fn candle_stands_between_two_of_ours() {
    check(
        "gelu of a view of a softmax",
        |x| {
            let y = ops::softmax(&ops::gelu_tanh(x)?)?.t()?.narrow(0, 1, 2)?;
            Ok(ops::gelu_tanh(&(y * 3.0)?)?)
        },
        |x| {
            let y = composed::softmax(&composed::gelu_tanh(x)?)?.t()?.narrow(0, 1, 2)?;
            Ok(composed::gelu_tanh(&(y * 3.0)?)?)
        },
    );
}

#[test]
fn an_output_alone_is_a_root() {
    check("one operation", |x| Ok(ops::silu(x)?), |x| Ok(composed::silu(x)?));
}

#[test]
fn a_detached_output_ends_the_walk() {
    let x = variable(2);
    let y = ops::silu(x.as_tensor()).expect("it runs");
    let loss = (ops::relu(&y.detach()).expect("it runs") + &y).and_then(|z| z.sum_all());
    let grads = loss.and_then(|loss| loss.backward()).expect("it has a gradient");
    let want = composed::silu(x.as_tensor()).and_then(|y| Ok(y.sum_all()?.backward()?));
    let want = want.expect("it has a gradient");
    let [got, want] = [grads, want].map(|g| host(g.get(&x).expect("x has a gradient")));
    assert_close("through y alone", &got, &want, Tol::Rel(1e-12));
}

#[test]
fn a_graph_may_be_walked_on_another_thread() {
    let x = variable(3);
    let loss = ops::relu(&ops::silu(x.as_tensor()).expect("it runs")).expect("it runs");
    let loss = loss.sum_all().expect("a sum");
    let here = host(loss.backward().expect("a gradient").get(&x).expect("of x"));
    let there = std::thread::scope(|threads| {
        let walk =
            threads.spawn(|| host(loss.backward().expect("a gradient").get(&x).expect("of x")));
        walk.join().expect("no panic")
    });
    assert_eq!(here, there);
}

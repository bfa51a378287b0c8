//! Gradients set aside are those of candle's store.

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};
use std::{collections::HashSet, sync::Arc};
use tallow_tensor::{aside, ops};
use tallow_testkit::values;

fn var(seed: u64, dims: &[usize]) -> Var {
    let values = values(seed, dims.iter().product());
    let x = Tensor::from_vec(values, dims, &Device::Cpu).and_then(|x| x.to_dtype(DType::F32));
    Var::from_tensor(&x.expect("a tensor")).expect("a variable")
}

fn bits(x: &Tensor) -> Vec<u32> {
    let x = x.flatten_all().and_then(|x| x.to_vec1::<f32>()).expect("host values");
    x.into_iter().map(f32::to_bits).collect()
}

/// `w` is used twice by our operation and once by candle's; `x` is a variable that is not wanted.
fn loss(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let y = ops::linear(&ops::linear(x, w, None)?, w, None)?;
    (y.sqr()?.sum_all()? + w.sqr()?.sum_all()?)?.sqrt()
}

#[test]
fn what_is_set_aside_is_what_backward_gives() {
    let (x, w) = (var(1, &[3, 5]), var(2, &[5, 5]));
    let loss = loss(&x, &w).expect("fits");
    let plain = loss.backward().expect("backward");
    let wanted = Arc::new(HashSet::from([w.as_tensor().id()]));
    let grads = aside::set_aside(wanted, || {
        let mut grads = loss.backward().expect("backward");
        assert_eq!(aside::take_aside(&mut grads).expect("adds"), 5 * 5 * 4);
        assert_eq!(aside::take_aside(&mut grads).expect("nothing left"), 0);
        grads
    });
    assert_eq!(bits(grads.get(&x).expect("x")), bits(plain.get(&x).expect("x")));
    let [got, want] = [&grads, &plain].map(|g| g.get(&w).expect("w").flatten_all().expect("dense"));
    let [got, want] = [got, want].map(|g| g.to_vec1::<f32>().expect("host values"));
    // Three terms in another order.
    for (got, want) in got.iter().zip(&want) {
        assert!((got - want).abs() <= 4.0 * f32::EPSILON * want.abs().max(1.0), "{got} {want}");
    }
}

#[test]
fn nothing_is_set_aside_outside_or_after_a_panic() {
    let (x, w) = (var(1, &[3, 5]), var(2, &[5, 5]));
    let wanted = Arc::new(HashSet::from([w.as_tensor().id()]));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        aside::set_aside(wanted, || {
            let _grads = ops::linear(&x, &w, None).and_then(|y| Ok(y.sum_all()?.backward()?));
            panic!("as a test");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(aside::take_aside(&mut GradStore::default()).expect("empty"), 0);
    let grads = loss(&x, &w).expect("fits").backward().expect("backward");
    assert!(grads.get(&w).is_some());
}

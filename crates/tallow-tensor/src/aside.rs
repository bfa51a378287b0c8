//! Parameter gradients that do not go through candle's store.
//!
//! Candle's `backward` makes zeros for the first gradient of a variable and adds to them: while it
//! does, three tensors of the parameter's size are alive, and two passes over memory are spent. Under
//! [`set_aside`] this crate's operations keep the gradients of chosen variables out of that: each is
//! held once, as the operation made it, until [`take_aside`].

use crate::relay;
use candle_core::{Result, Tensor, TensorId, backprop::GradStore};
use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    sync::Arc,
};

struct Store {
    wanted: Arc<HashSet<TensorId>>,
    /// Wanted beside these, one by one.
    more: HashSet<TensorId>,
    /// Variable and gradient.
    grads: HashMap<TensorId, (Tensor, Tensor)>,
}

thread_local! {
    static STORE: RefCell<Option<Store>> = const { RefCell::new(None) };
}

/// Runs `work`; gradients of the variables in `wanted` that operations of this crate compute on this
/// thread meanwhile are set aside. What is not taken is dropped at the end, after a panic too.
///
/// `backward` then returns no gradient for such a variable unless another library's operation used
/// it; the two belong together, which [`take_aside`] sees to.
pub fn set_aside<R>(wanted: Arc<HashSet<TensorId>>, work: impl FnOnce() -> R) -> R {
    struct Back(Option<Store>);
    impl Drop for Back {
        fn drop(&mut self) {
            let _ours = STORE.replace(self.0.take());
        }
    }
    let _back =
        Back(STORE.replace(Some(Store { wanted, more: HashSet::new(), grads: HashMap::new() })));
    work()
}

/// Moves what was set aside into `grads`, added to what is there. Returns its bytes.
/// # Errors
/// Only candle's own.
pub fn take_aside(grads: &mut GradStore) -> Result<u64> {
    let taken = STORE.with_borrow_mut(|store| store.as_mut().map(|s| std::mem::take(&mut s.grads)));
    let mut n_bytes = 0;
    for (var, grad) in taken.into_iter().flat_map(HashMap::into_values) {
        n_bytes += (grad.elem_count() * grad.dtype().size_in_bytes()) as u64;
        let sum = match grads.remove(&var) {
            None => grad,
            Some(other) => (other + grad)?.detach(),
        };
        grads.insert(&var, sum);
    }
    Ok(n_bytes)
}

/// Sets the gradient of `var` aside too, until [`take_one`]. Nothing happens outside [`set_aside`].
pub fn want_one(var: &Tensor) {
    STORE.with_borrow_mut(|store| {
        if let Some(store) = store {
            store.more.insert(var.id());
        }
    });
}

/// The gradient of `var` that was set aside since [`want_one`].
pub fn take_one(var: &Tensor) -> Option<Tensor> {
    STORE.with_borrow_mut(|store| {
        let store = store.as_mut()?;
        store.more.remove(&var.id());
        store.grads.remove(&var.id()).map(|(_, grad)| grad)
    })
}

/// A root, one number large, whose `backward` is that of `output` from the gradient `grad`, without
/// candle's zeros and sums for it; `None` if no operation of this crate made `output`.
/// # Errors
/// Only candle's own.
pub fn seed(output: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
    let Some(token) = relay::token(output) else { return Ok(None) };
    token.slot.put(grad.clone())?;
    Ok(Some(token.node))
}

/// Takes those of `grads` whose operand is wanted.
pub(crate) fn divert(args: &[&Tensor], grads: &mut [Option<Tensor>]) -> Result<()> {
    STORE.with_borrow_mut(|store| {
        let Some(store) = store else { return Ok(()) };
        for (arg, grad) in args.iter().zip(grads) {
            if !store.wanted.contains(&arg.id()) && !store.more.contains(&arg.id()) {
                continue;
            }
            let Some(grad) = grad.take() else { continue };
            let sum = match store.grads.remove(&arg.id()) {
                None => grad,
                Some((_, sum)) => crate::ops::add(&sum, &grad.detach())?.detach(),
            };
            store.grads.insert(arg.id(), ((*arg).clone(), sum));
        }
        Ok(())
    })
}

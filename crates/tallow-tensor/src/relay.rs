//! Gradients that go from one operation of this crate to the next, past candle's store.
//!
//! Candle's `backward` makes zeros for the first gradient of every tensor and adds to them: three
//! tensors of an activation's size are alive while it does, and two passes over memory are spent,
//! slow ones in `bf16`. So the node of an operation here is not its output but a token, one number
//! large. Tokens are what candle walks and adds; the gradient of the output waits in the token's
//! [`Slot`], as the operation that made it left it. The output itself hangs on the token: where
//! candle's own operations use it, its gradient comes through candle and joins what is in the slot.

use crate::{Result, cpu::tensor};
use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor, TensorId};
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError},
};

/// What an output's users leave for the operation that made it.
#[derive(Default)]
pub(crate) struct Slot(Mutex<Option<Tensor>>);

impl Slot {
    /// Adds a gradient.
    pub(crate) fn put(&self, grad: Tensor) -> candle_core::Result<()> {
        let mut slot = lock(&self.0);
        *slot = Some(match slot.take() {
            None => grad.detach(),
            Some(sum) => crate::ops::add(&sum, &grad.detach())?.detach(),
        });
        Ok(())
    }

    /// The sum so far.
    pub(crate) fn take(&self) -> Option<Tensor> {
        lock(&self.0).take()
    }
}

/// The token of an output that is alive.
#[derive(Clone)]
pub(crate) struct Token {
    /// Its node in candle's graph.
    pub(crate) node: Tensor,
    pub(crate) slot: Arc<Slot>,
}

static TOKENS: LazyLock<Mutex<HashMap<TensorId, Token>>> = LazyLock::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The token of `output`, if an operation of this crate made it.
pub(crate) fn token(output: &Tensor) -> Option<Token> {
    // A tensor without a graph, a parameter say, has none.
    if output.is_variable() || !output.track_op() {
        None
    } else {
        lock(&TOKENS).get(&output.id()).cloned()
    }
}

/// What a token's node computes: nothing.
pub(crate) fn nothing() -> (CpuStorage, Shape) {
    (CpuStorage::F32(vec![0.0]), Shape::from(1))
}

/// The gradient of a token, for candle to add.
pub(crate) fn mark() -> Result<Option<Tensor>> {
    tensor(vec![0f32], &Shape::from(1))
}

/// The output that hangs on `token`.
pub(crate) fn emit(token: Token, storage: CpuStorage, shape: Shape) -> candle_core::Result<Tensor> {
    let id = Arc::new(OnceLock::new());
    let emit =
        Emit { made: Mutex::new(Some((storage, shape))), slot: token.slot.clone(), id: id.clone() };
    let output = token.node.apply_op1(emit)?;
    lock(&TOKENS).insert(output.id(), token);
    let _ = id.set(output.id());
    Ok(output)
}

/// From a token to its output. Lives as long as the output's graph.
struct Emit {
    made: Mutex<Option<(CpuStorage, Shape)>>,
    slot: Arc<Slot>,
    id: Arc<OnceLock<TensorId>>,
}

impl Drop for Emit {
    fn drop(&mut self) {
        let Some(id) = self.id.get() else { return };
        let gone = lock(&TOKENS).remove(id);
        // Only now, without the lock: what hangs on it may be outputs too.
        drop(gone);
    }
}

impl CustomOp1 for Emit {
    fn name(&self) -> &'static str {
        "output"
    }
    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        lock(&self.made).take().ok_or_else(|| candle_core::Error::Msg("output: made twice".into()))
    }
    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.slot.put(grad.clone())?;
        Ok(mark()?)
    }
}

#[cfg(test)]
mod tests {
    use super::{TOKENS, lock, token};
    use candle_core::{Device, Var};

    #[test]
    fn a_token_goes_with_its_output() {
        let x = Var::new(&[1f32, -1.0], &Device::Cpu).expect("a variable");
        let y = crate::ops::silu(x.as_tensor()).expect("it runs");
        let z = crate::ops::silu(&y).expect("it runs");
        let ids = [y.id(), z.id()];
        assert!(token(&y).is_some() && token(&z).is_some());
        assert!(token(x.as_tensor()).is_none() && token(&y.detach()).is_none());
        drop(y);
        assert!(!lock(&TOKENS).contains_key(&ids[0]), "its operation needs no token of it");
        drop(z);
        assert!(!lock(&TOKENS).contains_key(&ids[1]));
    }
}

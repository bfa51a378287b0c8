//! The one op this crate puts into candle's graphs, and what is read off a graph.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Result, Shape, Storage, Tensor,
    TensorId, backend::BackendStorage,
};
use std::{
    collections::HashSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A node whose value was computed elsewhere: forward copies it, backward is `bwd(gradient)`.
struct Given<B> {
    value: Mutex<Option<Tensor>>,
    bwd: B,
}

/// No user code runs under any lock of this crate, so a poisoned one is whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node that depends on `arg` and has the value `value`; `bwd` maps its gradient to `arg`'s.
pub(crate) fn given<B>(arg: &Tensor, value: Tensor, bwd: B) -> Result<Tensor>
where
    B: Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
{
    arg.apply_op1(Given { value: Mutex::new(Some(value)), bwd })
}

macro_rules! forward {
    ($name:ident, $storage:ident, $variant:ident) => {
        fn $name(&self, _: &$storage, _: &Layout) -> Result<($storage, Shape)> {
            let value = lock(&self.value).take();
            let Some(value) = value else { candle_core::bail!("recompute: forward ran twice") };
            let (storage, layout) = value.storage_and_layout();
            match &*storage {
                // A cast to its own dtype copies exactly what the layout covers.
                Storage::$variant(s) => {
                    Ok((s.to_dtype(layout, s.dtype())?, layout.shape().clone()))
                }
                _ => candle_core::bail!("recompute: input and output are on different devices"),
            }
        }
    };
}

impl<B: Fn(&Tensor) -> Result<Option<Tensor>>> CustomOp1 for Given<B> {
    fn name(&self) -> &'static str {
        "recompute"
    }

    forward!(cpu_fwd, CpuStorage, Cpu);
    forward!(cuda_fwd, CudaStorage, Cuda);
    forward!(metal_fwd, MetalStorage, Metal);

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        (self.bwd)(grad)
    }
}

/// One element on `like`'s device: a link in the graph, whose value says nothing.
pub(crate) fn link(like: &Tensor) -> Result<Tensor> {
    Tensor::zeros(1, candle_core::DType::F32, like.device())
}

/// A root of `y` from which `backward` starts with `grad` in `y`, and no further copy of it.
pub(crate) fn seed(y: &Tensor, grad: Tensor) -> Result<Tensor> {
    let grad = Mutex::new(Some(grad));
    given(y, link(y)?, move |_| Ok(lock(&grad).take()))
}

/// One root of several.
pub(crate) fn join(roots: &[Tensor]) -> Result<Tensor> {
    match roots.split_first() {
        Some((root, [])) => Ok(root.clone()),
        Some((root, rest)) => {
            let mut all = vec![root.clone()];
            for other in rest {
                all.push(other.to_device(root.device())?);
            }
            Tensor::cat(&all, 0)
        }
        None => candle_core::bail!("recompute: nothing to join"),
    }
}

/// The variables that lead to `outputs`, each once, in the order of candle's own walk.
pub(crate) fn variables(outputs: &[Tensor]) -> Vec<Tensor> {
    let mut seen: HashSet<TensorId> = HashSet::new();
    let nodes = outputs.iter().flat_map(|y| y.sorted_nodes());
    nodes.filter(|node| node.is_variable() && seen.insert(node.id())).cloned().collect()
}

/// Whether a gradient of `x` can be wanted.
pub(crate) fn is_tracked(x: &Tensor) -> bool {
    x.track_op() && x.dtype().is_float()
}

/// Bytes of the elements of `x`.
pub(crate) fn bytes_of(x: &Tensor) -> u64 {
    (x.elem_count() * x.dtype().size_in_bytes()) as u64
}

//! The bridge between candle's CPU tensors and kernels on slices.
//!
//! An operation implements [`Kernel`] once, for any number of operands up to three and any float
//! type; [`apply`] makes nodes of candle's graph of it, between which gradients are handed on by
//! [`relay`]. Operands may be strided or offset: they are
//! copied only if their elements do not lie side by side, and the copy dies with the call.

use crate::{
    Error, Result, aside,
    relay::{self, Slot, Token},
};
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, Layout, Shape, Storage, Tensor,
    WithDType, op::BackpropOp,
};
use std::{
    borrow::Cow,
    sync::{Arc, OnceLock},
};
use tallow_kernels::{Element, Real, cast::cast};

/// A type of arithmetic that both candle and the kernels know.
pub(crate) trait Arithmetic: Real + WithDType {}
impl Arithmetic for f32 {}
impl Arithmetic for f64 {}

/// A stored float type that both candle and the kernels know.
pub(crate) trait Scalar: Element<Acc: Arithmetic> + WithDType {}
impl Scalar for f32 {}
impl Scalar for f64 {}
impl Scalar for half::bf16 {}
impl Scalar for half::f16 {}

/// Runs `$body` with `$T` standing for the Rust type of `$dtype`; a typed error if it is no float.
macro_rules! with_float {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            dtype => Err($crate::Error::DType { op: $op, dtype }),
        }
    };
}
pub(crate) use with_float;

/// An operand on the CPU.
#[derive(Clone, Copy)]
pub(crate) struct Arg<'a> {
    storage: &'a CpuStorage,
    layout: &'a Layout,
    /// Whether backward has any use for its gradient.
    pub(crate) wanted: bool,
}

impl<'a> Arg<'a> {
    pub(crate) fn dims(&self) -> &'a [usize] {
        self.layout.dims()
    }

    pub(crate) fn shape(&self) -> &'a Shape {
        self.layout.shape()
    }

    pub(crate) fn n_elems(&self) -> usize {
        self.shape().elem_count()
    }

    pub(crate) fn last_dim(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    fn dtype(&self) -> DType {
        candle_core::backend::BackendStorage::dtype(self.storage)
    }

    /// The elements in row-major order, borrowed where they lie so.
    pub(crate) fn dense<T: WithDType>(&self) -> Result<Cow<'a, [T]>> {
        let data = T::cpu_storage_as_slice(self.storage)?;
        Ok(match self.layout.contiguous_offsets() {
            Some((start, end)) => Cow::Borrowed(&data[start..end]),
            None => Cow::Owned(gather(data, self.layout)),
        })
    }

    /// The elements of a matrix, borrowed also where they lie in column-major order; true if so.
    pub(crate) fn dense_matrix<T: WithDType>(&self) -> Result<(Cow<'a, [T]>, bool)> {
        let [rows, cols] = *self.dims() else { return Ok((self.dense()?, false)) };
        let start = self.layout.start_offset();
        if self.layout.stride() == [1, rows] && rows > 1 && cols > 1 {
            let data = T::cpu_storage_as_slice(self.storage)?;
            return Ok((Cow::Borrowed(&data[start..start + rows * cols]), true));
        }
        Ok((self.dense()?, false))
    }

    /// The elements in row-major order as `A`, borrowed where they are that already.
    pub(crate) fn as_type<A: Arithmetic>(&self, op: &'static str) -> Result<Cow<'a, [A]>> {
        if self.dtype() == A::DTYPE {
            return self.dense();
        }
        with_float!(op, self.dtype(), T => {
            let src = self.dense::<T>()?;
            let mut dst = vec![<A as Default>::default(); src.len()];
            cast(&mut dst, &src);
            Ok(Cow::Owned(dst))
        })
    }

    /// A gradient of this operand: `values` rounded to its dtype, in its shape.
    pub(crate) fn gradient<A: Arithmetic>(
        &self,
        op: &'static str,
        values: Vec<A>,
    ) -> Result<Option<Tensor>> {
        if self.dtype() == A::DTYPE {
            return tensor(values, self.shape());
        }
        with_float!(op, self.dtype(), T => {
            let mut dst = vec![T::default(); values.len()];
            cast(&mut dst, &values);
            tensor(dst, self.shape())
        })
    }

    /// Where the gradient of this operand is to be written, if it is wanted.
    pub(crate) fn room<T: Element>(&self) -> Option<Vec<T>> {
        self.wanted.then(|| vec![T::default(); self.n_elems()])
    }
}

/// The elements of a strided view in row-major order, a run of neighbours at a time.
fn gather<T: Copy>(data: &[T], layout: &Layout) -> Vec<T> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let n_elems = layout.shape().elem_count();
    let mut dense = Vec::with_capacity(n_elems);
    if n_elems == 0 {
        return dense;
    }
    // Trailing dimensions that lie side by side form one run.
    let (mut n_outer, mut run) = (dims.len(), 1);
    while n_outer > 0 && (strides[n_outer - 1] == run || dims[n_outer - 1] == 1) {
        run *= dims[n_outer - 1];
        n_outer -= 1;
    }
    let mut index = vec![0; n_outer];
    let mut start = layout.start_offset();
    loop {
        dense.extend_from_slice(&data[start..start + run]);
        let mut axis = n_outer;
        loop {
            if axis == 0 {
                return dense;
            }
            axis -= 1;
            index[axis] += 1;
            start += strides[axis];
            if index[axis] < dims[axis] {
                break;
            }
            start -= dims[axis] * strides[axis];
            index[axis] = 0;
        }
    }
}

/// The operands of an operation with a weight and a bias, as far as they exist.
pub(crate) fn operands<'a>(
    x: &'a Tensor,
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
) -> Vec<&'a Tensor> {
    [Some(x), weight, bias].into_iter().flatten().collect()
}

/// Runs `f` on a tensor that is no operand of the graph, such as a frozen weight.
pub(crate) fn with_arg<R>(tensor: &Tensor, f: impl FnOnce(Arg) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(candle_core::Error::Msg("a frozen operand left the CPU".to_string()).into());
    };
    f(Arg { storage, layout, wanted: false })
}

/// A dense CPU tensor that takes over `values`.
pub(crate) fn tensor<T: WithDType>(values: Vec<T>, shape: &Shape) -> Result<Option<Tensor>> {
    Ok(Some(Tensor::from_vec(values, shape, &Device::Cpu)?))
}

/// One gradient per operand, `None` where it is not wanted or does not exist.
pub(crate) type Grads = Vec<Option<Tensor>>;

/// A differentiable operation on CPU slices. `T` is the dtype of the first operand.
pub(crate) trait Kernel: Send + Sync + 'static {
    const NAME: &'static str;
    /// What messages call the operands.
    const OPERANDS: &'static [&'static str] = &["input"];
    /// Whether the operands must share the first one's dtype.
    const SAME_DTYPE: bool = true;
    /// Whether backward looks at the output; else its `out` is some other tensor.
    const USES_OUTPUT: bool = false;

    /// The output's elements and shape. An operand is `wanted` if a graph leads to it.
    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)>;

    /// The gradients of the operands, from that of the output.
    fn backward<T: Scalar>(&self, args: &[Arg], out: Arg, dout: Arg)
    -> Result<Vec<Option<Tensor>>>;
}

/// `kernel(args)` as a node of candle's graph; `fallback()` where the operands are not on the CPU.
pub(crate) fn apply<K: Kernel>(
    kernel: K,
    args: &[&Tensor],
    fallback: impl FnOnce() -> Result<Tensor>,
) -> Result<Tensor> {
    for (what, tensor) in K::OPERANDS.iter().zip(args).skip(1) {
        let (found, expected) = (tensor.dtype(), args[0].dtype());
        if K::SAME_DTYPE && found != expected {
            return Err(Error::DTypeMismatch { op: K::NAME, what, found, expected });
        }
    }
    if !args[0].device().is_cpu() {
        return fallback();
    }
    let (storage, shape) = forward(&kernel, args)?;
    if !args.iter().any(|arg| arg.track_op()) {
        return Ok(Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false));
    }
    let tokens: Vec<Option<Token>> = args.iter().map(|arg| relay::token(arg)).collect();
    let nodes: Vec<Tensor> = args
        .iter()
        .zip(&tokens)
        .map(|(&arg, token)| token.as_ref().map_or(arg, |token| &token.node).clone())
        .collect();
    let operands = args
        .iter()
        .zip(tokens)
        .map(|(arg, token)| Operand {
            wanted: arg.track_op(),
            // Its graph is the token's; an operand of candle's keeps its own.
            tensor: if token.is_some() { arg.detach() } else { (*arg).clone() },
            slot: token.map(|token| token.slot),
        })
        .collect();
    let slot = Arc::new(Slot::default());
    let out = Arc::new(OnceLock::new());
    let op = Op { kernel, operands, slot: slot.clone(), out: out.clone() };
    let node = match &nodes[..] {
        [x] => x.apply_op1(op)?,
        [x, y] => x.apply_op2(y, op)?,
        [x, y, z] => x.apply_op3(y, z, op)?,
        _ => unreachable!("kernels have one to three operands"),
    };
    let output = relay::emit(Token { node, slot }, storage, shape)?;
    if K::USES_OUTPUT {
        let _ = out.set(output.detach());
    }
    Ok(output)
}

/// The output of a kernel.
fn forward<K: Kernel>(kernel: &K, args: &[&Tensor]) -> Result<(CpuStorage, Shape)> {
    with_views(K::NAME, args, |views| {
        for (view, arg) in views.iter_mut().zip(args) {
            view.wanted = arg.track_op();
        }
        with_float!(K::NAME, views[0].dtype(), T => kernel.forward::<T>(views))
    })
}

/// Runs `f` on CPU tensors.
fn with_views<R>(
    op: &'static str,
    tensors: &[&Tensor],
    f: impl FnOnce(&mut [Arg]) -> Result<R>,
) -> Result<R> {
    let all: Vec<_> = tensors.iter().map(|tensor| tensor.storage_and_layout()).collect();
    let mut views = Vec::with_capacity(all.len());
    for (storage, layout) in &all {
        let Storage::Cpu(storage) = &**storage else {
            let message = format!("{op}: a gradient or operand left the CPU");
            return Err(candle_core::Error::Msg(message).into());
        };
        views.push(Arg { storage, layout, wanted: false });
    }
    f(&mut views)
}

/// What an operation works on.
struct Operand {
    tensor: Tensor,
    wanted: bool,
    /// Where its gradient goes, if an operation of this crate made it.
    slot: Option<Arc<Slot>>,
}

/// The node of an operation: what candle calls on its way back.
struct Op<K> {
    kernel: K,
    operands: Vec<Operand>,
    /// The output's gradient.
    slot: Arc<Slot>,
    /// The output, where [`Kernel::USES_OUTPUT`].
    out: Arc<OnceLock<Tensor>>,
}

impl<K: Kernel> Op<K> {
    /// What candle adds to the gradient of each of its operands.
    fn backward(&self, args: &[&Tensor]) -> candle_core::Result<Grads> {
        let Self { kernel, operands, slot, out } = self;
        let Some(dout) = slot.take() else {
            candle_core::bail!("{}: no gradient of its output came", K::NAME)
        };
        let out = out.get().unwrap_or(&dout);
        let tensors: Vec<&Tensor> =
            operands.iter().map(|operand| &operand.tensor).chain([out, &dout]).collect();
        let mut grads = with_views(K::NAME, &tensors, |views| {
            for (view, operand) in views.iter_mut().zip(operands) {
                view.wanted = operand.wanted;
            }
            let (args, rest) = views.split_at(operands.len());
            with_float!(K::NAME, args[0].dtype(), T => {
                kernel.backward::<T>(args, rest[0], rest[1])
            })
        })?;
        debug_assert_eq!(grads.len(), args.len(), "{}: one gradient per operand", K::NAME);
        aside::divert(args, &mut grads)?;
        for (grad, operand) in grads.iter_mut().zip(operands) {
            let Some(slot) = &operand.slot else { continue };
            if let Some(of_operand) = grad.take() {
                slot.put(of_operand)?;
                *grad = relay::mark()?;
            }
        }
        Ok(grads)
    }
}

impl<K: Kernel> CustomOp1 for Op<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }
    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok(relay::nothing())
    }
    fn bwd(&self, x: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(self.backward(&[x])?.swap_remove(0))
    }
}

impl<K: Kernel> CustomOp2 for Op<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }
    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok(relay::nothing())
    }
    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let mut grads = self.backward(&[x, y])?;
        let dy = grads.pop().flatten();
        Ok((grads.pop().flatten(), dy))
    }
}

impl<K: Kernel> CustomOp3 for Op<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }
    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok(relay::nothing())
    }
    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        z: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut grads = self.backward(&[x, y, z])?;
        let (dz, dy) = (grads.pop().flatten(), grads.pop().flatten());
        Ok((grads.pop().flatten(), dy, dz))
    }
}

/// The one number of a scalar gradient.
pub(crate) fn scalar(op: &'static str, dout: Arg) -> Result<f64> {
    Ok(dout.as_type::<f64>(op)?.first().map_or(0.0, |d| d.f64()))
}

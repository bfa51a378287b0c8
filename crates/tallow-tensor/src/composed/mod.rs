//! What each operation of [`ops`](crate::ops) is off the CPU: the same function composed of candle
//! operations. Public so that the two can be compared on the CPU.
//!
//! Only candle operations whose backward is right are used. Statistics, exponentials, losses and
//! sums are in f32 (f64 for f64) and rounded once; products of bf16 and f16 are the backend's, which
//! accumulates them in f32. Memory is candle's: the graph keeps every intermediate tensor.

mod activation;
mod image;
mod loss;
mod norm;
mod product;
mod rows;

pub use activation::{add, add_relu, dropout, gelu_erf, gelu_tanh, relu, silu, swiglu};
pub use image::{avg_pool2d, conv2d, global_avg_pool2d, max_pool2d};
pub use loss::{cross_entropy, linear_cross_entropy};
pub use norm::{batch_norm2d, batch_norm2d_given, layer_norm, rms_norm};
pub use product::{attention, attention_rows, linear, lora_linear, matmul};
pub use rows::{embedding, log_softmax, mean_all, rope, softmax, sum_all};

use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// `x` in its accumulator's dtype, its elements side by side: some backends gather from no other.
fn widen(op: &'static str, x: &Tensor) -> Result<Tensor> {
    let wide = match x.dtype() {
        DType::F64 => DType::F64,
        DType::F32 | DType::BF16 | DType::F16 => DType::F32,
        dtype => return Err(Error::DType { op, dtype }),
    };
    Ok(x.to_dtype(wide)?.contiguous()?)
}

/// `x` where `keep` (u8, broadcast to `x`) is not 0, else `other` exactly, even for NaN: a product
/// with a mask would let NaN through.
fn keep_where(keep: &Tensor, x: &Tensor, other: f64) -> candle_core::Result<Tensor> {
    // Made on the host: not every device has f64.
    let other = Tensor::new(other, &Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())?;
    keep.broadcast_as(x.dims())?.where_cond(x, &other.broadcast_as(x.dims())?)
}

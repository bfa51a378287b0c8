//! Differentiable operations and layers for candle that train on the CPU.
//!
//! Candle's fused layers (`LayerNorm`, `RmsNorm`, softmax, rotary) record no backward, its pooling
//! gradients are wrong or missing, and its convolution has no bf16. These are drop-in [`ops`] and
//! [`layers`] whose every gradient is proven against PyTorch and central differences. Each keeps the
//! least its backward needs, computes no gradient for frozen operands, works on strided and offset
//! tensors, and gives the same bits on any number of threads. Off the CPU each falls back to a
//! composition of candle operations with the same result ([`composed`]).
//!
//! *Memory:* each operation's page says what it keeps between forward and backward.
//! *Needs:* candle only.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use tallow_tensor::{Params, layers, missing_gradients};
//!
//! let params = Params::new(42); // initial values are functions of (seed, name)
//! let vb = params.builder(DType::F32, &Device::Cpu);
//! let norm = layers::layer_norm(8, 1e-5, vb.pp("norm"))?; // was: candle_nn::layer_norm
//! let head = layers::linear(8, 2, vb.pp("head"))?;
//! let x = Tensor::ones((4, 8), DType::F32, &Device::Cpu)?;
//! let grads = head.forward(&norm.forward(&x)?)?.sqr()?.sum_all()?.backward()?;
//! assert!(missing_gradients(&grads, &params.trainable()).is_empty());
//! # Ok::<(), candle_core::Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod aside;
pub mod composed;
mod cpu;
mod error;
pub mod layers;
pub mod ops;
mod params;
pub mod pass;
mod relay;

pub use error::{Error, Result};
pub use params::{Params, is_buffer, missing_gradients};

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
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod composed;
mod cpu;
mod error;
pub mod layers;
pub mod ops;
mod params;
pub mod pass;

pub use error::{Error, Result};
pub use params::{Params, is_buffer, missing_gradients};

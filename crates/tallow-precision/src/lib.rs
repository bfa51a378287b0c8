//! Mixed precision for candle: cast policies, master weights, loss scaling, 8-bit storage.
//!
//! A [`Policy`] says which parameter and which layer computes in which dtype. [`Masters`] hands a
//! model its parameters in those dtypes and keeps the wide ones that the optimizer updates.
//! [`LossScale`] multiplies losses so that small f16 gradients survive, divides the gradients, and
//! gives a [`Verdict`] on whether the update may be applied. [`Stored`] keeps a tensor in 8 bits.
//!
//! *Memory:* the copies that a model computes with ([`copy_bytes`]), 2 bytes an element in bf16 or
//! f16; 1 byte an element of [`Stored`]; a loss scale is a value of under 200 bytes.
//! *Needs:* candle only.
//!
//! # Example
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use tallow_precision::{DynamicScale, LossScale, Verdict};
//!
//! let params = vec![("w".to_string(), Var::new(&[1f32, 2.0], &Device::Cpu)?)];
//! let mut scale = LossScale::dynamic(DynamicScale::STANDARD)?;
//! let loss = (params[0].1.as_tensor() * 3.0)?.sum_all()?;
//! let mut grads = scale.apply(&loss)?.backward()?;
//! match scale.unscale(&params, &mut grads)? {
//!     Verdict::Finite => assert_eq!(grads.get(&params[0].1).unwrap().to_vec1::<f32>()?, [3.0, 3.0]),
//!     Verdict::Overflow { name } => panic!("`{name}` overflowed: skip the update"),
//! }
//! # Ok::<(), tallow_precision::Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]
mod error;
mod lines;
mod masters;
mod policy;
mod scale;
mod state;
mod stored;
mod underflow;
mod unscale;
pub use crate::{
    error::{Error, Result},
    masters::{Masters, copy_bytes, master_bytes},
    policy::{Override, Policy, Within, WithinT},
    scale::{LossScale, Verdict},
    state::{DynamicScale, LossScaleState, Rule, Skip, Skips, Window},
    stored::Stored,
    underflow::{Underflow, underflow},
};
pub use tallow_kernels::fp8::{Fp8, fp8_bytes};

/// The example of the README runs as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

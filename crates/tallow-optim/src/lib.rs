//! Optimizers whose states are small: AdamW, Adam, SGD, Lion, Adafactor for candle.
//!
//! One fused pass over parameter, gradient and moments, in place. Moments are kept in f32, bf16 or 8
//! bits a block at a time ([`StateFormat`]), in memory or in a file of which a window is in memory
//! ([`Place`]); bf16 and f16 weights can do without master copies ([`Rounding`]). A gradient can be
//! used, and dropped, as soon as it exists ([`Optimizer::step_var`]).
//!
//! *Memory:* the `*_state_bytes` functions, before anything is made; [`Optimizer::state_bytes`] after.
//! *Needs:* candle only.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use tallow_optim::{Algorithm, Config, Optimizer, StateFormat, adamw_state_bytes};
//!
//! let weight = Var::from_tensor(&Tensor::ones(100_000, candle_core::DType::F32, &Device::Cpu)?)?;
//! let format = StateFormat::Bits8 { block_elems: 256 };
//! let config = Config { format, ..Config::new(Algorithm::ADAMW, 1e-3) };
//! let mut optimizer = Optimizer::new(&[("weight".to_string(), weight.clone())], config)?;
//! assert_eq!(optimizer.state_bytes(), adamw_state_bytes(100_000, format));
//! optimizer.step(&weight.as_tensor().sqr()?.sum_all()?.backward()?)?;
//! # Ok::<(), tallow_optim::Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod average;
mod checkpoint;
mod composed;
mod config;
mod error;
mod file;
mod fused;
mod optimizer;
mod pattern;
mod planes;
mod price;
mod release;
mod saved;
mod schedule;

pub use crate::{
    average::{Average, average_bytes},
    config::{Algorithm, Config, Group, Place, Treatment},
    error::{ConfigError, Error, ParameterError, Result, StateError},
    optimizer::{Optimizer, Stepped, named, state_bytes},
    price::{
        MIN_8BIT_ELEMS, StateFormat, adafactor_state_bytes, adamw_state_bytes, kahan_weights_bytes,
        lion_state_bytes, sgd_state_bytes,
    },
    release::{GradientNorm, Verdict},
    schedule::{Schedule, Shape},
};
pub use tallow_kernels::optim::Rounding;

/// The README's example is compiled too.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

//! Gradient accumulation: the update of a large batch in the memory of a small one.
//!
//! A batch is cut into micro-batches ([`BatchSplit`]), a *window* of which makes one update. Losses are a sum and a
//! weight (samples, tokens); [`GradientAccumulator`] adds up the gradients of the sums in buffers of
//! its own and divides once, by the weight of the whole window, so that regrouping the samples
//! changes nothing beyond rounding, and a short last window is no special case. The pass that
//! divides also removes the loss scale, clips, measures the norm and looks for NaN.
//!
//! *Memory:* [`accumulator_bytes`], from the first gradient on; a micro-batch's gradients die in
//! [`GradientAccumulator::add`].   *Needs:* candle only.
//!
//! # Example
//! ```
//! # use candle_core::{Device, Var};
//! # use tallow_accum::*;
//! let w = Var::new(0f32, &Device::Cpu)?;
//! let config = AccumConfig { dtype: AccumDType::F32, warn_above: ADVISED_MICRO_BATCHES };
//! let mut accum = GradientAccumulator::new(&[("w".to_string(), w.clone())], config)?;
//! for (slope, n_tokens) in [(2.0, 1.0), (1.0, 3.0)] {
//!     let loss_sum = (w.as_tensor() * (slope * n_tokens))?;
//!     accum.add(loss_sum.backward()?, n_tokens)?;
//! }
//! let window = accum.take_mean(Finish::PLAIN)?;
//! let grad = window.grads().get(&w).expect("w has a gradient");
//! assert_eq!(grad.to_scalar::<f32>()?, 1.25); // (2 + 1 + 1 + 1) / 4
//! # Ok::<(), Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]
mod accumulator;
mod buffer;
mod composed;
mod config;
mod cpu;
mod error;
mod loss;
mod split;
mod window;
mod windows;

pub use crate::{
    accumulator::GradientAccumulator,
    config::{
        ADVISED_MICRO_BATCHES, AccumConfig, AccumDType, Clip, Finish, accumulator_bytes,
        buffer_bytes,
    },
    error::{Error, Result},
    loss::LossSum,
    split::{BatchSplit, SplitError},
    window::{Verdict, Window, WindowReport},
    windows::Windows,
};

/// The README's example is compiled too.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

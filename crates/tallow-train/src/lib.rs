//! The thin trainer: the one place where engines meet.
//!
//! A [`Trainer`] takes a model as a chain of segments, or any candle model as one, its parameters and a
//! [`Recipe`], and turns batches into updates. [`Trainer::builder`] fills the recipe from what its user sets,
//! [`Trainer::planned`] from a byte budget. [`Trainer::save`] and [`Trainer::load`] go on to the same bits.
//!
//! *Memory:* [`Trainer::held_bytes`] beside the master parameters, and while a batch is computed the
//! activations and gradients of one micro-batch.
//!
//! ```
//! use candle_core::{DType, Device};
//! use tallow_models::Whole;
//! use tallow_train::{Built, Trainer, precision::Policy};
//! # use tallow_tensor::layers::linear;
//!
//! let model = |vb| {
//!     let linear = linear(784, 10, vb)?;
//!     Ok(Whole(move |x: &candle_core::Tensor| x.flatten_from(1)?.apply(&linear)))
//! };
//! let built = Built::new(Policy::bf16(), 0, &Device::Cpu, model)?;
//! let mut trainer = Trainer::builder(built).batch(64).micro_batch(16).clip_norm(1.0).build()?;
//! # let set = tallow_data::ImageSet::digits()?;
//! # let pixels = tallow_data::Pixels::digits(DType::F32, &Device::Cpu);
//! # let mut batches = set.batches(64, tallow_data::Order::Sequential, tallow_data::Tail::Keep, pixels)?;
//! let update = trainer.update(&batches.next().expect("a batch")?)?;
//! assert!(update.loss.is_finite());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod builder;
mod error;
mod recipe;
mod state;
mod step;
mod trainer;

pub use builder::Builder;
pub use error::{Error, Result};
pub use recipe::{Applied, Evaluation, Recipe, Skip, Update};
pub use state::CHECKPOINTS;
pub use tallow_accum::{self as accum, BatchSplit};
pub use tallow_backward::{Built, Flow, Gradients, Watch};
pub use tallow_checkpoint as checkpoint;
pub use tallow_memory::batch::Sizing;
pub use tallow_optim as optim;
pub use tallow_plan as plan;
pub use tallow_precision as precision;
pub use tallow_recompute as recompute;
pub use tallow_tensor::Params;
pub use trainer::Trainer;

/// The README's example is compiled too.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

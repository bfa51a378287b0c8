//! The thin trainer: the one place where engines meet.
//!
//! A [`Trainer`] takes a model as a chain of segments, or any candle model as one, its parameters and a [`Recipe`], and turns batches into
//! updates; [`fit`] runs epochs of them and tells an observer how it goes.
//!
//! *Memory:* [`Trainer::held_bytes`] beside the master parameters, and while a batch is computed the
//! activations and gradients of one micro-batch.
//!
//! ```
//! use candle_core::{DType, Device};
//! use tallow_models::Whole;
//! use tallow_train::{BatchSplit, Gradients, Params, Recipe, Trainer, accum, optim, precision, recompute};
//! # use tallow_tensor::layers::linear;
//! # struct Flat(tallow_tensor::layers::Linear);
//! # impl candle_core::ModuleT for Flat {
//! #     fn forward_t(&self, x: &candle_core::Tensor, _: bool) -> candle_core::Result<candle_core::Tensor> {
//! #         candle_core::Module::forward(&self.0, &x.flatten_from(1)?)
//! #     }
//! # }
//! let params = Params::new(0);
//! let masters = precision::Masters::new(precision::Policy::bf16(), params.clone())?;
//! let model = Flat(linear(784, 10, masters.builder(&Device::Cpu))?);
//! let recipe = Recipe {
//!     split: BatchSplit::derive(Some(64), Some(16), None, 1)?,
//!     optimizer: optim::Config::new(optim::Algorithm::ADAMW, 1e-3),
//!     schedule: optim::Schedule { peak: 1e-3, warmup_updates: 0, shape: optim::Shape::Constant },
//!     loss_scale: precision::LossScale::off(), // bf16 needs none
//!     accum: accum::AccumConfig { dtype: accum::AccumDType::F32, warn_above: 8 },
//!     clip: accum::Clip::Norm(1.0),
//!     skip_above_norm: f64::INFINITY,
//!     gradients: Gradients::Summed,
//!     recompute: recompute::Plan::keep_all(2), // the model, and the loss
//!     saved: recompute::Saved::AsIs,
//!     check: recompute::Check::Shape,
//!     label_smoothing: 0.0,
//!     ema_decay: None,
//! };
//! let mut trainer = Trainer::new(Whole(model), masters, params.buffers(), recipe)?;
//! # let set = tallow_data::ImageSet::digits()?;
//! # let pixels = tallow_data::Pixels::digits(DType::F32, &Device::Cpu);
//! # let mut batches = set.batches(64, tallow_data::Order::Sequential, tallow_data::Tail::Keep, pixels)?;
//! let update = trainer.update(&batches.next().expect("a batch")?)?;
//! assert!(update.loss.is_finite());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod backward;
mod books;
mod checkpoint;
mod error;
mod fit;
pub mod plan;
mod recipe;
mod release;
mod sizing;
mod split;
mod trainer;

pub use backward::{Flow, Watch};
pub use checkpoint::{CheckpointError, Checkpoints, Newest};
pub use error::{Error, Result};
pub use fit::{Epochs, Event, Outcome, Progress, fit};
pub use recipe::{Applied, Evaluation, Gradients, Recipe, Skip, Update};
pub use sizing::Sizing;
pub use split::{BatchSplit, SplitError};
pub use tallow_accum as accum;
pub use tallow_optim as optim;
pub use tallow_precision as precision;
pub use tallow_recompute as recompute;
pub use tallow_tensor::Params;
pub use trainer::Trainer;

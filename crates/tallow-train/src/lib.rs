//! The thin trainer: the one place where engines meet.
//!
//! A [`Trainer`] takes any candle model, its parameters and a [`Recipe`], and turns batches into
//! updates; [`fit`] runs epochs of them and tells an observer how it goes.
//!
//! *Memory:* parameters, AdamW's two moments, one set of gradient sums while a batch is computed, and
//! the activations of one micro-batch.
//!
//! ```
//! use candle_core::{DType, Device};
//! use tallow_train::{AdamW, BatchSplit, Params, Recipe, Schedule, Trainer};
//! # use tallow_tensor::layers::linear;
//! # struct Flat(tallow_tensor::layers::Linear);
//! # impl candle_core::ModuleT for Flat {
//! #     fn forward_t(&self, x: &candle_core::Tensor, _: bool) -> candle_core::Result<candle_core::Tensor> {
//! #         candle_core::Module::forward(&self.0, &x.flatten_from(1)?)
//! #     }
//! # }
//! let params = Params::new(0);
//! let model = Flat(linear(784, 10, params.builder(DType::F32, &Device::Cpu))?);
//! let split = BatchSplit::derive(Some(64), None, None, 1)?;
//! let (optimizer, schedule) = (AdamW::default_for(1e-3), Schedule::Constant);
//! let recipe = Recipe { split, optimizer, schedule, label_smoothing: 0.0 };
//! let mut trainer = Trainer::new(model, params.trainable(), recipe)?;
//! # let set = tallow_data::ImageSet::digits()?;
//! # let pixels = tallow_data::Pixels::digits(DType::F32, &Device::Cpu);
//! # let mut batches = set.batches(64, tallow_data::Order::Sequential, tallow_data::Tail::Keep, pixels)?;
//! let update = trainer.update(&batches.next().expect("a batch")?)?;
//! assert!(update.loss.is_finite());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod error;
mod fit;
mod split;
mod trainer;

pub use error::{Error, Result};
pub use fit::{Epochs, Event, Outcome, fit};
pub use split::{BatchSplit, SplitError};
pub use tallow_tensor::Params;
pub use trainer::{AdamW, Evaluation, Recipe, Schedule, Trainer, Update};

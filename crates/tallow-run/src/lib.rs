//! A run: epochs of updates with judgements between them, observed, stopped, saved and gone on with.
//!
//! [`fit`] draws batches, updates, judges after each epoch, and tells an observer, which may stop the run.
//! What a run is, beside the trainer, is a [`Progress`]; [`save`] and [`load`] put both into a checkpoint and
//! back, and the run then ends with the same bits.
//!
//! *Memory:* beside the trainer's, one batch and what the data set reads ahead.   *Needs:* the trainer.
//!
//! ```
//! use candle_core::{DType, Device};
//! use tallow_data::{ImageSet, Images, Pixels};
//! use tallow_models::ResNetConfig;
//! use tallow_run::{Epochs, Event, Progress, fit};
//! use tallow_train::{Built, Flow, Trainer, precision::Policy};
//!
//! let (train, held_out) = ImageSet::digits()?.split(9000)?;
//! let images = |set| Images { set, pixels: Pixels::digits(DType::F32, &Device::Cpu) };
//! let (train, held_out) = (images(train.split(64)?.0), images(held_out.split(32)?.0));
//! let model = |vb| Ok(ResNetConfig::digits().build(vb)?);
//! let built = Built::new(Policy::f32(), 0, &Device::Cpu, model)?;
//! let mut trainer = Trainer::builder(built).batch(32).learning_rate(4e-3).build()?;
//! let epochs = Epochs {
//!     train: &train,
//!     held_out: &held_out,
//!     batch: 32,
//!     epochs: 1,
//!     max_updates: None,
//!     early_stop_epochs: None,
//!     seed: 0,
//! };
//! let outcome = fit(&mut trainer, &epochs, Progress::START, |_, _, event| {
//!     if let Event::Evaluated { evaluation, .. } = event {
//!         assert!(evaluation.loss.is_finite());
//!     }
//!     Ok(Flow::Go)
//! })?;
//! assert_eq!(outcome.n_updates, 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod error;
mod fit;
mod progress;

pub use error::{Error, Result};
pub use fit::{Epochs, Event, Outcome, fit};
pub use progress::{Progress, load, save};
pub use tallow_checkpoint as checkpoint;
pub use tallow_train as train;

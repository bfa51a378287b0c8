//! Images with labels, in batches, with a bounded number of bytes.
//!
//! An [`ImageSet`] keeps its pixels as they came, one byte each, once: views share them. Its
//! [`Batches`] hold a cursor and a table of 256 values; a batch is normalised straight into the
//! asked dtype when it is asked for. The order of an epoch is a function of `(seed, epoch)`
//! ([`Permutation`]), so a [`Cursor`] is all that a resumed run needs.
//!
//! *Memory:* the pixels and labels, plus one batch.   *Needs:* candle-core, flate2.
//!
//! # Example
//! ```
//! use candle_core::{DType, Device};
//! use tallow_data::{ImageSet, Order, Pixels, Tail};
//!
//! let (train, _test) = ImageSet::digits()?.split(9000)?;
//! let order = Order::Shuffled { seed: 7, epoch: 0 };
//! let mut batches = train.batches(64, order, Tail::Drop, Pixels::digits(DType::F32, &Device::Cpu))?;
//! let batch = batches.next().expect("140 batches")?;
//! assert_eq!(batch.inputs.dims(), [64, 1, 28, 28]);
//! assert_eq!((batches.n_batches(), batches.cursor().position), (140, 64));
//! # Ok::<(), tallow_data::Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]
mod batches;
mod dataset;
mod error;
mod folder;
pub mod formats;
pub mod idx;
#[cfg(feature = "images")]
pub mod image;
mod image_set;
pub mod inspect;
mod permutation;
mod pixels;
mod source;
#[cfg(feature = "object-store")]
pub mod store;
mod synthetic;
pub use crate::{
    batches::{Batch, Batches, Cursor, Order, Tail, batch_bytes},
    dataset::{Dataset, Epoch, Images},
    error::{Error, Result},
    image_set::{ImageSet, set_bytes},
    permutation::Permutation,
    pixels::Pixels,
    source::Source,
    synthetic::{Kind, Synthetic},
};

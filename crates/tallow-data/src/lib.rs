//! From any source of samples to the batches of a training loop: constant memory, exact resume.
//!
//! A [`Source`] is asked for a sample by its number. [`Samples`] says in which order ([`Sampler`]) and
//! what is done to each, in threads if asked for; [`Groups`] what they are gathered into; a [`Run`]
//! hands groups out and knows its [`Cursor`]. A [`Loader`] is all of that as the [`Dataset`] that a
//! trainer draws from. Nothing is ever held but what is in flight, and that is bounded in bytes.
//!
//! Order and augmentation are functions of `(seed, epoch, index)`: a shuffle needs no list
//! ([`Permutation`]), threads change nothing, and a [`Cursor`] is all that a resumed run needs. It
//! counts what the consumer received.
//!
//! An [`ImageSet`] keeps images in memory, a byte a pixel, once: views share them.
//!
//! *Memory:* samples in the workers, a batch being gathered, batches ahead: each stage has a
//! `*_bytes` function.   *Needs:* candle-core, flate2.
//!
//! # Example
//! ```
//! use tallow_data::{Ahead, Sampler, Samples, Tail, Workers, pipeline::from_fn};
//!
//! let squares = from_fn(1000, |index| Ok(index * index));
//! let batches = Samples::of(squares, Sampler::shuffled(7))?
//!     .map(|square, at| Ok(square as f32 + at.rng().unit()))
//!     .workers(Workers { n_threads: 2, max_samples: 64, max_bytes: 1 << 20 })
//!     .batch(32, Tail::Drop)?
//!     .prefetch(Ahead::ONE);
//! let mut run = batches.epoch(0)?;
//! run.next().expect("31 batches")?;
//! let rest = batches.resume(run.cursor())?; // the very next sample comes next
//! assert_eq!(rest.count(), 30);
//! # Ok::<(), tallow_data::Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]
mod batches;
mod cache;
mod dataset;
mod error;
mod folder;
pub mod formats;
pub mod idx;
#[cfg(feature = "images")]
pub mod image;
mod image_set;
pub mod inspect;
mod loader;
mod permutation;
pub mod pipeline;
mod pixels;
mod rng;
mod source;
#[cfg(feature = "object-store")]
pub mod store;
mod synthetic;
pub use crate::{
    batches::{Batch, Batches, Cursor, Order, Tail, batch_bytes},
    cache::{CacheState, DiskCache, Stored, cache_bytes},
    dataset::{BatchIter, Dataset, Epoch, Images},
    error::{Error, Result},
    image_set::{ImageSet, set_bytes},
    loader::{Collate, ImageBatches, LabelledImage, Loader, Loading, TokenBatches},
    permutation::Permutation,
    pipeline::{
        Ahead, At, Groups, HeldBytes, OnCorrupt, Run, Sampler, Samples, Shard, Shuffle, Stream,
        Workers,
    },
    pixels::{Layout, Pixels},
    rng::Rng,
    source::Source,
    synthetic::{Kind, Synthetic},
};

/// The README's example is compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

//! Everything between a source and the batches of a training loop.
//!
//! Two types, recognisable from `torch.utils.data` and `tf.data`:
//! - [`Samples`]: an order of visit ([`Sampler`]) and what is done to each sample, `map`, `filter`,
//!   in `workers`; nothing is read before it is asked for.
//! - [`Groups`]: what samples are gathered into, `batch`, `bucket`, `pack`, then `map` to the device
//!   and `prefetch`.
//!
//! Both only describe. [`Groups::epoch`] and [`Groups::resume`] start a [`Run`]: an iterator that
//! knows the [`Cursor`] after what it handed out last. Inside, every item travels with the cursor
//! after it, so what is in flight never counts as received, and a resumed run needs nothing else.
//!
//! A run is a function of the settings, the seed and the cursor: never of the number of threads.
//! Dropping it stops and joins every thread it started; that takes as long as the closure or the
//! read that each is in.

mod batch;
mod bucket;
mod collate;
mod fault;
mod groups;
mod held;
mod mix;
mod order;
mod pack;
mod pool;
mod prefetch;
mod samples;
mod sources;

pub use self::{
    batch::group_bytes,
    bucket::bucket_bytes,
    collate::{Padded, Ragged, pad, ragged},
    fault::{OnCorrupt, Skip},
    groups::{Groups, Run},
    held::HeldBytes,
    mix::{Mix, MixStream, mix_bytes},
    order::{Sampler, Shard, Shuffle, shuffle_bytes},
    pack::{IGNORED, Pack, Packed, PackedBatch, Packing, packed_bytes, packing_bytes},
    pool::{Workers, workers_bytes},
    prefetch::{Ahead, ahead_bytes},
    samples::{At, Samples},
    sources::{FromFn, Rows, Stream, from_fn, from_iter},
};

use crate::{batches::Cursor, error::Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An item, and the cursor that goes on after it.
pub(crate) struct Placed<T> {
    pub(crate) value: T,
    pub(crate) after: Cursor,
}

/// Items in their order; ends after an error.
pub(crate) type Flow<T> = Box<dyn Iterator<Item = Result<Placed<T>>> + Send>;

/// A lock whose holder may have died: what it guards is whole after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

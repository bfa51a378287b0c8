//! The plan: precision x micro-batch x recomputation x optimizer state, priced before step one.
//!
//! Each precision's model is built and its segments run on micro-batches of one and two samples;
//! bytes and seconds of other micro-batches lie on the line through these, until one of them is
//! about to be chosen: then it is run too. A candidate's peak is what is held all the time, priced
//! or counted, plus what [`tallow_recompute::simulate`] says that a forward and backward hold on top.
//!
//! A [`Workload`] is the model and its data, a [`Space`] what may be chosen from; [`plan`] chooses.
//!
//! *Memory:* one model and one segment's activations at a time.   *Needs:* the engines whose bytes it
//! prices, and no trainer.
//!
//! ```
//! # use tallow_plan::{Error, Knob, Space, Workload, plan};
//! # fn choose<W: Workload>(work: &W, meter: &dyn tallow_memory::Meter) -> Result<usize, Error> {
//! let space = Space { forbid: vec![Knob::Bf16], ..Space::new(64) }; // batches of 64, all in f32
//! let found = plan(work, &space, Some(512 << 20), meter)?;
//! # Ok(
//! found.candidates[found.chosen].micro_batch // samples at once
//! # )
//! # }
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod calibrate;
mod error;
mod price;
mod search;
mod space;

pub use error::{Error, Result};
pub use search::{Candidate, Found, NothingFits, plan};
pub use space::{Knob, Recomputation, Space, Workload};
pub use tallow_backward::{Built, Gradients};

/// The README's example is compiled too.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

//! Activation recomputation: training in the memory of the widest segment.
//!
//! Candle keeps what every op computed until the loss goes. [`recompute`] runs a piece of a model
//! and keeps its input only; `backward` runs the piece again. Gradients are those of plain candle,
//! bit for bit, hidden state (dropout masks, batch norm statistics) included, given a [`Replay`]
//! hook. A [`Chain`] does without candle's graph between its segments: parameter gradients leave
//! segment by segment, and [`plan_chain`] finds the fastest [`Plan`] within a number of bytes, which
//! [`simulate`] promises before the first step.
//!
//! *Memory:* [`recompute`]: the input and the output of each piece; a chain:
//! [`Simulated::peak_bytes`].   *Needs:* candle only.
//!
//! # Example
//! ```
//! # use candle_core::{DType, Device, Tensor, Var};
//! # use tallow_recompute::recompute;
//! let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
//! let w = Var::ones((3, 4), DType::F32, &Device::Cpu)?;
//! let y = recompute(&x, {
//!     let w = w.clone();
//!     move |x| x.matmul(&w)?.exp()?.tanh() // nothing in here is kept
//! })?;
//! let grads = y.sum_all()?.backward()?;
//! assert_eq!(grads.get(&w).expect("found without being declared").dims(), [3, 4]);
//! # Ok::<(), tallow_recompute::Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]
mod chain;
mod cost;
mod digest;
mod error;
mod ops;
mod plan;
mod planner;
mod policy;
mod replay;
mod run;
mod saved;
mod segment;
mod simulate;
mod sink;
mod tape;

pub use crate::{
    chain::{Aside, Chain, NoAside, Segment},
    cost::{Bytes, SegmentCost},
    error::{Error, Result},
    plan::{Plan, Step},
    planner::{Planned, plan_chain},
    policy::Policy,
    replay::{Again, NoReplay, Replay, is_recomputing},
    saved::Saved,
    segment::{Check, Recompute, recompute, recompute_many},
    simulate::{Simulated, simulate, simulate_saved},
    sink::{Collect, GradSink},
    tape::Tape,
};

/// The README's example is compiled too.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

//! What a process holds, in bytes; what it may hold; and what to do about the difference.
//!
//! [`CountingAllocator`] wraps any global allocator and counts what passes through it: bytes held
//! now, their peak, and the peak inside a [`Scope`]. Library code that cannot name the binary's
//! allocator takes a [`Meter`]; [`NoMeter`] is the one that measures nothing, [`ResidentMeter`] asks
//! the system and [`FnMeter`] a driver. A [`Ledger`] says what the bytes are for, as [`Terms`] by
//! [`Category`]; a plan is priced in the same terms. A [`Watermark`] is the checkpoint of a step.
//!
//! - [`limits`]: what host, containers and rlimits allow.
//! - [`batch`]: split a batch, back off, search the largest piece, control it by a meter.
//! - [`plan`]: prices, the fastest choice that fits, the post-mortem.
//! - [`timeline`] and [`leak`]: live bytes over time, and whether they grow.
//!
//! *Memory:* 576 bytes of counters per allocator; no bytes per allocation.   *Needs:* the standard library.
//!
//! # Example
//! ```
//! use std::alloc::System;
//! use tallow_memory::CountingAllocator;
//!
//! #[global_allocator]
//! static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);
//!
//! let scope = ALLOC.scope();
//! drop(vec![0u8; 4096]);
//! assert_eq!((scope.current_bytes(), scope.peak_bytes()), (0, 4096));
//! ```
#![deny(missing_docs)]
pub mod batch;
mod counters;
mod counting;
mod error;
mod guard;
pub mod leak;
mod ledger;
pub mod limits;
mod meter;
mod meters;
#[cfg(feature = "cuda")]
mod nvml;
pub mod plan;
mod resident;
mod terms;
pub mod timeline;
#[cfg(feature = "cuda")]
pub use crate::nvml::CudaMeter;
pub use crate::{
    counters::{MAX_SCOPES, Scope},
    counting::CountingAllocator,
    error::Error,
    guard::{Trip, Watermark},
    ledger::{Held, Ledger},
    meter::{Meter, NoMeter, peak_during},
    meters::{FaultMeter, FnMeter, ResidentMeter},
    resident::{resident_bytes, resident_peak_bytes},
    terms::{Category, Terms},
};

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

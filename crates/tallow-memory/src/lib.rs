//! What a process holds, in bytes: counted exactly, and as the system sees it.
//!
//! [`CountingAllocator`] wraps any global allocator and counts what passes through it: bytes held
//! now, their peak, and the peak inside a [`Scope`]. [`resident_bytes`] and
//! [`resident_peak_bytes`] ask the system instead. Library code that cannot name the binary's
//! allocator takes a [`Meter`]; [`NoMeter`] is the one that measures nothing.
//!
//! *Memory:* 552 bytes of counters per allocator; no bytes per allocation.   *Needs:* the standard library.
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
mod counters;
mod counting;
mod error;
mod meter;
mod resident;
pub use crate::{
    counters::{MAX_SCOPES, Scope},
    counting::CountingAllocator,
    error::Error,
    meter::{Meter, NoMeter},
    resident::{resident_bytes, resident_peak_bytes},
};

//! What the workspace's tests share: reference values, tolerances with a name, seeded inputs.
//!
//! [`Reference`] holds values that PyTorch computed in float64; [`assert_close`] compares against
//! them in ulps or relative to the tensor's size; [`central_difference`] gives the gradient when
//! there is no reference; [`values`] gives inputs that are the same on every machine.
//!
//! This crate is a dev-dependency only, so it panics where another crate would return an error.
//!
//! *Memory:* the reference (0.25 MB) is part of the test binary.   *Needs:* no candle.
//!
//! # Example
//! ```
//! use tallow_testkit::{Reference, Tol, assert_close, widen};
//! let reference = Reference::load();
//! for case in reference.cases("relu") {
//!     let x = reference.values(&format!("{}.in.x", case.name));
//!     let out = reference.values(&format!("{}.out", case.name));
//!     let got: Vec<f32> = x.data.iter().map(|x| x.max(0.0)).collect();
//!     assert_close(&case.name, &widen(&got), &widen(&out.data), Tol::Exact);
//! }
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]
mod close;
mod gradient;
mod inputs;
mod reference;
mod worker;

pub use crate::{
    close::{Tol, assert_close, max_rel},
    gradient::central_difference,
    inputs::{bits, values, values_bf16, values_f32, widen},
    reference::{Case, Reference, Values},
    worker::with_one_worker,
};

//! Cast policies, master weights, loss scaling, fp8 formats.
#![forbid(unsafe_code)]
#![deny(missing_docs)]
mod error;
mod scale;
mod state;
mod underflow;
mod unscale;
pub use crate::{
    error::{Error, Result},
    scale::{LossScale, Verdict},
    state::{DynamicScale, LossScaleState, Rule, Skip, Skips, Window},
    underflow::{Underflow, underflow},
};

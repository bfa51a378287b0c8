#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod checkpoint;
mod composed;
mod config;
mod error;
mod file;
mod fused;
mod optimizer;
mod pattern;
mod planes;
mod price;
mod release;
mod schedule;

pub use crate::{
    config::{Algorithm, Config, Group, Place, Treatment},
    error::{ConfigError, Error, ParameterError, Result, StateError},
    optimizer::{Optimizer, Stepped, named},
    price::{
        MIN_8BIT_ELEMS, StateFormat, adafactor_state_bytes, adamw_state_bytes, kahan_weights_bytes,
        lion_state_bytes, sgd_state_bytes,
    },
    release::{GradientNorm, Verdict},
    schedule::{Schedule, Shape},
};
pub use tallow_kernels::optim::Rounding;

//! Benchmarks of the kernels: what is measured, by whom it is done, and the machine's limits.
//!
//! A [`Case`](cases::Case) is some work of known floating-point operations or bytes. [`ours`] does it
//! with `tallow-kernels`, [`candle`] and [`product`] with what candle and the `gemm` crate have for
//! it, and [`limits`] runs what bounds it: a loop of multiply-adds that touches no memory, or a copy
//! of as many bytes. Inputs are made by a formula that a script in another language repeats, so
//! results can be compared value by value.
//!
//! The binary `kernels` serves these to `cargo xtask bench kernels`; `cargo bench -p tallow-bench`
//! runs them under criterion.
#![deny(missing_docs)]

pub mod candle;
pub mod cases;
pub mod inputs;
pub mod limits;
pub mod ours;
pub mod product;
#[cfg(feature = "train")]
pub mod whole;
pub mod work;

//! CPU kernels for training, on plain slices.
//!
//! Every kernel reads dense row-major slices of any [`Element`] (`f32`, `f64`, `bf16`, `f16`),
//! computes in the wider [`Element::Acc`], and rounds once when it stores. Statistics (means,
//! variances, parameter gradients of norms, losses) accumulate in `f64`. Work is cut by shape and
//! never by thread count, so results are the same bit for bit on any number of threads.
//!
//! *Memory:* outputs belong to the caller; scratch is bounded and named by `*_scratch_bytes`.
//! *Needs:* no candle. A length that does not match its shape is a programming error and panics;
//! shapes that a user can get wrong are checked by their constructors, which return [`Error`].
//!
//! ```
//! use tallow_kernels::gemm::{Mat, Store, gemm};
//!
//! let (a, b) = ([1f32, 2.0, 3.0, 4.0], [1f32, 0.0, 0.0, 1.0]);
//! let mut c = [0f32; 4];
//! gemm(&mut c, Mat::new(&a, 2, 2), Mat::new(&b, 2, 2).t(), Store::Overwrite);
//! assert_eq!(c, a);
//! ```
#![deny(missing_docs)]

pub mod accum;
pub mod activation;
pub mod attention;
pub mod batch_norm;
pub mod cast;
pub mod conv;
pub mod dropout;
mod element;
pub mod embedding;
mod error;
pub mod fp8;
pub mod gemm;
pub mod heads;
pub mod isa;
pub mod loss;
mod micro;
pub mod norm;
pub mod optim;
mod pack;
mod par;
pub mod pool;
mod product;
pub mod reduce;
pub mod rotary;
pub mod softmax;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use element::{Element, Real};
pub use error::Error;

//! Forward and backward of a micro-batch, a segment at a time.
//!
//! A [`Network`] is a model in segments with the parameters it computes with. A [`Walk`] over it runs the
//! chain as a plan of recomputation says; each segment's gradients are handed on, to be added up or to
//! [`Release`] an update at once, and die before the next segment's backward. Between two segments a [`Watch`]
//! looks at the memory and may end the walk, and the ledger is told what it holds.
//!
//! *Memory:* what the plan keeps of one micro-batch, and one segment's gradients.   *Needs:* candle, and the
//! engines of segments, precision, optimizers and memory, which meet here.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow_backward::{Built, Error, Network, Passes};
//! use tallow_models::Whole;
//! use tallow_precision::Policy;
//! use tallow_recompute::{Check, Plan, Saved};
//! use tallow_tensor::layers::linear;
//!
//! let model = |vb| Ok(Whole(linear(4, 3, vb)?));
//! let network = Network::new(Built::new(Policy::f32(), 0, &Device::Cpu, model)?);
//! let plan = Plan::keep_all(2); // the model, and the loss
//! let passes = Passes { plan: &plan, saved: &Saved::AsIs, check: Check::Shape, label_smoothing: 0.0 };
//! let (x, y) = (Tensor::new(&[[1f32; 4]; 2], &Device::Cpu)?, Tensor::new(&[0u32, 2], &Device::Cpu)?);
//! let mut n_grads = 0;
//! let seed = |_| Ok::<_, Error>(1.0); // of backward: a loss scale
//! let loss = network.walk(passes).run((&x, &y), seed, |grads| {
//!     n_grads += grads.get_ids().count(); // of one segment; they die here
//!     Ok(())
//! })?;
//! assert_eq!((loss.n_counted, n_grads), (2, 2));
//! # Ok::<(), Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod books;
mod error;
mod measure;
mod network;
mod release;
mod walk;
mod watch;

pub use error::{Error, Result};
pub use network::{Built, Network, bytes_of};
pub use release::{Gradients, Release};
pub use walk::{MicroLoss, Passes, Walk};
pub use watch::{Flow, Watch};

/// The README's example is compiled too.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

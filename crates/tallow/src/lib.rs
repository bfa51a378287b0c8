//! Train bigger models in the memory you have.
//!
//! Tallow is a set of independent engines on top of [candle](https://docs.rs/candle-core). This crate
//! re-exports each behind a feature of its name; every engine can also be taken alone.
//!
//! | feature | engine |
//! |---|---|
//! | `tensor` | differentiable operations and layers with lean backward passes |
//! | `precision` | policies, master weights, loss scaling, fp8 |
//! | `recompute` | segments run again in backward, chains, the planner |
//! | `accum` | gradient sums over micro-batches |
//! | `optim` | optimizers with small states |
//! | `models` | ResNets and GPT-2 under the usual parameter names, as chains of segments |
//! | `data` | images in batches, with a bounded number of bytes |
//! | `memory` | counting allocator, ledger, limits, batch controller, the pick among priced choices |
//! | `checkpoint` | folders that are whole or not there, of whatever is written into them |
//! | `backward` | forward and backward of a micro-batch, a segment at a time, gradient release |
//! | `plan` | the fastest way to train that fits a byte budget |
//! | `train` | the thin trainer |
//! | `run` | epochs, judgements, checkpoints of a run |
//!
//! All are on by default.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

#[cfg(feature = "accum")]
pub use tallow_accum as accum;
#[cfg(feature = "backward")]
pub use tallow_backward as backward;
#[cfg(feature = "checkpoint")]
pub use tallow_checkpoint as checkpoint;
#[cfg(feature = "data")]
pub use tallow_data as data;
#[cfg(feature = "memory")]
pub use tallow_memory as memory;
#[cfg(feature = "models")]
pub use tallow_models as models;
#[cfg(feature = "optim")]
pub use tallow_optim as optim;
#[cfg(feature = "plan")]
pub use tallow_plan as plan;
#[cfg(feature = "precision")]
pub use tallow_precision as precision;
#[cfg(feature = "recompute")]
pub use tallow_recompute as recompute;
#[cfg(feature = "run")]
pub use tallow_run as run;
#[cfg(feature = "tensor")]
pub use tallow_tensor as tensor;
#[cfg(feature = "train")]
pub use tallow_train as train;

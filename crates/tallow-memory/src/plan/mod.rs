//! Which way to train fits a budget: prices, the pick, and the post-mortem.
//!
//! A candidate is a [`Choice`] (or any type with [`Knobs`]) with its price: bytes by category and
//! seconds a sample. [`pick`] takes the fastest whose total is within the budget. [`prices`] has the
//! terms that follow from counting elements; activations, transients and seconds are measured by
//! whoever runs a small step. Nothing here knows a tensor.
//!
//! ```
//! use tallow_memory::{Terms, plan::{Choice, Priced, pick}};
//!
//! let candidate = |state: &str, n_bytes, secs_per_sample| Priced {
//!     terms: Terms { optimizer_state_bytes: n_bytes, ..Terms::ZERO },
//!     secs_per_sample,
//!     choice: Choice {
//!         precision: "f32".into(), micro_batch: 8, recompute: "none".into(),
//!         optimizer_state: state.into(), offload: "none".into(),
//!     },
//! };
//! let candidates = [candidate("f32", 800, 0.010), candidate("8bit", 200, 0.011)];
//! assert_eq!(pick(&candidates, 1000)?.choice.optimizer_state, "f32");
//! assert_eq!(pick(&candidates, 500)?.choice.optimizer_state, "8bit");
//! let nothing = pick(&candidates, 100).unwrap_err().to_string();
//! assert!(nothing.contains("the smallest needs 200 bytes"));
//! assert!(nothing.contains("optimizer_state f32 -> 8bit saves 600 bytes"));
//! # Ok::<(), tallow_memory::plan::NothingFits>(())
//! ```

mod pick;
mod post_mortem;
pub mod prices;

pub use pick::{Choice, Knobs, NothingFits, Priced, Saving, pick};
pub use post_mortem::PostMortem;

//! How many items go through the model at once: split, back off, search, control.
//!
//! The *batch* is what an update sees and is never changed here. What changes is how it is split:
//! [`pieces`] covers every item once, whatever the size of a piece, and weighs each piece by its
//! items, so that the sum over pieces is the mean over the batch.
//!
//! - [`with_backoff`] tries a size and halves it, from a clean state, while memory runs out.
//! - [`largest_fitting`] finds the largest size that fits, by real trials.
//! - [`Controller`] moves the size with a meter while the run goes on; [`Sizing`] is one with its limit and
//!   clock, for a loop that only says what each update held and when memory ran out.
//!
//! ```
//! use tallow_memory::batch::{Fitted, Tried, with_backoff};
//!
//! // Memory for 4 items at once; the sum of all 10 is wanted.
//! let fitted: Fitted<u64> = with_backoff(10, 10, || Ok::<(), std::io::Error>(()), |pieces| {
//!     let mut sum = 0;
//!     for piece in pieces {
//!         if piece.n_items() > 4 {
//!             return Ok(Tried::OutOfMemory);
//!         }
//!         sum += piece.range().map(|item| item as u64).sum::<u64>();
//!     }
//!     Ok(Tried::Fits(sum))
//! })?;
//! assert_eq!((fitted.value, fitted.piece_items, fitted.tried), (45, 2, vec![10, 5, 2]));
//! # Ok::<(), tallow_memory::batch::Failed<std::io::Error>>(())
//! ```

mod controller;
mod pieces;
mod search;
mod sizing;

pub use controller::{Controller, ControllerConfig, Decision};
pub use pieces::{Piece, Pieces, pieces};
pub use search::{Failed, Fitted, Largest, Tried, largest_fitting, with_backoff};
pub use sizing::Sizing;

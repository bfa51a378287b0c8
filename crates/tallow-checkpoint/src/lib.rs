//! Checkpoints that are whole or not there, of whatever a program writes into a folder.
//!
//! A folder is filled under another name, its files are forced to the disk, their lengths and checksums are
//! written last, and only then does it get its name: a crash leaves the one before. [`Checkpoints`] keeps the
//! last few and the best; [`Checkpoints::newest`] passes over what a crash or a damaged disk has left. Beside
//! the files, each has a [`Record`]: numbers and words under names, from which every bit comes back. What the
//! files hold is not this crate's business.
//!
//! *Memory:* 64 KiB while a file is summed.   *Needs:* a checksum, nothing of candle.
//!
//! ```
//! use tallow_checkpoint::{Checkpoints, Error, Kind, Record};
//!
//! const KIND: Kind = Kind { prefix: "update-", format: 1, best_by: "loss" };
//! # let folder = std::env::temp_dir().join(format!("tallow-checkpoint-doc-{}", std::process::id()));
//! let all = Checkpoints::open(KIND, &folder, 3)?; // the last three stay, and the best
//! let mut record = Record::default();
//! record.put("loss", 0.5);
//! all.save("0000000001", record, |folder| {
//!     let file = folder.join("weights.bin");
//!     std::fs::write(&file, b"any bytes").map_err(|source| Error::Io { path: file, source })
//! })?;
//! let newest = all.newest()?;
//! assert_eq!(KIND.read(&newest.path)?.get::<f64>("loss")?, 0.5);
//! # std::fs::remove_dir_all(&folder).map_err(|source| Error::Io { path: folder, source })?;
//! # Ok::<(), Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod error;
mod folder;
mod record;
mod seal;

pub use error::{Error, Result};
pub use folder::{Checkpoints, Kind, Newest};
pub use record::Record;

/// The README's example is compiled too.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

//! What is wrong with a checkpoint.

use std::{io, path::PathBuf};

/// What this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// What is wrong with a checkpoint, or with its folder.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system could not read or write it.
    #[error("`{}`: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It is not what was written.
    #[error("checkpoint `{}` is damaged: {how}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How it differs.
        how: String,
    },
    /// Of another version.
    #[error("checkpoint `{}` has format {found}, this version reads {wanted}", path.display())]
    Format {
        /// The folder.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// What can be read.
        wanted: u32,
    },
    /// There is none.
    #[error("`{}` holds no whole checkpoint", path.display())]
    None {
        /// The folder of checkpoints.
        path: PathBuf,
    },
}

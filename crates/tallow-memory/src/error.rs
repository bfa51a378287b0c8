use std::io;

/// Why the system's figure could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system keeps no `/proc/self/status`.
    #[error("resident bytes are read from /proc/self/status, which {os} does not have")]
    Unsupported {
        /// The system's name, as Rust spells it.
        os: &'static str,
    },
    /// The file exists on this system, but reading it went wrong.
    #[error("/proc/self/status: {error}")]
    Unreadable {
        /// What the system answered.
        error: io::Error,
    },
    /// No line starts with the field's name.
    #[error("/proc/self/status has no line `{field}:` among its {n_lines}")]
    NoField {
        /// The field looked for, such as `VmRSS`.
        field: &'static str,
        /// Lines read.
        n_lines: usize,
    },
    /// The line is there, but is not a whole number of kB that fits 64 bits of bytes.
    #[error("`{field}:` should be followed by a number of kB, found {found:?}")]
    BadField {
        /// The field looked for, such as `VmRSS`.
        field: &'static str,
        /// What follows the colon, at most 64 characters of it.
        found: String,
    },
}

use crate::terms::Category;
use std::io;

/// Why a figure could not be read, a setting is refused, or a step must stop.
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
    /// A setting or a reading outside its range.
    #[error("{what} should be {range}, found {found}")]
    BadValue {
        /// The setting's name.
        what: &'static str,
        /// What it may be.
        range: &'static str,
        /// What it is; a number of bytes may be rounded.
        found: f64,
    },
    /// A device's driver does not answer.
    #[error("CUDA device {index}: {message}")]
    Driver {
        /// The device.
        index: u32,
        /// The driver's words.
        message: String,
    },
    /// More is live than the mark allows: the step stops before the system ends the process.
    #[error(
        "{live_bytes} bytes are live, the mark is {mark_bytes} of {limit_bytes}; \
         the most, {largest_bytes}, for {largest}"
    )]
    AboveMark {
        /// Bytes live at the check.
        live_bytes: u64,
        /// The high mark.
        mark_bytes: u64,
        /// What the mark is a share of.
        limit_bytes: u64,
        /// The category that holds the most.
        largest: Category,
        /// Bytes of that category.
        largest_bytes: u64,
    },
    /// Since the last check an allocation ended above the cap.
    #[error(
        "an allocation of {asked_bytes} bytes made {live_bytes} live, the cap is {cap_bytes}; \
         the most, {largest_bytes}, for {largest}"
    )]
    OverCap {
        /// The largest allocation that ended above the cap.
        asked_bytes: u64,
        /// The most bytes live above the cap.
        live_bytes: u64,
        /// The cap.
        cap_bytes: u64,
        /// The category that holds the most at the check.
        largest: Category,
        /// Bytes of that category.
        largest_bytes: u64,
    },
}

impl Error {
    /// `value` if it is finite and `low <= value <= high`.
    pub(crate) fn unless_within(
        value: f64,
        (low, high): (f64, f64),
        what: &'static str,
        range: &'static str,
    ) -> Result<f64, Error> {
        let within = value.is_finite() && low <= value && value <= high;
        within.then_some(value).ok_or(Error::BadValue { what, range, found: value })
    }
}

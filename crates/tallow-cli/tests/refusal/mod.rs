//! What every refusal is like.

use std::process::Output;

/// Exit code 2, and one line on standard error that begins with `error: ` and holds `needle`.
#[track_caller]
pub(crate) fn refused(output: &Output, needle: &str) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error:?} should say {needle:?}");
    assert_eq!(error.lines().count(), 1, "one line, not {error:?}");
    assert!(error.starts_with("error: "), "{error:?}");
    assert!(error.contains(needle), "{error:?} should say {needle:?}");
    assert!(!error.contains("panicked") && !error.contains("stack backtrace"), "{error:?}");
}

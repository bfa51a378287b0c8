//! What every refusal is like.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};

/// Where a program of this thread runs: `runs/latest` there is no other's.
#[allow(dead_code, reason = "not every test runs there")]
pub(crate) fn place() -> PathBuf {
    let name = format!("place-{}-{:?}", env!("CARGO_CRATE_NAME"), std::thread::current().id());
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&place).expect("a temporary folder");
    place
}

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

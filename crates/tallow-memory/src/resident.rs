use crate::error::Error;
use std::fs;

/// Bytes of the process that are in physical memory now (`VmRSS`).
///
/// Reads and parses a file of about 1.5 kB: tens of microseconds, and that much heap for the time
/// of the call.
///
/// # Errors
/// Off Linux, or where `/proc` is not mounted or not what Linux documents.
pub fn resident_bytes() -> Result<u64, Error> {
    status_field_bytes(&status_text()?, "VmRSS")
}

/// The most bytes of the process that were in physical memory at once, since it started (`VmHWM`).
///
/// Costs what [`resident_bytes`] costs.
///
/// # Errors
/// Those of [`resident_bytes`].
pub fn resident_peak_bytes() -> Result<u64, Error> {
    status_field_bytes(&status_text()?, "VmHWM")
}

/// Makes what is resident now the peak that the system reports, for the whole process.
pub(crate) fn reset_resident_peak() -> Result<(), Error> {
    // `5` is the kernel's word for "forget `VmHWM`"; it touches nothing else.
    fs::write("/proc/self/clear_refs", "5").map_err(|error| Error::Unreadable { error })
}

fn status_text() -> Result<String, Error> {
    if !cfg!(target_os = "linux") {
        return Err(Error::Unsupported { os: std::env::consts::OS });
    }
    // The process may have named itself in bytes that are not UTF-8.
    let text = fs::read("/proc/self/status").map_err(|error| Error::Unreadable { error })?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The bytes of a line `field:   1234 kB`; the kernel's kB are 1024 bytes.
fn status_field_bytes(text: &str, field: &'static str) -> Result<u64, Error> {
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let value = value.ok_or_else(|| Error::NoField { field, n_lines: text.lines().count() })?;
    kb_to_bytes(value).ok_or_else(|| {
        let found = value.trim().chars().take(64).collect();
        Error::BadField { field, found }
    })
}

fn kb_to_bytes(value: &str) -> Option<u64> {
    let digits = value.trim().strip_suffix("kB")?.trim_end();
    // `parse` would take a sign.
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tVmRSS\nUmask:\t0022\nVmPeak:\t 9000 kB\nVmHWM:\t 4096 kB\nVmRSS:\t 12 kB\nThreads:\t1\n";

    #[test]
    fn reads_the_field_it_is_asked_for() {
        assert_eq!(status_field_bytes(STATUS, "VmRSS").unwrap(), 12 * 1024);
        assert_eq!(status_field_bytes(STATUS, "VmHWM").unwrap(), 4096 * 1024);
    }

    #[test]
    fn a_missing_field_is_named_with_the_lines_read() {
        let error = status_field_bytes("Name:\tx\nVmRSSx: 3 kB\n", "VmRSS").unwrap_err();
        assert!(matches!(error, Error::NoField { field: "VmRSS", n_lines: 2 }), "{error}");
    }

    #[test]
    fn a_garbled_value_is_shown() {
        let huge = format!("{} kB", u64::MAX);
        let bad = [
            "",
            "kB",
            "12",
            "12 MB",
            "-12 kB",
            "+12 kB",
            "1 2 kB",
            "0x12 kB",
            "12.5 kB",
            "\u{fffd} kB",
            &huge,
        ];
        for value in bad {
            let text = format!("VmRSS:\t{value}\n");
            let error = status_field_bytes(&text, "VmRSS").unwrap_err();
            assert!(matches!(error, Error::BadField { .. }), "{value:?}: {error}");
            assert!(error.to_string().contains(&format!("{value:?}")), "{error}");
        }
    }

    #[test]
    fn no_cut_of_the_text_panics() {
        for end in 0..=STATUS.len() {
            let _ = status_field_bytes(&STATUS[..end], "VmRSS");
        }
    }

    #[test]
    fn a_long_value_is_cut_in_the_message() {
        let text = format!("VmRSS: {}", "é".repeat(10_000));
        let message = status_field_bytes(&text, "VmRSS").unwrap_err().to_string();
        assert!(message.chars().count() < 150, "{message}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_is_never_below_what_is_resident() {
        let resident = resident_bytes().unwrap();
        assert!(resident > 0 && resident_peak_bytes().unwrap() >= resident);
    }
}

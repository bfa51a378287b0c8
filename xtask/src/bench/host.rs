//! What a record says of the machine and the build.

use super::binary::output_of;
use std::{fs, process::Command};

/// Instructions that decide which kernels run.
const VECTORS: [&str; 8] =
    ["avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd"];

/// The machine and the build.
pub(super) struct Host {
    /// The processor's model.
    pub(super) cpu: String,
    pub(super) n_threads: usize,
    /// Vector instructions, and what the compiler was told.
    pub(super) flags: String,
    /// Of the workspace; ends in `+` where files differ from it.
    pub(super) commit: String,
    /// As `2026-01-31`, in UTC.
    pub(super) date: String,
}

impl Host {
    pub(super) fn get() -> Self {
        let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |names: &[&str]| {
            let of = |line: &str| {
                let (name, value) = line.split_once(':')?;
                names.contains(&name.trim()).then(|| value.trim().to_string())
            };
            text.lines().find_map(of).unwrap_or_default()
        };
        let has = field(&["flags", "Features"]);
        let has: Vec<&str> = has.split(' ').filter(|flag| VECTORS.contains(flag)).collect();
        let rustflags = std::env::var("RUSTFLAGS").unwrap_or_default();
        let cpu = match field(&["model name"]) {
            unknown if unknown.is_empty() => std::env::consts::ARCH.to_string(),
            cpu => cpu,
        };
        Self {
            cpu,
            n_threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            flags: format!("{} {rustflags}", has.join(" ")).trim().to_string(),
            commit: commit(),
            date: date(seconds()),
        }
    }

    /// A folder's name: the processor's model and its threads, no name of a machine.
    pub(super) fn slug(&self) -> String {
        let cpu = self.cpu.replace("(R)", "").replace("(TM)", "").to_lowercase();
        let words = cpu.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        format!("{}-{}-threads", words.collect::<Vec<_>>().join("-"), self.n_threads)
    }
}

fn commit() -> String {
    let git = |args: &[&str]| {
        let output = output_of(Command::new("git").args(args)).ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "-".to_string() };
    let is_clean =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|s| s.is_empty());
    format!("{commit}{}", if is_clean { "" } else { "+" })
}

/// Since 1970.
fn seconds() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_secs())
}

/// The day of a second since 1970, by Howard Hinnant's "chrono-compatible low-level date algorithms".
fn date(secs: u64) -> String {
    let days = secs / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days() {
        for (secs, day) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_798_761_599, "2026-12-31"),
            (1_798_761_600, "2027-01-01"),
        ] {
            assert_eq!(date(secs), day);
        }
    }

    #[test]
    fn a_slug_is_the_processor_s() {
        let host = Host {
            cpu: "Intel(R) Xeon(R) Gold 6430 @ 2.10GHz".to_string(),
            n_threads: 2,
            flags: String::new(),
            commit: String::new(),
            date: String::new(),
        };
        assert_eq!(host.slug(), "intel-xeon-gold-6430-2-10ghz-2-threads");
    }
}

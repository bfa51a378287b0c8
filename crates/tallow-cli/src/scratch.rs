//! Scratch files that runs which were killed have left.

use std::{
    fs::{self, File},
    path::Path,
    time::Duration,
};

/// A state's file is locked right after it was made: by then at the latest.
const UNLOCKED: Duration = Duration::from_secs(60);
/// An input waits for its recomputation within an update: none takes that long.
const WAITING: Duration = Duration::from_secs(24 * 3600);

/// Removes from `folder` the files of optimizers' states that no process has locked, and inputs that nobody
/// can be waiting for. What does not go, or cannot be told, stays.
pub(crate) fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let written = entry.metadata().and_then(|metadata| metadata.modified()).ok();
        let age = written.and_then(|written| written.elapsed().ok()).unwrap_or_default();
        let is_abandoned = if name.starts_with("tallow-state-") && name.ends_with(".bin") {
            age > UNLOCKED && File::open(&path).is_ok_and(|file| file.try_lock().is_ok())
        } else {
            name.starts_with("recompute-") && name.ends_with(".part") && age > WAITING
        };
        if is_abandoned {
            let _ = fs::remove_file(&path); // another run may have done it
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        path::PathBuf,
        time::{Instant, SystemTime},
    };

    fn file(folder: &Path, name: &str, age_secs: u64) -> (PathBuf, File) {
        let path = folder.join(name);
        let file = File::create(&path).expect("made");
        let written = SystemTime::now() - Duration::from_secs(age_secs);
        file.set_modified(written).expect("dated");
        (path, file)
    }

    #[test]
    fn what_nobody_uses_goes() {
        let folder = std::env::temp_dir().join(format!("tallow-scratch-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("made");
        let start = Instant::now();
        let (left, _) = file(&folder, "tallow-state-1.bin", 100);
        let (part, _) = file(&folder, "recompute-1-2.part", 90_000);
        let (used, lock) = file(&folder, "tallow-state-2.bin", 100);
        lock.try_lock().expect("locked");
        let others = [
            ("tallow-state-3.bin", 0),
            ("recompute-1-3.part", 3000),
            ("state-4.bin", 100_000),
            ("recompute-1-4.bin", 100_000),
        ];
        let others = others.map(|(name, age_secs)| file(&folder, name, age_secs).0);
        sweep(&folder);
        assert!(start.elapsed() < UNLOCKED, "a machine too slow for this test");
        assert!(!left.exists() && !part.exists());
        assert!(used.exists() && others.iter().all(|path| path.exists()));
        fs::remove_dir_all(&folder).expect("removed");
        sweep(&folder); // of no folder
    }
}

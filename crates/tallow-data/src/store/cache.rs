use crate::{
    error::{Error, Result},
    formats::ReadAt,
};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

const LOCK: &str = "lock";
const PART: &str = ".part";
/// Blocks this process has begun to write: with its number, a name that is nobody else's.
static N_PARTS: AtomicU64 = AtomicU64::new(0);

/// Blocks of objects on disk, the least recently used ones removed above `max_bytes`.
///
/// Several processes may share the folder: a block appears whole under its name, and bytes are
/// counted and blocks removed under a file lock. A disk that is full costs speed, not the run: old
/// blocks make room, and if that is not enough a block is handed out without being kept.
#[derive(Clone, Debug)]
pub struct Cache {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    max_bytes: u64,
    write: fn(&Path, &[u8]) -> io::Result<()>,
}

impl Cache {
    /// Uses `folder`, made if missing, for up to `max_bytes`.
    /// # Errors
    /// If the folder cannot be made or written.
    pub fn open(folder: impl AsRef<Path>, max_bytes: u64) -> Result<Self> {
        Self::with_writer(folder.as_ref(), max_bytes, |path, bytes| fs::write(path, bytes))
    }

    fn with_writer(
        folder: &Path,
        max_bytes: u64,
        write: fn(&Path, &[u8]) -> io::Result<()>,
    ) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|error| Error::from_io(folder, error))?;
        let folder = folder.to_owned();
        let cache = Self { shared: Arc::new(Shared { folder, max_bytes, write }) };
        // What an earlier run left is counted now, and cut to this run's bound.
        cache.locked(|cache, _| {
            cache.sweep()?;
            cache.evict(max_bytes)
        })?;
        Ok(cache)
    }

    /// Removes parts that a process left an hour ago or more: no block takes that long to write.
    fn sweep(&self) -> Result<()> {
        const STALE: Duration = Duration::from_secs(3600);
        let fault = |error| Error::from_io(&self.shared.folder, error);
        for entry in fs::read_dir(&self.shared.folder).map_err(fault)? {
            let entry = entry.map_err(fault)?;
            let age = entry.metadata().and_then(|metadata| metadata.modified());
            let age = age.ok().and_then(|written| written.elapsed().ok()).unwrap_or_default();
            if entry.file_name().to_string_lossy().ends_with(PART) && age > STALE {
                let _ = fs::remove_file(entry.path()); // another process may have done it
            }
        }
        Ok(())
    }

    /// Bytes on disk by the shared count.
    /// # Errors
    /// If the count cannot be read.
    pub fn held_bytes(&self) -> Result<u64> {
        self.locked(|_, held_bytes| Ok(held_bytes))
    }

    /// Copies the bytes of the block `name` from `offset` on into `buf`; `fill` fetches the block, of
    /// `n_bytes`, if it is not there.
    pub(super) fn read(
        &self,
        name: &str,
        n_bytes: u64,
        offset: u64,
        buf: &mut [u8],
        fill: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> io::Result<usize> {
        let path = self.shared.folder.join(name);
        if let Some(n_read) = read_block(&path, n_bytes, offset, buf) {
            return Ok(n_read);
        }
        let block = fill()?;
        if block.len() as u64 != n_bytes {
            let reason = format!("{n_bytes} bytes were asked for, {} came", block.len());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
        }
        self.insert(&path, &block).map_err(io::Error::other)?;
        block.read_at(offset, buf)
    }

    /// Keeps `block` under `path`, if there is room on the disk.
    fn insert(&self, path: &Path, block: &[u8]) -> Result<()> {
        let n_bytes = block.len() as u64;
        if n_bytes > self.shared.max_bytes {
            return Ok(());
        }
        let n = N_PARTS.fetch_add(1, Ordering::Relaxed);
        let part = self.shared.folder.join(format!("{}-{n}{PART}", std::process::id()));
        let mut outcome = (self.shared.write)(&part, block);
        if outcome.as_ref().is_err_and(is_full) {
            let _ = fs::remove_file(&part);
            self.locked(|cache, held_bytes| cache.evict(held_bytes / 2))?;
            outcome = (self.shared.write)(&part, block);
        }
        match outcome {
            Ok(()) => self.publish(&part, path, n_bytes),
            Err(error) => {
                let _ = fs::remove_file(&part); // it may not be there
                if is_full(&error) { Ok(()) } else { Err(Error::from_io(&part, error)) }
            }
        }
    }

    fn publish(&self, part: &Path, path: &Path, n_bytes: u64) -> Result<()> {
        let max_bytes = self.shared.max_bytes;
        self.locked(|cache, held_bytes| {
            let mut held_bytes = match path.exists() {
                true => held_bytes, // another process was faster
                false => held_bytes + n_bytes,
            };
            if held_bytes > max_bytes {
                // A tenth more than needed: not every block costs a look at all of them.
                held_bytes = cache.evict((max_bytes - n_bytes).min(max_bytes / 10 * 9))? + n_bytes;
            }
            fs::rename(part, path).map_err(|error| Error::from_io(path, error))?;
            Ok(held_bytes)
        })
        .map(drop)
    }

    /// Removes the blocks used longest ago until `target_bytes` are left; says how many are.
    fn evict(&self, target_bytes: u64) -> Result<u64> {
        let mut blocks = self.blocks()?;
        let mut held_bytes = blocks.iter().map(|block| block.n_bytes).sum::<u64>();
        blocks.sort_by(|a, b| a.used.cmp(&b.used).then_with(|| a.path.cmp(&b.path)));
        for block in blocks {
            if held_bytes <= target_bytes {
                break;
            }
            // Whoever reads it now has it open, and keeps it until done.
            match fs::remove_file(&block.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::from_io(&block.path, error));
                }
                _ => held_bytes -= block.n_bytes,
            }
        }
        Ok(held_bytes)
    }

    fn blocks(&self) -> Result<Vec<Block>> {
        let fault = |error| Error::from_io(&self.shared.folder, error);
        let mut blocks = Vec::new();
        for entry in fs::read_dir(&self.shared.folder).map_err(fault)? {
            let path = entry.map_err(fault)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // Parts are not counted; the lock is not a block; a block may have gone meanwhile.
            let Some(metadata) =
                fs::metadata(&path).ok().filter(|_| name != LOCK && !name.ends_with(PART))
            else {
                continue;
            };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            blocks.push(Block { n_bytes: metadata.len(), used, path });
        }
        Ok(blocks)
    }

    /// Runs `work` while no other process changes the folder. The lock file holds the count of bytes,
    /// which `work` is given and hands back.
    fn locked(&self, work: impl FnOnce(&Self, u64) -> Result<u64>) -> Result<u64> {
        let path = self.shared.folder.join(LOCK);
        let fault = |error| Error::from_io(&path, error);
        let options =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file: File = options.map_err(fault)?;
        file.lock().map_err(fault)?; // released when the file is closed, also by a process that dies
        let mut count = [0; 8];
        let held_bytes = match file.read_exact(&mut count) {
            Ok(()) => u64::from_le_bytes(count),
            Err(_) => self.blocks()?.iter().map(|block| block.n_bytes).sum(),
        };
        let held_bytes = work(self, held_bytes)?;
        file.seek(SeekFrom::Start(0)).map_err(fault)?;
        match file.write_all(&held_bytes.to_le_bytes()) {
            // Eight bytes that do not fit: the next look counts again.
            Err(error) if is_full(&error) => file.set_len(0).map_err(fault)?,
            outcome => outcome.map_err(fault)?,
        }
        Ok(held_bytes)
    }
}

struct Block {
    path: PathBuf,
    n_bytes: u64,
    used: SystemTime,
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Reads from a block that is there and whole, and marks it as used.
fn read_block(path: &Path, n_bytes: u64, offset: u64, buf: &mut [u8]) -> Option<usize> {
    let mut file = File::open(path).ok()?;
    if file.metadata().ok()?.len() != n_bytes {
        return None; // left by a machine that stopped while writing
    }
    let _ = file.set_modified(SystemTime::now()); // a folder that is read-only still serves
    file.seek(SeekFrom::Start(offset)).ok()?;
    let n_read = buf.len().min(usize::try_from(n_bytes.saturating_sub(offset)).ok()?);
    file.read_exact(&mut buf[..n_read]).ok()?;
    Some(n_read)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("tallow-cache-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    fn read(cache: &Cache, name: &str, n_fetched: &AtomicU64) -> Vec<u8> {
        let mut buf = [0; 4];
        let fill = || {
            n_fetched.fetch_add(1, Ordering::Relaxed);
            Ok(vec![name.as_bytes()[0]; 100])
        };
        assert_eq!(cache.read(name, 100, 96, &mut buf, fill).unwrap(), 4);
        buf.to_vec()
    }

    #[test]
    fn the_block_used_longest_ago_goes() {
        let (folder, n) = (folder("lru"), AtomicU64::new(0));
        let cache = Cache::open(&folder, 350).unwrap();
        for name in ["a", "b", "c", "a"] {
            assert_eq!(read(&cache, name, &n), [name.as_bytes()[0]; 4]);
            std::thread::sleep(std::time::Duration::from_millis(20)); // times of files are coarse
        }
        assert_eq!((n.load(Ordering::Relaxed), cache.held_bytes().unwrap()), (3, 300));
        read(&cache, "d", &n);
        assert!(cache.held_bytes().unwrap() <= 350);
        assert!(
            !folder.join("b").exists() && folder.join("a").exists() && folder.join("d").exists()
        );
        // Another process opens it with less room.
        let smaller = Cache::open(&folder, 150).unwrap();
        assert!(smaller.held_bytes().unwrap() <= 150);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_block_cut_by_a_crash_is_fetched_again() {
        let (folder, n) = (folder("crash"), AtomicU64::new(0));
        let cache = Cache::open(&folder, 1000).unwrap();
        read(&cache, "a", &n);
        fs::write(folder.join("a"), b"cut").unwrap();
        let (old, new) = (folder.join("1-1.part"), folder.join("1-2.part"));
        for part in [&old, &new] {
            fs::write(part, b"half").unwrap();
        }
        let long_ago = SystemTime::now() - Duration::from_secs(4000);
        File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
        let cache = Cache::open(&folder, 1000).unwrap();
        assert!(!old.exists() && new.exists(), "what another process writes now stays");
        assert_eq!((read(&cache, "a", &n), n.load(Ordering::Relaxed)), (vec![b'a'; 4], 2));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_full_disk_is_no_error() {
        let (folder, n) = (folder("full"), AtomicU64::new(0));
        let good = Cache::open(&folder, 1000).unwrap();
        for name in ["a", "b", "c", "d"] {
            read(&good, name, &n);
        }
        let full = |_: &Path, _: &[u8]| Err(io::ErrorKind::StorageFull.into());
        let cache = Cache::with_writer(&folder, 1000, full).unwrap();
        assert_eq!(read(&cache, "e", &n), [b'e'; 4]);
        // Half made room, in vain; nothing half written stays.
        assert_eq!(cache.held_bytes().unwrap(), 200);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 3);
        let broken = |_: &Path, _: &[u8]| Err(io::ErrorKind::PermissionDenied.into());
        let cache = Cache::with_writer(&folder, 1000, broken).unwrap();
        assert!(cache.read("f", 100, 0, &mut [0; 4], || Ok(vec![0; 100])).is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn many_at_once_stay_within_the_bound() {
        let (folder, n) = (folder("many"), AtomicU64::new(0));
        let caches: Vec<Cache> = (0..4).map(|_| Cache::open(&folder, 550).unwrap()).collect();
        std::thread::scope(|scope| {
            for cache in &caches {
                scope.spawn(|| {
                    for i in 0..60u8 {
                        let name = char::from(b'a' + i % 12).to_string();
                        assert_eq!(read(cache, &name, &n), [name.as_bytes()[0]; 4]);
                        assert!(cache.held_bytes().unwrap() <= 550);
                    }
                });
            }
        });
        let on_disk: u64 = caches[0].blocks().unwrap().iter().map(|block| block.n_bytes).sum();
        assert_eq!(on_disk, caches[0].held_bytes().unwrap());
        fs::remove_dir_all(folder).unwrap();
    }
}

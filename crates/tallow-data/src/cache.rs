//! Samples kept on disk once they were made.

use crate::{
    error::{Error, Result},
    source::Source,
};
use flate2::Crc;
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// A sample as bytes, and back.
pub trait Stored: Sized {
    /// Appends the sample.
    fn store(&self, bytes: &mut Vec<u8>);
    /// The sample of these bytes; nothing if they are none.
    fn load(bytes: &[u8]) -> Option<Self>;
}

impl Stored for Vec<u8> {
    fn store(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self);
    }

    fn load(bytes: &[u8]) -> Option<Self> {
        Some(bytes.to_vec())
    }
}

impl Stored for String {
    fn store(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.as_bytes());
    }

    fn load(bytes: &[u8]) -> Option<Self> {
        String::from_utf8(bytes.to_vec()).ok()
    }
}

macro_rules! stored {
    ($($elem:ty),*) => {$(
        impl Stored for Vec<$elem> {
            fn store(&self, bytes: &mut Vec<u8>) {
                self.iter().for_each(|elem| bytes.extend(elem.to_le_bytes()));
            }

            fn load(bytes: &[u8]) -> Option<Self> {
                let (elems, rest) = bytes.as_chunks();
                rest.is_empty().then(|| elems.iter().map(|&e| <$elem>::from_le_bytes(e)).collect())
            }
        }
    )*};
}
stored!(u16, u32, u64, i32, i64, f32, f64);

impl Stored for crate::LabelledImage {
    fn store(&self, bytes: &mut Vec<u8>) {
        self.dims.iter().for_each(|&dim| bytes.extend((dim as u64).to_le_bytes()));
        bytes.extend(self.label.to_le_bytes());
        bytes.extend_from_slice(&self.pixels);
    }

    fn load(bytes: &[u8]) -> Option<Self> {
        let (dims, rest) = bytes.split_at_checked(24)?;
        let (label, pixels) = rest.split_first_chunk()?;
        let (dims, _) = dims.as_chunks();
        let dims = [dims[0], dims[1], dims[2]].map(|dim| u64::from_le_bytes(dim) as usize);
        Some(Self { pixels: pixels.to_vec(), dims, label: u32::from_le_bytes(*label) })
    }
}

/// A source whose samples are kept in a folder: decoded once, read back in later epochs and runs.
///
/// A sample is read back only if its checksum is right: what a crash left half written is made again.
/// Once the folder holds `max_bytes`, or the disk takes no more, further samples pass through
/// uncached; [`DiskCache::state`] says so. The cache is never the reason that a run ends.
///
/// *Memory:* the sample asked for, twice. *Disk:* [`cache_bytes`].
#[derive(Debug)]
pub struct DiskCache<S> {
    source: S,
    samples: File,
    slots: File,
    max_bytes: u64,
    state: Mutex<CacheState>,
}

/// What a cache holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheState {
    /// Bytes of samples in the folder.
    pub held_bytes: u64,
    /// Samples that were read back.
    pub n_hits: u64,
    /// Samples that the source had to make.
    pub n_misses: u64,
    /// Why nothing is added any more.
    pub closed: Option<String>,
}

const MAGIC: u64 = u64::from_le_bytes(*b"tallow.1");
const HEADER_BYTES: u64 = 24;
/// Offset, length + 1, checksum of the sample, checksum of these.
const SLOT_BYTES: usize = 24;

/// Bytes on disk for `n_samples`, whose stored forms are `samples_bytes` together.
pub const fn cache_bytes(n_samples: u64, samples_bytes: u64) -> u64 {
    let slots_bytes = n_samples.saturating_mul(SLOT_BYTES as u64);
    slots_bytes.saturating_add(HEADER_BYTES).saturating_add(samples_bytes)
}

impl<S: Source> DiskCache<S>
where
    S::Item: Stored,
{
    /// Opens or makes the cache in `folder`. `key` is yours: another `key`, another content; change it
    /// with whatever changes the samples. At most `max_bytes` of samples are kept.
    /// # Errors
    /// If the folder is not usable, in use by another, or holds samples of another key or number.
    pub fn open(source: S, folder: impl AsRef<Path>, key: u64, max_bytes: u64) -> Result<Self> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(|error| Error::Io { path: folder.to_owned(), error })?;
        let (slots_path, samples_path) = (folder.join("slots"), folder.join("samples"));
        let slots = open(&slots_path)?;
        match slots.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(wrong(&slots_path, "in use by another run".to_owned()));
            }
            Err(TryLockError::Error(error)) => {
                return Err(Error::Io { path: slots_path, error });
            }
        }
        check_header(&slots, &slots_path, key, source.n_samples())?;
        let samples = open(&samples_path)?;
        let held_bytes =
            samples.metadata().map_err(|error| Error::Io { path: samples_path, error })?.len();
        let state = Mutex::new(CacheState { held_bytes, ..CacheState::default() });
        Ok(Self { source, samples, slots, max_bytes, state })
    }

    /// What it holds, and whether it takes more.
    pub fn state(&self) -> CacheState {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, CacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sample, if it is there and whole.
    fn find(&self, index: u64) -> Option<S::Item> {
        let mut slot = [0; SLOT_BYTES];
        read_at(&self.slots, &mut slot, slot_offset(index)).ok()?;
        let held_bytes = self.lock().held_bytes;
        let (offset, n_bytes, checksum) = read_slot(&slot, held_bytes)?;
        let mut bytes = vec![0; n_bytes as usize];
        read_at(&self.samples, &mut bytes, offset).ok()?;
        if sum(&bytes) != checksum {
            return None;
        }
        S::Item::load(&bytes)
    }

    fn keep(&self, index: u64, sample: &S::Item) {
        if self.lock().closed.is_some() {
            return;
        }
        let mut bytes = Vec::new();
        sample.store(&mut bytes);
        let n_bytes = bytes.len() as u64;
        // One writer at a time; readers go by slots, which come last.
        let mut state = self.lock();
        let offset = state.held_bytes;
        if state.closed.is_some() {
            return;
        }
        if offset.saturating_add(n_bytes) > self.max_bytes {
            state.closed = Some(format!("the limit of {} bytes is reached", self.max_bytes));
            return;
        }
        let slot = write_slot(offset, n_bytes, sum(&bytes));
        let written = write_at(&self.samples, &bytes, offset)
            .and_then(|()| write_at(&self.slots, &slot, slot_offset(index)));
        match written {
            Ok(()) => state.held_bytes += n_bytes,
            Err(error) => state.closed = Some(error.to_string()),
        }
    }
}

impl<S: Source> Source for DiskCache<S>
where
    S::Item: Stored,
{
    type Item = S::Item;

    fn n_samples(&self) -> u64 {
        self.source.n_samples()
    }

    fn get(&self, index: u64) -> Result<S::Item> {
        if let Some(sample) = self.find(index) {
            self.lock().n_hits += 1;
            return Ok(sample);
        }
        let sample = self.source.get(index)?;
        self.lock().n_misses += 1;
        self.keep(index, &sample);
        Ok(sample)
    }

    fn name(&self, index: u64) -> String {
        self.source.name(index)
    }
}

fn open(path: &PathBuf) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(|error| Error::Io { path: path.clone(), error })
}

fn wrong(path: &Path, reason: String) -> Error {
    Error::Cache { path: path.to_owned(), reason }
}

/// Writes the header of a new file, compares that of an old one.
fn check_header(slots: &File, path: &Path, key: u64, n_samples: u64) -> Result<()> {
    let io = |error| Error::Io { path: path.to_owned(), error };
    let want = [MAGIC, key, n_samples].map(u64::to_le_bytes).concat();
    if slots.metadata().map_err(io)?.len() < HEADER_BYTES {
        return write_at(slots, &want, 0).map_err(io);
    }
    let mut got = [0; HEADER_BYTES as usize];
    read_at(slots, &mut got, 0).map_err(io)?;
    if got[..] == want[..] {
        return Ok(());
    }
    let (fields, _) = got.as_chunks();
    let [magic, got_key, got_n] = [fields[0], fields[1], fields[2]].map(u64::from_le_bytes);
    if magic != MAGIC {
        return Err(wrong(path, "no cache of samples".to_owned()));
    }
    let reason =
        format!("holds {got_n} samples of key {got_key:#x}, asked for {n_samples} of key {key:#x}");
    Err(wrong(path, reason))
}

fn slot_offset(index: u64) -> u64 {
    HEADER_BYTES + index * SLOT_BYTES as u64
}

fn write_slot(offset: u64, n_bytes: u64, checksum: u32) -> Vec<u8> {
    let mut slot = [offset, n_bytes + 1].map(u64::to_le_bytes).concat();
    slot.extend(checksum.to_le_bytes());
    slot.extend(sum(&slot).to_le_bytes());
    slot
}

/// Offset, length and checksum, if the slot is whole and points inside.
fn read_slot(slot: &[u8; SLOT_BYTES], held_bytes: u64) -> Option<(u64, u64, u32)> {
    let number = |at: usize| slot[at..].first_chunk().map(|&b| u64::from_le_bytes(b));
    let small = |at: usize| slot[at..].first_chunk().map(|&b| u32::from_le_bytes(b));
    let (offset, n_bytes) = (number(0)?, number(8)?.checked_sub(1)?);
    let is_whole = small(20)? == sum(&slot[..20]);
    let is_inside = offset.checked_add(n_bytes).is_some_and(|end| end <= held_bytes);
    (is_whole && is_inside).then_some((offset, n_bytes, small(16)?))
}

fn sum(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
fn read_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let n = std::os::windows::fs::FileExt::seek_read(file, bytes, offset)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes = &mut bytes[n..];
        offset += n as u64;
    }
    Ok(())
}

#[cfg(windows)]
fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let n = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if n == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[n..];
        offset += n as u64;
    }
    Ok(())
}

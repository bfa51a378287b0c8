use crate::error::{Error, Result};
use std::{
    fmt,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Bytes that can be read at any position, by several threads at once.
pub trait ReadAt: Send + Sync {
    /// Bytes there are.
    fn n_bytes(&self) -> u64;

    /// Reads up to `buf.len()` bytes from `offset` on; 0 is the end.
    /// # Errors
    /// If the bytes cannot be had.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
}

impl ReadAt for Vec<u8> {
    fn n_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let start = usize::try_from(offset).map_or(self.len(), |start| start.min(self.len()));
        let n_bytes = buf.len().min(self.len() - start);
        buf[..n_bytes].copy_from_slice(&self[start..start + n_bytes]);
        Ok(n_bytes)
    }
}

/// Opens a file that can be read at any place, and says how many bytes it has. Pipes are not opened: that
/// would wait for whoever writes to them.
pub(super) fn open_file(path: &Path) -> Result<(File, u64)> {
    let fault = |error| Error::from_io(path, error);
    let metadata = fs::metadata(path).map_err(fault)?;
    if metadata.is_dir() {
        return Err(fault(io::ErrorKind::IsADirectory.into()));
    }
    if !metadata.is_file() {
        let reason = "a pipe or a device, which cannot be read at any place".to_owned();
        return Err(Error::Corrupt { path: path.to_owned(), offset: None, reason });
    }
    let file = File::open(path).map_err(fault)?;
    let n_bytes = file.metadata().map_err(fault)?.len();
    Ok((file, n_bytes))
}

struct LocalFile {
    file: File,
    n_bytes: u64,
}

impl ReadAt for LocalFile {
    fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    #[cfg(unix)]
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(&self.file, buf, offset)
    }

    #[cfg(windows)]
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(&self.file, buf, offset)
    }
}

/// A named place of bytes: a local file, an object in a store, or bytes in memory.
///
/// Clones share it. A file is opened once: it stays readable when its name vanishes.
#[derive(Clone)]
pub struct Input {
    path: PathBuf,
    bytes: Arc<dyn ReadAt>,
    n_bytes: u64,
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Input({}, {} bytes)", self.path.display(), self.n_bytes)
    }
}

impl Input {
    /// Opens the local file at `path`.
    /// # Errors
    /// If it is missing, a folder, a pipe or a device, or unreadable.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, n_bytes) = open_file(path)?;
        Ok(Self::new(path, LocalFile { file, n_bytes }))
    }

    /// Bytes that errors call `path`.
    pub fn new(path: impl Into<PathBuf>, bytes: impl ReadAt + 'static) -> Self {
        let n_bytes = bytes.n_bytes();
        Self { path: path.into(), bytes: Arc::new(bytes), n_bytes }
    }

    /// What errors call it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes there were when it was opened.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Fills `buf` from `offset` on.
    /// # Errors
    /// If the input ends before; the error says where.
    pub fn read_exact(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let n_bytes = self.read_some(offset, buf)?;
        match n_bytes == buf.len() {
            true => Ok(()),
            false => Err(self.ends(offset, buf.len() as u64, n_bytes as u64)),
        }
    }

    /// Fills `buf` from `offset` on, or as much of it as there is.
    /// # Errors
    /// If the bytes cannot be read.
    pub fn read_some(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let mut n_bytes = 0;
        while n_bytes < buf.len() {
            match self.bytes.read_at(offset + n_bytes as u64, &mut buf[n_bytes..]) {
                Ok(0) => break,
                Ok(n) => n_bytes += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::from_io(&self.path, error)),
            }
        }
        Ok(n_bytes)
    }

    /// The `n_bytes` from `offset` on. Room is made only if the input is long enough.
    /// # Errors
    /// If the input ends before.
    pub fn read_vec(&self, offset: u64, n_bytes: u64) -> Result<Vec<u8>> {
        let left_bytes = self.n_bytes.saturating_sub(offset);
        if n_bytes > left_bytes {
            return Err(self.ends(offset, n_bytes, left_bytes));
        }
        let mut bytes = vec![0; self.sized(offset, n_bytes)?];
        self.read_exact(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// A reader of the bytes from `offset` on, unbuffered.
    #[cfg(feature = "tar")]
    pub(crate) fn reader(&self, offset: u64) -> InputReader<'_> {
        InputReader { input: self, offset }
    }

    pub(crate) fn corrupt(
        &self,
        offset: impl Into<Option<u64>>,
        reason: impl Into<String>,
    ) -> Error {
        Error::Corrupt { path: self.path.clone(), offset: offset.into(), reason: reason.into() }
    }

    pub(crate) fn out_of_range(&self, index: u64, n_samples: u64) -> Error {
        Error::Index { path: self.path.clone(), index, n_samples }
    }

    fn sized(&self, offset: u64, n_bytes: u64) -> Result<usize> {
        usize::try_from(n_bytes)
            .map_err(|_| self.corrupt(offset, format!("{n_bytes} bytes cannot be held")))
    }

    fn ends(&self, offset: u64, need_bytes: u64, found_bytes: u64) -> Error {
        let reason = format!("cut short, {need_bytes} bytes are expected and {found_bytes} found");
        self.corrupt(offset, reason)
    }
}

/// A sequential view of an [`Input`].
#[cfg(feature = "tar")]
pub(crate) struct InputReader<'a> {
    input: &'a Input,
    offset: u64,
}

#[cfg(feature = "tar")]
impl std::io::Read for InputReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n_bytes = self.input.bytes.read_at(self.offset, buf)?;
        self.offset += n_bytes as u64;
        Ok(n_bytes)
    }
}

#[cfg(feature = "tar")]
impl std::io::Seek for InputReader<'_> {
    fn seek(&mut self, to: std::io::SeekFrom) -> io::Result<u64> {
        let target = match to {
            std::io::SeekFrom::Start(offset) => Some(offset),
            std::io::SeekFrom::Current(by) => self.offset.checked_add_signed(by),
            std::io::SeekFrom::End(by) => self.input.n_bytes.checked_add_signed(by),
        };
        self.offset = target.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_is_named_with_its_place() {
        let input = Input::new("a.bin", vec![1u8, 2, 3, 4, 5]);
        assert_eq!(input.read_vec(1, 3).unwrap(), [2, 3, 4]);
        let error = input.read_vec(3, 9).unwrap_err().to_string();
        assert_eq!(error, "`a.bin` at byte 3: cut short, 9 bytes are expected and 2 found");
        assert!(input.read_vec(u64::MAX, 1).is_err() && input.read_vec(0, u64::MAX).is_err());
        assert!(matches!(Input::open("no/such/file"), Err(Error::NotFound { .. })));
    }
}

//! The IDX format, MNIST's: a header of big-endian numbers and the raw elements, plain or gzip.
//!
//! ```text
//! 0  0  dtype  rank     two zero bytes, the element type, the number of dimensions
//! u32 x rank            each dimension, big-endian
//! elements              row-major, big-endian
//! ```
//! Whether a file is compressed is read from its first bytes, not from its name. A header is never
//! believed: memory grows with the bytes that are really there, to at most twice as many.
use crate::error::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use std::{
    borrow::Cow,
    fmt,
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};

/// The element types of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the types")]
pub enum IdxType {
    U8,
    I8,
    I16,
    I32,
    F32,
    F64,
}

impl IdxType {
    /// The type a header's third byte stands for.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            0x08 => Some(Self::U8),
            0x09 => Some(Self::I8),
            0x0b => Some(Self::I16),
            0x0c => Some(Self::I32),
            0x0d => Some(Self::F32),
            0x0e => Some(Self::F64),
            _ => None,
        }
    }
}

impl fmt::Display for IdxType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::F64 => "f64",
        })
    }
}

/// What was wrong with the content of an IDX file. Byte counts are after decompression.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum IdxFault {
    /// The first four bytes, or as many as there are, are not IDX's.
    #[error("not an IDX file, it starts with the bytes {found:02x?}")]
    NotIdx { found: Vec<u8> },
    /// The content ends early.
    #[error("truncated, {expected_bytes} bytes are announced and {found_bytes} found")]
    Truncated { expected_bytes: u64, found_bytes: u64 },
    /// The content goes on; how far is not read.
    #[error("{expected_bytes} bytes are announced, at least {extra_bytes} follow them")]
    Trailing { expected_bytes: u64, extra_bytes: u64 },
    /// Another element type.
    #[error("elements are {found}, {expected} is needed")]
    Type { found: IdxType, expected: IdxType },
    /// Another number of dimensions.
    #[error("{found_rank} dimensions, {expected_rank} are needed")]
    Rank { found_rank: usize, expected_rank: usize },
    /// Dimensions whose product no machine addresses, or images without pixels.
    #[error("dimensions {dims:?} describe no data that could be held")]
    Dims { dims: Vec<u64> },
    /// The compressed stream is damaged.
    #[error("the gzip stream is damaged after {found_bytes} bytes of content: {error}")]
    Gzip { found_bytes: u64, error: io::Error },
}

/// An IDX array of bytes: borrowed where the input was plain and in memory, owned otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdxBytes<'a> {
    /// As many as the rank asked for.
    pub dims: Vec<usize>,
    /// Row-major; the product of `dims`.
    pub bytes: Cow<'a, [u8]>,
}

/// Reads the array of `rank` dimensions of bytes in the file at `path`.
///
/// Holds the elements once when it returns, and up to twice while it reads.
///
/// # Errors
/// If the file is missing or unreadable, or is not exactly such an array.
pub fn read_u8(path: &Path, rank: usize) -> Result<IdxBytes<'static>> {
    let file = File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NotFound { path: path.to_owned() },
        _ => Error::Io { path: path.to_owned(), error },
    })?;
    let mut reader = BufReader::new(file);
    let mut first = [0; 2];
    let (n_first, outcome) = fill(&mut reader, &mut first);
    outcome.map_err(|error| Error::Io { path: path.to_owned(), error })?;
    let reader = first[..n_first].chain(reader);
    match is_gzip(&first[..n_first]) {
        true => Input::new(path, true, MultiGzDecoder::new(reader)).array(rank),
        false => Input::new(path, false, reader).array(rank),
    }
}

/// Reads the array of `rank` dimensions of bytes in `content`; errors call it `name`.
///
/// Plain content is borrowed; compressed content is held decompressed.
///
/// # Errors
/// If `content` is not exactly such an array.
pub fn parse_u8<'a>(name: &Path, content: &'a [u8], rank: usize) -> Result<IdxBytes<'a>> {
    if is_gzip(content) {
        return Input::new(name, true, MultiGzDecoder::new(content)).array(rank);
    }
    let mut input = Input::new(name, false, content);
    let header = input.header(rank)?;
    let (rest, n_rest) = (input.reader, input.reader.len() as u64);
    let (expected_bytes, found_bytes) =
        (input.found_bytes + header.n_bytes, input.found_bytes + n_rest);
    if found_bytes < expected_bytes {
        return Err(input.fault(IdxFault::Truncated { expected_bytes, found_bytes }));
    }
    if found_bytes > expected_bytes {
        let extra_bytes = found_bytes - expected_bytes;
        return Err(input.fault(IdxFault::Trailing { expected_bytes, extra_bytes }));
    }
    Ok(IdxBytes { dims: header.dims, bytes: Cow::Borrowed(rest) })
}

fn is_gzip(content: &[u8]) -> bool {
    content.starts_with(&[0x1f, 0x8b])
}

/// Reads until `buf` is full, the input ends or an error stops it; also counts what came before the error.
fn fill(reader: &mut impl Read, buf: &mut [u8]) -> (usize, io::Result<()>) {
    let mut n_bytes = 0;
    while n_bytes < buf.len() {
        match reader.read(&mut buf[n_bytes..]) {
            Ok(0) => break,
            Ok(n) => n_bytes += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (n_bytes, Err(error)),
        }
    }
    (n_bytes, Ok(()))
}

struct Header {
    dims: Vec<usize>,
    n_bytes: u64,
}

/// A stream of decompressed content, and what an error has to say about it.
struct Input<'p, R> {
    path: &'p Path,
    gzip: bool,
    reader: R,
    found_bytes: u64,
}

impl<'p, R: Read> Input<'p, R> {
    fn new(path: &'p Path, gzip: bool, reader: R) -> Self {
        Self { path, gzip, reader, found_bytes: 0 }
    }

    fn array(mut self, rank: usize) -> Result<IdxBytes<'static>> {
        let header = self.header(rank)?;
        let bytes = self.body(header.n_bytes)?;
        self.end()?;
        Ok(IdxBytes { dims: header.dims, bytes: Cow::Owned(bytes) })
    }

    /// Reads the header and refuses all but `rank` dimensions of bytes.
    fn header(&mut self, rank: usize) -> Result<Header> {
        let mut magic = [0; 4];
        let n_magic = self.fill(&mut magic)?;
        let found_type = match magic {
            [0, 0, code, _] if n_magic == 4 => IdxType::from_code(code),
            _ => None,
        };
        let Some(found) = found_type else {
            return Err(self.fault(IdxFault::NotIdx { found: magic[..n_magic].to_vec() }));
        };
        if found != IdxType::U8 {
            return Err(self.fault(IdxFault::Type { found, expected: IdxType::U8 }));
        }
        let found_rank = usize::from(magic[3]);
        if found_rank != rank {
            return Err(self.fault(IdxFault::Rank { found_rank, expected_rank: rank }));
        }
        let header_bytes = self.found_bytes + 4 * rank as u64;
        let mut dims = Vec::with_capacity(rank);
        for _ in 0..rank {
            let mut dim = [0; 4];
            self.fill_all(&mut dim, header_bytes)?;
            dims.push(u64::from(u32::from_be_bytes(dim)));
        }
        self.checked(dims)
    }

    fn checked(&self, dims: Vec<u64>) -> Result<Header> {
        let n_bytes = dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
        let sizes = dims.iter().map(|&dim| usize::try_from(dim)).collect::<Result<Vec<_>, _>>();
        match (n_bytes, sizes) {
            (Some(n_bytes), Ok(dims)) if isize::try_from(n_bytes).is_ok() => {
                Ok(Header { dims, n_bytes })
            }
            _ => Err(self.fault(IdxFault::Dims { dims })),
        }
    }

    /// Reads `n_bytes` into room that doubles as it fills, and never exceeds `n_bytes`.
    fn body(&mut self, n_bytes: u64) -> Result<Vec<u8>> {
        const FIRST_BYTES: usize = 64 << 10;
        let expected_bytes = self.found_bytes + n_bytes;
        let n_bytes = n_bytes as usize; // `checked` has seen that it fits
        let mut bytes: Vec<u8> = Vec::new();
        while bytes.len() < n_bytes {
            let n_held = bytes.len();
            let n_more = (n_bytes - n_held).min(n_held.max(FIRST_BYTES));
            bytes.reserve_exact(n_more);
            bytes.resize(n_held + n_more, 0);
            self.fill_all(&mut bytes[n_held..], expected_bytes)?;
        }
        Ok(bytes)
    }

    /// The content must end here, and so must the compressed stream: its checksum is compared now.
    fn end(&mut self) -> Result<()> {
        let expected_bytes = self.found_bytes;
        let mut extra = [0; 4096];
        match self.fill(&mut extra)? {
            0 => Ok(()),
            n_extra => {
                Err(self.fault(IdxFault::Trailing { expected_bytes, extra_bytes: n_extra as u64 }))
            }
        }
    }

    fn fill(&mut self, buf: &mut [u8]) -> Result<usize> {
        let (n_bytes, outcome) = fill(&mut self.reader, buf);
        self.found_bytes += n_bytes as u64;
        outcome.map_err(|error| self.unreadable(error))?;
        Ok(n_bytes)
    }

    /// Fills `buf`, or says that of `expected_bytes` in all some are missing. A compressed stream
    /// cut short is that too.
    fn fill_all(&mut self, buf: &mut [u8], expected_bytes: u64) -> Result<()> {
        let (n_bytes, outcome) = fill(&mut self.reader, buf);
        self.found_bytes += n_bytes as u64;
        match outcome {
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                Err(self.unreadable(error))
            }
            _ if n_bytes == buf.len() => Ok(()),
            _ => {
                Err(self
                    .fault(IdxFault::Truncated { expected_bytes, found_bytes: self.found_bytes }))
            }
        }
    }

    fn fault(&self, fault: IdxFault) -> Error {
        Error::Idx { path: self.path.to_owned(), fault }
    }

    fn unreadable(&self, error: io::Error) -> Error {
        use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
        match error.kind() {
            InvalidData | InvalidInput | UnexpectedEof if self.gzip => {
                self.fault(IdxFault::Gzip { found_bytes: self.found_bytes, error })
            }
            _ => Error::Io { path: self.path.to_owned(), error },
        }
    }
}

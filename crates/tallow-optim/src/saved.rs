//! A safetensors file whose tensors are read one at a time.

use crate::error::StateError;
use miniserde::json::{self, Number, Object, Value};
use safetensors::SafeTensorError as Flaw;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

/// Safetensors' own limit.
const MOST_HEADER_BYTES: u64 = 100_000_000;
const METADATA: &str = "__metadata__";

pub(crate) struct Saved {
    file: File,
    /// Words that came with the tensors.
    pub(crate) metadata: BTreeMap<String, String>,
    /// By name.
    pub(crate) tensors: BTreeMap<String, Entry>,
}

pub(crate) struct Entry {
    /// As headers have it.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    start: u64,
    n_bytes: u64,
}

impl Saved {
    /// Reads the header, and checks that the tensors are as long as it says and fill the file.
    pub(crate) fn open(path: &Path) -> Result<Self, StateError> {
        let io = |source| StateError::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(io)?;
        let n_bytes = file.metadata().map_err(io)?.len();
        let damaged = |source| StateError::Damaged { path: path.to_owned(), n_bytes, source };
        let mut length = [0; 8];
        if n_bytes < 8 {
            return Err(damaged(Flaw::HeaderTooSmall));
        }
        file.read_exact(&mut length).map_err(io)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MOST_HEADER_BYTES {
            return Err(damaged(Flaw::HeaderTooLarge));
        }
        if header_bytes > n_bytes - 8 {
            return Err(damaged(Flaw::InvalidHeaderLength));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(io)?;
        let header = std::str::from_utf8(&header).map_err(|e| damaged(Flaw::InvalidHeader(e)))?;
        let Ok(Value::Object(fields)) = json::from_str::<Value>(header) else {
            return Err(damaged(Flaw::InvalidOffset("header".to_string())));
        };
        let data_start = 8 + header_bytes;
        let metadata = metadata(&fields);
        let mut tensors = BTreeMap::new();
        for (name, value) in fields.iter().filter(|(name, _)| *name != METADATA) {
            let flaw = || damaged(Flaw::InvalidOffset(name.clone()));
            let entry = entry(value, data_start).filter(|entry| entry.is_within(n_bytes));
            let entry = entry.ok_or_else(flaw)?;
            tensors.insert(name.clone(), entry);
        }
        match fills(&tensors, data_start, n_bytes) {
            true => Ok(Self { file, metadata, tensors }),
            false => Err(damaged(Flaw::MetadataIncompleteBuffer)),
        }
    }

    /// Fills `to`, which is as long as the tensor.
    pub(crate) fn read(&mut self, name: &str, to: &mut [u8]) -> io::Result<()> {
        let entry = self.tensors.get(name).ok_or(io::ErrorKind::NotFound)?;
        self.file.seek(SeekFrom::Start(entry.start))?;
        self.file.read_exact(to)
    }

    pub(crate) fn bytes(&mut self, name: &str) -> io::Result<Vec<u8>> {
        let entry = self.tensors.get(name).ok_or(io::ErrorKind::NotFound)?;
        let mut bytes = vec![0; entry.n_bytes as usize];
        self.read(name, &mut bytes)?;
        Ok(bytes)
    }
}

/// Whether the tensors lie side by side from `start` to `end`.
fn fills(tensors: &BTreeMap<String, Entry>, start: u64, end: u64) -> bool {
    let mut places: Vec<_> = tensors.values().map(|e| (e.start, e.start + e.n_bytes)).collect();
    places.sort_unstable();
    let reached =
        places.into_iter().try_fold(start, |at, (first, next)| (first == at).then_some(next));
    reached == Some(end)
}

fn metadata(fields: &Object) -> BTreeMap<String, String> {
    let Some(Value::Object(words)) = fields.get(METADATA) else { return BTreeMap::new() };
    let word = |(key, value): (&String, &Value)| match value {
        Value::String(text) => Some((key.clone(), text.clone())),
        _ => None,
    };
    words.iter().filter_map(word).collect()
}

fn entry(value: &Value, data_start: u64) -> Option<Entry> {
    let Value::Object(fields) = value else { return None };
    let (Value::String(dtype), Value::Array(shape), Value::Array(offsets)) =
        (fields.get("dtype")?, fields.get("shape")?, fields.get("data_offsets")?)
    else {
        return None;
    };
    let number = |value: &Value| match value {
        Value::Number(Number::U64(x)) => Some(*x),
        _ => None,
    };
    let [start, end] = offsets.iter().map(number).collect::<Option<Vec<_>>>()?[..] else {
        return None;
    };
    Some(Entry {
        dtype: dtype.clone(),
        shape: shape.iter().map(|n| usize::try_from(number(n)?).ok()).collect::<Option<_>>()?,
        start: data_start.checked_add(start)?,
        n_bytes: end.checked_sub(start)?,
    })
}

impl Entry {
    /// Whether it lies in a file of `file_bytes`, and is as long as its shape wants.
    fn is_within(&self, file_bytes: u64) -> bool {
        let elem_bytes = match self.dtype.as_str() {
            "F64" | "I64" => 8,
            "F32" => 4,
            "BF16" | "F16" => 2,
            "U8" | "I8" => 1,
            _ => return false, // no state is kept so
        };
        let bytes =
            self.shape.iter().try_fold(elem_bytes, |n: u64, &dim| n.checked_mul(dim as u64));
        let end = self.start.checked_add(self.n_bytes);
        bytes == Some(self.n_bytes) && end.is_some_and(|end| end <= file_bytes)
    }
}

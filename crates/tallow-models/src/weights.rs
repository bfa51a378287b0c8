//! Weights in safetensors files, under the names of Hugging Face.

use crate::error::{Result, WeightsError};
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use miniserde::json::{self, Number, Value};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// What PEFT puts before the names of a base model.
pub const PEFT_PREFIX: &str = "base_model.model.";

/// Safetensors' own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The tensors of one file or of several shards, read one at a time.
///
/// *Memory:* the headers; while a tensor is read, it twice.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<TensorFile>,
    prefix: String,
}

#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    file: Mutex<File>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    start: u64,
    n_bytes: u64,
}

impl Checkpoint {
    /// Reads the headers of `paths`. A parameter `NAME` is looked for as `prefix` and `NAME`, then
    /// as `NAME`: files of a bare model have no prefix.
    /// # Errors
    /// If a file cannot be read, or is no whole safetensors file.
    pub fn open(paths: &[impl AsRef<Path>], prefix: &str) -> Result<Self> {
        let files = paths.iter().map(|path| TensorFile::open(path.as_ref()));
        Ok(Self { files: files.collect::<Result<_>>()?, prefix: prefix.to_string() })
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> Vec<&str> {
        let names: BTreeSet<&str> =
            self.files.iter().flat_map(|file| file.tensors.keys().map(String::as_str)).collect();
        names.into_iter().collect()
    }

    /// A builder of frozen parameters, each read when it is asked for and cast to `dtype`.
    pub fn builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }

    /// Gives every parameter its value, in its own dtype; nothing changes unless all are there.
    /// Returns the tensors that no parameter took, sorted.
    /// # Errors
    /// If a parameter is missing or has another shape, or a file cannot be read.
    pub fn load_into(&self, params: &[(String, Var)]) -> Result<Vec<String>> {
        let mut missing = Vec::new();
        let mut unused: BTreeSet<&str> = self.names().into_iter().collect();
        for (name, var) in params {
            match self.find(name) {
                None => missing.push(name),
                Some((file, found, entry)) => {
                    file.check_shape(found, entry, var.dims())?;
                    unused.remove(found);
                }
            }
        }
        if let Some(first) = missing.first() {
            return Err(self.missing(first, missing.len(), params.len()).into());
        }
        for (name, var) in params {
            let Some((file, found, entry)) = self.find(name) else { continue };
            let value = file.read(found, entry)?.to_dtype(var.dtype())?.to_device(var.device())?;
            var.set(&value)?;
        }
        Ok(unused.into_iter().map(str::to_string).collect())
    }

    /// The tensor of a parameter, on the CPU, if a file has it.
    /// # Errors
    /// If the file cannot be read or the tensor is no float.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        self.find(name).map(|(file, found, entry)| file.read(found, entry)).transpose()
    }

    fn find(&self, name: &str) -> Option<(&TensorFile, &str, &Entry)> {
        [format!("{}{name}", self.prefix), name.to_string()].into_iter().find_map(|name| {
            self.files.iter().find_map(|file| {
                let (found, entry) = file.tensors.get_key_value(&name)?;
                Some((file, found.as_str(), entry))
            })
        })
    }

    fn missing(&self, first: &str, n_missing: usize, n_params: usize) -> WeightsError {
        let first = format!("{}{first}", self.prefix);
        WeightsError::Missing { first, n_missing, n_params, n_tensors: self.names().len() }
    }
}

impl SimpleBackend for Checkpoint {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let missing = || crate::Error::from(self.missing(name, 1, 1));
        let (file, found, entry) = self.find(name).ok_or_else(missing)?;
        file.check_shape(found, entry, shape.dims())?;
        file.read(found, entry)?.to_dtype(dtype)?.to_device(device)
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let missing = || crate::Error::from(self.missing(name, 1, 1));
        self.tensor(name)?.ok_or_else(missing)?.to_dtype(dtype)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.find(name).is_some()
    }
}

impl TensorFile {
    fn open(path: &Path) -> Result<Self> {
        let io = |source| WeightsError::Io { path: path.to_path_buf(), source };
        let mut file = File::open(path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let damaged = |what: String| WeightsError::Damaged {
            path: path.to_path_buf(),
            n_bytes: file_bytes,
            what,
        };
        let mut length = [0; 8];
        if file_bytes < 8 {
            return Err(damaged("the length of the header is cut short".to_string()).into());
        }
        file.read_exact(&mut length).map_err(io)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES.min(file_bytes - 8) {
            return Err(damaged(format!("a header of {header_bytes} bytes")).into());
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(io)?;
        let tensors = entries(&header, 8 + header_bytes, file_bytes).map_err(damaged)?;
        Ok(Self { path: path.to_path_buf(), file: Mutex::new(file), tensors })
    }

    fn check_shape(&self, name: &str, entry: &Entry, asked: &[usize]) -> Result<()> {
        if entry.shape == asked {
            return Ok(());
        }
        let (name, path) = (name.to_string(), self.path.clone());
        let (found, asked) = (entry.shape.clone(), asked.to_vec());
        Err(WeightsError::Shape { name, path, found, asked }.into())
    }

    fn read(&self, name: &str, entry: &Entry) -> Result<Tensor> {
        let Some((dtype, _)) = float(&entry.dtype) else {
            let (name, path) = (name.to_string(), self.path.clone());
            return Err(WeightsError::DType { name, path, found: entry.dtype.clone() }.into());
        };
        let mut data = vec![0; entry.n_bytes as usize];
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let read = file.seek(SeekFrom::Start(entry.start)).and_then(|_| file.read_exact(&mut data));
        read.map_err(|source| WeightsError::Io { path: self.path.clone(), source })?;
        Ok(Tensor::from_raw_buffer(&data, dtype, &entry.shape, &Device::Cpu)?)
    }
}

/// A float dtype by its name in the header, and its bytes.
fn float(name: &str) -> Option<(DType, u64)> {
    match name {
        "F64" => Some((DType::F64, 8)),
        "F32" => Some((DType::F32, 4)),
        "BF16" => Some((DType::BF16, 2)),
        "F16" => Some((DType::F16, 2)),
        _ => None,
    }
}

/// The tensors that a header names, each of which must lie inside the file.
fn entries(
    header: &[u8],
    data_start: u64,
    file_bytes: u64,
) -> std::result::Result<BTreeMap<String, Entry>, String> {
    let text = std::str::from_utf8(header).map_err(|error| format!("header: {error}"))?;
    let Ok(Value::Object(fields)) = json::from_str::<Value>(text) else {
        return Err("the header is no JSON object".to_string());
    };
    let mut tensors = BTreeMap::new();
    for (name, value) in fields.iter().filter(|(name, _)| *name != "__metadata__") {
        let entry = entry(value, data_start).ok_or_else(|| format!("the entry of `{name}`"))?;
        let n_elems = entry.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim as u64));
        let n_elems = n_elems.ok_or_else(|| format!("the shape of `{name}`"))?;
        let wanted = float(&entry.dtype).map(|(_, size)| n_elems.checked_mul(size));
        if wanted.is_some_and(|wanted| wanted != Some(entry.n_bytes)) {
            let Entry { n_bytes, shape, .. } = entry;
            return Err(format!("`{name}` of shape {shape:?} in {n_bytes} bytes"));
        }
        if entry.start.checked_add(entry.n_bytes).is_none_or(|end| end > file_bytes) {
            return Err(format!("`{name}` ends behind the file"));
        }
        tensors.insert(name.clone(), entry);
    }
    let mut places: Vec<(u64, u64)> =
        tensors.values().map(|e: &Entry| (e.start, e.start + e.n_bytes)).collect();
    places.sort_unstable();
    let mut end = data_start;
    for (start, next_end) in places {
        if start != end {
            return Err("tensors that overlap, or a hole between them".to_string());
        }
        end = next_end;
    }
    match end == file_bytes {
        true => Ok(tensors),
        false => Err(format!("{} bytes behind the last tensor", file_bytes - end)),
    }
}

fn entry(value: &Value, data_start: u64) -> Option<Entry> {
    let Value::Object(fields) = value else { return None };
    let (Value::String(dtype), Value::Array(shape), Value::Array(offsets)) =
        (fields.get("dtype")?, fields.get("shape")?, fields.get("data_offsets")?)
    else {
        return None;
    };
    let size = |value: &Value| match value {
        Value::Number(Number::U64(x)) => Some(*x),
        _ => None,
    };
    let [start, end] = offsets.iter().map(size).collect::<Option<Vec<_>>>()?[..] else {
        return None;
    };
    Some(Entry {
        dtype: dtype.clone(),
        shape: shape.iter().map(|dim| usize::try_from(size(dim)?).ok()).collect::<Option<_>>()?,
        start: data_start.checked_add(start)?,
        n_bytes: end.checked_sub(start)?,
    })
}

/// Writes parameters as `prefix` and their names to `path`, whole or not at all, in the form that
/// `transformers` reads.
///
/// *Memory:* a copy of one parameter at a time.
/// # Errors
/// If a parameter is no float, or the system refuses.
pub fn save(params: &[(String, Var)], path: &Path, prefix: &str) -> Result<()> {
    if let Some((name, var)) = params.iter().find(|(_, var)| !var.dtype().is_float()) {
        let (name, dtype) = (name.clone(), var.dtype());
        return Err(WeightsError::NotFloat { name, dtype }.into());
    }
    let named = params.iter().map(|(name, var)| (format!("{prefix}{name}"), var.as_tensor()));
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    // A bare file name has an empty parent, in which no temporary file can be made.
    let target = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new(".").join(path),
        _ => path.to_path_buf(),
    };
    safetensors::serialize_to_file(named, Some(format), &target)
        .map_err(|source| WeightsError::Write { path: path.to_path_buf(), source }.into())
}

/// Writes adapters to `path` under PEFT's names: [`PEFT_PREFIX`], the model's own `prefix`, and theirs.
/// # Errors
/// As [`save`].
pub fn save_adapters(adapters: &[(String, Var)], path: &Path, prefix: &str) -> Result<()> {
    save(adapters, path, &format!("{PEFT_PREFIX}{prefix}"))
}

//! States in safetensors files.
//!
//! `NAME.m`, `NAME.v` and their side planes in the types they have in memory, `NAME.t` the updates
//! applied to a parameter; the metadata says which optimizer they belong to. Parameters themselves
//! are the caller's to save.

use crate::{
    composed,
    config::{Algorithm, Config},
    error::{Result, StateError},
    file::StateFile,
    optimizer::{Optimizer, Param, State},
    price::StateFormat,
    saved::Saved,
};
use candle_core::{DType, Tensor};
use half::bf16;
use safetensors::{Dtype, SafeTensorError, View};
use std::{
    borrow::Cow,
    cell::RefCell,
    collections::{BTreeMap, HashMap, HashSet},
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
};
use tallow_kernels::optim::Rounding;

const FORMAT: &str = "tallow-optim 1";
const ABSENT: &str = "absent";

impl Optimizer {
    /// Writes all states to `path`: first whole to `path.part`, then, once that is on the disk, by
    /// a rename. A crash leaves the old file or the new one.
    ///
    /// *Memory:* none for states in memory; one plane at a time for those in a file; a copy of those
    /// on another device.
    /// # Errors
    /// If the system refuses, or a state was torn by a failed update.
    pub fn save(&self, path: &Path) -> Result<()> {
        let failure = RefCell::new(None);
        let mut views = Vec::new();
        for param in &self.params {
            views.push((format!("{}.t", param.name), Bytes::count(param.t)));
            for (i, plane) in param.plan.planes.iter().enumerate() {
                let name = format!("{}.{}", param.name, plane.suffix);
                let source = self.source(param, i, &failure)?;
                views.push((name, Bytes { dtype: plane.dtype, dims: plane.dims.clone(), source }));
            }
        }
        let part = with_suffix(path, ".part");
        let written = write(views, identity(&self.config), &part);
        // A plane that could not be read was written as zeros: never rename that over a checkpoint.
        let whole = failure.into_inner().map_or(written, Err);
        let result = whole.and_then(|()| rename(&part, path));
        if result.is_err() {
            // What is left of the attempt is of no use, and the next one overwrites it.
            let _ = fs::remove_file(&part);
        }
        Ok(result?)
    }

    /// Replaces all states and counts by those of `path`. The learning rate is not among them.
    ///
    /// *Memory:* the header; of states in a file or on another device, one plane at a time.
    /// # Errors
    /// If the file is cut short, belongs to another optimizer or configuration, or does not hold
    /// the states of exactly these parameters: then the old states are intact. Only a device that
    /// runs out of memory, or a file that the system does not read or write to its end, leaves a
    /// mixture; a parameter that was being written to a state file is then refused as torn.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        let io = |source| StateError::Io { path: path.to_owned(), source };
        let mut from = Saved::open(path)?;
        check_identity(path, &self.config, &from.metadata)?;
        let counts = check_tensors(path, &self.params, &mut from)?;
        for (param, t) in self.params.iter_mut().zip(counts) {
            for (i, plane) in param.plan.planes.iter().enumerate() {
                let name = format!("{}.{}", param.name, plane.suffix);
                match (&mut param.state, self.file.as_ref()) {
                    (State::Ram(planes), _) => from.read(&name, &mut planes[i]).map_err(io)?,
                    (State::File { starts, is_torn }, Some(file)) => {
                        let bytes = from.bytes(&name).map_err(io)?;
                        *is_torn = true;
                        file.write(starts[i], &bytes)?;
                    }
                    (State::File { .. }, None) => unreachable!("a state in a file has a file"),
                    (State::Device(state), _) => {
                        let (dtype, device) = (composed::dtype_of(plane.dtype), param.var.device());
                        let bytes = from.bytes(&name).map_err(io)?;
                        state[i] = Tensor::from_raw_buffer(&bytes, dtype, &plane.dims, device)?;
                    }
                }
            }
            if let State::File { is_torn, .. } = &mut param.state {
                *is_torn = false;
            }
            param.t = t;
        }
        Ok(())
    }

    fn source<'a>(
        &'a self,
        param: &'a Param,
        i: usize,
        failure: &'a RefCell<Option<StateError>>,
    ) -> Result<Source<'a>> {
        match (&param.state, &self.file) {
            (State::Ram(planes), _) => Ok(Source::Ram(&planes[i])),
            (State::File { starts, is_torn: false }, Some(file)) => {
                let (start, n_bytes) = (starts[i], param.plan.planes[i].n_bytes as usize);
                Ok(Source::File { file, start, n_bytes, failure })
            }
            (State::Device(state), _) => Ok(Source::Device(raw(&state[i])?)),
            (State::File { .. }, file) => {
                let path = file.as_ref().map_or_else(PathBuf::new, |f| f.path().to_owned());
                Err(StateError::Torn { path, name: param.name.clone() }.into())
            }
        }
    }
}

/// Writes `part`, and returns once it is on the disk.
fn write(
    views: Vec<(String, Bytes)>,
    metadata: HashMap<String, String>,
    part: &Path,
) -> Result<(), StateError> {
    let io = |source| StateError::Io { path: part.to_owned(), source };
    safetensors::serialize_to_file(views, Some(metadata), part).map_err(|error| match error {
        SafeTensorError::IoError(error) => io(error),
        other => io(io::Error::other(other)),
    })?;
    OpenOptions::new().write(true).open(part).and_then(|file| file.sync_all()).map_err(io)
}

/// Gives `part` its name, and returns once that is on the disk.
fn rename(part: &Path, path: &Path) -> Result<(), StateError> {
    let io = |source| StateError::Io { path: path.to_owned(), source };
    fs::rename(part, path).map_err(io)?;
    // Not every system opens folders.
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    match File::open(folder.unwrap_or(Path::new("."))) {
        Ok(folder) => folder.sync_all().map_err(io),
        Err(_) => Ok(()),
    }
}

/// A tensor to be written.
struct Bytes<'a> {
    dtype: Dtype,
    dims: Vec<usize>,
    source: Source<'a>,
}

enum Source<'a> {
    Count([u8; 8]),
    Ram(&'a [u8]),
    Device(Vec<u8>),
    File {
        file: &'a StateFile,
        start: u64,
        n_bytes: usize,
        /// Where a failure waits: [`View::data`] cannot return one.
        failure: &'a RefCell<Option<StateError>>,
    },
}

impl Bytes<'_> {
    fn count(t: u64) -> Self {
        let source = Source::Count((t as i64).to_le_bytes());
        Bytes { dtype: Dtype::I64, dims: Vec::new(), source }
    }
}

impl View for Bytes<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.dims
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match &self.source {
            Source::Count(bytes) => Cow::Borrowed(bytes),
            Source::Ram(bytes) => Cow::Borrowed(bytes),
            Source::Device(bytes) => Cow::Borrowed(bytes),
            Source::File { file, start, n_bytes, failure } => {
                let mut bytes = vec![0; *n_bytes];
                if let Err(error) = file.read(*start, &mut bytes) {
                    failure.borrow_mut().get_or_insert(error);
                }
                Cow::Owned(bytes)
            }
        }
    }

    fn data_len(&self) -> usize {
        match &self.source {
            Source::Count(bytes) => bytes.len(),
            Source::Ram(bytes) => bytes.len(),
            Source::Device(bytes) => bytes.len(),
            Source::File { n_bytes, .. } => *n_bytes,
        }
    }
}

/// Which optimizer a state belongs to: all that gives its numbers their meaning.
fn identity(config: &Config) -> HashMap<String, String> {
    let rounding = |rounding| match rounding {
        Rounding::Nearest => "nearest",
        Rounding::Stochastic => "stochastic",
        Rounding::Kahan => "kahan",
    };
    let algorithm = match config.algorithm {
        Algorithm::AdamW { beta1, beta2, eps } => format!("adamw {beta1} {beta2} {eps:e}"),
        Algorithm::Adam { beta1, beta2, eps } => format!("adam {beta1} {beta2} {eps:e}"),
        Algorithm::Sgd { momentum, nesterov: false } => format!("sgd {momentum}"),
        Algorithm::Sgd { momentum, nesterov: true } => format!("sgd {momentum} nesterov"),
        Algorithm::Lion { beta1, beta2 } => format!("lion {beta1} {beta2}"),
        Algorithm::Adafactor { beta2_decay, eps1, eps2, d } => {
            let eps1 = eps1.map_or("type".into(), |eps1| format!("{eps1:e}"));
            format!("adafactor {beta2_decay} {eps1} {eps2:e} {d}")
        }
    };
    let state = match config.format {
        StateFormat::F32 => "f32".into(),
        StateFormat::Bf16(how) => format!("bf16 {}", rounding(how)),
        StateFormat::Bits8 { block_elems } => format!("8bit {block_elems}"),
    };
    let by_chance = config.weights == Rounding::Stochastic
        || config.format == StateFormat::Bf16(Rounding::Stochastic);
    let seed = if by_chance { config.seed.to_string() } else { "none".into() };
    let weights = rounding(config.weights).into();
    [
        ("format", FORMAT.into()),
        ("algorithm", algorithm),
        ("state", state),
        ("weights", weights),
        ("seed", seed),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

fn check_identity(
    path: &Path,
    config: &Config,
    found: &BTreeMap<String, String>,
) -> Result<(), StateError> {
    let wanted = identity(config);
    // The format first: a file of another kind lacks the other keys as well.
    for key in ["format", "algorithm", "state", "weights", "seed"] {
        let found = found.get(key).map_or(ABSENT, String::as_str);
        if found != wanted[key] {
            let (path, key) = (path.to_owned(), key.to_owned());
            let (found, wanted) = (found.to_owned(), wanted[&key].clone());
            return Err(StateError::Foreign { path, key, found, wanted });
        }
    }
    Ok(())
}

/// Checks that the file holds the states of exactly these parameters; returns their counts.
fn check_tensors(path: &Path, params: &[Param], from: &mut Saved) -> Result<Vec<u64>, StateError> {
    let error = |tensor: &str, found: String, wanted: String| StateError::Tensor {
        path: path.to_owned(),
        tensor: tensor.to_owned(),
        found,
        wanted,
    };
    let say = |dtype: &str, dims: &[usize]| format!("{dtype} {dims:?}");
    let mut known = HashSet::new();
    let mut counts = Vec::with_capacity(params.len());
    for param in params {
        let count = [("t", Dtype::I64, &[] as &[usize])];
        let planes = param.plan.planes.iter().map(|p| (p.suffix, p.dtype, p.dims.as_slice()));
        for (suffix, dtype, dims) in count.into_iter().chain(planes) {
            let name = format!("{}.{suffix}", param.name);
            let dtype = format!("{dtype:?}"); // as headers have it
            let wanted = say(&dtype, dims);
            let Some(info) = from.tensors.get(&name) else {
                return Err(error(&name, ABSENT.into(), wanted));
            };
            if (&info.dtype, info.shape.as_slice()) != (&dtype, dims) {
                return Err(error(&name, say(&info.dtype, &info.shape), wanted));
            }
            if suffix == "t" {
                let io = |source| StateError::Io { path: path.to_owned(), source };
                let t = from.bytes(&name).map_err(io)?;
                let t = t.try_into().map_or(-1, i64::from_le_bytes);
                let count = u64::try_from(t);
                counts.push(count.map_err(|_| error(&name, t.to_string(), "a count".into()))?);
            }
            known.insert(name);
        }
    }
    match from.tensors.iter().find(|(name, _)| !known.contains(*name)) {
        Some((foreign, info)) => Err(error(foreign, say(&info.dtype, &info.shape), ABSENT.into())),
        None => Ok(counts),
    }
}

/// A tensor's bytes as they are in a checkpoint; it is f32, f64 or bf16.
fn raw(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match flat.dtype() {
        DType::F64 => flat.to_vec1::<f64>()?.into_iter().flat_map(f64::to_le_bytes).collect(),
        DType::BF16 => flat.to_vec1::<bf16>()?.into_iter().flat_map(bf16::to_le_bytes).collect(),
        _ => flat.to_vec1::<f32>()?.into_iter().flat_map(f32::to_le_bytes).collect(),
    })
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

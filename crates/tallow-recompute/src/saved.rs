//! How the input of a segment waits for its recomputation.

use crate::{
    Error, Result,
    digest::{CHUNK_ELEMS, write},
    ops::bytes_of,
};
use candle_core::{DType, Device, Shape, Tensor};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

/// Where and how the float inputs of a segment are kept between its forward and its backward.
/// Integer inputs (token ids) are kept as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Saved {
    /// The tensor itself, no copy.
    AsIs,
    /// Rounded to bf16, 2 bytes an element. The first forward sees the rounded input too, so that
    /// forward and backward agree; both then differ from plain candle by that rounding.
    Bf16,
    /// In host memory. The same as `AsIs` on a CPU.
    Host,
    /// In a file of its own in this folder, which must exist: 0 bytes held. The file goes with the
    /// last graph or tape that needs it; one left by a crash is named `recompute-<process>-<n>.part`
    /// and is never taken for another.
    File(PathBuf),
}

/// An input that waits.
pub(crate) enum Held {
    Tensor(Tensor),
    Cast { x: Tensor, dtype: DType },
    Host { x: Tensor, device: Device },
    File { file: Part, dtype: DType, shape: Shape, device: Device },
}

impl Held {
    /// Puts `x` away, detached, and returns what the first forward must see.
    pub(crate) fn new(x: &Tensor, saved: &Saved) -> Result<(Held, Tensor)> {
        let x = x.detach();
        let (dtype, device) = (x.dtype(), x.device().clone());
        match saved {
            _ if !dtype.is_float() => Ok((Held::Tensor(x.clone()), x)),
            Saved::Bf16 if dtype != DType::BF16 => {
                let small = x.to_dtype(DType::BF16)?;
                let seen = small.to_dtype(dtype)?;
                Ok((Held::Cast { x: small, dtype }, seen))
            }
            Saved::Host if !device.is_cpu() => {
                Ok((Held::Host { x: x.to_device(&Device::Cpu)?, device }, x))
            }
            Saved::File(folder) => {
                let file = Part::write(folder, &x)?;
                Ok((Held::File { file, dtype, shape: x.shape().clone(), device }, x))
            }
            Saved::AsIs | Saved::Bf16 | Saved::Host => Ok((Held::Tensor(x.clone()), x)),
        }
    }

    pub(crate) fn load(&self) -> Result<Tensor> {
        match self {
            Held::Tensor(x) => Ok(x.clone()),
            Held::Cast { x, dtype } => Ok(x.to_dtype(*dtype)?),
            Held::Host { x, device } => Ok(x.to_device(device)?),
            Held::File { file, dtype, shape, device } => file.read(*dtype, shape, device),
        }
    }
}

/// A file that is removed when it is dropped.
pub(crate) struct Part {
    path: PathBuf,
}

static N_PARTS: AtomicU64 = AtomicU64::new(0);

impl Part {
    fn write(folder: &Path, x: &Tensor) -> Result<Part> {
        let (part, file) = Part::create(folder)?;
        let mut out = BufWriter::new(file);
        // Candle hides which of its errors are the system's: the file is named for all of them.
        write(x, &mut out)
            .map_err(io::Error::other)
            .and_then(|()| out.flush())
            .map_err(|source| part.error(source))?;
        Ok(part)
    }

    fn create(folder: &Path) -> Result<(Part, File)> {
        loop {
            let n = N_PARTS.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("recompute-{}-{n}.part", process::id()));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => return Ok((Part { path }, file)),
                // Left by a process that crashed under the same number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(Error::File { path, source }),
            }
        }
    }

    /// One chunk is held beside the tensor.
    fn read(&self, dtype: DType, shape: &Shape, device: &Device) -> Result<Tensor> {
        let file = File::open(&self.path).map_err(|source| self.error(source))?;
        let mut file = BufReader::new(file);
        let n_elems = shape.elem_count();
        let x = Tensor::zeros(n_elems, dtype, device)?;
        for start in (0..n_elems).step_by(CHUNK_ELEMS) {
            let n = CHUNK_ELEMS.min(n_elems - start);
            let mut bytes = vec![0; n * dtype.size_in_bytes()];
            file.read_exact(&mut bytes).map_err(|source| self.error(source))?;
            x.slice_set(&Tensor::from_raw_buffer(&bytes, dtype, &[n], device)?, 0, start)?;
        }
        debug_assert_eq!(bytes_of(&x), (n_elems * dtype.size_in_bytes()) as u64);
        Ok(x.reshape(shape)?)
    }

    fn error(&self, source: io::Error) -> Error {
        Error::File { path: self.path.clone(), source }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Nothing to be done about a file that does not go.
        let _ = fs::remove_file(&self.path);
    }
}

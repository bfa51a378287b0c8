//! States in a file, streamed through a window.
//!
//! The file is scratch. It is made anew by each optimizer, locked while that lives, and removed
//! with it; no later run ever reads it, so nothing that a crash tore can be taken for a state. What
//! outlives a crash is the last checkpoint ([`crate::Optimizer::save`]). Inside a run, a parameter
//! whose update failed half way (a full disk) is marked torn, and refused until a checkpoint is
//! loaded.

use crate::{
    error::{ConfigError, Result, StateError},
    fused::{Planes, Visit},
    optimizer::{Param, State},
    planes::Plan,
};
use std::{
    fmt,
    fs::{File, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};
use tallow_kernels::optim::CHUNK_ELEMS;

/// Planes start at multiples of this, a page.
const ALIGN_BYTES: u64 = 4096;

pub(crate) struct StateFile {
    file: File,
    path: PathBuf,
    window: Vec<u8>,
}

impl StateFile {
    /// Makes the file, gives every parameter its place in it, and fills it with zeros.
    pub(crate) fn create(path: &Path, window_bytes: u64, params: &mut [Param]) -> Result<Self> {
        let (mut end, mut most_bytes) = (0u64, 0);
        for param in params.iter_mut() {
            let n_elems = param.var.elem_count();
            let least_bytes = param.plan.bytes_of(n_elems.min(CHUNK_ELEMS) as u64);
            if least_bytes > window_bytes {
                let name = param.name.clone();
                return Err(ConfigError::Window { window_bytes, name, least_bytes }.into());
            }
            most_bytes = largest_chunk_bytes(&param.plan, n_elems, window_bytes).max(most_bytes);
            let starts = param.plan.planes.iter().map(|plane| {
                let start = end;
                end = (start + plane.n_bytes).next_multiple_of(ALIGN_BYTES);
                start
            });
            param.state = State::File { starts: starts.collect(), is_torn: false };
        }
        let io = |source| StateError::Io { path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).read(true).write(true).open(path);
        let file = file.map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(StateError::InUse { path: path.to_owned() }.into());
            }
            Err(TryLockError::Error(error)) => return Err(io(error).into()),
        }
        // Down to nothing first: what is then added reads as zeros.
        let state = Self { file, path: path.to_owned(), window: vec![0; most_bytes as usize] };
        state.file.set_len(0).and_then(|()| state.file.set_len(end)).map_err(io)?;
        Ok(state)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn window_bytes(&self) -> u64 {
        self.window.len() as u64
    }

    /// The state of one parameter.
    pub(crate) fn window<'a>(
        &'a mut self,
        name: &str,
        starts: &'a [u64],
        is_torn: &'a mut bool,
    ) -> Result<Window<'a>> {
        if *is_torn {
            let (path, name) = (self.path.clone(), name.to_owned());
            return Err(StateError::Torn { path, name }.into());
        }
        Ok(Window { file: self, starts, is_torn })
    }

    /// Fills `bytes` from `start` on.
    pub(crate) fn read(&self, start: u64, bytes: &mut [u8]) -> Result<(), StateError> {
        let mut file = &self.file;
        let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(bytes));
        read.map_err(|source| self.failed(source))
    }

    /// Writes `bytes` from `start` on.
    pub(crate) fn write(&self, start: u64, bytes: &[u8]) -> Result<(), StateError> {
        let mut file = &self.file;
        let written = file.seek(SeekFrom::Start(start)).and_then(|_| file.write_all(bytes));
        written.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> StateError {
        StateError::Io { path: self.path.clone(), source }
    }
}

/// Bytes of what is streamed at once of a parameter.
pub(crate) fn largest_chunk_bytes(plan: &Plan, n_elems: usize, window_bytes: u64) -> u64 {
    plan.bytes_of(chunk_elems(plan, n_elems, window_bytes) as u64)
}

impl fmt::Debug for StateFile {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "StateFile({}, window of {} bytes)", self.path.display(), self.window.len())
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        // Scratch that cannot be removed harms nobody: the next optimizer empties it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// One parameter's state, a window at a time.
pub(crate) struct Window<'a> {
    file: &'a mut StateFile,
    starts: &'a [u64],
    is_torn: &'a mut bool,
}

impl Planes for Window<'_> {
    fn each(&mut self, plan: &Plan, n_elems: usize, f: &mut Visit<'_>) -> Result<()> {
        let chunk = chunk_elems(plan, n_elems, self.file.window_bytes());
        let mut window = std::mem::take(&mut self.file.window);
        *self.is_torn = true;
        let result = (0..n_elems).step_by(chunk.max(1)).try_for_each(|first| {
            let n = chunk.min(n_elems - first);
            let mut planes = split(&mut window, plan, n);
            let at = |i: usize| self.starts[i] + plan.planes[i].bytes_of(first as u64);
            for (i, plane) in planes.iter_mut().enumerate() {
                self.file.read(at(i), plane)?;
            }
            f(first, n, planes);
            for (i, plane) in split(&mut window, plan, n).into_iter().enumerate() {
                self.file.write(at(i), plane)?;
            }
            Ok::<(), StateError>(())
        });
        self.file.window = window;
        *self.is_torn = result.is_err();
        Ok(result?)
    }
}

/// The most elements whose state fits the window: all, or a multiple of the kernels' chunk.
fn chunk_elems(plan: &Plan, n_elems: usize, window_bytes: u64) -> usize {
    if plan.bytes_of(n_elems as u64) <= window_bytes {
        return n_elems;
    }
    let n_chunks = window_bytes / plan.bytes_of(CHUNK_ELEMS as u64);
    n_chunks as usize * CHUNK_ELEMS
}

/// The planes of `n_elems` elements, one behind the other in the window.
fn split<'a>(window: &'a mut [u8], plan: &Plan, n_elems: usize) -> Vec<&'a mut [u8]> {
    let mut rest = window;
    let mut planes = Vec::with_capacity(plan.planes.len());
    for plane in &plan.planes {
        let (head, tail) = rest.split_at_mut(plane.bytes_of(n_elems as u64) as usize);
        planes.push(head);
        rest = tail;
    }
    planes
}

#[cfg(test)]
mod tests {
    use crate::{Algorithm, Config, Error, Optimizer, Place, StateError};
    use candle_core::{DType, Device, Tensor, Var};
    use std::{
        fs::{self, File, OpenOptions},
        path::PathBuf,
    };

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("tallow-optim-file-{}-{name}", std::process::id()))
    }

    fn ones() -> Tensor {
        Tensor::ones(5000, DType::F32, &Device::Cpu).expect("ones")
    }

    /// An optimizer of `a` and `b` with a state file, one update of `a`, and its checkpoint.
    fn saved(state: &str, checkpoint: &str) -> Optimizer {
        let params = ["a", "b"].map(|n| (n.into(), Var::from_tensor(&ones()).expect("a copy")));
        let place = Place::File { path: path(state), window_bytes: 1 << 15 };
        let config = Config { place, ..Config::new(Algorithm::ADAMW, 0.1) };
        let mut optimizer = Optimizer::new(&params, config).expect("sound");
        optimizer.step_one("a", &ones()).expect("it fits");
        optimizer.save(&path(checkpoint)).expect("saved");
        optimizer
    }

    /// Gives the optimizer another handle to its state file, and returns the old one.
    fn swap(optimizer: &mut Optimizer, file: File) -> File {
        let state = optimizer.file.as_mut().expect("the state is in a file");
        std::mem::replace(&mut state.file, file)
    }

    #[test]
    fn a_failed_write_is_torn_until_a_checkpoint_is_loaded() {
        let mut optimizer = saved("torn", "torn-checkpoint");
        let good = swap(&mut optimizer, File::open(path("torn")).expect("readable"));
        let failed = optimizer.step_one("a", &ones());
        assert!(matches!(failed, Err(Error::State(StateError::Io { .. }))), "{failed:?}");
        assert_eq!(optimizer.n_updates("a"), Some(1));
        swap(&mut optimizer, good);

        let torn = |result: crate::Result<()>| matches!(result, Err(Error::State(StateError::Torn { name, .. })) if name == "a");
        assert!(torn(optimizer.step_one("a", &ones())));
        assert!(torn(optimizer.save(&path("never"))) && !path("never").exists());
        optimizer.step_one("b", &ones()).expect("only `a` was torn");
        optimizer.load(&path("torn-checkpoint")).expect("its own");
        fs::remove_file(path("torn-checkpoint")).expect("saved");
        optimizer.step_one("a", &ones()).expect("whole again");
        assert_eq!((optimizer.n_updates("a"), optimizer.n_updates("b")), (Some(2), Some(0)));
    }

    #[test]
    fn a_state_that_cannot_be_read_replaces_no_checkpoint() {
        let mut optimizer = saved("unreadable", "unreadable-checkpoint");
        let before = fs::read(path("unreadable-checkpoint")).expect("saved");
        optimizer.step_one("a", &ones()).expect("it fits");
        let write_only = OpenOptions::new().write(true).open(path("unreadable"));
        swap(&mut optimizer, write_only.expect("writable"));
        let failed = optimizer.save(&path("unreadable-checkpoint"));
        assert!(matches!(failed, Err(Error::State(StateError::Io { .. }))), "{failed:?}");
        assert_eq!(before, fs::read(path("unreadable-checkpoint")).expect("still there"));
        fs::remove_file(path("unreadable-checkpoint")).expect("still there");
        assert!(!path("unreadable-checkpoint.part").exists());
    }
}

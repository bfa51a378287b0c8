//! The checkpoints of one run, in a folder of their own.

use crate::{Error, Record, Result, seal};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The record's file.
const STATE: &str = "state.txt";
/// The record's line with the format.
const FORMAT: &str = "format";
/// What is not finished, or about to go.
const PART: &str = ".part";

pub(crate) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    |source| Error::Io { path, source }
}

/// What all checkpoints of a program have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// How their folders' names begin; others are left alone.
    pub prefix: &'static str,
    /// Version of what is in them.
    pub format: u32,
    /// The line of the record by which one is the best: the lowest number. Those without it are not
    /// compared.
    pub best_by: &'static str,
}

impl Kind {
    /// The record of the checkpoint in `folder`, all of whose files are as they were written.
    /// # Errors
    /// If they are not, or it is of another format.
    pub fn read(&self, folder: &Path) -> Result<Record> {
        seal::check(folder)?;
        self.record(folder)
    }

    fn record(&self, folder: &Path) -> Result<Record> {
        let path = folder.join(STATE);
        let text = fs::read_to_string(&path).map_err(io_error(&path))?;
        let record = Record::parse(&text, &path)?;
        match record.get(FORMAT)? {
            found if found == self.format => Ok(record),
            found => Err(Error::Format { path: folder.to_owned(), found, wanted: self.format }),
        }
    }
}

/// The checkpoints of one run, in a folder of their own.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    kind: Kind,
    folder: PathBuf,
    keep: usize,
}

/// The newest whole checkpoint, and what was passed over on the way to it.
#[derive(Debug)]
pub struct Newest {
    /// Its folder.
    pub path: PathBuf,
    /// Newer ones that a crash or a damaged disk left, and what is wrong with each.
    pub passed_over: Vec<Error>,
}

impl Checkpoints {
    /// In `folder`, which is made; what a crash left half written there goes. Of those that are saved
    /// the last `keep` stay, one at least, and the best.
    /// # Errors
    /// If the folder cannot be made or read.
    pub fn open(kind: Kind, folder: impl Into<PathBuf>, keep: usize) -> Result<Self> {
        let all = Self { kind, folder: folder.into(), keep: keep.max(1) };
        fs::create_dir_all(&all.folder).map_err(io_error(&all.folder))?;
        for name in all.names(|name| name.ends_with(PART))? {
            let path = all.folder.join(name);
            fs::remove_dir_all(&path).map_err(io_error(&path))?;
        }
        Ok(all)
    }

    /// Those in `folder`, to read; nothing is made or removed.
    pub fn look(kind: Kind, folder: impl Into<PathBuf>) -> Self {
        Self { kind, folder: folder.into(), keep: usize::MAX }
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Saves what `write` puts into the folder that it is given, with `record` beside; the new folder,
    /// which is called `name` after the prefix. Sorted as text, the last name is the newest: numbers in
    /// it are padded. One of the same name is replaced.
    /// # Errors
    /// If the system refuses, or `write` fails. Earlier checkpoints are then untouched.
    pub fn save<E: From<Error>>(
        &self,
        name: &str,
        record: Record,
        write: impl FnOnce(&Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<PathBuf, E> {
        let name = format!("{}{name}", self.kind.prefix);
        let (path, part) = (self.folder.join(&name), self.folder.join(format!("{name}{PART}")));
        let written = self.write(record, write, &part, &path);
        if written.is_err() {
            // What is left of the attempt takes room, and says nothing.
            let _ = fs::remove_dir_all(&part);
        }
        written?;
        self.prune()?;
        Ok(path)
    }

    fn write<E: From<Error>>(
        &self,
        mut record: Record,
        write: impl FnOnce(&Path) -> std::result::Result<(), E>,
        part: &Path,
        path: &Path,
    ) -> std::result::Result<(), E> {
        if part.exists() {
            fs::remove_dir_all(part).map_err(io_error(part))?;
        }
        fs::create_dir(part).map_err(io_error(part))?;
        write(part)?;
        record.put(FORMAT, self.kind.format);
        let state = part.join(STATE);
        fs::write(&state, record.text()).map_err(io_error(&state))?;
        if path.exists() {
            // The same state, or one that a damaged disk has spoilt.
            self.discard(path)?;
        }
        Ok(seal::close(part, path)?)
    }

    /// The newest that is as it was written.
    /// # Errors
    /// If there is none, or the folder cannot be read.
    pub fn newest(&self) -> Result<Newest> {
        let mut passed_over = Vec::new();
        for name in self.names(is_checkpoint)?.into_iter().rev() {
            let path = self.folder.join(name);
            match seal::check(&path) {
                Ok(()) => return Ok(Newest { path, passed_over }),
                Err(error) => passed_over.push(error),
            }
        }
        match passed_over.pop() {
            Some(error) => Err(error),
            None => Err(Error::None { path: self.folder.clone() }),
        }
    }

    /// Removes all but the last and the best.
    fn prune(&self) -> Result<()> {
        let names = self.names(is_checkpoint)?;
        let judged = names.iter().filter_map(|name| {
            let record = self.kind.record(&self.folder.join(name)).ok()?;
            Some((record.find::<f64>(self.kind.best_by).ok()??, name.clone()))
        });
        let best = judged.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name);
        let n_old = names.len().saturating_sub(self.keep);
        for name in names[..n_old].iter().filter(|name| Some(*name) != best.as_ref()) {
            self.discard(&self.folder.join(name))?;
        }
        Ok(())
    }

    /// Takes the name away first: a crash on the way leaves no checkpoint with files missing.
    fn discard(&self, path: &Path) -> Result<()> {
        let mut part = path.as_os_str().to_owned();
        part.push(".gone");
        part.push(PART);
        let part = PathBuf::from(part);
        fs::rename(path, &part).map_err(io_error(path))?;
        fs::remove_dir_all(&part).map_err(io_error(&part))?;
        Ok(())
    }

    /// Sorted, the newest last.
    fn names(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(io_error(&self.folder))? {
            let entry = entry.map_err(io_error(&self.folder))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(self.kind.prefix) && wanted(&name) {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

fn is_checkpoint(name: &str) -> bool {
    !name.ends_with(PART)
}

//! A run on the disk: everything that a resumed one needs to end with the same bits.
//!
//! A checkpoint is a folder, `update-NUMBER-EPOCH`, with `weights.safetensors` (master parameters and
//! running statistics, which candle and PyTorch read), `optimizer.safetensors`, `average.safetensors` (if an
//! average of the weights is kept), `state.txt` (counts,
//! the place in the data, the loss scale) and a seal with checksums. It is whole or not there: a crash
//! leaves the one before. Masks, orders and stochastic rounding are functions of these counts, and
//! an update ends its window, so there is nothing else to save.

mod record;
mod seal;

use crate::{Error, Progress, Result, trainer::Trainer};
use candle_core::Var;
use record::{Record, Unreadable};
use seal::Broken;
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};
use tallow_models::{Segments, weights};
use tallow_optim::Average;
use tallow_precision::LossScale;

const FORMAT: u32 = 1;
const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const AVERAGE: &str = "average.safetensors";
const STATE: &str = "state.txt";
/// What is not finished, or about to go.
const PART: &str = ".part";

/// What is wrong with a checkpoint, or with its folder.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system could not read or write it.
    #[error("`{}`: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It is not what was written.
    #[error("checkpoint `{}` is damaged: {how}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How it differs.
        how: String,
    },
    /// Of another version.
    #[error("checkpoint `{}` has format {found}, this version reads {FORMAT}", path.display())]
    Format {
        /// The folder.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
    /// There is none.
    #[error("`{}` holds no whole checkpoint", path.display())]
    None {
        /// The folder of checkpoints.
        path: PathBuf,
    },
}

impl From<Broken> for CheckpointError {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Io(path, source) => Self::Io { path, source },
            Broken::Differs(path, how) => Self::Damaged { path, how },
        }
    }
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    |source| CheckpointError::Io { path, source }
}

/// The checkpoints of one run, in a folder of their own.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

/// The newest whole checkpoint, and what was passed over on the way to it.
#[derive(Debug)]
pub struct Newest {
    /// Its folder.
    pub path: PathBuf,
    /// Newer ones that a crash or a damaged disk left, and what is wrong with each.
    pub passed_over: Vec<CheckpointError>,
}

impl Checkpoints {
    /// In `folder`, which is made; what a crash left half written there goes. Of those that are saved
    /// the last `keep` stay, one at least, and the one with the lowest held-out loss.
    /// # Errors
    /// If the folder cannot be made or read.
    pub fn open(folder: impl Into<PathBuf>, keep: usize) -> Result<Self> {
        let all = Self { folder: folder.into(), keep: keep.max(1) };
        fs::create_dir_all(&all.folder).map_err(io_error(&all.folder))?;
        for name in all.names(|name| name.ends_with(PART))? {
            let path = all.folder.join(name);
            fs::remove_dir_all(&path).map_err(io_error(&path))?;
        }
        Ok(all)
    }

    /// Those in `folder`, to read; nothing is made or removed.
    pub fn look(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), keep: usize::MAX }
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Saves `trainer` and the run's `progress`; the new folder.
    ///
    /// *Memory:* one parameter; what [`tallow_optim::Optimizer::save`] says.
    /// # Errors
    /// If the system refuses. Earlier checkpoints are then untouched.
    pub fn save<M: Segments>(&self, trainer: &Trainer<M>, progress: &Progress) -> Result<PathBuf> {
        let name = format!("update-{:010}-{}", trainer.n_windows(), progress.cursor.epoch);
        let (path, part) = (self.folder.join(&name), self.folder.join(format!("{name}{PART}")));
        let written = self.write(trainer, progress, &part, &path);
        if written.is_err() {
            // What is left of the attempt takes room, and says nothing.
            let _ = fs::remove_dir_all(&part);
        }
        written?;
        self.prune()?;
        Ok(path)
    }

    fn write<M: Segments>(
        &self,
        trainer: &Trainer<M>,
        progress: &Progress,
        part: &Path,
        path: &Path,
    ) -> Result<()> {
        if part.exists() {
            fs::remove_dir_all(part).map_err(io_error(part))?;
        }
        fs::create_dir(part).map_err(io_error(part))?;
        weights::save(&variables(trainer), &part.join(WEIGHTS), "")?;
        trainer.optimizer.save(&part.join(OPTIMIZER))?;
        if trainer.recipe.ema_decay.is_some() {
            weights::save(&trainer.average.averages(), &part.join(AVERAGE), "")?;
        }
        let state = part.join(STATE);
        fs::write(&state, record(trainer, progress).text()).map_err(io_error(&state))?;
        if path.exists() {
            // The same state, or one that a damaged disk has spoilt.
            self.discard(path)?;
        }
        Ok(seal::close(part, path).map_err(CheckpointError::from)?)
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
                Err(broken) => passed_over.push(broken.into()),
            }
        }
        match passed_over.pop() {
            Some(error) => Err(error.into()),
            None => Err(CheckpointError::None { path: self.folder.clone() }.into()),
        }
    }

    /// Removes all but the last and the best.
    fn prune(&self) -> Result<()> {
        let names = self.names(is_checkpoint)?;
        let judged = names.iter().filter_map(|name| {
            let record = read(&self.folder.join(name)).ok()?;
            Some((record.find::<f64>("held_out_loss").ok()??, name.clone()))
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
            if name.starts_with("update-") && wanted(&name) {
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

/// Master parameters and running statistics, sorted by name.
fn variables<M>(trainer: &Trainer<M>) -> Vec<(String, Var)> {
    let mut all = trainer.masters.params();
    all.extend(trainer.buffers.iter().cloned());
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all.dedup_by(|a, b| a.0 == b.0);
    all
}

fn record<M: Segments>(trainer: &Trainer<M>, progress: &Progress) -> Record {
    let mut record = Record::default();
    record.put("format", FORMAT);
    record.put("n_windows", trainer.n_windows);
    record.put("n_updates", trainer.n_updates);
    record.put("micro_batch", trainer.sizing.micro_batch());
    record.put_scale(trainer.scale.state());
    record.put_cursor(progress.cursor);
    record.put("n_samples", progress.n_samples);
    record.put("training_nanos", progress.training.as_nanos() as u64);
    record.put("last_loss", progress.last_loss);
    record.put("n_since_best", progress.n_since_best);
    for (name, value) in [
        ("first_loss", progress.first_loss),
        ("held_out_loss", progress.held_out_loss),
        ("best_loss", progress.best_loss),
    ] {
        if let Some(value) = value {
            record.put(name, value);
        }
    }
    record
}

fn read(folder: &Path) -> std::result::Result<Record, CheckpointError> {
    let path = folder.join(STATE);
    let text = fs::read_to_string(&path).map_err(io_error(&path))?;
    let record = Record::parse(&text).map_err(unreadable(&path))?;
    match record.get("format").map_err(unreadable(&path))? {
        FORMAT => Ok(record),
        found => Err(CheckpointError::Format { path: folder.to_owned(), found }),
    }
}

fn unreadable(path: &Path) -> impl Fn(Unreadable) -> CheckpointError {
    let path = path.to_owned();
    move |Unreadable(line)| CheckpointError::Damaged {
        path: path.clone(),
        how: format!("`{line}` is missing or cannot be read"),
    }
}

fn progress(record: &Record) -> std::result::Result<Progress, Unreadable> {
    Ok(Progress {
        cursor: record.cursor()?,
        n_samples: record.get("n_samples")?,
        first_loss: record.find("first_loss")?,
        last_loss: record.get("last_loss")?,
        held_out_loss: record.find("held_out_loss")?,
        best_loss: record.find("best_loss")?,
        // Absent in files of versions that did not stop early.
        n_since_best: record.find("n_since_best")?.unwrap_or(0),
        training: Duration::from_nanos(record.get("training_nanos")?),
    })
}

impl<M: Segments> Trainer<M> {
    /// Goes on from the checkpoint in `folder`: weights, statistics, optimizer, loss scale, counts, and
    /// the size of micro-batches. Returns how far the run was. An average that the checkpoint does not have
    /// begins with its weights.
    ///
    /// *Memory:* one parameter beside them; what [`tallow_optim::Optimizer::load`] says.
    /// # Errors
    /// If the checkpoint is damaged, or of another model, optimizer or kind of loss scale, or of a size of
    /// micro-batches that this trainer's [`crate::Sizing`] does not have. A trainer
    /// whose load has failed may hold a part of it.
    pub fn load(&mut self, folder: &Path) -> Result<Progress> {
        seal::check(folder).map_err(CheckpointError::from)?;
        let (record, state) = (read(folder)?, folder.join(STATE));
        let unreadable = unreadable(&state);
        let (saved, progress) =
            (record.scale().map_err(&unreadable)?, progress(&record).map_err(&unreadable)?);
        let [n_windows, n_updates] = [
            record.get("n_windows").map_err(&unreadable)?,
            record.get("n_updates").map_err(&unreadable)?,
        ];
        let micro_batch = record.get("micro_batch").map_err(&unreadable)?;
        let scale = LossScale::resume(self.scale.state().rule, saved, None)?;
        let checkpoint = weights::Checkpoint::open(&[folder.join(WEIGHTS)], "")?;
        let unused = checkpoint.load_into(&variables(self))?;
        if let Some(name) = unused.first() {
            let how = format!("it holds `{name}`, which the model does not have");
            return Err(CheckpointError::Damaged { path: folder.join(WEIGHTS), how }.into());
        }
        self.load_average(folder)?;
        self.optimizer.load(&folder.join(OPTIMIZER))?;
        self.masters.publish()?;
        self.sizing.controller.go_on_at(micro_batch)?;
        (self.scale, self.n_windows, self.n_updates) = (scale, n_windows, n_updates);
        Ok(progress)
    }

    fn load_average(&mut self, folder: &Path) -> Result<()> {
        let Some(decay) = self.recipe.ema_decay else { return Ok(()) };
        let file = folder.join(AVERAGE);
        if file.is_file() {
            weights::Checkpoint::open(&[file], "")?.load_into(&self.average.averages())?;
            return Ok(());
        }
        self.average = Average::none(); // before the new one is made
        self.average = Average::new(&self.params, decay)?;
        Ok(())
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        Error::Checkpoint(error)
    }
}

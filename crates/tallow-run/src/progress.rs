//! How far a run has come, and its checkpoints.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use tallow_checkpoint::{Checkpoints, Record};
use tallow_data::Cursor;
use tallow_models::Segments;
use tallow_train::{Result, Trainer};

/// How far a run has come: with the trainer, all that it is. A plain value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// The next sample. After an epoch has been judged, the first of the next epoch.
    pub cursor: Cursor,
    /// Training samples seen, repetitions counted.
    pub n_samples: u64,
    /// Mean training loss of the first batch.
    pub first_loss: Option<f64>,
    /// Mean training loss of the last batch.
    pub last_loss: f64,
    /// The newest judgement, if the weights have not moved since.
    pub held_out_loss: Option<f64>,
    /// The lowest judgement so far.
    pub best_loss: Option<f64>,
    /// Judgements since then.
    pub n_since_best: u64,
    /// Time spent in updates, evaluation excluded.
    pub training: Duration,
}

impl Progress {
    /// Nothing yet.
    pub const START: Self = Self {
        cursor: Cursor::epoch(0),
        n_samples: 0,
        first_loss: None,
        last_loss: f64::NAN,
        held_out_loss: None,
        best_loss: None,
        n_since_best: 0,
        training: Duration::ZERO,
    };

    /// Takes note of a judgement.
    pub(crate) fn judged(&mut self, loss: f64) {
        self.held_out_loss = Some(loss);
        let is_best = self.best_loss.is_none_or(|best| loss < best);
        (self.best_loss, self.n_since_best) = match is_best {
            true => (Some(loss), 0),
            false => (self.best_loss, self.n_since_best + 1),
        };
    }
}

/// Saves `trainer` and the run's `progress` into `all`, which are of [`tallow_train::CHECKPOINTS`]; the new
/// folder.
///
/// *Memory:* what [`Trainer::save`] says.
/// # Errors
/// If the system refuses. Earlier checkpoints are then untouched.
pub fn save<M: Segments>(
    all: &Checkpoints,
    trainer: &Trainer<M>,
    progress: &Progress,
) -> Result<PathBuf> {
    trainer.save(all, progress.cursor.epoch, progress.record())
}

/// Takes `trainer` to where the run was whose checkpoint is in `folder`; how far that is.
///
/// *Memory:* what [`Trainer::load`] says.
/// # Errors
/// Those of [`Trainer::load`].
pub fn load<M: Segments>(trainer: &mut Trainer<M>, folder: &Path) -> Result<Progress> {
    Ok(Progress::of(&trainer.load(folder)?)?)
}

impl Progress {
    /// All of it, for a checkpoint.
    pub fn record(&self) -> Record {
        let mut record = Record::default();
        let Cursor { epoch, position, within, skipped } = self.cursor;
        record.put("cursor.epoch", epoch);
        record.put("cursor.position", position);
        record.put("cursor.within", within);
        record.put("cursor.skipped", skipped);
        record.put("n_samples", self.n_samples);
        record.put("training_nanos", self.training.as_nanos() as u64);
        record.put("last_loss", self.last_loss);
        record.put("n_since_best", self.n_since_best);
        for (name, value) in [
            ("first_loss", self.first_loss),
            ("held_out_loss", self.held_out_loss),
            ("best_loss", self.best_loss),
        ] {
            if let Some(value) = value {
                record.put(name, value);
            }
        }
        record
    }

    /// What [`Progress::record`] has put there.
    /// # Errors
    /// If a line is missing or cannot be read.
    pub fn of(record: &Record) -> tallow_checkpoint::Result<Self> {
        let cursor = Cursor {
            epoch: record.get("cursor.epoch")?,
            position: record.get("cursor.position")?,
            within: record.get("cursor.within")?,
            skipped: record.get("cursor.skipped")?,
        };
        Ok(Self {
            cursor,
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_comes_back() {
        let far = Progress {
            cursor: Cursor { epoch: 3, position: u64::MAX, within: 7, skipped: 1 },
            n_samples: 11,
            first_loss: Some(0.1 + 0.2),
            last_loss: 1.0 / 3.0,
            held_out_loss: None,
            best_loss: Some(f64::MIN_POSITIVE),
            n_since_best: 2,
            training: Duration::new(5, 7),
        };
        assert_eq!(Progress::of(&far.record()).expect("whole"), far);
        let start = Progress::of(&Progress::START.record()).expect("whole");
        assert!(start.last_loss.is_nan());
        assert_eq!(
            Progress { last_loss: 0.0, ..start },
            Progress { last_loss: 0.0, ..Progress::START }
        );
    }
}

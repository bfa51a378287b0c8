//! A trainer on the disk: everything that a resumed one needs to end with the same bits.
//!
//! Beside the record (counts, loss scale) a checkpoint holds `weights.safetensors` (master parameters and
//! running statistics, which candle and PyTorch read), `optimizer.safetensors` and, if an average of the
//! weights is kept, `average.safetensors`. Masks, orders and stochastic rounding are functions of the counts,
//! and an update ends its window, so there is nothing else to save.

use crate::{Result, Trainer};
use std::path::{Path, PathBuf};
use tallow_checkpoint::{Checkpoints, Error as CheckpointError, Kind, Record};
use tallow_models::{Segments, weights};
use tallow_optim::Average;
use tallow_precision::{LossScale, LossScaleState};

/// What checkpoints of trainers have in common; the best has the lowest `held_out_loss` in its record.
pub const CHECKPOINTS: Kind = Kind { prefix: "update-", format: 1, best_by: "held_out_loss" };

const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const AVERAGE: &str = "average.safetensors";

impl<M: Segments> Trainer<M> {
    /// Saves all that training goes on from into `all`, which are of [`CHECKPOINTS`], beside whatever is in
    /// `record` already; the new folder. `mark` tells two checkpoints after the same update apart.
    ///
    /// *Memory:* one parameter; what [`tallow_optim::Optimizer::save`] says.
    /// # Errors
    /// If the system refuses. Earlier checkpoints are then untouched.
    pub fn save(&self, all: &Checkpoints, mark: u64, mut record: Record) -> Result<PathBuf> {
        record.put("n_windows", self.n_windows);
        record.put("n_updates", self.n_updates);
        record.put("micro_batch", self.sizing.micro_batch());
        for (name, value) in self.scale.state().lines() {
            record.put_text(&format!("scale.{name}"), value);
        }
        all.save(&format!("{:010}-{mark}", self.n_windows), record, |folder| {
            weights::save(&self.network.variables(), &folder.join(WEIGHTS), "")?;
            self.optimizer.save(&folder.join(OPTIMIZER))?;
            if self.recipe.ema_decay.is_some() {
                weights::save(&self.average.averages(), &folder.join(AVERAGE), "")?;
            }
            Ok(())
        })
    }

    /// Goes on from the checkpoint in `folder`: weights, statistics, optimizer, loss scale, counts, and
    /// the size of micro-batches. Returns its record, with what was put there beside. An average that the
    /// checkpoint does not have begins with its weights.
    ///
    /// *Memory:* one parameter beside them; what [`tallow_optim::Optimizer::load`] says.
    /// # Errors
    /// If the checkpoint is damaged, or of another model, optimizer or kind of loss scale, or of a size of
    /// micro-batches that this trainer's [`crate::Sizing`] does not have. A trainer
    /// whose load has failed may hold a part of it.
    pub fn load(&mut self, folder: &Path) -> Result<Record> {
        let record = CHECKPOINTS.read(folder)?;
        let line = |name: &str| record.text_of(&format!("scale.{name}"));
        let saved = LossScaleState::from_lines(line)
            .map_err(|name| record.unreadable(&format!("scale.{name}")))?;
        let (n_windows, n_updates) = (record.get("n_windows")?, record.get("n_updates")?);
        let micro_batch = record.get("micro_batch")?;
        let scale = LossScale::resume(self.scale.state().rule, saved, None)?;
        let checkpoint = weights::Checkpoint::open(&[folder.join(WEIGHTS)], "")?;
        let unused = checkpoint.load_into(&self.network.variables())?;
        if let Some(name) = unused.first() {
            let how = format!("it holds `{name}`, which the model does not have");
            return Err(CheckpointError::Damaged { path: folder.join(WEIGHTS), how }.into());
        }
        self.load_average(&folder.join(AVERAGE))?;
        self.optimizer.load(&folder.join(OPTIMIZER))?;
        self.network.masters().publish()?;
        self.sizing.controller.go_on_at(micro_batch)?;
        (self.scale, self.n_windows, self.n_updates) = (scale, n_windows, n_updates);
        Ok(record)
    }

    fn load_average(&mut self, file: &Path) -> Result<()> {
        let Some(decay) = self.recipe.ema_decay else { return Ok(()) };
        if file.is_file() {
            weights::Checkpoint::open(&[file], "")?.load_into(&self.average.averages())?;
            return Ok(());
        }
        self.average = Average::none(); // before the new one is made
        self.average = Average::new(&self.params, decay)?;
        Ok(())
    }
}

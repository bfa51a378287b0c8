//! What happens beside training after every update: lines, metrics, checkpoints.

use crate::{
    config::Config,
    memory_log::LeakWatch,
    metrics::{self, Metrics, Moment},
    run_dir::{RunDir, Start},
    tensorboard::Events,
    view::{View, say},
};
use anyhow::{Context, Result};
use tallow_memory::Meter;
use tallow_models::Segments;
use tallow_run::{
    Event, Progress,
    checkpoint::{Checkpoints, Error},
    load, save,
};
use tallow_train::{Trainer, optim::Schedule};

/// Watches a run.
pub(crate) struct Observer<'a> {
    view: View<'a>,
    metrics: Metrics,
    events: Events,
    leak: LeakWatch,
    checkpoints: Option<Checkpoints>,
    every: Option<u64>,
    meter: &'a dyn Meter,
    /// What ends the run.
    failure: Option<anyhow::Error>,
}

impl<'a> Observer<'a> {
    /// Opens the files of the run, and takes `trainer` to where it goes on.
    ///
    /// # Errors
    /// If a file cannot be made, or there is no checkpoint to go on from.
    pub(crate) fn begin<M: Segments>(
        dir: &RunDir,
        config: &Config,
        trainer: &mut Trainer<M>,
        view: View<'a>,
        meter: &'a dyn Meter,
    ) -> Result<(Self, Progress)> {
        let checkpoints = dir.checkpoints(config)?;
        let mut progress = Progress::START;
        if let (Start::Resume, Some(checkpoints)) = (dir.start, &checkpoints) {
            match checkpoints.newest() {
                Err(Error::None { .. }) => {
                    say!("no checkpoint yet: from the beginning");
                }
                newest => {
                    let newest = newest.context("--resume")?;
                    for damaged in &newest.passed_over {
                        say!("passed over: {damaged}");
                    }
                    let name = || format!("--resume `{}`", newest.path.display());
                    progress = load(trainer, &newest.path).with_context(name)?;
                    say!("going on after update {}", trainer.n_windows());
                }
            }
        }
        let (n_windows, epoch) = (trainer.n_windows(), progress.cursor.epoch);
        let metrics = Metrics::open(dir.folder(), n_windows, epoch)?;
        let events = Events::open(dir.folder(), n_windows, metrics.newest())?;
        let (leak, every, failure) = (LeakWatch::new(), config.checkpoint_every, None);
        Ok((Self { view, metrics, events, leak, checkpoints, every, meter, failure }, progress))
    }

    /// Takes note of what happened; a failure to write ends the run at its next update.
    pub(crate) fn observe<M: Segments>(
        &mut self,
        trainer: &Trainer<M>,
        progress: &Progress,
        event: &Event,
        schedule: &Schedule,
    ) {
        self.leak.show(event, self.meter);
        self.view.show(event, progress);
        let moment = Moment {
            progress,
            n_windows: trainer.n_windows(),
            // Of the update that was made, not of the next.
            learning_rate: schedule.rate(trainer.n_updates().saturating_sub(1)),
            loss_scale: f64::from(trainer.loss_scale().value()),
            meter: self.meter,
        };
        let line = metrics::line(event, &moment);
        let written = line.map_or(Ok(()), |line| {
            self.metrics.write(&line)?;
            self.events.write(&line)
        });
        let saved = written.and_then(|()| self.save(trainer, progress, event));
        if let Err(error) = saved {
            self.failure.get_or_insert(error);
        }
    }

    fn save<M: Segments>(
        &self,
        trainer: &Trainer<M>,
        progress: &Progress,
        event: &Event,
    ) -> Result<()> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(()) };
        let is_due = match event {
            Event::Updated { n_windows, .. } => {
                self.every.is_some_and(|every| n_windows.is_multiple_of(every))
            }
            Event::Evaluated { .. } | Event::Stopped => true,
        };
        if is_due {
            save(checkpoints, trainer, progress)?;
        }
        Ok(())
    }

    /// Whether something could not be written.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// The view, if all was written.
    ///
    /// # Errors
    /// What was not.
    pub(crate) fn end(self) -> Result<View<'a>> {
        match self.failure {
            None => Ok(self.view),
            Some(error) => {
                self.view.stop();
                Err(error)
            }
        }
    }
}

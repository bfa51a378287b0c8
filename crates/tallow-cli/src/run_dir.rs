//! The folder of a run: what it was told, what it chose, how far it came.

use crate::{
    config::{Choice, Config},
    report,
};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
};
use tallow_run::checkpoint::Checkpoints;
use tallow_train::{
    CHECKPOINTS as KIND,
    plan::{Candidate, Space},
    recompute::Plan,
};

const CONFIG: &str = "config.toml";
const EFFECTIVE: &str = "effective.toml";
const PLAN: &str = "plan.json";
const CHECKPOINTS: &str = "checkpoints";

/// What a run does with its folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// It begins, and refuses a folder with checkpoints of an earlier run.
    New,
    /// It begins, and what an earlier run left there goes.
    Over,
    /// It goes on from the newest checkpoint there.
    Resume,
}

/// Locks `folder` for as long as this process lives. A system that locks no folders goes without.
///
/// # Errors
/// If another run is in it: each would write over what the other has.
fn keep_others_out(folder: &Path) -> Result<()> {
    let Ok(opened) = File::open(folder) else { return Ok(()) };
    if let Err(TryLockError::WouldBlock) = opened.try_lock() {
        bail!("`{}` is in use by another run: name another --out", folder.display());
    }
    std::mem::forget(opened);
    Ok(())
}

/// The configuration of the run in `folder`.
pub(crate) fn config_path(folder: &Path) -> PathBuf {
    folder.join(CONFIG)
}

/// The values in force of the run in `folder`.
pub(crate) fn effective_path(folder: &Path) -> PathBuf {
    folder.join(EFFECTIVE)
}

/// The newest whole weights of the run in `folder`, or their average.
///
/// # Errors
/// If there is no whole checkpoint.
pub(crate) fn weights(folder: &Path) -> Result<PathBuf> {
    let checkpoints = Checkpoints::look(KIND, folder.join(CHECKPOINTS));
    ensure!(
        checkpoints.folder().is_dir(),
        "`{}` holds no checkpoint, so there are no weights",
        folder.display()
    );
    let newest = checkpoints.newest()?.path;
    let average = newest.join("average.safetensors");
    Ok(if average.is_file() { average } else { newest.join("weights.safetensors") })
}

/// The choice of the run's plan, by names, so that an edited configuration still finds it.
#[derive(Serialize, Deserialize)]
struct Chosen {
    precision: String,
    optimizer: String,
    micro_batch: usize,
    recompute_plan: String,
    predicted_peak_bytes: u64,
    /// What that is for.
    #[serde(default)]
    terms: serde_json::Map<String, serde_json::Value>,
}

/// The folder of a run.
pub(crate) struct RunDir<'a> {
    folder: &'a Path,
    pub(crate) start: Start,
}

impl<'a> RunDir<'a> {
    /// Makes the folder, and writes the configuration of a run that begins there. One that goes on keeps
    /// its own, and its report, until its checkpoint has been loaded: a refused change must leave nothing.
    ///
    /// # Errors
    /// If it cannot be made or written, is in use, holds checkpoints of another run, or none to go on from.
    pub(crate) fn prepare(folder: &'a Path, start: Start, config: &Config) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("--out `{}`", folder.display()))?;
        keep_others_out(folder)?;
        let checkpoints = folder.join(CHECKPOINTS);
        match start {
            Start::New => {
                let is_empty = fs::read_dir(&checkpoints).map_or(true, |mut e| e.next().is_none());
                ensure!(
                    is_empty,
                    "`{}` holds the checkpoints of another run: go on with it by --resume, name \
                     another --out, or give --overwrite",
                    folder.display()
                );
            }
            Start::Over if checkpoints.exists() => {
                fs::remove_dir_all(&checkpoints)
                    .with_context(|| format!("`{}`", checkpoints.display()))?;
            }
            Start::Over | Start::Resume => {}
        }
        report::prepare(folder)?;
        let dir = Self { folder, start };
        if start != Start::Resume {
            report::forget(folder)?;
            dir.write_config(config)?;
        }
        Ok(dir)
    }

    fn write_config(&self, config: &Config) -> Result<()> {
        report::write_text(self.folder, CONFIG, &toml::to_string_pretty(&config.given)?)
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder
    }

    /// The run's checkpoints; `None` if it is to have none.
    ///
    /// # Errors
    /// If their folder cannot be made.
    pub(crate) fn checkpoints(&self, config: &Config) -> Result<Option<Checkpoints>> {
        if config.keep == 0 && self.start != Start::Resume {
            return Ok(None);
        }
        Ok(Some(Checkpoints::open(KIND, self.folder.join(CHECKPOINTS), config.keep)?))
    }

    /// Writes down what was given, and every value in force.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(crate) fn write_effective(&self, config: &Config, chosen: &Candidate) -> Result<()> {
        if self.start == Start::Resume {
            report::forget(self.folder)?;
        }
        self.write_config(config)?;
        let choice = Choice {
            precision: chosen.policy,
            optimizer: chosen.optimizer,
            micro_batch: chosen.micro_batch,
        };
        let effective = toml::to_string_pretty(&config.effective(Some(&choice)))?;
        report::write_text(self.folder, EFFECTIVE, &effective)
    }

    /// Writes down what was chosen.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(crate) fn write_plan(&self, config: &Config, chosen: &Candidate) -> Result<()> {
        let chosen = Chosen {
            precision: config.precisions[chosen.policy].name.clone(),
            optimizer: config.optimizers[chosen.optimizer].name.clone(),
            micro_batch: chosen.micro_batch,
            recompute_plan: chosen.recompute.to_string(),
            predicted_peak_bytes: chosen.peak_bytes(),
            terms: report::by_category(&chosen.terms),
        };
        report::write_text(self.folder, PLAN, &(serde_json::to_string_pretty(&chosen)? + "\n"))
    }

    /// Whether the run got so far as to choose.
    pub(crate) fn has_plan(&self) -> bool {
        self.folder.join(PLAN).is_file()
    }

    /// What the run chose when it began.
    ///
    /// # Errors
    /// If that cannot be read, or the configuration has it no more.
    pub(crate) fn read_plan(&self, config: &Config, space: &Space) -> Result<Candidate> {
        let path = self.folder.join(PLAN);
        let text = fs::read_to_string(&path).with_context(|| format!("`{}`", path.display()))?;
        let chosen: Chosen =
            serde_json::from_str(&text).with_context(|| format!("`{}`", path.display()))?;
        let policy = config.precisions.iter().position(|p| p.name == chosen.precision);
        let optimizer = config.optimizers.iter().position(|o| o.name == chosen.optimizer);
        let (Some(policy), Some(optimizer)) = (policy, optimizer) else {
            bail!(
                "`{}` chose {} and {}, which the configuration no longer allows; give --budget to plan \
                 anew",
                path.display(),
                chosen.precision,
                chosen.optimizer
            );
        };
        let recompute: Plan = chosen.recompute_plan.parse()?;
        let choice = (policy, optimizer, chosen.micro_batch);
        Ok(space.chosen(choice, recompute, chosen.predicted_peak_bytes))
    }
}

//! What is learnt from, and what is known of it once it is open.

use super::files::{LeftOut, PhotoSource, Photos, Sequences, Spent, TokenSource};
use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};
use std::path::{Path, PathBuf};
use tallow_data::{Dataset, ImageSet, Images, Kind, Pixels, Synthetic};

/// The name of the embedded images.
pub(super) const DIGITS: &str = "digits";
/// The name of samples that are made up.
pub(super) const SYNTHETIC: &str = "synthetic";

/// Where samples come from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Source {
    /// The embedded digits, or a folder with one IDX image file and one IDX label file.
    Images {
        /// `None`: the digits.
        folder: Option<PathBuf>,
        /// Images held out; a tenth if `None`.
        held_out: Option<usize>,
    },
    /// Images and their classes, of any format.
    Photos(PhotoSource),
    /// Tokens, or texts that become some.
    Tokens(TokenSource),
    /// Made up.
    Synthetic {
        /// Learnt from, and held out.
        n_samples: [usize; 2],
        /// What each is; the dtype is the precision's.
        kind: Kind,
    },
}

/// Samples, before it is known what dtype they are wanted in.
#[derive(Clone)]
pub(crate) enum Samples {
    /// Bytes of images.
    Images(ImageSet),
    /// Files of images.
    Photos(Photos),
    /// A file of tokens.
    Tokens(Sequences),
    /// Made up.
    Synthetic(Synthetic),
}

impl Samples {
    /// How many.
    pub(crate) fn n_samples(&self) -> usize {
        match self {
            Samples::Images(set) => set.n_images(),
            Samples::Photos(set) => set.n_samples(),
            Samples::Tokens(set) => set.n_samples(),
            Samples::Synthetic(set) => set.n_samples,
        }
    }

    /// What reading them came to; nothing is read of those in memory.
    pub(crate) fn spent(&self) -> Option<&Spent> {
        match self {
            Samples::Photos(set) => Some(set.spent()),
            Samples::Tokens(set) => Some(set.spent()),
            Samples::Images(_) | Samples::Synthetic(_) => None,
        }
    }

    /// What its epochs left out: shuffled ones, which train, or those that judge.
    pub(crate) fn left_out(&self, is_shuffled: bool) -> LeftOut {
        self.spent().map(|spent| spent.left_out(is_shuffled)).unwrap_or_default()
    }

    /// Threads that read ahead.
    pub(crate) fn n_threads(&self) -> usize {
        match self {
            Samples::Photos(set) => set.n_threads(),
            Samples::Tokens(set) => set.n_threads(),
            Samples::Images(_) | Samples::Synthetic(_) => 0,
        }
    }

    /// Bytes of a batch of `n_samples`, and of what is read ahead of it.
    pub(crate) fn held_bytes(&self, dtype: DType, n_samples: usize) -> u64 {
        match self {
            Samples::Photos(set) => set.held_bytes(dtype, n_samples),
            Samples::Tokens(set) => set.held_bytes(n_samples),
            Samples::Images(_) | Samples::Synthetic(_) => {
                self.dataset(dtype).batch_bytes(n_samples)
            }
        }
    }

    /// Batches of them in `dtype`, where they are floats. Shares the bytes.
    pub(crate) fn dataset(&self, dtype: DType) -> Box<dyn Dataset> {
        match self {
            Samples::Images(set) => {
                let pixels = Pixels::digits(dtype, &Device::Cpu);
                Box::new(Images { set: set.clone(), pixels })
            }
            Samples::Photos(set) => set.dataset(dtype),
            Samples::Tokens(set) => set.dataset(),
            Samples::Synthetic(set) => Box::new(match set.kind {
                Kind::Images { dims, n_classes, .. } => {
                    Synthetic { kind: Kind::Images { dims, n_classes, dtype }, ..set.clone() }
                }
                Kind::Tokens { .. } => set.clone(),
            }),
        }
    }
}

/// Samples to learn from and to judge by, and what the model must know of them.
pub(crate) struct Opened {
    pub(crate) train: Samples,
    pub(crate) held_out: Samples,
    /// Channels of the images, and their classes; 0 for tokens.
    pub(crate) channels: usize,
    pub(crate) n_classes: usize,
    /// Height and width, or tokens.
    pub(crate) size: Vec<usize>,
}

impl Source {
    /// As `report.json` has it.
    pub(crate) fn name(&self) -> String {
        match self {
            Source::Images { folder: None, .. } => DIGITS.to_string(),
            Source::Images { folder: Some(path), .. } => path.display().to_string(),
            Source::Photos(PhotoSource { place, .. })
            | Source::Tokens(TokenSource { place, .. }) => place.name.clone(),
            Source::Synthetic { .. } => SYNTHETIC.to_string(),
        }
    }

    /// Opens it.
    /// # Errors
    /// If there is nothing to learn from or nothing to judge by.
    pub(crate) fn open(&self, seed: u64) -> Result<Opened> {
        match self {
            Source::Images { folder, held_out } => open_images(folder.as_deref(), *held_out),
            Source::Photos(photos) => photos.open(),
            Source::Tokens(tokens) => tokens.open(),
            Source::Synthetic { n_samples: [n_train, n_held_out], kind } => {
                let device = Device::Cpu;
                let (size, channels, n_classes) = match *kind {
                    Kind::Images { dims, n_classes, .. } => {
                        (dims[1..].to_vec(), dims[0], n_classes)
                    }
                    Kind::Tokens { n_tokens, .. } => (vec![n_tokens], 0, 0),
                };
                let train = Synthetic { kind: kind.clone(), n_samples: *n_train, seed, device };
                // Other samples than those learnt from.
                let held_out = Synthetic { n_samples: *n_held_out, seed: !seed, ..train.clone() };
                let (train, held_out) = (Samples::Synthetic(train), Samples::Synthetic(held_out));
                Ok(Opened { train, held_out, channels, n_classes, size })
            }
        }
    }
}

fn open_images(folder: Option<&Path>, held_out: Option<usize>) -> Result<Opened> {
    let set = match folder {
        None => ImageSet::digits()?,
        Some(folder) => ImageSet::open_dir(folder).context("data.source")?,
    };
    let n_images = set.n_images();
    let held_out = held_out.unwrap_or(n_images / 10).max(1);
    ensure!(
        held_out < n_images,
        "data.held_out {held_out} leaves nothing of the {n_images} images to learn from"
    );
    let (first, classes) = (set.label(0), set.n_classes());
    ensure!(
        (0..n_images).any(|i| set.label(i) != first),
        "data.source: all {n_images} images have label {first} of {classes}, there is nothing to learn"
    );
    let size = vec![set.height(), set.width()];
    let (train, held_out) = set.split(n_images - held_out)?;
    let n_classes = train.n_classes().max(held_out.n_classes());
    let (train, held_out) = (Samples::Images(train), Samples::Images(held_out));
    Ok(Opened { train, held_out, channels: 1, n_classes, size })
}

//! Samples in files: folders of photographs, files of tokens, and text.

use super::model::{Opened, Samples};
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use tallow_data::{
    Ahead, Dataset, ImageBatches, LabelledImage, Layout, Loader, Loading, OnCorrupt, Permutation,
    Pixels, Source, TokenBatches, Workers,
    formats::{Encoded, ImageFolder, Input, Token, Tokens},
    image::{Augment, Channels, Decode, Filter, apply, decode, decode_bytes, probe},
};

/// Beside the share that is cut away after the short side was scaled: 224 of 256 pixels.
const SHORT_SIDE: f64 = 256.0 / 224.0;

/// Images whose headers are looked at to foretell what decoding needs.
const N_PROBED: u64 = 64;

/// How files of a set are read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reading {
    /// Whether images are cropped and flipped at random while training.
    pub(crate) augment: bool,
    /// What becomes of samples that cannot be read.
    pub(crate) on_corrupt: OnCorrupt,
    /// Bytes that may be read ahead; 0: each batch is read when it is wanted.
    pub(crate) prefetch_bytes: u64,
    /// Of augmentation.
    pub(crate) seed: u64,
}

impl Reading {
    /// Threads beside the one that trains.
    const N_THREADS: usize = 2;
    const MAX_SAMPLES: usize = 256;

    fn loading(&self) -> Loading {
        let is_ahead = self.prefetch_bytes > 0;
        let workers = Workers {
            n_threads: Self::N_THREADS,
            max_samples: Self::MAX_SAMPLES,
            max_bytes: self.prefetch_bytes,
        };
        Loading {
            seed: self.seed,
            workers: if is_ahead { workers } else { Workers::NONE },
            ahead: if is_ahead { Ahead::ONE } else { Ahead::NONE },
            on_corrupt: self.on_corrupt,
            ..Loading::PLAIN
        }
    }
}

/// Some of a source's samples: a run of an order.
pub(crate) struct Part<S> {
    source: Arc<S>,
    /// `None`: as they lie.
    order: Option<Permutation>,
    first: u64,
    n_samples: u64,
}

impl<S> Clone for Part<S> {
    fn clone(&self) -> Self {
        let Self { source, order, first, n_samples } = self;
        let (source, order) = (Arc::clone(source), order.clone());
        Self { source, order, first: *first, n_samples: *n_samples }
    }
}

impl<S: Source> Part<S> {
    /// All but the last `n_held_out`, and these.
    fn split(source: S, order: Option<Permutation>, n_held_out: u64) -> (Self, Self) {
        let n_train = source.n_samples() - n_held_out;
        let train = Self { source: Arc::new(source), order, first: 0, n_samples: n_train };
        let held_out = Self { first: n_train, n_samples: n_held_out, ..train.clone() };
        (train, held_out)
    }

    fn index(&self, index: u64) -> u64 {
        let place = self.first + index;
        self.order.as_ref().map_or(place, |order| order.index(place))
    }
}

impl<S: Source> Source for Part<S> {
    type Item = S::Item;

    fn n_samples(&self) -> u64 {
        self.n_samples
    }

    fn get(&self, index: u64) -> tallow_data::Result<S::Item> {
        self.source.get(self.index(index))
    }

    fn name(&self, index: u64) -> String {
        self.source.name(self.index(index))
    }
}

/// Photographs that become images of one size.
#[derive(Clone)]
pub(crate) struct Photos {
    part: Part<ImageFolder>,
    dims: [usize; 3],
    reading: Reading,
    /// What decoding takes beside, in the threads that read ahead.
    decoding_bytes: u64,
}

impl Photos {
    pub(crate) fn n_samples(&self) -> usize {
        self.part.n_samples as usize
    }

    pub(crate) fn dataset(&self, dtype: DType) -> Box<dyn Dataset> {
        Box::new(self.loader(dtype))
    }

    /// Bytes of batches of `n_samples` and of what is read ahead of them.
    pub(crate) fn held_bytes(&self, dtype: DType, n_samples: usize) -> u64 {
        let loader = self.loader(dtype);
        match self.reading.prefetch_bytes {
            0 => loader.batch_bytes(n_samples),
            _ => loader.held_bytes(n_samples) + self.decoding_bytes,
        }
    }

    fn loader(&self, dtype: DType) -> Loader<ImageBatches> {
        let [channels, height, width] = self.dims;
        let size = [height, width];
        let (decoded, pixels) = match channels {
            1 => (Decode::grey(), Pixels::digits(dtype, &Device::Cpu)),
            _ => (Decode::rgb(), Pixels::imagenet(dtype, &Device::Cpu)),
        };
        let changes = if self.reading.augment {
            vec![Augment::random_resized_crop(size), Augment::Flip { probability: 0.5 }]
        } else {
            let pixels = (height.max(width) as f64 * SHORT_SIDE).round() as usize;
            let filter = Filter::Bilinear;
            vec![Augment::ShortSide { pixels, filter }, Augment::CenterCrop { size }]
        };
        let prepare = move |encoded: Encoded, at: tallow_data::At| {
            let Encoded { path, bytes, label } = encoded;
            let image = decode(&path, &bytes, &decoded)?;
            drop(bytes);
            let image = apply(&changes, image, at.rng().next_u64())?;
            let channels = match image.channels() {
                Channels::Grey => 1,
                Channels::Rgb => 3,
                Channels::Rgba => 4,
            };
            let [height, width] = image.size();
            Ok(LabelledImage {
                dims: [channels, height, width],
                pixels: image.into_pixels(),
                label,
            })
        };
        let collate = ImageBatches::new(self.dims, Layout::ChannelsLast, pixels);
        let collate = collate.expect("sizes were checked");
        Loader::new(self.part.clone(), prepare, collate, self.reading.loading())
    }

    /// The same without chance: to judge by.
    fn still(self) -> Self {
        Self { reading: Reading { augment: false, ..self.reading }, ..self }
    }
}

/// Sequences of tokens.
#[derive(Clone)]
pub(crate) struct Sequences {
    part: Part<Tokens>,
    seq_tokens: usize,
    reading: Reading,
}

impl Sequences {
    pub(crate) fn n_samples(&self) -> usize {
        self.part.n_samples as usize
    }

    pub(crate) fn dataset(&self) -> Box<dyn Dataset> {
        Box::new(self.loader())
    }

    /// Bytes of batches of `n_samples` and of what is read ahead of them.
    pub(crate) fn held_bytes(&self, n_samples: usize) -> u64 {
        match self.reading.prefetch_bytes {
            0 => self.loader().batch_bytes(n_samples),
            _ => self.loader().held_bytes(n_samples),
        }
    }

    fn loader(&self) -> Loader<TokenBatches> {
        let collate = TokenBatches { seq_tokens: self.seq_tokens, device: Device::Cpu };
        let loading = self.reading.loading();
        Loader::new(self.part.clone(), |tokens, _| Ok(tokens), collate, loading)
    }
}

/// Samples held out of `n`: as asked, or a tenth.
fn n_held_out(asked: Option<usize>, n: u64, what: &str) -> Result<u64> {
    let held_out = asked.map_or((n / 10).max(1), |asked| asked as u64);
    ensure!(
        held_out < n,
        "data.held_out {held_out} leaves nothing of the {n} {what} to learn from"
    );
    Ok(held_out)
}

/// Bytes that decoding the largest of some images needs, as far as their headers tell.
fn decoding_bytes(images: &impl Source<Item = Encoded>) -> u64 {
    let step = images.n_samples().div_ceil(N_PROBED).max(1);
    let of = |index: u64| {
        let Encoded { path, bytes, .. } = images.get(index).ok()?;
        let (_, [height, width]) = probe(&path, &bytes, &Decode::rgb()).ok()?;
        Some(decode_bytes(height as u64 * width as u64, bytes.len() as u64))
    };
    (0..images.n_samples()).step_by(step as usize).filter_map(of).max().unwrap_or(0)
}

/// A folder with a folder of images for each class, in an order that mixes the classes.
/// # Errors
/// If there are no images, or of one class only.
pub(crate) fn open_photos(
    folder: &Path,
    held_out: Option<usize>,
    dims: [usize; 3],
    reading: &Reading,
) -> Result<Opened> {
    let images = ImageFolder::open(folder).context("data.source")?;
    let n_images = images.n_samples();
    let n_classes = images.classes().len();
    ensure!(
        n_classes > 1,
        "data.source: `{}` has no folders with images, one a class: there is nothing to learn",
        folder.display()
    );
    let held_out = n_held_out(held_out, n_images, "images")?;
    // Which images are held out does not depend on the run.
    let order = Permutation::new(n_images, 0, 0);
    let (train, judged) = Part::split(images, Some(order), held_out);
    let decoding_bytes = match reading.prefetch_bytes {
        0 => 0,
        _ => Reading::N_THREADS as u64 * decoding_bytes(&train),
    };
    let photos = |part| Photos { part, dims, reading: reading.clone(), decoding_bytes };
    Ok(Opened {
        train: Samples::Photos(photos(train)),
        held_out: Samples::Photos(photos(judged).still()),
        channels: dims[0],
        n_classes,
        size: dims[1..].to_vec(),
    })
}

/// What a file of tokens holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenFormat {
    /// A `.npy` array.
    Npy,
    /// Numbers without a header; `U8` is any text, byte by byte.
    Raw(Token),
}

impl TokenFormat {
    /// By the name of the file: `.npy`, `.bin` (u16), and text for whatever else.
    pub(crate) fn of(path: &Path) -> Self {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("npy") => Self::Npy,
            Some("bin") => Self::Raw(Token::U16),
            _ => Self::Raw(Token::U8),
        }
    }

    /// As `data.format` has it.
    /// # Errors
    /// If the word is unknown.
    pub(crate) fn named(word: &str) -> Result<Self> {
        Ok(match word {
            "npy" => Self::Npy,
            "u16" => Self::Raw(Token::U16),
            "u32" => Self::Raw(Token::U32),
            "bytes" => Self::Raw(Token::U8),
            _ => bail!("data.format `{word}` is unknown; there are bytes, u16, u32 and npy"),
        })
    }
}

/// A file of tokens; its end is held out.
/// # Errors
/// If it cannot be read, or holds too few.
pub(crate) fn open_tokens(
    path: &PathBuf,
    format: TokenFormat,
    held_out: Option<usize>,
    (seq_tokens, vocab): (usize, usize),
    reading: &Reading,
) -> Result<Opened> {
    let input = Input::open(path).context("data.source")?;
    let tokens = match format {
        TokenFormat::Npy => Tokens::npy(input, seq_tokens as u64),
        TokenFormat::Raw(token) => Tokens::raw(input, token, seq_tokens as u64),
    };
    let tokens = tokens.context("data.source")?.with_vocab(vocab as u32);
    let held_out = n_held_out(held_out, tokens.n_samples(), "sequences")?;
    let (train, judged) = Part::split(tokens, None, held_out);
    let sequences =
        |part| Samples::Tokens(Sequences { part, seq_tokens, reading: reading.clone() });
    Ok(Opened {
        train: sequences(train),
        held_out: sequences(judged),
        channels: 0,
        n_classes: 0,
        size: vec![seq_tokens],
    })
}

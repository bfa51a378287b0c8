//! Photographs that become images of one size.

use super::{
    Noted, Part, Reading, Spent,
    format::Format,
    n_held_out,
    pictures::{self, Classes, Columns, Picture},
    place::Place,
};
use crate::config::source::{Opened, Samples};
use anyhow::{Result, ensure};
use candle_core::{DType, Device};
use std::{path::Path, sync::Arc, time::Instant};
use tallow_data::{
    At, Dataset, Error, ImageBatches, LabelledImage, Layout, Loader, Permutation, Pixels, Source,
    formats::Encoded,
    image::{Augment, Channels, Decode, Filter, Image, apply, decode, decoding_bytes, probe},
};

/// The size before the margin is cut away in sizes after it: 224 of 256 pixels stay.
const MARGIN: f64 = 256.0 / 224.0;

/// Images whose headers are looked at to foretell what decoding needs.
const N_PROBED: u64 = 64;

/// Bytes a pixel while an image is scaled: its own, those of the part that is scaled, and of rows half
/// scaled.
const SCALING_BYTES: u64 = 4 + 4 + 4;

/// Photographs that become images of one size.
#[derive(Clone)]
pub(crate) struct Photos {
    part: Part<dyn Source<Item = Picture>>,
    dims: [usize; 3],
    n_classes: u32,
    reading: Reading,
    /// What decoding and scaling the largest image takes, beside what comes of it.
    work_bytes: u64,
}

impl Photos {
    pub(crate) fn n_samples(&self) -> usize {
        self.part.n_samples() as usize
    }

    pub(crate) fn dataset(&self, dtype: DType) -> Box<dyn Dataset> {
        let spent = Arc::clone(&self.part.spent);
        Box::new(Noted { loader: self.loader(dtype), spent })
    }

    pub(crate) fn n_threads(&self) -> usize {
        self.reading.n_threads(self.work_bytes)
    }

    pub(crate) fn spent(&self) -> &Spent {
        self.part.spent()
    }

    /// Bytes of batches of `n_samples` and of what is read ahead of them.
    pub(crate) fn held_bytes(&self, dtype: DType, n_samples: usize) -> u64 {
        let loader = self.loader(dtype);
        match self.reading.prefetch_bytes {
            0 => loader.batch_bytes(n_samples),
            _ => loader.held_bytes(n_samples) + self.all_work_bytes(),
        }
    }

    /// Of all threads that read ahead.
    fn all_work_bytes(&self) -> u64 {
        self.work_bytes.saturating_mul(self.n_threads() as u64)
    }

    fn loader(&self, dtype: DType) -> Loader<ImageBatches> {
        let pixels = match self.dims[0] {
            1 => Pixels::digits(dtype, &Device::Cpu),
            _ => Pixels::imagenet(dtype, &Device::Cpu),
        };
        let preparation = Preparation::new(self);
        let prepare = move |picture, at: At| preparation.prepare(picture, at.rng().next_u64());
        let collate = ImageBatches::new(self.dims, Layout::ChannelsLast, pixels);
        let collate = collate.expect("sizes were checked");
        Loader::new(self.part.clone(), prepare, collate, self.reading.loading(self.work_bytes))
    }

    /// The same without chance: to judge by.
    fn still(self) -> Self {
        Self { reading: Reading { augment: false, ..self.reading }, ..self }
    }
}

/// What is done to each picture.
struct Preparation {
    channels: Channels,
    size: [usize; 2],
    augment: bool,
    n_classes: u32,
    spent: Arc<Spent>,
}

impl Preparation {
    fn new(photos: &Photos) -> Self {
        let [channels, height, width] = photos.dims;
        Self {
            channels: if channels == 1 { Channels::Grey } else { Channels::Rgb },
            size: [height, width],
            augment: photos.reading.augment,
            n_classes: photos.n_classes,
            spent: photos.part.spent.clone(),
        }
    }

    fn prepare(&self, picture: Picture, key: u64) -> tallow_data::Result<LabelledImage> {
        let start = Instant::now();
        let (path, image, label) = match picture {
            Picture::File(Encoded { path, bytes, label }) => {
                let options = Decode { channels: self.decoded(&path, &bytes)?, ..Decode::rgb() };
                let image = decode(&path, &bytes, &options)?;
                (path, image, label)
            }
            Picture::Pixels { path, image, label } => (path, image, label),
        };
        if label >= self.n_classes {
            let reason = format!("class {label} is outside the {} there are", self.n_classes);
            return Err(Error::Corrupt { path, offset: None, reason });
        }
        let changes =
            if self.augment { by_chance(self.size) } else { fit(self.size, image.size()) };
        let mut image = apply(&changes, image, key)?;
        if image.channels() == Channels::Rgbx {
            image = image.with_channels(self.channels);
        }
        self.spent.prepared(start);
        Ok(labelled(image, label))
    }

    /// What is decoded: colours that are scaled afterwards in four bytes, which is faster.
    fn decoded(&self, path: &Path, content: &[u8]) -> tallow_data::Result<Channels> {
        if self.channels != Channels::Rgb {
            return Ok(self.channels);
        }
        let is_scaled = self.augment || probe(path, content, &Decode::rgb())?.1 != self.size;
        Ok(if is_scaled { Channels::Rgbx } else { Channels::Rgb })
    }
}

fn by_chance(size: [usize; 2]) -> [Augment; 2] {
    [Augment::random_resized_crop(size), Augment::Flip { probability: 0.5 }]
}

/// The middle of an image of the size `from`, scaled so that it covers `size`, with a margin that is
/// cut away if the image is large enough for one.
fn fit(size: [usize; 2], from: [usize; 2]) -> [Augment; 2] {
    let ratio = |side: usize| size[side] as f64 / from[side] as f64;
    let cover = ratio(0).max(ratio(1));
    let scale = cover.max((cover * MARGIN).min(1.0));
    // Rounding must not leave a row of nothing.
    let scaled = |side: usize| ((from[side] as f64 * scale).round() as usize).max(size[side]);
    let resize = Augment::Resize { size: [scaled(0), scaled(1)], filter: Filter::Bilinear };
    [resize, Augment::CenterCrop { size }]
}

fn labelled(image: Image, label: u32) -> LabelledImage {
    let channels = match image.channels() {
        Channels::Grey => 1,
        Channels::Rgb => 3,
        Channels::Rgba | Channels::Rgbx => 4,
    };
    let [height, width] = image.size();
    LabelledImage { dims: [channels, height, width], pixels: image.into_pixels(), label }
}

/// Where images are, and what becomes of them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PhotoSource {
    pub(crate) place: Place,
    pub(crate) format: Format,
    pub(crate) columns: Columns,
    /// `None`: one more than the largest label, or the folders there are.
    pub(crate) n_classes: Option<usize>,
    pub(crate) held_out: Option<usize>,
    pub(crate) reading: Reading,
}

impl PhotoSource {
    /// The images, in an order that mixes the classes.
    /// # Errors
    /// If there are no images, or of one class only.
    pub(crate) fn open(&self) -> Result<Opened> {
        let name = &self.place.name;
        let pictures = pictures::open(&self.place, self.format, &self.columns)?;
        let n_images = pictures.source.n_samples();
        let n_classes = self.n_classes(&pictures.classes)?;
        ensure!(
            n_classes > 1 || self.format != Format::Images,
            "data.source: `{name}` has no folders with images, one a class: there is nothing to learn",
        );
        ensure!(n_classes > 1, "data.source: `{name}` has one class: there is nothing to learn");
        let held_out = n_held_out(self.held_out, n_images, "images")?;
        // Which images are held out does not depend on the run.
        let order = Permutation::new(n_images, 0, 0);
        let (train, judged) = Part::split(pictures.source, Some(order), held_out);
        let work_bytes = match self.reading.prefetch_bytes {
            0 => 0,
            _ => largest_work_bytes(&train),
        };
        let dims = self.columns.dims;
        let photos = |part| Photos {
            part,
            dims,
            n_classes: n_classes as u32,
            reading: self.reading.clone(),
            work_bytes,
        };
        Ok(Opened {
            train: Samples::Photos(photos(train)),
            held_out: Samples::Photos(photos(judged).still()),
            channels: dims[0],
            n_classes,
            size: dims[1..].to_vec(),
        })
    }

    /// As given, as known, or by reading every label once.
    fn n_classes(&self, classes: &Classes) -> Result<usize> {
        match (self.n_classes, classes) {
            (Some(n_classes), _) => Ok(n_classes),
            (None, Classes::Known(n_classes)) => Ok(*n_classes),
            (None, Classes::Labels(labels)) => {
                let mut largest = 0;
                for index in 0..labels.n_samples() {
                    match labels.get(index) {
                        Ok(label) => largest = largest.max(label),
                        Err(error) if self.reading.skips() && error.is_of_one_sample() => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Ok(largest as usize + 1)
            }
        }
    }
}

/// Bytes that decoding the largest of some images and scaling it needs, as far as their headers tell.
fn largest_work_bytes(images: &impl Source<Item = Picture>) -> u64 {
    let step = images.n_samples().div_ceil(N_PROBED).max(1);
    let of = |index: u64| {
        let Picture::File(Encoded { path, bytes, .. }) = images.get(index).ok()? else {
            return None;
        };
        let (_, [height, width]) = probe(&path, &bytes, &Decode::rgb()).ok()?;
        let scaling = SCALING_BYTES * height as u64 * width as u64;
        Some(decoding_bytes(&path, &bytes, &Decode::rgb()).ok()?.max(scaling))
    };
    (0..images.n_samples()).step_by(step as usize).filter_map(of).max().unwrap_or(0)
}

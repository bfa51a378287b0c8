//! Any source as a [`Dataset`].

use crate::{
    batches::{Batch, Cursor, Order, Tail},
    dataset::{Dataset, Epoch, check},
    error::{Error, Result},
    image_set::ImageSet,
    pipeline::{
        Ahead, At, Groups, HeldBytes, OnCorrupt, Sampler, Samples, Shard, Shuffle, Workers,
        ahead_bytes, group_bytes, workers_bytes,
    },
    pixels::{Layout, Pixels, Table},
    source::Source,
};
use candle_core::{Device, Tensor};
use std::sync::Arc;

// B samples of a batch · C channels · H height · W width · T tokens
/// An image and its class. Its pixels stay bytes until the batch is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelledImage {
    /// A byte for each channel of each pixel, in the [`Layout`] of the set.
    pub pixels: Vec<u8>,
    /// C, H, W, whatever the layout.
    pub dims: [usize; 3],
    /// The class.
    pub label: u32,
}

impl HeldBytes for LabelledImage {
    fn held_bytes(&self) -> u64 {
        self.pixels.held_bytes()
    }
}

/// How samples become the tensors of a batch.
pub trait Collate: Send + Sync + 'static {
    /// A decoded sample.
    type Sample: HeldBytes + Send + 'static;

    /// That the sample fits; asked where it is made, so that the error has its name.
    /// # Errors
    /// If it does not.
    fn check(&self, sample: &Self::Sample) -> Result<()>;

    /// Inputs and targets of the samples, on the device.
    /// # Errors
    /// Candle's.
    fn collate(&self, samples: Vec<Self::Sample>) -> Result<(Tensor, Tensor)>;

    /// Bytes of a sample that fits.
    fn sample_bytes(&self) -> u64;

    /// Bytes of a batch of `n_samples` on the device.
    fn batch_bytes(&self, n_samples: u64) -> u64;

    /// Bytes that making it needs beside the samples and the batch, on the host and the device; none
    /// on the CPU.
    fn making_bytes(&self, n_samples: u64) -> u64;
}

/// Images of one size: `[B, C, H, W]` normalised, and classes `[B]`, u32.
#[derive(Clone, Debug)]
pub struct ImageBatches {
    dims: [usize; 3],
    layout: Layout,
    table: Table,
}

impl ImageBatches {
    /// Images of `dims`, C, H and W, that lie in `layout` and become `pixels`.
    /// # Errors
    /// If they cannot be normalised so, or have no pixel or channel.
    pub fn new(dims: [usize; 3], layout: Layout, pixels: Pixels) -> Result<Self> {
        if dims.contains(&0) {
            return Err(Error::Size { height: dims[1], width: dims[2] });
        }
        Ok(Self { dims, layout, table: Table::new(pixels, dims[0])? })
    }

    fn n_elems(&self) -> u64 {
        self.dims.iter().fold(1u64, |n, &dim| n.saturating_mul(dim as u64))
    }
}

impl Collate for ImageBatches {
    type Sample = LabelledImage;

    fn check(&self, sample: &LabelledImage) -> Result<()> {
        if sample.dims == self.dims && sample.pixels.len() as u64 == self.n_elems() {
            return Ok(());
        }
        Err(Error::SampleShape { got: sample.dims.to_vec(), want: self.dims.to_vec() })
    }

    fn collate(&self, samples: Vec<LabelledImage>) -> Result<(Tensor, Tensor)> {
        let (n, [c, h, w]) = (samples.len(), self.dims);
        let images = samples.iter().map(|sample| &sample.pixels[..]);
        let images = self.table.look_up(images, self.layout, [n, c, h, w])?;
        let labels: Vec<u32> = samples.iter().map(|sample| sample.label).collect();
        Ok((images, Tensor::from_vec(labels, n, self.table.device())?))
    }

    fn sample_bytes(&self) -> u64 {
        self.n_elems()
    }

    fn batch_bytes(&self, n_samples: u64) -> u64 {
        let bytes = self.n_elems().saturating_mul(self.table.bytes_per_elem());
        n_samples.saturating_mul(bytes.saturating_add(4))
    }

    fn making_bytes(&self, n_samples: u64) -> u64 {
        if self.table.device().is_cpu() {
            return 0;
        }
        // The bytes here and there; of one channel its numbers and its floats.
        let n_pixels = self.n_elems() / self.dims[0].max(1) as u64;
        let channel = n_pixels.saturating_mul(4 + self.table.bytes_per_elem());
        n_samples.saturating_mul(self.n_elems().saturating_mul(2).saturating_add(channel))
    }
}

/// Sequences of T + 1 tokens: the first T are the inputs, the last T the targets, `[B, T]`, u32.
#[derive(Clone, Debug)]
pub struct TokenBatches {
    /// T.
    pub seq_tokens: usize,
    /// Where batches are made.
    pub device: Device,
}

impl Collate for TokenBatches {
    type Sample = Vec<u32>;

    fn check(&self, sample: &Vec<u32>) -> Result<()> {
        if sample.len() == self.seq_tokens + 1 {
            return Ok(());
        }
        Err(Error::SampleShape { got: vec![sample.len()], want: vec![self.seq_tokens + 1] })
    }

    fn collate(&self, samples: Vec<Vec<u32>>) -> Result<(Tensor, Tensor)> {
        let (n, t) = (samples.len(), self.seq_tokens);
        let tensor = |first: usize| {
            let mut ids: Vec<u32> = Vec::with_capacity(n * t);
            samples.iter().for_each(|sample| ids.extend(&sample[first..first + t]));
            Tensor::from_vec(ids, (n, t), &self.device)
        };
        Ok((tensor(0)?, tensor(1)?))
    }

    fn sample_bytes(&self) -> u64 {
        4 * (self.seq_tokens as u64 + 1)
    }

    fn batch_bytes(&self, n_samples: u64) -> u64 {
        n_samples.saturating_mul(self.seq_tokens as u64).saturating_mul(8)
    }

    fn making_bytes(&self, n_samples: u64) -> u64 {
        let copy = n_samples.saturating_mul(self.seq_tokens as u64).saturating_mul(4);
        if self.device.is_cpu() { 0 } else { copy }
    }
}

/// How samples are read ahead, and what becomes of bad ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loading {
    /// Seed of augmentation; the order has its own.
    pub seed: u64,
    /// Threads that read and prepare samples.
    pub workers: Workers,
    /// Batches ahead on the device.
    pub ahead: Ahead,
    /// What becomes of corrupt samples.
    pub on_corrupt: OnCorrupt,
    /// Whose samples.
    pub shard: Shard,
}

impl Loading {
    /// No threads; corrupt samples are errors; all samples are this run's.
    pub const PLAIN: Self = Self {
        seed: 0,
        workers: Workers::NONE,
        ahead: Ahead::NONE,
        on_corrupt: OnCorrupt::Fail,
        shard: Shard::ALL,
    };
}

type Prepared<T> = Arc<dyn Fn(Sampler, u64) -> Result<Samples<T>> + Send + Sync>;

/// A source as a [`Dataset`]: read, prepared in workers, gathered, put on the device, one batch ahead.
///
/// *Memory:* [`Loader::held_bytes`].
pub struct Loader<C: Collate> {
    samples: Prepared<C::Sample>,
    n_samples: u64,
    collate: Arc<C>,
    loading: Loading,
}

impl<C: Collate> std::fmt::Debug for Loader<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Loader {{ n_samples: {}, {:?} }}", self.n_samples, self.loading)
    }
}

impl<C: Collate> Loader<C> {
    /// The samples of `source`, each through `prepare`: decoding, augmentation.
    pub fn new<S, F>(source: S, prepare: F, collate: C, loading: Loading) -> Self
    where
        S: Source + 'static,
        S::Item: 'static,
        F: Fn(S::Item, At) -> Result<C::Sample> + Send + Sync + 'static,
    {
        let (source, prepare, collate) = (Arc::new(source), Arc::new(prepare), Arc::new(collate));
        let (n_samples, checked) = (source.n_samples(), collate.clone());
        let samples = move |sampler: Sampler, seed: u64| {
            let (prepare, collate) = (prepare.clone(), checked.clone());
            let prepared = move |sample, at: At| {
                let sample = prepare(sample, At { seed, ..at })?;
                collate.check(&sample)?;
                Ok(sample)
            };
            Ok(Samples::of(source.clone(), sampler)?.map(prepared))
        };
        Self { samples: Arc::new(samples), n_samples, collate, loading }
    }

    /// The same samples, loaded otherwise.
    pub fn with(&self, loading: Loading) -> Self {
        let (samples, collate) = (self.samples.clone(), self.collate.clone());
        Self { samples, n_samples: self.n_samples, collate, loading }
    }

    /// The batches of any epoch, `batch` samples each.
    /// # Errors
    /// If there would be no batch at all.
    pub fn batches(&self, batch: usize, order: Order, tail: Tail) -> Result<Groups<Batch>> {
        check(self.n_samples(), batch, tail)?;
        let Loading { seed: augment_seed, workers, ahead, on_corrupt, shard } = self.loading;
        let sampler = match order {
            Order::Sequential => Sampler { seed: augment_seed, shuffle: Shuffle::Off, shard },
            Order::Shuffled { seed, .. } => Sampler { seed, shuffle: Shuffle::Global, shard },
        };
        let samples =
            (self.samples)(sampler, augment_seed)?.workers(workers).on_corrupt(on_corrupt);
        let collate = self.collate.clone();
        let batches = samples.batch(batch, tail)?.map_at(move |samples, before: Cursor| {
            let (inputs, targets) = collate.collate(samples)?;
            Ok(Batch { inputs, targets, first_index: before.position })
        });
        Ok(batches.prefetch(ahead))
    }

    /// Samples that this rank visits in an epoch, if none is corrupt.
    pub fn n_samples(&self) -> u64 {
        self.loading.shard.n_samples(self.n_samples)
    }

    /// Bytes held at most, host and device together, the batch that the consumer has included:
    /// samples in the workers, a batch of samples being gathered, batches ahead.
    pub fn held_bytes(&self, batch: usize) -> u64 {
        let (batch, sample_bytes) = (batch as u64, self.collate.sample_bytes());
        let samples = workers_bytes(self.loading.workers, sample_bytes);
        let gathered =
            group_bytes(batch, sample_bytes).saturating_add(self.collate.making_bytes(batch));
        let batches = ahead_bytes(self.loading.ahead, self.collate.batch_bytes(batch));
        samples.saturating_add(gathered).saturating_add(batches)
    }
}

impl<C: Collate> Dataset for Loader<C> {
    fn n_samples(&self) -> usize {
        Loader::n_samples(self) as usize
    }

    fn resume(&self, batch: usize, order: Order, tail: Tail, cursor: Cursor) -> Result<Epoch<'_>> {
        Ok(Box::new(self.batches(batch, order, tail)?.resume(cursor)?))
    }

    fn batch_bytes(&self, n_samples: usize) -> u64 {
        self.collate.batch_bytes(n_samples as u64)
    }
}

impl Source for ImageSet {
    type Item = LabelledImage;

    fn n_samples(&self) -> u64 {
        self.n_images() as u64
    }

    fn get(&self, index: u64) -> Result<LabelledImage> {
        let index = index as usize;
        let (dims, label) = ([1, self.height(), self.width()], u32::from(self.label(index)));
        Ok(LabelledImage { pixels: self.image(index).to_vec(), dims, label })
    }
}

//! Samples in files and stores: images and tokens of any format.

mod format;
mod noted;
mod photos;
mod pictures;
mod place;
mod texts;
mod tokens;
pub(crate) use self::{
    format::{FORMAT_NAMES, Format},
    noted::LeftOut,
    photos::{PhotoSource, Photos},
    pictures::Columns,
    place::Place,
    texts::{Reader, tokenizer},
    tokens::{Sequences, TokenSource},
};

use self::noted::{Ledger, Noted};
use anyhow::{Result, ensure};
use std::{
    num::NonZero,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};
use tallow_data::{Ahead, HeldBytes, Loading, OnCorrupt, Permutation, Source, Workers};

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
    const MAX_SAMPLES: usize = 256;

    /// Threads that read ahead: as many as the machine runs at once, if their work, `work_bytes` each,
    /// fits half of what may be read ahead.
    fn n_threads(&self, work_bytes: u64) -> usize {
        if self.prefetch_bytes == 0 {
            return 0;
        }
        let fit = (self.prefetch_bytes / 2).checked_div(work_bytes).unwrap_or(u64::MAX);
        let most = std::thread::available_parallelism().map_or(1, NonZero::get);
        usize::try_from(fit).unwrap_or(most).clamp(1, most)
    }

    /// `work_bytes` is what making a sample needs beside it: with the samples it stays within the
    /// bytes that may be read ahead, or one sample is in the making alone.
    fn loading(&self, work_bytes: u64) -> Loading {
        let n_threads = self.n_threads(work_bytes);
        let work_bytes = work_bytes.saturating_mul(n_threads as u64);
        let max_bytes = self.prefetch_bytes.saturating_sub(work_bytes);
        let workers = Workers { n_threads, max_samples: Self::MAX_SAMPLES, max_bytes };
        let ahead = if n_threads > 0 { Ahead::ONE } else { Ahead::NONE };
        Loading { seed: self.seed, workers, ahead, on_corrupt: self.on_corrupt, ..Loading::PLAIN }
    }

    fn skips(&self) -> bool {
        matches!(self.on_corrupt, OnCorrupt::Skip { .. })
    }
}

/// What reading samples came to, over all threads.
#[derive(Debug, Default)]
pub(crate) struct Spent {
    read_nanos: AtomicU64,
    prepare_nanos: AtomicU64,
    read_bytes: AtomicU64,
    left_out: Ledger,
}

impl Spent {
    fn read(&self, start: Instant, n_bytes: u64) {
        self.read_bytes.fetch_add(n_bytes, Ordering::Relaxed);
        add_since(&self.read_nanos, start);
    }

    fn prepared(&self, start: Instant) {
        add_since(&self.prepare_nanos, start);
    }

    /// Seconds in which threads waited for the source, those in which they decoded and changed images,
    /// and bytes of the samples as the source hands them out.
    pub(crate) fn so_far(&self) -> (f64, f64, u64) {
        let secs = |nanos: &AtomicU64| nanos.load(Ordering::Relaxed) as f64 / 1e9;
        let n_bytes = self.read_bytes.load(Ordering::Relaxed);
        (secs(&self.read_nanos), secs(&self.prepare_nanos), n_bytes)
    }

    /// What epochs left out, by their order: shuffled ones train, the others judge.
    pub(crate) fn left_out(&self, is_shuffled: bool) -> LeftOut {
        self.left_out.of(is_shuffled)
    }
}

fn add_since(nanos: &AtomicU64, start: Instant) {
    let elapsed = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    nanos.fetch_add(elapsed, Ordering::Relaxed);
}

/// Some of a source's samples: a run of an order.
pub(crate) struct Part<S: ?Sized> {
    source: Arc<S>,
    /// `None`: as they lie.
    order: Option<Permutation>,
    first: u64,
    n_samples: u64,
    spent: Arc<Spent>,
}

impl<S: ?Sized> Clone for Part<S> {
    fn clone(&self) -> Self {
        let Self { source, order, first, n_samples, spent } = self;
        let (source, order, spent) = (Arc::clone(source), order.clone(), Arc::clone(spent));
        Self { source, order, first: *first, n_samples: *n_samples, spent }
    }
}

impl<S: Source + ?Sized> Part<S> {
    /// All but the last `n_held_out`, and these.
    fn split(source: Arc<S>, order: Option<Permutation>, n_held_out: u64) -> (Self, Self) {
        let n_train = source.n_samples() - n_held_out;
        let train = Self { source, order, first: 0, n_samples: n_train, spent: Arc::default() };
        let judged = Self { first: n_train, n_samples: n_held_out, ..train.clone() };
        (train, Self { spent: Arc::default(), ..judged })
    }

    fn index(&self, index: u64) -> u64 {
        let place = self.first + index;
        self.order.as_ref().map_or(place, |order| order.index(place))
    }

    fn spent(&self) -> &Spent {
        &self.spent
    }
}

impl<S: Source<Item: HeldBytes> + ?Sized> Source for Part<S> {
    type Item = S::Item;

    fn n_samples(&self) -> u64 {
        self.n_samples
    }

    fn get(&self, index: u64) -> tallow_data::Result<S::Item> {
        let start = Instant::now();
        let sample = self.source.get(self.index(index))?;
        self.spent.read(start, sample.held_bytes());
        Ok(sample)
    }

    fn name(&self, index: u64) -> String {
        self.source.name(self.index(index))
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

//! What a trainer draws batches from.

use crate::{
    batches::{Batch, Batches, Cursor, Order, Tail},
    error::{Error, Result},
    image_set::ImageSet,
    pipeline::{Run, Skip},
    pixels::Pixels,
};

/// Batches of the rest of an epoch, and where it stands.
pub trait BatchIter: Iterator<Item = Result<Batch>> {
    /// Where to go on after the batch that was handed out last.
    fn cursor(&self) -> Cursor;

    /// How many corrupt samples were left out: none where [`OnCorrupt`](crate::OnCorrupt) is not asked.
    fn n_skipped(&self) -> u64 {
        0
    }

    /// The first of them.
    fn skipped(&self) -> Vec<Skip> {
        Vec::new()
    }
}

/// Batches of one epoch.
pub type Epoch<'a> = Box<dyn BatchIter + 'a>;

/// Samples that can be visited in the order of any epoch.
pub trait Dataset: Send + Sync {
    /// Samples of an epoch.
    fn n_samples(&self) -> usize;

    /// The batches of one epoch, of `batch` samples each; each is made when it is asked for.
    /// # Errors
    /// If there would be no batch at all.
    fn epoch(&self, batch: usize, order: Order, tail: Tail) -> Result<Epoch<'_>> {
        let epoch = match order {
            Order::Sequential => 0,
            Order::Shuffled { epoch, .. } => epoch,
        };
        self.resume(batch, order, tail, Cursor::epoch(epoch))
    }

    /// The batches of the epoch of `cursor` that come after it, as an epoch that was never stopped
    /// would have gone on.
    /// # Errors
    /// If an epoch would have no batch at all, or the cursor is of other samples.
    fn resume(&self, batch: usize, order: Order, tail: Tail, cursor: Cursor) -> Result<Epoch<'_>>;

    /// Bytes of a batch of `n_samples` samples on the device.
    fn batch_bytes(&self, n_samples: usize) -> u64;
}

/// That an epoch of `n_samples` has a batch of `batch`.
pub(crate) fn check(n_samples: u64, batch: usize, tail: Tail) -> Result<()> {
    match (batch as u64, n_samples, tail) {
        (0, ..) => Err(Error::ZeroBatch),
        (_, 0, _) => Err(Error::EmptySet),
        (batch, n, Tail::Drop) if n < batch => {
            Err(Error::NoWholeBatch { n_images: n, batch_images: batch })
        }
        _ => Ok(()),
    }
}

impl BatchIter for Batches {
    fn cursor(&self) -> Cursor {
        Batches::cursor(self)
    }
}

impl BatchIter for Run<Batch> {
    fn cursor(&self) -> Cursor {
        Run::cursor(self)
    }

    fn n_skipped(&self) -> u64 {
        Run::n_skipped(self)
    }

    fn skipped(&self) -> Vec<Skip> {
        Run::skipped(self)
    }
}

/// An image set and what its pixels become.
#[derive(Clone, Debug)]
pub struct Images {
    /// The images.
    pub set: ImageSet,
    /// What their bytes become.
    pub pixels: Pixels,
}

impl Dataset for Images {
    fn n_samples(&self) -> usize {
        self.set.n_images()
    }

    fn resume(&self, batch: usize, order: Order, tail: Tail, cursor: Cursor) -> Result<Epoch<'_>> {
        let mut batches = self.set.batches(batch, order, tail, self.pixels.clone())?;
        batches.seek(cursor)?;
        Ok(Box::new(batches))
    }

    fn batch_bytes(&self, n_samples: usize) -> u64 {
        let [n, height, width] = [n_samples, self.set.height(), self.set.width()].map(|n| n as u64);
        crate::batch_bytes(n, height, width, self.pixels.dtype.size_in_bytes() as u64)
    }
}

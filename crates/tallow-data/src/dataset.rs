//! What a trainer draws batches from.

use crate::{
    batches::{Batch, Order, Tail},
    error::Result,
    image_set::ImageSet,
    pixels::Pixels,
};

/// Batches of one epoch.
pub type Epoch<'a> = Box<dyn Iterator<Item = Result<Batch>> + 'a>;

/// Samples that can be visited in the order of any epoch.
pub trait Dataset: Send + Sync {
    /// Samples of an epoch.
    fn n_samples(&self) -> usize;

    /// The batches of one epoch, of `batch` samples each; each is made when it is asked for.
    /// # Errors
    /// If there would be no batch at all.
    fn epoch(&self, batch: usize, order: Order, tail: Tail) -> Result<Epoch<'_>>;

    /// Bytes of a batch of `n_samples` samples on the device.
    fn batch_bytes(&self, n_samples: usize) -> u64;
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

    fn epoch(&self, batch: usize, order: Order, tail: Tail) -> Result<Epoch<'_>> {
        Ok(Box::new(self.set.batches(batch, order, tail, self.pixels.clone())?))
    }

    fn batch_bytes(&self, n_samples: usize) -> u64 {
        let [n, height, width] = [n_samples, self.set.height(), self.set.width()].map(|n| n as u64);
        crate::batch_bytes(n, height, width, self.pixels.dtype.size_in_bytes() as u64)
    }
}

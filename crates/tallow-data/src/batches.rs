use crate::{
    dataset::check,
    error::{Error, Result},
    image_set::ImageSet,
    permutation::Permutation,
    pixels::{Layout, Pixels, Table},
};
use candle_core::Tensor;

// B images of a batch · H height · W width
/// Bytes of one batch: a float a pixel, a `u32` a label. Making it on the CPU needs no more than
/// these; on another device, as many on the host until the copy is done.
pub const fn batch_bytes(n_images: u64, height: u64, width: u64, bytes_per_elem: u64) -> u64 {
    n_images * (height * width * bytes_per_elem + 4)
}

/// In which order an epoch visits the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they are stored.
    Sequential,
    /// By the [`Permutation`] of `seed` and `epoch`.
    Shuffled {
        /// Of the run.
        seed: u64,
        /// Where the iterator starts; a cursor may take it to another.
        epoch: u64,
    },
}

/// What becomes of the images that do not fill a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// They make a smaller last batch.
    Keep,
    /// They are left out of this epoch.
    Drop,
}

/// A place in the data: what the consumer has received, not what was read ahead. With the seed and
/// the settings, it is all the state a run through the data has, and goes on with the very next sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Which order; all are the same to [`Order::Sequential`].
    pub epoch: u64,
    /// Samples of this epoch's order that are done, handed out or left out: a count of samples, so
    /// that it outlives a change of batch; of all ranks together, so that it outlives a change of ranks.
    pub position: u64,
    /// What is done of the group that begins at `position`: tokens of a document, or batches of a
    /// window. 0 where groups do not overlap.
    pub within: u64,
    /// Of the samples before `position`, how many were left out because they were corrupt.
    pub skipped: u64,
}

impl Cursor {
    /// The start of an epoch.
    pub const fn epoch(epoch: u64) -> Self {
        Self { epoch, position: 0, within: 0, skipped: 0 }
    }
}

/// Some samples and their targets, on the device.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Images `[B, C, H, W]`, normalised; or token ids `[B, T]`, `u32`.
    pub inputs: Tensor,
    /// Classes `[B]`, or the ids of the next tokens `[B, T]`; `u32`.
    pub targets: Tensor,
    /// Which sample of the epoch's order comes first in this batch; the others follow it.
    pub first_index: u64,
}

impl ImageSet {
    /// The batches of one epoch, of `batch_images` each.
    ///
    /// The iterator holds a view of the set and a table of 256 values. A batch is made when it is
    /// asked for and belongs to the caller: drop it before the next call, and only one exists.
    ///
    /// # Errors
    /// If there would be no batch at all, or `pixels` cannot be normalised as asked.
    pub fn batches(
        &self,
        batch_images: usize,
        order: Order,
        tail: Tail,
        pixels: Pixels,
    ) -> Result<Batches> {
        let n_images = self.n_images() as u64;
        check(n_images, batch_images, tail)?;
        let table = Table::new(pixels, 1)?;
        let epoch = match order {
            Order::Sequential => 0,
            Order::Shuffled { epoch, .. } => epoch,
        };
        let cursor = Cursor::epoch(epoch);
        let permutation = permutation(order, n_images, epoch);
        Ok(Batches { set: self.clone(), table, batch_images, order, tail, permutation, cursor })
    }
}

fn permutation(order: Order, n_images: u64, epoch: u64) -> Option<Permutation> {
    match order {
        Order::Sequential => None,
        Order::Shuffled { seed, .. } => Some(Permutation::new(n_images, seed, epoch)),
    }
}

/// The batches of an epoch from a cursor on; made by [`ImageSet::batches`].
///
/// The cursor moves past a batch even if making it was an error, so that a loop over the errors
/// ends; to try the same batch again, [`seek`](Batches::seek) the cursor read before.
#[derive(Clone, Debug)]
pub struct Batches {
    set: ImageSet,
    table: Table,
    batch_images: usize,
    order: Order,
    tail: Tail,
    permutation: Option<Permutation>,
    cursor: Cursor,
}

impl Batches {
    /// Where the next batch begins.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Goes on from `cursor`, in its epoch's order; the epoch may be another one.
    ///
    /// # Errors
    /// If the position is past the end of the set: the cursor belongs to another.
    pub fn seek(&mut self, cursor: Cursor) -> Result<()> {
        let n_images = self.set.n_images() as u64;
        if cursor.position > n_images {
            return Err(Error::Cursor { position: cursor.position, n_images });
        }
        self.permutation = permutation(self.order, n_images, cursor.epoch);
        self.cursor = cursor;
        Ok(())
    }

    /// Batches of a whole epoch, at least 1.
    pub fn n_batches(&self) -> u64 {
        self.batches_in(self.set.n_images())
    }

    /// Bytes of a whole batch on the device, [`batch_bytes`].
    pub fn batch_bytes(&self) -> u64 {
        let (height, width) = (self.set.height() as u64, self.set.width() as u64);
        batch_bytes(self.batch_images as u64, height, width, self.table.bytes_per_elem())
    }

    fn batches_in(&self, n_images: usize) -> u64 {
        match self.tail {
            Tail::Keep => n_images.div_ceil(self.batch_images) as u64,
            Tail::Drop => (n_images / self.batch_images) as u64,
        }
    }

    fn n_images_left(&self) -> usize {
        self.set.n_images() - self.cursor.position as usize
    }

    /// Which image of the set is at `position` of the order.
    fn index(&self, position: usize) -> usize {
        self.permutation
            .as_ref()
            .map_or(position, |permutation| permutation.index(position as u64) as usize)
    }

    fn load(&self, first: usize, n_images: usize) -> Result<Batch> {
        let indices = (first..first + n_images).map(|position| self.index(position));
        let images = indices.clone().map(|index| self.set.image(index));
        let images = self.table.look_up(
            images,
            Layout::ChannelsFirst,
            [n_images, 1, self.set.height(), self.set.width()],
        )?;
        let labels: Vec<u32> = indices.map(|index| u32::from(self.set.label(index))).collect();
        let labels = Tensor::from_vec(labels, n_images, self.table.device())?;
        Ok(Batch { inputs: images, targets: labels, first_index: first as u64 })
    }
}

impl Iterator for Batches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let n_images = self.n_images_left().min(self.batch_images);
        if n_images == 0 || (self.tail == Tail::Drop && n_images < self.batch_images) {
            return None;
        }
        let first = self.cursor.position as usize;
        self.cursor.position += n_images as u64;
        Some(self.load(first, n_images))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let n_left = self.batches_in(self.n_images_left()) as usize;
        (n_left, Some(n_left))
    }
}

impl ExactSizeIterator for Batches {}
impl std::iter::FusedIterator for Batches {}

//! Samples made up on the fly: for planning, rehearsing and measuring without any data.

use crate::{
    batches::{Batch, Cursor, Order, Tail},
    dataset::{BatchIter, Dataset, Epoch, check},
    error::{Error, Result},
    permutation::Permutation,
    rng::{Rng, mix},
};
use candle_core::{DType, Device, Tensor};

/// What each sample is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An image `[channels, height, width]` of noise with mean 0 and variance 1, and a class.
    Images {
        /// Channels, height, width.
        dims: [usize; 3],
        /// Classes.
        n_classes: usize,
        /// A float type.
        dtype: DType,
    },
    /// A sequence of token ids, and of the ids that follow each.
    Tokens {
        /// Tokens of a sequence.
        n_tokens: usize,
        /// Token ids are below this.
        vocab: usize,
    },
}

/// Samples that are functions of the seed and their index.
///
/// *Memory:* nothing but the batch handed out.
#[derive(Clone, Debug)]
pub struct Synthetic {
    /// What each sample is.
    pub kind: Kind,
    /// Samples of an epoch.
    pub n_samples: usize,
    /// Another seed, other samples.
    pub seed: u64,
    /// Where batches are made.
    pub device: Device,
}

impl Dataset for Synthetic {
    fn n_samples(&self) -> usize {
        self.n_samples
    }

    fn resume(&self, batch: usize, order: Order, tail: Tail, cursor: Cursor) -> Result<Epoch<'_>> {
        let n = self.n_samples as u64;
        check(n, batch, tail)?;
        if cursor.position > n {
            return Err(Error::Cursor { position: cursor.position, n_images: n });
        }
        let permutation = match order {
            Order::Sequential => None,
            Order::Shuffled { seed, .. } => Some(Permutation::new(n, seed, cursor.epoch)),
        };
        Ok(Box::new(Made { samples: self, batch: batch as u64, tail, permutation, cursor }))
    }

    fn batch_bytes(&self, n_samples: usize) -> u64 {
        let n = n_samples as u64;
        match self.kind {
            Kind::Images { dims, dtype, .. } => {
                let n_elems = dims.iter().fold(1u64, |n, &dim| n.saturating_mul(dim as u64));
                let bytes = n_elems.saturating_mul(dtype.size_in_bytes() as u64);
                n.saturating_mul(bytes.saturating_add(4))
            }
            Kind::Tokens { n_tokens, .. } => n.saturating_mul(n_tokens as u64).saturating_mul(8),
        }
    }
}

/// Batches of the rest of an epoch.
struct Made<'a> {
    samples: &'a Synthetic,
    batch: u64,
    tail: Tail,
    permutation: Option<Permutation>,
    cursor: Cursor,
}

impl Iterator for Made<'_> {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let first = self.cursor.position;
        let n = self.batch.min(self.samples.n_samples as u64 - first);
        if n == 0 || (self.tail == Tail::Drop && n < self.batch) {
            return None;
        }
        self.cursor.position += n;
        let index = |place| self.permutation.as_ref().map_or(place, |p| p.index(place));
        Some(self.samples.batch((first..first + n).map(index).collect(), first))
    }
}

impl BatchIter for Made<'_> {
    fn cursor(&self) -> Cursor {
        self.cursor
    }
}

impl Synthetic {
    fn batch(&self, samples: Vec<u64>, first_index: u64) -> Result<Batch> {
        let n = samples.len();
        let streams = samples.iter().map(|&i| Rng::from_state(mix(self.seed ^ mix(i))));
        let (inputs, targets) = match self.kind {
            Kind::Images { dims: [c, h, w], n_classes, dtype } => {
                let mut labels = Vec::with_capacity(n);
                let mut pixels = Vec::with_capacity(n * c * h * w);
                for mut stream in streams {
                    labels.push(stream.below(n_classes as u64) as u32);
                    pixels.extend((0..c * h * w).map(|_| noise(&mut stream)));
                }
                let images = Tensor::from_vec(pixels, (n, c, h, w), &Device::Cpu)?;
                let images = images.to_dtype(dtype)?.to_device(&self.device)?;
                (images, Tensor::from_vec(labels, n, &self.device)?)
            }
            Kind::Tokens { n_tokens, vocab } => {
                let (mut ids, mut next) = (Vec::new(), Vec::new());
                for mut stream in streams {
                    let all: Vec<u32> =
                        (0..=n_tokens).map(|_| stream.below(vocab as u64) as u32).collect();
                    ids.extend(&all[..n_tokens]);
                    next.extend(&all[1..]);
                }
                let tensor = |ids: Vec<u32>| Tensor::from_vec(ids, (n, n_tokens), &self.device);
                (tensor(ids)?, tensor(next)?)
            }
        };
        Ok(Batch { inputs, targets, first_index })
    }
}

/// Uniform, with mean 0 and variance 1.
fn noise(rng: &mut Rng) -> f32 {
    (rng.unit() - 0.5) * 12f32.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens() -> Synthetic {
        let kind = Kind::Tokens { n_tokens: 5, vocab: 7 };
        Synthetic { kind, n_samples: 10, seed: 3, device: Device::Cpu }
    }

    fn ids(batch: &Batch) -> Vec<Vec<u32>> {
        batch.inputs.to_vec2().unwrap()
    }

    #[test]
    fn samples_do_not_depend_on_batches_or_order() {
        let source = tokens();
        let all = |batch, order| -> Vec<Vec<u32>> {
            let epoch = source.epoch(batch, order, Tail::Keep).unwrap();
            epoch.flat_map(|batch| ids(&batch.unwrap())).collect()
        };
        let straight = all(10, Order::Sequential);
        assert_eq!(all(3, Order::Sequential), straight);
        let (mut shuffled, mut sorted) =
            (all(4, Order::Shuffled { seed: 1, epoch: 2 }), straight.clone());
        assert_ne!(shuffled, straight);
        shuffled.sort();
        sorted.sort();
        assert_eq!(shuffled, sorted);
        assert!(straight.iter().flatten().all(|&id| id < 7));
    }

    #[test]
    fn targets_are_the_next_tokens() {
        let batch = tokens().epoch(2, Order::Sequential, Tail::Keep).unwrap().next().unwrap();
        let batch = batch.unwrap();
        let next: Vec<Vec<u32>> = batch.targets.to_vec2().unwrap();
        for (ids, next) in ids(&batch).iter().zip(&next) {
            assert_eq!(ids[1..], next[..4]);
        }
        assert_eq!(tokens().batch_bytes(2), 2 * (5 + 5) * 4);
    }

    #[test]
    fn noise_has_mean_0_and_variance_1() {
        let kind = Kind::Images { dims: [3, 32, 32], n_classes: 10, dtype: DType::F32 };
        let source = Synthetic { kind, n_samples: 4, seed: 0, device: Device::Cpu };
        let batch = source.epoch(4, Order::Sequential, Tail::Keep).unwrap().next().unwrap();
        let batch = batch.unwrap();
        assert_eq!(batch.inputs.dims(), [4, 3, 32, 32]);
        let mean: f32 = batch.inputs.mean_all().unwrap().to_scalar().unwrap();
        let square: f32 = batch.inputs.sqr().unwrap().mean_all().unwrap().to_scalar().unwrap();
        // Standard errors over 12 288 values: 0.009 of the mean, 0.008 of the square.
        assert!(mean.abs() < 0.04 && (square - 1.0).abs() < 0.04, "{mean} {square}");
        assert_eq!(source.batch_bytes(4), 4 * (3 * 32 * 32 * 4 + 4));
    }

    #[test]
    fn no_batch_is_an_error() {
        let empty = Synthetic { n_samples: 0, ..tokens() };
        let epoch = |source: &Synthetic, batch, tail| {
            source.epoch(batch, Order::Sequential, tail).map(|_| ()).unwrap_err()
        };
        assert!(matches!(epoch(&tokens(), 0, Tail::Keep), Error::ZeroBatch));
        assert!(matches!(epoch(&empty, 1, Tail::Keep), Error::EmptySet));
        assert!(matches!(epoch(&tokens(), 11, Tail::Drop), Error::NoWholeBatch { .. }));
    }
}

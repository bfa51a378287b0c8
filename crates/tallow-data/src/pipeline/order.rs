//! Which samples are visited, in which order, by which rank.

use crate::{
    batches::Tail,
    error::{Error, Result},
    permutation::Permutation,
    rng::Rng,
};
use std::{cmp::Reverse, collections::BinaryHeap};

/// How the samples of an epoch are visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    /// Of the run: with the epoch and the index it decides all order and all augmentation.
    pub seed: u64,
    /// The order.
    pub shuffle: Shuffle,
    /// Whose samples.
    pub shard: Shard,
}

/// The order of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    /// As they are stored; every epoch the same.
    Off,
    /// The [`Permutation`] of all samples that belongs to the seed and the epoch. 80 bytes. Not for
    /// streams.
    Global,
    /// A buffer of at most `n_samples`. Sample `i` is visited in the order of `i + u`, `u` uniform
    /// in `0..n_samples`: no sample moves further than that either way, and a resumed run reads at
    /// most `n_samples` again.
    Window {
        /// Size of the buffer.
        n_samples: u64,
    },
}

/// Bytes that [`Shuffle::Window`] holds over a stream whose largest sample has `sample_bytes`; over a
/// source it holds numbers, 40 bytes each.
pub const fn shuffle_bytes(n_samples: u64, sample_bytes: u64) -> u64 {
    n_samples.saturating_mul(sample_bytes.saturating_add(64))
}

/// The part of an epoch that one of `n_ranks` visits: of the order, the places `rank`,
/// `rank + n_ranks`, ... from where the run began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Below `n_ranks`.
    pub rank: u64,
    /// How many share the epoch.
    pub n_ranks: u64,
    /// `Drop`: all ranks visit equally many, up to `n_ranks - 1` samples of the epoch are left out.
    /// `Keep`: each sample once, the first ranks may visit one more.
    pub tail: Tail,
}

impl Shard {
    /// All samples, for a run of one rank.
    pub const ALL: Self = Self { rank: 0, n_ranks: 1, tail: Tail::Keep };

    /// Samples that this rank visits in an epoch of `n_samples`.
    pub const fn n_samples(&self, n_samples: u64) -> u64 {
        let extra = match self.tail {
            Tail::Keep => (n_samples % self.n_ranks > self.rank) as u64,
            Tail::Drop => 0,
        };
        n_samples / self.n_ranks + extra
    }

    fn check(&self) -> Result<()> {
        let Self { rank, n_ranks, .. } = *self;
        if rank < n_ranks { Ok(()) } else { Err(Error::Rank { rank, n_ranks }) }
    }
}

impl Sampler {
    /// Every sample by one rank, in the order of the global shuffle.
    pub const fn shuffled(seed: u64) -> Self {
        Self { seed, shuffle: Shuffle::Global, shard: Shard::ALL }
    }

    /// Every sample by one rank, as they are stored; the seed is that of augmentation.
    pub const fn sequential(seed: u64) -> Self {
        Self { seed, shuffle: Shuffle::Off, shard: Shard::ALL }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.shuffle == (Shuffle::Window { n_samples: 0 }) {
            return Err(Error::ZeroWindow);
        }
        self.shard.check()
    }

    /// This rank's indices of a source of `n`, from `position` on, each with the position after it.
    pub(crate) fn indices(&self, n: u64, epoch: u64, position: u64) -> Result<Order<u64>> {
        if position > n {
            return Err(Error::Cursor { position, n_images: n });
        }
        Ok(match self.shuffle {
            Shuffle::Off => self.rounds(position, position..n),
            Shuffle::Global => {
                let permutation = Permutation::new(n, self.seed, epoch);
                self.rounds(position, (position..n).map(move |place| permutation.index(place)))
            }
            Shuffle::Window { .. } => {
                self.windowed(epoch, position, |first| Ok(Box::new(first..n)))?
            }
        })
    }

    /// The same of what `open` yields from any number on.
    pub(crate) fn windowed<T: Send + 'static>(
        &self,
        epoch: u64,
        position: u64,
        open: impl FnOnce(u64) -> Result<Box<dyn Iterator<Item = T> + Send>>,
    ) -> Result<Order<T>> {
        let Shuffle::Window { n_samples } = self.shuffle else {
            return Ok(self.rounds(position, open(position)?));
        };
        // All samples before `first` are among the `position` first of the order: their keys are
        // below `position`, and so few samples have such keys.
        let first = position.saturating_sub(n_samples);
        let key = [self.seed, epoch];
        let mut shuffled =
            Window { upstream: open(first)?, next: first, n_samples, key, heap: BinaryHeap::new() };
        for _ in first..position {
            if shuffled.next().is_none() {
                break;
            }
        }
        Ok(self.rounds(position, shuffled))
    }

    fn rounds<T>(
        &self,
        position: u64,
        order: impl Iterator<Item = T> + Send + 'static,
    ) -> Order<T> {
        Box::new(Rounds { order, position, shard: self.shard })
    }
}

/// Samples, and the position after each.
pub(crate) type Order<T> = Box<dyn Iterator<Item = (T, u64)> + Send>;

/// One rank's of every `n_ranks` samples.
struct Rounds<I> {
    order: I,
    position: u64,
    shard: Shard,
}

impl<T, I: Iterator<Item = T>> Iterator for Rounds<I> {
    type Item = (T, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let Shard { rank, n_ranks, tail } = self.shard;
        for _ in 0..rank {
            self.order.next()?;
        }
        let own = self.order.next()?;
        self.position += rank + 1;
        for _ in rank + 1..n_ranks {
            match (self.order.next(), tail) {
                (Some(_), _) => self.position += 1,
                (None, Tail::Keep) => break,
                (None, Tail::Drop) => return None,
            }
        }
        Some((own, self.position))
    }
}

/// See [`Shuffle::Window`].
struct Window<T> {
    upstream: Box<dyn Iterator<Item = T> + Send>,
    /// The number of the next sample of `upstream`.
    next: u64,
    n_samples: u64,
    key: [u64; 2],
    heap: BinaryHeap<Reverse<Waiting<T>>>,
}

struct Waiting<T> {
    /// Where it wants to be, a random number against ties, and where it was.
    key: (u64, u64, u64),
    sample: T,
}

impl<T> Iterator for Window<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        // Whatever comes later wants to be at `next` or behind.
        while self.heap.peek().is_none_or(|Reverse(least)| least.key.0 >= self.next) {
            let Some(sample) = self.upstream.next() else { break };
            let mut rng = Rng::keyed(&[self.key[0], self.key[1], self.next]);
            let place = self.next.saturating_add(rng.below(self.n_samples));
            self.heap.push(Reverse(Waiting { key: (place, rng.next_u64(), self.next), sample }));
            self.next += 1;
        }
        self.heap.pop().map(|Reverse(least)| least.sample)
    }
}

impl<T> PartialEq for Waiting<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}
impl<T> Eq for Waiting<T> {}
impl<T> PartialOrd for Waiting<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for Waiting<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(shuffle: Shuffle, rank: u64, n_ranks: u64, tail: Tail) -> Sampler {
        Sampler { seed: 5, shuffle, shard: Shard { rank, n_ranks, tail } }
    }

    fn all(sampler: Sampler, n: u64, epoch: u64, position: u64) -> Vec<(u64, u64)> {
        sampler.indices(n, epoch, position).unwrap().collect()
    }

    fn a_shuffle() -> impl Strategy<Value = Shuffle> {
        let window = (1..40u64).prop_map(|n_samples| Shuffle::Window { n_samples });
        prop_oneof![Just(Shuffle::Off), Just(Shuffle::Global), window]
    }

    proptest! {
        #[test]
        fn ranks_share_an_epoch(n in 0..200u64, n_ranks in 1..8u64, shuffle in a_shuffle()) {
            for tail in [Tail::Keep, Tail::Drop] {
                let mut seen = Vec::new();
                for rank in 0..n_ranks {
                    let sampler = sampler(shuffle, rank, n_ranks, tail);
                    let own = all(sampler, n, 3, 0);
                    prop_assert_eq!(own.len() as u64, sampler.shard.n_samples(n));
                    seen.extend(own.into_iter().map(|(index, _)| index));
                }
                let n_seen = seen.len() as u64;
                seen.sort_unstable();
                seen.dedup();
                prop_assert_eq!(seen.len() as u64, n_seen);
                let want = if tail == Tail::Keep { n } else { n - n % n_ranks };
                prop_assert_eq!(n_seen, want);
            }
        }

        #[test]
        fn any_position_goes_on(n in 0..150u64, n_ranks in 1..4u64, shuffle in a_shuffle(), at: u64) {
            let sampler = sampler(shuffle, at % n_ranks, n_ranks, Tail::Drop);
            let straight = all(sampler, n, 1, 0);
            let done = (at % (straight.len() as u64 + 1)) as usize;
            let position = done.checked_sub(1).map_or(0, |last| straight[last].1);
            prop_assert_eq!(&all(sampler, n, 1, position)[..], &straight[done..]);
        }

        /// All ranks at the same place: any other number of ranks shares what is left.
        #[test]
        fn another_number_of_ranks_goes_on(n in 0..150u64, shuffle in a_shuffle(), before in 1..5u64, after in 1..5u64, at: u64) {
            let rounds = at % (n / before + 1);
            let mut seen = Vec::new();
            for rank in 0..before {
                let own = all(sampler(shuffle, rank, before, Tail::Drop), n, 0, 0);
                seen.extend(own[..rounds as usize].iter().map(|&(index, _)| index));
            }
            for rank in 0..after {
                let rest = all(sampler(shuffle, rank, after, Tail::Keep), n, 0, rounds * before);
                seen.extend(rest.into_iter().map(|(index, _)| index));
            }
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..n));
        }

        #[test]
        fn a_window_moves_no_sample_further(n in 0..500u64, n_samples in 1..60u64) {
            let sampler = sampler(Shuffle::Window { n_samples }, 0, 1, Tail::Keep);
            for (place, (index, _)) in all(sampler, n, 2, 0).into_iter().enumerate() {
                prop_assert!(index.abs_diff(place as u64) <= n_samples);
            }
        }
    }

    #[test]
    fn a_window_shuffles_and_stays_small() {
        let n_samples = 100;
        let upstream: Box<dyn Iterator<Item = u64> + Send> = Box::new(0..10_000);
        let mut window =
            Window { upstream, next: 0, n_samples, key: [1, 1], heap: BinaryHeap::new() };
        let (mut largest, mut moved) = (0, 0);
        let mut place = 0u64;
        while let Some(index) = window.next() {
            largest = largest.max(window.heap.len());
            moved += index.abs_diff(place);
            place += 1;
        }
        assert!(largest <= 100, "{largest}");
        // A sample moves by |u - mean of u|, a quarter of the window on average; a tenth of that is
        // thirty standard errors.
        let mean = moved as f64 / 10_000.0;
        assert!((mean - 25.0).abs() < 2.5, "{mean}");
    }

    #[test]
    fn what_is_no_shard_is_refused() {
        let error = sampler(Shuffle::Off, 3, 3, Tail::Keep).check().unwrap_err();
        assert!(matches!(error, Error::Rank { rank: 3, n_ranks: 3 }), "{error}");
        assert!(sampler(Shuffle::Off, 0, 0, Tail::Keep).check().is_err());
        assert!(sampler(Shuffle::Window { n_samples: 0 }, 0, 1, Tail::Keep).check().is_err());
    }
}

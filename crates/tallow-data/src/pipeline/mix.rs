use super::Stream;
use crate::{
    error::{Error, Result},
    source::Source,
};
use std::sync::Arc;

/// Several sources in fixed proportions, as one.
///
/// Of every `sum of weights` samples, source `i` gives `weights[i]`, spread evenly (smooth weighted
/// round robin). Where a sample comes from is a function of its number alone, so that any order,
/// rank and cursor works as on one source.
///
/// *Memory:* [`mix_bytes`].
pub struct Mix<T> {
    sources: Vec<Arc<dyn Source<Item = T>>>,
    period: Period,
    n_samples: u64,
}

/// Bytes of a mix whose weights, without their common divisor, add up to `sum_of_weights`.
pub const fn mix_bytes(sum_of_weights: u64) -> u64 {
    sum_of_weights.saturating_mul(8)
}

/// The most that weights may add up to.
const MOST: u32 = 1 << 16;

impl<T: Send> Mix<T> {
    /// Ends when the first source would have to repeat a sample: none is seen twice.
    /// # Errors
    /// If a source is empty, or the weights are not one above 0 each, 65 536 together at most.
    pub fn until_first_ends(
        sources: Vec<Arc<dyn Source<Item = T>>>,
        weights: &[u32],
    ) -> Result<Self> {
        Self::new(sources, weights, |periods| periods.map(|(n, weight)| n / weight).min())
    }

    /// Ends when each source was seen whole: all but the last repeat samples.
    /// # Errors
    /// Those of [`Mix::until_first_ends`].
    pub fn until_all_ended(
        sources: Vec<Arc<dyn Source<Item = T>>>,
        weights: &[u32],
    ) -> Result<Self> {
        Self::new(sources, weights, |periods| periods.map(|(n, weight)| n.div_ceil(weight)).max())
    }

    fn new(
        sources: Vec<Arc<dyn Source<Item = T>>>,
        weights: &[u32],
        n_periods: impl FnOnce(&mut dyn Iterator<Item = (u64, u64)>) -> Option<u64>,
    ) -> Result<Self> {
        let period = Period::new(weights, sources.len())?;
        if sources.iter().any(|source| source.n_samples() == 0) {
            return Err(Error::EmptySet);
        }
        let weights = period.weights.iter().map(|&weight| u64::from(weight));
        let mut sizes = sources.iter().map(|source| source.n_samples()).zip(weights);
        let n_places = period.places.len() as u64;
        let n_samples = n_periods(&mut sizes).unwrap_or(0).saturating_mul(n_places);
        Ok(Self { sources, period, n_samples })
    }

    fn find(&self, index: u64) -> (&dyn Source<Item = T>, u64) {
        let (source, number) = self.period.find(index);
        let source = &*self.sources[source];
        (source, number % source.n_samples())
    }
}

/// Several streams in fixed proportions, as one; see [`Mix`]. Ends where the first of them ends.
pub struct MixStream<T> {
    streams: Vec<Arc<dyn Stream<Item = T>>>,
    period: Period,
}

impl<T: Send> MixStream<T> {
    /// Of every `sum of weights` samples, `weights[i]` of stream `i`.
    /// # Errors
    /// If the weights are not one above 0 each, 65 536 together at most.
    pub fn new(streams: Vec<Arc<dyn Stream<Item = T>>>, weights: &[u32]) -> Result<Self> {
        let period = Period::new(weights, streams.len())?;
        Ok(Self { streams, period })
    }
}

impl<T: Send + 'static> Stream for MixStream<T> {
    type Item = T;

    fn open(&self, epoch: u64, first: u64) -> Result<Box<dyn Iterator<Item = Result<T>> + Send>> {
        let streams = self.streams.iter().enumerate();
        let mut opened = streams
            .map(|(i, stream)| stream.open(epoch, self.period.n_before(i, first)))
            .collect::<Result<Vec<_>>>()?;
        let period = self.period.clone();
        Ok(Box::new((first..).map_while(move |index| opened[period.find(index).0].next())))
    }

    fn name(&self, index: u64) -> String {
        let (stream, number) = self.period.find(index);
        self.streams[stream].name(number)
    }
}

/// Which source each sample is of.
#[derive(Clone)]
struct Period {
    weights: Vec<u32>,
    /// Of each place: the source, and how many of its samples come before.
    places: Arc<[(u32, u32)]>,
}

impl Period {
    fn new(weights: &[u32], n_sources: usize) -> Result<Self> {
        let divisor = weights.iter().copied().fold(0, gcd).max(1);
        let reduced: Vec<u32> = weights.iter().map(|weight| weight / divisor).collect();
        let sum: u64 = reduced.iter().map(|&weight| u64::from(weight)).sum();
        let is_wrong = weights.len() != n_sources || weights.contains(&0);
        if is_wrong || sum == 0 || sum > u64::from(MOST) {
            return Err(Error::Weights { weights: weights.to_vec(), n_sources, most: MOST });
        }
        let places = spread(&reduced, sum as usize).into();
        Ok(Self { weights: reduced, places })
    }

    /// The source of a sample, and its number there.
    fn find(&self, index: u64) -> (usize, u64) {
        let n_places = self.places.len() as u64;
        let (source, before) = self.places[(index % n_places) as usize];
        let weight = u64::from(self.weights[source as usize]);
        (source as usize, (index / n_places) * weight + u64::from(before))
    }

    /// Samples of `source` before `index`.
    fn n_before(&self, source: usize, index: u64) -> u64 {
        let n_places = self.places.len() as u64;
        let before = &self.places[..(index % n_places) as usize];
        let n = before.iter().filter(|place| place.0 as usize == source).count();
        (index / n_places) * u64::from(self.weights[source]) + n as u64
    }
}

/// Smooth weighted round robin: at each place the source that is furthest behind.
fn spread(weights: &[u32], sum: usize) -> Vec<(u32, u32)> {
    let mut credit = vec![0i64; weights.len()];
    let mut given = vec![0u32; weights.len()];
    (0..sum)
        .map(|_| {
            credit.iter_mut().zip(weights).for_each(|(credit, &w)| *credit += i64::from(w));
            let mut next = 0;
            for i in 1..credit.len() {
                if credit[i] > credit[next] {
                    next = i;
                }
            }
            credit[next] -= sum as i64;
            given[next] += 1;
            (next as u32, given[next] - 1)
        })
        .collect()
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl<T: Send> Source for Mix<T> {
    type Item = T;

    fn n_samples(&self) -> u64 {
        self.n_samples
    }

    fn get(&self, index: u64) -> Result<T> {
        let (source, index) = self.find(index);
        source.get(index)
    }

    fn name(&self, index: u64) -> String {
        let (source, index) = self.find(index);
        source.name(index)
    }
}

impl<T> std::fmt::Debug for Mix<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (weights, n_samples) = (&self.period.weights, self.n_samples);
        write!(f, "Mix {{ weights: {weights:?}, n_samples: {n_samples} }}")
    }
}

impl<T> std::fmt::Debug for MixStream<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MixStream {{ weights: {:?} }}", self.period.weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{from_fn, from_iter};

    fn sources(sizes: &[u64]) -> Vec<Arc<dyn Source<Item = (usize, u64)>>> {
        let source = |(i, &n)| -> Arc<dyn Source<Item = (usize, u64)>> {
            Arc::new(from_fn(n, move |index| Ok((i, index))))
        };
        sizes.iter().enumerate().map(source).collect()
    }

    #[test]
    fn proportions_hold_everywhere() {
        let mix = Mix::until_first_ends(sources(&[100, 30, 1000]), &[10, 4, 6]).unwrap();
        // Reduced to 5, 2, 3; the second source ends after 15 periods of 10.
        assert_eq!(mix.n_samples(), 150);
        let mut counts = [0u64; 3];
        for index in 0..150 {
            let (source, number) = mix.get(index).unwrap();
            assert_eq!(number, counts[source], "each in its own order");
            counts[source] += 1;
            for (&count, weight) in counts.iter().zip([5, 2, 3]) {
                let want = (index + 1) as f64 * f64::from(weight) / 10.0;
                assert!((count as f64 - want).abs() < 1.0, "{counts:?} at {index}");
            }
        }
        assert_eq!(mix.name(0), "sample 0");
    }

    #[test]
    fn each_is_seen_whole() {
        let mix = Mix::until_all_ended(sources(&[3, 10]), &[1, 1]).unwrap();
        assert_eq!(mix.n_samples(), 20);
        let of =
            |i| (0..20).filter_map(move |index| Some(mix.get(index).unwrap()).filter(|s| s.0 == i));
        let first: Vec<u64> = of(0).map(|sample| sample.1).collect();
        assert_eq!(first, [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn streams_mix_alike_from_any_place() {
        let stream = |i: u64, n: u64| -> Arc<dyn Stream<Item = u64>> {
            Arc::new(from_iter(move |_| (0..n).map(move |number| Ok(100 * i + number))))
        };
        let mix = MixStream::new(vec![stream(0, 20), stream(1, 90)], &[2, 3]).unwrap();
        let all = |first| -> Vec<u64> { mix.open(0, first).unwrap().map(Result::unwrap).collect() };
        let whole = all(0);
        // Ten periods, and what comes before the 21st of the first.
        assert_eq!(whole.len(), 50 + usize::from(whole[0] >= 100));
        assert_eq!(whole.iter().filter(|&&sample| sample < 100).count(), 20);
        for first in 0..=whole.len() {
            assert_eq!(all(first as u64), whole[first..]);
        }
        assert_eq!(mix.name(5), format!("sample {}", whole[5] % 100));
    }

    #[test]
    fn what_cannot_be_mixed_is_refused() {
        for weights in [&[1][..], &[1, 0], &[], &[1, 65_536]] {
            let error = Mix::until_first_ends(sources(&[5, 5]), weights).unwrap_err();
            assert!(matches!(error, Error::Weights { n_sources: 2, .. }), "{error}");
        }
        assert!(matches!(Mix::until_all_ended(sources(&[5, 0]), &[1, 1]), Err(Error::EmptySet)));
    }
}

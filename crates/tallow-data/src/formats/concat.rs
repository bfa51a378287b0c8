use crate::{error::Result, source::Source};

/// Several sources as one: the samples of the first, then those of the second, and so on.
#[derive(Clone, Debug)]
pub struct Concat<S> {
    parts: Vec<S>,
    /// Samples in a part and all before it.
    ends: Vec<u64>,
}

impl<S: Source> Concat<S> {
    /// All of `parts`, in their order.
    pub fn new(parts: Vec<S>) -> Self {
        let mut n_samples = 0;
        let ends = parts.iter().map(|part| {
            n_samples += part.n_samples();
            n_samples
        });
        Self { ends: ends.collect(), parts }
    }

    /// The parts.
    pub fn parts(&self) -> &[S] {
        &self.parts
    }

    /// The part a sample is in, and its number there; past the end it is past the last part's end.
    fn place(&self, index: u64) -> Option<(&S, u64)> {
        let part =
            self.ends.partition_point(|&end| end <= index).min(self.parts.len().checked_sub(1)?);
        let n_before = part.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some((&self.parts[part], index - n_before))
    }
}

impl<S: Source> Source for Concat<S> {
    type Item = S::Item;

    fn n_samples(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn get(&self, index: u64) -> Result<S::Item> {
        match self.place(index) {
            Some((part, index)) => part.get(index),
            None => Err(crate::Error::Index { path: "".into(), index, n_samples: 0 }),
        }
    }

    fn name(&self, index: u64) -> String {
        self.place(index).map_or_else(String::new, |(part, index)| part.name(index))
    }
}

//! Sources that are no files: closures, arrays in memory, iterators.

use crate::{
    error::{Error, Result},
    source::Source,
};
use std::{ops::Deref, sync::Arc};

/// A source of `n_samples` that are made when asked for: `make(index)`.
pub fn from_fn<T, F>(n_samples: u64, make: F) -> FromFn<F>
where
    T: Send,
    F: Fn(u64) -> Result<T> + Send + Sync,
{
    FromFn { n_samples, make }
}

/// See [`from_fn`].
#[derive(Clone, Copy, Debug)]
pub struct FromFn<F> {
    n_samples: u64,
    make: F,
}

impl<T: Send, F: Fn(u64) -> Result<T> + Send + Sync> Source for FromFn<F> {
    type Item = T;

    fn n_samples(&self) -> u64 {
        self.n_samples
    }

    fn get(&self, index: u64) -> Result<T> {
        (self.make)(index)
    }
}

/// An array in memory; a sample is a clone of an element. Share it as `Arc<[T]>` or `&'static [T]`.
impl<T: Clone + Send + Sync> Source for [T] {
    type Item = T;

    fn n_samples(&self) -> u64 {
        self.len() as u64
    }

    fn get(&self, index: u64) -> Result<T> {
        Ok(self[index as usize].clone())
    }
}

impl<T: Clone + Send + Sync> Source for Vec<T> {
    type Item = T;

    fn n_samples(&self) -> u64 {
        self.len() as u64
    }

    fn get(&self, index: u64) -> Result<T> {
        Ok(self[index as usize].clone())
    }
}

impl<S: Source + ?Sized> Source for &S {
    type Item = S::Item;

    fn n_samples(&self) -> u64 {
        (**self).n_samples()
    }

    fn get(&self, index: u64) -> Result<Self::Item> {
        (**self).get(index)
    }

    fn name(&self, index: u64) -> String {
        (**self).name(index)
    }
}

/// A flat array in memory, `row` elements a sample. `D` owns or shares it: `Vec<u32>`, `Arc<[u8]>`,
/// `&'static [f32]`, a memory map. Copied one sample at a time.
#[derive(Clone, Debug)]
pub struct Rows<D> {
    data: D,
    row: usize,
}

impl<T, D: Deref<Target = [T]>> Rows<D> {
    /// Samples of `row` elements each.
    /// # Errors
    /// If `data` is not a whole number of rows.
    pub fn new(data: D, row: usize) -> Result<Self> {
        if row == 0 || !data.len().is_multiple_of(row) {
            return Err(Error::Rows { n_elems: data.len() as u64, row: row as u64 });
        }
        Ok(Self { data, row })
    }
}

impl<T, D> Source for Rows<D>
where
    T: Clone + Send + Sync,
    D: Deref<Target = [T]> + Send + Sync,
{
    type Item = Vec<T>;

    fn n_samples(&self) -> u64 {
        (self.data.len() / self.row) as u64
    }

    fn get(&self, index: u64) -> Result<Vec<T>> {
        let start = index as usize * self.row;
        Ok(self.data[start..start + self.row].to_vec())
    }
}

/// Samples that come one after another, of a number that nobody knows before the end.
pub trait Stream: Send + Sync {
    /// One sample.
    type Item: Send;

    /// The samples of `epoch` from the one numbered `first` on; the same at every call.
    ///
    /// A stream that cannot seek makes the first samples again and drops them. After an error it may
    /// go on: the sample counts as one.
    /// # Errors
    /// If it cannot be opened.
    fn open(
        &self,
        epoch: u64,
        first: u64,
    ) -> Result<Box<dyn Iterator<Item = Result<Self::Item>> + Send>>;

    /// What errors and reports call a sample.
    fn name(&self, index: u64) -> String {
        format!("sample {index}")
    }
}

impl<S: Stream + ?Sized> Stream for Arc<S> {
    type Item = S::Item;

    fn open(
        &self,
        epoch: u64,
        first: u64,
    ) -> Result<Box<dyn Iterator<Item = Result<Self::Item>> + Send>> {
        (**self).open(epoch, first)
    }

    fn name(&self, index: u64) -> String {
        (**self).name(index)
    }
}

/// A stream of what `open(epoch)` iterates over; a resumed run skips what it has had.
pub fn from_iter<T, I, F>(open: F) -> impl Stream<Item = T>
where
    T: Send,
    I: Iterator<Item = Result<T>> + Send + 'static,
    F: Fn(u64) -> I + Send + Sync,
{
    FromIter { open }
}

struct FromIter<F> {
    open: F,
}

impl<T, I, F> Stream for FromIter<F>
where
    T: Send,
    I: Iterator<Item = Result<T>> + Send + 'static,
    F: Fn(u64) -> I + Send + Sync,
{
    type Item = T;

    fn open(&self, epoch: u64, first: u64) -> Result<Box<dyn Iterator<Item = Result<T>> + Send>> {
        let mut samples = (self.open)(epoch);
        for _ in 0..first {
            if samples.next().is_none() {
                break;
            }
        }
        Ok(Box::new(samples))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_shared() {
        let words: Arc<[Arc<str>]> = ["a", "b"].map(Arc::from).into();
        let source: Arc<[Arc<str>]> = words.clone();
        assert!(Arc::ptr_eq(&source.get(1).unwrap(), &words[1]));
        let rows = Rows::new(&[1u8, 2, 3, 4, 5, 6][..], 2).unwrap();
        assert_eq!((rows.n_samples(), rows.get(2).unwrap()), (3, vec![5, 6]));
        assert_eq!(<&Rows<_> as Source>::name(&&rows, 2), "sample 2");
        for row in [0, 4, 7] {
            let error = Rows::new(vec![0u8; 6], row).unwrap_err();
            assert!(matches!(error, Error::Rows { n_elems: 6, .. }), "{error}");
        }
    }

    #[test]
    fn a_stream_starts_anywhere() {
        let stream = from_iter(|epoch| (0..5).map(move |i| Ok(10 * epoch + i)));
        for first in 0..7 {
            let rest: Vec<u64> = stream.open(2, first).unwrap().map(Result::unwrap).collect();
            assert!(rest.into_iter().eq(20 + first..25.max(20 + first)));
        }
    }
}

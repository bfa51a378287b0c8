//! Where samples come from: anything that can be asked for a sample by its number.

use crate::error::Result;

/// Samples that can be read in any order.
///
/// What a sample is depends on the source: encoded bytes, a row, token ids. A source reads when it
/// is asked and keeps nothing of what it handed out; several threads may ask at once.
pub trait Source: Send + Sync {
    /// One sample.
    type Item: Send;

    /// Samples there are.
    fn n_samples(&self) -> u64;

    /// Reads the sample `index`, below [`Source::n_samples`].
    /// # Errors
    /// If it cannot be read; the error names the file and the place in it.
    fn get(&self, index: u64) -> Result<Self::Item>;

    /// What errors and reports call the sample: its file, key or number.
    fn name(&self, index: u64) -> String {
        format!("sample {index}")
    }
}

impl<S: Source + ?Sized> Source for std::sync::Arc<S> {
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

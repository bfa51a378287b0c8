use super::{Flow, Placed};
use crate::{
    batches::{Cursor, Tail},
    error::{Error, Result},
};
use std::sync::Arc;

/// Bytes of a batch of `n_samples` decoded samples while it is gathered: the samples themselves.
/// What a closure then makes of it is on top.
pub const fn group_bytes(n_samples: u64, sample_bytes: u64) -> u64 {
    n_samples.saturating_mul(sample_bytes)
}

/// `n` at a time; the cursor after a batch is the one after its last sample.
pub(crate) struct Fixed<T> {
    pub(crate) items: Flow<T>,
    pub(crate) n: usize,
    pub(crate) tail: Tail,
}

impl<T> Iterator for Fixed<T> {
    type Item = Result<Placed<Vec<T>>>;

    fn next(&mut self) -> Option<Self::Item> {
        let (mut value, mut last) = (Vec::new(), None);
        while value.len() < self.n {
            match self.items.next() {
                Some(Ok(item)) => {
                    value.push(item.value);
                    last = Some(item.after);
                }
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            }
        }
        let is_whole = value.len() == self.n || self.tail == Tail::Keep;
        last.filter(|_| is_whole).map(|after| Ok(Placed { value, after }))
    }
}

pub(crate) type Length<T> = Arc<dyn Fn(&T) -> u64 + Send + Sync>;

/// As many as fit once padded. The sample that did not fit is the first of the next batch; until
/// that is handed out, the cursor is before it.
pub(crate) fn by_tokens<T: Send + 'static>(
    items: Flow<T>,
    max_tokens: u64,
    n_tokens: Length<T>,
) -> Flow<Vec<T>> {
    Box::new(ByTokens { items, max_tokens, n_tokens, waiting: None, ended: false })
}

struct ByTokens<T> {
    items: Flow<T>,
    max_tokens: u64,
    n_tokens: Length<T>,
    waiting: Option<Placed<T>>,
    ended: bool,
}

impl<T> Iterator for ByTokens<T> {
    type Item = Result<Placed<Vec<T>>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut fill = Fill::new(self.max_tokens);
        let (mut value, mut last) = (Vec::new(), None::<Cursor>);
        while !self.ended {
            let item = match self.waiting.take().map(Ok).or_else(|| self.items.next()) {
                Some(Ok(item)) => item,
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            };
            match fill.add((self.n_tokens)(&item.value)) {
                Ok(true) => {
                    value.push(item.value);
                    last = Some(item.after);
                }
                Ok(false) => {
                    self.waiting = Some(item);
                    break;
                }
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
        last.map(|after| Ok(Placed { value, after }))
    }
}

/// Rows of a batch that is padded to its longest.
pub(crate) struct Fill {
    max_tokens: u64,
    n_rows: u64,
    longest: u64,
}

impl Fill {
    pub(crate) fn new(max_tokens: u64) -> Self {
        Self { max_tokens, n_rows: 0, longest: 0 }
    }

    /// Adds a row of `n_tokens` if it fits.
    pub(crate) fn add(&mut self, n_tokens: u64) -> Result<bool> {
        // An empty row takes a place too.
        if n_tokens.max(1) > self.max_tokens {
            return Err(Error::TooLong { n_tokens, max_tokens: self.max_tokens });
        }
        let (n_rows, longest) = (self.n_rows + 1, self.longest.max(n_tokens));
        let fits = n_rows.saturating_mul(longest.max(1)) <= self.max_tokens;
        if fits {
            (self.n_rows, self.longest) = (n_rows, longest);
        }
        Ok(fits)
    }
}

//! Batches of samples of about the same length, window by window.

use super::{
    Flow, Placed,
    batch::{Fill, Length},
};
use crate::{
    batches::{Cursor, Tail},
    error::{Error, Result},
    permutation::Permutation,
    rng::Rng,
};

/// Bytes that bucketing holds: a window of samples, 64 bytes more each for their lengths and batches.
pub const fn bucket_bytes(window_samples: u64, sample_bytes: u64) -> u64 {
    window_samples.saturating_mul(sample_bytes.saturating_add(64))
}

/// Where a window is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cut {
    Samples { n: usize, tail: Tail },
    Tokens { max_tokens: u64 },
}

/// The cursor after a batch is the start of its window and the batches of it that are done: a
/// resumed run reads the window again. After the last batch it is the start of the next.
pub(crate) struct Bucketed<T> {
    samples: Flow<T>,
    window_samples: usize,
    cut: Cut,
    n_tokens: Length<T>,
    seed: u64,
    /// Where the next window begins; within it, what was done before this run.
    start: Cursor,
    window: Option<Window<T>>,
    ended: bool,
}

struct Window<T> {
    batches: Vec<Option<Vec<T>>>,
    order: Permutation,
    n_done: u64,
    after: Cursor,
}

impl<T: Send + 'static> Bucketed<T> {
    pub(crate) fn start(
        samples: Flow<T>,
        window_samples: usize,
        cut: Cut,
        n_tokens: Length<T>,
        seed: u64,
        start: Cursor,
    ) -> Flow<Vec<T>> {
        let (window, ended) = (None, false);
        Box::new(Self { samples, window_samples, cut, n_tokens, seed, start, window, ended })
    }
}

impl<T> Bucketed<T> {
    fn read(&mut self) -> Result<Option<Window<T>>> {
        let (mut samples, mut after) = (Vec::new(), None);
        while samples.len() < self.window_samples {
            match self.samples.next() {
                Some(item) => {
                    let item = item?;
                    samples.push(item.value);
                    after = Some(item.after);
                }
                None => break,
            }
        }
        let Some(after) = after else { return Ok(None) };
        if let Cut::Samples { n, tail: Tail::Drop } = self.cut {
            // Before they are sorted: the longest would be left out.
            samples.truncate(samples.len() / n * n);
        }
        samples.sort_by_cached_key(|sample| (self.n_tokens)(sample));
        let batches = self.cut(samples)?;
        let n = batches.len() as u64;
        let n_done = self.start.within;
        if n_done > n {
            let Cursor { position, within, .. } = self.start;
            return Err(Error::Within { position, within, n });
        }
        let Cursor { epoch, position, .. } = self.start;
        let key = Rng::keyed(&[self.seed, epoch]).next_u64();
        let order = Permutation::new(n, key, position);
        let mut window = Window { batches, order, n_done, after };
        for place in 0..n_done {
            window.batches[window.order.index(place) as usize] = None;
        }
        Ok(Some(window))
    }

    fn cut(&self, samples: Vec<T>) -> Result<Vec<Option<Vec<T>>>> {
        let mut batches: Vec<Vec<T>> = Vec::new();
        let mut fill = None::<Fill>;
        for sample in samples {
            let fits = match (self.cut, batches.last()) {
                (Cut::Samples { n, .. }, Some(batch)) => batch.len() < n,
                (Cut::Samples { .. }, None) => false,
                (Cut::Tokens { max_tokens }, _) => {
                    let n_tokens = (self.n_tokens)(&sample);
                    let fits = match &mut fill {
                        Some(fill) => fill.add(n_tokens)?,
                        None => false,
                    };
                    if !fits {
                        let mut row = Fill::new(max_tokens);
                        row.add(n_tokens)?;
                        fill = Some(row);
                    }
                    fits
                }
            };
            match batches.last_mut().filter(|_| fits) {
                Some(batch) => batch.push(sample),
                None => batches.push(vec![sample]),
            }
        }
        Ok(batches.into_iter().map(Some).collect())
    }
}

impl<T> Iterator for Bucketed<T> {
    type Item = Result<Placed<Vec<T>>>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            if self.window.is_none() {
                match self.read() {
                    Ok(window) => self.window = window,
                    Err(error) => {
                        self.ended = true;
                        return Some(Err(error));
                    }
                }
            }
            let Some(window) = &mut self.window else { break };
            let n = window.batches.len() as u64;
            if window.n_done == n {
                self.start = window.after;
                self.window = None;
                continue;
            }
            let place = window.order.index(window.n_done) as usize;
            window.n_done += 1;
            let value = window.batches[place].take()?;
            let after = match window.n_done {
                done if done == n => window.after,
                within => Cursor { within, ..self.start },
            };
            return Some(Ok(Placed { value, after }));
        }
        None
    }
}

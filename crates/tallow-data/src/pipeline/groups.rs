use super::{
    Ahead, Flow, HeldBytes, Placed, Samples, Skip,
    batch::Fixed,
    bucket::{Bucketed, Cut},
    fault::{Shared, caught},
    lock,
    prefetch::Prefetch,
};
use crate::{
    batches::{Cursor, Tail},
    error::{Error, Result},
};
use std::sync::{Arc, atomic::Ordering};

type Open<U> = Arc<dyn Fn(Cursor, &Shared) -> Result<Flow<U>> + Send + Sync>;

/// What samples are gathered into, and what is done to each group: a description, nothing is read.
///
/// *Memory:* one group in the making, and what each stage says it holds.
pub struct Groups<U> {
    open: Open<U>,
}

impl<U> Clone for Groups<U> {
    fn clone(&self) -> Self {
        Self { open: self.open.clone() }
    }
}

impl<U> std::fmt::Debug for Groups<U> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Groups")
    }
}

impl<T: HeldBytes + Send + 'static> Samples<T> {
    /// Batches of `n` samples. Held: [`group_bytes`](super::group_bytes).
    /// # Errors
    /// If `n` is 0.
    pub fn batch(self, n: usize, tail: Tail) -> Result<Groups<Vec<T>>> {
        self.each().batch(n, tail)
    }

    /// Batches of as many samples, in order, as keep `rows * longest` within `max_tokens`: what they
    /// take once padded. A sample that is longer by itself is an error.
    pub fn batch_by_tokens<F>(self, max_tokens: u64, n_tokens: F) -> Groups<Vec<T>>
    where
        F: Fn(&T) -> u64 + Send + Sync + 'static,
    {
        let n_tokens = Arc::new(n_tokens);
        Groups::new(move |cursor, shared| {
            let samples = self.flow(cursor, shared)?;
            Ok(super::batch::by_tokens(samples, max_tokens, n_tokens.clone()))
        })
    }

    /// Batches of `n` samples of about the same length: `window_batches` times `n` samples are read,
    /// sorted by length, cut, and the batches handed out in a random order.
    ///
    /// Held: [`bucket_bytes`](super::bucket_bytes). A resumed run reads its window again.
    /// # Errors
    /// If `n` or the window is 0.
    pub fn bucket<F>(
        self,
        n: usize,
        window_batches: usize,
        tail: Tail,
        n_tokens: F,
    ) -> Result<Groups<Vec<T>>>
    where
        F: Fn(&T) -> u64 + Send + Sync + 'static,
    {
        if n == 0 {
            return Err(Error::ZeroBatch);
        }
        self.bucket_as(n.saturating_mul(window_batches), Cut::Samples { n, tail }, n_tokens)
    }

    /// [`Samples::bucket`] with batches of `rows * longest` within `max_tokens`, of any number of rows.
    /// # Errors
    /// If the window is 0.
    pub fn bucket_by_tokens<F>(
        self,
        max_tokens: u64,
        window_samples: usize,
        n_tokens: F,
    ) -> Result<Groups<Vec<T>>>
    where
        F: Fn(&T) -> u64 + Send + Sync + 'static,
    {
        self.bucket_as(window_samples, Cut::Tokens { max_tokens }, n_tokens)
    }

    fn bucket_as<F>(self, window_samples: usize, cut: Cut, n_tokens: F) -> Result<Groups<Vec<T>>>
    where
        F: Fn(&T) -> u64 + Send + Sync + 'static,
    {
        if window_samples == 0 {
            return Err(Error::ZeroWindow);
        }
        let n_tokens: Arc<dyn Fn(&T) -> u64 + Send + Sync> = Arc::new(n_tokens);
        Ok(Groups::new(move |cursor, shared| {
            let samples = self.flow(cursor, shared)?;
            let n_tokens = n_tokens.clone();
            Ok(Bucketed::start(samples, window_samples, cut, n_tokens, self.seed(), cursor))
        }))
    }

    /// Each sample for itself.
    pub fn each(self) -> Groups<T> {
        Groups::new(move |cursor, shared| self.flow(cursor, shared))
    }
}

impl<U: Send + 'static> Groups<U> {
    pub(crate) fn new<F>(open: F) -> Self
    where
        F: Fn(Cursor, &Shared) -> Result<Flow<U>> + Send + Sync + 'static,
    {
        Self { open: Arc::new(open) }
    }

    /// `n` groups together, as packed sequences.
    /// # Errors
    /// If `n` is 0.
    pub fn batch(self, n: usize, tail: Tail) -> Result<Groups<Vec<U>>> {
        if n == 0 {
            return Err(Error::ZeroBatch);
        }
        Ok(Groups::new(move |cursor, shared| {
            Ok(Box::new(Fixed { items: (self.open)(cursor, shared)?, n, tail }))
        }))
    }

    /// `f` of every group: padding it, and copying it to the device. Runs where the group is made:
    /// in the thread of [`Groups::prefetch`] if that comes next.
    pub fn map<V, F>(self, f: F) -> Groups<V>
    where
        V: Send + 'static,
        F: Fn(U) -> Result<V> + Send + Sync + 'static,
    {
        self.map_at(move |group, _| f(group))
    }

    /// `f` of every group and the cursor before it.
    pub(crate) fn map_at<V, F>(self, f: F) -> Groups<V>
    where
        V: Send + 'static,
        F: Fn(U, Cursor) -> Result<V> + Send + Sync + 'static,
    {
        let f = Arc::new(f);
        Groups::new(move |cursor, shared| {
            let (f, mut before) = (f.clone(), cursor);
            Ok(Box::new((self.open)(cursor, shared)?.map(move |group| {
                let Placed { value, after } = group?;
                let value = caught(|| f(value, before))?;
                before = after;
                Ok(Placed { value, after })
            })))
        })
    }

    /// Groups are made ahead, in a thread.
    pub fn prefetch(self, ahead: Ahead) -> Self
    where
        U: HeldBytes,
    {
        if ahead.n_groups == 0 {
            return self;
        }
        Self::new(move |cursor, shared| {
            let groups = (self.open)(cursor, shared)?;
            Ok(Box::new(Prefetch::start(groups, ahead, shared.clone())?))
        })
    }

    /// Starts the threads that were asked for, at the first sample of `epoch`.
    /// # Errors
    /// If the source cannot be opened or a thread cannot be started.
    pub fn epoch(&self, epoch: u64) -> Result<Run<U>> {
        self.resume(Cursor::epoch(epoch))
    }

    /// Goes on after what the run that gave `cursor` had handed out.
    /// # Errors
    /// Those of [`Groups::epoch`], and if the cursor is of another source.
    pub fn resume(&self, cursor: Cursor) -> Result<Run<U>> {
        let shared = Shared::default();
        let flow = (self.open)(cursor, &shared)?;
        let skipped_before = cursor.skipped;
        Ok(Run { flow, cursor, skipped_before, shared, ended: false, is_whole: false })
    }
}

/// One pass through the rest of an epoch. Ends after the first error.
///
/// Dropped, it joins all its threads.
pub struct Run<U> {
    flow: Flow<U>,
    cursor: Cursor,
    skipped_before: u64,
    shared: Shared,
    ended: bool,
    /// It ended because nothing was left.
    is_whole: bool,
}

impl<U> std::fmt::Debug for Run<U> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Run {{ {:?}, ended: {} }}", self.cursor, self.ended)
    }
}

impl<U> Run<U> {
    /// Where to go on after what was handed out last.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// How many corrupt samples were left out since this run began: up to the cursor, and at the end of
    /// the epoch those after it too.
    pub fn n_skipped(&self) -> u64 {
        match self.is_whole {
            true => self.shared.n_skipped.load(Ordering::Relaxed),
            false => self.cursor.skipped.saturating_sub(self.skipped_before),
        }
    }

    /// The first 256 of them.
    pub fn skipped(&self) -> Vec<Skip> {
        let n = usize::try_from(self.n_skipped()).unwrap_or(usize::MAX);
        lock(&self.shared.skips).iter().take(n).cloned().collect()
    }
}

impl<U> Iterator for Run<U> {
    type Item = Result<U>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        match self.flow.next() {
            Some(Ok(Placed { value, after })) => {
                self.cursor = after;
                Some(Ok(value))
            }
            Some(Err(error)) => {
                self.ended = true;
                Some(Err(error))
            }
            None => {
                (self.ended, self.is_whole) = (true, true);
                None
            }
        }
    }
}

impl<U> std::iter::FusedIterator for Run<U> {}

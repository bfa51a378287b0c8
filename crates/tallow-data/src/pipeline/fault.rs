//! What becomes of a sample that cannot be used.

use super::{Flow, Placed, lock};
use crate::{
    batches::Cursor,
    error::{Error, Result},
};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// What becomes of a corrupt sample: one whose error [is its own](Error::is_of_one_sample).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnCorrupt {
    /// The run ends with the error.
    Fail,
    /// The sample is left out, counted and remembered; batches are filled up with the next ones.
    Skip {
        /// More of them in an epoch end the run.
        limit: u64,
    },
}

/// A sample that was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip {
    /// The sample's file, key or number.
    pub name: String,
    /// What was wrong with it.
    pub reason: String,
}

/// So many samples that were left out are remembered by name; all are counted.
const REMEMBERED: usize = 256;

/// What a run and its threads share.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shared {
    pub(crate) stop: Arc<AtomicBool>,
    /// Left out so far, also by what was made ahead.
    pub(crate) n_skipped: Arc<AtomicU64>,
    /// The first of them.
    pub(crate) skips: Arc<Mutex<Vec<Skip>>>,
}

impl Shared {
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

pub(crate) type Namer = Arc<dyn Fn(u64) -> String + Send + Sync>;

/// What came of one sample; nothing if a filter left it out.
pub(crate) struct Made<T> {
    /// Nothing if it is the stream or a worker that failed.
    pub(crate) index: Option<u64>,
    /// Samples of the order that are done when this one is.
    pub(crate) position: u64,
    pub(crate) result: Result<Option<T>>,
}

/// Samples that passed, and the policy for those that did not. In order, so that the verdict of a
/// limit does not depend on threads.
pub(crate) struct Passed<I> {
    pub(crate) made: I,
    pub(crate) cursor: Cursor,
    pub(crate) on_corrupt: OnCorrupt,
    pub(crate) name: Namer,
    pub(crate) shared: Shared,
    pub(crate) ended: bool,
}

impl<T: Send + 'static, I: Iterator<Item = Made<T>> + Send + 'static> Passed<I> {
    pub(crate) fn flow(self) -> Flow<T> {
        Box::new(self)
    }
}

impl<T, I: Iterator<Item = Made<T>>> Iterator for Passed<I> {
    type Item = Result<Placed<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended && !self.shared.is_stopped() {
            let made = self.made.next()?;
            self.cursor.position = made.position;
            match made.result {
                Ok(Some(value)) => return Some(Ok(Placed { value, after: self.cursor })),
                Ok(None) => {}
                Err(error) => {
                    if let Err(error) = self.judge(made.index, error) {
                        self.ended = true;
                        return Some(Err(error));
                    }
                }
            }
        }
        None
    }
}

impl<I> Passed<I> {
    fn judge(&mut self, index: Option<u64>, error: Error) -> Result<()> {
        let Some(index) = index else { return Err(error) };
        let limit = match self.on_corrupt {
            OnCorrupt::Skip { limit } if error.is_of_one_sample() => limit,
            _ => return Err(error.of_sample(|| (self.name)(index))),
        };
        if self.cursor.skipped >= limit {
            let error = Box::new(error.of_sample(|| (self.name)(index)));
            return Err(Error::Skipped { limit, error });
        }
        self.cursor.skipped += 1;
        self.shared.n_skipped.fetch_add(1, Ordering::Relaxed);
        let mut skips = lock(&self.shared.skips);
        if skips.len() < REMEMBERED {
            skips.push(Skip { name: (self.name)(index), reason: error.to_string() });
        }
        Ok(())
    }
}

/// What `work` returns, its panic as an error.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|payload| Err(Error::Panicked { message: message(&*payload) }))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned())
}

//! Hidden state: what must be put back so that a second forward computes what the first computed.

use crate::{Error, Result};
use std::cell::Cell;

/// Runs a forward once, with the hidden state as it was at a mark, and puts today's state back
/// afterwards, after a panic too.
pub type Again = Box<dyn Fn(&mut dyn FnMut()) + Send + Sync>;

/// Hidden state of a model: a counter of random draws, a cast policy, statistics that move.
///
/// Anything that is not an argument of the closure and changes what it computes belongs here.
/// Closures `Fn() -> Again` are hooks; a library with a position and a replay is adapted by
/// `|| { let at = position(); Box::new(move |again| replay(at, || again())) as Again }`.
pub trait Replay: Send + Sync {
    /// Where the hidden state stands now, as what runs a forward again from here. May be run any
    /// number of times, or never.
    fn mark(&self) -> Again;
}

impl<F: Fn() -> Again + Send + Sync> Replay for F {
    fn mark(&self) -> Again {
        self()
    }
}

/// For models without hidden state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoReplay;

impl Replay for NoReplay {
    fn mark(&self) -> Again {
        Box::new(|again| again())
    }
}

thread_local! {
    static RECOMPUTING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the forward running on this thread repeats an earlier one. Layers that move statistics
/// ask, and leave them alone when it does.
pub fn is_recomputing() -> bool {
    RECOMPUTING.get()
}

/// Runs `forward` at the mark, once.
pub(crate) fn at<T>(mark: &Again, segment: &str, forward: impl FnOnce() -> T) -> Result<T> {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            RECOMPUTING.set(self.0);
        }
    }
    let (mut forward, mut out) = (Some(forward), None);
    mark(&mut || {
        if let Some(forward) = forward.take() {
            let _back = Back(RECOMPUTING.replace(true));
            out = Some(forward());
        }
    });
    out.ok_or_else(|| Error::Replay { segment: segment.to_string() })
}

use super::pieces::{Pieces, pieces};

/// How a trial ended.
#[must_use = "a size that ran out of memory has done no work"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried<T> {
    /// The work is done.
    Fits(T),
    /// Memory ran out somewhere; what the work changed until then is for `restore` to undo.
    OutOfMemory,
}

/// Why no size came out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failed<E> {
    /// Even one item at a time runs out of memory.
    #[error("not even 1 item fits, of {n_items}; tried {tried:?}")]
    NothingFits {
        /// Items there are.
        n_items: usize,
        /// Sizes tried, in order.
        tried: Vec<usize>,
    },
    /// There are no items, or the size to start from is 0.
    #[error("{n_items} items in pieces of {piece_items} are no work to try")]
    NoWork {
        /// Items there are.
        n_items: usize,
        /// The size to start from.
        piece_items: usize,
    },
    /// The work, or putting the state back, failed for another reason.
    #[error("{0}")]
    Work(E),
}

/// What [`with_backoff`] ends with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fitted<T> {
    /// What the work gave.
    pub value: T,
    /// The size that fitted: keep it for the next batch.
    pub piece_items: usize,
    /// Sizes tried, in order, this one the last.
    pub tried: Vec<usize>,
}

/// Runs `work` on a batch of `n_items` in pieces of `start_items`, and in half of that each time
/// memory runs out: 16, 8, 4, 2, 1.
///
/// Every try is given the pieces of the *whole* batch, never those of a piece of it. After each that
/// ran out, the last too, `restore` puts back what it may have changed (gradient sums, random state,
/// statistics). A start above `n_items` begins at `n_items`.
///
/// With several ranks, `work` reduces "one of us ran out" over the ranks before it answers: all
/// then answer alike and go on to the same size.
///
/// # Errors
/// [`Failed::NothingFits`] if one item runs out too; [`Failed::NoWork`] for no items or a start of
/// 0; [`Failed::Work`] at once for any other error of `work` or `restore`.
pub fn with_backoff<T, E>(
    n_items: usize,
    start_items: usize,
    mut restore: impl FnMut() -> Result<(), E>,
    mut work: impl FnMut(Pieces) -> Result<Tried<T>, E>,
) -> Result<Fitted<T>, Failed<E>> {
    let mut piece_items = start_items.min(n_items);
    if piece_items == 0 {
        return Err(Failed::NoWork { n_items, piece_items: start_items });
    }
    let mut tried = Vec::new();
    loop {
        tried.push(piece_items);
        if let Tried::Fits(value) = work(pieces(n_items, piece_items)).map_err(Failed::Work)? {
            return Ok(Fitted { value, piece_items, tried });
        }
        restore().map_err(Failed::Work)?;
        if piece_items == 1 {
            return Err(Failed::NothingFits { n_items, tried });
        }
        piece_items /= 2;
    }
}

/// What [`largest_fitting`] ends with: both sides of the edge were tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Largest {
    /// The largest size that fits.
    pub fits_items: usize,
    /// The next size, which was tried and ran out; `None` if all items fit at once.
    pub fails_items: Option<usize>,
    /// Sizes tried, in order.
    pub tried: Vec<usize>,
}

/// The largest size from 1 to `max_items` that fits: doubling from 1, then bisection, to the item.
///
/// `trial` runs real work of the given size, at least one whole update: optimizer state is made at
/// the first. After each trial, also the last and one that failed, `restore` puts back what it
/// changed, so that the search leaves nothing behind. At most `2 log2(max_items) + 2` trials.
///
/// The edge is proven for the trials as they ran: `fits_items` fitted and `fits_items + 1` did not.
///
/// # Errors
/// [`Failed::NothingFits`] after the one trial of size 1; [`Failed::NoWork`] if `max_items` is 0;
/// [`Failed::Work`] for any other error, once the state is put back.
pub fn largest_fitting<E>(
    max_items: usize,
    mut restore: impl FnMut() -> Result<(), E>,
    mut trial: impl FnMut(usize) -> Result<Tried<()>, E>,
) -> Result<Largest, Failed<E>> {
    if max_items == 0 {
        return Err(Failed::NoWork { n_items: 0, piece_items: 1 });
    }
    let mut tried = Vec::new();
    let mut fits = |n_items: usize| -> Result<bool, Failed<E>> {
        tried.push(n_items);
        let outcome = trial(n_items);
        let restored = restore();
        // The trial's own error says more than that of the clean-up after it.
        let outcome = outcome.map_err(Failed::Work)?;
        restored.map_err(Failed::Work)?;
        Ok(outcome == Tried::Fits(()))
    };
    if !fits(1)? {
        return Err(Failed::NothingFits { n_items: max_items, tried });
    }
    let (mut fits_items, mut fails_items) = (1, None);
    while fits_items < max_items {
        let next_items = match fails_items {
            None => fits_items.saturating_mul(2).min(max_items),
            Some(fails_items) if fails_items - fits_items > 1 => {
                fits_items + (fails_items - fits_items) / 2
            }
            Some(_) => break,
        };
        match fits(next_items)? {
            true => fits_items = next_items,
            false => fails_items = Some(next_items),
        }
    }
    Ok(Largest { fits_items, fails_items, tried })
}

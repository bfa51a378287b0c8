use crate::{
    meter::Meter,
    terms::{Category, Terms},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Who holds how many bytes, by category: now, at most, and at the moment of the total's peak.
///
/// A meter knows how much is live and not why; a ledger knows why, for those who say so. Clones
/// share one book. Whoever holds memory keeps a [`Held`] beside it, and scope is lifetime.
///
/// *Memory:* about 250 bytes for a book, 24 for a guard.   *Time:* one uncontended lock a change.
///
/// ```
/// use tallow_memory::{Category, Ledger};
///
/// let ledger = Ledger::new();
/// let mut weights = ledger.hold(Category::Weights, 100);
/// drop(ledger.hold(Category::SavedActivations, 900));
/// weights.grow(50);
/// assert_eq!(ledger.current().total_bytes(), 150);
/// assert_eq!(ledger.at_peak().to_string(), "weights 100 + saved activations 900 = 1000 bytes");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    book: Arc<Mutex<Book>>,
}

#[derive(Debug, Default)]
struct Book {
    current: Terms,
    current_bytes: u64,
    peaks: Terms,
    at_peak: Terms,
    peak_bytes: u64,
}

impl Book {
    fn add(&mut self, category: Category, n_bytes: u64) {
        // The total is what overflows first; nothing is written before that is known.
        let total_bytes = self.current_bytes.checked_add(n_bytes);
        self.current_bytes = total_bytes.expect("a ledger holds at most u64::MAX bytes");
        self.current[category] += n_bytes;
        self.peaks[category] = self.peaks[category].max(self.current[category]);
        if self.current_bytes > self.peak_bytes {
            (self.peak_bytes, self.at_peak) = (self.current_bytes, self.current);
        }
    }

    fn subtract(&mut self, category: Category, n_bytes: u64) {
        self.current_bytes -= n_bytes;
        self.current[category] -= n_bytes;
    }
}

impl Ledger {
    /// An empty book.
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes `n_bytes` down under `category` until the guard is dropped.
    ///
    /// # Panics
    /// If the total would exceed `u64::MAX`.
    pub fn hold(&self, category: Category, n_bytes: u64) -> Held {
        self.book().add(category, n_bytes);
        Held { ledger: self.clone(), category, n_bytes }
    }

    /// What is held now.
    pub fn current(&self) -> Terms {
        self.book().current
    }

    /// What is held now beside what `meter` sees: see [`Terms::reconciled`].
    pub fn reconciled(&self, meter: &dyn Meter) -> Terms {
        // The ledger first: a buffer taken in between is then `Other`, and not missing.
        let held = self.current();
        held.reconciled(meter.current_bytes())
    }

    /// The most each category held at once; their moments differ, so the sum means nothing.
    pub fn peaks(&self) -> Terms {
        self.book().peaks
    }

    /// What each category held at the first moment the total reached its peak.
    pub fn at_peak(&self) -> Terms {
        self.book().at_peak
    }

    /// Memory survives a panic elsewhere: the book is consistent between any two calls.
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A ledger counts what it was told: the meter of a device whose driver cannot be asked.
impl Meter for Ledger {
    fn current_bytes(&self) -> u64 {
        self.book().current_bytes
    }

    fn peak_bytes(&self) -> u64 {
        self.book().peak_bytes
    }

    /// Makes what is held now the peak, of every category too.
    fn reset_peak(&self) {
        let mut book = self.book();
        (book.peaks, book.at_peak, book.peak_bytes) =
            (book.current, book.current, book.current_bytes);
    }
}

/// Bytes written down in a [`Ledger`], returned when dropped.
#[derive(Debug)]
#[must_use = "the bytes are returned when this is dropped"]
pub struct Held {
    ledger: Ledger,
    category: Category,
    n_bytes: u64,
}

impl Held {
    /// What they are held for.
    pub fn category(&self) -> Category {
        self.category
    }

    /// Bytes held by this guard.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Holds `n_bytes` more.
    ///
    /// # Panics
    /// If the ledger's total would exceed `u64::MAX`.
    pub fn grow(&mut self, n_bytes: u64) {
        self.ledger.book().add(self.category, n_bytes);
        self.n_bytes += n_bytes;
    }

    /// Returns `n_bytes` of them.
    ///
    /// # Panics
    /// If this guard holds less.
    pub fn shrink(&mut self, n_bytes: u64) {
        assert!(n_bytes <= self.n_bytes, "shrink: {n_bytes} bytes of {} held", self.n_bytes);
        self.ledger.book().subtract(self.category, n_bytes);
        self.n_bytes -= n_bytes;
    }

    /// Holds `n_bytes` from now on, whatever it was.
    ///
    /// # Panics
    /// Where [`Held::grow`] does.
    pub fn resize(&mut self, n_bytes: u64) {
        match n_bytes.checked_sub(self.n_bytes) {
            Some(grown_bytes) => self.grow(grown_bytes),
            None => self.shrink(self.n_bytes - n_bytes),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.book().subtract(self.category, self.n_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoMeter;
    use std::{panic, sync::Barrier, thread};

    #[test]
    fn the_composition_is_that_of_the_totals_peak() {
        let ledger = Ledger::new();
        let weights = ledger.hold(Category::Weights, 100);
        let saved = ledger.hold(Category::SavedActivations, 500);
        drop(saved);
        let gradients = ledger.hold(Category::Gradients, 400); // 500 in all: below 600
        assert_eq!((ledger.current_bytes(), ledger.peak_bytes()), (500, 600));
        assert_eq!(ledger.at_peak().saved_activations_bytes, 500);
        assert_eq!(ledger.at_peak().gradients_bytes, 0);
        assert_eq!(ledger.peaks().gradients_bytes, 400);
        assert_eq!(ledger.peaks().total_bytes(), 1000); // moments differ: above any real total
        drop((weights, gradients));
        assert_eq!(ledger.current(), Terms::ZERO);
        ledger.reset_peak();
        assert_eq!((ledger.peak_bytes(), ledger.peaks()), (0, Terms::ZERO));
    }

    #[test]
    fn of_equal_peaks_the_first_is_kept() {
        let ledger = Ledger::new();
        drop(ledger.hold(Category::Gradients, 50));
        drop(ledger.hold(Category::Data, 50));
        assert_eq!(ledger.at_peak().largest(), (Category::Gradients, 50));
    }

    #[test]
    fn guards_grow_shrink_and_return() {
        let ledger = Ledger::new();
        let mut held = ledger.hold(Category::Data, 10);
        held.grow(20);
        held.shrink(5);
        assert_eq!((held.n_bytes(), ledger.current().data_bytes), (25, 25));
        held.resize(7);
        held.resize(70);
        assert_eq!((held.n_bytes(), held.category()), (70, Category::Data));
        assert_eq!(ledger.reconciled(&NoMeter).total_bytes(), 70);
        drop(held);
        assert_eq!((ledger.current_bytes(), ledger.peak_bytes()), (0, 70));
    }

    #[test]
    fn a_programmers_error_leaves_the_book_balanced() {
        let ledger = Ledger::new();
        let mut held = ledger.hold(Category::Other, 10);
        let caught = panic::catch_unwind(panic::AssertUnwindSafe(|| held.shrink(11)));
        assert!(caught.is_err());
        let other = ledger.clone();
        let caught = panic::catch_unwind(move || other.hold(Category::Data, u64::MAX).n_bytes());
        assert!(caught.is_err());
        assert_eq!((ledger.current_bytes(), held.n_bytes()), (10, 10));
        drop(held);
        assert_eq!((ledger.current_bytes(), ledger.peak_bytes()), (0, 10));
    }

    #[test]
    fn threads_share_one_book() {
        const N_THREADS: u64 = 6;
        let (ledger, barrier) = (Ledger::new(), Barrier::new(N_THREADS as usize));
        thread::scope(|threads| {
            for i in 0..N_THREADS {
                let (ledger, barrier) = (ledger.clone(), &barrier);
                threads.spawn(move || {
                    let category = Category::ALL[i as usize];
                    for n_bytes in 0..200 {
                        drop(ledger.hold(category, n_bytes));
                    }
                    let _held = ledger.hold(category, 1000 + i);
                    barrier.wait();
                });
            }
        });
        assert_eq!((ledger.current_bytes(), ledger.peak_bytes()), (0, 6015));
        assert_eq!(ledger.at_peak().transient_bytes, 1005);
        assert_eq!(ledger.at_peak().total_bytes(), 6015);
    }
}

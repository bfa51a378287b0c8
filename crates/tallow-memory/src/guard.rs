use crate::{error::Error, ledger::Ledger, meter::Meter};

/// What an allocation above the cap of a [`CountingAllocator`](crate::CountingAllocator) left
/// behind for the next checkpoint. Of several, the largest of each number; of one that another thread
/// makes at the very moment of the reading, either may be missing until the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trip {
    /// Bytes the allocation added.
    pub asked_bytes: u64,
    /// Bytes held once it was granted.
    pub live_bytes: u64,
    /// The cap when the trip was read.
    pub cap_bytes: u64,
}

/// The checkpoint of a step: an error with numbers, while there is still memory to report it.
///
/// A segment that takes a `&dyn Meter` and a `&Watermark` calls [`Watermark::check`] between two
/// pieces of work; `?` then unwinds the step, guards return what they held, and the step can be
/// tried again in smaller pieces. [`Watermark::off`] still takes the trips of a capped allocator.
///
/// ```
/// use tallow_memory::{Category, Error, Ledger, Meter, Watermark};
///
/// let ledger = Ledger::new();
/// let guard = Watermark::new(1000, 0.9, ledger.clone())?;
/// let held = ledger.hold(Category::Gradients, 901);
/// let error = guard.check(&ledger).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "901 bytes are live, the mark is 900 of 1000; the most, 901, for gradients"
/// );
/// drop(held);
/// guard.check(&ledger)?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Watermark {
    limit_bytes: u64,
    mark_bytes: u64,
    ledger: Ledger,
}

impl Watermark {
    /// Fails above `high` (0 to 1) of `limit_bytes`; `ledger` says what the bytes are for.
    ///
    /// The meter counts this process alone. Where others share the limit, pass what is live now and
    /// [`Limits::headroom_bytes`](crate::limits::Limits::headroom_bytes) on top of it.
    ///
    /// # Errors
    /// [`Error::BadValue`] if `high` is not a share or the limit is 0.
    pub fn new(limit_bytes: u64, high: f64, ledger: Ledger) -> Result<Self, Error> {
        Error::unless_within(high, (0.0, 1.0), "the high mark", "a share from 0 to 1")?;
        if limit_bytes == 0 {
            let (what, range) = ("the limit", "above 0 bytes");
            return Err(Error::BadValue { what, range, found: 0.0 });
        }
        // Above 2^53 bytes the product is rounded, by less than a millionth of a millionth.
        let mark_bytes = ((limit_bytes as f64 * high) as u64).min(limit_bytes);
        Ok(Self { limit_bytes, mark_bytes, ledger })
    }

    /// No mark; trips are still taken.
    pub fn off(ledger: Ledger) -> Self {
        Self { limit_bytes: u64::MAX, mark_bytes: u64::MAX, ledger }
    }

    /// Live bytes above it are an error.
    pub fn mark_bytes(&self) -> u64 {
        self.mark_bytes
    }

    /// Whether the step may go on. Reads the meter once and holds nothing.
    ///
    /// # Errors
    /// [`Error::OverCap`] if an allocation passed the meter's cap since the last check, else
    /// [`Error::AboveMark`] if more than the mark is live now. A trip is reported once.
    pub fn check(&self, meter: &dyn Meter) -> Result<(), Error> {
        self.check_at(meter.current_bytes(), meter)
    }

    /// The same where `meter` was just read: `live_bytes`.
    ///
    /// # Errors
    /// As [`Watermark::check`].
    pub fn check_at(&self, live_bytes: u64, meter: &dyn Meter) -> Result<(), Error> {
        if let Some(trip) = meter.take_trip() {
            let (largest, largest_bytes) = self.ledger.current().reconciled(live_bytes).largest();
            let Trip { asked_bytes, live_bytes, cap_bytes } = trip;
            return Err(Error::OverCap {
                asked_bytes,
                live_bytes,
                cap_bytes,
                largest,
                largest_bytes,
            });
        }
        if live_bytes <= self.mark_bytes {
            return Ok(());
        }
        let (largest, largest_bytes) = self.ledger.current().reconciled(live_bytes).largest();
        let (mark_bytes, limit_bytes) = (self.mark_bytes, self.limit_bytes);
        Err(Error::AboveMark { live_bytes, mark_bytes, limit_bytes, largest, largest_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Category, FaultMeter, FnMeter, NoMeter};

    #[test]
    fn the_mark_itself_is_within_it() {
        for (limit_bytes, high, mark_bytes) in
            [(1000, 0.9, 900), (1000, 1.0, 1000), (7, 0.5, 3), (u64::MAX, 1.0, u64::MAX)]
        {
            let guard = Watermark::new(limit_bytes, high, Ledger::new()).unwrap();
            assert_eq!(guard.mark_bytes(), mark_bytes);
            guard.check(&FnMeter::new(|| Some(mark_bytes))).unwrap();
            let above = FnMeter::new(|| mark_bytes.checked_add(1));
            assert_eq!(guard.check(&above).is_err(), mark_bytes < u64::MAX);
        }
    }

    #[test]
    fn unnamed_bytes_are_other() {
        let ledger = Ledger::new();
        let _weights = ledger.hold(Category::Weights, 10);
        let guard = Watermark::new(100, 0.5, ledger).unwrap();
        let error = guard.check(&FnMeter::new(|| Some(60))).unwrap_err();
        let Error::AboveMark { largest: Category::Other, largest_bytes: 50, .. } = error else {
            panic!("{error}")
        };
    }

    #[test]
    fn marks_that_are_no_share_are_refused() {
        for high in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let error = Watermark::new(1, high, Ledger::new()).unwrap_err();
            assert!(matches!(error, Error::BadValue { what: "the high mark", .. }), "{error}");
        }
        let error = Watermark::new(0, 0.9, Ledger::new()).unwrap_err();
        assert_eq!(error.to_string(), "the limit should be above 0 bytes, found 0");
    }

    /// Memory runs out once at every checkpoint of a step; each time the step unwinds, returns all
    /// it held, and the first try without a fault completes.
    #[test]
    fn every_site_of_a_step_can_run_out() {
        let ledger = Ledger::new();
        let guard = Watermark::new(1 << 20, 0.9, ledger.clone()).unwrap();
        let step = |meter: &dyn Meter| -> Result<u64, Error> {
            let mut n_done = 0;
            let _weights = ledger.hold(Category::Weights, 100);
            guard.check(meter)?;
            for _ in 0..3 {
                let _saved = ledger.hold(Category::SavedActivations, 10);
                n_done += 1;
                guard.check(meter)?;
            }
            Ok(n_done)
        };
        let counting = FaultMeter::new(NoMeter, 0);
        assert_eq!((step(&counting).unwrap(), counting.n_readings()), (3, 4));
        for at in 1..=counting.n_readings() {
            let meter = FaultMeter::new(&ledger, at);
            let error = step(&meter).unwrap_err();
            assert!(matches!(error, Error::AboveMark { live_bytes: u64::MAX, .. }), "{error}");
            assert_eq!((meter.n_readings(), ledger.current_bytes()), (at, 0));
        }
        step(&FaultMeter::new(&ledger, counting.n_readings() + 1)).unwrap();
    }
}

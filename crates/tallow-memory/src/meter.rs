use crate::{counters::Scope, guard::Trip};

/// A source of byte counts, for code that cannot name the allocator of the binary it runs in.
///
/// The binary passes `&ALLOC`; whoever does not measure passes [`NoMeter`]. A device whose driver
/// can be asked is an [`FnMeter`](crate::FnMeter), one that cannot a [`Ledger`](crate::Ledger).
pub trait Meter: Send + Sync {
    /// Bytes held now.
    fn current_bytes(&self) -> u64;
    /// The most bytes held at once since the last [`Meter::reset_peak`], or since the start.
    fn peak_bytes(&self) -> u64;
    /// Makes what is held now the peak.
    fn reset_peak(&self);

    /// Opens a scope with a peak of its own, which leaves every other peak alone; `None` where the
    /// meter has only the one. See [`peak_during`].
    fn peak_scope(&self) -> Option<Scope<'_>> {
        None
    }

    /// Takes what an allocation above the cap left behind, if there was one since the last call.
    /// `None` from a meter without a cap.
    fn take_trip(&self) -> Option<Trip> {
        None
    }
}

/// Runs `work`; its value, and the most bytes held at once meanwhile above what was held before.
///
/// Scopes of a meter that has them leave other peaks alone, so calls may nest. Of any other meter
/// the one peak is reset, and an outer call then sees the peak since the inner one began.
///
/// # Panics
/// Where the meter's scopes are all taken: see [`MAX_SCOPES`](crate::MAX_SCOPES).
pub fn peak_during<T>(meter: &dyn Meter, work: impl FnOnce() -> T) -> (T, u64) {
    if let Some(scope) = meter.peak_scope() {
        return (work(), scope.peak_bytes());
    }
    meter.reset_peak();
    let start_bytes = meter.current_bytes();
    (work(), meter.peak_bytes().saturating_sub(start_bytes))
}

/// The meter that measures nothing: every count is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoMeter;

impl Meter for NoMeter {
    fn current_bytes(&self) -> u64 {
        0
    }

    fn peak_bytes(&self) -> u64 {
        0
    }

    fn reset_peak(&self) {}
}

impl<M: Meter + ?Sized> Meter for &M {
    fn current_bytes(&self) -> u64 {
        (**self).current_bytes()
    }

    fn peak_bytes(&self) -> u64 {
        (**self).peak_bytes()
    }

    fn reset_peak(&self) {
        (**self).reset_peak();
    }

    fn peak_scope(&self) -> Option<Scope<'_>> {
        (**self).peak_scope()
    }

    fn take_trip(&self) -> Option<Trip> {
        (**self).take_trip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Category, Ledger};

    #[test]
    fn no_meter_stays_at_zero_behind_a_reference() {
        let meter: &dyn Meter = &NoMeter;
        meter.reset_peak();
        assert_eq!(((&meter).current_bytes(), (&meter).peak_bytes()), (0, 0));
        assert!((&meter).peak_scope().is_none() && (&meter).take_trip().is_none());
    }

    #[test]
    fn a_meter_without_scopes_lends_its_one_peak() {
        let ledger = Ledger::new();
        let _kept = ledger.hold(Category::Weights, 1000);
        drop(ledger.hold(Category::Transient, 9000));
        let (n_bytes, peak_bytes) =
            peak_during(&ledger, || ledger.hold(Category::Data, 70).n_bytes());
        assert_eq!((n_bytes, peak_bytes), (70, 70));
        assert_eq!(peak_during(&NoMeter, || 3), (3, 0));
    }
}

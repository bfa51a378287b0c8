/// A source of byte counts, for code that cannot name the allocator of the binary it runs in.
///
/// The binary passes `&ALLOC`; whoever does not measure passes [`NoMeter`].
pub trait Meter: Send + Sync {
    /// Bytes held now.
    fn current_bytes(&self) -> u64;
    /// The most bytes held at once since the last [`Meter::reset_peak`], or since the start.
    fn peak_bytes(&self) -> u64;
    /// Makes what is held now the peak.
    fn reset_peak(&self);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_meter_stays_at_zero_behind_a_reference() {
        let meter: &dyn Meter = &NoMeter;
        meter.reset_peak();
        assert_eq!(((&meter).current_bytes(), (&meter).peak_bytes()), (0, 0));
    }
}

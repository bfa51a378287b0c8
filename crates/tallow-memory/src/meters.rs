use crate::{
    error::Error,
    guard::Trip,
    meter::Meter,
    resident::{reset_resident_peak, resident_bytes, resident_peak_bytes},
};
use std::{
    fmt,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

/// A meter made of a question: the seam for a device driver, with no dependency on it.
///
/// The closure answers with the bytes in use, or `None` when the driver gave no answer; the last
/// answer then stands, and [`FnMeter::n_unanswered`] counts it. For CUDA the closure is
/// `cuMemGetInfo`'s total less free bytes (other processes' are among them), for Metal the device's
/// `currentAllocatedSize`.
///
/// No driver tells its peak, so the peak is the largest *answer*: what rose and fell between two
/// questions is not seen.
///
/// ```
/// use tallow_memory::{FnMeter, Meter};
///
/// let driver = |/* ask here */| Some((80 << 30, 24 << 30)); // (total, free)
/// let meter = FnMeter::new(move || driver().map(|(total_bytes, free_bytes)| total_bytes - free_bytes));
/// assert_eq!(meter.current_bytes(), 56 << 30);
/// ```
pub struct FnMeter<F> {
    ask: F,
    last_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    n_unanswered: AtomicU64,
}

impl<F: Fn() -> Option<u64> + Send + Sync> FnMeter<F> {
    /// A meter that asks `ask` at each reading.
    pub const fn new(ask: F) -> Self {
        Self {
            ask,
            last_bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            n_unanswered: AtomicU64::new(0),
        }
    }

    /// Readings that had to repeat the last answer (0 before the first).
    pub fn n_unanswered(&self) -> u64 {
        self.n_unanswered.load(Relaxed)
    }
}

impl<F> fmt::Debug for FnMeter<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FnMeter").field("last_bytes", &self.last_bytes).finish_non_exhaustive()
    }
}

impl<F: Fn() -> Option<u64> + Send + Sync> Meter for FnMeter<F> {
    fn current_bytes(&self) -> u64 {
        let Some(now_bytes) = (self.ask)() else {
            self.n_unanswered.fetch_add(1, Relaxed);
            return self.last_bytes.load(Relaxed);
        };
        self.last_bytes.store(now_bytes, Relaxed);
        self.peak_bytes.fetch_max(now_bytes, Relaxed);
        now_bytes
    }

    /// Asks once more: a peak is never below what is held now.
    fn peak_bytes(&self) -> u64 {
        let now_bytes = self.current_bytes();
        self.peak_bytes.load(Relaxed).max(now_bytes)
    }

    fn reset_peak(&self) {
        self.peak_bytes.swap(0, Relaxed);
        self.peak_bytes.fetch_max(self.current_bytes(), Relaxed);
    }
}

/// The process's resident bytes as a [`Meter`]: `VmRSS`, and `VmHWM` as the peak.
///
/// It also counts code, stacks and what an allocator keeps for reuse, and it reads a file: tens of
/// microseconds a reading. Where a later reading is refused, the last one stands.
#[derive(Debug)]
pub struct ResidentMeter {
    last_bytes: AtomicU64,
    sampled_peak_bytes: AtomicU64,
    system_peak: AtomicBool,
}

impl ResidentMeter {
    /// Reads once, so that a system without the figure is an error here and not a 0 later.
    ///
    /// # Errors
    /// Those of [`resident_bytes`].
    pub fn new() -> Result<Self, Error> {
        let now_bytes = resident_bytes()?;
        Ok(Self {
            last_bytes: AtomicU64::new(now_bytes),
            sampled_peak_bytes: AtomicU64::new(now_bytes),
            system_peak: AtomicBool::new(true),
        })
    }
}

impl Meter for ResidentMeter {
    fn current_bytes(&self) -> u64 {
        if let Ok(now_bytes) = resident_bytes() {
            self.last_bytes.store(now_bytes, Relaxed);
            self.sampled_peak_bytes.fetch_max(now_bytes, Relaxed);
        }
        self.last_bytes.load(Relaxed)
    }

    fn peak_bytes(&self) -> u64 {
        let now_bytes = self.current_bytes();
        let sampled_bytes = self.sampled_peak_bytes.load(Relaxed).max(now_bytes);
        match resident_peak_bytes() {
            Ok(peak_bytes) if self.system_peak.load(Relaxed) => peak_bytes.max(sampled_bytes),
            _ => sampled_bytes,
        }
    }

    /// Asks the system to forget its peak, which is the process's and shared by all who read it.
    /// Where it refuses, the peak is from then on the largest reading.
    fn reset_peak(&self) {
        self.system_peak.store(reset_resident_peak().is_ok(), Relaxed);
        self.sampled_peak_bytes.swap(0, Relaxed);
        self.current_bytes();
    }
}

/// A meter for tests whose `at`th reading, from 1, claims `u64::MAX` bytes: any
/// [`Watermark`](crate::Watermark) then fails at that very check and no other.
///
/// Run a step with `at` = 1, 2, ... until it passes, and memory has run out once at each of its
/// checkpoints. `at` = 0 never trips and counts the checkpoints.
#[derive(Debug)]
pub struct FaultMeter<M> {
    inner: M,
    at: u64,
    n_readings: AtomicU64,
}

impl<M: Meter> FaultMeter<M> {
    /// `inner`'s figures but for the `at`th reading of its current bytes.
    pub const fn new(inner: M, at: u64) -> Self {
        Self { inner, at, n_readings: AtomicU64::new(0) }
    }

    /// Readings of the current bytes so far.
    pub fn n_readings(&self) -> u64 {
        self.n_readings.load(Relaxed)
    }
}

impl<M: Meter> Meter for FaultMeter<M> {
    fn current_bytes(&self) -> u64 {
        match self.n_readings.fetch_add(1, Relaxed) + 1 == self.at {
            true => u64::MAX,
            false => self.inner.current_bytes(),
        }
    }

    fn peak_bytes(&self) -> u64 {
        self.inner.peak_bytes()
    }

    fn reset_peak(&self) {
        self.inner.reset_peak();
    }

    fn peak_scope(&self) -> Option<crate::Scope<'_>> {
        self.inner.peak_scope()
    }

    fn take_trip(&self) -> Option<Trip> {
        self.inner.take_trip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoMeter;

    #[test]
    fn an_unanswered_question_repeats_the_last_answer() {
        let answers = AtomicU64::new(0);
        let ask = || match answers.fetch_add(1, Relaxed) {
            0 => Some(700),
            1 => None,
            n => Some(100 + n),
        };
        let meter = FnMeter::new(ask);
        assert_eq!((meter.current_bytes(), meter.current_bytes()), (700, 700));
        assert_eq!(meter.n_unanswered(), 1);
        assert_eq!((meter.current_bytes(), meter.peak_bytes()), (102, 700));
        meter.reset_peak();
        assert_eq!(meter.peak_bytes(), 105);
    }

    #[test]
    fn a_fault_trips_one_reading() {
        let meter = FaultMeter::new(NoMeter, 3);
        let readings: Vec<u64> = (0..5).map(|_| meter.current_bytes()).collect();
        assert_eq!(readings, [0, 0, u64::MAX, 0, 0]);
        assert_eq!((meter.n_readings(), meter.peak_bytes()), (5, 0));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_resident_meter_reads_the_system() {
        let meter = ResidentMeter::new().unwrap();
        let touched = vec![1u8; 8 << 20];
        assert!(meter.current_bytes() > 0 && meter.peak_bytes() >= touched.len() as u64);
        drop(touched);
        meter.reset_peak();
        assert!(meter.peak_bytes() > 0);
    }
}

//! Whether live bytes grow from step to step.
//!
//! After a warm-up the steps are taken in thirds, and of each third only the *lowest* live bytes
//! count: a transient raises a step's figure, a leak raises every later one. Growth is reported
//! when both the second third lies above the first and the last above the second by more than the
//! tolerance, so one jump (a cache that filled late, a buffer that found its size) is no leak. The
//! window then moves on by a third, and later leaks are found too.
//!
//! *Memory:* 88 bytes, whatever the number of steps.
//!
//! ```
//! use tallow_memory::leak::{Growth, LeakCheck};
//!
//! let mut check = LeakCheck::new(5, 30, 0)?;
//! let verdicts: Vec<Growth> = (0..35).map(|step| check.observe(1000 + 24 * step)).collect();
//! assert_eq!(verdicts[33], Growth::Undecided { left_steps: 1 });
//! assert_eq!(verdicts[34], Growth::Growing { bytes_per_step: 24 });
//! # Ok::<(), tallow_memory::Error>(())
//! ```

use crate::error::Error;

/// What the steps so far say.
#[must_use = "a leak that no one reads about ends the run later"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// Too few steps yet.
    Undecided {
        /// Steps until there is a verdict.
        left_steps: u64,
    },
    /// No growth beyond the tolerance.
    Steady,
    /// Live bytes rise through the whole window.
    Growing {
        /// The slower of the two rises, rounded up.
        bytes_per_step: u64,
    },
}

/// Feed it the live bytes after each step; see the [module](self).
#[derive(Clone, Debug)]
pub struct LeakCheck {
    third_steps: u64,
    tolerance_bytes_per_step: u64,
    /// Steps still to skip.
    warmup_steps: u64,
    /// Lowest live bytes of the last full thirds, the oldest first.
    lows: [Option<u64>; 3],
    low_bytes: u64,
    n_in_third: u64,
}

impl LeakCheck {
    /// Skips `warmup_steps`, then judges windows of `window_steps`; growth of up to
    /// `tolerance_bytes_per_step` is steady.
    ///
    /// # Errors
    /// [`Error::BadValue`] if the window is not a multiple of 3 from 6 on.
    pub fn new(
        warmup_steps: u64,
        window_steps: u64,
        tolerance_bytes_per_step: u64,
    ) -> Result<Self, Error> {
        if window_steps < 6 || !window_steps.is_multiple_of(3) {
            let (what, range) = ("the window of a leak check", "a multiple of 3 steps, 6 or more");
            return Err(Error::BadValue { what, range, found: window_steps as f64 });
        }
        Ok(Self {
            third_steps: window_steps / 3,
            tolerance_bytes_per_step,
            warmup_steps,
            lows: [None; 3],
            low_bytes: u64::MAX,
            n_in_third: 0,
        })
    }

    /// Takes the live bytes after a step; the verdict over the last full window.
    pub fn observe(&mut self, live_bytes: u64) -> Growth {
        if self.warmup_steps > 0 {
            self.warmup_steps -= 1;
            return self.growth();
        }
        self.low_bytes = self.low_bytes.min(live_bytes);
        self.n_in_third += 1;
        if self.n_in_third == self.third_steps {
            self.lows = [self.lows[1], self.lows[2], Some(self.low_bytes)];
            (self.low_bytes, self.n_in_third) = (u64::MAX, 0);
        }
        self.growth()
    }

    /// The verdict again.
    pub fn growth(&self) -> Growth {
        let [Some(first), Some(second), Some(third)] = self.lows else {
            let n_missing = self.lows.iter().filter(|low| low.is_none()).count() as u64;
            let left_steps = n_missing.saturating_mul(self.third_steps) - self.n_in_third;
            return Growth::Undecided { left_steps: left_steps.saturating_add(self.warmup_steps) };
        };
        let rise_bytes = second.saturating_sub(first).min(third.saturating_sub(second));
        match rise_bytes > self.tolerance_bytes_per_step.saturating_mul(self.third_steps) {
            true => Growth::Growing { bytes_per_step: rise_bytes.div_ceil(self.third_steps) },
            false => Growth::Steady,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(tolerance_bytes: u64, live: impl Fn(u64) -> u64) -> Growth {
        let mut check = LeakCheck::new(5, 30, tolerance_bytes).unwrap();
        let last = (0..35).map(|step| check.observe(live(step))).last().unwrap();
        assert_eq!(last, check.growth());
        last
    }

    fn noise(step: u64) -> u64 {
        step.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 54 // below 1024
    }

    #[test]
    fn mem_1_flat_after_warmup_is_steady() {
        let warming = |step: u64| 10_000 * step.min(5);
        assert_eq!(verdict(0, warming), Growth::Steady);
        assert_eq!(verdict(0, |step| 1 << (40 - step)), Growth::Steady); // shrinking
        assert_eq!(verdict(0, |_| u64::MAX), Growth::Steady);
    }

    #[test]
    fn mem_1_a_graph_kept_by_each_loss_grows() {
        assert_eq!(verdict(0, |step| 40 * step), Growth::Growing { bytes_per_step: 40 });
        assert_eq!(verdict(39, |step| 40 * step), Growth::Growing { bytes_per_step: 40 });
        assert_eq!(verdict(40, |step| 40 * step), Growth::Steady); // the tolerance is steady
        // Kept in lumps: every tenth step.
        let lumps = |step: u64| step / 10 * 1000;
        assert_eq!(verdict(0, lumps), Growth::Growing { bytes_per_step: 100 });
    }

    #[test]
    fn transients_and_one_jump_are_no_leak() {
        let spikes = |step: u64| 1000 + if step % 7 == 3 { 1 << 30 } else { 0 };
        assert_eq!(verdict(0, spikes), Growth::Steady);
        assert_eq!(verdict(0, |step| if step < 17 { 1000 } else { 90_000 }), Growth::Steady);
        // Noise of 1 kB moves the lowest of ten steps by at most 103 bytes a step.
        assert_eq!(verdict(103, |step| 50_000 + noise(step)), Growth::Steady);
        let Growth::Growing { bytes_per_step } = verdict(103, |s| 700 * s + noise(s)) else {
            panic!("a leak of 700 bytes under noise of 1024 was missed")
        };
        assert!((597..=803).contains(&bytes_per_step), "{bytes_per_step}");
    }

    #[test]
    fn a_late_leak_is_found_and_a_mended_one_forgotten() {
        let mut check = LeakCheck::new(0, 6, 0).unwrap();
        let mut at = |from: u64, to: u64, live: &dyn Fn(u64) -> u64| {
            (from..to).map(|step| check.observe(live(step))).last().unwrap()
        };
        assert_eq!(at(0, 100, &|_| 5), Growth::Steady);
        assert_eq!(at(100, 106, &|step| step), Growth::Growing { bytes_per_step: 1 });
        assert_eq!(at(106, 112, &|_| 106), Growth::Steady);
    }

    #[test]
    fn it_says_how_long_to_wait() {
        let mut check = LeakCheck::new(2, 6, 0).unwrap();
        assert_eq!(check.growth(), Growth::Undecided { left_steps: 8 });
        for left_steps in (1..8).rev() {
            assert_eq!(check.observe(0), Growth::Undecided { left_steps });
        }
        assert_eq!(check.observe(0), Growth::Steady);
        assert_eq!(size_of::<LeakCheck>(), 88);
        for window_steps in [0, 3, 7, 31] {
            LeakCheck::new(0, window_steps, 0).unwrap_err();
        }
    }
}

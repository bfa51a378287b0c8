use super::pieces::{Pieces, pieces};
use crate::error::Error;

/// How a [`Controller`] behaves. Shares are of the limit, times by the caller's clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ControllerConfig {
    /// Below this share it may double; above 0 and below `high`. 0.7 is a good start.
    pub low: f64,
    /// Above this share it halves; at most 1. 0.9 is a good start.
    pub high: f64,
    /// At least so long between two changes; longer than the meter's delay. 5 is a good start.
    pub hysteresis_secs: f64,
    /// For so long after a failed growth the size that failed is not tried again; at least
    /// `hysteresis_secs`. 300 is a good start.
    pub ceiling_secs: f64,
    /// Smallest piece, at least 1.
    pub min_items: usize,
    /// Largest piece.
    pub max_items: usize,
    /// The piece to begin with.
    pub start_items: usize,
    /// Bytes that do not depend on the size of a piece: weights, gradients, optimizer state. The
    /// rest of a reading is taken to grow with the piece. 0 is safe, and grows late.
    pub fixed_bytes: u64,
}

impl ControllerConfig {
    /// A controller that never changes a thing: every piece has `piece_items`.
    pub const fn fixed(piece_items: usize) -> Self {
        Self {
            low: 0.7,
            high: 0.9,
            hysteresis_secs: 5.0,
            ceiling_secs: 300.0,
            min_items: piece_items,
            max_items: piece_items,
            start_items: piece_items,
            fixed_bytes: 0,
        }
    }
}

/// What to do with the size of a piece from the next batch on.
#[must_use = "the controller has changed its size already"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing.
    Stay,
    /// Pieces become smaller: half, or the minimum if that is more.
    Halve {
        /// The size until now.
        from_items: usize,
        /// The size from now on.
        to_items: usize,
    },
    /// Pieces become larger: double, or the maximum if that is less.
    Double {
        /// The size until now.
        from_items: usize,
        /// The size from now on.
        to_items: usize,
    },
}

/// Moves the size of a piece with what a meter reads, without oscillating.
///
/// - Above the high mark it halves, below the low mark it doubles; between them it stays.
/// - Two changes are never closer than `hysteresis_secs`, and a reading counts only if it was taken
///   *after* the last change: what a delayed meter says about the old size moves nothing.
/// - It doubles only if the reading, scaled to the new size, stays at or below the high mark.
/// - If a doubling turns out to be too much all the same, within `ceiling_secs` of it and under the
///   same limit, that size is the ceiling for the next `ceiling_secs`; then it is tried again.
///
/// The best reading is the peak of the last step, not a moment's. The batch, its weights and the
/// schedule do not change: [`Controller::pieces`] splits the same items in another way.
///
/// *Memory:* 120 bytes. It reads no clock and no meter, so the same calls give the same answers.
///
/// ```
/// use tallow_memory::batch::{Controller, ControllerConfig, Decision};
///
/// let config = ControllerConfig { max_items: 32, min_items: 1, ..ControllerConfig::fixed(8) };
/// let mut controller = Controller::new(config)?;
/// let halved = Decision::Halve { from_items: 8, to_items: 4 };
/// assert_eq!(controller.observe(0.0, 950, 1000)?, halved);
/// assert_eq!(controller.observe(1.0, 950, 1000)?, Decision::Stay); // too soon
/// assert_eq!(controller.pieces(10).map(|piece| piece.n_items()).collect::<Vec<_>>(), [4, 4, 2]);
/// # Ok::<(), tallow_memory::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Controller {
    config: ControllerConfig,
    piece_items: usize,
    last: Option<Change>,
    ceiling: Option<Ceiling>,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    at_secs: f64,
    /// The high mark in bytes that a doubling was to stay under; `None` after a halving.
    grew_under: Option<f64>,
}

/// Sizes from `items` on are not tried before `until_secs`.
#[derive(Clone, Copy, Debug)]
struct Ceiling {
    items: usize,
    until_secs: f64,
}

impl Controller {
    /// A controller at `start_items`, free to change at the first reading.
    ///
    /// # Errors
    /// [`Error::BadValue`] for shares that are not `0 < low < high <= 1`, times that are negative,
    /// not finite, or a ceiling shorter than the hysteresis, and sizes that are not
    /// `1 <= min <= start <= max`.
    pub fn new(config: ControllerConfig) -> Result<Self, Error> {
        let ControllerConfig { low, high, hysteresis_secs, ceiling_secs, .. } = config;
        Error::unless_within(high, (f64::MIN_POSITIVE, 1.0), "high", "above 0, at most 1")?;
        let below_high = high.next_down();
        Error::unless_within(low, (f64::MIN_POSITIVE, below_high), "low", "above 0, below high")?;
        let (from_0, what) = ((0.0, f64::MAX), "hysteresis_secs");
        Error::unless_within(hysteresis_secs, from_0, what, "0 seconds or more")?;
        let (from_hysteresis, what) = ((hysteresis_secs, f64::MAX), "ceiling_secs");
        Error::unless_within(ceiling_secs, from_hysteresis, what, "hysteresis_secs or more")?;
        let (min, start, max) = (config.min_items, config.start_items, config.max_items);
        let sizes = [
            (min >= 1, "min_items", "1 or more", min),
            (min <= max, "max_items", "min_items or more", max),
            (min <= start && start <= max, "start_items", "from min_items to max_items", start),
        ];
        for (holds, what, range, found) in sizes {
            if !holds {
                return Err(Error::BadValue { what, range, found: found as f64 });
            }
        }
        Ok(Self { config, piece_items: start, last: None, ceiling: None })
    }

    /// Items of a full piece.
    pub fn piece_items(&self) -> usize {
        self.piece_items
    }

    /// Goes on at a size that a run had when it was stopped.
    ///
    /// # Errors
    /// [`Error::BadValue`] if it is not from `min_items` to `max_items`.
    pub fn go_on_at(&mut self, piece_items: usize) -> Result<(), Error> {
        let ControllerConfig { min_items, max_items, .. } = self.config;
        if !(min_items..=max_items).contains(&piece_items) {
            let (what, range) = ("the size to go on at", "from min_items to max_items");
            return Err(Error::BadValue { what, range, found: piece_items as f64 });
        }
        self.piece_items = piece_items;
        Ok(())
    }

    /// The pieces of a batch of `n_items` at the current size: every item once, weights by items.
    pub fn pieces(&self, n_items: usize) -> Pieces {
        pieces(n_items, self.piece_items)
    }

    /// Replaces [`ControllerConfig::fixed_bytes`]: optimizer state appears with the first update.
    pub fn set_fixed_bytes(&mut self, fixed_bytes: u64) {
        self.config.fixed_bytes = fixed_bytes;
    }

    /// A reading taken now: see [`Controller::observe_taken`].
    ///
    /// # Errors
    /// Those of [`Controller::observe_taken`].
    pub fn observe(
        &mut self,
        now_secs: f64,
        used_bytes: u64,
        limit_bytes: u64,
    ) -> Result<Decision, Error> {
        self.observe_taken(now_secs, now_secs, used_bytes, limit_bytes)
    }

    /// Takes a reading that was made at `taken_secs` and arrives at `now_secs`, and changes the size
    /// if it must.
    ///
    /// # Errors
    /// [`Error::BadValue`] for times that are not finite, a reading from after now, or a limit of 0;
    /// nothing has changed then.
    pub fn observe_taken(
        &mut self,
        now_secs: f64,
        taken_secs: f64,
        used_bytes: u64,
        limit_bytes: u64,
    ) -> Result<Decision, Error> {
        let finite = (f64::MIN, f64::MAX);
        Error::unless_within(now_secs, finite, "now_secs", "finite")?;
        let by_now = (f64::MIN, now_secs);
        Error::unless_within(taken_secs, by_now, "taken_secs", "finite, at most now_secs")?;
        if limit_bytes == 0 {
            return Err(Error::BadValue { what: "limit_bytes", range: "above 0", found: 0.0 });
        }
        if !self.may_change(now_secs, taken_secs) {
            return Ok(Decision::Stay);
        }
        let (used, limit) = (used_bytes as f64, limit_bytes as f64);
        if used > self.config.high * limit {
            // Under a limit that has shrunk since, the growth is not to blame.
            let failed_growth = self.last.is_some_and(|last| {
                now_secs - last.at_secs <= self.config.ceiling_secs
                    && last.grew_under.is_some_and(|mark| used > mark)
            });
            return Ok(self.halve(now_secs, failed_growth));
        }
        let to_items = self.piece_items.saturating_mul(2).min(self.config.max_items);
        let grows = used < self.config.low * limit
            && to_items > self.piece_items
            && self.is_below_ceiling(now_secs, to_items)
            && self.predicted_bytes(used, to_items) <= self.config.high * limit;
        if !grows {
            return Ok(Decision::Stay);
        }
        let from_items = self.change(now_secs, to_items, Some(self.config.high * limit));
        Ok(Decision::Double { from_items, to_items })
    }

    /// Memory ran out at the current size: halves at once, whatever the time since the last change,
    /// and makes the size that failed the ceiling. `Stay` says that the size is the minimum already.
    ///
    /// # Errors
    /// [`Error::BadValue`] for a time that is not finite.
    pub fn out_of_memory(&mut self, now_secs: f64) -> Result<Decision, Error> {
        Error::unless_within(now_secs, (f64::MIN, f64::MAX), "now_secs", "finite")?;
        Ok(self.halve(now_secs, true))
    }

    fn may_change(&self, now_secs: f64, taken_secs: f64) -> bool {
        self.last.is_none_or(|last| {
            now_secs - last.at_secs >= self.config.hysteresis_secs && taken_secs > last.at_secs
        })
    }

    fn is_below_ceiling(&self, now_secs: f64, to_items: usize) -> bool {
        self.ceiling
            .is_none_or(|ceiling| to_items < ceiling.items || now_secs >= ceiling.until_secs)
    }

    /// The fixed bytes, and the rest in proportion to the items.
    fn predicted_bytes(&self, used: f64, to_items: usize) -> f64 {
        let fixed = self.config.fixed_bytes as f64;
        fixed + (used - fixed).max(0.0) * (to_items as f64 / self.piece_items as f64)
    }

    fn halve(&mut self, now_secs: f64, remember: bool) -> Decision {
        if remember {
            let until_secs = now_secs + self.config.ceiling_secs;
            self.ceiling = Some(Ceiling { items: self.piece_items, until_secs });
        }
        let to_items = (self.piece_items / 2).max(self.config.min_items);
        if to_items == self.piece_items {
            return Decision::Stay;
        }
        let from_items = self.change(now_secs, to_items, None);
        Decision::Halve { from_items, to_items }
    }

    fn change(&mut self, at_secs: f64, to_items: usize, grew_under: Option<f64>) -> usize {
        self.last = Some(Change { at_secs, grew_under });
        std::mem::replace(&mut self.piece_items, to_items)
    }
}

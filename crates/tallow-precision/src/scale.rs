//! The loss scale: a state machine over windows, one window per update.

use crate::{
    Error, Result,
    error::FLOAT,
    state::{LossScaleState, Rule, Skip, Skips, Window},
    unscale::divide_all,
};
use candle_core::{DType, Tensor, Var, backprop::GradStore};

/// What the gradients said about this window.
#[must_use = "an overflowed window must not be applied"]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every gradient is finite: apply the update.
    Finite,
    /// Some gradient is infinite or NaN: drop the gradients.
    Overflow {
        /// The first such parameter, in order of names.
        name: String,
    },
}

/// Multiplies losses so that small half-precision gradients survive, and divides gradients back.
///
/// A *window* is what one update is made of. It opens with the first [`LossScale::apply`], holds any
/// number of micro-batches, and closes with [`LossScale::unscale`], [`LossScale::record`] or
/// [`LossScale::skip`]. The scale changes only when a window closes, so all micro-batches of a window
/// have one scale. Off is the value [`LossScale::off`], not another path.
#[derive(Clone, Debug, PartialEq)]
pub struct LossScale {
    state: LossScaleState,
}

impl LossScale {
    /// A scale that follows what the gradients bear.
    /// # Errors
    /// If a number of `config` is out of its range; see [`crate::DynamicScale`].
    pub fn dynamic(config: crate::DynamicScale) -> Result<Self> {
        Self::new(Rule::Dynamic(config))
    }

    /// The same scale for every window. Overflow still gives a verdict and is counted.
    /// # Errors
    /// If `scale` is not positive or `f32` cannot hold it and its inverse.
    pub fn fixed(scale: f32) -> Result<Self> {
        Self::new(Rule::Fixed { scale, max_consecutive_skips: Rule::MAX_CONSECUTIVE_SKIPS })
    }

    /// `LossScale::fixed(1.0)`: losses and gradients keep their values, for f32 and bf16.
    pub fn off() -> Self {
        let (scale, max_consecutive_skips) = (1.0, Rule::MAX_CONSECUTIVE_SKIPS);
        Self { state: LossScaleState::start(Rule::Fixed { scale, max_consecutive_skips }) }
    }

    /// The scale that `rule` starts with.
    /// # Errors
    /// If a number of `rule` is out of its range.
    pub fn new(rule: Rule) -> Result<Self> {
        rule.check()?;
        Ok(Self { state: LossScaleState::start(rule) })
    }

    /// Exactly what was saved, its rule included, also in the middle of a window.
    /// # Errors
    /// If a number of `state` is out of its range.
    pub fn from_state(state: LossScaleState) -> Result<Self> {
        state.check()?;
        Ok(Self { state })
    }

    /// This run's `rule` with the scale and counters of a checkpoint.
    ///
    /// A checkpoint of a fixed scale says nothing about where a dynamic one should start, nor the
    /// other way round: there `start` is the scale, and the counters of skips are kept.
    /// # Errors
    /// If the kinds of scale differ and `start` is `None`, or a number is out of its range.
    pub fn resume(rule: Rule, saved: LossScaleState, start: Option<f32>) -> Result<Self> {
        saved.check()?;
        let mut state = LossScaleState { rule, ..saved };
        if !rule.is_same_kind(&saved.rule) {
            let Some(start) = start else {
                return Err(Error::Resume { saved: saved.rule, asked: rule });
            };
            state = LossScaleState { scale: start, clean_windows: 0, ..state };
            state.hysteresis_left = rule.hysteresis();
        }
        state.hysteresis_left = state.hysteresis_left.min(rule.hysteresis());
        Self::from_state(state)
    }

    /// Everything there is to save. A plain value.
    pub fn state(&self) -> LossScaleState {
        self.state
    }

    /// The factor that losses of the open window, or else the next one, are multiplied by.
    pub fn value(&self) -> f32 {
        self.state.scale
    }

    /// What became of the newest closed window.
    pub fn last(&self) -> Option<Window> {
        self.state.last
    }

    /// Windows skipped so far, by reason.
    pub fn skips(&self) -> Skips {
        self.state.skips
    }

    /// `loss * scale` in f32 (f64 for an f64 loss), so that the product cannot overflow f16. Opens a
    /// window if none is open.
    ///
    /// Compute the loss itself in f32: the gradient of an f16 loss is f16, and 65536 is infinite there.
    /// # Errors
    /// If `loss` holds no floats.
    pub fn apply(&mut self, loss: &Tensor) -> Result<Tensor> {
        let dtype = match loss.dtype() {
            DType::F64 => DType::F64,
            DType::F32 | DType::BF16 | DType::F16 => DType::F32,
            dtype => {
                let what = "the loss".to_string();
                return Err(Error::DType { what, dtype, expected: FLOAT });
            }
        };
        let scaled = (loss.to_dtype(dtype)? * f64::from(self.state.scale))?;
        self.state.open = true;
        Ok(scaled)
    }

    /// The gradient of the loss that backward starts from, where that is given as a number and not by
    /// scaling the loss: the same gradients, bit for bit, as [`LossScale::apply`] gives. Opens a
    /// window if none is open.
    pub fn seed(&mut self) -> f64 {
        self.state.open = true;
        f64::from(self.state.scale)
    }

    /// Divides the gradients of `params` by the scale, in place, in one pass, and closes the window.
    ///
    /// f16 gradients are replaced by f32 ones: what the scale saved from underflow would be lost again
    /// in f16. Other gradients keep their dtype. Parameters without a gradient stay without one. A
    /// gradient that is strided, shares its storage with another, or is not on the CPU is replaced too.
    ///
    /// *Memory:* 4 bytes per element of f16 gradients, in place of their 2; else nothing.
    /// # Errors
    /// If no loss was scaled since the last window ([`Error::Unscaled`], gradients untouched), no
    /// parameter has a gradient, or the limit of overflows in a row is reached ([`Error::Stuck`]).
    pub fn unscale(&mut self, params: &[(String, Var)], grads: &mut GradStore) -> Result<Verdict> {
        self.check_open()?;
        let overflow = divide_all(params, grads, self.state.scale)?;
        self.record(match overflow {
            None => Verdict::Finite,
            Some(name) => Verdict::Overflow { name: name.to_string() },
        })
    }

    /// Closes the window with a verdict that was reached elsewhere: gradients divided by
    /// [`LossScale::value`] one by one as they came, or another rank's overflow. Returns the verdict.
    /// # Errors
    /// If no window is open, or the limit of overflows in a row is reached.
    pub fn record(&mut self, verdict: Verdict) -> Result<Verdict> {
        self.check_open()?;
        let old = self.state.scale;
        let skipped = match &verdict {
            Verdict::Finite => {
                self.state.clean();
                None
            }
            Verdict::Overflow { .. } => {
                self.state.overflowed();
                Some(Skip::Overflow)
            }
        };
        self.state.close(old, skipped);
        let limit = self.state.rule.max_consecutive_skips();
        match &verdict {
            Verdict::Overflow { name } if self.state.consecutive_skips >= limit => {
                Err(Error::Stuck {
                    count: self.state.consecutive_skips,
                    scale: self.state.scale,
                    name: name.clone(),
                })
            }
            _ => Ok(verdict),
        }
    }

    /// Records that the open window, or the one just unscaled, is not applied for a reason other than
    /// overflow. Such a skip moves neither the scale nor the count of overflows in a row.
    /// # Errors
    /// If there is no such window, or it is skipped already.
    pub fn skip(&mut self, reason: Skip) -> Result<()> {
        let state = &mut self.state;
        if state.open {
            state.close(state.scale, Some(reason));
            return Ok(());
        }
        match &mut state.last {
            Some(Window { skipped: skipped @ None, .. }) => {
                *skipped = Some(reason);
                state.skips.count(reason);
                Ok(())
            }
            last => Err(Error::Skipped {
                n_windows: state.n_windows,
                asked: reason,
                found: last.and_then(|window| window.skipped),
            }),
        }
    }

    fn check_open(&self) -> Result<()> {
        match self.state.open {
            true => Ok(()),
            false => Err(Error::Unscaled { n_windows: self.state.n_windows }),
        }
    }
}

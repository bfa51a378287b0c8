//! The sums of a window.

use crate::{
    AccumConfig, Clip, Error, Finish, Result, Verdict, Window, WindowReport, buffer::Buffer,
};
use candle_core::{Tensor, TensorId, Var, backprop::GradStore};
use std::collections::HashMap;
use tallow_kernels::accum::Squares;

/// Adds up the gradients of micro-batches until an update takes them.
///
/// Losses are sums: call `backward` on the sum over a micro-batch's samples or tokens and give their
/// number, or the sum of their weights, beside the gradients. [`GradientAccumulator::take_mean`]
/// divides once. If losses are multiplied by a loss scale, it is one number for the whole window.
#[derive(Debug)]
pub struct GradientAccumulator {
    buffers: Vec<Buffer>,
    places: HashMap<TensorId, usize>,
    warn_above: u64,
    n_micro_batches: u64,
    total_weight: f64,
    /// Gradients since the last end of a micro-batch.
    n_open: u64,
}

impl GradientAccumulator {
    /// For `params`, sorted by name. Allocates a buffer at a parameter's first gradient.
    /// # Errors
    /// If there are no parameters, their names are not sorted, two are one variable, or one is no
    /// float.
    pub fn new(params: &[(String, Var)], config: AccumConfig) -> Result<Self> {
        config.check()?;
        if params.is_empty() {
            return Err(Error::NoParameters);
        }
        for pair in params.windows(2) {
            let [(previous, _), (name, _)] = pair else { unreachable!("windows of two") };
            if previous >= name {
                return Err(Error::Order { name: name.clone(), previous: previous.clone() });
            }
        }
        let buffers: Vec<Buffer> = params
            .iter()
            .map(|(name, var)| Buffer::new(name, var, config.dtype))
            .collect::<Result<_>>()?;
        let mut places = HashMap::with_capacity(params.len());
        for (i, (name, var)) in params.iter().enumerate() {
            if let Some(first) = places.insert(var.id(), i) {
                let first = params[first].0.clone();
                return Err(Error::Shared { name: name.clone(), first });
            }
        }
        let warn_above = config.warn_above;
        Ok(Self { buffers, places, warn_above, n_micro_batches: 0, total_weight: 0.0, n_open: 0 })
    }

    /// Adds a micro-batch: the gradients of its loss *sum*, which die here one by one, and its
    /// weight. Gradients of tensors that are not among the parameters are dropped.
    /// # Errors
    /// If a gradient does not fit its parameter or the weight is negative or not finite; nothing
    /// has been added then.
    pub fn add(&mut self, grads: GradStore, weight: f64) -> Result<()> {
        check_weight(weight)?;
        self.add_part(grads)?;
        self.end_micro_batch(weight)
    }

    /// Adds the gradients of a part of a micro-batch, such as those of a segment whose backward is
    /// done, so that the next segment's can take their memory. They die here one by one.
    /// [`GradientAccumulator::end_micro_batch`] follows the last part; a parameter may come more
    /// than once.
    /// # Errors
    /// If a gradient does not fit its parameter; nothing of this part has been added then.
    pub fn add_part(&mut self, mut grads: GradStore) -> Result<()> {
        for buffer in &self.buffers {
            grads.get(&buffer.var).map_or(Ok(()), |grad| buffer.check(grad))?;
        }
        for buffer in &mut self.buffers {
            if let Some(grad) = grads.remove(&buffer.var) {
                buffer.add(&grad)?;
                self.n_open += 1;
            }
        }
        Ok(())
    }

    /// As [`GradientAccumulator::add_part`]: one gradient, as backward produces it, so that
    /// the next one can take its memory. `index` is the parameter's place in the sorted list.
    /// [`GradientAccumulator::end_micro_batch`] follows the last one; a parameter may come more than
    /// once.
    /// # Errors
    /// If the gradient does not fit its parameter; it has not been added then.
    /// # Panics
    /// If there is no parameter at `index`.
    pub fn add_one(&mut self, index: usize, grad: &Tensor) -> Result<()> {
        let buffer = &mut self.buffers[index];
        buffer.check(grad)?;
        buffer.add(grad)?;
        self.n_open += 1;
        Ok(())
    }

    /// Ends a micro-batch whose gradients came one by one.
    /// # Errors
    /// If the weight is negative or not finite.
    pub fn end_micro_batch(&mut self, weight: f64) -> Result<()> {
        check_weight(weight)?;
        self.n_open = 0;
        self.n_micro_batches += 1;
        self.total_weight += weight;
        Ok(())
    }

    /// The place of the parameter called `name`.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.buffers.binary_search_by(|buffer| buffer.name.as_str().cmp(name)).ok()
    }

    /// The place of the parameter that `var` is.
    pub fn index_of_var(&self, var: &Tensor) -> Option<usize> {
        self.places.get(&var.id()).copied()
    }

    /// Micro-batches of the window so far.
    pub fn n_micro_batches(&self) -> u64 {
        self.n_micro_batches
    }

    /// Their weights' sum.
    pub fn total_weight(&self) -> f64 {
        self.total_weight
    }

    /// Bytes of the buffers allocated so far; [`crate::accumulator_bytes`] once every parameter has
    /// had a gradient.
    pub fn held_bytes(&self) -> u64 {
        self.buffers.iter().map(Buffer::held_bytes).sum()
    }

    /// Ends the window: gradients of the mean loss, over the weight of all its micro-batches.
    ///
    /// One pass over memory divides by weight and loss scale, clips by value, measures the norm and
    /// looks for infinities and NaN; a norm above its limit costs a second. The window is over even
    /// if its gradients are not used.
    /// # Errors
    /// If the window is empty or weighs 0, a micro-batch has not ended, or a setting is out of
    /// range; the window is then as before.
    pub fn take_mean(&mut self, finish: Finish) -> Result<Window<'_>> {
        self.check_ended()?;
        if self.total_weight == 0.0 {
            return Err(Error::ZeroWeight { n_micro_batches: self.n_micro_batches });
        }
        self.take(self.total_weight, finish)
    }

    /// Ends the window: gradients of the loss sum. As [`GradientAccumulator::take_mean`] without
    /// the weight.
    /// # Errors
    /// As there, except that the weight may be 0.
    pub fn take_sum(&mut self, finish: Finish) -> Result<Window<'_>> {
        self.check_ended()?;
        self.take(1.0, finish)
    }

    /// Abandons the window. Whatever its gradients were, nothing of them remains.
    pub fn reset(&mut self) {
        self.buffers.iter_mut().for_each(Buffer::reset);
        (self.n_micro_batches, self.total_weight, self.n_open) = (0, 0.0, 0);
    }

    fn check_ended(&self) -> Result<()> {
        match (self.n_open, self.n_micro_batches) {
            (0, 0) => Err(Error::EmptyWindow),
            (0, _) => Ok(()),
            (n_gradients, _) => Err(Error::OpenMicroBatch { n_gradients }),
        }
    }

    fn take(&mut self, weight: f64, finish: Finish) -> Result<Window<'_>> {
        finish.check()?;
        let divisor = weight * finish.loss_scale;
        if !(divisor > 0.0 && divisor.is_finite()) {
            let name = "weight of the window times loss_scale";
            return Err(Error::Setting { name, value: divisor, expected: "above 0 and finite" });
        }
        let window = self.finish(divisor, finish.clip);
        self.reset();
        window.map(|(grads, report)| Window::new(grads, report))
    }

    fn finish(&mut self, divisor: f64, clip: Clip) -> Result<(GradStore, WindowReport)> {
        let limit = if let Clip::Value(limit) = clip { limit } else { f64::INFINITY };
        let (mut squares, mut clipped, mut verdict) = (Squares::ZERO, false, Verdict::Finite);
        for buffer in &mut self.buffers {
            let Some(found) = buffer.finish(divisor, limit)? else { continue };
            if verdict == Verdict::Finite && !found.squares.is_finite() {
                verdict = Verdict::NonFinite { name: buffer.name.clone() };
            }
            squares = squares.plus(found.squares);
            clipped |= found.n_clipped > 0;
        }
        if let Clip::Norm(max_norm) = clip
            && verdict == Verdict::Finite
            && squares.ratio(max_norm) < 1.0
        {
            self.buffers.iter_mut().try_for_each(|b| b.scale(squares.ratio(max_norm)))?;
            clipped = true;
        }
        let mut grads = GradStore::default();
        for buffer in &self.buffers {
            if let Some(sum) = buffer.sum() {
                grads.insert(&buffer.var, sum.clone());
            }
        }
        let report = WindowReport {
            n_micro_batches: self.n_micro_batches,
            total_weight: self.total_weight,
            norm: squares.norm(),
            clipped,
            above_advised: self.n_micro_batches > self.warn_above,
            verdict,
        };
        Ok((grads, report))
    }
}

fn check_weight(weight: f64) -> Result<()> {
    if !(weight >= 0.0 && weight.is_finite()) {
        let expected = "0 or more and finite";
        return Err(Error::Setting { name: "weight", value: weight, expected });
    }
    Ok(())
}

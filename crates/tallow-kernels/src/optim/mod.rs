//! Optimizer updates in one pass over parameter, gradient and moments.
//!
//! [`update`] applies a [`Rule`] (AdamW, Adam, SGD, Lion) element by element; [`adafactor`] needs
//! sums over the whole parameter. A chunk of [`CHUNK_ELEMS`] is read into buffers in accumulator
//! precision (`f32`; `f64` for `f64` parameters), updated, and written back with one rounding, so
//! the same formulas serve every format of parameter, gradient and moment.
//!
//! A moment is bytes, little-endian: the same planes lie in memory, in a window of a file, and in a
//! checkpoint. A gradient that is not finite makes its own parameter element NaN (as PyTorch does),
//! and touches nothing else; in an 8-bit moment that element becomes 0.
//!
//! *Scratch:* [`SCRATCH_BYTES`] of stack a thread; [`adafactor_scratch_bytes`].

mod adafactor;
mod map8;
mod moment;
mod round;
mod rule;

pub use adafactor::{Adafactor, SecondMoment, adafactor, adafactor_scratch_bytes, sum_of_squares};
#[cfg(target_arch = "x86_64")]
pub(crate) use map8::{CELL_SHIFT, FIRST_CELL, Map8, N_CELLS};
pub use map8::{Sign, dynamic_map};
pub use moment::{Block, BlockError, CHUNK_ELEMS, Format, MIN_BLOCK_ELEMS, Moment};
pub use round::{Draws, Rounding, Weight};
pub use rule::{Adam, Lion, Rule, Sgd};

use crate::{Element, Real, isa::vectorized};
use moment::{add_low, low, num, write};

/// Elements below which an update stays on one thread, and the grain of its division.
const CUT_ELEMS: usize = 8 * CHUNK_ELEMS;
/// Elements that one turn of the loop updates where no block is larger: the buffers and what they are
/// read from then fit in the L1 cache.
const TURN_ELEMS: usize = 512;
/// Stack that [`update`] takes on each thread, for `f64` parameters: four buffers of a chunk.
pub const SCRATCH_BYTES: u64 = 4 * 8 * CHUNK_ELEMS as u64;

/// How updated weights are rounded.
pub enum Weights<'a> {
    /// To nearest.
    Nearest,
    /// By chance; see [`Rounding::Stochastic`].
    Stochastic,
    /// To nearest, with a bf16 an element for what was lost.
    Kahan(&'a mut [u8]),
}

impl<'a> Weights<'a> {
    fn split_at(self, n_elems: usize) -> (Weights<'a>, Weights<'a>) {
        match self {
            Weights::Nearest => (Weights::Nearest, Weights::Nearest),
            Weights::Stochastic => (Weights::Stochastic, Weights::Stochastic),
            Weights::Kahan(low) => {
                let (low, rest) = low.split_at_mut(2 * n_elems);
                (Weights::Kahan(low), Weights::Kahan(rest))
            }
        }
    }

    /// Reads `p`, elements `at..at + p.len()` of `param`, in accumulator precision.
    fn load<T: Element>(&self, param: &[T], at: usize, p: &mut [T::Acc]) {
        vectorized(
            #[inline(always)]
            || p.iter_mut().zip(&param[at..]).for_each(|(p, x)| *p = x.widen()),
        );
        if let Weights::Kahan(low) = self {
            add_low(&low[2 * at..][..2 * p.len()], p);
        }
    }

    /// Writes `p` back; the first element has draw number `first`.
    fn store<T: Weight>(
        &mut self,
        param: &mut [T],
        at: usize,
        p: &[T::Acc],
        draws: Draws,
        first: u64,
    ) {
        let param = &mut param[at..][..p.len()];
        match self {
            Weights::Stochastic if T::ROUNDS => {
                draws.each(first, p.len(), |i, draw| param[i] = T::stochastic(p[i], draw));
            }
            Weights::Nearest | Weights::Stochastic => nearest(param, p),
            Weights::Kahan(lost) => {
                nearest(param, p);
                write(&mut lost[2 * at..][..2 * p.len()], p, |p| {
                    low(p.f64(), T::nearest(p).widen().f64())
                });
            }
        }
    }
}

/// `param[i] = p[i]`, rounded to nearest.
fn nearest<T: Weight>(param: &mut [T], p: &[T::Acc]) {
    vectorized(
        #[inline(always)]
        || param.iter_mut().zip(p).for_each(|(x, p)| *x = T::nearest(*p)),
    );
}

/// Random numbers of one update of one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateKey {
    /// The run's seed.
    pub seed: u64,
    /// Which parameter; below 2^30.
    pub parameter: u32,
    /// Which update of it; taken modulo 2^32.
    pub t: u64,
}

/// Sets the random numbers of updates apart from others of the same seed: "optimize" in ASCII.
const KEY: u64 = 0x6f70_7469_6d69_7a65;

impl UpdateKey {
    /// Array 0 is the parameter, 1 and 2 its moments.
    fn draws(self, array: u64) -> Draws {
        let stream = u64::from(self.parameter) << 34 | array << 32 | self.t & 0xffff_ffff;
        // Another key than dropout's, whose streams may have the same numbers.
        Draws { seed: self.seed ^ KEY, stream }
    }
}

/// What one update reads and writes: elements `start..` of a parameter, with their moments.
pub struct Job<'a, T, G> {
    /// The weights.
    pub param: &'a mut [T],
    /// Their gradient, of any float type.
    pub grad: &'a [G],
    /// What the gradient is multiplied by first: 1, or what undoes a loss scale and clips.
    pub grad_factor: f64,
    /// How the weights are rounded.
    pub weights: Weights<'a>,
    /// The first moment or momentum, where the rule has one.
    pub m: Option<Moment<'a>>,
    /// The second moment, where the rule has one.
    pub v: Option<Moment<'a>>,
    /// Number of the first element within its parameter; a multiple of [`CHUNK_ELEMS`].
    pub start: u64,
}

impl<'a, T, G> Job<'a, T, G> {
    fn split_at(self, n_elems: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at_mut(n_elems);
        let (grad, grad_rest) = self.grad.split_at(n_elems);
        let (weights, weights_rest) = self.weights.split_at(n_elems);
        let (m, m_rest) = self.m.map(|m| m.split_at(n_elems)).unzip();
        let (v, v_rest) = self.v.map(|v| v.split_at(n_elems)).unzip();
        let (start, grad_factor) = (self.start + n_elems as u64, self.grad_factor);
        (
            Job { param, grad, grad_factor, weights, m, v, start: self.start },
            Job {
                param: param_rest,
                grad: grad_rest,
                grad_factor,
                weights: weights_rest,
                m: m_rest,
                v: v_rest,
                start,
            },
        )
    }
}

/// Weights and moments that can be computed with where they are.
type InPlace<'a, A> = (&'a mut [A], &'a mut [A], &'a mut [A]);

impl<T: Weight, G> Job<'_, T, G> {
    /// Elements `at..at + n` of the weights and moments, if all are stored as they are computed with; of
    /// a moment that the rule has not, none.
    fn in_place(&mut self, at: usize, n: usize) -> Option<InPlace<'_, T::Acc>> {
        fn moment<'a, A: Real>(
            moment: &'a mut Option<Moment>,
            at: usize,
            n: usize,
        ) -> Option<&'a mut [A]> {
            moment.as_mut().map_or(Some(&mut []), |moment| moment.in_place(at, n))
        }
        if matches!(self.weights, Weights::Kahan(_)) {
            return None;
        }
        let p = T::as_acc_mut(&mut self.param[at..at + n])?;
        Some((p, moment(&mut self.m, at, n)?, moment(&mut self.v, at, n)?))
    }
}

/// Updates parameter and moments in place, in parallel where that pays; the result does not depend
/// on the number of threads, nor on how a parameter is divided into jobs.
///
/// # Panics
/// If lengths differ, a moment that the rule needs is missing, or `start` is no multiple of
/// [`CHUNK_ELEMS`].
pub fn update<T: Weight, G: Element>(rule: &Rule, key: UpdateKey, job: Job<T, G>) {
    assert_eq!(job.param.len(), job.grad.len(), "update: parameter and gradient differ in length");
    assert!(job.start.is_multiple_of(CHUNK_ELEMS as u64), "update: start {}", job.start);
    let (needs_m, needs_v) = match rule {
        Rule::Adam(_) | Rule::AdamW(_) => (true, true),
        Rule::Sgd(sgd) => (sgd.momentum != 0.0, false),
        Rule::Lion(_) => (true, false),
    };
    assert!(job.m.is_some() || !needs_m, "update: {rule:?} needs a first moment");
    assert!(job.v.is_some() || !needs_v, "update: {rule:?} needs a second moment");
    divide(rule, key, job);
}

/// Halves the job at a multiple of the cut until one thread's worth is left.
fn divide<T: Weight, G: Element>(rule: &Rule, key: UpdateKey, job: Job<T, G>) {
    let n_cuts = job.param.len().div_ceil(CUT_ELEMS);
    if n_cuts <= 1 {
        return serial(rule, key, job);
    }
    let (left, right) = job.split_at(n_cuts / 2 * CUT_ELEMS);
    rayon::join(|| divide(rule, key, left), || divide(rule, key, right));
}

fn serial<T: Weight, G: Element>(rule: &Rule, key: UpdateKey, mut job: Job<T, G>) {
    let (zero, factor) = (T::Acc::of(0.0), T::Acc::of(job.grad_factor));
    let block = [&job.m, &job.v].into_iter().flatten().map(Moment::block_elems).max();
    let turn = TURN_ELEMS.max(block.unwrap_or(1));
    let [mut p, mut g, mut m, mut v] = [[zero; CHUNK_ELEMS]; 4];
    for at in (0..job.param.len()).step_by(turn) {
        let n = turn.min(job.param.len() - at);
        let (p, g, m, v) = (&mut p[..n], &mut g[..n], &mut m[..n], &mut v[..n]);
        let first = job.start + at as u64;
        vectorized(
            #[inline(always)]
            || {
                for (g, x) in g.iter_mut().zip(&job.grad[at..]) {
                    *g = num::<G, T::Acc>(*x) * factor;
                }
            },
        );
        if let Some((p, m, v)) = job.in_place(at, n) {
            vectorized(
                #[inline(always)]
                || rule.apply(p, g, m, v),
            );
            continue;
        }
        job.weights.load(job.param, at, p);
        if let Some(moment) = &job.m {
            moment.load(at, m);
        }
        if let Some(moment) = &job.v {
            moment.load(at, v);
        }
        vectorized(
            #[inline(always)]
            || rule.apply(p, g, m, v),
        );
        if let Some(moment) = &mut job.m {
            moment.store(at, m, key.draws(1), first);
        }
        if let Some(moment) = &mut job.v {
            moment.store(at, v, key.draws(2), first);
        }
        job.weights.store(job.param, at, p, key.draws(0), first);
    }
}

//! Cross-entropy on logits, and fused with the linear layer that makes them.
//!
//! For a row with logits `x` and target `t`, with `log p = x - log_sum_exp(x)` and smoothing `e`:
//! `loss = -(1 - e) log p[t] - e mean(log p)`, as PyTorch's `CrossEntropyLoss`. A loss is a sum and
//! a count, so that micro-batches are divided once, by the count of them all; log-sum-exps and
//! sums are `f64`.
// N rows · C classes

mod linear;
mod one_pass;

use crate::{
    Element, Real, par,
    reduce::{lanes, max, parts},
};
use rayon::prelude::*;

pub use linear::{
    DEFAULT_CHUNK_BYTES, Linear, linear_cross_entropy, linear_cross_entropy_backward,
    linear_cross_entropy_backward_scratch_bytes, linear_cross_entropy_scratch_bytes,
};
pub use one_pass::{
    LinearGrads, ONE_PASS_CHUNK_BYTES, linear_cross_entropy_with_grads,
    linear_cross_entropy_with_grads_scratch_bytes, one_pass_pays, scale_into,
};

/// What the targets mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// Rows with this target have no loss, no gradient and are not counted; PyTorch's is -100.
    pub ignore_index: i64,
    /// Weight of the uniform distribution over the classes, in `[0, 1]`.
    pub label_smoothing: f64,
}

/// What the losses refuse.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum LossError {
    /// A target that is no class and is not ignored.
    #[error("cross entropy: target {target} of row {row} is not below {n_classes} classes")]
    Target {
        /// The first such row.
        row: usize,
        /// Its target.
        target: i64,
        /// Number of classes.
        n_classes: usize,
    },
    /// The smoothing is outside `[0, 1]` or NaN.
    #[error("cross entropy: label_smoothing is {label_smoothing}, it must be from 0 to 1")]
    LabelSmoothing {
        /// The smoothing given.
        label_smoothing: f64,
    },
}

/// A loss before its division.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sums {
    /// Sum of the losses of the counted rows.
    pub loss_sum: f64,
    /// Rows that are not ignored; the mean is `loss_sum / n_counted`.
    pub n_counted: u64,
}

impl Sums {
    /// Of no rows.
    const NONE: Self = Self { loss_sum: 0.0, n_counted: 0 };
}

impl CrossEntropy {
    /// Finds the first target that is neither a class nor ignored.
    fn check(&self, targets: &[i64], n_classes: usize) -> Result<(), LossError> {
        let label_smoothing = self.label_smoothing;
        if !(0.0..=1.0).contains(&label_smoothing) {
            return Err(LossError::LabelSmoothing { label_smoothing });
        }
        let wrong = |&t: &i64| t != self.ignore_index && self.class(t, n_classes).is_none();
        match targets.iter().position(wrong) {
            Some(row) => Err(LossError::Target { row, target: targets[row], n_classes }),
            None => Ok(()),
        }
    }

    /// The class of a target; nothing where it is ignored or no class.
    fn class(&self, target: i64, n_classes: usize) -> Option<usize> {
        let class = usize::try_from(target).ok().filter(|&class| class < n_classes);
        class.filter(|_| target != self.ignore_index)
    }

    /// `scale (p - (1 - e) [j == t] - e / C)` of a logit `x`, where `hit` says that `j == t`.
    #[inline(always)]
    fn logit_grad<R: Real>(&self, x: R, lse: f64, hit: bool, n_classes: usize, scale: f64) -> R {
        let p = R::of(x.f64() - lse).quick_exp();
        (p - R::of(self.wanted(hit, n_classes))) * R::of(scale)
    }

    /// `(1 - e) [j == t] + e / C`.
    #[inline(always)]
    fn wanted(&self, hit: bool, n_classes: usize) -> f64 {
        let at_target = if hit { 1.0 - self.label_smoothing } else { 0.0 };
        at_target + self.label_smoothing / n_classes as f64
    }

    /// Turns a row's logits of the classes from `first` into their gradients.
    #[inline(always)]
    fn grad_row_in_place<R: Real>(
        &self,
        row: &mut [R],
        lse: f64,
        target: i64,
        first: usize,
        n_classes: usize,
        scale: f64,
    ) {
        let Some(class) = self.class(target, n_classes) else {
            return row.fill(R::of(0.0));
        };
        let hit = class.checked_sub(first).filter(|&j| j < row.len());
        let at_hit = hit.map(|j| (j, self.logit_grad(row[j], lse, true, n_classes, scale)));
        for x in row.iter_mut() {
            *x = self.logit_grad(*x, lse, false, n_classes, scale);
        }
        if let Some((j, grad)) = at_hit {
            row[j] = grad;
        }
    }

    /// Loss and log-sum-exp of each row, added to `sums` in order.
    fn sums(
        &self,
        lse: &mut [f64],
        targets: &[i64],
        rows: &[Online],
        n_classes: usize,
        mut sums: Sums,
    ) -> Sums {
        for ((lse, &target), row) in lse.iter_mut().zip(targets).zip(rows) {
            *lse = row.max + row.sum_exp.ln();
            if target != self.ignore_index {
                // Not `lse - mixed`: beside a large maximum the logarithm would lose its digits.
                let mixed = row.mixed(self.label_smoothing, n_classes);
                sums.loss_sum += (row.max - mixed) + row.sum_exp.ln();
                sums.n_counted += 1;
            }
        }
        sums
    }
}

/// One row's softmax so far, over the classes seen.
#[derive(Clone, Copy)]
struct Online {
    /// Largest logit.
    max: f64,
    /// Sum of `exp(x - max)`.
    sum_exp: f64,
    /// Sum of the logits; 0 where nothing is smoothed.
    sum: f64,
    /// Logit of the target.
    at_target: f64,
}

impl Online {
    const EMPTY: Self = Self { max: f64::NEG_INFINITY, sum_exp: 0.0, sum: 0.0, at_target: 0.0 };

    /// Adds the classes from `first`.
    fn absorb<T: Element>(&mut self, x: &[T], first: usize, class: Option<usize>, smooth: bool) {
        let shift = self.see(x, first, class, smooth);
        let shift_acc = T::Acc::of(shift); // exact: a logit or 0
        self.add(parts(
            x,
            #[inline(always)]
            |x| (x.widen() - shift_acc).quick_exp(),
        ));
    }

    /// As [`Online::absorb`]; of the logits `x` it leaves `exp(x - shift)`, and returns `shift`.
    #[inline(always)]
    fn absorb_in_place<R: Real>(
        &mut self,
        x: &mut [R],
        first: usize,
        class: Option<usize>,
        smooth: bool,
    ) -> f64 {
        let shift = self.see(x, first, class, smooth);
        let shift_acc = R::of(shift);
        for x in x.iter_mut() {
            *x = (*x - shift_acc).quick_exp();
        }
        self.add(parts(
            x,
            #[inline(always)]
            |x| x,
        ));
        shift
    }

    /// All of the classes from `first` but the sum of their exponentials: that is to be added next, relative
    /// to the logit returned.
    #[inline(always)]
    fn see<T: Element>(
        &mut self,
        x: &[T],
        first: usize,
        class: Option<usize>,
        smooth: bool,
    ) -> f64 {
        let max_new = self.max.max(max(x).f64());
        // While all logits are -inf they are exponentiated as they are, and give 0.
        let shift = if max_new == f64::NEG_INFINITY { 0.0 } else { max_new };
        self.sum_exp *= (self.max - shift).exp();
        self.max = max_new;
        if smooth {
            self.sum += lanes(
                x,
                #[inline(always)]
                |x| x.widen().f64(),
            );
        }
        if let Some(x) = class.and_then(|class| x.get(class.checked_sub(first)?)) {
            self.at_target = x.widen().f64();
        }
        shift
    }

    fn add(&mut self, sum_exp: f64) {
        self.sum_exp += sum_exp;
    }

    /// `(1 - e) x[t] + e mean(x)`. An infinite logit must not meet a factor of 0.
    fn mixed(&self, label_smoothing: f64, n_classes: usize) -> f64 {
        match label_smoothing {
            0.0 => self.at_target,
            1.0 => self.sum / n_classes as f64,
            e => (1.0 - e) * self.at_target + e * (self.sum / n_classes as f64),
        }
    }
}

/// Bytes that [`cross_entropy`] borrows for each row.
pub const CROSS_ENTROPY_SCRATCH_BYTES_PER_ROW: u64 = size_of::<Online>() as u64;

/// Sum of the losses of logits `x` `[N, C]` against `targets` `[N]`, and per row the log-sum-exp
/// `lse` `[N]` for [`cross_entropy_backward`].
///
/// *Scratch:* [`CROSS_ENTROPY_SCRATCH_BYTES_PER_ROW`].
/// # Errors
/// If a target is neither ignored nor below `C`, or the smoothing is outside `[0, 1]`; found
/// before any arithmetic.
/// # Panics
/// If a length does not match.
pub fn cross_entropy<T: Element>(
    lse: &mut [f64],
    x: &[T],
    targets: &[i64],
    n_classes: usize,
    config: &CrossEntropy,
) -> Result<Sums, LossError> {
    assert_eq!(x.len(), targets.len() * n_classes, "cross_entropy: x is not [N, C]");
    assert_eq!(lse.len(), targets.len(), "cross_entropy: lse is not [N]");
    config.check(targets, n_classes)?;
    let mut rows = vec![Online::EMPTY; targets.len()];
    absorb_rows(&mut rows, x, targets, 0, n_classes, n_classes, config);
    Ok(config.sums(lse, targets, &rows, n_classes, Sums::NONE))
}

/// Gradient of [`cross_entropy`] times `scale`:
/// `dx[j] = scale (p[j] - (1 - e) [j == t] - e / C)`, `p = exp(x - lse)`; 0 in ignored rows.
///
/// For the mean loss, `scale` is the upstream gradient divided by `n_counted`.
///
/// *Kept:* `x` and `lse`. *Scratch:* none.
/// # Errors
/// As [`cross_entropy`].
/// # Panics
/// If a length does not match.
pub fn cross_entropy_backward<T: Element>(
    dx: &mut [T],
    x: &[T],
    lse: &[f64],
    targets: &[i64],
    n_classes: usize,
    config: &CrossEntropy,
    scale: f64,
) -> Result<(), LossError> {
    assert_eq!(x.len(), targets.len() * n_classes, "cross_entropy_backward: x is not [N, C]");
    assert_eq!(dx.len(), x.len(), "cross_entropy_backward: dx and x differ in length");
    assert_eq!(lse.len(), targets.len(), "cross_entropy_backward: lse is not [N]");
    config.check(targets, n_classes)?;
    par::rows(
        dx,
        n_classes,
        #[inline(always)]
        |i, dx| {
            let x = &x[i * n_classes..][..n_classes];
            let Some(class) = config.class(targets[i], n_classes) else {
                return dx.fill(T::default());
            };
            let grad =
                |x: T, hit| T::narrow(config.logit_grad(x.widen(), lse[i], hit, n_classes, scale));
            for (dx, &x) in dx.iter_mut().zip(x) {
                *dx = grad(x, false);
            }
            dx[class] = grad(x[class], true);
        },
    );
    Ok(())
}

/// Adds to each row's state the `n_cols` classes from `first` that `x` holds.
fn absorb_rows<T: Element>(
    rows: &mut [Online],
    x: &[T],
    targets: &[i64],
    first: usize,
    n_cols: usize,
    n_classes: usize,
    config: &CrossEntropy,
) {
    let smooth = config.label_smoothing > 0.0;
    rows.par_iter_mut().enumerate().for_each(|(i, row)| {
        let class = config.class(targets[i], n_classes);
        row.absorb(&x[i * n_cols..][..n_cols], first, class, smooth);
    });
}

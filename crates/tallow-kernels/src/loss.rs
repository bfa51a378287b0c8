//! Cross-entropy on logits, and fused with the linear layer that makes them.
//!
//! For a row with logits `x` and target `t`, with `log p = x - log_sum_exp(x)` and smoothing `e`:
//! `loss = -(1 - e) log p[t] - e mean(log p)`, as PyTorch's `CrossEntropyLoss`. A loss is a sum and
//! a count, so that micro-batches are divided once, by the count of them all; log-sum-exps and
//! sums are `f64`.
//!
//! The fused form never holds the logits `[N, V]`: it makes them in tiles of rows and classes,
//! merges the tiles by online softmax (Milakov and Gimelshein 2018), and makes each tile again in
//! backward. Logits stay in the accumulator type and are never rounded to `bf16`.
// N rows · C, V classes · D features

use std::ops::Range;

use crate::{
    Element, Real,
    cast::{cast, is_own_acc, widened},
    gemm::{Mat, Store, gemm},
    par,
    reduce::{lanes, max, sum_cols, sum_cols_scratch_bytes},
};
use num_traits::Float;
use rayon::prelude::*;

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

impl CrossEntropy {
    /// Finds the first target that is neither a class nor ignored.
    fn check(&self, targets: &[i64], n_classes: usize) -> Result<(), LossError> {
        let label_smoothing = self.label_smoothing;
        if !(0.0..=1.0).contains(&label_smoothing) {
            return Err(LossError::LabelSmoothing { label_smoothing });
        }
        let wrong = |&t: &i64| t != self.ignore_index && self.class(t, n_classes).is_none();
        match targets.iter().position(wrong) {
            Some(row) => Err(LossError::Target {
                row,
                target: targets[row],
                n_classes,
            }),
            None => Ok(()),
        }
    }

    /// The class of a target; nothing where it is ignored or no class.
    fn class(&self, target: i64, n_classes: usize) -> Option<usize> {
        let class = usize::try_from(target)
            .ok()
            .filter(|&class| class < n_classes);
        class.filter(|_| target != self.ignore_index)
    }

    /// `scale (p - (1 - e) [j == t] - e / C)` of a logit `x`, where `hit` says that `j == t`.
    #[inline(always)]
    fn logit_grad<R: Real>(&self, x: R, lse: f64, hit: bool, n_classes: usize, scale: f64) -> R {
        let p = R::of(x.f64() - lse).exp();
        let at_target = if hit { 1.0 - self.label_smoothing } else { 0.0 };
        let wanted = at_target + self.label_smoothing / n_classes as f64;
        (p - R::of(wanted)) * R::of(scale)
    }

    /// Turns a row's logits of the classes from `first` into their gradients.
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

    /// Loss and log-sum-exp of each row, summed in order.
    fn sums(&self, lse: &mut [f64], targets: &[i64], rows: &[Online], n_classes: usize) -> Sums {
        let mut sums = Sums {
            loss_sum: 0.0,
            n_counted: 0,
        };
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
    const EMPTY: Self = Self {
        max: f64::NEG_INFINITY,
        sum_exp: 0.0,
        sum: 0.0,
        at_target: 0.0,
    };

    /// Adds the classes from `first`.
    fn absorb<T: Element>(&mut self, x: &[T], first: usize, class: Option<usize>, smooth: bool) {
        let max_new = self.max.max(max(x).f64());
        // While all logits are -inf they are exponentiated as they are, and give 0.
        let shift = if max_new == f64::NEG_INFINITY {
            0.0
        } else {
            max_new
        };
        let shift_acc = T::Acc::of(shift); // exact: a logit or 0
        let sum_exp = lanes(x, |x| (x.widen() - shift_acc).exp().f64());
        self.sum_exp = self.sum_exp * (self.max - shift).exp() + sum_exp;
        self.max = max_new;
        if smooth {
            self.sum += lanes(x, |x| x.widen().f64());
        }
        if let Some(x) = class.and_then(|class| x.get(class.checked_sub(first)?)) {
            self.at_target = x.widen().f64();
        }
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

/// Sum of the losses of logits `x` `[N, C]` against `targets` `[N]`, and per row the log-sum-exp
/// `lse` `[N]` for [`cross_entropy_backward`].
///
/// *Scratch:* 32 bytes a row.
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
    assert_eq!(
        x.len(),
        targets.len() * n_classes,
        "cross_entropy: x is not [N, C]"
    );
    assert_eq!(lse.len(), targets.len(), "cross_entropy: lse is not [N]");
    config.check(targets, n_classes)?;
    let mut rows = vec![Online::EMPTY; targets.len()];
    absorb_rows(&mut rows, x, targets, 0, n_classes, n_classes, config);
    Ok(config.sums(lse, targets, &rows, n_classes))
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
    assert_eq!(
        x.len(),
        targets.len() * n_classes,
        "cross_entropy_backward: x is not [N, C]"
    );
    assert_eq!(
        dx.len(),
        x.len(),
        "cross_entropy_backward: dx and x differ in length"
    );
    assert_eq!(
        lse.len(),
        targets.len(),
        "cross_entropy_backward: lse is not [N]"
    );
    config.check(targets, n_classes)?;
    par::rows(dx, n_classes, |i, dx| {
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
    });
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

/// The bytes of logits that the fused form holds unless told otherwise.
pub const DEFAULT_CHUNK_BYTES: u64 = 8 << 20;
/// Classes of one tile of logits where the limit leaves room: wide enough that a product is
/// bound by arithmetic, few enough that a widened tile of the weight stays small.
const TILE_CLASSES: usize = 4096;

/// How the logits `[N, V]` are cut.
#[derive(Clone, Copy)]
struct Tiles {
    n_rows: usize,
    n_classes: usize,
    tile_rows: usize,
    tile_classes: usize,
}

impl Tiles {
    /// Tiles of at most `chunk_bytes`, but of at least one logit.
    fn new<R>(n_rows: usize, n_classes: usize, chunk_bytes: u64) -> Self {
        let max_elems = usize::try_from(chunk_bytes / size_of::<R>() as u64).unwrap_or(usize::MAX);
        let tile_classes = n_classes.min(TILE_CLASSES).min(max_elems).max(1);
        let tile_rows = n_rows.min(max_elems / tile_classes).max(1);
        Self {
            n_rows,
            n_classes,
            tile_rows,
            tile_classes,
        }
    }

    fn rows(self) -> impl Iterator<Item = Range<usize>> {
        cuts(self.n_rows, self.tile_rows)
    }

    /// Bytes of a tile of logits, and of the widened operands that made it.
    fn bytes<T: Element>(self, n_features: u64) -> u64 {
        let (tile_rows, tile_classes) = (self.tile_rows as u64, self.tile_classes as u64);
        let widened = if is_own_acc::<T>() {
            0
        } else {
            (tile_rows + tile_classes) * n_features
        };
        (tile_rows * tile_classes + widened) * size_of::<T::Acc>() as u64
    }

    fn classes(self) -> impl Iterator<Item = Range<usize>> {
        cuts(self.n_classes, self.tile_classes)
    }
}

/// `0..n` in ranges of `step`.
fn cuts(n: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n)
        .step_by(step)
        .map(move |start| start..n.min(start + step))
}

/// The linear layer whose logits the loss is of: `logits = x weight^T + bias`.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a, T> {
    /// Inputs `[N, D]`.
    pub x: &'a [T],
    /// Weight `[V, D]`, as PyTorch and candle store it.
    pub weight: &'a [T],
    /// Bias `[V]`, or none.
    pub bias: Option<&'a [T]>,
    /// Features, `D`.
    pub n_features: usize,
    /// Classes, `V`.
    pub n_classes: usize,
}

impl<T: Element> Linear<'_, T> {
    /// # Panics
    /// If a length does not match.
    fn assert_lens(&self, what: &str, n_rows: usize) {
        let Self {
            x,
            weight,
            bias,
            n_features,
            n_classes,
        } = self;
        assert_eq!(x.len(), n_rows * n_features, "{what}: x is not [N, D]");
        assert_eq!(
            weight.len(),
            n_classes * n_features,
            "{what}: weight is not [V, D]"
        );
        assert!(
            bias.is_none_or(|b| b.len() == *n_classes),
            "{what}: bias is not [V]"
        );
    }

    /// The logits of a tile, from its rows of `x` and of the weight.
    fn logits(&self, tile: &mut [T::Acc], x: Mat<T::Acc>, w: Mat<T::Acc>, first_class: usize) {
        gemm(tile, x, w.t(), Store::Overwrite);
        if let Some(bias) = self.bias {
            let bias = &bias[first_class..][..w.n_rows];
            par::rows(tile, w.n_rows, |_, row| {
                for (s, b) in row.iter_mut().zip(bias) {
                    *s += b.widen();
                }
            });
        }
    }
}

/// [`cross_entropy`] of the logits of a linear layer, which are never held but for one tile of at
/// most `chunk_bytes` (or a single logit).
///
/// `targets` `[N]` → `lse` `[N]`.
///
/// *Scratch:* [`linear_cross_entropy_scratch_bytes`].
/// # Errors
/// As [`cross_entropy`].
/// # Panics
/// If a length does not match.
pub fn linear_cross_entropy<T: Element>(
    lse: &mut [f64],
    linear: &Linear<T>,
    targets: &[i64],
    config: &CrossEntropy,
    chunk_bytes: u64,
) -> Result<Sums, LossError> {
    let Linear {
        n_features: d,
        n_classes,
        ..
    } = *linear;
    linear.assert_lens("linear_cross_entropy", targets.len());
    assert_eq!(
        lse.len(),
        targets.len(),
        "linear_cross_entropy: lse is not [N]"
    );
    config.check(targets, n_classes)?;
    let tiles = Tiles::new::<T::Acc>(targets.len(), n_classes, chunk_bytes);
    let mut logits = vec![T::Acc::of(0.0); tiles.tile_rows * tiles.tile_classes];
    let (mut x_wide, mut w_wide) = (Vec::new(), Vec::new());
    let mut online = vec![Online::EMPTY; targets.len()];
    for classes in tiles.classes() {
        let w = &linear.weight[classes.start * d..classes.end * d];
        let w = Mat::new(widened(w, &mut w_wide), classes.len(), d);
        for rows in tiles.rows() {
            let x = &linear.x[rows.start * d..rows.end * d];
            let x = Mat::new(widened(x, &mut x_wide), rows.len(), d);
            let tile = &mut logits[..rows.len() * classes.len()];
            linear.logits(tile, x, w, classes.start);
            let (online, targets) = (&mut online[rows.clone()], &targets[rows]);
            absorb_rows(
                online,
                tile,
                targets,
                classes.start,
                classes.len(),
                n_classes,
                config,
            );
        }
    }
    Ok(config.sums(lse, targets, &online, n_classes))
}

/// Gradients of [`linear_cross_entropy`] times `scale`, each where asked for, from the inputs and
/// `lse`: the logits are made again tile by tile, and with `g` the gradient of the logits as in
/// [`cross_entropy_backward`], `dx = g weight`, `dweight = g^T x`, `dbias = sum of g`.
///
/// Gradients are added up in the accumulator type over all tiles and rounded once.
///
/// *Kept:* `x`, `weight` and `lse`. *Scratch:* [`linear_cross_entropy_backward_scratch_bytes`]; no
/// `[V, D]`, for the tiles of one range of classes come one after the other.
/// # Errors
/// As [`cross_entropy`].
/// # Panics
/// If a length does not match.
pub fn linear_cross_entropy_backward<T: Element>(
    dx: Option<&mut [T]>,
    mut dweight: Option<&mut [T]>,
    mut dbias: Option<&mut [T]>,
    linear: &Linear<T>,
    lse: &[f64],
    targets: &[i64],
    config: &CrossEntropy,
    scale: f64,
    chunk_bytes: u64,
) -> Result<(), LossError> {
    let what = "linear_cross_entropy_backward";
    let Linear {
        n_features: d,
        n_classes,
        ..
    } = *linear;
    linear.assert_lens(what, targets.len());
    assert_eq!(lse.len(), targets.len(), "{what}: lse is not [N]");
    assert!(
        dx.as_ref().is_none_or(|g| g.len() == linear.x.len()),
        "{what}: dx"
    );
    assert!(
        dweight
            .as_ref()
            .is_none_or(|g| g.len() == linear.weight.len()),
        "{what}: dweight"
    );
    assert!(
        dbias.as_ref().is_none_or(|g| g.len() == n_classes),
        "{what}: dbias"
    );
    config.check(targets, n_classes)?;

    let tiles = Tiles::new::<T::Acc>(targets.len(), n_classes, chunk_bytes);
    let mut logits = vec![T::Acc::of(0.0); tiles.tile_rows * tiles.tile_classes];
    let (mut x_wide, mut w_wide) = (Vec::new(), Vec::new());
    let mut dx = dx.map(GradSum::new);
    for classes in tiles.classes() {
        let weights = classes.start * d..classes.end * d;
        let w = widened(&linear.weight[weights.clone()], &mut w_wide);
        let w = Mat::new(w, classes.len(), d);
        let mut dw = dweight
            .as_deref_mut()
            .map(|dw| GradSum::new(&mut dw[weights]));
        let mut db = dbias.as_ref().map(|_| vec![0.0; classes.len()]);
        for rows in tiles.rows() {
            let x_rows = rows.start * d..rows.end * d;
            let x = widened(&linear.x[x_rows.clone()], &mut x_wide);
            let x = Mat::new(x, rows.len(), d);
            let tile = &mut logits[..rows.len() * classes.len()];
            linear.logits(tile, x, w, classes.start);
            par::rows(tile, classes.len(), |i, row| {
                let (lse, target) = (lse[rows.start + i], targets[rows.start + i]);
                config.grad_row_in_place(row, lse, target, classes.start, n_classes, scale);
            });
            let g = Mat::new(&*tile, rows.len(), classes.len());
            if let Some(dx) = &mut dx {
                gemm(&mut dx.acc()[x_rows], g, w, Store::Add);
            }
            if let Some(dw) = &mut dw {
                gemm(dw.acc(), g.t(), x, Store::Add);
            }
            if let Some(db) = &mut db {
                let mut part = vec![0.0f64; classes.len()];
                sum_cols(&mut part, tile);
                db.iter_mut().zip(part).for_each(|(db, part)| *db += part);
            }
        }
        if let Some(dw) = dw {
            dw.store();
        }
        if let (Some(dst), Some(db)) = (&mut dbias, &db) {
            cast(&mut dst[classes], db);
        }
    }
    if let Some(dx) = dx {
        dx.store();
    }
    Ok(())
}

/// A gradient while it is added up: in place where `T` is its own accumulator, else beside it.
struct GradSum<'a, T: Element> {
    dst: &'a mut [T],
    wide: Vec<T::Acc>,
}

impl<'a, T: Element> GradSum<'a, T> {
    /// Zero.
    fn new(dst: &'a mut [T]) -> Self {
        dst.fill(T::default());
        let n_wide = if is_own_acc::<T>() { 0 } else { dst.len() };
        Self {
            dst,
            wide: vec![T::Acc::of(0.0); n_wide],
        }
    }

    fn acc(&mut self) -> &mut [T::Acc] {
        T::as_acc_mut(self.dst).unwrap_or(&mut self.wide)
    }

    fn store(self) {
        if !is_own_acc::<T>() {
            cast(self.dst, &self.wide);
        }
    }
}

/// Bytes that [`linear_cross_entropy`] borrows: one tile of logits, the softmax state of each row,
/// and where `T` is narrower than its accumulator a tile of `x` and one of `weight`, widened.
pub fn linear_cross_entropy_scratch_bytes<T: Element>(
    n_rows: u64,
    n_features: u64,
    n_classes: u64,
    chunk_bytes: u64,
) -> u64 {
    let tiles = Tiles::new::<T::Acc>(n_rows as usize, n_classes as usize, chunk_bytes);
    tiles.bytes::<T>(n_features) + n_rows * size_of::<Online>() as u64
}

/// Bytes that [`linear_cross_entropy_backward`] borrows when all three gradients are asked for:
/// one tile of logits, the bias gradient's partial sums, and where `T` is narrower than its
/// accumulator a tile of `x`, of `weight` and of `dweight`, and `dx` `[N, D]`, widened.
pub fn linear_cross_entropy_backward_scratch_bytes<T: Element>(
    n_rows: u64,
    n_features: u64,
    n_classes: u64,
    chunk_bytes: u64,
) -> u64 {
    let tiles = Tiles::new::<T::Acc>(n_rows as usize, n_classes as usize, chunk_bytes);
    let (tile_rows, tile_classes) = (tiles.tile_rows as u64, tiles.tile_classes as u64);
    let sums = 2 * tile_classes * size_of::<f64>() as u64;
    let sums = sums + sum_cols_scratch_bytes(tile_rows, tile_classes);
    let grads = if is_own_acc::<T>() {
        0
    } else {
        (n_rows + tile_classes) * n_features
    };
    tiles.bytes::<T>(n_features) + sums + grads * size_of::<T::Acc>() as u64
}

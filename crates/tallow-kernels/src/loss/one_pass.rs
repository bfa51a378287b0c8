//! The loss of a linear layer and its gradients in one pass over the logits.
//!
//! A block of rows at a time, with all its classes: the exponentials of its logits are kept until its
//! log-sum-exps are known, and become the gradients of the logits in place. Nothing is computed twice,
//! where [`linear_cross_entropy_backward`](super::linear_cross_entropy_backward) makes all logits
//! again; the gradients are there before anything asks for them (Hsu et al. 2024, Liger Kernel).
// N rows · V classes · D features

use super::{
    CrossEntropy, LossError, Online, Sums,
    linear::{Linear, TILE_CLASSES, add_col_sums, assert_len, cuts},
};
use crate::{
    Element, Real,
    cast::{is_own_acc, operand, widen_into},
    gemm::{Mat, Store, gemm_acc, gemm_acc_scratch_bytes},
    isa::vectorized,
    pack::packs_narrow,
    par,
    reduce::sum_cols_scratch_bytes,
};
use rayon::prelude::*;

/// The bytes that a block of rows may take: enough of them that reading the weight and adding to its
/// gradient once for each block costs little beside the products.
pub const ONE_PASS_CHUNK_BYTES: u64 = 64 << 20;
/// Fewest rows of a block that are worth reading the weight and its gradient once more.
const MIN_ROWS: usize = 128;

/// Where the gradients go, each where asked for: in the accumulator type, not yet scaled.
#[derive(Debug)]
pub struct LinearGrads<'a, R> {
    /// Of the inputs, `[N, D]`.
    pub x: Option<&'a mut [R]>,
    /// Of the weight, `[V, D]`.
    pub weight: Option<&'a mut [R]>,
    /// Of the bias, `[V]`.
    pub bias: Option<&'a mut [R]>,
}

/// Rows of a block of at most `chunk_bytes`, but of at least one row; blocks are alike.
fn rows_of_block<O: Element>(n_rows: usize, n_classes: usize, chunk_bytes: u64) -> usize {
    let of_row = n_classes * size_of::<O>() + n_classes.min(TILE_CLASSES) * size_of::<O::Acc>();
    let most = (chunk_bytes / of_row.max(1) as u64).clamp(1, n_rows.max(1) as u64) as usize;
    n_rows.div_ceil(n_rows.div_ceil(most).max(1)).max(1)
}

/// Whether [`linear_cross_entropy_with_grads`] in `chunk_bytes` costs less time than loss and
/// gradients one after the other.
pub fn one_pass_pays<T: Element>(n_rows: usize, n_classes: usize, chunk_bytes: u64) -> bool {
    let n_block = if packs_narrow::<T>() {
        rows_of_block::<T>(n_rows, n_classes, chunk_bytes)
    } else {
        rows_of_block::<T::Acc>(n_rows, n_classes, chunk_bytes)
    };
    n_block >= n_rows.min(MIN_ROWS)
}

/// [`linear_cross_entropy`](super::linear_cross_entropy) and its gradients for the upstream gradient 1:
/// those of [`linear_cross_entropy_backward`](super::linear_cross_entropy_backward) with `scale` 1,
/// but in the accumulator type, so that [`scale_into`] rounds them once when the upstream gradient is known.
///
/// `targets` `[N]` → `lse` `[N]`, to the same bits as without the gradients.
///
/// *Scratch:* [`linear_cross_entropy_with_grads_scratch_bytes`]: a block of rows with all classes, of at
/// most `chunk_bytes` (or a single row).
/// # Errors
/// As [`cross_entropy`](super::cross_entropy).
/// # Panics
/// If a length does not match.
pub fn linear_cross_entropy_with_grads<T: Element>(
    lse: &mut [f64],
    grads: LinearGrads<T::Acc>,
    linear: &Linear<T>,
    targets: &[i64],
    config: &CrossEntropy,
    chunk_bytes: u64,
) -> Result<Sums, LossError> {
    let run = if packs_narrow::<T>() { run::<T, T> } else { run::<T, T::Acc> };
    run(lse, grads, linear, targets, config, chunk_bytes)
}

fn run<T: Element, O: Element<Acc = T::Acc>>(
    lse: &mut [f64],
    mut grads: LinearGrads<T::Acc>,
    linear: &Linear<T>,
    targets: &[i64],
    config: &CrossEntropy,
    chunk_bytes: u64,
) -> Result<Sums, LossError> {
    let what = "linear_cross_entropy_with_grads";
    let (n_rows, d, n_classes) = (targets.len(), linear.n_features, linear.n_classes);
    linear.assert_lens(what, n_rows);
    assert_len(what, "lse", Some(&*lse), n_rows);
    assert_len(what, "dx", grads.x.as_deref(), linear.x.len());
    assert_len(what, "dweight", grads.weight.as_deref(), linear.weight.len());
    assert_len(what, "dbias", grads.bias.as_deref(), n_classes);
    config.check(targets, n_classes)?;

    let n_block = rows_of_block::<O>(n_rows, n_classes, chunk_bytes);
    let mut logits = vec![T::Acc::of(0.0); n_block * n_classes.min(TILE_CLASSES)];
    let mut exps = vec![O::default(); n_block * n_classes];
    // What each row's exponentials of a range of classes are relative to.
    let n_cuts = n_classes.div_ceil(TILE_CLASSES);
    let mut shifts = vec![0.0f64; n_block * n_cuts];
    let mut online = vec![Online::EMPTY; n_rows];
    let mut db = grads.bias.as_ref().map(|_| vec![0.0f64; n_classes]);
    let (mut x_copy, mut w_copy) = (Vec::<O>::new(), Vec::<O>::new());
    for part in [&mut grads.x, &mut grads.weight].into_iter().flatten() {
        part.fill(T::Acc::of(0.0));
    }
    let mut sums = Sums { loss_sum: 0.0, n_counted: 0 };
    for rows in cuts(n_rows, n_block) {
        let x_rows = rows.start * d..rows.end * d;
        let x = operand(&linear.x[x_rows.clone()], &mut x_copy);
        let x = Mat::new(x, rows.len(), d);
        let (targets, online) = (&targets[rows.clone()], &mut online[rows.clone()]);
        for (cut, classes) in cuts(n_classes, TILE_CLASSES).enumerate() {
            let w = operand(&linear.weight[classes.start * d..classes.end * d], &mut w_copy);
            let tile = &mut logits[..rows.len() * classes.len()];
            linear.logits(tile, x, Mat::new(w, classes.len(), d), classes.start);
            let exps = &mut exps[rows.len() * classes.start..][..tile.len()];
            let shifts = &mut shifts[rows.len() * cut..][..rows.len()];
            let block = Rows { targets, first: classes.start, n_classes, config };
            block.absorb(online, shifts, tile, exps);
        }
        sums = config.sums(&mut lse[rows.clone()], targets, online, n_classes, sums);
        for (cut, classes) in cuts(n_classes, TILE_CLASSES).enumerate() {
            let weights = classes.start * d..classes.end * d;
            let g = &mut exps[rows.len() * classes.start..][..rows.len() * classes.len()];
            let shifts = &shifts[rows.len() * cut..][..rows.len()];
            let block = Rows { targets, first: classes.start, n_classes, config };
            block.grads_in_place(g, shifts, &lse[rows.clone()], online);
            if let Some(db) = &mut db {
                let wide = &mut logits[..g.len()];
                widen_into(wide, g);
                add_col_sums(&mut db[classes.clone()], wide);
            }
            let g = Mat::new(&*g, rows.len(), classes.len());
            if let Some(dx) = &mut grads.x {
                let w = operand(&linear.weight[weights.clone()], &mut w_copy);
                let w = Mat::new(w, classes.len(), d);
                gemm_acc(&mut dx[x_rows.clone()], g, w, Store::Add);
            }
            if let Some(dw) = &mut grads.weight {
                gemm_acc(&mut dw[weights], g.t(), x, Store::Add);
            }
        }
    }
    if let (Some(dst), Some(db)) = (grads.bias, db) {
        dst.iter_mut().zip(db).for_each(|(dst, sum)| *dst = T::Acc::of(sum));
    }
    Ok(sums)
}

/// Rows of a block, at the classes from `first`.
struct Rows<'a> {
    targets: &'a [i64],
    first: usize,
    n_classes: usize,
    config: &'a CrossEntropy,
}

impl Rows<'_> {
    /// Adds the logits of these classes to each row's state, and turns them into exponentials relative
    /// to the largest logit so far, which `shifts` keeps.
    fn absorb<O: Element>(
        &self,
        online: &mut [Online],
        shifts: &mut [f64],
        logits: &mut [O::Acc],
        exps: &mut [O],
    ) {
        let n_cols = logits.len() / self.targets.len();
        let smooth = self.config.label_smoothing > 0.0;
        let states = online.par_iter_mut().zip(shifts).zip(self.targets);
        let values = logits.par_chunks_mut(n_cols).zip(exps.par_chunks_mut(n_cols));
        states.zip(values).for_each(|(((online, shift), &target), (logits, exps))| {
            let class = self.config.class(target, self.n_classes);
            vectorized(
                #[inline(always)]
                || {
                    *shift = online.absorb_in_place(logits, self.first, class, smooth);
                    for (exp, x) in exps.iter_mut().zip(&*logits) {
                        *exp = O::narrow(*x);
                    }
                },
            );
        });
    }

    /// Turns the exponentials of these classes into gradients of their logits.
    fn grads_in_place<O: Element>(
        &self,
        exps: &mut [O],
        shifts: &[f64],
        lse: &[f64],
        online: &[Online],
    ) {
        let Self { targets, first, n_classes, config } = *self;
        let n_cols = exps.len() / targets.len();
        par::rows(
            exps,
            n_cols,
            #[inline(always)]
            |i, row| {
                let Some(class) = config.class(targets[i], n_classes) else {
                    return row.fill(O::default());
                };
                let factor = O::Acc::of((shifts[i] - lse[i]).exp());
                let elsewhere = O::Acc::of(config.wanted(false, n_classes));
                for exp in row.iter_mut() {
                    *exp = O::narrow(exp.widen() * factor - elsewhere);
                }
                if let Some(at) = class.checked_sub(first).and_then(|j| row.get_mut(j)) {
                    let logit = O::Acc::of(online[i].at_target);
                    *at = O::narrow(config.logit_grad(logit, lse[i], true, n_classes, 1.0));
                }
            },
        );
    }
}

/// `dst[i] = scale src[i]`, rounded once: gradients of
/// [`linear_cross_entropy_with_grads`] for the upstream gradient `scale`. In place it is [`crate::accum::scale`].
/// # Panics
/// If the lengths differ.
pub fn scale_into<T: Element>(dst: &mut [T], src: &[T::Acc], scale: f64) {
    assert_eq!(dst.len(), src.len(), "scale_into: dst and src differ in length");
    par::elems(
        dst,
        #[inline(always)]
        |start, cut| {
            let scale = T::Acc::of(scale);
            for (dst, &src) in cut.iter_mut().zip(&src[start..]) {
                *dst = T::narrow(src * scale);
            }
        },
    );
}

/// Bytes that [`linear_cross_entropy_with_grads`] borrows when all three gradients are asked for: a block
/// of rows with the exponentials of all classes and the logits of some, what a product packs on one thread,
/// the softmax state of each row, the bias gradient's sums, and where products are of wider operands a
/// tile of `x` and one of `weight`, widened.
pub fn linear_cross_entropy_with_grads_scratch_bytes<T: Element>(
    n_rows: u64,
    n_features: u64,
    n_classes: u64,
    chunk_bytes: u64,
) -> u64 {
    let price = if packs_narrow::<T>() { scratch_bytes::<T> } else { scratch_bytes::<T::Acc> };
    let (block_rows, block) = price(n_rows as usize, n_classes as usize, chunk_bytes);
    let tile_classes = n_classes.min(TILE_CLASSES as u64);
    let copied = !is_own_acc::<T>() && !packs_narrow::<T>();
    let copies = if copied { (block_rows + tile_classes) * n_features } else { 0 };
    let sums = (n_classes + tile_classes) * size_of::<f64>() as u64
        + sum_cols_scratch_bytes(block_rows, tile_classes);
    let packed = [
        (block_rows, tile_classes, n_features),
        (block_rows, n_features, tile_classes),
        (tile_classes, n_features, block_rows),
    ];
    let packed = packed.map(|(m, n, k)| gemm_acc_scratch_bytes::<T>(m, n, k)).into_iter().max();
    let states = n_rows * size_of::<Online>() as u64;
    block + copies * size_of::<T::Acc>() as u64 + states + sums + packed.unwrap_or(0)
}

/// Rows of a block, and the bytes of its exponentials, logits and shifts.
fn scratch_bytes<O: Element>(n_rows: usize, n_classes: usize, chunk_bytes: u64) -> (u64, u64) {
    let n_block = rows_of_block::<O>(n_rows, n_classes, chunk_bytes);
    let of_row = n_classes * size_of::<O>()
        + n_classes.min(TILE_CLASSES) * size_of::<O::Acc>()
        + n_classes.div_ceil(TILE_CLASSES) * size_of::<f64>();
    (n_block as u64, (n_block * of_row) as u64)
}

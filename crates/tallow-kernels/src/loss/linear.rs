//! Cross-entropy fused with the linear layer that makes its logits.
//!
//! The logits `[N, V]` are never held: they are made in tiles of rows and classes, the tiles merged
//! by online softmax (Milakov and Gimelshein 2018), and made again in backward. Logits stay in the
//! accumulator type and are never rounded to `bf16`; their gradients are, where the processor
//! multiplies `bf16` itself.
// N rows · V classes · D features

use std::ops::Range;

use super::{CrossEntropy, LossError, Online, Sums, absorb_rows};
use crate::{
    Element, Real,
    cast::{cast, is_own_acc, narrow_into, operand},
    element::as_type,
    gemm::{Mat, Store, gemm_acc, gemm_acc_scratch_bytes},
    pack::packs_narrow,
    par,
    reduce::{sum_cols, sum_cols_scratch_bytes},
};

/// The bytes of logits that the fused form holds unless told otherwise.
pub const DEFAULT_CHUNK_BYTES: u64 = 8 << 20;
/// Classes of one tile of logits where the limit leaves room: wide enough that a product is
/// bound by arithmetic, few enough that a widened tile of the weight stays small.
pub(super) const TILE_CLASSES: usize = 4096;

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
        Self { n_rows, n_classes, tile_rows, tile_classes }
    }

    fn rows(self) -> impl Iterator<Item = Range<usize>> {
        cuts(self.n_rows, self.tile_rows)
    }

    /// Bytes of a tile of logits and of the widened operands that made it.
    fn bytes<T: Element>(self, n_features: u64) -> u64 {
        let (tile_rows, tile_classes) = (self.tile_rows as u64, self.tile_classes as u64);
        let (n_logits, acc) = (tile_rows * tile_classes, size_of::<T::Acc>() as u64);
        let copied = !is_own_acc::<T>() && !packs_narrow::<T>();
        let copies = if copied { (tile_rows + tile_classes) * n_features } else { 0 };
        (n_logits + copies) * acc
    }

    fn classes(self) -> impl Iterator<Item = Range<usize>> {
        cuts(self.n_classes, self.tile_classes)
    }
}

/// `0..n` in ranges of `step`.
pub(super) fn cuts(n: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(step).map(move |start| start..n.min(start + step))
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
    pub(super) fn assert_lens(&self, what: &str, n_rows: usize) {
        let (d, v) = (self.n_features, self.n_classes);
        assert_len(what, "x", Some(self.x), n_rows * d);
        assert_len(what, "weight", Some(self.weight), v * d);
        assert_len(what, "bias", self.bias, v);
    }

    /// The logits of a tile, from its rows of `x` and of the weight.
    pub(super) fn logits<O>(&self, tile: &mut [T::Acc], x: Mat<O>, w: Mat<O>, first_class: usize)
    where
        O: Element<Acc = T::Acc>,
    {
        gemm_acc(tile, x, w.t(), Store::Overwrite);
        if let Some(bias) = self.bias {
            let bias = &bias[first_class..][..w.n_rows];
            par::rows(
                tile,
                w.n_rows,
                #[inline(always)]
                |_, row| {
                    for (s, b) in row.iter_mut().zip(bias) {
                        *s += b.widen();
                    }
                },
            );
        }
    }
}

/// [`cross_entropy`](super::cross_entropy) of the logits of a linear layer, which are never held but for one tile of at
/// most `chunk_bytes` (or a single logit).
///
/// `targets` `[N]` → `lse` `[N]`.
///
/// *Scratch:* [`linear_cross_entropy_scratch_bytes`].
/// # Errors
/// As [`cross_entropy`](super::cross_entropy).
/// # Panics
/// If a length does not match.
pub fn linear_cross_entropy<T: Element>(
    lse: &mut [f64],
    linear: &Linear<T>,
    targets: &[i64],
    config: &CrossEntropy,
    chunk_bytes: u64,
) -> Result<Sums, LossError> {
    let run = if packs_narrow::<T>() { forward::<T, T> } else { forward::<T, T::Acc> };
    run(lse, linear, targets, config, chunk_bytes)
}

fn forward<T: Element, O: Element<Acc = T::Acc>>(
    lse: &mut [f64],
    linear: &Linear<T>,
    targets: &[i64],
    config: &CrossEntropy,
    chunk_bytes: u64,
) -> Result<Sums, LossError> {
    let (d, n_classes) = (linear.n_features, linear.n_classes);
    linear.assert_lens("linear_cross_entropy", targets.len());
    assert_len("linear_cross_entropy", "lse", Some(&*lse), targets.len());
    config.check(targets, n_classes)?;
    let tiles = Tiles::new::<T::Acc>(targets.len(), n_classes, chunk_bytes);
    let mut logits = vec![T::Acc::of(0.0); tiles.tile_rows * tiles.tile_classes];
    let (mut x_copy, mut w_copy) = (Vec::<O>::new(), Vec::<O>::new());
    let mut online = vec![Online::EMPTY; targets.len()];
    for classes in tiles.classes() {
        let w = &linear.weight[classes.start * d..classes.end * d];
        let w = Mat::new(operand(w, &mut w_copy), classes.len(), d);
        for rows in tiles.rows() {
            let x = &linear.x[rows.start * d..rows.end * d];
            let x = Mat::new(operand(x, &mut x_copy), rows.len(), d);
            let tile = &mut logits[..rows.len() * classes.len()];
            linear.logits(tile, x, w, classes.start);
            let (online, targets) = (&mut online[rows.clone()], &targets[rows]);
            absorb_rows(online, tile, targets, classes.start, classes.len(), n_classes, config);
        }
    }
    Ok(config.sums(lse, targets, &online, n_classes, Sums::NONE))
}

/// Gradients of [`linear_cross_entropy`] times `scale`, each where asked for, from the inputs and
/// `lse`: the logits are made again tile by tile, and with `g` the gradient of the logits as in
/// [`cross_entropy_backward`](super::cross_entropy_backward), `dx = g weight`, `dweight = g^T x`, `dbias = sum of g`.
///
/// Gradients are added up in the accumulator type over all tiles and rounded once.
///
/// *Kept:* `x`, `weight` and `lse`. *Scratch:* [`linear_cross_entropy_backward_scratch_bytes`]; no
/// `[V, D]`, for the tiles of one range of classes come one after the other.
/// # Errors
/// As [`cross_entropy`](super::cross_entropy).
/// # Panics
/// If a length does not match.
pub fn linear_cross_entropy_backward<T: Element>(
    dx: Option<&mut [T]>,
    dweight: Option<&mut [T]>,
    dbias: Option<&mut [T]>,
    linear: &Linear<T>,
    lse: &[f64],
    targets: &[i64],
    config: &CrossEntropy,
    scale: f64,
    chunk_bytes: u64,
) -> Result<(), LossError> {
    let run = if packs_narrow::<T>() { backward::<T, T> } else { backward::<T, T::Acc> };
    run(dx, dweight, dbias, linear, lse, targets, config, scale, chunk_bytes)
}

fn backward<T: Element, O: Element<Acc = T::Acc>>(
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
    let (d, n_classes) = (linear.n_features, linear.n_classes);
    linear.assert_lens(what, targets.len());
    assert_len(what, "lse", Some(lse), targets.len());
    assert_len(what, "dx", dx.as_deref(), linear.x.len());
    assert_len(what, "dweight", dweight.as_deref(), linear.weight.len());
    assert_len(what, "dbias", dbias.as_deref(), n_classes);
    config.check(targets, n_classes)?;

    let tiles = Tiles::new::<T::Acc>(targets.len(), n_classes, chunk_bytes);
    let mut logits = vec![T::Acc::of(0.0); tiles.tile_rows * tiles.tile_classes];
    let [mut x_copy, mut w_copy, mut g_copy] = [const { Vec::<O>::new() }; 3];
    let mut dx = dx.map(GradSum::new);
    for classes in tiles.classes() {
        let weights = classes.start * d..classes.end * d;
        let w = operand(&linear.weight[weights.clone()], &mut w_copy);
        let w = Mat::new(w, classes.len(), d);
        let mut dw = dweight.as_deref_mut().map(|dw| GradSum::new(&mut dw[weights]));
        let mut db = dbias.as_ref().map(|_| vec![0.0f64; classes.len()]);
        for rows in tiles.rows() {
            let x_rows = rows.start * d..rows.end * d;
            let x = operand(&linear.x[x_rows.clone()], &mut x_copy);
            let x = Mat::new(x, rows.len(), d);
            let tile = &mut logits[..rows.len() * classes.len()];
            linear.logits(tile, x, w, classes.start);
            par::rows(
                tile,
                classes.len(),
                #[inline(always)]
                |i, row| {
                    let (lse, target) = (lse[rows.start + i], targets[rows.start + i]);
                    config.grad_row_in_place(row, lse, target, classes.start, n_classes, scale);
                },
            );
            let g = Mat::new(rounded(tile, &mut g_copy), rows.len(), classes.len());
            if let Some(dx) = &mut dx {
                gemm_acc(&mut dx.acc()[x_rows], g, w, Store::Add);
            }
            if let Some(dw) = &mut dw {
                gemm_acc(dw.acc(), g.t(), x, Store::Add);
            }
            if let Some(db) = &mut db {
                add_col_sums(db, tile);
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

/// `g` as operands `O` of a product: itself, or rounded into `scratch`.
fn rounded<'a, O: Element>(g: &'a [O::Acc], scratch: &'a mut Vec<O>) -> &'a [O] {
    if let Some(same) = as_type::<O::Acc, O>(g) {
        return same;
    }
    scratch.resize(g.len(), O::default());
    par::elems(
        scratch,
        #[inline(always)]
        |start, cut| narrow_into(cut, &g[start..][..cut.len()]),
    );
    scratch
}

/// `sums[j] += sum over i of x[i, j]`.
pub(super) fn add_col_sums<R: Real>(sums: &mut [f64], x: &[R]) {
    let mut part = vec![0.0f64; sums.len()];
    sum_cols(&mut part, x);
    sums.iter_mut().zip(part).for_each(|(s, p)| *s += p);
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
        Self { dst, wide: vec![T::Acc::of(0.0); n_wide] }
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

/// # Panics
/// If the slice is there and is not `n_elems` long.
pub(super) fn assert_len<T>(what: &str, name: &str, slice: Option<&[T]>, n_elems: usize) {
    if let Some(slice) = slice {
        assert_eq!(slice.len(), n_elems, "{what}: length of {name}");
    }
}

/// Bytes that [`linear_cross_entropy`] borrows on one thread: one tile of logits, what a product packs, the softmax state of each row,
/// and where `T` is narrower than its accumulator a tile of `x` and one of `weight`, widened.
pub fn linear_cross_entropy_scratch_bytes<T: Element>(
    n_rows: u64,
    n_features: u64,
    n_classes: u64,
    chunk_bytes: u64,
) -> u64 {
    let tiles = Tiles::new::<T::Acc>(n_rows as usize, n_classes as usize, chunk_bytes);
    let logits =
        gemm_acc_scratch_bytes::<T>(tiles.tile_rows as u64, tiles.tile_classes as u64, n_features);
    tiles.bytes::<T>(n_features) + n_rows * size_of::<Online>() as u64 + logits
}

/// Bytes that [`linear_cross_entropy_backward`] borrows when all three gradients are asked for:
/// one tile of logits, what a product packs on one thread, the bias gradient's partial sums, and where `T` is narrower than its
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
    let grads = if is_own_acc::<T>() { 0 } else { (n_rows + tile_classes) * n_features };
    let products = [
        (tile_rows, tile_classes, n_features),
        (tile_rows, n_features, tile_classes),
        (tile_classes, n_features, tile_rows),
    ];
    let packed = products.map(|(m, n, k)| gemm_acc_scratch_bytes::<T>(m, n, k)).into_iter().max();
    let packed = packed.unwrap_or(0);
    // The gradient of a tile of logits, rounded.
    let rounded = if packs_narrow::<T>() { tile_rows * tile_classes } else { 0 };
    let rounded = rounded * size_of::<T>() as u64;
    tiles.bytes::<T>(n_features) + rounded + sums + grads * size_of::<T::Acc>() as u64 + packed
}

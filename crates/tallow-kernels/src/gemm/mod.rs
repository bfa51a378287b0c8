//! Matrix products.
//!
//! Operands of `f16`, and of `bf16` where the processor has no instructions for it, are widened while
//! they are packed: products are those of `f32` rounded once. With such instructions (from
//! [`Isa::Avx512Bf16`] on) `bf16` stays packed and is added up in `f32`
//! too. [`gemm_scalar`] is the specification of all of them.
//!
//! The destination is cut into tiles by shape alone; each is computed by one thread in one order.

use crate::{
    cast::narrow_rows,
    element::{Element, Real},
    isa::Isa,
    micro::{NR, Packed},
    pack::{Lanes, Packs, packs_narrow},
    par::Disjoint,
    product::{self, Left, Right, Sink, Whole, whole_elems},
};
use rayon::prelude::*;
use std::ops::Range;

mod fused;

pub use fused::{Activation, Epilogue, gemm_fused, gemm_fused_scalar};

/// Most rows and columns of a destination tile.
const MOST: (usize, usize) = (768, 768);
/// Tiles that a destination is cut into where it is large enough: enough to share out.
const MIN_TILES: usize = 12;
/// And of each part of it whose rows are packed for all tiles.
const MIN_SHARED_TILES: usize = 4;
/// Fewest sums worth a tile of their own.
const MIN_TILE_ELEMS: usize = 96 * 96;
/// Elements of the rows of a left operand that are packed once for all tiles.
const WHOLE_ELEMS: usize = 2 << 20;
/// Fewest rows that are packed for all tiles where there are more: each time the right operand is
/// packed again.
const MIN_SHARED: usize = 1024;
/// Fewest columns of a tile of such rows: each of them reads all rows again.
const MIN_COLS: usize = 96;
/// Multiply-adds below which waking a second thread costs more than it saves.
const SERIAL_MACS: usize = 1 << 18;

/// A strided matrix view: element `(i, j)` is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a, T> {
    /// The elements, from the view's first.
    pub data: &'a [T],
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Elements between one row and the next.
    pub row_stride: usize,
    /// Elements between one column and the next.
    pub col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// A dense row-major matrix.
    pub fn new(data: &'a [T], n_rows: usize, n_cols: usize) -> Self {
        Self { data, n_rows, n_cols, row_stride: n_cols, col_stride: 1 }
    }

    /// The same elements, transposed.
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            n_rows: self.n_cols,
            n_cols: self.n_rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// # Panics
    /// If an element of the view lies outside its data.
    fn assert_inside(&self, name: &str) {
        if self.n_rows > 0 && self.n_cols > 0 {
            let last = extent(self.n_rows, self.row_stride)
                .zip(extent(self.n_cols, self.col_stride))
                .and_then(|(rows, cols)| rows.checked_add(cols));
            assert!(
                last.is_some_and(|last| last < self.data.len()),
                "gemm: {name} is {} x {} with strides {}, {} but has {} elements",
                self.n_rows,
                self.n_cols,
                self.row_stride,
                self.col_stride,
                self.data.len()
            );
        }
    }
}

/// Distance from the first to the last of `n` places that are `stride` apart; `None` beyond what a
/// pointer may move.
fn extent(n: usize, stride: usize) -> Option<usize> {
    (n - 1).checked_mul(stride).filter(|&d| d <= isize::MAX as usize)
}

/// What a product does with what its destination held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Forgets it (NaN included).
    Overwrite,
    /// Adds to it.
    Add,
}

/// `dst[i] = src[i]` in the accumulator type.
/// # Panics
/// If the lengths differ.
pub fn widen_into<T: Element>(src: &[T], dst: &mut [T::Acc]) {
    crate::cast::widen_into(dst, src);
}

/// Bytes one thread holds while it multiplies `m x k` by `k x n`: its packed operands and, for
/// elements narrower than their accumulator, the sums of a tile.
pub fn gemm_scratch_bytes<T: Element>(m: u64, n: u64, k: u64) -> u64 {
    scratch_bytes::<T>(m, n, k, T::as_acc(&[]).is_none())
}

/// As [`gemm_scratch_bytes`], of [`gemm_acc`].
pub fn gemm_acc_scratch_bytes<T: Element>(m: u64, n: u64, k: u64) -> u64 {
    scratch_bytes::<T>(m, n, k, false)
}

fn scratch_bytes<T: Element>(m: u64, n: u64, k: u64, keeps_sums: bool) -> u64 {
    let (sizes, k) = ((m as usize, n as usize), k as usize);
    let bytes = if packs_narrow::<T>() {
        tile_bytes::<T::Narrow>(sizes, k, keeps_sums)
    } else {
        tile_bytes::<T::Acc>(sizes, k, keeps_sums)
    };
    bytes as u64
}

fn tile_bytes<P: Packed>((m, n): (usize, usize), k: usize, keeps_sums: bool) -> usize {
    match shared_rows::<P>((m, n), k) {
        None => {
            let cuts = Cuts::new::<P>((m, n), MOST);
            product::scratch_bytes::<P>(cuts.tile_rows, cuts.tile_cols, k, keeps_sums)
        }
        Some(rows) => {
            let cuts = Cuts::of_shared::<P>((rows, n), m.div_ceil(rows));
            let whole = whole_elems::<P>(rows, k) * size_of::<P>();
            whole + product::right_bytes::<P>(cuts.tile_rows, cuts.tile_cols, k, keeps_sums)
        }
    }
}

/// Rows of the left operand to be packed at a time for all tiles of them; `None` where each tile had
/// better pack its own, for there is one tile across, rows are too long, or all is done on one thread.
fn shared_rows<P: Packed>((m, n): (usize, usize), k: usize) -> Option<usize> {
    let most = WHOLE_ELEMS / k.max(1);
    let large = m * n >= 4 * MIN_TILE_ELEMS && (m * n).saturating_mul(k) >= SERIAL_MACS;
    let pays = large && n >= 2 * MIN_COLS && most >= m.min(MIN_SHARED);
    pays.then(|| m.div_ceil(m.div_ceil(most)).next_multiple_of(2 * P::MR).min(m))
}

/// How a destination is cut into tiles: by its shape alone.
pub(crate) struct Cuts {
    pub(crate) tile_rows: usize,
    pub(crate) tile_cols: usize,
    per_row: usize,
    pub(crate) n_tiles: usize,
}

impl Cuts {
    /// Of an `m x n` destination, into tiles of at most `most` (rows, columns).
    pub(crate) fn new<P: Packed>((m, n): (usize, usize), most: (usize, usize)) -> Self {
        let (mut down, mut across) = (m.div_ceil(most.0).max(1), n.div_ceil(most.1).max(1));
        while down * across < MIN_TILES && m * n > down * across * MIN_TILE_ELEMS * 2 {
            if m / down > n / across { down += 1 } else { across += 1 }
        }
        Self::of::<P>((m, n), (down, across))
    }

    /// Of `m x n` sums whose left operand is packed for all tiles, one of `n_times` such: across before down,
    /// for each tile packs its columns of the right operand.
    pub(crate) fn of_shared<P: Packed>((m, n): (usize, usize), n_times: usize) -> Self {
        let enough = MIN_TILES.div_ceil(n_times).max(MIN_SHARED_TILES);
        let fewest = n.div_ceil(MOST.1).max(1);
        let across = (n / MIN_COLS).clamp(fewest, enough.max(fewest));
        let most_down = (m * n / (across * 2 * MIN_TILE_ELEMS)).max(1);
        Self::of::<P>((m, n), (enough.div_ceil(across).min(most_down), across))
    }

    fn of<P: Packed>((m, n): (usize, usize), (down, across): (usize, usize)) -> Self {
        let tile_rows = m.div_ceil(down).next_multiple_of(2 * P::MR).min(m.max(1));
        let tile_cols = n.div_ceil(across).next_multiple_of(2 * NR).min(n.max(1));
        let (down, per_row) = (m.div_ceil(tile_rows), n.div_ceil(tile_cols));
        Self { tile_rows, tile_cols, per_row, n_tiles: down * per_row }
    }

    /// Rows and columns of tile `t`.
    pub(crate) fn tile(&self, t: usize, m: usize, n: usize) -> (Range<usize>, Range<usize>) {
        let (i, j) = (t / self.per_row * self.tile_rows, t % self.per_row * self.tile_cols);
        (i..m.min(i + self.tile_rows), j..n.min(j + self.tile_cols))
    }
}

/// `c = a b`, or `c += a b`: `a` is `m x k`, `b` is `k x n`, `c` dense row-major `m x n`.
///
/// Sums are kept in [`Element::Acc`] and rounded once.
/// # Panics
/// If the sizes do not agree.
pub fn gemm<T: Element>(c: &mut [T], a: Mat<T>, b: Mat<T>, store: Store) {
    batched_gemm(c, 1, |_| a, |_| b, store);
}

/// As [`gemm()`], the sums not rounded.
/// # Panics
/// If the sizes do not agree.
pub fn gemm_acc<T: Element>(c: &mut [T::Acc], a: Mat<T>, b: Mat<T>, store: Store) {
    dispatch(c, 1, |_| a, |_| b, store);
}

/// `n_batch` products, one after the other in `c`; `a(i)` and `b(i)` are the operands of the `i`th.
///
/// All operands of one side have the same size; an operand may stand for several products.
/// # Panics
/// If the sizes do not agree.
pub fn batched_gemm<'a, T: Element>(
    c: &mut [T],
    n_batch: usize,
    a: impl Fn(usize) -> Mat<'a, T> + Sync,
    b: impl Fn(usize) -> Mat<'a, T> + Sync,
    store: Store,
) {
    dispatch(c, n_batch, a, b, store);
}

/// As [`batched_gemm`], packed in the way that suits `T` and the processor.
fn dispatch<'a, T: Element, C: Element<Acc = T::Acc>>(
    c: &mut [C],
    n_batch: usize,
    a: impl Fn(usize) -> Mat<'a, T> + Sync,
    b: impl Fn(usize) -> Mat<'a, T> + Sync,
    store: Store,
) {
    if n_batch == 0 {
        assert!(c.is_empty(), "gemm: no products, but a destination of {}", c.len());
        return;
    }
    let sink = |dst, start, ld| Dense { dst, start, ld, store };
    if packs_narrow::<T>() {
        products::<T, C, T::Narrow, _>(c, n_batch, a, b, sink);
    } else {
        products::<T, C, T::Acc, _>(c, n_batch, a, b, sink);
    }
}

/// `sink(destination, start, row stride)` takes the sums of one product.
fn products<'a, T, C, P, S>(
    c: &mut [C],
    n_batch: usize,
    a: impl Fn(usize) -> Mat<'a, T> + Sync,
    b: impl Fn(usize) -> Mat<'a, T> + Sync,
    sink: impl Fn(Disjoint<C>, usize, usize) -> S + Sync,
) where
    T: Element,
    P: Packs<T>,
    C: Element<Acc = T::Acc>,
    S: Sink<T::Acc> + Sync,
{
    let (m, k, n) = (a(0).n_rows, a(0).n_cols, b(0).n_cols);
    for i in 0..n_batch {
        let (a, b) = (a(i), b(i));
        assert_eq!((a.n_rows, a.n_cols), (m, k), "gemm: left operand {i}");
        assert_eq!((b.n_rows, b.n_cols), (k, n), "gemm: right operand {i}");
        a.assert_inside("left");
        b.assert_inside("right");
    }
    let n_elems = n_batch.checked_mul(m).and_then(|x| x.checked_mul(n));
    assert_eq!(Some(c.len()), n_elems, "gemm: destination of {n_batch} x {m} x {n}");
    if c.is_empty() {
        return;
    }
    let dst = Disjoint::new(c);
    if let (1, Some(n_rows)) = (n_batch, shared_rows::<P>((m, n), k)) {
        let (left, right) = (Rows(Lanes::rows(a(0))), Cols(Lanes::cols(b(0))));
        let sink = sink(dst, 0, n);
        for start in (0..m).step_by(n_rows) {
            let rows = start..m.min(start + n_rows);
            let left = Whole::<P>::of_rows(&left, rows.clone(), k);
            let cuts = Cuts::of_shared::<P>((rows.len(), n), m.div_ceil(n_rows));
            (0..cuts.n_tiles).into_par_iter().for_each(|t| {
                let (at, cols) = cuts.tile(t, rows.len(), n);
                let rows = start + at.start..start + at.end;
                product::tile::<P>(&left, &right, &sink, k, rows.clone(), cols.clone());
                sink.finish(rows, cols);
            });
        }
        return;
    }
    let cuts = Cuts::new::<P>((m, n), MOST);
    let tile = |t: usize| {
        let (batch, (rows, cols)) = (t / cuts.n_tiles, cuts.tile(t % cuts.n_tiles, m, n));
        let (left, right) = (Rows(Lanes::rows(a(batch))), Cols(Lanes::cols(b(batch))));
        let sink = sink(dst, batch * m * n, n);
        product::tile::<P>(&left, &right, &sink, k, rows.clone(), cols.clone());
        sink.finish(rows, cols);
    };
    let n_tiles = n_batch * cuts.n_tiles;
    let macs = (m * n).saturating_mul(k.max(1));
    if macs.saturating_mul(n_batch) < SERIAL_MACS {
        (0..n_tiles).for_each(tile);
    } else {
        // Small products go to a thread several at a time.
        let at_once = (SERIAL_MACS / 4).div_ceil(macs.div_ceil(cuts.n_tiles));
        (0..n_tiles).into_par_iter().with_min_len(at_once).for_each(tile);
    }
}

/// A left operand that is a matrix.
pub(crate) struct Rows<'a, T>(pub(crate) Lanes<'a, T>);

impl<T: Element, P: Packs<T>> Left<P> for Rows<'_, T> {
    fn pack(&self, isa: Isa, dst: &mut [P], rows: Range<usize>, depth: Range<usize>) {
        P::left(&self.0, isa, dst, rows, depth);
    }
}

/// A right operand that is a matrix.
struct Cols<'a, T>(Lanes<'a, T>);

impl<T: Element, P: Packs<T>> Right<P> for Cols<'_, T> {
    fn pack(&self, isa: Isa, dst: &mut [P], cols: Range<usize>, depth: Range<usize>) {
        P::right(&self.0, isa, dst, cols, depth);
    }
}

/// A dense destination of several tiles, its rows `ld` apart from `start` on.
pub(crate) struct Dense<T> {
    pub(crate) dst: Disjoint<T>,
    pub(crate) start: usize,
    pub(crate) ld: usize,
    pub(crate) store: Store,
}

impl<T: Element> Sink<T::Acc> for Dense<T> {
    fn place(
        &self,
        (i, j): (usize, usize),
        (n_rows, n_cols): (usize, usize),
    ) -> Option<(*mut T::Acc, usize)> {
        // Where `T` is its own accumulator the cast changes nothing.
        T::as_acc(&[])?;
        let n = (n_rows - 1) * self.ld + n_cols;
        Some((self.dst.ptr(self.start + i * self.ld + j, n).cast(), self.ld))
    }
    fn adds(&self) -> bool {
        self.store == Store::Add
    }
    fn takes_parts(&self) -> bool {
        T::as_acc(&[]).is_some()
    }
    fn put(
        &self,
        (i, j): (usize, usize),
        (n_rows, n_cols): (usize, usize),
        (sums, ld): (&[T::Acc], usize),
        part: usize,
    ) {
        let n = (n_rows - 1) * self.ld + n_cols;
        let dst = self.dst.ptr(self.start + i * self.ld + j, n);
        let add = part > 0 || self.store == Store::Add;
        // SAFETY: in bounds by `ptr`'s check; these sums belong to one tile, which one call computes.
        unsafe { narrow_rows((dst, self.ld), (sums, ld), (n_rows, n_cols), add) };
    }
}

/// `c = a b` or `c += a b` on the caller's thread, the sums not rounded; rows of `c` are
/// `c_row_stride` apart.
/// # Panics
/// If the sizes do not agree or `c` is too short.
pub fn gemm_serial<T: Element>(
    c: &mut [T::Acc],
    c_row_stride: usize,
    a: Mat<T>,
    b: Mat<T>,
    store: Store,
) {
    if packs_narrow::<T>() {
        serial::<T, T::Narrow>(c, c_row_stride, a, b, store);
    } else {
        serial::<T, T::Acc>(c, c_row_stride, a, b, store);
    }
}

/// Bytes that [`gemm_serial`] holds while it multiplies `m x k` by `k x n`.
pub fn gemm_serial_scratch_bytes<T: Element>(m: u64, n: u64, k: u64) -> u64 {
    let (m, n, k) = (m as usize, MOST.1.min(n as usize), k as usize);
    let bytes = if packs_narrow::<T>() {
        product::scratch_bytes::<T::Narrow>(m, n, k, false)
    } else {
        product::scratch_bytes::<T::Acc>(m, n, k, false)
    };
    bytes as u64
}

fn serial<T: Element, P: Packs<T>>(
    c: &mut [T::Acc],
    c_row_stride: usize,
    a: Mat<T>,
    b: Mat<T>,
    store: Store,
) {
    assert_eq!(a.n_cols, b.n_rows, "gemm_serial: inner sizes differ");
    let (m, n) = (a.n_rows, b.n_cols);
    if m == 0 || n == 0 {
        return;
    }
    a.assert_inside("left");
    b.assert_inside("right");
    assert!(c_row_stride >= n, "gemm_serial: rows of {n} are {c_row_stride} apart");
    let end = extent(m, c_row_stride).and_then(|rows| rows.checked_add(n));
    assert!(end.is_some_and(|end| end <= c.len()), "gemm_serial: {m} x {n} in {}", c.len());
    let (left, right) = (Rows(Lanes::rows(a)), Cols(Lanes::cols(b)));
    let sink = Dense { dst: Disjoint::new(c), start: 0, ld: c_row_stride, store };
    for j in (0..n).step_by(MOST.1) {
        product::tile::<P>(&left, &right, &sink, a.n_cols, 0..m, j..n.min(j + MOST.1));
    }
}

/// The specification of [`gemm()`]: one sum per element, in the order of `k`, rounded once.
pub fn gemm_scalar<T: Element>(c: &mut [T], a: Mat<T>, b: Mat<T>, store: Store) {
    for i in 0..a.n_rows {
        for j in 0..b.n_cols {
            let c = &mut c[i * b.n_cols + j];
            let mut sum = if store == Store::Add { c.widen() } else { T::Acc::of(0.0) };
            for p in 0..a.n_cols {
                let (x, y) = (
                    a.data[i * a.row_stride + p * a.col_stride],
                    b.data[p * b.row_stride + j * b.col_stride],
                );
                sum += x.widen() * y.widen();
            }
            *c = T::narrow(sum);
        }
    }
}

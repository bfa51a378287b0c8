//! Matrix products.
//!
//! `f32` and `f64` tiles go to the `gemm` crate, which chooses AVX-512, AVX2, NEON or portable code
//! at run time. `bf16` and `f16` are widened tile by tile, so their products are those of `f32`
//! rounded once. [`gemm_scalar`] is the specification of all of them.
//!
//! The destination is cut into tiles by shape alone; each is computed by one thread in one order.

use crate::{
    cast::narrow_into,
    element::{Element, Real},
    par::Disjoint,
};
use rayon::prelude::*;

/// Rows of a destination tile.
const TILE_ROWS: usize = 256;
/// Columns of a destination tile.
const TILE_COLS: usize = 512;
/// Depth of a widened panel of narrow elements.
const PANEL: usize = 512;
/// Multiply-adds below which waking a second thread costs more than it saves.
const SERIAL_MACS: usize = 1 << 16;

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

    /// The sub-matrix of `n_rows` x `n_cols` whose first element is `(i, j)`.
    fn block(self, i: usize, j: usize, n_rows: usize, n_cols: usize) -> Self {
        let start = (i * self.row_stride + j * self.col_stride).min(self.data.len());
        Self { data: &self.data[start..], n_rows, n_cols, ..self }
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
    assert_eq!(src.len(), dst.len(), "widen_into: lengths differ");
    for (d, s) in dst.iter_mut().zip(src) {
        *d = s.widen();
    }
}

/// Bytes one thread holds while it multiplies elements narrower than their accumulator; none else.
pub fn gemm_scratch_bytes<T: Element>() -> u64 {
    if T::as_acc(&[]).is_some() {
        return 0;
    }
    let elems = TILE_ROWS * PANEL + PANEL * TILE_COLS + TILE_ROWS * TILE_COLS;
    elems as u64 * size_of::<T::Acc>() as u64
}

/// Bytes at most that one product of `m x k` by `k x n` packs on its thread, beside its scratch; which
/// operands are packed depends on shapes and caches. Another 512 KiB a thread stay once packed.
pub fn gemm_packing_bytes<T: Element>(m: u64, n: u64, k: u64) -> u64 {
    // Panels are as deep as `k` at most and rounded up to whole registers.
    const REGISTERS: u64 = 64;
    (m + n + 2 * REGISTERS) * k * size_of::<T::Acc>() as u64
}

/// `c = a b`, or `c += a b`: `a` is `m x k`, `b` is `k x n`, `c` dense row-major `m x n`.
///
/// Sums are kept in [`Element::Acc`] and rounded once.
/// # Panics
/// If the sizes do not agree.
pub fn gemm<T: Element>(c: &mut [T], a: Mat<T>, b: Mat<T>, store: Store) {
    batched_gemm(c, 1, |_| a, |_| b, store);
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
    if n_batch == 0 {
        assert!(c.is_empty(), "gemm: no products, but a destination of {}", c.len());
        return;
    }
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
    let (tiles_m, tiles_n) = (m.div_ceil(TILE_ROWS), n.div_ceil(TILE_COLS));
    let n_tiles = n_batch * tiles_m * tiles_n;
    let dst = Disjoint::new(c);
    let tile = |t: usize| {
        let (batch, t) = (t / (tiles_m * tiles_n), t % (tiles_m * tiles_n));
        let (i, j) = (t / tiles_n * TILE_ROWS, t % tiles_n * TILE_COLS);
        let (rows, cols) = (TILE_ROWS.min(m - i), TILE_COLS.min(n - j));
        let (a, b) = (a(batch).block(i, 0, rows, k), b(batch).block(0, j, k, cols));
        tile_product(dst, batch * m * n + i * n + j, n, a, b, store);
    };
    if (n_batch * m * n).saturating_mul(k) < SERIAL_MACS {
        (0..n_tiles).for_each(tile);
    } else {
        (0..n_tiles).into_par_iter().for_each(tile);
    }
}

/// One tile of `c`, whose rows begin at `start`, `start + row_stride`, ...
fn tile_product<T: Element>(
    c: Disjoint<T>,
    start: usize,
    row_stride: usize,
    a: Mat<T>,
    b: Mat<T>,
    store: Store,
) {
    let (m, k, n) = (a.n_rows, a.n_cols, b.n_cols);
    if let (Some(a_acc), Some(b_acc)) = (T::as_acc(a.data), T::as_acc(b.data)) {
        // `T` is its own accumulator here, so the cast changes nothing.
        let first = c.ptr(start, (m - 1) * row_stride + n).cast::<T::Acc>();
        let (a, b) = (with_data(a, a_acc), with_data(b, b_acc));
        // SAFETY: in bounds by `ptr`'s check; each tile is computed by one call and tiles do not
        // overlap; the operands were checked by the caller.
        unsafe { raw_product(first, row_stride, a, b, store) };
        return;
    }
    let mut acc = vec![T::Acc::of(0.0); m * n];
    let (mut pa, mut pb) = (Vec::new(), Vec::new());
    if store == Store::Add {
        for i in 0..m {
            // SAFETY: rows of this tile belong to this call.
            widen_into(unsafe { c.slice(start + i * row_stride, n) }, &mut acc[i * n..(i + 1) * n]);
        }
    }
    for p in (0..k).step_by(PANEL) {
        let depth = PANEL.min(k - p);
        widen_block(&mut pa, a.block(0, p, m, depth));
        widen_block(&mut pb, b.block(p, 0, depth, n));
        gemm_serial(&mut acc, n, Mat::new(&pa, m, depth), Mat::new(&pb, depth, n), Store::Add);
    }
    for i in 0..m {
        // SAFETY: rows of this tile belong to this call.
        let row = unsafe { c.slice(start + i * row_stride, n) };
        narrow_into(row, &acc[i * n..(i + 1) * n]);
    }
}

fn with_data<'a, T, U>(m: Mat<T>, data: &'a [U]) -> Mat<'a, U> {
    let Mat { n_rows, n_cols, row_stride, col_stride, .. } = m;
    Mat { data, n_rows, n_cols, row_stride, col_stride }
}

/// `dst` becomes the dense row-major `src`, widened.
fn widen_block<T: Element>(dst: &mut Vec<T::Acc>, src: Mat<T>) {
    dst.clear();
    dst.reserve(src.n_rows * src.n_cols);
    for i in 0..src.n_rows {
        let row = &src.data[i * src.row_stride..];
        if src.col_stride == 1 {
            dst.extend(row[..src.n_cols].iter().map(|x| x.widen()));
        } else {
            dst.extend((0..src.n_cols).map(|j| row[j * src.col_stride].widen()));
        }
    }
}

/// `c = a b` or `c += a b` on the caller's thread; rows of `c` are `c_row_stride` apart.
/// # Panics
/// If the sizes do not agree or `c` is too short.
pub fn gemm_serial<R: Real>(c: &mut [R], c_row_stride: usize, a: Mat<R>, b: Mat<R>, store: Store) {
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
    // SAFETY: all three matrices were checked to lie in their slices.
    unsafe { raw_product(c.as_mut_ptr(), c_row_stride, a, b, store) };
}

/// # Safety
/// `c` is valid for writes of `m` rows of `n` elements `row_stride` apart; `a` and `b` lie inside
/// their data.
unsafe fn raw_product<R: Real>(c: *mut R, row_stride: usize, a: Mat<R>, b: Mat<R>, store: Store) {
    let (alpha, read_c) = match store {
        Store::Overwrite => (R::of(0.0), false),
        Store::Add => (R::of(1.0), true),
    };
    // SAFETY: the caller's promise; strides fit `isize` because the slices exist.
    unsafe {
        gemm::gemm(
            a.n_rows,
            b.n_cols,
            a.n_cols,
            c,
            1,
            row_stride as isize,
            read_c,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            alpha,
            R::of(1.0),
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
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

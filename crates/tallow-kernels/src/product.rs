//! One tile of a product on one thread: operands packed block by block, sums handed to a sink.
//!
//! After Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication": a panel of
//! the right operand stays in the L1 cache while a block of the left one streams from L2. The depth
//! is cut into equal blocks by its length alone, and every sum adds its blocks in their order.

use crate::{
    Real,
    isa::Isa,
    micro::{MR, NR, micro},
};
use rayon::prelude::*;
use std::{any::Any, cell::RefCell, ops::Range};

/// Deepest block: a right panel of `f32` is then 16 KiB, half of a usual L1 cache.
pub(crate) const MAX_DEPTH: usize = 256;
/// Rows of the left operand packed at once: 192 KiB of `f32`, well inside a usual L2 cache.
const BLOCK_ROWS: usize = 32 * MR;

/// What multiplies from the left: packs rows.
pub(crate) trait Left<R> {
    /// Packs up to [`MR`] rows into the panel `dst`, `[depth][MR]`; missing rows are zero.
    fn pack(&self, isa: Isa, dst: &mut [R], rows: Range<usize>, depth: Range<usize>);
    /// The panels of `n_rows` rows from `first` on, where they are packed already.
    fn packed(&self, _first: usize, _n_rows: usize, _depth: Range<usize>) -> Option<&[R]> {
        None
    }
}

/// A left operand packed whole, for many tiles to use.
pub(crate) struct Packed<R> {
    panels: Vec<Line<R>>,
    n_rows: usize,
}

/// Elements that [`Packed`] holds.
pub(crate) fn packed_elems(n_rows: usize, depth: usize) -> usize {
    n_rows.next_multiple_of(MR) * depth
}

impl<R: Real> Packed<R> {
    pub(crate) fn new(left: &(impl Left<R> + Sync), n_rows: usize, depth: usize) -> Self {
        let (isa, kc, padded) = (Isa::current(), block_depth(depth), n_rows.next_multiple_of(MR));
        let mut panels = lines(padded * depth);
        for start in (0..depth).step_by(kc) {
            let block = start..depth.min(start + kc);
            let panel = MR * block.len();
            let dst = &mut elems_mut(&mut panels)[start * padded..block.end * padded];
            dst.par_chunks_mut(panel).with_min_len((1 << 14) / panel).enumerate().for_each(
                |(p, dst)| left.pack(isa, dst, p * MR..n_rows.min((p + 1) * MR), block.clone()),
            );
        }
        Self { panels, n_rows: padded }
    }
}

impl<R: Real> Left<R> for Packed<R> {
    fn pack(&self, _: Isa, _: &mut [R], _: Range<usize>, _: Range<usize>) {
        unreachable!("it is packed already")
    }
    fn packed(&self, first: usize, n_rows: usize, depth: Range<usize>) -> Option<&[R]> {
        let start = depth.start * self.n_rows + first * depth.len();
        Some(&elems(&self.panels)[start..][..n_rows.next_multiple_of(MR) * depth.len()])
    }
}

/// What multiplies from the right: packs columns.
pub(crate) trait Right<R> {
    /// Packs the columns into consecutive panels `[depth][NR]`; missing columns are zero.
    fn pack(&self, isa: Isa, dst: &mut [R], cols: Range<usize>, depth: Range<usize>);
}

/// Where sums go.
pub(crate) trait Sink<R> {
    /// The memory of the sums from `(i, j)` on, good for `n_rows` rows of [`NR`], and the distance
    /// between rows, where the product may add them up in place.
    fn place(&self, i: usize, j: usize, n_rows: usize) -> Option<(*mut R, usize)>;
    /// Whether sums that have a place begin with what is there.
    fn adds(&self) -> bool;
    /// Whether sums without a place can be put in parts, one block of depth after the other.
    fn takes_parts(&self) -> bool;
    /// Takes the sums of `n_rows` rows of `n_cols`, `ld` apart, from `(i, j)` on. `part` is the
    /// number of parts put before.
    fn put(&self, at: (usize, usize), n: (usize, usize), sums: (&[R], usize), part: usize);
}

/// Scratch of one thread.
struct Buffers<R> {
    left: Vec<Line<R>>,
    right: Vec<Line<R>>,
    sums: Vec<Line<R>>,
}

/// Aligned so that no vector straddles two lines of the cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line<R>([R; NR]);

/// Lines for `n` elements.
fn lines<R: Real>(n: usize) -> Vec<Line<R>> {
    vec![Line([R::of(0.0); NR]); n.div_ceil(NR)]
}

fn elems<R>(lines: &[Line<R>]) -> &[R] {
    // SAFETY: a line is NR elements and no padding.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * NR) }
}

fn elems_mut<R>(lines: &mut [Line<R>]) -> &mut [R] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * NR) }
}

thread_local! {
    /// Kept between products, for a page that is new must be cleared by the system first.
    static F32: RefCell<Buffers<f32>> = const { RefCell::new(Buffers::EMPTY) };
    static F64: RefCell<Buffers<f64>> = const { RefCell::new(Buffers::EMPTY) };
}

impl<R> Buffers<R> {
    const EMPTY: Self = Self { left: Vec::new(), right: Vec::new(), sums: Vec::new() };
}

/// Runs `f` with the thread's buffers.
fn with_buffers<R: Real, T>(f: impl FnOnce(&mut Buffers<R>) -> T) -> T {
    let mut f = Some(f);
    let mut run = |buffers: &mut dyn Any| {
        let f = f.take().expect("called once");
        f(buffers.downcast_mut().expect("buffers of R"))
    };
    if size_of::<R>() == size_of::<f32>() {
        F32.with_borrow_mut(|b| run(b))
    } else {
        F64.with_borrow_mut(|b| run(b))
    }
}

/// Depth of one block: equal blocks of at most [`MAX_DEPTH`].
fn block_depth(depth: usize) -> usize {
    depth.div_ceil(depth.div_ceil(MAX_DEPTH).max(1)).max(1)
}

/// The first `n` elements of `buffer`, whatever they hold.
fn at_least<R: Real>(buffer: &mut Vec<Line<R>>, n: usize) -> &mut [R] {
    if buffer.len() * NR < n {
        *buffer = Vec::new(); // before the new one is there
        *buffer = lines(n);
    }
    &mut elems_mut(buffer)[..n]
}

/// Elements of scratch for a tile of `n_rows` x `n_cols` sums of `depth` terms: the packed operands
/// and, where they need a place of their own between blocks of depth, the sums.
pub(crate) fn scratch_elems(n_rows: usize, n_cols: usize, depth: usize, keeps_sums: bool) -> usize {
    let left = block_depth(depth) * BLOCK_ROWS.min(n_rows.next_multiple_of(MR));
    left + right_elems(n_rows, n_cols, depth, keeps_sums)
}

/// As [`scratch_elems`], of a left operand that is [`Packed`].
pub(crate) fn right_elems(n_rows: usize, n_cols: usize, depth: usize, keeps_sums: bool) -> usize {
    let n = n_cols.next_multiple_of(NR);
    let sums = if keeps_sums && depth > MAX_DEPTH { n_rows * n } else { 0 };
    block_depth(depth) * n + sums
}

/// Adds up the sums of `rows` x `cols` over `depth` terms and hands them to `sink`.
pub(crate) fn tile<R: Real>(
    left: &impl Left<R>,
    right: &impl Right<R>,
    sink: &impl Sink<R>,
    depth: usize,
    rows: Range<usize>,
    cols: Range<usize>,
) {
    let isa = Isa::current();
    let n_cols = cols.len().next_multiple_of(NR);
    let kc = block_depth(depth);
    let keeps_sums = depth > kc && !sink.takes_parts();
    with_buffers(|buffers: &mut Buffers<R>| {
        let sums = at_least(&mut buffers.sums, if keeps_sums { rows.len() * n_cols } else { 0 });
        for (part, start) in (0..depth.max(1)).step_by(kc).enumerate() {
            let block = start..depth.min(start + kc);
            let (k, last) = (block.len(), start + kc >= depth);
            let b = at_least(&mut buffers.right, n_cols * k);
            right.pack(isa, b, cols.clone(), block.clone());
            for first in (rows.start..rows.end).step_by(BLOCK_ROWS) {
                let n_rows = BLOCK_ROWS.min(rows.end - first);
                let a = left.packed(first, n_rows, block.clone());
                let a = a.unwrap_or_else(|| {
                    let a = at_least(&mut buffers.left, n_rows.next_multiple_of(MR) * k);
                    for (p, a) in a.chunks_exact_mut((MR * k).max(1)).enumerate() {
                        let row = first + p * MR;
                        left.pack(isa, a, row..rows.end.min(row + MR), block.clone());
                    }
                    a
                });
                if keeps_sums {
                    let sums = &mut sums[(first - rows.start) * n_cols..][..n_rows * n_cols];
                    add_up(isa, sums, n_cols, a, b, k, part > 0);
                    if last {
                        put(sink, sums, first, n_rows, &cols);
                    }
                } else {
                    hand_over(isa, sink, a, b, k, (first, n_rows), &cols, part);
                }
            }
        }
    });
}

/// Gives the sink `n_rows` rows of finished sums, panel by panel.
fn put<R: Real>(sink: &impl Sink<R>, sums: &[R], first: usize, n_rows: usize, cols: &Range<usize>) {
    let ld = cols.len().next_multiple_of(NR);
    for (p, j) in (cols.start..cols.end).step_by(NR).enumerate() {
        let n = NR.min(cols.end - j);
        sink.put((first, j), (n_rows, n), (&sums[p * NR..], ld), 0);
    }
}

/// `sums = a b` or `sums += a b`.
fn add_up<R: Real>(isa: Isa, sums: &mut [R], ld: usize, a: &[R], b: &[R], k: usize, add: bool) {
    let n_rows = sums.len() / ld;
    for j in (0..ld).step_by(NR) {
        for i in (0..n_rows).step_by(MR) {
            let (a, b, c) = (&a[i * k..][..MR * k], &b[j * k..][..NR * k], &mut sums[i * ld + j..]);
            // SAFETY: panels of depth `k`; rows `i..` of `sums` are `ld` apart and at least NR long.
            unsafe {
                let c = (c.as_mut_ptr(), ld);
                micro(isa, k, a.as_ptr(), b.as_ptr(), c, MR.min(n_rows - i), add);
            }
        }
    }
}

/// Multiplies one block and gives each part of it to the sink at once.
fn hand_over<R: Real>(
    isa: Isa,
    sink: &impl Sink<R>,
    a: &[R],
    b: &[R],
    k: usize,
    (first, n_rows): (usize, usize),
    cols: &Range<usize>,
    part: usize,
) {
    let mut sums = [R::of(0.0); MR * NR];
    for (q, j) in (cols.start..cols.end).step_by(NR).enumerate() {
        let n = NR.min(cols.end - j);
        let b = &b[q * NR * k..][..NR * k];
        for i in (0..n_rows).step_by(MR) {
            let (a, m) = (&a[i * k..][..MR * k], MR.min(n_rows - i));
            let place = if n == NR { sink.place(first + i, j, m) } else { None };
            let (c, add) = match place {
                Some(c) => (c, part > 0 || sink.adds()),
                None => ((sums.as_mut_ptr(), NR), false),
            };
            // SAFETY: panels of depth `k`; the place is good for `m` rows by the sink's promise, `sums`
            // for MR of NR.
            unsafe { micro(isa, k, a.as_ptr(), b.as_ptr(), c, m, add) };
            if place.is_none() {
                sink.put((first + i, j), (m, n), (&sums, NR), part);
            }
        }
    }
}

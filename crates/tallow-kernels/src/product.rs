//! One tile of a product on one thread: operands packed block by block, sums handed to a sink.
//!
//! After Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication": a panel of
//! the right operand stays in the L1 cache while a block of the left one streams from L2. The depth
//! is cut into equal blocks by its length alone, and every sum adds its blocks in their order.

use crate::{
    Real,
    isa::Isa,
    micro::{NR, Packed},
};
use rayon::prelude::*;
use std::{cell::RefCell, ops::Range};

/// What multiplies from the left: packs rows.
pub(crate) trait Left<P> {
    /// Packs up to [`Packed::MR`] rows into the panel `dst`; missing rows and depths are zero.
    fn pack(&self, isa: Isa, dst: &mut [P], rows: Range<usize>, depth: Range<usize>);
    /// The panels of `n_rows` rows from `first` on, where they are packed already.
    fn packed(&self, _first: usize, _n_rows: usize, _depth: Range<usize>) -> Option<&[P]> {
        None
    }
}

/// Rows of a left operand packed whole, for many tiles to use.
pub(crate) struct Whole<P> {
    panels: Vec<Line>,
    first: usize,
    n_rows: usize,
    element: std::marker::PhantomData<P>,
}

/// Elements that [`Whole`] holds.
pub(crate) fn whole_elems<P: Packed>(n_rows: usize, depth: usize) -> usize {
    n_rows.next_multiple_of(P::MR) * padded::<P>(depth)
}

impl<P: Packed> Whole<P> {
    /// All rows.
    pub(crate) fn new(left: &(impl Left<P> + Sync), n_rows: usize, depth: usize) -> Self {
        Self::of_rows(left, 0..n_rows, depth)
    }

    pub(crate) fn of_rows(left: &(impl Left<P> + Sync), rows: Range<usize>, depth: usize) -> Self {
        let (isa, kc) = (Isa::current(), block_depth::<P>(depth));
        let n_padded = rows.len().next_multiple_of(P::MR);
        let n_elems = whole_elems::<P>(rows.len(), depth);
        let mut panels = WHOLE.take();
        at_least::<P>(&mut panels, n_elems);
        for start in (0..depth).step_by(kc) {
            let block = start..depth.min(start + kc);
            let panel = P::MR * padded::<P>(block.len());
            let dst = &mut elems_mut::<P>(&mut panels)[start * n_padded..];
            let dst = &mut dst[..n_padded / P::MR * panel];
            dst.par_chunks_mut(panel).with_min_len((1 << 14) / panel).enumerate().for_each(
                |(p, dst)| {
                    let first = rows.start + p * P::MR;
                    left.pack(isa, dst, first..rows.end.min(first + P::MR), block.clone());
                },
            );
        }
        Self { panels, first: rows.start, n_rows: n_padded, element: std::marker::PhantomData }
    }
}

impl<P> Drop for Whole<P> {
    fn drop(&mut self) {
        WHOLE.set(std::mem::take(&mut self.panels));
    }
}

impl<P: Packed> Left<P> for Whole<P> {
    fn pack(&self, _: Isa, _: &mut [P], _: Range<usize>, _: Range<usize>) {
        unreachable!("it is packed already")
    }
    fn packed(&self, first: usize, n_rows: usize, depth: Range<usize>) -> Option<&[P]> {
        let k = padded::<P>(depth.len());
        let start = depth.start * self.n_rows + (first - self.first) * k;
        Some(&elems(&self.panels)[start..][..n_rows.next_multiple_of(P::MR) * k])
    }
}

/// What multiplies from the right: packs columns.
pub(crate) trait Right<P> {
    /// Packs the columns into consecutive panels of [`NR`]; missing columns and depths are zero.
    fn pack(&self, isa: Isa, dst: &mut [P], cols: Range<usize>, depth: Range<usize>);
}

/// Where sums go.
pub(crate) trait Sink<R> {
    /// The memory of the sums from `(i, j)` on, good for `n` rows and columns, and the distance
    /// between rows, where the product may add them up in place.
    fn place(&self, at: (usize, usize), n: (usize, usize)) -> Option<(*mut R, usize)>;
    /// Whether sums that have a place begin with what is there.
    fn adds(&self) -> bool;
    /// Whether sums without a place can be put in parts, one block of depth after the other.
    fn takes_parts(&self) -> bool;
    /// Takes the sums of `n` rows and columns, the rows `ld` apart, from `at` on. `part` is the
    /// number of parts put before.
    fn put(&self, at: (usize, usize), n: (usize, usize), sums: (&[R], usize), part: usize);
    /// All sums of these rows and columns are there.
    fn finish(&self, _rows: Range<usize>, _cols: Range<usize>) {}
}

/// Scratch of one thread.
struct Buffers {
    left: Vec<Line>,
    right: Vec<Line>,
    sums: Vec<Line>,
}

/// Aligned so that no vector straddles two lines of the cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Zeros, lines for `n` elements of them.
fn lines<P>(n: usize) -> Vec<Line> {
    vec![Line([0; 64]); (n * size_of::<P>()).div_ceil(64)]
}

fn elems<P: Copy>(lines: &[Line]) -> &[P] {
    let n = size_of_val(lines) / size_of::<P>();
    // SAFETY: an element is any pattern of bits, and lines are aligned for all of them.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), n) }
}

fn elems_mut<P: Copy>(lines: &mut [Line]) -> &mut [P] {
    let n = size_of_val(lines) / size_of::<P>();
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), n) }
}

thread_local! {
    /// Kept between products, for a page that is new must be cleared by the system first.
    static BUFFERS: RefCell<Buffers> =
        const { RefCell::new(Buffers { left: Vec::new(), right: Vec::new(), sums: Vec::new() }) };
    /// What a [`Whole`] was packed in, for the next one on this thread.
    static WHOLE: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// The first `n` elements of `buffer`, whatever they hold.
fn at_least<P: Copy>(buffer: &mut Vec<Line>, n: usize) -> &mut [P] {
    if size_of_val(&buffer[..]) < n * size_of::<P>() {
        *buffer = Vec::new(); // before the new one is there
        *buffer = lines::<P>(n);
    }
    &mut elems_mut(buffer)[..n]
}

/// Depth with the zeros that fill up its last step.
fn padded<P: Packed>(depth: usize) -> usize {
    depth.next_multiple_of(P::STEP)
}

/// Depth of one block: equal blocks of at most [`Packed::MAX_DEPTH`].
fn block_depth<P: Packed>(depth: usize) -> usize {
    padded::<P>(depth.div_ceil(depth.div_ceil(P::MAX_DEPTH).max(1)).max(1))
}

/// Bytes of scratch for a tile of `n_rows` x `n_cols` sums of `depth` terms: the packed operands
/// and, where they need a place of their own between blocks of depth, the sums.
pub(crate) fn scratch_bytes<P: Packed>(
    n_rows: usize,
    n_cols: usize,
    depth: usize,
    keeps_sums: bool,
) -> usize {
    let left = block_depth::<P>(depth) * P::BLOCK_ROWS.min(n_rows.next_multiple_of(P::MR));
    left * size_of::<P>() + right_bytes::<P>(n_rows, n_cols, depth, keeps_sums)
}

/// As [`scratch_bytes`], of a left operand that is packed [`Whole`].
pub(crate) fn right_bytes<P: Packed>(
    n_rows: usize,
    n_cols: usize,
    depth: usize,
    keeps_sums: bool,
) -> usize {
    let n = n_cols.next_multiple_of(NR);
    let sums = if keeps_sums && depth > block_depth::<P>(depth) { n_rows * n } else { 0 };
    block_depth::<P>(depth) * n * size_of::<P>() + sums * size_of::<P::Sum>()
}

/// Adds up the sums of `rows` x `cols` over `depth` terms and hands them to `sink`.
pub(crate) fn tile<P: Packed>(
    left: &impl Left<P>,
    right: &impl Right<P>,
    sink: &impl Sink<P::Sum>,
    depth: usize,
    rows: Range<usize>,
    cols: Range<usize>,
) {
    let isa = Isa::current();
    let n_cols = cols.len().next_multiple_of(NR);
    let kc = block_depth::<P>(depth);
    let keeps_sums = depth > kc && !sink.takes_parts();
    BUFFERS.with_borrow_mut(|buffers| {
        let _ready = P::begin(isa);
        let n_sums = if keeps_sums { rows.len() * n_cols } else { 0 };
        let sums = at_least::<P::Sum>(&mut buffers.sums, n_sums);
        for (part, start) in (0..depth.max(1)).step_by(kc).enumerate() {
            let block = start..depth.min(start + kc);
            let (k, last) = (padded::<P>(block.len()), start + kc >= depth);
            let b = at_least::<P>(&mut buffers.right, n_cols * k);
            right.pack(isa, b, cols.clone(), block.clone());
            for first in (rows.start..rows.end).step_by(P::BLOCK_ROWS) {
                let n_rows = P::BLOCK_ROWS.min(rows.end - first);
                let a = left.packed(first, n_rows, block.clone());
                let a = a.unwrap_or_else(|| {
                    let n_panels = n_rows.div_ceil(P::MR);
                    let a = at_least::<P>(&mut buffers.left, n_panels * P::MR * k);
                    for (p, a) in a.chunks_exact_mut((P::MR * k).max(1)).enumerate() {
                        let row = first + p * P::MR;
                        left.pack(isa, a, row..rows.end.min(row + P::MR), block.clone());
                    }
                    a
                });
                if keeps_sums {
                    let sums = &mut sums[(first - rows.start) * n_cols..][..n_rows * n_cols];
                    add_up(isa, sums, n_cols, a, b, k, part > 0);
                    if last {
                        sink.put((first, cols.start), (n_rows, cols.len()), (sums, n_cols), 0);
                    }
                } else {
                    hand_over(isa, sink, a, b, k, (first, n_rows), &cols, part);
                }
            }
        }
    });
}

/// `sums = a b` or `sums += a b`.
fn add_up<P: Packed>(
    isa: Isa,
    sums: &mut [P::Sum],
    ld: usize,
    a: &[P],
    b: &[P],
    k: usize,
    add: bool,
) {
    let (n_rows, at_once) = (sums.len() / ld, P::at_once(isa));
    for j in (0..ld).step_by(at_once.1 * NR) {
        let n_panels = at_once.1.min((ld - j) / NR);
        for i in (0..n_rows).step_by(at_once.0 * P::MR) {
            let m = (at_once.0 * P::MR).min(n_rows - i);
            let a = &a[i * k..][..m.next_multiple_of(P::MR) * k];
            let (b, c) = (&b[j * k..][..n_panels * NR * k], &mut sums[i * ld + j..]);
            // SAFETY: panels of depth `k`; rows `i..` of `sums` are `ld` apart and as long as the
            // panels from `j` on; `tile` holds the guard.
            unsafe {
                let c = (c.as_mut_ptr(), ld);
                P::micro(isa, k, a.as_ptr(), b.as_ptr(), c, (m, n_panels), add);
            }
        }
    }
}

/// Most sums of one call of [`Packed::micro`].
const BLOCK: (usize, usize) = (32, 2 * NR);

/// Sums on their way to a sink.
#[repr(align(64))]
struct Block<R>([R; BLOCK.0 * BLOCK.1]);

/// Multiplies one block and gives each part of it to the sink at once.
fn hand_over<P: Packed>(
    isa: Isa,
    sink: &impl Sink<P::Sum>,
    a: &[P],
    b: &[P],
    k: usize,
    (first, n_rows): (usize, usize),
    cols: &Range<usize>,
    part: usize,
) {
    let mut sums = Block([P::Sum::of(0.0); BLOCK.0 * BLOCK.1]);
    let at_once = P::at_once(isa);
    let (most_rows, most_cols) = (at_once.0 * P::MR, at_once.1 * NR);
    for j in (cols.start..cols.end).step_by(most_cols) {
        let n = most_cols.min(cols.end - j);
        let n_panels = n.div_ceil(NR);
        let b = &b[(j - cols.start) * k..][..n_panels * NR * k];
        for i in (0..n_rows).step_by(most_rows) {
            let m = most_rows.min(n_rows - i);
            let a = &a[i * k..][..m.next_multiple_of(P::MR) * k];
            let whole = n == n_panels * NR;
            let place = if whole { sink.place((first + i, j), (m, n)) } else { None };
            let (c, add) = match place {
                Some(c) => (c, part > 0 || sink.adds()),
                None => ((sums.0.as_mut_ptr(), BLOCK.1), false),
            };
            // SAFETY: panels of depth `k`; the place is good for `m` rows of `n` by the sink's promise,
            // `sums` for the most that there can be; `tile` holds the guard.
            unsafe { P::micro(isa, k, a.as_ptr(), b.as_ptr(), c, (m, n_panels), add) };
            if place.is_none() {
                sink.put((first + i, j), (m, n), (&sums.0, BLOCK.1), part);
            }
        }
    }
}

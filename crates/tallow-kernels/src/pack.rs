//! Operands widened and laid out in panels, the order in which [`micro`](crate::micro) reads them.
//!
//! `bf16` may stay as it is ([`Packed`](crate::micro::Packed) tells the order).
//!
//! A panel of width `W` holds `W` lanes (rows of a left operand, columns of a right one) of some
//! depth: `panel[p][l]`. Lanes beyond the operand's last are zero.

use crate::{
    Element, Real,
    conv::{
        narrow,
        window::{self, Panels},
    },
    gemm::Mat,
    isa::Isa,
    micro::{MR, MR_BF16, NR, Packed, STEP_BF16},
};
use half::{bf16, f16};
use std::ops::Range;

/// Panels packed side by side: 256 bytes of `f32` are read along memory, and few places written at once.
#[cfg(target_arch = "x86_64")]
const WIDE: usize = 4;

/// Panels of `Self` made from elements of `T`.
pub(crate) trait Packs<T: Element>: Packed<Sum = T::Acc> {
    /// One element.
    fn pack_one(x: T) -> Self;
    /// Where the panel of a left operand holds depth `p` of lane `l`.
    fn left_place(l: usize, p: usize) -> usize;
    /// The panel of up to [`Packed::MR`] rows.
    fn left(lanes: &Lanes<T>, isa: Isa, dst: &mut [Self], rows: Range<usize>, depth: Range<usize>);
    /// As [`Packs::left`], of `n_rows` and `n_depth` that come in runs: `run(p)` are the lanes from
    /// depth `p` on and how many depths they hold.
    fn left_runs<'a>(
        isa: Isa,
        dst: &mut [Self],
        n_rows: usize,
        n_depth: usize,
        run: impl Fn(usize) -> (Lanes<'a, T>, usize),
    );
    /// Consecutive panels of [`NR`] columns; columns that are missing of the last are zero.
    fn right(lanes: &Lanes<T>, isa: Isa, dst: &mut [Self], cols: Range<usize>, depth: Range<usize>);
    /// All panels, of planes and taps `depth`.
    fn patches(panels: &Panels, isa: Isa, dst: &mut [Self], x: &[T], depth: Range<usize>);
    /// The same turned over: planes and taps `cols` for columns, the panels' `n` lanes for depth.
    fn turned(panels: &Panels, isa: Isa, dst: &mut [Self], x: &[T], cols: Range<usize>, n: usize);
}

macro_rules! widened {
    ($($t:ty => $p:ty),*) => { $(
        impl Packs<$t> for $p {
            #[inline(always)]
            fn pack_one(x: $t) -> $p {
                x.widen()
            }
            #[inline(always)]
            fn left_place(l: usize, p: usize) -> usize {
                p * MR + l
            }
            fn left(
                lanes: &Lanes<$t>,
                isa: Isa,
                dst: &mut [$p],
                rows: Range<usize>,
                depth: Range<usize>,
            ) {
                lanes.pack::<MR>(isa, dst, rows.start, rows.len(), depth);
            }
            fn left_runs<'a>(
                isa: Isa,
                dst: &mut [$p],
                n_rows: usize,
                n_depth: usize,
                run: impl Fn(usize) -> (Lanes<'a, $t>, usize),
            ) {
                let mut at = 0;
                while at < n_depth {
                    let (lanes, n) = run(at);
                    let n = n.min(n_depth - at);
                    lanes.pack::<MR>(isa, &mut dst[at * MR..(at + n) * MR], 0, n_rows, 0..n);
                    at += n;
                }
            }
            fn right(
                lanes: &Lanes<$t>,
                isa: Isa,
                dst: &mut [$p],
                cols: Range<usize>,
                depth: Range<usize>,
            ) {
                lanes.pack_all(isa, dst, cols, depth);
            }
            fn patches(panels: &Panels, isa: Isa, dst: &mut [$p], x: &[$t], depth: Range<usize>) {
                window::patches(panels, isa, dst, x, depth);
            }
            fn turned(
                panels: &Panels,
                isa: Isa,
                dst: &mut [$p],
                x: &[$t],
                cols: Range<usize>,
                n: usize,
            ) {
                window::turned(panels, isa, dst, x, cols, n);
            }
        }
    )* };
}
widened!(f32 => f32, f64 => f64, bf16 => f32, f16 => f32);

impl Packs<bf16> for bf16 {
    #[inline(always)]
    fn pack_one(x: bf16) -> bf16 {
        x
    }
    #[inline(always)]
    fn left_place(l: usize, p: usize) -> usize {
        p / STEP_BF16 * BLOCK + place::<true>(l, p % STEP_BF16)
    }
    fn left(
        lanes: &Lanes<bf16>,
        isa: Isa,
        dst: &mut [bf16],
        rows: Range<usize>,
        depth: Range<usize>,
    ) {
        lanes.pack_left(isa, dst, rows, depth);
    }
    fn left_runs<'a>(
        isa: Isa,
        dst: &mut [bf16],
        n_rows: usize,
        n_depth: usize,
        run: impl Fn(usize) -> (Lanes<'a, bf16>, usize),
    ) {
        let n_blocks = n_depth.div_ceil(STEP_BF16);
        for (b, dst) in dst.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate().take(n_blocks) {
            let (mut at, end) = (b * STEP_BF16, n_depth.min((b + 1) * STEP_BF16));
            while at < end {
                let (lanes, n) = run(at);
                let n = n.min(end - at);
                if n == STEP_BF16 {
                    lanes.block::<true>(isa, dst, 0..n_rows, 0..n);
                } else {
                    lanes.part(dst, n_rows, at % STEP_BF16, n);
                }
                at += n;
            }
        }
    }
    fn right(
        lanes: &Lanes<bf16>,
        isa: Isa,
        dst: &mut [bf16],
        cols: Range<usize>,
        depth: Range<usize>,
    ) {
        lanes.pack_right(isa, dst, cols, depth);
    }
    fn patches(panels: &Panels, isa: Isa, dst: &mut [bf16], x: &[bf16], depth: Range<usize>) {
        narrow::patches(panels, isa, dst, x, depth);
    }
    fn turned(
        panels: &Panels,
        isa: Isa,
        dst: &mut [bf16],
        x: &[bf16],
        cols: Range<usize>,
        n: usize,
    ) {
        narrow::turned(panels, isa, dst, x, cols, n);
    }
}

/// Whether products of `T` pack [`Element::Narrow`] and not its accumulator type.
pub(crate) fn packs_narrow<T: Element>() -> bool {
    size_of::<T::Narrow>() < size_of::<T::Acc>() && Isa::current() >= Isa::Avx512Bf16
}

/// Packs the given lanes and depths of a matrix whose lane `l` and depth `p` is element
/// `l * lane_stride + p * depth_stride` of `data`.
pub(crate) struct Lanes<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) lane_stride: usize,
    pub(crate) depth_stride: usize,
}

impl<'a, T: Element> Lanes<'a, T> {
    /// The rows of a left operand.
    pub(crate) fn rows(m: Mat<'a, T>) -> Self {
        Self { data: m.data, lane_stride: m.row_stride, depth_stride: m.col_stride }
    }

    /// The columns of a right operand.
    pub(crate) fn cols(m: Mat<'a, T>) -> Self {
        Self::rows(m.t())
    }

    /// Consecutive panels of [`NR`] lanes; lanes beyond `lanes` are zero.
    pub(crate) fn pack_all(
        &self,
        isa: Isa,
        dst: &mut [T::Acc],
        lanes: Range<usize>,
        depth: Range<usize>,
    ) {
        let n_panel = NR * depth.len();
        if n_panel == 0 {
            return;
        }
        let done = self.pack_wide(isa, dst, lanes.clone(), depth.clone());
        let rest = (lanes.start + done..lanes.end).step_by(NR);
        for (dst, lane) in dst[done / NR * n_panel..].chunks_exact_mut(n_panel).zip(rest) {
            self.pack::<NR>(isa, dst, lane, NR.min(lanes.end - lane), depth.clone());
        }
    }

    /// Packs full panels whose lanes lie side by side, and says how many lanes that were.
    fn pack_wide(
        &self,
        isa: Isa,
        dst: &mut [T::Acc],
        lanes: Range<usize>,
        depth: Range<usize>,
    ) -> usize {
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx2 && self.lane_stride == 1 && size_of::<T::Acc>() == 4 {
            let n_lanes = lanes.len() / NR * NR;
            assert!(n_lanes * depth.len() <= dst.len(), "pack: length of the panels");
            for at in (0..n_lanes).step_by(WIDE * NR) {
                let n = (n_lanes - at).min(WIDE * NR);
                let first = lanes.start + at + depth.start * self.depth_stride;
                let src = &self.data[first..first + n + (depth.len() - 1) * self.depth_stride];
                let dst = dst[at * depth.len()..].as_mut_ptr().cast();
                // SAFETY: `src` ends with the last lane of the last depth, `dst` holds `n_lanes`
                // lanes; `T::Acc` is `f32`, so `T` is not `f64`.
                unsafe {
                    let (src, ds) = (src.as_ptr(), self.depth_stride);
                    crate::x86::pack_panels::<T>(dst, src, ds, depth.len(), n / NR);
                }
            }
            return n_lanes;
        }
        let _ = (isa, dst, lanes, depth);
        0
    }

    /// One panel, `depth.len() * W` long, of the `n_lanes` lanes from `lane` on.
    pub(crate) fn pack<const W: usize>(
        &self,
        isa: Isa,
        dst: &mut [T::Acc],
        lane: usize,
        n_lanes: usize,
        depth: Range<usize>,
    ) {
        assert_eq!(dst.len(), depth.len() * W, "pack: panel length");
        let n_depth = depth.len();
        if n_depth == 0 || n_lanes == 0 {
            return;
        }
        let (ls, ds) = (self.lane_stride, self.depth_stride);
        let first = lane * ls + depth.start * ds;
        let src = &self.data[first..=first + (n_lanes - 1) * ls + (n_depth - 1) * ds];
        let done = pack_fast::<T, W>(isa, dst, src, (ls, ds), n_lanes, n_depth);
        for (p, dst) in dst.chunks_exact_mut(W).enumerate().skip(done) {
            let (full, rest) = dst.split_at_mut(n_lanes);
            if ls == 1 {
                full.iter_mut().zip(&src[p * ds..]).for_each(|(d, x)| *d = x.widen());
            } else {
                full.iter_mut()
                    .zip(src[p * ds..].iter().step_by(ls))
                    .for_each(|(d, x)| *d = x.widen());
            }
            rest.fill(T::Acc::of(0.0));
        }
    }
}

/// Packs as many depths, from the first, as vector instructions can, and says how many.
fn pack_fast<T: Element, const W: usize>(
    isa: Isa,
    dst: &mut [T::Acc],
    src: &[T],
    (ls, ds): (usize, usize),
    n_lanes: usize,
    n_depth: usize,
) -> usize {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx2 && n_lanes == W && size_of::<T::Acc>() == 4 {
        let (dst, n_dst) = (dst.as_mut_ptr().cast::<f32>(), dst.len());
        if ls == 1 && W == NR {
            // SAFETY: `src` ends with the last lane of the last depth, `dst` has `n_depth` rows of
            // `W`; `T::Acc` is `f32`, so `T` is not `f64`.
            unsafe { crate::x86::pack_panels::<T>(dst, src.as_ptr(), ds, n_depth, 1) };
            return n_depth;
        }
        if ls == 1 && W == crate::micro::MR {
            // As many depths as have eight lanes to read and to write.
            let by_src = (src.len() + ds).saturating_sub(8) / ds.max(1);
            let n = by_src.min(n_depth - 1);
            // SAFETY: by the choice of `n`; `dst` holds `n_depth > n` rows of `MR`.
            unsafe { crate::x86::pack_rows::<T>(dst, src.as_ptr(), ds, n) };
            return n;
        }
        if ds == 1 {
            let mut p = 0;
            // A square writes 8 lanes a depth, which for fewer than 8 run into the next one.
            while p + 8 <= n_depth && (p + 7) * W + W.next_multiple_of(8) <= n_dst {
                for l in (0..W).step_by(8) {
                    let n = (W - l).min(8);
                    // SAFETY: `src` holds `W` runs of `n_depth`, `ls` apart; `dst` is long enough by
                    // the loop's condition.
                    unsafe {
                        let (dst, src) = (dst.add(p * W + l), src.as_ptr().add(l * ls + p));
                        crate::x86::pack_square(dst, W, src, ls, n);
                    }
                }
                p += 8;
            }
            return p;
        }
    }
    let _ = (isa, dst, src, ls, ds, n_lanes, n_depth);
    0
}

/// Elements of a block of `bf16`: 16 lanes of 32 depths.
const BLOCK: usize = NR * STEP_BF16;
const _: () = assert!(MR_BF16 == NR);

impl Lanes<'_, bf16> {
    /// The panel of up to [`MR_BF16`] rows of a left operand.
    pub(crate) fn pack_left(
        &self,
        isa: Isa,
        dst: &mut [bf16],
        rows: Range<usize>,
        depth: Range<usize>,
    ) {
        for (dst, p) in dst.as_chunks_mut().0.iter_mut().zip(depth.clone().step_by(STEP_BF16)) {
            self.block::<true>(isa, dst, rows.clone(), p..depth.end.min(p + STEP_BF16));
        }
    }

    /// Consecutive panels of [`NR`] columns of a right operand.
    pub(crate) fn pack_right(
        &self,
        isa: Isa,
        dst: &mut [bf16],
        lanes: Range<usize>,
        depth: Range<usize>,
    ) {
        // Panels side by side, so that whole lines of the cache are read.
        let n_panel = depth.len().next_multiple_of(STEP_BF16) * NR;
        for (at, p) in depth.clone().step_by(STEP_BF16).enumerate() {
            let depth = p..depth.end.min(p + STEP_BF16);
            for (q, lane) in lanes.clone().step_by(NR).enumerate() {
                let dst = &mut dst[q * n_panel + at * BLOCK..][..BLOCK];
                let dst = dst.try_into().expect("a block");
                self.block::<false>(isa, dst, lane..lanes.end.min(lane + NR), depth.clone());
            }
        }
    }

    /// Depths `at..at + n` of a left operand's block, from the first `n` depths of lanes that hold theirs
    /// side by side. Zeros follow, for later parts to overwrite; lanes that are missing are zero.
    fn part(&self, dst: &mut [bf16; BLOCK], n_lanes: usize, at: usize, n: usize) {
        debug_assert_eq!(self.depth_stride, 1);
        for (l, dst) in dst.as_chunks_mut::<STEP_BF16>().0.iter_mut().enumerate() {
            let (row, rest) = dst[at..].split_at_mut(n);
            if l < n_lanes {
                row.copy_from_slice(&self.data[l * self.lane_stride..][..n]);
            } else {
                row.fill(bf16::ZERO);
            }
            rest.fill(bf16::ZERO);
        }
    }

    /// One block, of up to 16 lanes and 32 depths; the rest is zero.
    fn block<const LEFT: bool>(
        &self,
        isa: Isa,
        dst: &mut [bf16; BLOCK],
        lanes: Range<usize>,
        depth: Range<usize>,
    ) {
        let (ls, ds) = (self.lane_stride, self.depth_stride);
        let (n_lanes, n_depth) = (lanes.len(), depth.len());
        if n_lanes == 0 || n_depth == 0 {
            return dst.fill(bf16::ZERO);
        }
        let first = lanes.start * ls + depth.start * ds;
        let src = &self.data[first..=first + (n_lanes - 1) * ls + (n_depth - 1) * ds];
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512 && (ls == 1 || ds == 1) {
            use crate::x86::avx512::{Along, pack_block};
            let (along, stride) = if ds == 1 { (Along::Depth, ls) } else { (Along::Lanes, ds) };
            // SAFETY: the processor has AVX-512; `src` holds these lanes and depths.
            return unsafe {
                let (dst, src) = (dst.as_mut_ptr(), src.as_ptr());
                pack_block::<LEFT>(dst, src, along, stride, n_lanes, n_depth)
            };
        }
        let _ = isa;
        dst.fill(bf16::ZERO);
        for l in 0..n_lanes {
            for p in 0..n_depth {
                dst[place::<LEFT>(l, p)] = src[l * ls + p * ds];
            }
        }
    }
}

/// Where a block holds depth `p` of lane `l`.
pub(crate) fn place<const LEFT: bool>(l: usize, p: usize) -> usize {
    if LEFT { l * STEP_BF16 + p } else { p / 2 * (2 * NR) + 2 * l + p % 2 }
}

//! Operands widened and laid out in panels, the order in which [`micro`](crate::micro) reads them.
//!
//! A panel of width `W` holds `W` lanes (rows of a left operand, columns of a right one) of some
//! depth: `panel[p][l]`. Lanes beyond the operand's last are zero.

use crate::{Element, Real, gemm::Mat, isa::Isa, micro::NR};
use std::ops::Range;

/// Panels packed side by side: 256 bytes of `f32` are read along memory, and few places written at once.
#[cfg(target_arch = "x86_64")]
const WIDE: usize = 4;

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

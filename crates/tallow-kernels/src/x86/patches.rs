//! AVX-512: what lies under a window, packed as `bf16`.

use super::avx512::{pairs, transposed};
use crate::{
    conv::{narrow::PanelRows, window::Reach},
    micro::{NR, STEP_BF16},
};
use half::bf16;
use std::{arch::x86_64::*, ops::Range};

/// A plane and a tap of it.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub(super) plane: isize,
    pub(super) tap: usize,
}

impl At {
    /// Tap `p % n_taps` of plane `p / n_taps`.
    pub(super) fn new(p: usize, n_taps: usize, plane_elems: usize) -> Self {
        Self { plane: (p / n_taps * plane_elems) as isize, tap: p % n_taps }
    }

    /// This one; goes on to the next.
    #[inline(always)]
    pub(super) fn next(&mut self, n_taps: usize, plane_elems: usize) -> Self {
        let at = *self;
        self.tap += 1;
        if self.tap == n_taps {
            *self = Self { plane: self.plane + plane_elems as isize, tap: 0 };
        }
        at
    }
}

/// Packs panels side by side into `dst`, one after the other, depths in pairs.
/// # Safety
/// Lanes that are inside lie in `x`.
/// # Panics
/// If `dst` is too short.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn pack(dst: &mut [bf16], panels: &[PanelRows], depth: Range<usize>) {
    let n_pairs = depth.len().next_multiple_of(STEP_BF16) / 2;
    assert!(dst.len() >= panels.len() * n_pairs * 2 * NR, "patches: panel length");
    let (n_taps, plane_elems) = (panels[0].reach.len(), panels[0].plane_elems);
    let mut at = At::new(depth.start, n_taps, plane_elems);
    for pair in 0..n_pairs {
        let n = depth.len().saturating_sub(2 * pair);
        let first = if n > 0 { at.next(n_taps, plane_elems) } else { at };
        let second = if n > 1 { at.next(n_taps, plane_elems) } else { at };
        for (q, rows) in panels.iter().enumerate() {
            let zero = _mm256_setzero_si256();
            // SAFETY: the caller's promise; `dst` is long enough by the check.
            unsafe {
                let a = if n > 0 { row(rows, first) } else { zero };
                let b = if n > 1 { row(rows, second) } else { zero };
                let dst = dst.as_mut_ptr().add((q * n_pairs + pair) * 2 * NR);
                _mm512_storeu_si512(dst.cast(), pairs(a, b));
            }
        }
    }
}

/// As `turn_block` of [`crate::conv::narrow`].
/// # Safety
/// Lanes that are inside lie in `x`.
/// # Panics
/// If `dst` is no block or there are more than 16 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn turn_block(
    dst: &mut [bf16],
    halves: &[Option<PanelRows>; 2],
    cols: Range<usize>,
) {
    assert!(dst.len() == NR * STEP_BF16 && cols.len() <= NR, "patches: block length");
    let mut lanes = [_mm512_setzero_si512(); NR];
    if let Some(low) = &halves[0] {
        let (n_taps, plane_elems) = (low.reach.len(), low.plane_elems);
        let mut at = At::new(cols.start, n_taps, plane_elems);
        for lane in lanes.iter_mut().take(cols.len()) {
            let at = at.next(n_taps, plane_elems);
            // SAFETY: the caller's promise.
            unsafe {
                let a = _mm512_castsi256_si512(row(low, at));
                let b = halves[1].as_ref().map_or(_mm256_setzero_si256(), |high| row(high, at));
                *lane = _mm512_inserti64x4::<1>(a, b);
            }
        }
    }
    for (i, row) in transposed(lanes).into_iter().enumerate() {
        // SAFETY: `dst` is a block.
        unsafe { _mm512_storeu_si512(dst.as_mut_ptr().add(32 * i).cast(), row) };
    }
}

/// What one tap reads of one plane, lane by lane; lanes that are outside are zero.
/// # Safety
/// Lanes that are inside lie in `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn row(rows: &PanelRows, At { plane, tap }: At) -> __m256i {
    let Reach { delta, inside } = rows.reach[tap];
    let at = plane + delta;
    let first = rows.x.as_ptr().wrapping_offset(at);
    let lines = &rows.lines;
    // SAFETY: the caller's promise; masked lanes are not touched.
    unsafe {
        if lines.n_runs == 0 {
            return gathered(rows, at, inside);
        }
        let mut v = run(first.wrapping_offset(lines.at[0]), inside & lines.lanes[0], lines.step);
        for r in 1..lines.n_runs {
            let w = run(first.wrapping_offset(lines.at[r]), inside & lines.lanes[r], lines.step);
            v = _mm256_or_si256(v, w);
        }
        v
    }
}

/// The elements `src[step l]` whose bit is set, zero elsewhere.
/// # Safety
/// Those elements may be read; `step` is 1 or 2.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run(src: *const bf16, inside: u16, step: usize) -> __m256i {
    // SAFETY: the caller's promise; masked lanes are not touched.
    unsafe {
        if step == 1 {
            _mm256_maskz_loadu_epi16(inside, src.cast())
        } else {
            _mm512_cvtepi32_epi16(_mm512_maskz_loadu_epi16(spread(inside), src.cast()))
        }
    }
}

/// Bit `i` of `bits` at place `2 i`.
#[inline(always)]
pub(super) fn spread(bits: u16) -> u32 {
    let x = u32::from(bits);
    let x = (x | x << 8) & 0x00FF_00FF;
    let x = (x | x << 4) & 0x0F0F_0F0F;
    let x = (x | x << 2) & 0x3333_3333;
    (x | x << 1) & 0x5555_5555
}

/// The elements `x[at + rows.at[l]]` whose bit is set, zero elsewhere.
/// # Safety
/// Those elements lie in `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn gathered(rows: &PanelRows, at: isize, inside: u16) -> __m256i {
    let mut lanes = [bf16::ZERO; NR];
    let mut left = inside;
    while left != 0 {
        let l = left.trailing_zeros() as usize;
        // SAFETY: the caller's promise.
        lanes[l] = unsafe { *rows.x.as_ptr().offset(at + rows.at[l]) };
        left &= left - 1;
    }
    // SAFETY: an array of sixteen.
    unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) }
}

//! AVX-512: what lies under a window, where the lanes of a panel or two lie in up to two runs.

use super::{
    avx512::transposed,
    patches::{At, spread},
};
use crate::{
    conv::window::{Reach, Span},
    micro::{NR, STEP_BF16},
};
use half::bf16;
use std::{arch::x86_64::*, ops::Range};

/// Depth ahead of which a plane is fetched into the cache.
const AHEAD: usize = 8;

/// A source, and the distance between two of its planes.
type PlanesOf<'a, T> = (&'a [T], usize);

/// Packs panels of `f32` side by side into `dst`, one after the other.
/// # Safety
/// Lanes that are inside lie in the planes.
/// # Panics
/// If `dst` is too short.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn pack_f32(
    dst: &mut [f32],
    (x, plane_elems): PlanesOf<f32>,
    spans: &[Span<1>],
    depth: Range<usize>,
) {
    let (n_taps, n_depth) = (spans[0].reach[0].len(), depth.len());
    assert!(dst.len() >= spans.len() * n_depth * NR, "spans: panel length");
    let mut at = At::new(depth.start, n_taps, plane_elems);
    let ahead = (plane_elems * (AHEAD / n_taps).max(1)) as isize;
    for p in 0..n_depth {
        let at = at.next(n_taps, plane_elems);
        for (q, span) in spans.iter().enumerate() {
            if at.tap == 0 {
                fetch(x, at.plane + ahead + span.runs.at[0], span.runs.step * NR);
            }
            // SAFETY: the caller's promise; `dst` is long enough by the check.
            unsafe {
                let row = row_f32(x, span, at);
                _mm512_storeu_ps(dst.as_mut_ptr().add((q * n_depth + p) * NR), row);
            }
        }
    }
}

/// As `turn_bf16`, of one panel of `f32`: `dst[lane][col]`, for as many lanes as `dst` holds.
/// # Safety
/// Lanes that are inside lie in the planes.
/// # Panics
/// If there are more than 16 lanes or columns.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn turn_f32(
    dst: &mut [f32],
    (x, plane_elems): PlanesOf<f32>,
    span: &Span<1>,
    cols: Range<usize>,
) {
    assert!(dst.len() <= NR * NR && cols.len() <= NR, "spans: block length");
    let n_taps = span.reach[0].len();
    let mut at = At::new(cols.start, n_taps, plane_elems);
    let mut rows = [_mm512_setzero_si512(); NR];
    for row in rows.iter_mut().take(cols.len()) {
        // SAFETY: the caller's promise.
        *row = _mm512_castps_si512(unsafe { row_f32(x, span, at.next(n_taps, plane_elems)) });
    }
    for (dst, row) in dst.as_chunks_mut::<NR>().0.iter_mut().zip(transposed(rows)) {
        // SAFETY: an array of sixteen.
        unsafe { _mm512_storeu_si512(dst.as_mut_ptr().cast(), row) };
    }
}

/// Packs panels of `bf16` side by side into `dst`, one after the other, depths in pairs.
/// # Safety
/// Lanes that are inside lie in the planes.
/// # Panics
/// If `dst` is too short.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn pack_bf16(
    dst: &mut [bf16],
    (x, plane_elems): PlanesOf<bf16>,
    spans: &[Span<2>],
    depth: Range<usize>,
) {
    let n_taps = spans[0].reach[0].len();
    let n_panel = depth.len().next_multiple_of(STEP_BF16) * NR;
    let n_panels: usize = spans.iter().map(Span::n_panels).sum();
    assert!(dst.len() >= n_panels * n_panel, "spans: panel length");
    let (dst, zero) = (dst.as_mut_ptr(), _mm512_setzero_si512());
    let mut at = At::new(depth.start, n_taps, plane_elems);
    let ahead = (plane_elems * (AHEAD / n_taps).max(1)) as isize;
    // Lane by lane, one row after the other.
    let low = _mm512_add_epi16(
        _mm512_cvtepu8_epi16(_mm256_setr_epi8(
            0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13,
            13, 14, 14, 15, 15,
        )),
        _mm512_set1_epi32(32 << 16),
    );
    let high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for pair in 0..n_panel / (2 * NR) {
        let n = depth.len().saturating_sub(2 * pair);
        let first = if n > 0 { at.next(n_taps, plane_elems) } else { at };
        let second = if n > 1 { at.next(n_taps, plane_elems) } else { at };
        for (s, span) in spans.iter().enumerate() {
            if n > 1 && first.tap <= 1 {
                fetch(x, first.plane + ahead + span.runs.at[0], span.runs.step * STEP_BF16);
                fetch(x, second.plane + ahead + span.runs.at[0], span.runs.step * STEP_BF16);
            }
            // SAFETY: the caller's promise; `dst` is long enough by the check.
            unsafe {
                let a = if n > 0 { row_bf16(x, span, first) } else { zero };
                let b = if n > 1 { row_bf16(x, span, second) } else { zero };
                let dst = dst.add(2 * s * n_panel + pair * 2 * NR);
                _mm512_storeu_si512(dst.cast(), _mm512_permutex2var_epi16(a, low, b));
                if !span.reach[1].is_empty() {
                    let row = _mm512_permutex2var_epi16(a, high, b);
                    _mm512_storeu_si512(dst.add(n_panel).cast(), row);
                }
            }
        }
    }
}

/// As `turn_block` of [`crate::conv::narrow`].
/// # Safety
/// Lanes that are inside lie in the planes.
/// # Panics
/// If `dst` is no block or there are more than 16 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn turn_bf16(
    dst: &mut [bf16],
    (x, plane_elems): PlanesOf<bf16>,
    span: &Span<2>,
    cols: Range<usize>,
) {
    assert!(dst.len() == NR * STEP_BF16 && cols.len() <= NR, "spans: block length");
    let n_taps = span.reach[0].len();
    let mut at = At::new(cols.start, n_taps, plane_elems);
    let mut rows = [_mm512_setzero_si512(); NR];
    for row in rows.iter_mut().take(cols.len()) {
        // SAFETY: the caller's promise.
        *row = unsafe { row_bf16(x, span, at.next(n_taps, plane_elems)) };
    }
    for (i, row) in transposed(rows).into_iter().enumerate() {
        // SAFETY: `dst` is a block.
        unsafe { _mm512_storeu_si512(dst.as_mut_ptr().add(32 * i).cast(), row) };
    }
}

/// The lines of the cache that `n` elements from `at` on begin and end in.
#[inline(always)]
fn fetch<T>(x: &[T], at: isize, n: usize) {
    let first = x.as_ptr().wrapping_offset(at);
    // SAFETY: prefetching touches nothing.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(first.cast());
        _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(n - 1).cast());
    }
}

/// What one tap reads of one plane, lane by lane; lanes that are outside are zero.
/// # Safety
/// Lanes that are inside lie in `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn row_f32(x: &[f32], span: &Span<1>, at: At) -> __m512 {
    let Reach { delta, inside } = span.reach[0][at.tap];
    let (src, runs) = (x.as_ptr().wrapping_offset(at.plane + delta), &span.runs);
    let (one, two) = (inside & runs.first as u16, inside & !(runs.first as u16));
    // SAFETY: the caller's promise; masked lanes are not touched.
    unsafe {
        if runs.step == 1 {
            let row = _mm512_maskz_loadu_ps(one, src.wrapping_offset(runs.at[0]));
            if two == 0 {
                return row;
            }
            return _mm512_mask_loadu_ps(row, two, src.wrapping_offset(runs.at[1]));
        }
        let row = even_f32(src.wrapping_offset(runs.at[0]), one);
        if two == 0 {
            row
        } else {
            _mm512_or_ps(row, even_f32(src.wrapping_offset(runs.at[1]), two))
        }
    }
}

/// The elements `src[2 l]` whose bit is set, zero elsewhere.
/// # Safety
/// Those elements may be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn even_f32(src: *const f32, inside: u16) -> __m512 {
    let mask = spread(inside);
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    // SAFETY: the caller's promise; masked lanes are not touched.
    unsafe {
        let low = _mm512_maskz_loadu_ps(mask as u16, src);
        let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, src.wrapping_add(NR));
        _mm512_permutex2var_ps(low, even, high)
    }
}

/// As [`row_f32`], of two panels.
/// # Safety
/// As there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn row_bf16(x: &[bf16], span: &Span<2>, at: At) -> __m512i {
    let Reach { delta, inside } = span.reach[0][at.tap];
    let more = span.reach[1].get(at.tap).map_or(0, |reach| reach.inside);
    let inside = u32::from(inside) | u32::from(more) << 16;
    let (src, runs) = (x.as_ptr().wrapping_offset(at.plane + delta), &span.runs);
    let (one, two) = (inside & runs.first, inside & !runs.first);
    // SAFETY: the caller's promise; masked lanes are not touched.
    unsafe {
        if runs.step == 1 {
            let row = _mm512_maskz_loadu_epi16(one, src.wrapping_offset(runs.at[0]).cast());
            if two == 0 {
                return row;
            }
            return _mm512_mask_loadu_epi16(row, two, src.wrapping_offset(runs.at[1]).cast());
        }
        let row = even_bf16(src.wrapping_offset(runs.at[0]), one);
        if two == 0 {
            return row;
        }
        _mm512_or_si512(row, even_bf16(src.wrapping_offset(runs.at[1]), two))
    }
}

/// As [`even_f32`], of 32.
/// # Safety
/// As there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn even_bf16(src: *const bf16, inside: u32) -> __m512i {
    // SAFETY: the caller's promise; masked lanes are not touched.
    unsafe {
        let low = _mm512_maskz_loadu_epi16(spread(inside as u16), src.cast());
        let high = src.wrapping_add(STEP_BF16).cast();
        let high = _mm512_maskz_loadu_epi16(spread((inside >> 16) as u16), high);
        let (low, high) = (_mm512_cvtepi32_epi16(low), _mm512_cvtepi32_epi16(high));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }
}

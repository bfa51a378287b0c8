//! Vector instructions of x86-64. Here AVX2 with FMA and F16C, which every function needs.

use crate::{
    Element,
    conv::window::{Reach, Runs},
    element::same_type,
    isa::Isa,
    micro::{MR, NR, Place, by_panels, by_rows},
};
use half::{bf16, f16};
use std::arch::x86_64::*;

pub(crate) mod amx;
pub(crate) mod avx512;
pub(crate) mod patches;
pub(crate) mod spans;

/// Depth ahead of which panels are fetched into the cache.
const AHEAD: usize = 8;

/// As [`Isa::best`].
pub(crate) fn best() -> Isa {
    let has_avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let has_avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let best = [
        (Isa::Avx2, has_avx2),
        (Isa::Avx512, has_avx512),
        (Isa::Avx512Bf16, is_x86_feature_detected!("avx512bf16")),
        (Isa::Amx, amx::is_available()),
    ];
    // Each needs the ones before it.
    best.into_iter().take_while(|&(_, has)| has).last().map_or(Isa::Portable, |(isa, _)| isa)
}

/// As [`Packed::micro`](crate::micro::Packed::micro).
/// # Safety
/// As there, from [`Isa::Avx2`] on.
pub(crate) unsafe fn micro_f32(
    isa: Isa,
    k: usize,
    a: *const f32,
    b: *const f32,
    c: Place<f32>,
    n: (usize, usize),
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if isa >= Isa::Avx512 {
            return avx512::micro_f32(k, a, b, c, n, add);
        }
        by_panels(
            k,
            a,
            b,
            c,
            n,
            |a, b, (c, ld), rows| by_rows!(rows, M => micro_f32_avx2::<M>(k, a, b, c, ld, add)),
        );
    }
}

/// As [`Packed::micro`](crate::micro::Packed::micro).
/// # Safety
/// As there, from [`Isa::Avx2`] on.
pub(crate) unsafe fn micro_f64(
    _: Isa,
    k: usize,
    a: *const f64,
    b: *const f64,
    c: Place<f64>,
    n: (usize, usize),
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        by_panels(k, a, b, c, n, |a, b, (c, ld), rows| {
            for half in [0, NR / 2] {
                let (b, c) = (b.add(half), c.add(half));
                by_rows!(rows, M => micro_f64_avx2::<M>(k, a, b, c, ld, add));
            }
        });
    }
}

macro_rules! micro {
    ($name:ident, $t:ty, $lanes:expr, $zero:ident, $load:ident, $store:ident, $splat:ident, $fma:ident, $add:ident) => {
        /// # Safety
        /// As [`micro_f32`], for one panel of rows and two vectors of columns.
        #[inline]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name<const M: usize>(
            k: usize,
            mut a: *const $t,
            mut b: *const $t,
            c: *mut $t,
            ld: usize,
            add: bool,
        ) {
            let mut acc = [[$zero(); 2]; M];
            // SAFETY: the panels hold `k` rows, `c` holds `M` rows; prefetching touches nothing.
            unsafe {
                for i in 0..M {
                    _mm_prefetch::<_MM_HINT_T0>(c.wrapping_add(i * ld).cast());
                }
                for _ in 0..k {
                    _mm_prefetch::<_MM_HINT_T0>(a.wrapping_add(AHEAD * MR).cast());
                    let y = [$load(b), $load(b.add($lanes))];
                    for i in 0..M {
                        let x = $splat(&*a.add(i));
                        acc[i][0] = $fma(x, y[0], acc[i][0]);
                        acc[i][1] = $fma(x, y[1], acc[i][1]);
                    }
                    a = a.add(MR);
                    b = b.add(NR);
                }
                for (i, sums) in acc.iter().enumerate() {
                    for (j, &sum) in sums.iter().enumerate() {
                        let c = c.add(i * ld + j * $lanes);
                        $store(c, if add { $add($load(c), sum) } else { sum });
                    }
                }
            }
        }
    };
}
micro!(
    micro_f32_avx2,
    f32,
    8,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_broadcast_ss,
    _mm256_fmadd_ps,
    _mm256_add_ps
);
micro!(
    micro_f64_avx2,
    f64,
    4,
    _mm256_setzero_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_broadcast_sd,
    _mm256_fmadd_pd,
    _mm256_add_pd
);

/// Eight elements, widened.
/// # Safety
/// `src` is good for eight elements of `f32`, `bf16` or `f16`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load8<T: Element>(src: *const T) -> __m256 {
    // SAFETY: the caller's promise; `T` is the type that it is cast to.
    unsafe {
        if same_type::<T, f32>() {
            _mm256_loadu_ps(src.cast())
        } else if same_type::<T, bf16>() {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        } else {
            debug_assert!(same_type::<T, f16>());
            _mm256_cvtph_ps(_mm_loadu_si128(src.cast()))
        }
    }
}

/// Packs `n_panels` neighbouring panels of [`NR`] lanes at once, so that reads run along memory:
/// `dst[q][p][l] = src[q * NR + l + p * depth_stride]`.
/// # Safety
/// `src` is good for all places read and `dst` for `n_panels * depth * NR`; `T` is not `f64`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn pack_panels<T: Element>(
    dst: *mut f32,
    src: *const T,
    depth_stride: usize,
    depth: usize,
    n_panels: usize,
) {
    for p in 0..depth {
        for q in 0..n_panels {
            // SAFETY: the caller's promise.
            unsafe {
                let src = src.add(p * depth_stride + q * NR);
                let dst = dst.add((q * depth + p) * NR);
                _mm256_storeu_ps(dst, load8(src));
                _mm256_storeu_ps(dst.add(8), load8(src.add(8)));
            }
        }
    }
}

/// `dst[p][l] = src[l + p * depth_stride]` for [`MR`] lanes. Eight are read and written at each depth:
/// the last two run into the next one.
/// # Safety
/// `src` is good for `(depth - 1) * depth_stride + 8`, `dst` for `(depth - 1) * MR + 8`; `T` is not
/// `f64`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn pack_rows<T: Element>(
    dst: *mut f32,
    src: *const T,
    depth_stride: usize,
    depth: usize,
) {
    for p in 0..depth {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(dst.add(p * MR), load8(src.add(p * depth_stride))) };
    }
}

/// `dst[p][l] = src[l * lane_stride + p]` for eight depths and up to eight lanes: eight rows of eight are written,
/// `dst_stride` apart, lanes from `n_lanes` on being copies of others.
/// # Safety
/// `src` is good for `n_lanes` runs of eight and `dst` for `7 * dst_stride + 8`; `T` is not `f64`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn pack_square<T: Element>(
    dst: *mut f32,
    dst_stride: usize,
    src: *const T,
    lane_stride: usize,
    n_lanes: usize,
) {
    let mut rows = [_mm256_setzero_ps(); 8];
    for (l, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *row = unsafe { load8(src.add(l.min(n_lanes - 1) * lane_stride)) };
    }
    for (p, row) in transposed(rows).into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(dst.add(p * dst_stride), row) };
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn transposed(r: [__m256; 8]) -> [__m256; 8] {
    let mut pairs = r;
    for i in (0..8).step_by(2) {
        pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    let mut fours = r;
    for i in (0..8).step_by(4) {
        fours[i] = _mm256_shuffle_ps::<0x44>(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm256_shuffle_ps::<0xEE>(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm256_shuffle_ps::<0x44>(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm256_shuffle_ps::<0xEE>(pairs[i + 1], pairs[i + 3]);
    }
    let mut all = r;
    for i in 0..4 {
        all[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
        all[i + 4] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
    }
    all
}

/// `dst[i] = src[i]`; NaN stays NaN.
/// # Panics
/// If the lengths differ.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn widen_f16(src: &[f16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len(), "widen_f16: lengths differ");
    let (src, src_tail) = src.as_chunks::<8>();
    let (dst, dst_tail) = dst.as_chunks_mut::<8>();
    for (d, s) in dst.iter_mut().zip(src) {
        // SAFETY: both are arrays of eight.
        unsafe { _mm256_storeu_ps(d.as_mut_ptr(), load8(s.as_ptr())) };
    }
    for (d, s) in dst_tail.iter_mut().zip(src_tail) {
        *d = s.to_f32();
    }
}

/// `dst[i] = src[i]`, rounded to nearest, ties to even; NaN stays NaN.
/// # Panics
/// If the lengths differ.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn narrow_f16(dst: &mut [f16], src: &[f32]) {
    assert_eq!(src.len(), dst.len(), "narrow_f16: lengths differ");
    let (src, src_tail) = src.as_chunks::<8>();
    let (dst, dst_tail) = dst.as_chunks_mut::<8>();
    for (d, s) in dst.iter_mut().zip(src) {
        // SAFETY: both are arrays of eight.
        unsafe {
            let x = _mm256_loadu_ps(s.as_ptr());
            let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm_storeu_si128(d.as_mut_ptr().cast(), half);
        }
    }
    for (d, s) in dst_tail.iter_mut().zip(src_tail) {
        *d = f16::from_f32(*s);
    }
}

/// Bit `l` says whether `0 <= at[l] + delta < extent`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn inside(at: &[i32; NR], delta: i32, extent: i32) -> u16 {
    let (delta, extent) = (_mm256_set1_epi32(delta), _mm256_set1_epi32(extent));
    let bits = |at: *const i32| {
        // SAFETY: called with the two halves of an array of sixteen.
        let at = _mm256_add_epi32(unsafe { _mm256_loadu_si256(at.cast()) }, delta);
        let below = _mm256_cmpgt_epi32(extent, at);
        let inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_setzero_si256(), at), below);
        _mm256_movemask_ps(_mm256_castsi256_ps(inside)) as u16
    };
    bits(at.as_ptr()) | bits(at[8..].as_ptr()) << 8
}

/// `dst[q][p][l]`: for depth `p` the element of plane `p / taps` that tap `p % taps` reaches from lane
/// `l` of panel `q`, zero where that is outside.
/// # Safety
/// The lanes of each reach that are inside lie in `x` for all planes; `dst` holds a panel for each of
/// `runs`, `reach` all taps of each; `T` is not `f64`; all steps are 1 or all are 2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn pack_runs<T: Element>(
    dst: &mut [f32],
    x: &[T],
    runs: &[Runs],
    reach: &[Reach],
    plane_elems: usize,
    depth: std::ops::Range<usize>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match runs[0].step {
            1 => pack_steps::<T, 1>(dst, x, runs, reach, plane_elems, depth),
            _ => pack_steps::<T, 2>(dst, x, runs, reach, plane_elems, depth),
        }
    }
}

/// # Safety
/// As [`pack_runs`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pack_steps<T: Element, const STEP: usize>(
    dst: &mut [f32],
    x: &[T],
    runs: &[Runs],
    reach: &[Reach],
    plane_elems: usize,
    depth: std::ops::Range<usize>,
) {
    let (n_taps, n_depth) = (reach.len() / runs.len(), depth.len());
    assert!(dst.len() == runs.len() * n_depth * NR && n_taps > 0, "pack_runs: panel length");
    let (mut tap, dst) = (depth.start % n_taps, dst.as_mut_ptr());
    let mut plane = (depth.start / n_taps * plane_elems) as isize;
    // Planes lie far apart, so the processor does not see the next one coming.
    let ahead = (plane_elems * (AHEAD / n_taps).max(1)) as isize;
    for p in 0..n_depth {
        for (q, runs) in runs.iter().enumerate() {
            if tap == 0 {
                let next = x.as_ptr().wrapping_offset(plane + ahead + runs.at[0]);
                _mm_prefetch::<_MM_HINT_T0>(next.cast());
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(STEP * NR - 1).cast());
            }
            // SAFETY: the caller's promise; `dst` holds `n_depth` rows of NR for each panel.
            unsafe {
                let Reach { delta, inside } = *reach.get_unchecked(q * n_taps + tap);
                let at = plane + delta;
                let (one, two) = (inside & runs.first as u16, inside & !(runs.first as u16));
                let mut v = load_inside::<T, STEP>(x, at + runs.at[0], one);
                if two != 0 {
                    let w = load_inside::<T, STEP>(x, at + runs.at[1], two);
                    v = [_mm256_or_ps(v[0], w[0]), _mm256_or_ps(v[1], w[1])];
                }
                let dst = dst.add((q * n_depth + p) * NR);
                _mm256_storeu_ps(dst, v[0]);
                _mm256_storeu_ps(dst.add(8), v[1]);
            }
        }
        tap += 1;
        if tap == n_taps {
            (tap, plane) = (0, plane + plane_elems as isize);
        }
    }
}

/// The elements `at`, `at + STEP`, ... whose bit is set, zero elsewhere.
/// # Safety
/// Those elements lie in `x`; `T` is not `f64`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_inside<T: Element, const STEP: usize>(
    x: &[T],
    at: isize,
    inside: u16,
) -> [__m256; 2] {
    let first = x.as_ptr().wrapping_offset(at);
    // SAFETY: all places read lie in `x`, by the caller's promise or by the check; a masked load does
    // not touch the others.
    unsafe {
        if STEP == 1 && inside == u16::MAX {
            return [load8(first), load8(first.add(8))];
        }
        let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        let mask = |bits: __m256i| {
            _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(inside.into()), bits), bits)
        };
        let masks = [mask(bits), mask(_mm256_slli_epi32::<8>(bits))];
        if STEP == 1 && same_type::<T, f32>() {
            let first = first.cast::<f32>();
            return [
                _mm256_maskload_ps(first, masks[0]),
                _mm256_maskload_ps(first.wrapping_add(8), masks[1]),
            ];
        }
        if at < 0 || at as usize + STEP * NR > x.len() {
            return load_one_by_one(x, at, STEP, inside);
        }
        let [a, b] = masks.map(|m| _mm256_castsi256_ps(m));
        let halves = if STEP == 1 {
            [load8(first), load8(first.add(8))]
        } else {
            [even8(first), even8(first.add(STEP * 8))]
        };
        [_mm256_and_ps(halves[0], a), _mm256_and_ps(halves[1], b)]
    }
}

/// The even ones of sixteen elements.
/// # Safety
/// `src` is good for sixteen elements of `f32`, `bf16` or `f16`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn even8<T: Element>(src: *const T) -> __m256 {
    // SAFETY: the caller's promise.
    let (a, b) = unsafe { (load8(src), load8(src.add(8))) };
    let even = _mm256_castps_pd(_mm256_shuffle_ps::<0x88>(a, b));
    _mm256_castpd_ps(_mm256_permute4x64_pd::<0xD8>(even))
}

/// As [`load_inside`], at the edges of `x`.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_one_by_one<T: Element>(x: &[T], at: isize, step: usize, inside: u16) -> [__m256; 2] {
    let mut lanes = [T::default(); NR];
    for (l, lane) in lanes.iter_mut().enumerate() {
        if inside >> l & 1 == 1 {
            *lane = x[(at + (l * step) as isize) as usize];
        }
    }
    // SAFETY: an array of sixteen.
    unsafe { [load8(lanes.as_ptr()), load8(lanes.as_ptr().add(8))] }
}

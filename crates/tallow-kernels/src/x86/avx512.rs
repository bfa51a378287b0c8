//! AVX-512: products of `f32`; packing and products of `bf16`.
//!
//! Every function needs F, BW, DQ and VL, those of products and roundings of `bf16` BF16 too.

use super::patches::spread;
use crate::micro::{MR, MR_BF16, NR, Place, STEP_BF16, by_panels, by_rows};
use crate::optim::{CELL_SHIFT, FIRST_CELL, Map8, N_CELLS};
use half::bf16;
use std::arch::x86_64::*;

/// Depth ahead of which panels are fetched into the cache.
const AHEAD: usize = 8;

/// As [`Packed::micro`](crate::micro::Packed::micro), of `f32`.
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn micro_f32(
    k: usize,
    a: *const f32,
    b: *const f32,
    (c, ld): Place<f32>,
    (rows, n_cols): (usize, usize),
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if (rows, n_cols) == (2 * MR, 2) {
            return block_f32::<2, MR, 2>(k, a, b, c, ld, add);
        }
        for i in (0..rows).step_by(MR) {
            let (a, c) = (a.add(i * k), c.add(i * ld));
            let rows = MR.min(rows - i);
            if n_cols == 2 {
                by_rows!(rows, M => block_f32::<1, M, 2>(k, a, b, c, ld, add));
            } else {
                by_rows!(rows, M => block_f32::<1, M, 1>(k, a, b, c, ld, add));
            }
        }
    }
}

/// `M` rows of `H` panels, and `N` panels of columns.
/// # Safety
/// As [`micro_f32`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn block_f32<const H: usize, const M: usize, const N: usize>(
    k: usize,
    mut a: *const f32,
    mut b: *const f32,
    c: *mut f32,
    ld: usize,
    add: bool,
) {
    let mut acc = [[[_mm512_setzero_ps(); N]; M]; H];
    // SAFETY: the panels hold `k` rows, `c` holds `H M` rows; prefetching touches nothing.
    unsafe {
        for i in 0..H * M {
            for j in 0..N {
                _mm_prefetch::<_MM_HINT_ET0>(c.wrapping_add(i * ld + j * NR).cast());
            }
        }
        for _ in 0..k {
            _mm_prefetch::<_MM_HINT_T0>(a.wrapping_add(AHEAD * MR).cast());
            let mut y = [_mm512_setzero_ps(); N];
            for j in 0..N {
                y[j] = _mm512_loadu_ps(b.add(j * NR * k));
            }
            for h in 0..H {
                let a = a.add(h * MR * k);
                for i in 0..M {
                    let x = _mm512_set1_ps(*a.add(i));
                    for j in 0..N {
                        acc[h][i][j] = _mm512_fmadd_ps(x, y[j], acc[h][i][j]);
                    }
                }
            }
            a = a.add(MR);
            b = b.add(NR);
        }
        for h in 0..H {
            for i in 0..M {
                for j in 0..N {
                    let (c, sum) = (c.add((h * M + i) * ld + j * NR), acc[h][i][j]);
                    let sum = if add { _mm512_add_ps(_mm512_loadu_ps(c), sum) } else { sum };
                    _mm512_storeu_ps(c, sum);
                }
            }
        }
    }
}

/// As [`Packed::micro`](crate::micro::Packed::micro), of `bf16`.
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(crate) unsafe fn micro_bf16(
    k: usize,
    a: *const bf16,
    b: *const bf16,
    (c, ld): Place<f32>,
    (rows, n_cols): (usize, usize),
    add: bool,
) {
    const HALF: usize = MR_BF16 / 2;
    // SAFETY: the caller's promise.
    unsafe {
        by_panels(k, a, b, (c, ld), (rows, 1), |a, b, (c, ld), rows| {
            for i in (0..rows).step_by(HALF) {
                let (a, c) = (a.add(i * STEP_BF16), c.add(i * ld));
                let rows = HALF.min(rows - i);
                if n_cols == 2 {
                    block_bf16::<2>(k, a, b, c, ld, rows, add);
                } else {
                    block_bf16::<1>(k, a, b, c, ld, rows, add);
                }
            }
        });
    }
}

/// Up to eight rows of a panel, of which `rows` are stored, and `N` panels of columns.
/// # Safety
/// As [`micro_bf16`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn block_bf16<const N: usize>(
    k: usize,
    mut a: *const bf16,
    mut b: *const bf16,
    c: *mut f32,
    ld: usize,
    rows: usize,
    add: bool,
) {
    const M: usize = MR_BF16 / 2;
    let mut acc = [[_mm512_setzero_ps(); N]; M];
    // SAFETY: the panels hold `k` rows, `c` holds `rows` rows.
    unsafe {
        for _ in 0..k / STEP_BF16 {
            for pair in 0..STEP_BF16 / 2 {
                let mut y = [_mm512_setzero_si512(); N];
                for (j, y) in y.iter_mut().enumerate() {
                    *y = _mm512_loadu_si512(b.add(j * NR * k + pair * 2 * NR).cast());
                }
                for i in 0..M {
                    let x = a.add(i * STEP_BF16 + 2 * pair).cast::<i32>().read_unaligned();
                    let x = _mm512_set1_epi32(x);
                    for j in 0..N {
                        acc[i][j] = _mm512_dpbf16_ps(acc[i][j], as_bh(x), as_bh(y[j]));
                    }
                }
            }
            a = a.add(MR_BF16 * STEP_BF16);
            b = b.add(NR * STEP_BF16);
        }
        for (i, sums) in acc.iter().enumerate().take(rows) {
            for (j, &sum) in sums.iter().enumerate() {
                let c = c.add(i * ld + j * NR);
                let sum = if add { _mm512_add_ps(_mm512_loadu_ps(c), sum) } else { sum };
                _mm512_storeu_ps(c, sum);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn as_bh(x: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes that may be anything.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(x) }
}

/// `c[j] = s[j]` or `+=`, for sixteen.
/// # Safety
/// Both are good for sixteen.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn store16(c: *mut f32, s: *const f32, add: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        let sum = _mm512_loadu_ps(s);
        let sum = if add { _mm512_add_ps(_mm512_loadu_ps(c), sum) } else { sum };
        _mm512_storeu_ps(c, sum);
    }
}

/// As [`crate::cast::narrow_rows`]; results that are subnormal become zero.
/// # Safety
/// As there; `sums` is good for `n` rows and columns.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(crate) unsafe fn narrow_rows(
    (dst, dst_ld): Place<bf16>,
    (sums, ld): (*const f32, usize),
    (n_rows, n_cols): (usize, usize),
    add: bool,
) {
    for r in 0..n_rows {
        for j in (0..n_cols).step_by(32) {
            let n = (n_cols - j).min(32);
            // SAFETY: the caller's promise; masked lanes are not touched.
            unsafe {
                let (dst, sums) = (dst.add(r * dst_ld + j), sums.add(r * ld + j));
                let mask = lanes32(n);
                let mut low = _mm512_maskz_loadu_ps(mask as u16, sums);
                let mut high = _mm512_maskz_loadu_ps((mask >> 16) as u16, sums.wrapping_add(16));
                if add {
                    let was = _mm512_maskz_loadu_epi16(mask, dst.cast());
                    low = _mm512_add_ps(low, widened(_mm512_castsi512_si256(was)));
                    high = _mm512_add_ps(high, widened(_mm512_extracti64x4_epi64::<1>(was)));
                }
                let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_mask_storeu_epi16(dst.cast(), mask, both);
            }
        }
    }
}

/// `dst[2 j] = sums[j]` or `+=`, rounded; results that are subnormal become zero. What lies between
/// is not touched.
/// # Safety
/// `dst` is good for the `n` elements two apart, `sums` for `n`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(crate) unsafe fn narrow_apart(dst: *mut bf16, sums: *const f32, n: usize, add: bool) {
    for j in (0..n).step_by(NR) {
        let mask = ((1u32 << (n - j).min(NR)) - 1) as u16;
        let apart = spread(mask);
        // SAFETY: the caller's promise; masked lanes are not touched.
        unsafe {
            let dst = dst.add(2 * j).cast::<i16>();
            let mut sums = _mm512_maskz_loadu_ps(mask, sums.add(j));
            if add {
                let was = _mm512_slli_epi32::<16>(_mm512_maskz_loadu_epi16(apart, dst));
                sums = _mm512_add_ps(sums, _mm512_castsi512_ps(was));
            }
            let sums = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(sums));
            _mm512_mask_storeu_epi16(dst, apart, _mm512_cvtepu16_epi32(sums));
        }
    }
}

/// As [`narrow_apart`], of `f32`.
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn store_apart(dst: *mut f32, sums: *const f32, n: usize, add: bool) {
    const HALF: usize = NR / 2;
    for j in (0..n).step_by(HALF) {
        let mask = ((1u32 << (n - j).min(HALF)) - 1) as u8;
        let apart = spread(mask.into()) as u16;
        // SAFETY: the caller's promise; masked lanes are not touched.
        unsafe {
            let dst = dst.add(2 * j);
            let sums = _mm512_castps256_ps512(_mm256_maskz_loadu_ps(mask, sums.add(j)));
            let mut sums = _mm512_maskz_expand_ps(apart, sums);
            if add {
                sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(apart, dst));
            }
            _mm512_mask_storeu_ps(dst, apart, sums);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn widened(x: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
}

/// The first `n` of 32 lanes.
#[inline]
fn lanes32(n: usize) -> u32 {
    ((1u64 << n) - 1) as u32
}

/// The codes of `src / scale`, of what is not finite that of 0: [`Map8::code`] of sixteen at a time.
/// # Panics
/// If the lengths differ.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn codes8(codes: &mut [u8], src: &[f32], scale: f32, map: &Map8) {
    assert_eq!(codes.len(), src.len(), "codes8: lengths differ");
    let ([zero, n_negative, least], cells) = (map.steps(), map.cells());
    let all = |x: u32| _mm512_set1_epi32(x as i32);
    let (zero, n_negative, least) = (all(zero.into()), all(n_negative.into()), all(least.into()));
    let scale = _mm512_set1_ps(scale);
    for (codes, src) in codes.chunks_mut(NR).zip(src.chunks(NR)) {
        let mask = ((1u32 << src.len()) - 1) as u16;
        // SAFETY: masked lanes are not touched; every index is below the number of cells.
        unsafe {
            let x = _mm512_maskz_loadu_ps(mask, src.as_ptr());
            // Neither NaN nor an infinity.
            let finite = !_mm512_fpclass_ps_mask::<0x99>(x);
            let x = _mm512_maskz_div_ps(finite, x, scale);
            let bits = _mm512_and_si512(_mm512_castps_si512(x), all(i32::MAX as u32));
            let cell = _mm512_srli_epi32::<CELL_SHIFT>(bits);
            let cell = _mm512_sub_epi32(_mm512_max_epu32(cell, all(FIRST_CELL)), all(FIRST_CELL));
            let cell = _mm512_min_epu32(cell, all(N_CELLS as u32 - 1));
            let cell = _mm512_i32gather_epi32::<4>(cell, cells.as_ptr().cast());
            let last = _mm512_and_si512(bits, all(0xffff));
            let beyond = _mm512_cmpgt_epu32_mask(last, _mm512_srli_epi32::<8>(cell));
            let steps = _mm512_and_si512(cell, all(0xff));
            let steps = _mm512_mask_add_epi32(steps, beyond, steps, all(1));
            let positive = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_setzero_ps());
            let negative = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_setzero_ps());
            let up = _mm512_mask_max_epu32(steps, positive, steps, least);
            let code = _mm512_add_epi32(zero, up);
            let down = _mm512_min_epu32(steps, n_negative);
            let code = _mm512_mask_sub_epi32(code, negative, zero, down);
            _mm512_mask_cvtepi32_storeu_epi8(codes.as_mut_ptr().cast(), mask, code);
        }
    }
}

/// Which of an operand's strides is 1.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Along {
    /// Depths of one lane lie side by side.
    Depth,
    /// Lanes of one depth lie side by side.
    Lanes,
}

/// A block of 32 depths of 16 lanes, `[lane][32]` for a left operand, `[p / 2][lane][2]` for a right
/// one. `stride` is the distance between lanes, or between depths, that are not side by side. Missing
/// lanes and depths are zero.
/// # Safety
/// `src` is good for the `n_lanes` and `n_depth` that are there, `dst` for a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn pack_block<const LEFT: bool>(
    dst: *mut bf16,
    src: *const bf16,
    along: Along,
    stride: usize,
    n_lanes: usize,
    n_depth: usize,
) {
    let mut rows = [_mm512_setzero_si512(); 16];
    // SAFETY: the caller's promise; lanes and depths that are missing are not touched.
    unsafe {
        match along {
            Along::Depth => {
                let mask = lanes32(n_depth);
                for (l, row) in rows.iter_mut().enumerate().take(n_lanes) {
                    *row = _mm512_maskz_loadu_epi16(mask, src.add(l * stride).cast());
                }
            }
            Along::Lanes => {
                let mask = lanes32(n_lanes) as u16;
                for (p, row) in rows.iter_mut().enumerate().take(n_depth.div_ceil(2)) {
                    let first = src.add(2 * p * stride).cast();
                    let a = _mm256_maskz_loadu_epi16(mask, first);
                    let mask = if 2 * p + 1 < n_depth { mask } else { 0 };
                    let b = _mm256_maskz_loadu_epi16(mask, first.wrapping_add(stride));
                    *row = pairs(a, b);
                }
            }
        }
        if LEFT != (along == Along::Depth) {
            rows = transposed(rows);
        }
        for (i, row) in rows.into_iter().enumerate() {
            _mm512_storeu_si512(dst.add(32 * i).cast(), row);
        }
    }
}

/// `a[0], b[0], a[1], b[1], ...`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn pairs(a: __m256i, b: __m256i) -> __m512i {
    let (a, b) = (_mm512_cvtepu16_epi32(a), _mm512_cvtepu16_epi32(b));
    _mm512_or_si512(a, _mm512_slli_epi32::<16>(b))
}

/// Sixteen rows of sixteen, turned over.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn transposed(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut t = r;
    for i in (0..16).step_by(2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    let mut u = t;
    for i in (0..16).step_by(4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // Quarters of u[4 g + c] are rows 4 g of columns c, c + 4, c + 8, c + 12.
    let mut v = u;
    for g in (0..16).step_by(8) {
        for c in 0..4 {
            v[g + c] = _mm512_shuffle_i32x4::<0x88>(u[g + c], u[g + 4 + c]);
            v[g + 4 + c] = _mm512_shuffle_i32x4::<0xDD>(u[g + c], u[g + 4 + c]);
        }
    }
    let mut w = v;
    for c in 0..4 {
        w[c] = _mm512_shuffle_i32x4::<0x88>(v[c], v[8 + c]);
        w[c + 4] = _mm512_shuffle_i32x4::<0x88>(v[4 + c], v[12 + c]);
        w[c + 8] = _mm512_shuffle_i32x4::<0xDD>(v[c], v[8 + c]);
        w[c + 12] = _mm512_shuffle_i32x4::<0xDD>(v[4 + c], v[12 + c]);
    }
    w
}

//! Casts between element types, each rounding once.

use crate::element::{as_type, as_type_mut};
#[cfg(target_arch = "x86_64")]
use crate::isa::Isa;
use crate::{Element, Real, isa::vectorized, par};

/// `dst[i] = src[i]`, rounded to nearest, ties to even; NaN stays NaN, overflow becomes infinity.
///
/// One rounding whatever the pair: `f64` to `bf16` or `f16` does not round at `f32` on its way.
///
/// *Scratch:* none.
/// # Panics
/// If the lengths differ.
pub fn cast<S: Element, D: Element>(dst: &mut [D], src: &[S]) {
    assert_eq!(dst.len(), src.len(), "cast: dst and src differ in length");
    // An f32 source is exact in either accumulator, so only f64 sources need `round`.
    let narrow_source = size_of::<S::Acc>() < size_of::<f64>();
    par::elems(
        dst,
        #[inline(always)]
        |start, cut| {
            let src = &src[start..][..cut.len()];
            if narrow_source {
                for (d, s) in cut.iter_mut().zip(src) {
                    *d = D::narrow(D::Acc::of(s.widen().f64()));
                }
            } else {
                for (d, s) in cut.iter_mut().zip(src) {
                    *d = round(s.widen().f64());
                }
            }
        },
    );
}

/// Rounds `x` once, to nearest, ties to even.
pub(crate) fn round<D: Element>(x: f64) -> D {
    if is_own_acc::<D>() {
        D::narrow(D::Acc::of(x))
    } else {
        D::narrow(D::Acc::of(f64::from(to_odd_f32(x))))
    }
}

/// Whether `T` is `f32` or `f64`, which are their own accumulators.
pub(crate) fn is_own_acc<T: Element>() -> bool {
    T::as_acc(&[]).is_some()
}

/// `x` rounded to `f32` *to odd*: an inexact result takes the neighbour whose last bit is 1.
///
/// The odd bit remembers on which side of a tie `x` lay, so a second rounding, to a format with at
/// least two bits fewer, gives what one rounding of `x` would (Boldo and Melquiond 2008,
/// "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd").
fn to_odd_f32(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) == x || x.is_nan() || x.is_infinite() || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    // Neighbouring floats of one sign have neighbouring bits, also across infinity and zero.
    let grew = f64::from(nearest).abs() > x.abs();
    f32::from_bits(if grew { nearest.to_bits() - 1 } else { nearest.to_bits() + 1 })
}

/// `src` as operands `O` of a product, which are `S` or its accumulator type: itself, or widened in
/// `scratch`.
pub(crate) fn operand<'a, S: Element, O: Element>(
    src: &'a [S],
    scratch: &'a mut Vec<O>,
) -> &'a [O] {
    if let Some(same) = as_type::<S, O>(src) {
        return same;
    }
    scratch.resize(src.len(), O::default());
    let wide = as_type_mut::<O, S::Acc>(scratch).expect("an operand is S or its accumulator type");
    widen_into(wide, src);
    scratch
}

/// Sums as operands `O` of a product: themselves, or rounded into `scratch`. On the caller's thread.
pub(crate) fn sums_operand<'a, O: Element>(src: &'a [O::Acc], scratch: &'a mut Vec<O>) -> &'a [O] {
    if let Some(same) = as_type::<O::Acc, O>(src) {
        return same;
    }
    scratch.resize(src.len(), O::default());
    narrow_into(scratch, src);
    scratch
}

/// `dst[i] = src[i]`, exact. On the caller's thread.
/// # Panics
/// If the lengths differ.
pub(crate) fn widen_into<T: Element>(dst: &mut [T::Acc], src: &[T]) {
    assert_eq!(src.len(), dst.len(), "widen_into: lengths differ");
    #[cfg(target_arch = "x86_64")]
    if Isa::current() >= Isa::Avx2
        && let (Some(src), Some(dst)) = (as_type(src), as_type_mut(dst))
    {
        // SAFETY: the processor has AVX2.
        return unsafe { crate::x86::widen_f16(src, dst) };
    }
    vectorized(
        #[inline(always)]
        || dst.iter_mut().zip(src).for_each(|(d, s)| *d = s.widen()),
    );
}

/// `dst[i] = src[i]`, rounded once. On the caller's thread.
/// # Panics
/// If the lengths differ.
pub(crate) fn narrow_into<T: Element>(dst: &mut [T], src: &[T::Acc]) {
    assert_eq!(dst.len(), src.len(), "narrow_into: dst and src differ in length");
    #[cfg(target_arch = "x86_64")]
    if Isa::current() >= Isa::Avx2
        && let (Some(src), Some(dst)) = (as_type(src), as_type_mut(dst))
    {
        // SAFETY: the processor has AVX2.
        return unsafe { crate::x86::narrow_f16(dst, src) };
    }
    vectorized(
        #[inline(always)]
        || dst.iter_mut().zip(src).for_each(|(d, s)| *d = T::narrow(*s)),
    );
}

/// Rows of sums rounded once: `dst[i][j] = sums[i][j]`, or `+=`; each with its distance between rows.
/// # Safety
/// `dst` is good for `n` rows and columns, and nothing else reaches them meanwhile.
/// # Panics
/// If `sums` is too short.
pub(crate) unsafe fn narrow_rows<T: Element>(
    (dst, dst_ld): (*mut T, usize),
    (sums, ld): (&[T::Acc], usize),
    (n_rows, n_cols): (usize, usize),
    add: bool,
) {
    #[cfg(target_arch = "x86_64")]
    if Isa::current() >= Isa::Avx512Bf16
        && let Some(sums) = as_type::<T::Acc, f32>(sums)
        && crate::element::same_type::<T, half::bf16>()
    {
        assert!(n_rows == 0 || (n_rows - 1) * ld + n_cols <= sums.len(), "narrow_rows: sums");
        let sums = (sums.as_ptr(), ld);
        // SAFETY: the processor has the instructions, `sums` is long enough, the rest is the caller's
        // promise.
        return unsafe {
            crate::x86::avx512::narrow_rows((dst.cast(), dst_ld), sums, (n_rows, n_cols), add)
        };
    }
    for r in 0..n_rows {
        let sums = &sums[r * ld..][..n_cols];
        // SAFETY: the caller's promise.
        let dst = unsafe { std::slice::from_raw_parts_mut(dst.add(r * dst_ld), n_cols) };
        if add {
            vectorized(
                #[inline(always)]
                || dst.iter_mut().zip(sums).for_each(|(d, &s)| *d = T::narrow(d.widen() + s)),
            );
        } else {
            narrow_into(dst, sums);
        }
    }
}

/// `dst[j * step] = sums[j]`, rounded once, or `+=`.
/// # Safety
/// `dst` is good for those elements, and nothing else reaches them meanwhile.
pub(crate) unsafe fn narrow_apart<T: Element>(
    dst: *mut T,
    step: usize,
    sums: &[T::Acc],
    add: bool,
) {
    #[cfg(target_arch = "x86_64")]
    if step == 2
        && let Some(sums) = as_type::<T::Acc, f32>(sums)
    {
        use crate::element::same_type;
        let (src, n, isa) = (sums.as_ptr(), sums.len(), Isa::current());
        // SAFETY: the processor has the instructions; the rest is the caller's promise.
        unsafe {
            if isa >= Isa::Avx512 && same_type::<T, f32>() {
                return crate::x86::avx512::store_apart(dst.cast(), src, n, add);
            }
            if isa >= Isa::Avx512Bf16 && same_type::<T, half::bf16>() {
                return crate::x86::avx512::narrow_apart(dst.cast(), src, n, add);
            }
        }
    }
    for (j, &sum) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let dst = dst.add(j * step);
            *dst = T::narrow(if add { (*dst).widen() + sum } else { sum });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::to_odd_f32;

    #[test]
    fn to_odd_keeps_exact_values_and_the_side_of_a_tie() {
        let ulp = f64::from(f32::EPSILON);
        let odd = f32::from_bits(1.0f32.to_bits() + 1);
        for (x, want) in [
            (1.0, 1.0),
            (1.0 + 0.01 * ulp, odd),
            (1.0 + 0.99 * ulp, odd),
            (1.0 + 1.5 * ulp, odd),
            (-1.0 - 0.01 * ulp, -odd),
            (1e300, f32::MAX),
            (f64::INFINITY, f32::INFINITY),
            (1e-300, f32::from_bits(1)),
            (0.0, 0.0),
        ] {
            assert_eq!(to_odd_f32(x).to_bits(), want.to_bits(), "{x:e}");
        }
        assert!(to_odd_f32(f64::NAN).is_nan());
    }
}

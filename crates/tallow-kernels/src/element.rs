//! The number types that kernels store and the wider ones they add up in.

use crate::pack::Packs;
use half::{bf16, f16};
use num_traits::{Float, NumAssign};

/// `unsafe` code relies on what these traits promise, so nobody else may implement them.
mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// What arithmetic is done in: `f32` or `f64`.
pub trait Real: Element<Acc = Self> + Float + NumAssign + std::iter::Sum + 'static {
    /// The error function, for the exact GELU.
    fn erf(self) -> Self;
    /// The exponential, without a branch, so that loops of it vectorise; `f32` to within 2 ulp.
    fn quick_exp(self) -> Self;
    /// Rounds once from `f64`.
    fn of(x: f64) -> Self;
    /// Exact.
    fn f64(self) -> f64;
}

/// What tensors are stored in: `f32`, `f64`, `bf16`, `f16`.
///
/// Kernels read elements, widen them to [`Element::Acc`], and round once when they store. Sealed.
#[allow(private_bounds)] // sealed
pub trait Element:
    sealed::Sealed + Copy + Default + PartialOrd + PartialEq + std::fmt::Debug + Send + Sync + 'static
{
    /// `f64` for `f64`, else `f32`.
    type Acc: Real + Packs<Self>;
    /// What products may pack instead of the accumulator type, with the instructions for it.
    #[doc(hidden)]
    type Narrow: Packs<Self>;
    /// Exact.
    fn widen(self) -> Self::Acc;
    /// Rounds to nearest, ties to even; NaN stays NaN.
    fn narrow(x: Self::Acc) -> Self;

    /// The slice as its accumulator type where the two are the same type, so that no copy is made.
    fn as_acc(x: &[Self]) -> Option<&[Self::Acc]>;
    /// As [`Element::as_acc`], mutable.
    fn as_acc_mut(x: &mut [Self]) -> Option<&mut [Self::Acc]>;
}

macro_rules! real {
    ($t:ty, $erf:path, $exp:path) => {
        impl Real for $t {
            #[inline(always)]
            fn erf(self) -> Self {
                $erf(self)
            }
            #[inline(always)]
            fn quick_exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn of(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn f64(self) -> f64 {
                self as f64
            }
        }
        impl Element for $t {
            type Acc = $t;
            type Narrow = $t;
            #[inline(always)]
            fn widen(self) -> $t {
                self
            }
            #[inline(always)]
            fn narrow(x: $t) -> $t {
                x
            }
            fn as_acc(x: &[$t]) -> Option<&[$t]> {
                Some(x)
            }
            fn as_acc_mut(x: &mut [$t]) -> Option<&mut [$t]> {
                Some(x)
            }
        }
    };
}
real!(f32, libm::erff, exp_f32);
real!(f64, libm::erf, f64::exp);

/// `e^x = 2^n e^r` with `n` the integer nearest `x / ln 2`, `e^r` by the polynomial of Cephes' `expf`.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    // Adding it rounds to an integer, which then stands in the last bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the product of the first with any `n` here is exact.
    const LN_2: [f32; 2] = [0.693_145_75, 1.428_606_8e-6];
    const P: [f32; 6] =
        [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5];
    // Beyond these the result is infinite or zero anyway. NaN passes.
    let x = if x > 130.0 { 130.0 } else { x };
    let x = if x < -130.0 { -130.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2[0]) - n * LN_2[1];
    let p = P[1..].iter().fold(P[0], |p, c| p * r + c);
    let y = (p * (r * r) + r) + 1.0;
    // Two factors, for 2^n itself may be no normal number.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    y * power(n >> 1) * power(n.wrapping_sub(n >> 1))
}

macro_rules! half {
    ($t:ty, $packed:ty, $widen:path, $narrow:path) => {
        impl Element for $t {
            type Acc = f32;
            type Narrow = $packed;
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(x: f32) -> $t {
                $narrow(x)
            }
            fn as_acc(_: &[$t]) -> Option<&[f32]> {
                None
            }
            fn as_acc_mut(_: &mut [$t]) -> Option<&mut [f32]> {
                None
            }
        }
    };
}
half!(bf16, bf16, widen_bf16, narrow_bf16);
half!(f16, f32, f16::to_f32, f16::from_f32);

/// Without a branch, so that loops of it vectorise.
#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Nearest, ties to even, without a branch. NaN keeps its sign and upper bits, and becomes quiet.
#[inline(always)]
fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { nan } else { rounded } as u16)
}

/// Whether both are one type.
pub(crate) fn same_type<T: 'static, U: 'static>() -> bool {
    std::any::TypeId::of::<T>() == std::any::TypeId::of::<U>()
}

/// `x` as what it is, where `T` is `U`.
pub(crate) fn as_type<T: 'static, U: 'static>(x: &[T]) -> Option<&[U]> {
    // SAFETY: the two are one type.
    same_type::<T, U>().then(|| unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) })
}

/// As [`as_type`], mutable.
pub(crate) fn as_type_mut<T: 'static, U: 'static>(x: &mut [T]) -> Option<&mut [U]> {
    let (first, n) = (x.as_mut_ptr().cast(), x.len());
    // SAFETY: the two are one type.
    same_type::<T, U>().then(|| unsafe { std::slice::from_raw_parts_mut(first, n) })
}

#[cfg(test)]
mod tests {
    use super::Real;

    #[test]
    fn quick_exp_is_within_two_ulp() {
        let (mut worst, mut x) = (0.0f64, -104.0f32);
        while x < 88.8 {
            let (got, want) = (f64::from(x.quick_exp()), f64::from(x).exp());
            let ulp = f64::from((want as f32).max(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON);
            worst = worst.max((got - want).abs() / ulp);
            x += 0.000_37;
        }
        assert!(worst <= 2.0, "{worst} ulp");
    }

    #[test]
    fn quick_exp_keeps_the_special_values() {
        for (x, want) in [
            (0.0f32, 1.0f32),
            (-0.0, 1.0),
            (f32::INFINITY, f32::INFINITY),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, 0.0),
            (-110.0, 0.0),
            (f32::from_bits(1), 1.0),
        ] {
            assert_eq!(x.quick_exp(), want, "{x:e}");
        }
        assert!(f32::NAN.quick_exp().is_nan());
        let tiny = (-100f32).quick_exp();
        assert!(tiny > 0.0 && tiny < f32::MIN_POSITIVE, "{tiny:e}");
    }
}

//! The number types that kernels store and the wider ones they add up in.

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
    /// Rounds once from `f64`.
    fn of(x: f64) -> Self;
    /// Exact.
    fn f64(self) -> f64;
}

/// What tensors are stored in: `f32`, `f64`, `bf16`, `f16`.
///
/// Kernels read elements, widen them to [`Element::Acc`], and round once when they store. Sealed.
pub trait Element:
    sealed::Sealed + Copy + Default + PartialOrd + PartialEq + std::fmt::Debug + Send + Sync + 'static
{
    /// `f64` for `f64`, else `f32`.
    type Acc: Real;
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
    ($t:ty, $erf:path) => {
        impl Real for $t {
            #[inline(always)]
            fn erf(self) -> Self {
                $erf(self)
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
real!(f32, libm::erff);
real!(f64, libm::erf);

macro_rules! half {
    ($t:ty) => {
        impl Element for $t {
            type Acc = f32;
            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(x: f32) -> $t {
                <$t>::from_f32(x)
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
half!(bf16);
half!(f16);

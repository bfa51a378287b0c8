//! Which vector instructions run: detected once, and limited from outside only to test and measure.

use std::sync::atomic::{AtomicU8, Ordering};

/// A set of vector instructions. Later ones include earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What the target guarantees: SSE2 on x86-64, NEON on aarch64.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
}

/// No choice has been made yet.
const UNKNOWN: u8 = u8::MAX;
static CHOSEN: AtomicU8 = AtomicU8::new(UNKNOWN);

impl Isa {
    /// The best that this processor has.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            return Self::Avx2;
        }
        Self::Portable
    }

    /// What kernels use: the best, unless [`Isa::limit`] asked for less.
    #[inline]
    pub fn current() -> Self {
        match CHOSEN.load(Ordering::Relaxed) {
            0 => Self::Portable,
            1 => Self::Avx2,
            _ => Self::choose(Self::best()),
        }
    }

    /// Makes all kernels of this process use `isa`, or the best there is where that is less. For
    /// tests and measurements: sums differ between instruction sets by the rounding of fused
    /// multiply-adds.
    pub fn limit(isa: Self) {
        Self::choose(isa.min(Self::best()));
    }

    fn choose(isa: Self) -> Self {
        CHOSEN.store(isa as u8, Ordering::Relaxed);
        isa
    }
}

/// Runs `f` compiled for the current instruction set. Loops in `f` then vectorise as wide as that
/// allows; their results do not depend on it, for a multiply and an add are never contracted.
#[inline(always)]
pub(crate) fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    match Isa::current() {
        Isa::Portable => f(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `current` is `Avx2` only where the processor has it.
        Isa::Avx2 => unsafe { with_avx2(f) },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 => f(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

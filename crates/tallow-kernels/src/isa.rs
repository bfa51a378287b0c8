//! Which vector instructions run: detected once, and limited from outside only to test and measure.

use std::sync::atomic::{AtomicU8, Ordering};

/// A set of vector instructions. Later ones include earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What the target guarantees: SSE2 on x86-64, NEON on aarch64.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 BF16: dot products of pairs of `bf16`, added up in `f32`. Products of `bf16` then
    /// take subnormal operands and sums for zero.
    Avx512Bf16,
    /// AMX with BF16: products of tiles of 16 x 32 `bf16`. Subnormals as above.
    Amx,
}

/// All sets, each at the place of its number.
const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];
/// No choice has been made yet.
const UNKNOWN: u8 = u8::MAX;
static CHOSEN: AtomicU8 = AtomicU8::new(UNKNOWN);

impl Isa {
    /// The best that this processor has, and that the system lets this process use.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        return crate::x86::best();
        #[cfg(not(target_arch = "x86_64"))]
        Self::Portable
    }

    /// All that this processor has, the least first.
    pub fn available() -> &'static [Self] {
        &ALL[..=Self::best() as usize]
    }

    /// What kernels use: the best, unless [`Isa::limit`] asked for less.
    #[inline]
    pub fn current() -> Self {
        match ALL.get(usize::from(CHOSEN.load(Ordering::Relaxed))) {
            Some(&isa) => isa,
            None => Self::choose(Self::best()),
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
///
/// Closures handed to it, and to the loops that call it, are marked `#[inline(always)]`: one that stays
/// a function of its own is compiled without the instruction set.
#[inline(always)]
pub(crate) fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    match Isa::current() {
        Isa::Portable => f(),
        // SAFETY: `current` is at least `Avx2` only where the processor has it.
        Isa::Avx2 => unsafe { with_avx2(f) },
        // SAFETY: as above, `Avx512`.
        _ => unsafe { with_avx512(f) },
    }
    #[cfg(not(target_arch = "x86_64"))]
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

//! What bounds a kernel on this machine: multiply-adds that touch no memory, and a copy.

use crate::work::{Precision, Work};
use rayon::prelude::*;
use std::hint::black_box;

/// Repetitions of a peak loop in one run: some milliseconds.
const TURNS: u64 = 100_000;
/// Bytes that a thread copies at a time.
const COPY_BYTES: usize = 1 << 20;

/// The fastest multiply-adds that the processor has for a precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peak {
    /// A multiply and an add of the target's own vectors.
    Portable,
    /// Fused, 8 lanes.
    Avx2,
    /// Fused, 16 lanes.
    Avx512,
    /// Pairs of bf16 into 16 lanes of f32.
    Avx512Bf16,
    /// Tiles of 16 x 32 bf16 into 16 x 16 f32.
    AmxBf16,
}

impl Peak {
    /// The best for `precision`; narrow numbers that have no instructions of their own are
    /// multiplied as f32.
    pub fn of(precision: Precision) -> Self {
        match precision {
            #[cfg(target_arch = "x86_64")]
            Precision::Bf16 if x86::has_amx() => Self::AmxBf16,
            #[cfg(target_arch = "x86_64")]
            Precision::Bf16 if is_x86_feature_detected!("avx512bf16") => Self::Avx512Bf16,
            #[cfg(target_arch = "x86_64")]
            _ if is_x86_feature_detected!("avx512f") => Self::Avx512,
            #[cfg(target_arch = "x86_64")]
            _ if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") => Self::Avx2,
            _ => Self::Portable,
        }
    }

    /// Floating-point operations of one turn on one thread.
    fn flops(self) -> u64 {
        match self {
            Self::Portable => 2 * 32,
            Self::Avx2 => 2 * 8 * 12,
            Self::Avx512 => 2 * 16 * 24,
            Self::Avx512Bf16 => 2 * 32 * 24,
            Self::AmxBf16 => 2 * 16 * 16 * 32 * 4,
        }
    }

    /// Floating-point operations of one run on all threads.
    pub fn run_flops(self) -> u64 {
        self.flops() * TURNS * rayon::current_num_threads() as u64
    }
}

impl Work for Peak {
    fn run(&mut self) -> Result<(), String> {
        let peak = *self;
        rayon::broadcast(|_| match peak {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `of` gives these only where the processor has them.
            Self::Avx2 => black_box(unsafe { x86::avx2(TURNS) }),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx512 => black_box(unsafe { x86::avx512(TURNS) }),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx512Bf16 => black_box(unsafe { x86::avx512_bf16(TURNS) }),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above, and the system lets this process use tiles.
            Self::AmxBf16 => black_box(unsafe { x86::amx_bf16(TURNS) }),
            _ => black_box(portable(TURNS)),
        });
        Ok(())
    }

    fn samples(&self) -> Vec<f64> {
        Vec::new()
    }
}

fn portable(turns: u64) -> f32 {
    let mut sums: [f32; 32] = black_box([0.0; 32]);
    let [a, b] = black_box([0.5f32, 1e-3]);
    for _ in 0..turns {
        sums.iter_mut().for_each(|s| *s = *s * a + b);
    }
    sums.iter().sum()
}

/// A copy between two arrays that are shared out over all threads.
pub struct Stream {
    src: Vec<u8>,
    dst: Vec<u8>,
}

impl Stream {
    /// One that reads and writes `moved_bytes` in all.
    pub fn new(moved_bytes: u64) -> Self {
        let n = (moved_bytes / 2).max(1) as usize;
        Self { src: vec![1; n], dst: vec![2; n] }
    }
}

impl Work for Stream {
    fn run(&mut self) -> Result<(), String> {
        let cuts = self.dst.par_chunks_mut(COPY_BYTES).zip(self.src.par_chunks(COPY_BYTES));
        cuts.for_each(|(dst, src)| dst.copy_from_slice(src));
        Ok(())
    }

    fn samples(&self) -> Vec<f64> {
        Vec::new()
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::black_box;
    use std::arch::{asm, x86_64::*};

    /// 12 chains of fused multiply-adds.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2(turns: u64) -> f32 {
        let [a, b] = black_box([_mm256_set1_ps(1e-3); 2]);
        let mut sums: [__m256; 12] = black_box([_mm256_setzero_ps(); 12]);
        for _ in 0..turns {
            sums.iter_mut().for_each(|s| *s = _mm256_fmadd_ps(a, b, *s));
        }
        _mm256_cvtss_f32(sums.into_iter().fold(_mm256_setzero_ps(), |x, y| _mm256_add_ps(x, y)))
    }

    /// 24 chains of fused multiply-adds.
    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(turns: u64) -> f32 {
        let [a, b] = black_box([_mm512_set1_ps(1e-3); 2]);
        let mut sums: [__m512; 24] = black_box([_mm512_setzero_ps(); 24]);
        for _ in 0..turns {
            sums.iter_mut().for_each(|s| *s = _mm512_fmadd_ps(a, b, *s));
        }
        sum(sums)
    }

    /// 24 chains of sums of pairs.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn avx512_bf16(turns: u64) -> f32 {
        let [a, b] = black_box([_mm512_cvtne2ps_pbh(_mm512_set1_ps(1e-3), _mm512_set1_ps(1.0)); 2]);
        let mut sums: [__m512; 24] = black_box([_mm512_setzero_ps(); 24]);
        for _ in 0..turns {
            sums.iter_mut().for_each(|s| *s = _mm512_dpbf16_ps(*s, a, b));
        }
        sum(sums)
    }

    #[target_feature(enable = "avx512f")]
    fn sum(sums: [__m512; 24]) -> f32 {
        _mm512_reduce_add_ps(sums.into_iter().fold(_mm512_setzero_ps(), |x, y| _mm512_add_ps(x, y)))
    }

    /// Whether the processor has tiles of bf16 and the system lets this process use them.
    pub(super) fn has_amx() -> bool {
        const TILE: u32 = 1 << 24;
        const BF16: u32 = 1 << 22;
        let has_leaf = __cpuid(0).eax >= 7;
        has_leaf && __cpuid_count(7, 0).edx & (TILE | BF16) == TILE | BF16 && may_use_tiles()
    }

    /// Asks Linux for the tiles' state: `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILE_DATA)`.
    #[cfg(target_os = "linux")]
    fn may_use_tiles() -> bool {
        let mut result: u64 = 158;
        // SAFETY: the call changes nothing but what this process may use.
        unsafe {
            asm!(
                "syscall", inlateout("rax") result, in("rdi") 0x1023, in("rsi") 18,
                lateout("rcx") _, lateout("r11") _, options(nostack),
            );
        }
        result == 0
    }

    #[cfg(not(target_os = "linux"))]
    fn may_use_tiles() -> bool {
        false
    }

    /// Shapes of the eight tiles: 16 rows of 64 bytes each.
    #[repr(C, align(64))]
    struct TileShapes([u8; 64]);

    /// Four chains of tile products.
    /// # Safety
    /// [`has_amx`] must have said yes.
    pub(super) unsafe fn amx_bf16(turns: u64) -> f32 {
        let mut shapes = TileShapes([0; 64]);
        shapes.0[0] = 1;
        for tile in 0..8 {
            shapes.0[16 + 2 * tile] = 64;
            shapes.0[48 + tile] = 16;
        }
        // SAFETY: the tiles' state is this block's alone, and released at its end.
        unsafe {
            asm!(
                "ldtilecfg [{shapes}]",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {turns}",
                "jnz 2b",
                "tilerelease",
                shapes = in(reg) &shapes, turns = inout(reg) turns => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_s_loops_run() {
        for precision in [Precision::F32, Precision::Bf16] {
            let mut peak = Peak::of(precision);
            assert_eq!(peak.run(), Ok(()));
            assert!(peak.run_flops() > 0);
        }
    }

    #[test]
    fn a_stream_copies_all_of_it() {
        let mut stream = Stream::new(2 * (3 << 20) + 14);
        assert_eq!(stream.run(), Ok(()));
        assert_eq!(stream.dst, stream.src);
        assert_eq!(stream.dst.len(), (3 << 20) + 7);
    }
}

//! AMX: products of tiles of 16 rows of 64 bytes. Reached by its instructions themselves, for which
//! there are no functions yet.
//!
//! After Intel's "Architecture Instruction Set Extensions Programming Reference", chapter 3.

use crate::micro::{MR_BF16, NR, Place, STEP_BF16};
use half::bf16;
use std::{arch::asm, arch::x86_64::*};

/// Whether the processor multiplies tiles of `bf16` and the system saves them at a switch of threads.
/// Asks Linux once for the permission that a process needs.
pub(super) fn is_available() -> bool {
    const TILE_BF16: u32 = 1 << 22 | 1 << 24;
    const TILE_STATE: u64 = 0b11 << 17;
    // SAFETY: every x86-64 has CPUID; leaf 7 is asked for only where there is one; XGETBV exists where
    // OSXSAVE (bit 27) says so.
    unsafe {
        let has_leaf = __cpuid(0).eax >= 7 && __cpuid(1).ecx >> 27 & 1 == 1;
        has_leaf
            && __cpuid_count(7, 0).edx & TILE_BF16 == TILE_BF16
            && xcr0() & TILE_STATE == TILE_STATE
            && is_permitted()
    }
}

/// # Safety
/// The processor has XGETBV.
unsafe fn xcr0() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the caller's promise; register 0 always exists.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack))
    };
    u64::from(high) << 32 | u64::from(low)
}

/// Linux gives the tile registers to a process that asks for them.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let answer: i64;
    // SAFETY: the call touches no memory of ours; it destroys rcx and r11, as all do.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => answer,
            in("rdi") REQUEST,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Palette 1; rows and bytes of a row of each tile.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight tiles whole.
static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Readies this thread's tiles.
/// # Safety
/// [`is_available`].
pub(crate) unsafe fn configure() {
    // SAFETY: the caller's promise; `CONFIG` is 64 bytes of a valid configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly)) };
}

/// Gives this thread's tiles back, so that the system need not save them.
/// # Safety
/// [`is_available`].
pub(crate) unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Elements of a tile of `bf16`.
const TILE: usize = MR_BF16 * STEP_BF16;

/// A block of sums that has no whole place of its own.
#[repr(C, align(64))]
struct Sums([f32; 4 * MR_BF16 * NR]);

/// As [`Packed::micro`](crate::micro::Packed::micro), of `bf16`.
/// # Safety
/// As there; the thread's tiles are [`configure`]d.
pub(crate) unsafe fn micro(
    k: usize,
    a: *const bf16,
    b: *const bf16,
    (c, ld): Place<f32>,
    (rows, n_cols): (usize, usize),
    add: bool,
) {
    let n_rows = rows.div_ceil(MR_BF16);
    // A panel that is not there is another one once more, its sums go nowhere.
    let a1 = if n_rows > 1 { a.wrapping_add(MR_BF16 * k) } else { a };
    let b1 = if n_cols > 1 { b.wrapping_add(NR * k) } else { b };
    let n_steps = k / STEP_BF16;
    // SAFETY: the caller's promise: panels of `n_steps` tiles each, `c` good for the rows and columns
    // that are there.
    unsafe {
        if rows == 2 * MR_BF16 && n_cols == 2 {
            return block(n_steps, [a, a1], [b, b1], (c, ld), add);
        }
        let mut sums = Sums([0.0; 4 * MR_BF16 * NR]);
        block(n_steps, [a, a1], [b, b1], (sums.0.as_mut_ptr(), 2 * NR), false);
        for i in 0..rows {
            for j in 0..n_cols {
                let (c, s) = (c.add(i * ld + j * NR), sums.0.as_ptr().add((i * 2 + j) * NR));
                super::avx512::store16(c, s, add);
            }
        }
    }
}

/// Two by two tiles of sums.
/// # Safety
/// The panels hold `n_steps` tiles, `c` is good for 32 rows of 32; the thread's tiles are ready.
#[inline]
unsafe fn block(
    n_steps: usize,
    a: [*const bf16; 2],
    b: [*const bf16; 2],
    (c, ld): Place<f32>,
    add: bool,
) {
    const { assert!(MR_BF16 == 16 && NR == 16 && TILE == 512) };
    // SAFETY: the caller's promise. Tiles are read and written by these instructions alone.
    unsafe {
        asm!(
            "test {add}, {add}",
            "jz 2f",
            "tileloadd tmm0, [{c0} + {ld}]",
            "tileloadd tmm1, [{c0} + {ld} + 64]",
            "tileloadd tmm2, [{c1} + {ld}]",
            "tileloadd tmm3, [{c1} + {ld} + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            "test {n}, {n}",
            "jz 5f",
            "4:",
            "tileloadd tmm6, [{b0} + {row}]",
            "tileloadd tmm4, [{a0} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {row}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a1} + {row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, 1024",
            "add {a1}, 1024",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {n}",
            "jnz 4b",
            "5:",
            "tilestored [{c0} + {ld}], tmm0",
            "tilestored [{c0} + {ld} + 64], tmm1",
            "tilestored [{c1} + {ld}], tmm2",
            "tilestored [{c1} + {ld} + 64], tmm3",
            add = in(reg) usize::from(add),
            n = inout(reg) n_steps => _,
            a0 = inout(reg) a[0] => _,
            a1 = inout(reg) a[1] => _,
            b0 = inout(reg) b[0] => _,
            b1 = inout(reg) b[1] => _,
            c0 = in(reg) c,
            c1 = in(reg) c.wrapping_add(MR_BF16 * ld),
            ld = in(reg) ld * size_of::<f32>(),
            row = in(reg) 64usize,
            out("tmm0") _,
            out("tmm1") _,
            out("tmm2") _,
            out("tmm3") _,
            out("tmm4") _,
            out("tmm5") _,
            out("tmm6") _,
            out("tmm7") _,
            options(nostack),
        );
    }
}

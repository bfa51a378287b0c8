//! The innermost product: a block of [`MR`] x [`NR`] sums kept in registers.
//!
//! Operands are packed in panels: `a[p][MR]` and `b[p][NR]`, `p` along the depth. Every sum is one
//! chain of (on most machines fused) multiply-adds in the order of `p`.

use crate::{Real, isa::Isa};

/// Rows of a block.
pub(crate) const MR: usize = 6;
/// Columns of a block.
pub(crate) const NR: usize = 16;

/// `$call` with the constant `$m` standing for `$rows`, 1 to [`MR`].
macro_rules! by_rows {
    ($rows:expr, $m:ident => $call:expr) => {
        by_rows!(@ $rows, $m, $call, 1 2 3 4 5; 6)
    };
    (@ $rows:expr, $m:ident, $call:expr, $($n:literal)*; $last:literal) => {
        match $rows {
            $($n => {
                const $m: usize = $n;
                $call
            })*
            _ => {
                const $m: usize = $last;
                $call
            }
        }
    };
}
pub(crate) use by_rows;

/// `c[i][j] = sum over p of a[p][i] b[p][j]`, or `+=`, for the first `rows` rows; rows of `c` are
/// `ld` apart.
/// # Safety
/// `a` and `b` hold panels of depth `k`; `c` is good for `rows` rows of `NR`; `1 <= rows <= MR`;
/// the processor has `isa`.
#[inline]
pub(crate) unsafe fn micro<R: Real>(
    isa: Isa,
    k: usize,
    a: *const R,
    b: *const R,
    (c, ld): (*mut R, usize),
    rows: usize,
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx2 {
            return crate::x86::micro(k, a, b, (c, ld), rows, add);
        }
        let _ = isa;
        by_rows!(rows, M => micro_portable::<R, M>(k, a, b, c, ld, add))
    }
}

/// `acc + x y`: fused where the target always has the instruction.
#[inline(always)]
fn mul_add<R: Real>(x: R, y: R, acc: R) -> R {
    if cfg!(target_arch = "aarch64") { num_traits::Float::mul_add(x, y, acc) } else { acc + x * y }
}

/// The specification of the block, and what runs where there is no better. Halves of [`NR`], so that
/// sums stay in 16 registers.
/// # Safety
/// As [`micro`].
unsafe fn micro_portable<R: Real, const M: usize>(
    k: usize,
    a: *const R,
    b: *const R,
    c: *mut R,
    ld: usize,
    add: bool,
) {
    const HALF: usize = NR / 2;
    for half in [0, HALF] {
        let mut acc = [[R::of(0.0); HALF]; M];
        for p in 0..k {
            // SAFETY: `a` and `b` hold panels of depth `k`.
            let (x, y) = unsafe {
                (&*a.add(p * MR).cast::<[R; M]>(), &*b.add(p * NR + half).cast::<[R; HALF]>())
            };
            for i in 0..M {
                for j in 0..HALF {
                    acc[i][j] = mul_add(x[i], y[j], acc[i][j]);
                }
            }
        }
        for (i, sums) in acc.iter().enumerate() {
            // SAFETY: `c` is good for `M` rows of `NR`.
            let c = unsafe { &mut *c.add(i * ld + half).cast::<[R; HALF]>() };
            for j in 0..HALF {
                c[j] = if add { c[j] + sums[j] } else { sums[j] };
            }
        }
    }
}

//! The innermost product: a block of sums kept in registers.
//!
//! Operands are packed in panels, `a` of [`Packed::MR`] rows and `b` of [`NR`] columns. Every sum is
//! one chain of (on most machines fused) multiply-adds in the order of the depth.

use crate::{Real, isa::Isa};
use half::bf16;

/// Columns of a panel.
pub(crate) const NR: usize = 16;

/// The place of a block of sums: its first element and the distance between rows.
pub(crate) type Place<R> = (*mut R, usize);

/// What panels are made of.
///
/// `f32` and `f64`: `a[p][MR]`, `b[p][NR]`. `bf16`: depths in blocks of 32, `a[p / 32][MR][32]` and,
/// pairs of depths side by side, `b[p / 2][NR][2]`; what is missing of the last block is zero.
pub(crate) trait Packed: Copy + Default + Send + Sync + 'static {
    /// What products are added up in.
    type Sum: Real;
    /// Rows of a panel.
    const MR: usize;
    /// Depths are packed in multiples of it, the last filled up with zeros.
    const STEP: usize;
    /// Deepest block: two right panels then fit into half to two thirds of a usual L1 cache.
    const MAX_DEPTH: usize;
    /// Rows of the left operand packed at once: well inside a usual L2 cache.
    const BLOCK_ROWS: usize;

    /// Row and column panels that [`Packed::micro`] takes at most: as many as keep the arithmetic busy
    /// while two of the right operand's stay in the L1 cache.
    fn at_once(isa: Isa) -> (usize, usize) {
        if isa >= Isa::Avx512 { (2, 2) } else { (1, 1) }
    }

    /// Readies the thread for [`Packed::micro`] until the guard is gone.
    fn begin(isa: Isa) -> Guard {
        let _ = isa;
        Guard { tiles: false }
    }

    /// `c[i][j] = sum over p of a[p][i] b[p][j]`, or `+=`, for the first `rows` rows of one or two
    /// panels and for `n_cols` whole panels of columns.
    /// # Safety
    /// `a` and `b` hold panels of depth `k`, one after the other; `c` is good for `rows` rows of
    /// `n_cols * NR`; `rows` and `n_cols` are 1 to [`Packed::at_once`]; the processor has `isa`;
    /// [`Packed::begin`]'s guard is alive.
    unsafe fn micro(
        isa: Isa,
        k: usize,
        a: *const Self,
        b: *const Self,
        c: Place<Self::Sum>,
        n: (usize, usize),
        add: bool,
    );
}

/// A thread that may multiply.
pub(crate) struct Guard {
    tiles: bool,
}

impl Drop for Guard {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.tiles {
            // SAFETY: tiles are configured, so the processor has them.
            unsafe { crate::x86::amx::release() };
        }
        let _ = self.tiles;
    }
}

/// `$call` with the constant `$m` standing for `$rows`, 1 to 6.
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
#[cfg(target_arch = "x86_64")]
pub(crate) use by_rows;

/// Rows of a panel of `f32` or `f64`.
pub(crate) const MR: usize = 6;
/// Rows of a panel of `bf16`.
pub(crate) const MR_BF16: usize = 16;
/// Depths of a block of `bf16`.
pub(crate) const STEP_BF16: usize = 32;

macro_rules! real {
    ($t:ty, $x86:path) => {
        impl Packed for $t {
            type Sum = $t;
            const MR: usize = MR;
            const STEP: usize = 1;
            const MAX_DEPTH: usize = 384;
            const BLOCK_ROWS: usize = 32 * MR;

            #[inline]
            unsafe fn micro(
                isa: Isa,
                k: usize,
                a: *const $t,
                b: *const $t,
                c: Place<$t>,
                n: (usize, usize),
                add: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    #[cfg(target_arch = "x86_64")]
                    if isa >= Isa::Avx2 {
                        return $x86(isa, k, a, b, c, n, add);
                    }
                    let _ = isa;
                    by_panels(k, a, b, c, n, |a, b, (c, ld), rows| {
                        by_rows!(rows, M => micro_portable::<$t, M>(k, a, b, c, ld, add))
                    });
                }
            }
        }
    };
}
real!(f32, crate::x86::micro_f32);
real!(f64, crate::x86::micro_f64);

impl Packed for bf16 {
    type Sum = f32;
    const MR: usize = MR_BF16;
    const STEP: usize = STEP_BF16;
    const MAX_DEPTH: usize = 512;
    const BLOCK_ROWS: usize = 16 * MR_BF16;

    fn begin(isa: Isa) -> Guard {
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Amx {
            // SAFETY: the processor has AMX and the system lets this process use it.
            unsafe { crate::x86::amx::configure() };
            return Guard { tiles: true };
        }
        let _ = isa;
        Guard { tiles: false }
    }

    #[inline]
    unsafe fn micro(
        isa: Isa,
        k: usize,
        a: *const bf16,
        b: *const bf16,
        c: Place<f32>,
        n: (usize, usize),
        add: bool,
    ) {
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            if isa >= Isa::Amx {
                crate::x86::amx::micro(k, a, b, c, n, add);
            } else {
                crate::x86::avx512::micro_bf16(k, a, b, c, n, add);
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = (isa, k, a, b, c, n, add);
            unreachable!("only processors with dot products of bf16 pack it");
        }
    }
}

/// Calls `f(a, b, c, rows)` for each pair of panels.
/// # Safety
/// As [`Packed::micro`].
#[inline(always)]
pub(crate) unsafe fn by_panels<P: Packed>(
    k: usize,
    a: *const P,
    b: *const P,
    (c, ld): Place<P::Sum>,
    (rows, n_cols): (usize, usize),
    f: impl Fn(*const P, *const P, Place<P::Sum>, usize),
) {
    for j in 0..n_cols {
        for i in 0..rows.div_ceil(P::MR) {
            // SAFETY: inside the panels and rows that the caller promises.
            let (a, b, c) = unsafe {
                (a.add(i * P::MR * k), b.add(j * NR * k), c.add(i * P::MR * ld + j * NR))
            };
            f(a, b, (c, ld), P::MR.min(rows - i * P::MR));
        }
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
/// As [`Packed::micro`], for one panel of each.
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

//! What lies under a window, packed as `bf16`: rows of 16 lanes, joined two by two.

use super::window::{Panel, Panels, Reach};
#[cfg(target_arch = "x86_64")]
use crate::x86::spans;
use crate::{
    isa::Isa,
    micro::{NR, STEP_BF16},
    pack::place,
};
use half::bf16;
use std::ops::Range;

/// Panels packed side by side: 128 bytes are read along memory.
pub(crate) const WIDE: usize = 4;

/// One panel of a source.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only vector code asks for lines
pub(crate) struct PanelRows<'a> {
    pub(crate) x: &'a [bf16],
    pub(crate) at: &'a [isize; NR],
    pub(crate) reach: &'a [Reach],
    pub(crate) plane_elems: usize,
    pub(crate) lines: Lines,
}

/// Most runs of lanes that are read as such: a panel of a grid 7 wide has up to 4.
pub(crate) const MAX_RUNS: usize = 4;

/// Runs of lanes whose places are `step` (1 or 2) apart: where lane 0 of each lies (or would), and
/// which lanes are of it. None where there are too many.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Lines {
    pub(crate) n_runs: usize,
    pub(crate) step: usize,
    pub(crate) at: [isize; MAX_RUNS],
    pub(crate) lanes: [u16; MAX_RUNS],
}

impl Lines {
    fn new(at: &[isize], step: usize) -> Self {
        let mut lines = Self { n_runs: 0, step, at: [0; MAX_RUNS], lanes: [0; MAX_RUNS] };
        for (l, &place) in at.iter().enumerate() {
            if l == 0 || place != at[l - 1] + step as isize {
                if lines.n_runs == MAX_RUNS || step > 2 {
                    return Self { n_runs: 0, ..lines };
                }
                lines.at[lines.n_runs] = place - (l * step) as isize;
                lines.n_runs += 1;
            }
            lines.lanes[lines.n_runs - 1] |= 1 << l;
        }
        lines
    }
}

impl<'a> PanelRows<'a> {
    fn new(panels: &'a Panels, q: usize, x: &'a [bf16]) -> Self {
        let (window, panel): (_, &Panel) = (panels.window, &panels.panels[q]);
        let n_taps = window.taps.len();
        Self {
            x,
            at: &panel.at,
            reach: &panels.reach[q * n_taps..][..n_taps],
            plane_elems: window.source_elems(),
            lines: Lines::new(&panel.at[..panel.n_lanes], window.step[1]),
        }
    }

    /// What tap `p % taps` reads of plane `p / taps`, lane by lane.
    pub(crate) fn row(&self, p: usize) -> [bf16; NR] {
        let Reach { delta, inside } = self.reach[p % self.reach.len()];
        let plane = (p / self.reach.len() * self.plane_elems) as isize;
        std::array::from_fn(|l| {
            let here = inside >> l & 1 == 1;
            if here { self.x[(self.at[l] + plane + delta) as usize] } else { bf16::ZERO }
        })
    }
}

/// As [`Packs::patches`](crate::pack::Packs::patches).
pub(crate) fn patches(
    panels: &Panels,
    isa: Isa,
    dst: &mut [bf16],
    x: &[bf16],
    depth: Range<usize>,
) {
    let (n, n_panel) = (panels.panels.len(), NR * depth.len().next_multiple_of(STEP_BF16));
    if n_panel == 0 {
        return;
    }
    for (q, dst) in (0..n).step_by(WIDE).zip(dst.chunks_mut(WIDE * n_panel)) {
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512
            && let Some(spans) = panels.spans::<2, { WIDE / 2 }>(q..n.min(q + WIDE))
        {
            let spans = &spans[..(n - q).div_ceil(2).min(WIDE / 2)];
            let planes = (x, panels.window.source_elems());
            // SAFETY: the processor has AVX-512; lanes that are inside lie in `x` by the window's check.
            unsafe { spans::pack_bf16(dst, planes, spans, depth.clone()) };
            continue;
        }
        let rows: [_; WIDE] =
            std::array::from_fn(|i| PanelRows::new(panels, (q + i).min(n - 1), x));
        let rows = &rows[..WIDE.min(n - q)];
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512 {
            // SAFETY: the processor has AVX-512; lanes that are inside lie in `x` by the window's check.
            unsafe { crate::x86::patches::pack(dst, rows, depth.clone()) };
            continue;
        }
        let _ = isa;
        for (rows, dst) in rows.iter().zip(dst.chunks_exact_mut(n_panel)) {
            dst.fill(bf16::ZERO);
            for (at, p) in depth.clone().enumerate() {
                let dst = &mut dst[at / STEP_BF16 * STEP_BF16 * NR..];
                for (l, x) in rows.row(p).into_iter().enumerate() {
                    dst[place::<false>(l, at % STEP_BF16)] = x;
                }
            }
        }
    }
}

/// As [`Packs::turned`](crate::pack::Packs::turned).
pub(crate) fn turned(
    panels: &Panels,
    isa: Isa,
    dst: &mut [bf16],
    x: &[bf16],
    cols: Range<usize>,
    n_lanes: usize,
) {
    let n_panel = NR * n_lanes.next_multiple_of(STEP_BF16);
    for b in 0..n_lanes.div_ceil(STEP_BF16) {
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512
            && let Some(span) = panels.span::<2>(2 * b)
        {
            let planes = (x, panels.window.source_elems());
            for (c, j) in cols.clone().step_by(NR).enumerate() {
                let dst = &mut dst[c * n_panel + b * NR * STEP_BF16..][..NR * STEP_BF16];
                let cols = j..cols.end.min(j + NR);
                // SAFETY: as above.
                unsafe { spans::turn_bf16(dst, planes, &span, cols) };
            }
            continue;
        }
        let halves = [2 * b, 2 * b + 1]
            .map(|q| (q < panels.panels.len()).then(|| PanelRows::new(panels, q, x)));
        for (c, j) in cols.clone().step_by(NR).enumerate() {
            let dst = &mut dst[c * n_panel + b * NR * STEP_BF16..][..NR * STEP_BF16];
            turn_block(isa, dst, &halves, j..cols.end.min(j + NR));
        }
    }
}

/// A right operand's block: the lanes of two panels for depth, planes and taps `cols` for columns.
fn turn_block(isa: Isa, dst: &mut [bf16], halves: &[Option<PanelRows>; 2], cols: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        // SAFETY: the processor has AVX-512; lanes that are inside lie in `x` by the window's check.
        return unsafe { crate::x86::patches::turn_block(dst, halves, cols) };
    }
    let _ = isa;
    dst.fill(bf16::ZERO);
    for (c, p) in cols.enumerate() {
        for (h, rows) in halves.iter().enumerate() {
            let Some(rows) = rows else { continue };
            for (l, x) in rows.row(p).into_iter().enumerate() {
                dst[place::<false>(c, h * NR + l)] = x;
            }
        }
    }
}

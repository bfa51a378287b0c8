//! What lies under a window, packed straight into the panels of a product: no patch matrix.
//!
//! Lanes are the pixels of a grid, counted over the batch; each tap of the window reads, for every
//! lane, one pixel of a source plane. Where a lane reads does not depend on the channel, so it is
//! worked out once a panel and used for all of them.

use crate::{Element, Real, isa::Isa, micro::NR, pack::Packs, product::Right};
#[cfg(target_arch = "x86_64")]
use crate::{
    element::{as_type, as_type_mut},
    x86::spans,
};
use std::ops::Range;

/// Where the taps of a window fall around the pixels of a grid.
pub(crate) struct Window {
    /// Rows and columns of the grid.
    pub(super) grid: [usize; 2],
    /// Source pixels between two pixels of the grid.
    pub(super) step: [usize; 2],
    /// Rows and columns of a source plane.
    pub(super) source: [usize; 2],
    /// Elements between two images of the source.
    pub(super) image_elems: usize,
    /// Row and column that each tap reads for the grid's first pixel; outside is zero.
    pub(super) taps: Vec<[isize; 2]>,
}

/// Panels packed side by side: 256 bytes of `f32` are read along memory.
const WIDE: usize = 4;
/// Columns turned over at once, whose rows then stay in the L1 cache.
const TURNED: usize = 6 * NR;

/// Row and column of a lane that reads nothing, whatever the tap.
const FAR: i32 = i32::MIN / 2;

/// [`NR`] lanes: where they read for a tap at (0, 0) of plane 0.
pub(super) struct Panel {
    pub(super) at: [isize; NR],
    pub(super) n_lanes: usize,
}

/// Lanes in up to two runs of places `step` (1 or 2) apart: where lane 0 of each lies (or would), and
/// which lanes are of the first.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Runs {
    pub(crate) at: [isize; 2],
    pub(crate) first: u32,
    pub(crate) step: usize,
}

#[cfg(target_arch = "x86_64")]
impl Runs {
    /// Of up to 32 lanes, if they lie so.
    pub(super) fn new(lanes: impl Iterator<Item = isize>, step: usize) -> Option<Self> {
        let mut runs = Self { at: [0; 2], first: u32::MAX, step };
        let mut last = None;
        for (l, at) in lanes.enumerate() {
            let first_place = at - (l * step) as isize;
            match last {
                None => runs.at = [first_place; 2],
                Some(last) if at == last + step as isize => {}
                Some(_) if runs.first == u32::MAX => {
                    (runs.at[1], runs.first) = (first_place, (1 << l) - 1);
                }
                Some(_) => return None,
            }
            last = Some(at);
        }
        matches!(step, 1 | 2).then_some(runs)
    }
}

/// The lanes of `N` panels that lie in runs, and the reach of each tap of each panel (none of one that
/// is missing).
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Span<'a, const N: usize> {
    pub(crate) runs: Runs,
    pub(crate) reach: [&'a [Reach]; N],
}

#[cfg(target_arch = "x86_64")]
impl<const N: usize> Span<'_, N> {
    /// How many panels there are.
    pub(crate) fn n_panels(&self) -> usize {
        self.reach.iter().filter(|reach| !reach.is_empty()).count()
    }
}

/// A tap of a panel: what it adds to the place of each lane, and which lanes lie in the plane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    pub(crate) delta: isize,
    pub(crate) inside: u16,
}

impl Window {
    pub(super) fn source_elems(&self) -> usize {
        self.source[0] * self.source[1]
    }

    /// The panel of the `n` lanes from `lane` on, and the reach of each tap.
    fn panel(&self, isa: Isa, lane: usize, n: usize, reach: &mut Vec<Reach>) -> Panel {
        let n_grid = self.grid[0] * self.grid[1];
        let (mut at, mut rows, mut cols) = ([0isize; NR], [FAR; NR], [FAR; NR]);
        let (mut image, pixel) = (lane / n_grid, lane % n_grid);
        let (mut i, mut j) = (pixel / self.grid[1], pixel % self.grid[1]);
        for l in 0..n {
            (rows[l], cols[l]) = ((i * self.step[0]) as i32, (j * self.step[1]) as i32);
            let pixel = i * self.step[0] * self.source[1] + j * self.step[1];
            at[l] = (image * self.image_elems + pixel) as isize;
            j += 1;
            if j == self.grid[1] {
                (i, j) = (i + 1, 0);
            }
            if i == self.grid[0] {
                (image, i) = (image + 1, 0);
            }
        }
        reach.extend(self.taps.iter().map(|&[dy, dx]| {
            let down = inside(isa, &rows, dy as i32, self.source[0] as i32);
            let inside = down & inside(isa, &cols, dx as i32, self.source[1] as i32);
            Reach { delta: dy * self.source[1] as isize + dx, inside }
        }));
        Panel { at, n_lanes: n }
    }

    /// The panels of consecutive lanes.
    fn panels(&self, isa: Isa, lanes: Range<usize>) -> Panels<'_> {
        let mut reach = Vec::with_capacity(lanes.len().div_ceil(NR) * self.taps.len());
        let starts = lanes.clone().step_by(NR);
        let panel = |first| self.panel(isa, first, NR.min(lanes.end - first), &mut reach);
        let panels = starts.map(panel).collect();
        Panels { window: self, panels, reach }
    }

    /// # Panics
    /// If `n_images` of `n_planes` planes do not fit into `n_elems`, or a plane is too wide to count.
    fn check(&self, n_elems: usize, n_images: usize, n_planes: usize) {
        let last = n_images.saturating_sub(1) * self.image_elems + n_planes * self.source_elems();
        assert!(n_images == 0 || last <= n_elems, "window: {last} elements in {n_elems}");
        let far = self.taps.iter().flatten().map(|d| d.unsigned_abs()).max().unwrap_or(0);
        let reach = (0..2).map(|a| self.grid[a] * self.step[a]).chain(self.source).chain([far]);
        assert!(reach.max() <= Some(i32::MAX as usize / 2), "window: an extent overflows");
    }
}

/// Bit `l` says whether `0 <= at[l] + delta < extent`.
fn inside(isa: Isa, at: &[i32; NR], delta: i32, extent: i32) -> u16 {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx2 {
        // SAFETY: the processor has AVX2.
        return unsafe { crate::x86::inside(at, delta, extent) };
    }
    let _ = isa;
    (0..NR).fold(0, |bits, l| {
        let at = at[l].wrapping_add(delta);
        bits | u16::from(at >= 0 && at < extent) << l
    })
}

/// Consecutive panels, and the reach of each tap of each.
pub(crate) struct Panels<'a> {
    pub(super) window: &'a Window,
    pub(super) panels: Vec<Panel>,
    pub(super) reach: Vec<Reach>,
}

impl Panels<'_> {
    /// Packs some panels into `dst`, one `[depth][NR]` after the other; depth `p` is tap `p % taps` of
    /// plane `p / taps`, counted from the beginning of `x`.
    fn pack<T: Element>(
        &self,
        isa: Isa,
        dst: &mut [T::Acc],
        x: &[T],
        which: Range<usize>,
        depth: Range<usize>,
    ) {
        let (n_taps, plane_elems) = (self.window.taps.len(), self.window.source_elems());
        assert_eq!(dst.len(), which.len() * depth.len() * NR, "window: panel length");
        if dst.is_empty() {
            return;
        }
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx2
            && let Some((runs, n)) = self.runs(which.clone())
            && let Some(dst) = crate::element::as_type_mut::<T::Acc, f32>(dst)
        {
            let reach = &self.reach[which.start * n_taps..which.end * n_taps];
            // SAFETY: the processor has AVX2; lanes that are inside lie in `x` by `check`.
            unsafe { crate::x86::pack_runs(dst, x, &runs[..n], reach, plane_elems, depth) };
            return;
        }
        let _ = isa;
        for (dst, q) in dst.chunks_exact_mut(depth.len() * NR).zip(which) {
            let reach = &self.reach[q * n_taps..][..n_taps];
            for (dst, p) in dst.as_chunks_mut::<NR>().0.iter_mut().zip(depth.clone()) {
                let plane = (p / n_taps * plane_elems) as isize;
                let Reach { delta, inside } = reach[p % n_taps];
                for (l, d) in dst.iter_mut().enumerate() {
                    let here = inside >> l & 1 == 1;
                    let at = (self.panels[q].at[l] + plane + delta) as usize;
                    *d = if here { x[at].widen() } else { T::Acc::of(0.0) };
                }
            }
        }
    }

    /// The runs of these panels where all have them, of one step.
    #[cfg(target_arch = "x86_64")]
    fn runs(&self, which: Range<usize>) -> Option<([Runs; WIDE], usize)> {
        let mut runs = [Runs { at: [0; 2], first: 0, step: 0 }; WIDE];
        for (runs, q) in runs.iter_mut().zip(which.clone()) {
            *runs = self.runs_of(q..q + 1)?;
        }
        Some((runs, which.len()))
    }

    /// The runs that the lanes of one or two panels lie in, if they do.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn runs_of(&self, which: Range<usize>) -> Option<Runs> {
        let lanes = self.panels[which].iter().flat_map(|panel| &panel.at[..panel.n_lanes]);
        Runs::new(lanes.copied(), self.window.step[1])
    }

    /// Spans of `N` panels each, from the first of up to `M * N` panels on, if all their lanes lie in
    /// runs. Those beyond the last repeat it.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn spans<const N: usize, const M: usize>(
        &self,
        which: Range<usize>,
    ) -> Option<[Span<'_, N>; M]> {
        let last = which.start + (which.len() - 1) / N * N;
        let mut spans = [self.span::<N>(which.start)?; M];
        for (i, span) in spans.iter_mut().enumerate().skip(1) {
            *span = self.span(last.min(which.start + i * N))?;
        }
        Some(spans)
    }

    /// The `N` panels from `q` on, if their lanes lie in runs.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn span<const N: usize>(&self, q: usize) -> Option<Span<'_, N>> {
        let (n, n_taps) = (self.panels.len(), self.window.taps.len());
        let runs = self.runs_of(q..n.min(q + N))?;
        let reach = std::array::from_fn(|i| {
            self.reach.get((q + i) * n_taps..(q + i + 1) * n_taps).unwrap_or_default()
        });
        Some(Span { runs, reach })
    }
}

/// The patch matrix `[planes x taps, lanes]` of `x`, never made but for the panels of one block.
pub(super) struct Patches<'a, T> {
    x: &'a [T],
    window: &'a Window,
}

impl<'a, T: Element> Patches<'a, T> {
    /// Of the first `n_planes` planes of each image; `x` begins at the first image's first plane.
    pub(super) fn new(x: &'a [T], window: &'a Window, n_images: usize, n_planes: usize) -> Self {
        window.check(x.len(), n_images, n_planes);
        Self { x, window }
    }
}

impl<T: Element, P: Packs<T>> Right<P> for Patches<'_, T> {
    fn pack(&self, isa: Isa, dst: &mut [P], cols: Range<usize>, depth: Range<usize>) {
        P::patches(&self.window.panels(isa, cols), isa, dst, self.x, depth);
    }
}

/// The transposed patch matrix `[lanes, planes x taps]`: what the weight's gradient multiplies.
pub(super) struct Transposed<'a, T> {
    pub(super) patches: Patches<'a, T>,
    /// The lane of depth 0.
    pub(super) start: usize,
}

impl<T: Element, P: Packs<T>> Right<P> for Transposed<'_, T> {
    fn pack(&self, isa: Isa, dst: &mut [P], cols: Range<usize>, depth: Range<usize>) {
        let first = self.start + depth.start;
        let panels = self.patches.window.panels(isa, first..first + depth.len());
        P::turned(&panels, isa, dst, self.patches.x, cols, depth.len());
    }
}

/// As [`Packs::patches`], widened.
pub(crate) fn patches<T: Element>(
    panels: &Panels,
    isa: Isa,
    dst: &mut [T::Acc],
    x: &[T],
    depth: Range<usize>,
) {
    let (n, n_panel) = (panels.panels.len(), NR * depth.len());
    for q in (0..n).step_by(WIDE) {
        let which = q..n.min(q + WIDE);
        let dst = &mut dst[q * n_panel..which.end * n_panel];
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512
            && let Some(x) = as_type::<T, f32>(x)
            && let Some(spans) = panels.spans::<1, WIDE>(which.clone())
            && let Some(dst) = as_type_mut::<T::Acc, f32>(dst)
        {
            let planes = (x, panels.window.source_elems());
            // SAFETY: the processor has AVX-512; lanes that are inside lie in `x` by `check`.
            unsafe { spans::pack_f32(dst, planes, &spans[..which.len()], depth.clone()) };
            continue;
        }
        panels.pack(isa, dst, x, which, depth.clone());
    }
}

/// As [`Packs::turned`], widened.
pub(crate) fn turned<T: Element>(
    panels: &Panels,
    isa: Isa,
    dst: &mut [T::Acc],
    x: &[T],
    cols: Range<usize>,
    n_lanes: usize,
) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512
        && let Some(x) = as_type::<T, f32>(x)
        && let Some(dst) = as_type_mut::<T::Acc, f32>(dst)
    {
        return turned_f32(panels, dst, x, cols, n_lanes);
    }
    let mut rows = [T::Acc::of(0.0); TURNED * WIDE * NR];
    let start = cols.start;
    for j in (start..cols.end).step_by(TURNED) {
        let cols = j..cols.end.min(j + TURNED);
        let dst = &mut dst[(j - start) * n_lanes..];
        for q in (0..panels.panels.len()).step_by(WIDE) {
            let which = q..panels.panels.len().min(q + WIDE);
            let rows = &mut rows[..which.len() * cols.len() * NR];
            panels.pack(isa, rows, x, which.clone(), cols.clone());
            for (q, rows) in which.zip(rows.chunks_exact(cols.len() * NR)) {
                let n = NR.min(n_lanes - q * NR);
                for (c, rows) in rows.chunks(NR * NR).enumerate() {
                    turn(isa, &mut dst[(c * n_lanes + q * NR) * NR..][..n * NR], rows, n);
                }
            }
        }
    }
}

/// As [`turned`], with AVX-512.
#[cfg(target_arch = "x86_64")]
fn turned_f32(panels: &Panels, dst: &mut [f32], x: &[f32], cols: Range<usize>, n_lanes: usize) {
    let (n, planes) = (panels.panels.len(), (x, panels.window.source_elems()));
    for q in (0..n).step_by(WIDE) {
        let which = q..n.min(q + WIDE);
        let spans = panels.spans::<1, WIDE>(which.clone());
        for (c, j) in cols.clone().step_by(NR).enumerate() {
            let cols = j..cols.end.min(j + NR);
            for (i, q) in which.clone().enumerate() {
                let n = NR.min(n_lanes - q * NR);
                let dst = &mut dst[(c * n_lanes + q * NR) * NR..][..n * NR];
                if let Some(spans) = &spans {
                    // SAFETY: the processor has AVX-512; lanes that are inside lie in `x` by `check`.
                    unsafe { spans::turn_f32(dst, planes, &spans[i], cols.clone()) };
                } else {
                    let mut rows = [0.0; NR * NR];
                    let rows = &mut rows[..cols.len() * NR];
                    panels.pack(Isa::Avx512, rows, x, q..q + 1, cols.clone());
                    turn(Isa::Avx512, dst, rows, n);
                }
            }
        }
    }
}

/// `dst[l][c] = rows[c][l]` for `n` lanes; missing rows are zero.
fn turn<R: Real>(isa: Isa, dst: &mut [R], rows: &[R], n: usize) {
    let lanes = crate::pack::Lanes { data: rows, lane_stride: NR, depth_stride: 1 };
    lanes.pack::<NR>(isa, dst, 0, rows.len() / NR, 0..n);
}

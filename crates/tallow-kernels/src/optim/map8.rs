//! The dynamic 8-bit maps of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
//!
//! A value is a decimal exponent, a run of zero bits that an indicator bit ends, and a linear
//! fraction in what bits are left: the larger the magnitude, the finer the fraction. The tables are
//! computed by the formula of bitsandbytes' `create_dynamic_map(signed, 7, 8)`.

use std::sync::LazyLock;

/// Which values a moment can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Both signs: a first moment.
    Signed,
    /// Never negative: a second moment. A positive value is never stored as 0, because the update
    /// divides by its root.
    Unsigned,
}

/// The bits of an `f32` above these say which cell of a table its magnitude falls in: its exponent
/// and 7 bits of its fraction. Values lie far enough apart that a cell has one midpoint at most.
pub(crate) const CELL_SHIFT: u32 = 16;
/// The cell of 2^-23, below the least midpoint of either map.
pub(crate) const FIRST_CELL: u32 = (127 - 23) << 7;
/// The last cell is that of 1.
pub(crate) const N_CELLS: usize = (23 << 7) + 1;

/// 256 values in ascending order, and how to find the nearest.
pub(crate) struct Map8 {
    values: [f32; 256],
    /// The code of the value 0.
    zero: u8,
    /// How far below `zero` codes go.
    n_negative: u8,
    /// The least step above `zero` that a positive value may take.
    least: u8,
    /// Of each cell the number of midpoints below it and, from bit 8 on, above which last 16 bits a
    /// magnitude lies beyond the cell's own midpoint: [`NEVER`] without one.
    cells: [u32; N_CELLS],
}

/// More than 16 bits can say.
const NEVER: u32 = 1 << 16;

static SIGNED: LazyLock<Map8> = LazyLock::new(|| Map8::new(Sign::Signed));
static UNSIGNED: LazyLock<Map8> = LazyLock::new(|| Map8::new(Sign::Unsigned));

impl Map8 {
    pub(crate) fn of(sign: Sign) -> &'static Map8 {
        match sign {
            Sign::Signed => &SIGNED,
            Sign::Unsigned => &UNSIGNED,
        }
    }

    fn new(sign: Sign) -> Map8 {
        let all = exact_values(sign);
        let zero = all.iter().position(|v| *v == 0.0).expect("0 is in the map");
        let midpoints = midpoints(&all, zero);
        let cells = std::array::from_fn(|i| {
            let cell = FIRST_CELL + i as u32;
            let n_below = midpoints.partition_point(|m| m.to_bits() < cell << CELL_SHIFT);
            let own = midpoints.get(n_below).map(|m| m.to_bits());
            let own = own.filter(|bits| bits >> CELL_SHIFT == cell);
            own.map_or(NEVER, |bits| bits & 0xffff) << 8 | n_below as u32
        });
        Map8 {
            values: std::array::from_fn(|i| all[i] as f32),
            zero: zero as u8,
            n_negative: zero as u8,
            least: u8::from(sign == Sign::Unsigned),
            cells,
        }
    }

    /// The table of cells, for vector code.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn cells(&self) -> &[u32; N_CELLS] {
        &self.cells
    }

    /// The code of 0, how far below it codes go, and the least step above it of a positive value.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn steps(&self) -> [u8; 3] {
        [self.zero, self.n_negative, self.least]
    }

    #[inline(always)]
    pub(crate) fn value(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }

    /// The code of 0.
    pub(crate) fn zero(&self) -> u8 {
        self.zero
    }

    /// The code nearest to `x`, which is in [-1, 1]; a positive one of an unsigned map never
    /// becomes 0.
    #[inline(always)]
    pub(crate) fn code(&self, x: f32) -> u8 {
        let bits = x.abs().to_bits();
        let cell = (bits >> CELL_SHIFT).saturating_sub(FIRST_CELL) as usize;
        let cell = self.cells[cell.min(N_CELLS - 1)];
        let steps = cell as u8 + u8::from(bits & 0xffff > cell >> 8);
        // Both and a choice: no predictor guesses the sign of a moment.
        let up = self.zero + steps.max(self.least * u8::from(x > 0.0));
        let down = self.zero - steps.min(self.n_negative);
        if x < 0.0 { down } else { up }
    }
}

/// What parts the magnitudes `k` and `k + 1` steps above `zero`, for each `k`.
fn midpoints(all: &[f64], zero: usize) -> Vec<f32> {
    all[zero..].windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0) as f32).collect()
}

/// The 256 values, ascending, before they are rounded to `f32`.
fn exact_values(sign: Sign) -> Vec<f64> {
    const MAX_EXPONENT: i32 = 7;
    let mut all = vec![0.0, 1.0];
    for i in 0..MAX_EXPONENT {
        // The bits left for the fraction; without a sign there is one more.
        let n_fractions = match sign {
            Sign::Signed => 1 << i,
            Sign::Unsigned => 1 << (i + 1),
        };
        let scale = libm::pow(10.0, f64::from(i + 1 - MAX_EXPONENT));
        for j in 0..n_fractions {
            let mean = 0.1 + 0.9 * (f64::from(j) + 0.5) / f64::from(n_fractions);
            all.push(scale * mean);
            if sign == Sign::Signed {
                all.push(-scale * mean);
            }
        }
    }
    all.sort_by(f64::total_cmp);
    all
}

/// The 256 values of a map, ascending; what a code times its block's scale stands for.
pub fn dynamic_map(sign: Sign) -> [f32; 256] {
    Map8::of(sign).values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_the_nearest_one() {
        for sign in [Sign::Signed, Sign::Unsigned] {
            let (map, all) = (Map8::of(sign), exact_values(sign));
            // Every cell and its edges, values, midpoints and their neighbours.
            let edges = (0..=1.0f32.to_bits() >> 12).map(|i| f32::from_bits(i << 12));
            let midpoints = midpoints(&all, usize::from(map.zero));
            let marks = map.values.into_iter().chain(midpoints.iter().copied());
            let near = marks.flat_map(|m| [m.next_down(), m, m.next_up()]);
            for x in edges.chain(near).flat_map(|x| [x, -x]).filter(|x| x.abs() <= 1.0) {
                if sign == Sign::Unsigned && x <= 0.0 {
                    continue;
                }
                let error = |v: f64| (v - f64::from(x)).abs();
                let best = all.iter().map(|v| error(*v)).fold(f64::INFINITY, f64::min);
                let code = map.code(x);
                let is_least = sign == Sign::Unsigned && code == 1 && x < midpoints[0];
                let got = error(all[usize::from(code)]);
                let rounding = f64::from(x.abs() * f32::EPSILON);
                assert!(got <= best + rounding || is_least, "{sign:?} {x:e}: code {code}");
            }
            assert_eq!((map.code(0.0), map.code(-0.0)), (map.zero, map.zero));
        }
    }
}

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

/// 256 values in ascending order, and the midpoints between neighbours.
pub(crate) struct Map8 {
    values: [f32; 256],
    /// `midpoints[i]` parts codes `i` and `i + 1`; the last entry is infinite.
    midpoints: [f32; 256],
    /// The code of the value 0.
    zero: u8,
    /// The least code a positive value may take.
    least: u8,
}

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
        let values: [f32; 256] = std::array::from_fn(|i| all[i] as f32);
        let midpoints = std::array::from_fn(|i| match all.get(i + 1) {
            Some(next) => ((all[i] + next) / 2.0) as f32,
            None => f32::INFINITY,
        });
        let zero = all.iter().position(|v| *v == 0.0).expect("0 is in the map") as u8;
        let least = match sign {
            Sign::Signed => 0,
            Sign::Unsigned => zero + 1,
        };
        Map8 { values, midpoints, zero, least }
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
        let mut code = 0;
        for step in [128, 64, 32, 16, 8, 4, 2, 1] {
            code += if x > self.midpoints[code + step - 1] { step } else { 0 };
        }
        let code = code as u8;
        if x > 0.0 { code.max(self.least) } else { code }
    }
}

/// The 256 values of a map, ascending; what a code times its block's scale stands for.
pub fn dynamic_map(sign: Sign) -> [f32; 256] {
    Map8::of(sign).values
}

//! Numbers of 8 bits, one code a byte, with one scale a slice.
//!
//! A code stands for `decode(code) * scale`. Scales are powers of two, so scaling rounds nothing: the
//! only rounding is the one to the format, and what was decoded encodes to the same code again.
//!
//! Formats are those of the Open Compute Project's "OCP 8-bit Floating Point Specification (OFP8)"
//! (2023). Finite values beyond the largest saturate. One departure: in E4M3, which has no infinity,
//! an infinite value becomes NaN and not the largest value, so that an overflow stays visible.

use crate::{Element, par};

/// An 8-bit format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// 4 bits of exponent, 3 of mantissa: up to 448, down to 2^-9, no infinity. Weights, activations.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa: up to 57344, down to 2^-16. Gradients.
    E5m2,
}

impl Fp8 {
    /// The largest finite value.
    pub const fn max(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }

    /// Bits of mantissa that a code has and `f32` has beyond them.
    const fn shift(self) -> u32 {
        match self {
            Self::E4m3 => 20,
            Self::E5m2 => 21,
        }
    }

    /// The code nearest to `x`, ties to the even one.
    #[inline(always)]
    pub fn encode(self, x: f32) -> u8 {
        let shift = self.shift();
        // The format's exponent bias, its smallest normal number, and the power of two whose last
        // bit in f32 weighs as much as the format's smallest subnormal number.
        let (bias, min_normal, ruler, max_code) = match self {
            Self::E4m3 => (7, 1.0f32 / 64.0, 16384.0f32, 0x7e),
            Self::E5m2 => (15, 1.0 / 16384.0, 128.0, 0x7b),
        };
        let bits = x.to_bits();
        let (sign, abs) = ((bits >> 24) as u8 & 0x80, bits & 0x7fff_ffff);
        // Rounds the mantissa; a carry moves into the exponent, as it should.
        let rounded = abs.wrapping_add((1 << (shift - 1)) - 1).wrapping_add((abs >> shift) & 1);
        let normal = (rounded >> shift).wrapping_sub((127 - bias) << (23 - shift));
        // Adding the ruler rounds to multiples of the smallest subnormal number.
        let subnormal = (f32::from_bits(abs) + ruler).to_bits().wrapping_sub(ruler.to_bits());
        let finite = if abs < min_normal.to_bits() { subnormal } else { normal.min(max_code) };
        let infinite = if matches!(self, Self::E5m2) { 0x7c } else { 0x7f };
        // Selects, not branches: loops over this must vectorise.
        let code = if abs == f32::INFINITY.to_bits() { infinite } else { finite };
        let code = if abs > f32::INFINITY.to_bits() { 0x7f } else { code };
        sign | code as u8
    }

    /// The value of `code`, exact.
    pub fn decode(self, code: u8) -> f32 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let abs = code & 0x7f;
        let (unbias, infinite) = match self {
            Self::E4m3 => (f32::from_bits((127 + 120) << 23), u8::MAX),
            Self::E5m2 => (f32::from_bits((127 + 112) << 23), 0x7c),
        };
        if abs == infinite {
            sign * f32::INFINITY
        } else if abs > infinite || abs == 0x7f {
            f32::NAN
        } else {
            // The code's bits in f32's places are the value but for the bias, subnormals included.
            sign * f32::from_bits(u32::from(abs) << self.shift()) * unbias
        }
    }

    /// The smallest power of two, within 2^-126 and 2^126, by which `absmax` fits the format.
    /// 1 for zero.
    ///
    /// Tensors whose largest element is under 2^-118 (E4M3) or 2^-111 (E5M2) use less of the format.
    /// # Panics
    /// If `absmax` is negative, infinite or NaN.
    pub fn scale(self, absmax: f32) -> f32 {
        assert!((0.0..f32::INFINITY).contains(&absmax), "scale: absmax is {absmax}");
        if absmax == 0.0 {
            return 1.0;
        }
        let ratio = f64::from(absmax) / f64::from(self.max());
        // f64 holds every such ratio as a normal number: its exponent bits are its logarithm.
        let floor = (ratio.to_bits() >> 52) as i32 - 1023;
        let is_power = ratio.to_bits() << 12 == 0;
        power_of_two(if is_power { floor } else { floor + 1 }.clamp(-126, 126))
    }
}

/// The largest magnitude among the finite elements of `x`; 0 if there is none.
pub fn absmax<T: Element<Acc = f32>>(x: &[T]) -> f32 {
    const CUT_ELEMS: usize = 1 << 16;
    const INFINITY: u32 = f32::INFINITY.to_bits();
    // Magnitudes are ordered as their bits are, and a maximum of integers depends on no order.
    let of = |x: &[T]| {
        x.iter().fold(0, |max, x| {
            let abs = x.widen().to_bits() & 0x7fff_ffff;
            max.max(if abs < INFINITY { abs } else { 0 })
        })
    };
    if x.len() <= CUT_ELEMS {
        return f32::from_bits(of(x));
    }
    let cuts = par::tasks(x.len().div_ceil(CUT_ELEMS), |i| {
        of(&x[i * CUT_ELEMS..x.len().min((i + 1) * CUT_ELEMS)])
    });
    f32::from_bits(cuts.into_iter().fold(0, u32::max))
}

/// `codes[i]` stands for `src[i] / scale`, rounded once.
///
/// *Scratch:* none.
/// # Panics
/// If the lengths differ or `scale` is not one that [`Fp8::scale`] gives.
pub fn encode<T: Element<Acc = f32>>(codes: &mut [u8], src: &[T], format: Fp8, scale: f32) {
    assert_eq!(codes.len(), src.len(), "encode: codes and src differ in length");
    let inverse = inverse(scale);
    par::elems(
        codes,
        #[inline(always)]
        |start, cut| encode_cut(cut, &src[start..][..cut.len()], format, inverse),
    );
}

/// One loop a format, so that the format's numbers are constants in it.
fn encode_cut<T: Element<Acc = f32>>(codes: &mut [u8], src: &[T], format: Fp8, inverse: f32) {
    match format {
        Fp8::E4m3 => {
            for (code, x) in codes.iter_mut().zip(src) {
                *code = Fp8::E4m3.encode(scaled(x.widen(), inverse));
            }
        }
        Fp8::E5m2 => {
            for (code, x) in codes.iter_mut().zip(src) {
                *code = Fp8::E5m2.encode(scaled(x.widen(), inverse));
            }
        }
    }
}

/// `dst[i] = decode(codes[i]) * scale`: exact in f32 and bf16, rounded once in f16.
///
/// *Scratch:* 256 elements.
/// # Panics
/// If the lengths differ or `scale` is not one that [`Fp8::scale`] gives.
pub fn decode<T: Element<Acc = f32>>(dst: &mut [T], codes: &[u8], format: Fp8, scale: f32) {
    assert_eq!(dst.len(), codes.len(), "decode: dst and codes differ in length");
    let values = values::<T>(format, scale);
    par::elems(
        dst,
        #[inline(always)]
        |start, cut| {
            for (d, code) in cut.iter_mut().zip(&codes[start..]) {
                *d = values[usize::from(*code)];
            }
        },
    );
}

/// `dst[i]` is what `src[i]` would be after [`encode`] and [`decode`]; no codes are kept.
///
/// *Scratch:* 256 elements and 256 codes.
/// # Panics
/// If the lengths differ or `scale` is not one that [`Fp8::scale`] gives.
pub fn through<S, D>(dst: &mut [D], src: &[S], format: Fp8, scale: f32)
where
    S: Element<Acc = f32>,
    D: Element<Acc = f32>,
{
    assert_eq!(dst.len(), src.len(), "through: dst and src differ in length");
    let (inverse, values) = (inverse(scale), values::<D>(format, scale));
    par::elems(
        dst,
        #[inline(always)]
        |start, cut| {
            let mut codes = [0; 256];
            for (dst, src) in cut.chunks_mut(codes.len()).zip(src[start..].chunks(codes.len())) {
                let n_elems = dst.len();
                encode_cut(&mut codes[..n_elems], &src[..n_elems], format, inverse);
                for (d, code) in dst.iter_mut().zip(codes) {
                    *d = values[usize::from(code)];
                }
            }
        },
    );
}

/// Bytes of a tensor of codes: one an element, and the scale.
pub const fn fp8_bytes(n_elems: u64) -> u64 {
    n_elems + 4
}

/// What each code stands for.
fn values<T: Element<Acc = f32>>(format: Fp8, scale: f32) -> [T; 256] {
    inverse(scale); // refuses other scales
    std::array::from_fn(|code| T::narrow(format.decode(code as u8) * scale))
}

/// `x * inverse`, where a finite `x` stays finite.
#[inline(always)]
fn scaled(x: f32, inverse: f32) -> f32 {
    let y = x * inverse;
    if y.is_infinite() && x.is_finite() { f32::MAX.copysign(x) } else { y }
}

/// `1 / scale`, which is exact.
fn inverse(scale: f32) -> f32 {
    let is_power = scale.is_normal() && scale > 0.0 && scale.to_bits() << 9 == 0;
    assert!(is_power && (1.0 / scale).is_normal(), "the fp8 scale is {scale}, no power of two");
    1.0 / scale
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

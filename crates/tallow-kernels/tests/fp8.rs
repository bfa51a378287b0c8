//! 8-bit floats against their definition in f64, at every code, every tie and beyond.

use half::{bf16, f16};
use tallow_kernels::{
    Element,
    fp8::{self, Fp8},
};

const FORMATS: [Fp8; 2] = [Fp8::E4m3, Fp8::E5m2];

/// The value of a code by the tables of the specification.
fn value(format: Fp8, code: u8) -> f64 {
    let (mantissa_bits, bias) = match format {
        Fp8::E4m3 => (3, 7),
        Fp8::E5m2 => (2, 15),
    };
    let sign = if code >= 0x80 { -1.0 } else { 1.0 };
    let exponent = i32::from(code & 0x7f) >> mantissa_bits;
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1));
    let unit = f64::from(1 << mantissa_bits);
    let abs = match (format, exponent, code & 0x7f) {
        (Fp8::E4m3, _, 0x7f) => f64::NAN,
        (Fp8::E5m2, 31, 0x7c) => f64::INFINITY,
        (Fp8::E5m2, 31, _) => f64::NAN,
        (_, 0, _) => mantissa / unit * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa / unit) * 2f64.powi(exponent - bias),
    };
    sign * abs
}

/// The codes of the finite values that are not negative, in increasing order.
fn finite_codes(format: Fp8) -> std::ops::RangeInclusive<u8> {
    0..=if format == Fp8::E4m3 { 0x7e } else { 0x7b }
}

/// The nearest code by search over all of them, ties to even; saturating.
fn nearest(format: Fp8, x: f64) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() || (x.is_infinite() && format == Fp8::E4m3) {
        return sign | 0x7f;
    }
    if x.is_infinite() {
        return sign | 0x7c;
    }
    let top = f64::from(format.max());
    let distance = |code: u8| (value(format, code) - x.abs().min(top)).abs();
    let best = finite_codes(format)
        .min_by(|a, b| distance(*a).total_cmp(&distance(*b)).then((a & 1).cmp(&(b & 1))));
    sign | best.expect("there are finite codes")
}

#[test]
fn all_codes_round_trip() {
    for format in FORMATS {
        for code in 0..=255u8 {
            let expected = value(format, code);
            let got = f64::from(format.decode(code));
            assert!(got == expected || got.is_nan() && expected.is_nan(), "{format:?} {code:#x}");
            assert_eq!(got.is_sign_negative() && !got.is_nan(), code >= 0x80 && !got.is_nan());
            if !got.is_nan() {
                assert_eq!(format.encode(format.decode(code)), code, "{format:?} {code:#x}");
            }
        }
        let nans = (0..=255u8).filter(|code| format.decode(*code).is_nan()).count();
        assert_eq!(nans, if format == Fp8::E4m3 { 2 } else { 6 });
        let max = value(format, *finite_codes(format).end());
        assert_eq!(f64::from(format.max()), max);
    }
}

#[test]
fn every_tie_and_its_neighbours_round_as_defined() {
    for format in FORMATS {
        let codes: Vec<u8> = finite_codes(format).collect();
        for pair in codes.windows(2) {
            let [low, high] = [pair[0], pair[1]].map(|code| value(format, code));
            let tie = ((low + high) / 2.0) as f32; // exact
            for x in [tie, tie.next_down(), tie.next_up()].into_iter().flat_map(|x| [x, -x]) {
                let expected = nearest(format, f64::from(x));
                assert_eq!(format.encode(x), expected, "{format:?} {x:e}");
            }
            assert_eq!(format.encode(tie) & 1, 0, "{format:?}: a tie goes to the even code");
        }
    }
}

#[test]
fn special_values() {
    for format in FORMATS {
        let top = *finite_codes(format).end();
        let rows = [
            (0.0, 0),
            (-0.0, 0x80),
            (f32::from_bits(1), 0),
            (-f32::MIN_POSITIVE, 0x80),
            (format.max().next_up(), top),
            (1.1 * format.max(), top),
            (f32::MAX, top),
            (-f32::MAX, top | 0x80),
            (f32::INFINITY, if format == Fp8::E4m3 { 0x7f } else { 0x7c }),
            (f32::NEG_INFINITY, if format == Fp8::E4m3 { 0xff } else { 0xfc }),
            (f32::NAN, 0x7f),
            (f32::from_bits(0x7f80_0001), 0x7f),
        ];
        for (x, expected) in rows {
            assert_eq!(format.encode(x), expected, "{format:?} {x:e}");
        }
    }
}

#[test]
fn all_half_floats_round_as_defined() {
    fn check<T: Element<Acc = f32>>(format: Fp8, of: fn(u16) -> T) {
        let src: Vec<T> = (0..=u16::MAX).map(of).collect();
        let mut codes = vec![0; src.len()];
        fp8::encode(&mut codes, &src, format, 1.0);
        for (x, code) in src.iter().zip(codes) {
            assert_eq!(code, nearest(format, f64::from(x.widen())), "{format:?} {x:?}");
        }
    }
    for format in FORMATS {
        check(format, bf16::from_bits);
        check(format, f16::from_bits);
    }
}

#[test]
fn floats_of_every_exponent_round_as_defined() {
    for format in FORMATS {
        // Every exponent and sign, with mantissas that are spread, at the ends and in the middle.
        for high in 0..512u32 {
            for mantissa in [0, 1, 0x3f_ffff, 0x40_0000, 0x40_0001, 0x7f_ffff, 0x2b_33e1] {
                let x = f32::from_bits(high << 23 | mantissa);
                assert_eq!(format.encode(x), nearest(format, f64::from(x)), "{format:?} {x:e}");
            }
        }
    }
}

#[test]
fn the_scale_is_the_smallest_power_of_two_that_fits() {
    for format in FORMATS {
        let max = format.max();
        for x in [1e-30f32, 0.7, max.next_down(), max, max.next_up(), 2.0 * max, 3e38, f32::MAX] {
            let scale = format.scale(x);
            assert_eq!(scale.to_bits() << 9, 0, "{scale} is a power of two");
            assert!(x / scale <= max && x / (scale / 2.0) > max, "{format:?} {x:e} {scale:e}");
        }
        assert_eq!(format.scale(0.0), 1.0);
        assert_eq!(format.scale(max), 1.0);
        assert_eq!(format.scale(f32::from_bits(1)), f32::MIN_POSITIVE);
    }
}

#[test]
#[should_panic(expected = "absmax is NaN")]
fn a_scale_of_nan_panics() {
    Fp8::E4m3.scale(f32::NAN);
}

#[test]
#[should_panic(expected = "the fp8 scale is 3")]
fn other_scales_panic() {
    fp8::encode(&mut [0], &[1f32], Fp8::E4m3, 3.0);
}

#[test]
fn slices_are_scaled_by_their_largest_element() {
    for n in [0, 1, 7, 8, 9, 31, 33, 1023, 70_000] {
        for (format, exponent) in FORMATS.into_iter().flat_map(|f| [(f, -40), (f, 0), (f, 60)]) {
            let src: Vec<f32> = tallow_testkit::values_f32(n as u64, n)
                .iter()
                .map(|x| x * 2f32.powi(exponent))
                .collect();
            let largest = src.iter().fold(0f32, |max, x| max.max(x.abs()));
            assert_eq!(fp8::absmax(&src), largest);
            let scale = format.scale(largest);
            let mut codes = vec![0; n];
            fp8::encode(&mut codes, &src, format, scale);
            let (mut wide, mut short, mut direct) =
                (vec![0f32; n], vec![bf16::ZERO; n], vec![bf16::ZERO; n]);
            fp8::decode(&mut wide, &codes, format, scale);
            fp8::decode(&mut short, &codes, format, scale);
            fp8::through(&mut direct, &src, format, scale);
            for i in 0..n {
                let expected = nearest(format, f64::from(src[i]) / f64::from(scale));
                assert_eq!(codes[i], expected);
                assert_eq!(f64::from(wide[i]), value(format, expected) * f64::from(scale));
                // bf16 holds every code times a power of two.
                assert_eq!((short[i].to_f32(), direct[i]), (wide[i], short[i]));
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_so_and_scales_nothing() {
    let src = [1f32, f32::INFINITY, f32::NAN, f32::NEG_INFINITY, -3.0];
    assert_eq!(fp8::absmax(&src), 3.0);
    assert_eq!(fp8::absmax(&[f32::NAN]), 0.0);
    for format in FORMATS {
        let mut dst = [0f32; 5];
        fp8::through(&mut dst, &src, format, format.scale(3.0));
        assert_eq!((dst[0], dst[4]), (1.0, -3.0));
        assert!(dst[1..4].iter().all(|x| !x.is_finite()));
    }
    // A scale too small for the values saturates them.
    let mut dst = [0f32; 1];
    fp8::through(&mut dst, &[3e38f32], Fp8::E4m3, 2f32.powi(-100));
    assert_eq!(dst[0], 448.0 * 2f32.powi(-100));
}

#[test]
#[should_panic(expected = "differ in length")]
fn lengths_must_agree() {
    fp8::decode(&mut [0f32; 2], &[0; 3], Fp8::E4m3, 1.0);
}

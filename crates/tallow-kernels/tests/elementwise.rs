//! Activations, rotary embedding, dropout, casts, and embedding rows.

mod support;
use half::{bf16, f16};
use support::{f64s, same_on_any_thread_count, to};
use tallow_kernels::{Element, activation::*, cast::cast, dropout::*, embedding::*, rotary::*};
use tallow_testkit::{Reference, Tol, assert_close, central_difference, values, widen};

/// Against PyTorch in f64, computed in f32.
const F32: Tol = Tol::Rel(1e-5);
/// Against central differences of step `STEP` in f64.
const DIFFERENCE: Tol = Tol::Rel(1e-6);
const STEP: f64 = 1e-5;

const SIZES: [usize; 6] = [1, 7, 8, 9, 17, 33];

/// Name, forward, backward; backward reads the input, or for relu the output.
type Row<T> = (&'static str, fn(&mut [T], &[T]), fn(&mut [T], &[T], &[T]));

fn activations<T: Element>() -> [Row<T>; 4] {
    [
        ("gelu_tanh", gelu_tanh, gelu_tanh_backward),
        ("gelu_erf", gelu_erf, gelu_erf_backward),
        ("silu", silu, silu_backward),
        ("relu", relu, relu_backward),
    ]
}

/// Output and gradient.
fn both<T: Element>((name, forward, backward): Row<T>, x: &[T], dout: &[T]) -> [Vec<T>; 2] {
    let mut out = vec![T::default(); x.len()];
    forward(&mut out, x);
    let mut dx = vec![T::default(); x.len()];
    backward(&mut dx, if name == "relu" { &out } else { x }, dout);
    [out, dx]
}

#[test]
fn activations_match_pytorch() {
    let reference = Reference::load();
    for row in activations::<f32>() {
        let name = row.0;
        assert_eq!(reference.cases(name).len(), 1);
        let get = |part: &str| reference.values(&format!("{name}.{part}")).data;
        let [out, dx] = both(row, &get("in.x"), &get("dout"));
        assert_close(name, &widen(&out), &widen(&get("out")), F32);
        assert_close(name, &widen(&dx), &widen(&get("grad.x")), F32);
    }
}

#[test]
fn activation_gradients_match_central_differences() {
    for row in activations::<f64>() {
        for n in SIZES {
            let x: Vec<f64> = values(1, n).iter().map(|x| 4.0 * x).collect();
            let dout = values(2, n);
            let want = central_difference(
                |x| both(row, x, &dout)[0].iter().zip(&dout).map(|(y, d)| y * d).sum(),
                &x,
                STEP,
            );
            assert_close(row.0, &both(row, &x, &dout)[1], &want, DIFFERENCE);
        }
    }
}

#[test]
fn half_activations_are_the_f32_result_rounded_once() {
    fn check<T: Element<Acc = f32>>() {
        let (x, dout) = (to::<T>(&values(1, 33)), to::<T>(&values(2, 33)));
        for (half, full) in activations::<T>().into_iter().zip(activations::<f32>()) {
            let got = both(half, &x, &dout);
            let want = both(full, &to::<f32>(&f64s(&x)), &to::<f32>(&f64s(&dout)));
            for (got, want) in got.iter().zip(want) {
                assert_close(full.0, &f64s(got), &f64s(&to::<T>(&widen(&want))), Tol::Exact);
            }
        }
    }
    check::<bf16>();
    check::<f16>();
}

#[test]
fn activations_at_the_ends() {
    const INF: f32 = f32::INFINITY;
    // Finite but with an infinite square or cube in f32.
    const BIG: f32 = 1e30;
    for row in activations::<f32>() {
        let [out, dx] = both(row, &[f32::NAN, INF, BIG, -BIG, 0.0], &[1.0; 5]);
        assert!(out[0].is_nan() && dx[0].is_nan(), "{}", row.0);
        assert_eq!(out[1..], [INF, BIG, 0.0, 0.0], "{}", row.0);
        assert_eq!(dx[2..4], [1.0, 0.0], "{}", row.0);
        assert_eq!(dx[4], if row.0 == "relu" { 0.0 } else { 0.5 }, "{}", row.0);
    }
    let mut out = [0.0; 4];
    add_relu(&mut out, &[1.0, 1.0, f32::NAN, -INF], &[2.0, -2.0, 1.0, 1.0]);
    assert_close("add_relu", &widen(&out), &[3.0, 0.0, f64::NAN, 0.0], Tol::Exact);
}

#[test]
fn add_relu_rounds_once() {
    // 256 + 1 is a tie in bf16 that rounds to 256; with the rest it is not.
    let (mut out, a, b) = ([bf16::ZERO], to::<bf16>(&[256.0]), to::<bf16>(&[1.0078125]));
    add_relu(&mut out, &a, &b);
    assert_eq!(f64s(&out), [258.0]);
}

#[test]
fn swiglu_is_its_formula_and_rounds_once() {
    for n in SIZES {
        let [gate, up, dout] = [1, 2, 3].map(|seed| values(seed, n));
        let silu = |g: f64| g / (1.0 + (-g).exp());
        let of = |gate: &[f64], up: &[f64]| -> Vec<f64> {
            gate.iter().zip(up).map(|(&g, u)| silu(g) * u).collect()
        };
        let (mut out, mut dgate) = (vec![0.0; n], vec![0.0; n]);
        swiglu(&mut out, &gate, &up);
        assert_close("swiglu", &out, &of(&gate, &up), Tol::Rel(1e-14));
        swiglu_backward_gate(&mut dgate, &gate, &up, &dout);
        let loss = |gate: &[f64]| of(gate, &up).iter().zip(&dout).map(|(o, d)| o * d).sum();
        let want = central_difference(loss, &gate, STEP);
        assert_close("swiglu_backward_gate", &dgate, &want, DIFFERENCE);
        let [gate, up, dout] = [gate, up, dout].map(|x| to::<bf16>(&x));
        let wide = |x: &[bf16]| to::<f32>(&f64s(x));
        let (mut half, mut full) = (vec![bf16::ZERO; n], vec![0f32; n]);
        swiglu(&mut half, &gate, &up);
        swiglu(&mut full, &wide(&gate), &wide(&up));
        assert_close("swiglu", &f64s(&half), &f64s(&to::<bf16>(&widen(&full))), Tol::Exact);
        swiglu_backward_gate(&mut half, &gate, &up, &dout);
        swiglu_backward_gate(&mut full, &wide(&gate), &wide(&up), &wide(&dout));
        assert_close("gate", &f64s(&half), &f64s(&to::<bf16>(&widen(&full))), Tol::Exact);
    }
}

#[test]
fn a_table_from_a_later_token_is_the_rest_of_the_whole() {
    let (cos, sin) = rope_table::<f64>(9, 6, 100.0);
    let part = rope_table_of::<f64>(4, 5, &rope_frequencies(6, 100.0));
    assert_eq!(part, (cos[4 * 3..].to_vec(), sin[4 * 3..].to_vec()));
}

#[test]
fn rope_matches_pytorch() {
    let reference = Reference::load();
    for (style, name) in [(Rope::Half, "rope_half"), (Rope::Interleaved, "rope_interleaved")] {
        let case = &reference.cases(name)[0];
        let get = |part: &str| reference.values(&format!("{name}.{part}"));
        let x = get("in.x");
        let [n_tokens, head_dim] = [x.shape[2], x.shape[3]];
        let (cos, sin) = rope_table::<f32>(n_tokens, head_dim, case.f64("base"));
        let (mut out, mut dx) = (vec![0f32; x.data.len()], vec![0f32; x.data.len()]);
        rope(&mut out, &x.data, &cos, &sin, head_dim, style);
        rope_backward(&mut dx, &get("dout").data, &cos, &sin, head_dim, style);
        assert_close(name, &widen(&out), &widen(&get("out").data), F32);
        assert_close(name, &widen(&dx), &widen(&get("grad.x").data), F32);
    }
}

#[test]
fn rope_gradients_match_central_differences_and_undo_the_rotation() {
    for style in [Rope::Half, Rope::Interleaved] {
        for (n_tokens, head_dim) in [(1, 2), (7, 8), (3, 18), (5, 34)] {
            let n = 2 * n_tokens * head_dim;
            let (x, dout) = (values(1, n), values(2, n));
            let (cos, sin) = rope_table::<f64>(n_tokens, head_dim, 10_000.0);
            let turned = |x: &[f64]| {
                let mut out = vec![f64::NAN; n];
                rope(&mut out, x, &cos, &sin, head_dim, style);
                out
            };
            let back = |dout: &[f64]| {
                let mut dx = vec![f64::NAN; n];
                rope_backward(&mut dx, dout, &cos, &sin, head_dim, style);
                dx
            };
            let want = central_difference(
                |x| turned(x).iter().zip(&dout).map(|(y, d)| y * d).sum(),
                &x,
                STEP,
            );
            assert_close("rope_backward", &back(&dout), &want, DIFFERENCE);
            // A rotation keeps lengths: four roundings of values below 2.
            let four_roundings = Tol::Rel(4.0 * f64::EPSILON);
            assert_close("rope back and forth", &back(&turned(&x)), &x, four_roundings);
        }
    }
}

#[test]
fn philox_gives_the_published_vectors() {
    // Random123, examples/kat_vectors, "philox4x32 10".
    const ONES: u32 = u32::MAX;
    for (counter, key, want) in [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([ONES; 4], [ONES; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ] {
        assert_eq!(philox4x32(counter, key), want);
    }
}

const KEY: DropKey = DropKey { seed: 42, stream: 7 };

#[test]
fn dropout_is_its_definition() {
    for n in SIZES.into_iter().chain([0, 20_001]) {
        for p in [0.0, 0.1, 0.5, 0.999] {
            let x: Vec<f64> = values(1, n);
            let mut out = vec![f64::NAN; n];
            dropout(&mut out, &x, p, KEY).unwrap();
            for i in 0..n {
                let word = philox4x32([(i / 4) as u32, 0, 7, 0], [42, 0])[i % 4];
                let keep = f64::from(word) >= p * 4_294_967_296.0;
                let want = if keep { x[i] * (1.0 / (1.0 - p)) } else { 0.0 };
                assert_eq!(out[i], want, "element {i} of {n} with p {p}");
            }
        }
    }
}

#[test]
fn dropout_keeps_the_mean_and_separates_streams() {
    const N: usize = 100_000;
    const P: f64 = 0.3;
    let mask = |key| {
        let mut out = vec![0f32; N];
        dropout(&mut out, &[1f32; N], P, key).unwrap();
        out
    };
    let kept = |mask: &[f32]| mask.iter().filter(|&&m| m > 0.0).count() as f64;
    // Five standard deviations of a binomial share, at their largest.
    let five_sigma = 5.0 * (0.25 / N as f64).sqrt();
    let base = mask(KEY);
    assert_close("kept", &[kept(&base) / N as f64], &[1.0 - P], Tol::Rel(five_sigma / (1.0 - P)));
    for other in [DropKey { stream: 8, ..KEY }, DropKey { seed: 43, ..KEY }] {
        // Independent masks agree where both keep or both drop.
        let agree = base.iter().zip(mask(other)).filter(|(a, b)| **a == *b).count() as f64;
        let want = P * P + (1.0 - P) * (1.0 - P);
        assert_close("agreement", &[agree / N as f64], &[want], Tol::Rel(five_sigma / want));
    }
    assert_eq!(base, mask(KEY));
}

#[test]
fn dropout_refuses_probabilities_outside_its_range() {
    for p in [1.0, -0.1, 1.5, f64::INFINITY, f64::NAN] {
        let error = dropout(&mut [0f32], &[1.0], p, KEY).unwrap_err();
        assert!(error.to_string().contains(&format!("{p}")), "{error}");
    }
}

#[test]
fn random_numbers_have_their_moments() {
    const N: u64 = 200_000;
    let moments = |f: fn(DropKey, u64) -> f64| {
        let x: Vec<f64> = (0..N).map(|i| f(KEY, i)).collect();
        let moment = |k| x.iter().map(|x| x.powi(k)).sum::<f64>() / N as f64;
        let neighbours = x.windows(2).map(|w| w[0] * w[1]).sum::<f64>() / N as f64;
        [moment(1), moment(2), moment(3), moment(4), neighbours]
    };
    // Five standard errors, the largest that of the fourth moment of a normal: sqrt(96 / N).
    let tol = Tol::Rel(5.0 * (96.0f64 / N as f64).sqrt() / 3.0);
    assert_close("normal", &moments(normal), &[0.0, 1.0, 0.0, 3.0, 0.0], tol);
    // The largest here is that of x: sqrt(1 / 12 N).
    let tol = Tol::Rel(5.0 * (1.0 / 12.0 / N as f64).sqrt() / 0.5);
    let want = [1.0 / 2.0, 1.0 / 3.0, 1.0 / 4.0, 1.0 / 5.0, 1.0 / 4.0];
    assert_close("uniform", &moments(uniform), &want, tol);
    assert!((0..N).all(|i| (0.0..1.0).contains(&uniform(KEY, i)) && normal(KEY, i).is_finite()));
}

#[test]
fn casts_round_once() {
    fn check<S: Element, D: Element>(rows: &[(S, f64)]) {
        let src: Vec<S> = rows.iter().map(|row| row.0).collect();
        let want: Vec<f64> = rows.iter().map(|row| row.1).collect();
        let mut dst = vec![D::default(); src.len()];
        cast(&mut dst, &src);
        let what = format!("{} to {}", std::any::type_name::<S>(), std::any::type_name::<D>());
        assert_close(&what, &f64s(&dst), &want, Tol::Exact);
    }
    let p = |e: i32| 2f64.powi(e);
    // One ulp above 1 is 2^-7 in bf16, 2^-10 in f16; half of it is a tie. The 2^-40 beside a tie
    // is lost in f32, so a cast by way of f32 would round these to even.
    check::<f64, bf16>(&[
        (1.0 + p(-8), 1.0),
        (1.0 + p(-8) + p(-40), 1.0 + p(-7)),
        (1.0 + 3.0 * p(-8), 1.0 + p(-6)),
        (1.0 + 3.0 * p(-8) - p(-40), 1.0 + p(-7)),
        (-1.0 - p(-8) - p(-40), -1.0 - p(-7)),
        (f64::NAN, f64::NAN),
        (f64::NEG_INFINITY, f64::NEG_INFINITY),
        (1e300, f64::INFINITY),
        (f64::from(f32::MAX), f64::INFINITY),
        (p(-133), p(-133)),
        (p(-134), 0.0),
        (p(-134) + p(-180), p(-133)),
        (-1e-300, 0.0),
    ]);
    check::<f64, f16>(&[
        (1.0 + p(-11), 1.0),
        (1.0 + p(-11) + p(-40), 1.0 + p(-10)),
        (65519.999, 65504.0),
        (65520.0, f64::INFINITY),
        (p(-25), 0.0),
        (p(-25) + p(-70), p(-24)),
        (f64::NAN, f64::NAN),
    ]);
    check::<f64, f32>(&[(1.0 + p(-24), 1.0), (1.0 + p(-24) + p(-50), 1.0 + p(-23))]);
    check::<f32, bf16>(&[
        (1.0 + 2f32.powi(-8), 1.0),
        (f32::NAN, f64::NAN),
        (f32::MAX, f64::INFINITY),
    ]);
    check::<bf16, f16>(&[(bf16::MAX, f64::INFINITY), (bf16::ONE, 1.0), (bf16::NAN, f64::NAN)]);
    check::<f16, bf16>(&[(f16::MAX, 65536.0), (f16::from_bits(1), p(-24))]);
    check::<bf16, f64>(&[(bf16::MAX, bf16::MAX.to_f64())]);
}

#[test]
fn every_half_survives_a_round_trip() {
    fn check<T: Element + Into<f64>>(all: impl Iterator<Item = T>) {
        let all: Vec<T> = all.collect();
        let (mut wide, mut back) = (vec![0f64; all.len()], vec![T::default(); all.len()]);
        cast(&mut wide, &all);
        cast(&mut back, &wide);
        assert_close("round trip", &f64s(&back), &f64s(&all), Tol::Exact);
        assert_close("f64", &wide, &f64s(&all), Tol::Exact);
    }
    check((0..=u16::MAX).map(bf16::from_bits));
    check((0..=u16::MAX).map(f16::from_bits));
}

#[test]
fn embedding_matches_pytorch() {
    let reference = Reference::load();
    let get = |part: &str| reference.values(&format!("embedding.{part}"));
    let ids: Vec<u32> =
        reference.ids("embedding.in.ids").1.iter().map(|&id| id.try_into().unwrap()).collect();
    let weight = get("in.weight");
    let d = weight.shape[1];
    let (mut out, mut dweight) = (vec![0f32; ids.len() * d], vec![f32::NAN; weight.data.len()]);
    embedding(&mut out, &weight.data, &ids, d).unwrap();
    embedding_backward(&mut dweight, &ids, &get("dout").data, d, None).unwrap();
    assert_close("out", &widen(&out), &widen(&get("out").data), Tol::Exact);
    assert_close("dweight", &widen(&dweight), &widen(&get("grad.weight").data), F32);
}

#[test]
fn embedding_gradients_add_up_repeated_ids_in_order() {
    for d in SIZES.into_iter().chain([127, 128, 300]) {
        let ids: Vec<u32> = (0..40).map(|i| (i * i + 1) % 11).collect();
        let dout = values(3, ids.len() * d);
        for padding in [None, Some(1)] {
            let mut want = vec![0.0; 12 * d];
            for (i, &id) in ids.iter().enumerate().filter(|(_, id)| Some(**id) != padding) {
                for j in 0..d {
                    want[id as usize * d + j] += dout[i * d + j];
                }
            }
            let mut dweight = vec![f64::NAN; 12 * d];
            embedding_backward(&mut dweight, &ids, &dout, d, padding).unwrap();
            assert_eq!(dweight, want, "d {d} padding {padding:?}");
        }
    }
    // 300 ones of one id: in bf16 the sum would stall at 256.
    let mut dweight = [bf16::NAN];
    embedding_backward(&mut dweight, &[0; 300], &to::<bf16>(&[1.0; 300]), 1, None).unwrap();
    assert_eq!(f64s(&dweight), [300.0]);
}

#[test]
fn embedding_names_an_id_beyond_the_table() {
    let (mut out, mut dweight) = ([7f32; 6], [7f32; 8]);
    for error in [
        embedding(&mut out, &[0.0; 8], &[3, 4, 9], 2).unwrap_err(),
        embedding_backward(&mut dweight, &[3, 4, 9], &[1.0; 6], 2, None).unwrap_err(),
    ] {
        assert_eq!(error, EmbeddingError::Id { id: 4, position: 1, n_ids: 4 });
    }
    assert_eq!((out, dweight), ([7.0; 6], [7.0; 8]));
}

#[test]
fn bits_do_not_depend_on_the_thread_count() {
    const N: usize = 40_000;
    let (x, dout) = (to::<bf16>(&values(1, N)), to::<bf16>(&values(2, N)));
    for row in activations::<bf16>() {
        same_on_any_thread_count(|| both(row, &x, &dout));
    }
    same_on_any_thread_count(|| {
        let mut out = x.clone();
        dropout(&mut out, &x, 0.5, KEY).unwrap();
        out
    });
    same_on_any_thread_count(|| {
        let ids: Vec<u32> = (0..N as u32 / 8).map(|i| i * i % 97).collect();
        let (mut dweight, mut out) = (to::<bf16>(&[0.0; 97 * 8]), x.clone());
        embedding_backward(&mut dweight, &ids, &dout, 8, None).unwrap();
        embedding(&mut out, &dweight, &ids, 8).unwrap();
        (dweight, out)
    });
    let (cos, sin) = rope_table::<f32>(50, 8, 10_000.0);
    same_on_any_thread_count(|| {
        let mut out = x.clone();
        rope(&mut out, &x, &cos, &sin, 8, Rope::Half);
        out
    });
    same_on_any_thread_count(|| {
        let mut wide = vec![0f64; N];
        cast(&mut wide, &x);
        wide
    });
}

#[test]
fn empty_inputs_are_allowed() {
    for row in activations::<f32>() {
        assert_eq!(both(row, &[], &[]), [const { Vec::<f32>::new() }; 2]);
    }
    rope(&mut [0f32; 0], &[], &[], &[], 8, Rope::Half);
    embedding(&mut [0f32; 0], &[], &[], 3).unwrap();
    let mut dweight = [1f32; 6];
    embedding_backward(&mut dweight, &[], &[], 3, None).unwrap();
    assert_eq!(dweight, [0.0; 6]);
}

//! Norms, softmax and reductions: kernels that work on rows.

mod support;
use half::{bf16, f16};
use support::{f64s, same_on_any_thread_count, to};
use tallow_kernels::{Element, norm::*, reduce::*, softmax::*};
use tallow_testkit::{Reference, Tol, assert_close, central_difference, values, widen};

/// Against PyTorch in f64, computed in f32.
const F32: Tol = Tol::Rel(1e-5);
/// Against central differences of step `STEP` in f64.
const DIFFERENCE: Tol = Tol::Rel(1e-6);
const STEP: f64 = 1e-5;
/// The row sum that PRE-3 asks of a softmax in half precision.
const ROW_SUM: Tol = Tol::Rel(1e-2);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    LayerNorm,
    RmsNorm,
    Softmax,
    LogSoftmax,
}
use Op::*;
const OPS: [Op; 4] = [LayerNorm, RmsNorm, Softmax, LogSoftmax];

#[derive(Clone)]
struct Inputs {
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    dout: Vec<f64>,
    eps: f64,
}

impl Inputs {
    fn new(n_rows: usize, n_cols: usize) -> Self {
        let n = n_rows * n_cols;
        Self {
            x: values(1, n),
            weight: values(2, n_cols),
            bias: values(3, n_cols),
            dout: values(4, n),
            eps: 1e-5,
        }
    }
}

fn forward<T: Element>(op: Op, inputs: &Inputs) -> Vec<T> {
    let (x, n_cols) = (to::<T>(&inputs.x), inputs.weight.len());
    let (weight, bias) = (to(&inputs.weight), to(&inputs.bias));
    let mut out = to::<T>(&vec![f64::NAN; x.len()]);
    match op {
        LayerNorm => layer_norm(&mut out, &x, Some(&weight), Some(&bias), n_cols, inputs.eps),
        RmsNorm => rms_norm(&mut out, &x, Some(&weight), n_cols, inputs.eps),
        Softmax => softmax(&mut out, &x, n_cols),
        LogSoftmax => log_softmax(&mut out, &x, n_cols),
    }
    out
}

/// Gradients of `x`, weight and bias; empty where the op has no such input.
fn backward<T: Element>(op: Op, inputs: &Inputs) -> (Vec<T>, Vec<T::Acc>, Vec<T::Acc>) {
    let (x, dout, n_cols) = (to::<T>(&inputs.x), to::<T>(&inputs.dout), inputs.weight.len());
    let weight = to(&inputs.weight);
    let mut dx = to::<T>(&vec![f64::NAN; x.len()]);
    let [mut dw, mut db] = [to(&vec![f64::NAN; n_cols]), to(&vec![f64::NAN; n_cols])];
    let eps = inputs.eps;
    match op {
        LayerNorm => {
            let (dw, db) = (Some(&mut dw[..]), Some(&mut db[..]));
            layer_norm_backward(Some(&mut dx), dw, db, &x, Some(&weight), &dout, n_cols, eps);
        }
        RmsNorm => {
            let dw = Some(&mut dw[..]);
            rms_norm_backward(Some(&mut dx), dw, &x, Some(&weight), &dout, n_cols, eps);
            db.clear();
        }
        Softmax | LogSoftmax => {
            let backward = if op == Softmax { softmax_backward } else { log_softmax_backward };
            backward(&mut dx, &forward::<T>(op, inputs), &dout, n_cols);
            dw.clear();
            db.clear();
        }
    }
    (dx, dw, db)
}

/// Outputs and all gradients in one list.
fn everything<T: Element>(op: Op, inputs: &Inputs) -> Vec<f64> {
    let (dx, dw, db) = backward::<T>(op, inputs);
    [f64s(&forward::<T>(op, inputs)), f64s(&dx), f64s(&dw), f64s(&db)].concat()
}

#[test]
fn matches_pytorch() {
    let reference = Reference::load();
    for (op, name) in
        [(LayerNorm, "layer_norm"), (RmsNorm, "rms_norm"), (Softmax, "softmax_last_dim")]
    {
        let cases = reference.cases(name);
        assert_eq!(cases.len(), 3, "{name}");
        for case in cases {
            let get = |part: &str| {
                let name = format!("{}.{part}", case.name);
                if reference.has(&name) { widen(&reference.values(&name).data) } else { vec![] }
            };
            let n_cols = *reference.values(&format!("{}.out", case.name)).shape.last().unwrap();
            let inputs = Inputs {
                x: get("in.x"),
                weight: if op == Softmax { vec![0.0; n_cols] } else { get("in.weight") },
                bias: if op == LayerNorm { get("in.bias") } else { vec![0.0; n_cols] },
                dout: get("dout"),
                eps: if op == Softmax { 0.0 } else { case.f64("eps") },
            };
            let (dx, dw, db) = backward::<f32>(op, &inputs);
            for (part, got) in [
                ("out", forward::<f32>(op, &inputs)),
                ("grad.x", dx),
                ("grad.weight", dw),
                ("grad.bias", db),
            ] {
                assert_close(&format!("{}.{part}", case.name), &widen(&got), &get(part), F32);
            }
        }
    }
}

#[test]
fn gradients_match_central_differences() {
    for op in OPS {
        for n_cols in [1, 7, 8, 9, 17, 33] {
            let inputs = Inputs::new(3, n_cols);
            let loss = |inputs: &Inputs| -> f64 {
                forward::<f64>(op, inputs).iter().zip(&inputs.dout).map(|(y, d)| y * d).sum()
            };
            let with = |f: fn(&mut Inputs) -> &mut Vec<f64>, v: &[f64]| {
                let mut moved = inputs.clone();
                f(&mut moved).copy_from_slice(v);
                loss(&moved)
            };
            let (dx, dw, db) = backward::<f64>(op, &inputs);
            for (name, got, at, f) in [
                ("dx", dx, &inputs.x, (|i| &mut i.x) as fn(&mut Inputs) -> &mut Vec<f64>),
                ("dweight", dw, &inputs.weight, |i| &mut i.weight),
                ("dbias", db, &inputs.bias, |i| &mut i.bias),
            ] {
                if got.is_empty() {
                    continue;
                }
                let want = central_difference(|v| with(f, v), at, STEP);
                if n_cols == 1 && want.iter().all(|w| w.abs() < 1e-3) {
                    // One column: softmax is constant, and a norm nearly so. The difference is
                    // all rounding; the gradient must be as small.
                    let largest = got.iter().fold(0.0f64, |m, g| m.max(g.abs()));
                    assert!(largest < 1e-3, "{op:?} {name}: {largest}");
                    continue;
                }
                assert_close(&format!("{op:?} {n_cols} {name}"), &got, &want, DIFFERENCE);
            }
        }
    }
}

#[test]
fn half_types_are_the_f32_result_rounded_once() {
    fn check<T: Element<Acc = f32>>(op: Op, n_cols: usize) {
        let mut inputs = Inputs::new(5, n_cols);
        // Both types must see the same numbers.
        inputs.x = f64s(&to::<T>(&inputs.x));
        inputs.dout = f64s(&to::<T>(&inputs.dout));
        let rounded = |x: &[f32]| f64s(&to::<T>(&widen(x)));
        let what = format!("{op:?} {n_cols}");
        let out = f64s(&forward::<T>(op, &inputs));
        assert_close(&what, &out, &rounded(&forward::<f32>(op, &inputs)), Tol::Exact);
        if matches!(op, LayerNorm | RmsNorm) {
            let (half, full) = (backward::<T>(op, &inputs), backward::<f32>(op, &inputs));
            assert_close(&what, &f64s(&half.0), &rounded(&full.0), Tol::Exact);
            assert_eq!((half.1, half.2), (full.1, full.2), "{what}");
        }
    }
    for op in OPS {
        for n_cols in [1, 7, 8, 9, 17, 33, 256] {
            // Softmax stores exponentials in f32 and recomputes them for half: the same values.
            check::<bf16>(op, n_cols);
            check::<f16>(op, n_cols);
        }
    }
}

#[test]
fn absent_parameters_are_ones_and_zeros() {
    let Inputs { x, dout, .. } = Inputs::new(3, 9);
    let (ones, zeros) = ([1.0; 9], [0.0; 9]);
    let run = |weight: Option<&[f64]>, bias: Option<&[f64]>| {
        let [mut out, mut dx, mut rms, mut rms_dx] = [const { [0.0; 27] }; 4];
        layer_norm(&mut out, &x, weight, bias, 9, 1e-5);
        layer_norm_backward(Some(&mut dx), None, None, &x, weight, &dout, 9, 1e-5);
        rms_norm(&mut rms, &x, weight, 9, 1e-5);
        rms_norm_backward(Some(&mut rms_dx), None, &x, weight, &dout, 9, 1e-5);
        [out, dx, rms, rms_dx]
    };
    assert_eq!(run(None, None), run(Some(&ones), Some(&zeros)));
}

#[test]
fn parameter_gradients_do_not_need_dx() {
    let inputs = Inputs::new(3, 9);
    let (_, want_dw, want_db) = backward::<f64>(LayerNorm, &inputs);
    let [mut dw, mut db] = [[0.0; 9]; 2];
    let Inputs { x, weight, dout, eps, .. } = &inputs;
    layer_norm_backward(None, Some(&mut dw), None, x, Some(weight), dout, 9, *eps);
    layer_norm_backward(None, None, Some(&mut db), x, Some(weight), dout, 9, *eps);
    assert_eq!((&dw[..], &db[..]), (&want_dw[..], &want_db[..]));
}

#[test]
fn a_bad_row_is_nan_and_alone() {
    const N_COLS: usize = 9;
    for op in OPS {
        for bad in [f64::NAN, f64::INFINITY] {
            let mut inputs = Inputs::new(3, N_COLS);
            let clean = forward::<f32>(op, &inputs);
            let clean_dx = backward::<f32>(op, &inputs).0;
            inputs.x[N_COLS + 4] = bad;
            let out = forward::<f32>(op, &inputs);
            let dx = backward::<f32>(op, &inputs).0;
            for (got, clean) in [(out, clean), (dx, clean_dx)] {
                let row = &got[N_COLS..2 * N_COLS];
                // RMS norm of infinity: x / inf is 0, but inf / inf is NaN.
                let nan = match (op, bad.is_nan()) {
                    (RmsNorm, false) => row[4].is_nan(),
                    _ => row.iter().all(|v| v.is_nan()),
                };
                assert!(nan, "{op:?} {bad}: {row:?}");
                assert_eq!(got[..N_COLS], clean[..N_COLS], "{op:?}");
                assert_eq!(got[2 * N_COLS..], clean[2 * N_COLS..], "{op:?}");
            }
        }
    }
}

#[test]
fn softmax_of_infinities_is_pytorchs() {
    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;
    for (x, want) in [
        ([-INF, -INF, -INF], [NAN; 3]),
        ([-INF, 0.0, 0.0], [0.0, 0.5, 0.5]),
        ([INF, 0.0, 1.0], [NAN; 3]),
        ([1e300, 1e300, -1e300], [0.5, 0.5, 0.0]),
    ] {
        let (mut p, mut log_p) = ([0.0; 3], [0.0; 3]);
        softmax(&mut p, &x, 3);
        log_softmax(&mut log_p, &x, 3);
        assert_close(&format!("{x:?}"), &p, &want, Tol::Exact);
        assert_close(&format!("log {x:?}"), &log_p.map(f64::exp), &want, Tol::Rel(1e-15));
    }
}

#[test]
fn layer_norm_survives_a_large_mean() {
    // mean(x^2) - mean(x)^2 would lose every digit of this variance in f32, and most in f64.
    let x: Vec<f32> = (0..64).map(|i| 1e6 + (i % 2) as f32).collect();
    let mut out = vec![0f32; 64];
    layer_norm(&mut out, &x, None, None, 64, 0.0);
    let want: Vec<f64> = (0..64).map(|i| if i % 2 == 0 { -1.0 } else { 1.0 }).collect();
    assert_close("out", &widen(&out), &want, Tol::Rel(1e-6));
}

#[test]
fn pre_3_half_reductions_do_not_stall() {
    fn check<T: Element<Acc = f32>>() {
        const N: usize = 4096;
        let ones = to::<T>(&[1.0; N]);
        assert_eq!((sum(&ones), mean(&ones)), (N as f64, 1.0));
        let (mut row, mut cols) = (to::<T>(&[0.0]), to::<T>(&[0.0]));
        sum_rows(&mut row, &ones, N);
        sum_cols(&mut cols, &ones);
        assert_eq!((f64s(&row), f64s(&cols)), (vec![N as f64], vec![N as f64]));

        let mut p = ones.clone();
        softmax(&mut p, &ones, N);
        let p = f64s(&p);
        assert!(p.iter().all(|&p| p == 1.0 / N as f64), "softmax entry {}", p[0]);
        assert_close("softmax row sum", &[p.iter().sum()], &[1.0], ROW_SUM);

        // Ones and threes: mean 2, variance 1, so the result is -1 and 1.
        let x: Vec<f64> = (0..N).map(|i| 1.0 + 2.0 * (i % 2) as f64).collect();
        let want: Vec<f64> = x.iter().map(|x| x - 2.0).collect();
        let mut out = ones.clone();
        layer_norm(&mut out, &to::<T>(&x), None, None, N, 0.0);
        assert_close("layer_norm", &f64s(&out), &want, Tol::Exact);
        rms_norm(&mut out, &ones, None, N, 0.0);
        assert_close("rms_norm", &f64s(&out), &[1.0; N], Tol::Exact);
        // A gradient of 4096 rows of ones.
        let mut db = [0f32];
        layer_norm_backward(None, None, Some(&mut db), &ones, None, &ones, 1, 1e-5);
        assert_eq!(db, [N as f32]);
    }
    check::<f16>();
    check::<bf16>();
}

#[test]
fn sums_are_those_of_the_definition() {
    for (n_rows, n_cols) in [(0, 3), (1, 1), (3, 7), (5, 8), (9, 9), (2, 33), (700, 300)] {
        let x = values(5, n_rows * n_cols);
        let by_row: Vec<f64> = x.chunks(n_cols).map(|row| row.iter().sum()).collect();
        let by_col: Vec<f64> =
            (0..n_cols).map(|j| (0..n_rows).map(|i| x[i * n_cols + j]).sum()).collect();
        // Terms below 1 in another order: half an ulp of 2^-53 for each of at most n additions.
        let tol = Tol::Rel(n_rows.max(n_cols).max(1) as f64 * f64::EPSILON);
        let (mut rows, mut cols) = (vec![0.0; n_rows], vec![f64::NAN; n_cols]);
        sum_rows(&mut rows, &x, n_cols);
        sum_cols(&mut cols, &x);
        assert_close("rows", &rows, &by_row, tol);
        assert_close("cols", &cols, &by_col, tol);
        let total: f64 = by_row.iter().sum();
        // Against the sum of magnitudes, for the total cancels.
        let magnitude: f64 = x.iter().map(|x| x.abs()).sum();
        assert_close(
            "sum",
            &[sum(&x), magnitude],
            &[total, magnitude],
            Tol::Rel(x.len().max(1) as f64 * f64::EPSILON),
        );
    }
    assert!(mean::<f32>(&[]).is_nan());
}

#[test]
fn bits_do_not_depend_on_the_thread_count() {
    let inputs = Inputs::new(1000, 67);
    for op in OPS {
        same_on_any_thread_count(|| everything::<f32>(op, &inputs));
    }
    let x: Vec<f32> = to(&values(6, 300_001));
    same_on_any_thread_count(|| sum(&x).to_bits());
    same_on_any_thread_count(|| {
        let mut cols = [0f32; 3];
        sum_cols(&mut cols, &x[..300_000]);
        cols
    });
}

#[test]
fn empty_inputs_are_allowed() {
    for op in OPS {
        assert!(everything::<f32>(op, &Inputs::new(0, 4)).iter().all(|&v| v == 0.0), "{op:?}");
        assert!(everything::<bf16>(op, &Inputs::new(3, 0)).is_empty(), "{op:?}");
    }
}

#[test]
#[should_panic(expected = "layer_norm: not whole rows of 4")]
fn rows_must_be_whole() {
    layer_norm(&mut [0f32; 6], &[0f32; 6], None, None, 4, 1e-5);
}

/// Of values whose squares `f32` does not hold.
#[test]
fn norms_of_huge_values_are_not_lost() {
    let x: Vec<f32> = values(1, 3 * 100).iter().map(|&v| (v * 1e25) as f32).collect();
    let wide: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let (mut got, mut want) = (vec![0f32; 300], vec![0f64; 300]);
    layer_norm(&mut got, &x, None, None, 100, 1e-5);
    layer_norm(&mut want, &wide, None, None, 100, 1e-5);
    assert_close("layer norm", &widen(&got), &want, Tol::Rel(1e-5));
    rms_norm(&mut got, &x, None, 100, 1e-5);
    rms_norm(&mut want, &wide, None, 100, 1e-5);
    assert_close("rms norm", &widen(&got), &want, Tol::Rel(1e-5));
}

//! Cross entropy, plain and fused with its linear layer.

mod support;
use half::{bf16, f16};
use support::{f64s, same_on_any_thread_count, to};
use tallow_kernels::isa::Isa;
use tallow_kernels::{Element, Real, accum, gemm, loss::*};
use tallow_testkit::{Reference, Tol, assert_close, central_difference, values, widen};

/// Against PyTorch in f64, computed in f32.
const F32: Tol = Tol::Rel(1e-5);
/// Against central differences of step `STEP` in f64.
const DIFFERENCE: Tol = Tol::Rel(1e-6);
const STEP: f64 = 1e-5;
/// The same sums in f64, cut in other places.
const F64: Tol = Tol::Rel(1e-13);

const IGNORE: i64 = -100;

fn config(label_smoothing: f64) -> CrossEntropy {
    CrossEntropy { ignore_index: IGNORE, label_smoothing }
}

/// Classes in no order; every fourth row is ignored.
fn targets(n_rows: usize, n_classes: usize) -> Vec<i64> {
    let class = |i: usize| (i * 7 + 3) % n_classes;
    (0..n_rows).map(|i| if i % 4 == 3 { IGNORE } else { class(i) as i64 }).collect()
}

/// Sums, log-sum-exps and gradients of a plain cross entropy.
fn plain<T: Element>(
    x: &[f64],
    targets: &[i64],
    config: &CrossEntropy,
) -> (Sums, Vec<f64>, Vec<T>) {
    let x = to::<T>(x);
    let n_classes = x.len() / targets.len();
    let (mut lse, mut dx) = (vec![f64::NAN; targets.len()], to::<T>(&vec![f64::NAN; x.len()]));
    let sums = cross_entropy(&mut lse, &x, targets, n_classes, config).unwrap();
    cross_entropy_backward(&mut dx, &x, &lse, targets, n_classes, config, 0.75).unwrap();
    (sums, lse, dx)
}

/// Inputs of the fused form.
#[derive(Clone)]
struct Inputs {
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    targets: Vec<i64>,
    config: CrossEntropy,
    n_features: usize,
    n_classes: usize,
}

impl Inputs {
    fn new([n_rows, n_features, n_classes]: [usize; 3], smoothing: f64, bias: bool) -> Self {
        Self {
            x: values(1, n_rows * n_features),
            weight: values(2, n_classes * n_features).iter().map(|w| 2.0 * w).collect(),
            bias: bias.then(|| values(3, n_classes)),
            targets: targets(n_rows, n_classes),
            config: config(smoothing),
            n_features,
            n_classes,
        }
    }
}

struct Fused<T> {
    sums: Sums,
    lse: Vec<f64>,
    dx: Vec<T>,
    dweight: Vec<T>,
    dbias: Vec<T>,
}

impl<T: Element> Fused<T> {
    /// Nothing computed yet.
    fn nans(i: &Inputs) -> Self {
        let nans = |n: usize| to::<T>(&vec![f64::NAN; n]);
        let [dx, dweight, dbias] = [i.x.len(), i.weight.len(), i.n_classes].map(nans);
        let sums = Sums { loss_sum: f64::NAN, n_counted: 0 };
        Self { sums, lse: vec![f64::NAN; i.targets.len()], dx, dweight, dbias }
    }
}

/// Loss and gradients of `inputs` with a scale, in chunks of some bytes.
type Way<T> = fn(&Inputs, f64, u64) -> Fused<T>;

/// In one pass and in two.
fn ways<T: Element>() -> [Way<T>; 2] {
    [fused, in_one_pass]
}

/// `run` with the operands of `i`.
fn with_linear<T: Element, R>(i: &Inputs, run: impl FnOnce(&Linear<T>) -> R) -> R {
    let (x, weight) = (to::<T>(&i.x), to::<T>(&i.weight));
    let bias = i.bias.as_ref().map(|b| to::<T>(b));
    let (n_features, n_classes) = (i.n_features, i.n_classes);
    run(&Linear { x: &x, weight: &weight, bias: bias.as_deref(), n_features, n_classes })
}

fn fused<T: Element>(i: &Inputs, scale: f64, chunk_bytes: u64) -> Fused<T> {
    let mut got = Fused::<T>::nans(i);
    let Fused { sums, lse, dx, dweight, dbias } = &mut got;
    with_linear(i, |linear| {
        *sums = linear_cross_entropy(lse, linear, &i.targets, &i.config, chunk_bytes).unwrap();
        linear_cross_entropy_backward(
            Some(dx),
            Some(dweight),
            Some(dbias),
            linear,
            lse,
            &i.targets,
            &i.config,
            scale,
            chunk_bytes,
        )
        .unwrap();
    });
    got
}

fn in_one_pass<T: Element>(i: &Inputs, scale: f64, chunk_bytes: u64) -> Fused<T> {
    let mut got = Fused::<T>::nans(i);
    let Fused { sums, lse, dx, dweight, dbias } = &mut got;
    with_linear(i, |linear: &Linear<T>| {
        let wide = |n: usize| vec![T::Acc::of(f64::NAN); n];
        let (mut wide_x, mut wide_w, mut wide_b) =
            (wide(dx.len()), wide(dweight.len()), wide(dbias.len()));
        let grads = LinearGrads {
            x: Some(&mut wide_x),
            weight: Some(&mut wide_w),
            bias: Some(&mut wide_b),
        };
        let (targets, config) = (&i.targets, &i.config);
        *sums = linear_cross_entropy_with_grads(lse, grads, linear, targets, config, chunk_bytes)
            .unwrap();
        scale_into(dx, &wide_x, scale);
        scale_into(dweight, &wide_w, scale);
        accum::scale(&mut wide_b, scale);
        scale_into(dbias, &wide_b, 1.0);
    });
    got
}

#[test]
fn matches_pytorch() {
    let reference = Reference::load();
    let cases = reference.cases("linear_cross_entropy");
    assert_eq!(cases.len(), 3);
    for case in cases {
        let get = |part: &str| reference.values(&format!("{}.{part}", case.name));
        let (x, weight) = (get("in.x"), get("in.weight"));
        let inputs = Inputs {
            x: widen(&x.data),
            weight: widen(&weight.data),
            bias: None,
            targets: reference.ids(&format!("{}.in.target", case.name)).1,
            config: config(case.f64("label_smoothing")),
            n_features: x.shape[1],
            n_classes: weight.shape[0],
        };
        let n_counted = inputs.targets.iter().filter(|&&t| t != IGNORE).count() as f64;
        let scale = f64::from(get("dout").data[0]) / n_counted;
        let chunks = [1, 100, DEFAULT_CHUNK_BYTES].into_iter();
        for (chunk_bytes, way) in chunks.flat_map(|c| ways::<f32>().map(|way| (c, way))) {
            let got = way(&inputs, scale, chunk_bytes);
            let what = |part: &str| format!("{}.{part} in {chunk_bytes} bytes", case.name);
            let loss = got.sums.loss_sum / got.sums.n_counted as f64;
            assert_close(&what("out"), &[loss], &widen(&get("out").data), F32);
            assert_close(&what("grad.x"), &widen(&got.dx), &widen(&get("grad.x").data), F32);
            let want = widen(&get("grad.weight").data);
            assert_close(&what("grad.weight"), &widen(&got.dweight), &want, F32);
        }
        // The plain form on the same logits.
        let mut logits = vec![0f32; inputs.targets.len() * inputs.n_classes];
        gemm::gemm(
            &mut logits,
            gemm::Mat::new(&x.data, inputs.targets.len(), inputs.n_features),
            gemm::Mat::new(&weight.data, inputs.n_classes, inputs.n_features).t(),
            gemm::Store::Overwrite,
        );
        let (sums, ..) = plain::<f32>(&widen(&logits), &inputs.targets, &inputs.config);
        let loss = sums.loss_sum / sums.n_counted as f64;
        assert_close(&case.name, &[loss], &widen(&get("out").data), F32);
    }
}

#[test]
fn plain_gradients_match_central_differences() {
    for n_classes in [1, 7, 8, 9, 17, 33] {
        for smoothing in [0.0, 0.1, 1.0] {
            let (x, targets) = (values(1, 5 * n_classes), targets(5, n_classes));
            let config = config(smoothing);
            let loss = |x: &[f64]| 0.75 * plain::<f64>(x, &targets, &config).0.loss_sum;
            let (.., dx) = plain::<f64>(&x, &targets, &config);
            if n_classes == 1 {
                // One class is certain: no loss, and all that can be left of it is a rounding.
                assert!(dx.iter().all(|g| g.abs() <= f64::EPSILON), "{dx:?}");
            } else {
                let want = central_difference(loss, &x, STEP);
                assert_close(&format!("{n_classes} {smoothing}"), &dx, &want, DIFFERENCE);
            }
        }
    }
}

#[test]
fn fused_gradients_match_central_differences() {
    for (sizes, smoothing, bias, chunk_bytes) in [
        ([5, 7, 9], 0.0, false, DEFAULT_CHUNK_BYTES),
        ([6, 8, 17], 0.1, true, 8 * 17 * 4),
        ([9, 3, 33], 0.1, true, 8 * 10),
        ([3, 1, 8], 1.0, true, 1),
    ] {
        let inputs = Inputs::new(sizes, smoothing, bias);
        let with = |change: &dyn Fn(&mut Inputs)| {
            let mut moved = inputs.clone();
            change(&mut moved);
            0.5 * fused::<f64>(&moved, 0.0, chunk_bytes).sums.loss_sum
        };
        for way in ways::<f64>() {
            let got = way(&inputs, 0.5, chunk_bytes);
            let want = central_difference(|x| with(&|i| i.x = x.to_vec()), &inputs.x, STEP);
            assert_close(&format!("dx {sizes:?}"), &got.dx, &want, DIFFERENCE);
            let want =
                central_difference(|w| with(&|i| i.weight = w.to_vec()), &inputs.weight, STEP);
            assert_close(&format!("dweight {sizes:?}"), &got.dweight, &want, DIFFERENCE);
            if let Some(bias) = &inputs.bias {
                let want = central_difference(|b| with(&|i| i.bias = Some(b.to_vec())), bias, STEP);
                assert_close(&format!("dbias {sizes:?}"), &got.dbias, &want, DIFFERENCE);
            }
        }
    }
}

#[test]
fn chunks_and_passes_change_nothing_beyond_rounding() {
    // More classes than a tile of 4096 holds.
    for sizes in [[7, 9, 65], [5, 4, 9000]] {
        let inputs = Inputs::new(sizes, 0.1, true);
        let want = fused::<f64>(&inputs, 1.0, u64::MAX);
        let chunks = [1000, 8 * 4096, DEFAULT_CHUNK_BYTES, u64::MAX].into_iter();
        for (chunk_bytes, way) in chunks.flat_map(|c| ways::<f64>().map(|way| (c, way))) {
            let got = way(&inputs, 1.0, chunk_bytes);
            assert_eq!(got.sums.n_counted, want.sums.n_counted);
            for (what, got, want) in [
                ("loss", vec![got.sums.loss_sum], vec![want.sums.loss_sum]),
                ("lse", got.lse, want.lse.clone()),
                ("dx", got.dx, want.dx.clone()),
                ("dweight", got.dweight, want.dweight.clone()),
                ("dbias", got.dbias, want.dbias.clone()),
            ] {
                assert_close(&format!("{what} {sizes:?} {chunk_bytes}"), &got, &want, F64);
            }
        }
    }
}

/// What is reported of a loss does not depend on whether its gradients come along.
#[test]
fn the_loss_of_one_pass_is_that_of_forward_to_the_bit() {
    fn check<T: Element>() {
        for sizes in [[7, 9, 65], [30, 16, 9000]] {
            let inputs = Inputs::new(sizes, 0.1, true);
            for chunk_bytes in [1 << 19, u64::MAX] {
                let [two, one] = ways::<T>().map(|way| way(&inputs, 1.0, chunk_bytes));
                assert_eq!((two.sums, two.lse), (one.sums, one.lse));
            }
        }
    }
    check::<f32>();
    check::<bf16>();
    check::<f16>();
    check::<f64>();
}

#[test]
fn one_pass_is_worth_it_where_its_blocks_have_rows() {
    // All classes of a row are few bytes, or the block holds all rows.
    assert!(one_pass_pays::<f32>(4096, 256, DEFAULT_CHUNK_BYTES));
    assert!(one_pass_pays::<f32>(3, 50257, DEFAULT_CHUNK_BYTES));
    assert!(one_pass_pays::<f32>(4096, 50257, ONE_PASS_CHUNK_BYTES));
    assert!(!one_pass_pays::<f32>(4096, 50257, DEFAULT_CHUNK_BYTES));
    assert!(!one_pass_pays::<f32>(4096, 1 << 20, ONE_PASS_CHUNK_BYTES));
}

/// `f16` exactly; of `bf16` the sums may be in another order and the logits' gradient rounded too.
#[test]
fn half_is_the_f32_result_rounded_once() {
    fn check<T: Element<Acc = f32>>(smoothing: f64, exact: bool) {
        let mut inputs = Inputs::new([9, 8, 70], smoothing, true);
        inputs.x = f64s(&to::<T>(&inputs.x));
        inputs.weight = f64s(&to::<T>(&inputs.weight));
        inputs.bias = inputs.bias.map(|b| f64s(&to::<T>(&b)));
        let rounded = |x: &[f32]| f64s(&to::<T>(&widen(x)));
        let tol = |t: f64| if exact { Tol::Exact } else { Tol::Rel(t) };
        for (way, wide) in ways::<T>().into_iter().zip(ways::<f32>()) {
            let (got, want) = (way(&inputs, 0.5, 4 * 300), wide(&inputs, 0.5, 4 * 300));
            assert_eq!(got.sums.n_counted, want.sums.n_counted);
            assert_close("loss", &[got.sums.loss_sum], &[want.sums.loss_sum], tol(1e-6));
            assert_close("lse", &got.lse, &want.lse, tol(1e-6));
            for (name, got, want) in [
                ("dx", &got.dx, &want.dx),
                ("dweight", &got.dweight, &want.dweight),
                ("dbias", &got.dbias, &want.dbias),
            ] {
                assert_close(name, &f64s(got), &rounded(want), tol(2f64.powi(-7)));
            }
        }

        let x = f64s(&to::<T>(&values(1, 9 * 33)));
        let targets = targets(9, 33);
        let (sums, lse, dx) = plain::<T>(&x, &targets, &config(smoothing));
        let (want_sums, want_lse, want) = plain::<f32>(&x, &targets, &config(smoothing));
        assert_eq!((sums, lse), (want_sums, want_lse));
        assert_close("plain dx", &f64s(&dx), &rounded(&want), Tol::Exact);
    }
    for smoothing in [0.0, 0.1] {
        check::<bf16>(smoothing, Isa::best() < Isa::Avx512Bf16);
        check::<f16>(smoothing, true);
    }
}

#[test]
fn ignored_rows_count_for_nothing() {
    let inputs = Inputs::new([8, 4, 9], 0.1, false);
    for way in ways::<f64>() {
        let got = way(&inputs, 1.0, DEFAULT_CHUNK_BYTES);
        assert_eq!(got.sums.n_counted, 6);
        for row in [3, 7] {
            assert!(got.dx[row * 4..][..4].iter().all(|&g| g == 0.0));
        }
    }
    // Whatever an ignored row of logits holds.
    let (mut x, targets) = (values(1, 4 * 9), targets(4, 9));
    let clean = plain::<f32>(&x, &targets, &config(0.1));
    x[3 * 9..].fill(f64::NAN);
    let (sums, _, dx) = plain::<f32>(&x, &targets, &config(0.1));
    assert_eq!((sums, dx), (clean.0, clean.2));
    // All ignored: 0 of 0, which the caller must not divide.
    let (sums, _, dx) = plain::<f32>(&x, &[IGNORE; 4], &config(0.0));
    assert_eq!((sums, dx), (Sums { loss_sum: 0.0, n_counted: 0 }, vec![0.0; 36]));
}

#[test]
fn an_ignore_index_may_be_a_class() {
    let config = CrossEntropy { ignore_index: 2, label_smoothing: 0.0 };
    let (sums, _, dx) = plain::<f64>(&[0.0; 6], &[2, 0], &config);
    assert_eq!(sums.n_counted, 1);
    assert_close("loss", &[sums.loss_sum], &[3f64.ln()], F64);
    assert_close("dx", &dx, &[0.0, 0.0, 0.0, -0.5, 0.25, 0.25], F64);
}

#[test]
fn bad_logits_make_the_loss_nan_and_masked_ones_do_not() {
    const INF: f64 = f64::INFINITY;
    for (x, loss) in [
        ([f64::NAN, 0.0, 0.0], f64::NAN),
        ([INF, 0.0, 0.0], f64::NAN),
        ([-INF, -INF, -INF], f64::NAN),
        ([-INF, -INF, f64::NAN], f64::NAN),
        ([0.0, -INF, 0.0], 2f64.ln()),
        ([-INF, 0.0, 0.0], INF),
        ([1e300, -1e300, 1e300], 2f64.ln()),
    ] {
        let (sums, ..) = plain::<f64>(&x, &[0], &config(0.0));
        assert_close(&format!("{x:?}"), &[sums.loss_sum], &[loss], F64);
        // One class a tile: the merge must not lose it either.
        let inputs = Inputs {
            x: vec![1.0],
            weight: x.to_vec(),
            bias: None,
            targets: vec![0],
            config: config(0.0),
            n_features: 1,
            n_classes: 3,
        };
        for way in ways::<f64>() {
            let sums = way(&inputs, 1.0, 1).sums;
            assert_close(&format!("fused {x:?}"), &[sums.loss_sum], &[loss], F64);
        }
    }
}

#[test]
fn targets_and_smoothing_are_checked_before_any_arithmetic() {
    let (x, mut lse, mut dx) = ([0f32; 9], [7.0; 3], [7f32; 9]);
    for target in [3, -1, i64::MAX, i64::MIN] {
        let (targets, want) = ([0, target, 99], LossError::Target { row: 1, target, n_classes: 3 });
        let config = config(0.0);
        assert_eq!(cross_entropy(&mut lse, &x, &targets, 3, &config), Err(want));
        let result = cross_entropy_backward(&mut dx, &x, &lse, &targets, 3, &config, 1.0);
        assert_eq!(result, Err(want));
        let linear = Linear { x: &x, weight: &x, bias: None, n_features: 3, n_classes: 3 };
        assert_eq!(linear_cross_entropy(&mut lse, &linear, &targets, &config, 64), Err(want));
        let grad = Some(&mut dx[..]);
        let result = linear_cross_entropy_backward(
            grad, None, None, &linear, &lse, &targets, &config, 1.0, 64,
        );
        assert_eq!(result, Err(want));
        let grads = LinearGrads { x: Some(&mut dx[..]), weight: None, bias: None };
        let result =
            linear_cross_entropy_with_grads(&mut lse, grads, &linear, &targets, &config, 64);
        assert_eq!(result, Err(want));
    }
    for label_smoothing in [-0.1, 1.1, f64::INFINITY] {
        let result = cross_entropy(&mut lse, &x, &[0; 3], 3, &config(label_smoothing));
        assert_eq!(result, Err(LossError::LabelSmoothing { label_smoothing }));
    }
    assert_eq!((lse, dx), ([7.0; 3], [7.0; 9]));
}

#[test]
fn pre_3_half_losses_do_not_stall() {
    // 4096 rows of loss ln 2 each, and the gradient of a class that all of them push.
    fn check<T: Element>() {
        const N: usize = 4096;
        let (sums, ..) = plain::<T>(&[0.0; 2 * N], &[0; N], &config(0.0));
        let mean = sums.loss_sum / sums.n_counted as f64;
        assert_close("mean loss", &[mean], &[2f64.ln()], Tol::Rel(1e-7));
        let inputs = Inputs {
            x: vec![1.0; N],
            weight: vec![0.0; 2],
            bias: Some(vec![0.0; 2]),
            targets: vec![0; N],
            config: config(0.0),
            n_features: 1,
            n_classes: 2,
        };
        for way in ways::<T>() {
            let got = way(&inputs, 1.0, 1000);
            assert_eq!(f64s(&got.dweight), [-2048.0, 2048.0]);
            assert_eq!(f64s(&got.dbias), [-2048.0, 2048.0]);
        }
    }
    check::<f16>();
    check::<bf16>();
}

#[test]
fn bits_do_not_depend_on_the_thread_count() {
    let inputs = Inputs::new([300, 20, 5000], 0.1, true);
    for way in ways::<bf16>() {
        same_on_any_thread_count(|| {
            let Fused { sums, lse, dx, dweight, dbias } = way(&inputs, 1.0, 1 << 20);
            (sums, lse, [dx, dweight, dbias])
        });
    }
    let (x, targets) = (values(1, 300 * 100), targets(300, 100));
    same_on_any_thread_count(|| plain::<f32>(&x, &targets, &config(0.1)));
}

#[test]
fn scratch_holds_one_tile_of_logits() {
    let (n, d, v) = (4096, 384, 50257);
    for chunk_bytes in [4, 1 << 16, DEFAULT_CHUNK_BYTES] {
        let f32_bytes = linear_cross_entropy_scratch_bytes::<f32>(n, d, v, chunk_bytes);
        let packed = gemm::gemm_scratch_bytes::<f32>(n, v, d);
        assert!(f32_bytes <= chunk_bytes + 32 * n + packed, "{f32_bytes} bytes in {chunk_bytes}");
        // Neither the logits [N, V] nor a widened weight [V, D].
        let bf16_bytes = linear_cross_entropy_backward_scratch_bytes::<bf16>(n, d, v, chunk_bytes);
        assert!(bf16_bytes < chunk_bytes + v * d * 4 / 2, "{bf16_bytes} bytes in {chunk_bytes}");
    }
}

#[test]
fn empty_inputs_are_allowed() {
    let nothing = Sums { loss_sum: 0.0, n_counted: 0 };
    assert_eq!(cross_entropy::<f32>(&mut [], &[], &[], 3, &config(0.0)), Ok(nothing));
    let inputs = Inputs { targets: vec![], x: vec![], ..Inputs::new([1, 3, 4], 0.0, true) };
    for way in ways::<bf16>() {
        let got = way(&inputs, 1.0, 100);
        assert_eq!(got.sums, nothing);
        assert_eq!((f64s(&got.dweight), f64s(&got.dbias)), (vec![0.0; 12], vec![0.0; 4]));
    }
}

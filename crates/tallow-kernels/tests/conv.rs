//! Convolution against PyTorch, the scalar specification and central differences.

mod support;
use half::{bf16, f16};
use support::{f64s, same_on_any_thread_count, to};
use tallow_kernels::{Element, Error, conv::*};
use tallow_testkit::{Reference, Tol, assert_close, central_difference, values, widen};

fn dims4(shape: &[usize]) -> [usize; 4] {
    shape.try_into().expect("four dimensions")
}

#[test]
fn conv2d_matches_pytorch() {
    let reference = Reference::load();
    let cases = reference.cases("conv2d");
    assert_eq!(cases.len(), 8);
    for case in cases {
        let get = |part: &str| reference.values(&format!("{}.{part}", case.name));
        let both = |key: &str| [case.usize(key); 2];
        let (x, w, b) = (get("in.x"), get("in.weight"), get("in.bias"));
        let cfg = Conv2dConfig {
            stride: both("stride"),
            padding: both("padding"),
            dilation: both("dilation"),
            groups: case.usize("groups"),
        };
        let shape = Conv2dShape::new(dims4(&x.shape), dims4(&w.shape), cfg).expect("a valid case");
        let want = get("out");
        assert_eq!(shape.out_dims().to_vec(), want.shape, "{}", case.name);
        let close = |part: &str, got: &[f32], want: &[f32]| {
            assert_close(
                &format!("{} {part}", case.name),
                &widen(got),
                &widen(want),
                Tol::Rel(1e-5),
            );
        };
        let mut out = vec![0f32; want.data.len()];
        conv2d(&mut out, &x.data, &w.data, Some(&b.data), &shape);
        close("out", &out, &want.data);
        let dout = get("dout").data;
        let mut dx = vec![f32::NAN; x.data.len()];
        conv2d_backward_input(&mut dx, &dout, &w.data, &shape);
        close("grad.x", &dx, &get("grad.x").data);
        let mut dw = vec![f32::NAN; w.data.len()];
        conv2d_backward_weight(&mut dw, &dout, &x.data, &shape);
        close("grad.weight", &dw, &get("grad.weight").data);
        let mut db = vec![f32::NAN; b.data.len()];
        conv2d_backward_bias(&mut db, &dout, &shape);
        close("grad.bias", &db, &get("grad.bias").data);
    }
}

fn cfg(
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
) -> Conv2dConfig {
    Conv2dConfig { stride, padding, dilation, groups }
}

/// Input, weight, configuration: non-square everything, one pixel, many images, wide rows.
fn odd_cases() -> Vec<([usize; 4], [usize; 4], Conv2dConfig)> {
    vec![
        ([1, 1, 1, 1], [1, 1, 1, 1], Conv2dConfig::UNIT),
        ([1, 2, 7, 8], [3, 2, 3, 3], cfg([2, 2], [1, 1], [1, 1], 1)),
        ([1, 2, 8, 7], [3, 2, 3, 3], cfg([2, 2], [1, 1], [1, 1], 1)),
        ([2, 3, 5, 9], [4, 3, 3, 2], cfg([1, 3], [0, 2], [2, 1], 1)),
        ([3, 4, 6, 5], [6, 2, 2, 3], cfg([3, 1], [2, 1], [1, 2], 2)),
        ([2, 5, 4, 4], [5, 1, 3, 3], cfg([1, 1], [1, 1], [1, 1], 5)),
        ([2, 5, 9, 35], [5, 1, 3, 3], cfg([2, 2], [1, 1], [1, 1], 5)),
        ([1, 3, 8, 40], [6, 1, 5, 2], cfg([1, 1], [3, 2], [2, 3], 3)),
        ([2, 2, 3, 3], [4, 1, 5, 5], cfg([3, 2], [4, 4], [1, 1], 2)), // taps only in the padding
        ([1, 2, 4, 4], [18, 1, 3, 3], cfg([1, 1], [1, 1], [1, 1], 2)), // too many for one by one
        ([2, 3, 4, 3], [5, 3, 1, 1], cfg([2, 2], [0, 0], [1, 1], 1)),
        ([2, 3, 4, 3], [5, 3, 1, 1], cfg([1, 1], [1, 1], [1, 1], 1)),
        ([1, 1, 3, 3], [1, 1, 5, 5], cfg([1, 1], [4, 4], [1, 1], 1)), // taps only in the padding
        ([1, 2, 3, 70], [2, 2, 3, 3], cfg([1, 1], [1, 1], [1, 1], 1)),
    ]
}

#[test]
fn spare_2_gradients_match_central_differences() {
    for (x_dims, w_dims, cfg) in odd_cases() {
        let shape = Conv2dShape::new(x_dims, w_dims, cfg).expect("a valid case");
        let n = |d: [usize; 4]| d.iter().product::<usize>();
        let (x, w) = (values(1, n(x_dims)), values(2, n(w_dims)));
        let dout = values(3, n(shape.out_dims()));
        let loss = |x: &[f64], w: &[f64]| {
            let mut out = vec![0.0; dout.len()];
            conv2d_scalar(&mut out, x, w, None, &shape);
            out.iter().zip(&dout).map(|(o, d)| o * d).sum::<f64>()
        };
        let what = format!("{x_dims:?} {w_dims:?} {cfg:?}");
        let mut dx = vec![f64::NAN; x.len()];
        conv2d_backward_input(&mut dx, &dout, &w, &shape);
        assert_close(&what, &dx, &central_difference(|x| loss(x, &w), &x, 1e-4), Tol::Rel(1e-7));
        let mut dw = vec![f64::NAN; w.len()];
        conv2d_backward_weight(&mut dw, &dout, &x, &shape);
        assert_close(&what, &dw, &central_difference(|w| loss(&x, w), &w, 1e-4), Tol::Rel(1e-7));
    }
}

/// What is not finite reaches the pixels under its window, and no other, whether the phases of a stride
/// are computed one by one (four channels' rows) or at once.
#[test]
fn a_nan_stays_under_its_window() {
    for channels in [3, 5] {
        let cfg = cfg([2, 2], [3, 3], [1, 1], 1);
        let shape = Conv2dShape::new([1, channels, 20, 22], [4, channels, 7, 7], cfg);
        let shape = shape.expect("a valid case");
        let (n, weight) = (channels * 20 * 22, vec![1f32; 4 * channels * 49]);
        let mut dout = vec![0f32; shape.out_dims().iter().product()];
        let gradient = |dout: &[f32]| {
            let mut dx = vec![5.0; n];
            conv2d_backward_input(&mut dx, dout, &weight, &shape);
            dx
        };
        dout[57] = 1.0;
        let under = gradient(&dout);
        for x in [f32::NAN, f32::INFINITY] {
            dout[57] = x;
            let reached = gradient(&dout).iter().map(|dx| !dx.is_finite()).collect::<Vec<_>>();
            assert_eq!(reached, under.iter().map(|&dx| dx != 0.0).collect::<Vec<_>>());
        }
    }
}

/// Large enough for several tiles, images per tile, channel blocks and pixel cuts.
const LARGE: [([usize; 4], [usize; 4], usize, usize); 6] = [
    ([3, 70, 12, 13], [140, 70, 3, 3], 1, 1),
    ([9, 16, 5, 4], [24, 16, 3, 3], 2, 1),
    ([2, 300, 6, 7], [20, 300, 1, 1], 1, 1),
    ([1, 3, 70, 90], [20, 3, 7, 7], 2, 1),
    ([2, 30, 33, 70], [30, 1, 3, 3], 1, 30),
    ([2, 30, 32, 71], [60, 1, 5, 5], 2, 30),
];

/// Forward against the scalar twin, gradients against the f64 ones, in a type with steps of `eps`.
fn check_large<T: Element>(eps: f64) {
    for (x_dims, w_dims, stride, groups) in LARGE {
        let pad = w_dims[2] / 2;
        let cfg = cfg([stride; 2], [pad; 2], [1, 1], groups);
        let shape = Conv2dShape::new(x_dims, w_dims, cfg).expect("a valid case");
        let n = |d: [usize; 4]| d.iter().product::<usize>();
        let (x, w) = (to::<T>(&values(1, n(x_dims))), to::<T>(&values(2, n(w_dims))));
        let dout = to::<T>(&values(3, n(shape.out_dims())));
        let (x64, w64, dout64) = (f64s(&x), f64s(&w), f64s(&dout));
        let what = format!("{x_dims:?} {w_dims:?} {}", std::any::type_name::<T>());
        let (mut out, mut out64) = (vec![T::default(); dout.len()], vec![0.0; dout.len()]);
        conv2d(&mut out, &x, &w, None, &shape);
        conv2d_scalar(&mut out64, &x64, &w64, None, &shape);
        assert_close(&what, &f64s(&out), &out64, Tol::Rel(eps));
        let (mut dx, mut dx64) = (vec![T::default(); x.len()], vec![0.0; x.len()]);
        conv2d_backward_input(&mut dx, &dout, &w, &shape);
        conv2d_backward_input(&mut dx64, &dout64, &w64, &shape);
        assert_close(&what, &f64s(&dx), &dx64, Tol::Rel(eps));
        let (mut dw, mut dw64) = (vec![T::default(); w.len()], vec![0.0; w.len()]);
        conv2d_backward_weight(&mut dw, &dout, &x, &shape);
        conv2d_backward_weight(&mut dw64, &dout64, &x64, &shape);
        assert_close(&what, &f64s(&dw), &dw64, Tol::Rel(eps));
    }
}

#[test]
fn tiles_and_blocks_match_scalar_in_every_type() {
    check_large::<f64>(1e-13);
    check_large::<f32>(64.0 * f64::from(f32::EPSILON)); // f32 sums of up to 2700 terms
    check_large::<bf16>(2f64.powi(-8)); // one rounding
    check_large::<f16>(2f64.powi(-10)); // one rounding and the f32 sums
}

#[test]
fn threads_change_nothing() {
    for (w_dims, groups) in [([32, 12, 3, 3], 1), ([12, 1, 3, 3], 12)] {
        let x_dims = [5, 12, 20, 21];
        let shape = Conv2dShape::new(x_dims, w_dims, cfg([1, 1], [1, 1], [1, 1], groups));
        let shape = shape.expect("valid");
        let x = to::<f32>(&values(1, x_dims.iter().product()));
        let w = to::<f32>(&values(2, w_dims.iter().product()));
        let dout = to::<f32>(&values(3, shape.out_dims().iter().product()));
        same_on_any_thread_count(|| {
            let (mut out, mut dx, mut dw) =
                (vec![0f32; dout.len()], vec![0f32; x.len()], vec![0f32; w.len()]);
            conv2d(&mut out, &x, &w, None, &shape);
            conv2d_backward_input(&mut dx, &dout, &w, &shape);
            conv2d_backward_weight(&mut dw, &dout, &x, &shape);
            (out, dx, dw)
        });
    }
}

/// One sum per output in the scalar twin's order, without fused multiply-adds: its bits.
#[test]
fn depthwise_convolutions_are_their_scalar_twin() {
    fn check<T: Element>() {
        for (x_dims, w_dims, cfg) in odd_cases() {
            if cfg.groups != x_dims[1] || w_dims[0] > 4 * x_dims[1] || cfg.groups == 1 {
                continue;
            }
            let shape = Conv2dShape::new(x_dims, w_dims, cfg).expect("a valid case");
            let of = |seed, n: usize| to::<T>(&values(seed, n));
            let (x, w) = (of(1, x_dims.iter().product()), of(2, w_dims.iter().product()));
            let bias = of(3, w_dims[0]);
            let n_out = shape.out_dims().iter().product();
            let [mut got, mut want] = [vec![T::default(); n_out], vec![T::default(); n_out]];
            conv2d(&mut got, &x, &w, Some(&bias), &shape);
            conv2d_scalar(&mut want, &x, &w, Some(&bias), &shape);
            assert!(got == want, "{x_dims:?} {w_dims:?} {cfg:?}");
        }
    }
    check::<f32>();
    check::<bf16>();
}

#[test]
fn an_empty_batch_has_zero_gradients() {
    let shape = Conv2dShape::new([0, 2, 4, 4], [3, 2, 3, 3], Conv2dConfig::UNIT).expect("valid");
    conv2d::<f32>(&mut [], &[], &[0.0; 54], None, &shape);
    conv2d_backward_input::<f32>(&mut [], &[], &[0.0; 54], &shape);
    let mut dw = vec![f32::NAN; 54];
    conv2d_backward_weight(&mut dw, &[], &[], &shape);
    assert_eq!(dw, [0.0; 54]);
}

#[test]
fn bad_shapes_are_named() {
    let new = |x, w, c| Conv2dShape::new(x, w, c).expect_err("must be refused").to_string();
    let unit = Conv2dConfig::UNIT;
    let (x, w) = ([1, 4, 5, 5], [6, 4, 3, 3]);
    for (error, has) in [
        (new(x, w, cfg([0, 1], [0, 0], [1, 1], 1)), "stride is 0"),
        (new(x, w, cfg([1, 1], [0, 0], [1, 0], 1)), "dilation is 0"),
        (new(x, w, cfg([1, 1], [0, 0], [1, 1], 0)), "groups is 0"),
        (new(x, [6, 4, 0, 3], unit), "kernel is 0"),
        (new(x, [6, 3, 3, 3], unit), "input has 4 channels and weight is [6, 3, 3, 3]"),
        (new(x, [5, 2, 3, 3], cfg([1, 1], [0, 0], [1, 1], 2)), "with 2 groups"),
        (new(x, [6, 4, 3, 6], unit), "a window of 6 does not fit the padded width of 5"),
        (
            new(x, w, cfg([1, 1], [0, 0], [3, 1], 1)),
            "a window of 7 does not fit the padded height of 5",
        ),
    ] {
        assert!(error.contains(has), "{error:?} should say {has:?}");
    }
    assert!(matches!(Conv2dShape::new(x, [6, 3, 3, 3], unit), Err(Error::Channels { .. })));
    let huge = cfg([1, 1], [usize::MAX / 2, 0], [1, 1], 1);
    assert!(matches!(Conv2dShape::new(x, w, huge), Err(Error::TooLarge { .. })));
    let huge = Conv2dShape::new([usize::MAX / 8, 4, 5, 5], w, unit);
    assert!(matches!(huge, Err(Error::TooLarge { .. })));
}

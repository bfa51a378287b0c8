//! Pooling and batch normalisation against PyTorch and central differences.

mod support;
use half::bf16;
use support::{f64s, same_on_any_thread_count, to};
use tallow_kernels::{Error, batch_norm::*, pool::*};
use tallow_testkit::{Case, Reference, Tol, assert_close, central_difference, values, widen};

fn pool_shape(case: &Case, x: &[usize]) -> Pool2dShape {
    let both = |key: &str| [case.usize(key); 2];
    let cfg =
        Pool2dConfig { kernel: both("kernel"), stride: both("stride"), padding: both("padding") };
    Pool2dShape::new(x[0] * x[1], [x[2], x[3]], cfg).expect("a valid case")
}

#[test]
fn pooling_matches_pytorch() {
    let reference = Reference::load();
    for op in ["max_pool2d", "avg_pool2d"] {
        let cases = reference.cases(op);
        assert_eq!(cases.len(), 4);
        for case in cases {
            let get = |part: &str| reference.values(&format!("{}.{part}", case.name));
            let (x, dout, want) = (get("in.x"), get("dout").data, get("out"));
            let shape = pool_shape(&case, &x.shape);
            assert_eq!(shape.out_extents(), want.shape[2..], "{}", case.name);
            let (mut out, mut dx) = (vec![0f32; dout.len()], vec![f32::NAN; x.data.len()]);
            if op == "max_pool2d" {
                max_pool2d(&mut out, &x.data, &shape);
                max_pool2d_backward(&mut dx, &x.data, &dout, &shape);
            } else {
                assert!(case.bool("count_include_pad"));
                avg_pool2d(&mut out, &x.data, &shape, Divisor::Window);
                avg_pool2d_backward(&mut dx, &dout, &shape, Divisor::Window);
            }
            assert_close(&case.name, &widen(&out), &widen(&want.data), Tol::Rel(1e-5));
            assert_close(&case.name, &widen(&dx), &widen(&get("grad.x").data), Tol::Rel(1e-5));
        }
    }
    let get = |part: &str| reference.values(&format!("global_avg_pool.{part}"));
    let x = get("in.x");
    let (mut out, mut dx) = (vec![0f32; 10], vec![0f32; x.data.len()]);
    global_avg_pool(&mut out, &x.data, 21);
    global_avg_pool_backward(&mut dx, &get("dout").data, 21);
    assert_close("global", &widen(&out), &widen(&get("out").data), Tol::Rel(1e-5));
    assert_close("global", &widen(&dx), &widen(&get("grad.x").data), Tol::Rel(1e-5));
}

#[test]
fn pooling_gradients_match_central_differences() {
    for (input, kernel, stride, padding) in [
        ([7, 8], [2, 2], [2, 2], [0, 0]),
        ([8, 7], [3, 2], [1, 3], [1, 0]),
        ([5, 9], [3, 3], [2, 2], [1, 1]),
        ([1, 1], [1, 1], [1, 1], [0, 0]),
        ([4, 33], [4, 5], [3, 2], [2, 2]),
    ] {
        let shape =
            Pool2dShape::new(3, input, Pool2dConfig { kernel, stride, padding }).expect("valid");
        let [p, q] = shape.out_extents();
        let (x, dout) = (values(1, 3 * input[0] * input[1]), values(2, 3 * p * q));
        type Forward<'a> = &'a dyn Fn(&mut [f64], &[f64]);
        type Backward<'a> = &'a dyn Fn(&mut [f64], &[f64]);
        let check = |what: &str, forward: Forward, backward: Backward| {
            let mut dx = vec![f64::NAN; x.len()];
            backward(&mut dx, &dout);
            let loss = |x: &[f64]| {
                let mut out = vec![0.0; dout.len()];
                forward(&mut out, x);
                out.iter().zip(&dout).map(|(o, d)| o * d).sum()
            };
            assert_close(what, &dx, &central_difference(loss, &x, 1e-6), Tol::Rel(1e-7));
        };
        check("max", &|o, x| max_pool2d(o, x, &shape), &|dx, d| {
            max_pool2d_backward(dx, &x, d, &shape)
        });
        for div in [Divisor::Window, Divisor::Inside] {
            check("avg", &|o, x| avg_pool2d(o, x, &shape, div), &|dx, d| {
                avg_pool2d_backward(dx, d, &shape, div);
            });
        }
    }
}

#[test]
fn max_pool_keeps_nan_and_negative_infinity() {
    let cfg = Pool2dConfig { kernel: [2, 2], stride: [2, 2], padding: [0, 0] };
    let shape = Pool2dShape::new(1, [2, 4], cfg).expect("valid");
    let inf = f32::NEG_INFINITY;
    let x = [1.0, f32::NAN, inf, inf, 5.0, 2.0, inf, inf];
    let mut out = [0.0; 2];
    max_pool2d(&mut out, &x, &shape);
    assert!(out[0].is_nan() && out[1] == inf);
    let mut dx = [0.0; 8];
    max_pool2d_backward(&mut dx, &x, &[3.0, 4.0], &shape);
    assert_eq!(dx, [0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn bad_pools_are_named() {
    let new = |kernel, stride, padding| {
        let cfg = Pool2dConfig { kernel, stride, padding };
        Pool2dShape::new(1, [4, 4], cfg).expect_err("must be refused")
    };
    assert_eq!(new([0, 2], [1, 1], [0, 0]), Error::Zero { op: "pool2d", what: "kernel" });
    assert_eq!(new([2, 2], [1, 0], [0, 0]), Error::Zero { op: "pool2d", what: "stride" });
    let empty = Pool2dConfig { kernel: [2, 2], stride: [1, 1], padding: [1, 1] };
    let empty = Pool2dShape::new(1, [0, 4], empty).expect_err("an empty plane");
    assert_eq!(empty, Error::Zero { op: "pool2d", what: "height" });
    let padding = Error::Padding { op: "pool2d", padding: 2, kernel: 3 };
    assert_eq!(new([3, 3], [1, 1], [0, 2]), padding);
    let window = Error::Window { op: "pool2d", axis: "width", window: 5, padded: 4 };
    assert_eq!(new([2, 5], [1, 1], [0, 0]), window);
}

#[test]
fn batch_norm_matches_pytorch() {
    let reference = Reference::load();
    let cases = reference.cases("batch_norm_train");
    assert_eq!(cases.len(), 3);
    for case in cases {
        let get = |part: &str| reference.values(&format!("{}.{part}", case.name));
        let (x, w, b, dout) =
            (get("in.x"), get("in.weight").data, get("in.bias").data, get("dout").data);
        let shape = BatchNormShape {
            batch: x.shape[0],
            channels: x.shape[1],
            pixels: x.shape[2] * x.shape[3],
        };
        let stats = channel_stats(&x.data, &shape).expect("several values");
        let affine = Affine { weight: Some(&w[..]), bias: Some(&b[..]) };
        let eps = case.f64("eps");
        let mut out = vec![0f32; x.data.len()];
        batch_norm(&mut out, &x.data, &stats, affine, &shape, eps, Then::Identity);
        let close = |part: &str, got: &[f64]| {
            assert_close(
                &format!("{} {part}", case.name),
                got,
                &widen(&get(part).data),
                Tol::Rel(1e-5),
            );
        };
        close("out", &widen(&out));
        let mut dx = vec![f32::NAN; x.data.len()];
        let grads = batch_norm_backward(
            Some(&mut dx),
            &x.data,
            &dout,
            &stats,
            Source::Batch,
            affine,
            &shape,
            eps,
            Then::Identity,
        );
        close("grad.x", &widen(&dx));
        close("grad.weight", &grads.dweight);
        close("grad.bias", &grads.dbias);
    }
}

#[test]
fn batch_norm_gradients_match_central_differences() {
    let shape = BatchNormShape { batch: 3, channels: 2, pixels: 9 };
    let (x, dout, w, b) = (values(1, 54), values(2, 54), values(3, 2), values(4, 2));
    let given = ChannelStats { mean: vec![0.1, -0.2], var: vec![0.7, 1.3] };
    for then in [Then::Identity, Then::Relu] {
        for source in [Source::Batch, Source::Given] {
            let stats = |x: &[f64]| match source {
                Source::Batch => channel_stats(x, &shape).expect("several values"),
                Source::Given => given.clone(),
            };
            let loss = |x: &[f64], w: &[f64], b: &[f64]| {
                let mut out = vec![0.0; 54];
                let affine = Affine { weight: Some(w), bias: Some(b) };
                batch_norm(&mut out, x, &stats(x), affine, &shape, 1e-5, then);
                out.iter().zip(&dout).map(|(o, d)| o * d).sum::<f64>()
            };
            let affine = Affine { weight: Some(&w[..]), bias: Some(&b[..]) };
            let mut dx = vec![f64::NAN; 54];
            let grads = batch_norm_backward(
                Some(&mut dx),
                &x,
                &dout,
                &stats(&x),
                source,
                affine,
                &shape,
                1e-5,
                then,
            );
            let close = |got: &[f64], want: Vec<f64>| {
                assert_close(&format!("{then:?} {source:?}"), got, &want, Tol::Rel(1e-6));
            };
            close(&dx, central_difference(|x| loss(x, &w, &b), &x, 1e-6));
            close(&grads.dweight, central_difference(|w| loss(&x, w, &b), &w, 1e-6));
            close(&grads.dbias, central_difference(|b| loss(&x, &w, b), &b, 1e-6));
        }
    }
}

#[test]
fn one_value_per_channel_is_refused() {
    let shape = BatchNormShape { batch: 1, channels: 4, pixels: 1 };
    let error = channel_stats(&[0f32; 4], &shape).expect_err("no variance");
    assert_eq!(error, Error::OneValuePerChannel { shape: [1, 4, 1] });
}

#[test]
fn a_large_mean_does_not_drown_the_variance() {
    // Values 1000 + v: their f32 sum of squares would lose every digit of the variance.
    let shape = BatchNormShape { batch: 2, channels: 1, pixels: 500 };
    let v = values(1, 1000);
    let x: Vec<f32> = v.iter().map(|v| (1000.0 + v) as f32).collect();
    let stats = channel_stats(&x, &shape).expect("several values");
    let x64 = widen(&x);
    let mean = x64.iter().sum::<f64>() / 1000.0;
    let var = x64.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 1000.0;
    assert_close("var", &stats.var, &[var], Tol::Rel(1e-12));
    let mut out = vec![0f32; 1000];
    let affine = Affine { weight: None, bias: None };
    batch_norm(&mut out, &x, &stats, affine, &shape, 0.0, Then::Identity);
    let want: Vec<f64> = x64.iter().map(|x| (x - mean) / var.sqrt()).collect();
    assert_close("out", &widen(&out), &want, Tol::Rel(4.0 * f64::from(f32::EPSILON)));
}

#[test]
fn bf16_batch_norm_is_the_f32_one_rounded() {
    let shape = BatchNormShape { batch: 2, channels: 3, pixels: 33 };
    let x = to::<bf16>(&values(1, 198));
    let x32 = to::<f32>(&f64s(&x));
    let stats = channel_stats(&x, &shape).expect("several values");
    let affine = Affine { weight: Some(&[1.5f32, -0.5, 2.0][..]), bias: None };
    let (mut out, mut out32) = (vec![bf16::ZERO; 198], vec![0f32; 198]);
    batch_norm(&mut out, &x, &stats, affine, &shape, 1e-5, Then::Relu);
    batch_norm(&mut out32, &x32, &stats, affine, &shape, 1e-5, Then::Relu);
    assert_eq!(out, out32.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>());
}

#[test]
fn threads_change_nothing() {
    let shape = BatchNormShape { batch: 4, channels: 5, pixels: 1000 };
    let (x, dout) = (to::<f32>(&values(1, 20_000)), to::<f32>(&values(2, 20_000)));
    let affine = Affine { weight: None, bias: None };
    same_on_any_thread_count(|| {
        let stats = channel_stats(&x, &shape).expect("several values");
        let mut dx = vec![0f32; 20_000];
        let g = batch_norm_backward(
            Some(&mut dx),
            &x,
            &dout,
            &stats,
            Source::Batch,
            affine,
            &shape,
            1e-5,
            Then::Relu,
        );
        (dx, g.dweight, g.dbias)
    });
}

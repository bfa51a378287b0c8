//! What an accumulator promises about windows, buffers and bad input.

mod support;
use candle_core::{DType, Device, Tensor, Var};
use half::{bf16, f16};
use support::{accum_of, add, config, f64_bits, grad_of, named, store, tensor, zeros};
use tallow_accum::*;
use tallow_kernels::{Element, Real, cast::cast};
use tallow_testkit::{Tol, assert_close, values};

const SIZES: [usize; 7] = [1, 7, 8, 9, 33, 1023, 70_000];
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// `x` rounded to `dtype` once. Candle's cast from f64 to bf16 and f16 loses sight of which side of a
/// tie it is on.
fn rounded(x: &[f64], dtype: DType) -> Vec<f64> {
    fn through<T: Element>(x: &[f64]) -> Vec<f64> {
        let mut stored = vec![T::default(); x.len()];
        cast(&mut stored, x);
        stored.iter().map(|x| x.widen().f64()).collect()
    }
    match dtype {
        DType::F32 => through::<f32>(x),
        DType::BF16 => through::<bf16>(x),
        DType::F16 => through::<f16>(x),
        _ => x.to_vec(),
    }
}

#[test]
fn every_size_and_dtype_adds_and_divides_as_f64_maths_says() {
    for param in DTYPES {
        for dtype in [AccumDType::F32, AccumDType::BF16, AccumDType::Parameter] {
            for n in SIZES {
                let w = zeros(n, param);
                let mut accum = accum_of(&w, dtype);
                let held = dtype.buffer(param);
                let mut sums = vec![0.0; n];
                for seed in 0..3 {
                    let grad = rounded(&values(seed, n), param);
                    add(&mut accum, &w, &grad, 2.0);
                    let next: Vec<f64> = sums.iter().zip(&grad).map(|(s, g)| s + g).collect();
                    sums = rounded(&next, held);
                }
                let window = accum.take_mean(Finish::PLAIN).unwrap();
                let want: Vec<f64> = sums.iter().map(|s| s / 6.0).collect();
                let want = rounded(&want, held);
                assert_close("mean", &grad_of(&window, &w), &want, Tol::Exact);
                assert_eq!(window.grads().get(&w).unwrap().dtype(), held);
                let norm = want.iter().map(|x| x * x).sum::<f64>().sqrt();
                assert_close("norm", &[window.report().norm], &[norm], Tol::Rel(1e-12));
            }
        }
    }
}

#[test]
fn the_sink_form_is_the_store_form() {
    let (a, b) = (zeros(9, DType::F32), zeros(33, DType::BF16));
    let params = named(&[("a", &a), ("b", &b)]);
    let mut whole = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    let mut sink = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    for seed in 0..3 {
        let grad_a = tensor(&values(seed, 9), DType::F32);
        let grad_b = tensor(&values(10 + seed, 33), DType::BF16);
        whole.add(store(&[(&a, grad_a.clone()), (&b, grad_b.clone())]), 1.5).unwrap();
        sink.add_one(sink.index_of("b").unwrap(), &grad_b).unwrap();
        sink.add_one(sink.index_of_var(&a).unwrap(), &grad_a).unwrap();
        assert!(matches!(
            sink.take_mean(Finish::PLAIN),
            Err(Error::OpenMicroBatch { n_gradients: 2 })
        ));
        sink.end_micro_batch(1.5).unwrap();
    }
    let (whole, sink) =
        (whole.take_mean(Finish::PLAIN).unwrap(), sink.take_mean(Finish::PLAIN).unwrap());
    for var in [&a, &b] {
        let [whole, sink] = [&whole, &sink].map(|w| f64_bits(w.grads().get(var).unwrap()));
        assert_eq!(whole, sink);
    }
    assert_eq!(whole.report(), sink.report());
}

#[test]
fn a_parameter_may_come_twice_in_a_micro_batch() {
    let w = zeros(1, DType::F32);
    let mut accum = accum_of(&w, AccumDType::F32);
    accum.add_one(0, &tensor(&[1.0], DType::F32)).unwrap();
    add(&mut accum, &w, &[2.0], 1.0); // a store closes what the sink began
    assert_eq!(grad_of(&accum.take_mean(Finish::PLAIN).unwrap(), &w), [3.0]);
}

#[test]
fn frozen_parameters_are_absent() {
    let (a, b) = (zeros(2, DType::F32), zeros(3, DType::F32));
    let params = named(&[("a", &a), ("b", &b)]);
    let mut accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    add(&mut accum, &a, &[1.0, 2.0], 1.0);
    accum.add(store(&[(&b, tensor(&[5.0; 3], DType::F32))]), 1.0).unwrap();
    assert_eq!(grad_of(&accum.take_mean(Finish::PLAIN).unwrap(), &b), [2.5; 3]);
    assert_eq!(accum.held_bytes(), 20);
    // Had a gradient in the last window, has none in this one.
    add(&mut accum, &a, &[1.0, 2.0], 1.0);
    let window = accum.take_mean(Finish::PLAIN).unwrap();
    assert!(window.grads().get(&b).is_none());
    assert_eq!((grad_of(&window, &a), window.report().norm), (vec![1.0, 2.0], 5f64.sqrt()));
    // None at all.
    drop(window);
    accum.add(store(&[]), 1.0).unwrap();
    let window = accum.take_mean(Finish::PLAIN).unwrap();
    assert!(window.grads().get(&a).is_none());
    assert_eq!((window.report().norm, window.verdict()), (0.0, &Verdict::Finite));
}

#[test]
fn strided_offset_and_broadcast_gradients() {
    let w = Var::zeros((7, 9), DType::F32, &Device::Cpu).unwrap();
    let base = tensor(&values(1, 200), DType::F32);
    let views = [
        base.narrow(0, 0, 63).unwrap().reshape((9, 7)).unwrap().t().unwrap(),
        base.narrow(0, 5, 63).unwrap().reshape((7, 9)).unwrap(),
        base.narrow(0, 0, 126).unwrap().reshape((7, 18)).unwrap().narrow(1, 4, 9).unwrap(),
        base.narrow(0, 11, 1).unwrap().broadcast_as((7, 9)).unwrap(),
    ];
    for first in 0..views.len() {
        let mut accum = accum_of(&w, AccumDType::F32);
        let mut sums = vec![0.0; 63];
        for view in views.iter().cycle().skip(first).take(views.len()) {
            accum.add(store(&[(&w, view.clone())]), 1.0).unwrap();
            let next: Vec<f64> = sums.iter().zip(support::f64s(view)).map(|(s, g)| s + g).collect();
            sums = rounded(&next, DType::F32);
        }
        let window = accum.take_sum(Finish::PLAIN).unwrap();
        assert_close("sum", &grad_of(&window, &w), &sums, Tol::Exact);
    }
}

#[test]
fn threads_change_no_bit() {
    let run = || {
        let w = zeros(70_000, DType::F32);
        let mut accum = accum_of(&w, AccumDType::F32);
        for seed in 0..3 {
            add(&mut accum, &w, &values(seed, 70_000), 1.0);
        }
        let window = accum.take_mean(Finish { loss_scale: 3.0, clip: Clip::Norm(1.0) }).unwrap();
        assert!(window.report().clipped);
        (f64_bits(window.grads().get(&w).unwrap()), window.report().norm.to_bits())
    };
    let on = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap().install(run);
    let one = on(1);
    for n in [2, 5] {
        assert!(on(n) == one, "results differ between 1 and {n} threads");
    }
}

#[test]
fn clipping_by_norm_is_global_and_by_value_is_not() {
    let (a, b) = (zeros(2, DType::F32), zeros(1, DType::F64));
    let params = named(&[("a", &a), ("b", &b)]);
    let mut accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    for (clip, want_a, want_b, clipped) in [
        (Clip::Off, [4.0, -4.0], 7.0, false),
        (Clip::Norm(9.0), [4.0, -4.0], 7.0, false),
        (Clip::Norm(4.5), [2.0, -2.0], 3.5, true),
        (Clip::Value(7.0), [4.0, -4.0], 7.0, false),
        (Clip::Value(3.0), [3.0, -3.0], 3.0, true),
        (Clip::Value(5.0), [4.0, -4.0], 5.0, true),
    ] {
        let grads = [(&a, tensor(&[8.0, -8.0], DType::F32)), (&b, tensor(&[14.0], DType::F64))];
        accum.add(store(&grads), 2.0).unwrap();
        let window = accum.take_mean(Finish { loss_scale: 1.0, clip }).unwrap();
        assert_eq!((grad_of(&window, &a), grad_of(&window, &b)), (want_a.to_vec(), vec![want_b]));
        assert_eq!((window.report().norm, window.report().clipped), (9.0, clipped), "{clip:?}");
    }
}

#[test]
fn norms_do_not_overflow() {
    let (a, b) = (zeros(2, DType::F64), zeros(1, DType::F64));
    let params = named(&[("a", &a), ("b", &b)]);
    let mut accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    for size in [1e-200, 1e200, 1e307] {
        let grads = [
            (&a, tensor(&[4.0 * size, -4.0 * size], DType::F64)),
            (&b, tensor(&[7.0 * size], DType::F64)),
        ];
        accum.add(store(&grads), 1.0).unwrap();
        let clip = Clip::Norm(4.5 * size);
        let window = accum.take_mean(Finish { loss_scale: 1.0, clip }).unwrap();
        assert_eq!(window.verdict(), &Verdict::Finite);
        assert_close("norm", &[window.report().norm], &[9.0 * size], Tol::Rel(1e-14));
        assert_close("b", &grad_of(&window, &b), &[3.5 * size], Tol::Rel(1e-14));
    }
    let w = zeros(3, DType::F32);
    let mut accum = accum_of(&w, AccumDType::F32);
    add(&mut accum, &w, &[3e38, 3e38, 3e38], 1.0);
    let window = accum.take_sum(Finish::PLAIN).unwrap();
    assert_eq!(window.verdict(), &Verdict::Finite);
    assert_close("norm", &[window.report().norm], &[3e38 * 3f64.sqrt()], Tol::Rel(1e-7));
}

#[test]
fn the_verdict_names_the_first_in_order() {
    let (a, b, c) = (zeros(1, DType::F32), zeros(1, DType::F32), zeros(1, DType::BF16));
    let params = named(&[("a", &a), ("b", &b), ("c", &c)]);
    let mut accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    for clip in [Clip::Off, Clip::Norm(1.0), Clip::Value(1.0)] {
        for (bad_b, bad_c, first) in
            [(1.0, f64::NAN, "c"), (f64::INFINITY, f64::NAN, "b"), (f64::NAN, 1.0, "b")]
        {
            add(&mut accum, &c, &[bad_c], 1.0);
            add(&mut accum, &b, &[bad_b], 1.0);
            add(&mut accum, &a, &[1.0], 1.0);
            let window = accum.take_mean(Finish { loss_scale: 1.0, clip }).unwrap();
            assert_eq!(window.verdict(), &Verdict::NonFinite { name: first.to_string() });
            assert!(!window.report().norm.is_finite());
            assert_eq!(
                window.verdict().to_string(),
                format!("the gradient of `{first}` is not finite")
            );
        }
    }
    // A sum that overflows although no gradient did.
    add(&mut accum, &a, &[3e38], 1.0);
    add(&mut accum, &a, &[3e38], 1.0);
    let window = accum.take_mean(Finish::PLAIN).unwrap();
    assert_eq!(window.verdict(), &Verdict::NonFinite { name: "a".to_string() });
}

#[test]
fn reset_leaves_nothing() {
    let w = zeros(1, DType::F32);
    let mut accum = accum_of(&w, AccumDType::F32);
    for bad in [f64::NAN, f64::INFINITY] {
        add(&mut accum, &w, &[bad], 5.0);
        accum.add_one(0, &tensor(&[bad], DType::F32)).unwrap();
        accum.reset();
        assert_eq!((accum.n_micro_batches(), accum.total_weight()), (0, 0.0));
        assert!(matches!(accum.take_mean(Finish::PLAIN), Err(Error::EmptyWindow)));
        add(&mut accum, &w, &[3.0], 2.0);
        assert_eq!(grad_of(&accum.take_mean(Finish::PLAIN).unwrap(), &w), [1.5]);
    }
}

#[test]
fn a_long_window_is_reported() {
    let w = zeros(1, DType::F32);
    let mut accum = accum_of(&w, AccumDType::F32);
    for (n, above_advised) in [(8, false), (9, true), (1, false)] {
        (0..n).for_each(|_| add(&mut accum, &w, &[1.0], 1.0));
        assert_eq!((accum.n_micro_batches(), accum.total_weight()), (n, n as f64));
        let window = accum.take_mean(Finish::PLAIN).unwrap();
        assert_eq!(window.report().above_advised, above_advised);
    }
}

#[test]
fn a_window_shares_the_buffers() {
    let w = zeros(2, DType::F32);
    let mut accum = accum_of(&w, AccumDType::F32);
    add(&mut accum, &w, &[1.0, 2.0], 1.0);
    let window = accum.take_sum(Finish::PLAIN).unwrap();
    let (shared, kept) =
        (window.grads().get(&w).unwrap().clone(), window.grads().get(&w).unwrap().copy().unwrap());
    drop(window);
    add(&mut accum, &w, &[7.0, 8.0], 1.0);
    assert_eq!((support::f64s(&shared), support::f64s(&kept)), (vec![7.0, 8.0], vec![1.0, 2.0]));
    // What came from the buffer cannot be added to it: an error, not a deadlock.
    assert!(matches!(accum.add_one(0, &shared), Err(Error::Candle(_))));
}

#[test]
fn gradients_that_do_not_fit_name_the_parameter_and_add_nothing() {
    let (a, b) = (zeros(2, DType::F32), zeros(3, DType::F32));
    let params = named(&[("a", &a), ("layer.b", &b)]);
    let mut accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    accum.add(store(&[(&a, tensor(&[1.0, 2.0], DType::F32))]), 1.0).unwrap();
    for (bad, message) in [
        (
            tensor(&[1.0; 2], DType::F32),
            "gradient of parameter `layer.b` has shape [2], the parameter has [3]",
        ),
        (
            tensor(&[1.0; 3], DType::F64),
            "gradient of parameter `layer.b` is F64, it must be f32, bf16 or f16",
        ),
        (
            tensor(&[1.0; 3], DType::U32),
            "gradient of parameter `layer.b` is U32, it must be f32, bf16 or f16",
        ),
    ] {
        let error = accum.add_one(1, &bad).unwrap_err();
        assert_eq!(error.to_string(), message);
        let grads = store(&[(&a, tensor(&[9.0, 9.0], DType::F32)), (&b, bad)]);
        assert_eq!(accum.add(grads, 1.0).unwrap_err().to_string(), message);
        assert_eq!(candle_core::Error::from(error).to_string(), message);
    }
    for weight in [-1.0, f64::NAN, f64::INFINITY] {
        let grads = store(&[(&a, tensor(&[9.0, 9.0], DType::F32))]);
        assert!(matches!(accum.add(grads, weight), Err(Error::Setting { name: "weight", .. })));
        assert!(accum.end_micro_batch(weight).is_err());
    }
    let window = accum.take_mean(Finish::PLAIN).unwrap();
    assert_eq!((grad_of(&window, &a), window.report().total_weight), (vec![1.0, 2.0], 1.0));
    assert!(window.grads().get(&b).is_none());
}

#[test]
fn settings_out_of_range_leave_the_window_as_it_was() {
    let w = zeros(1, DType::F32);
    let mut accum = accum_of(&w, AccumDType::F32);
    accum.add(store(&[(&w, tensor(&[6.0], DType::F32))]), 0.0).unwrap();
    assert!(matches!(
        accum.take_mean(Finish::PLAIN),
        Err(Error::ZeroWeight { n_micro_batches: 1 })
    ));
    add(&mut accum, &w, &[6.0], 4.0);
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        for (loss_scale, clip) in
            [(bad, Clip::Off), (1.0, Clip::Norm(bad)), (1.0, Clip::Value(bad))]
        {
            let result = accum.take_mean(Finish { loss_scale, clip });
            assert!(matches!(result, Err(Error::Setting { .. })), "{bad} {clip:?}");
        }
    }
    let too_large = Finish { loss_scale: f64::MAX, clip: Clip::Off };
    assert!(matches!(accum.take_mean(too_large), Err(Error::Setting { .. })));
    assert_eq!(grad_of(&accum.take_mean(Finish::PLAIN).unwrap(), &w), [3.0]);
}

#[test]
fn parameters_that_cannot_be_accumulated() {
    let (a, b) = (zeros(1, DType::F32), zeros(1, DType::F32));
    let integers = zeros(1, DType::U32);
    let message = |params: &[(&str, &Var)]| {
        let result = GradientAccumulator::new(&named(params), config(AccumDType::F32));
        result.map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(message(&[]), "the list of parameters is empty");
    let order = "parameter `a` comes after `b`: names must differ and be sorted";
    assert_eq!(message(&[("b", &a), ("a", &b)]), order);
    assert!(message(&[("a", &a), ("a", &b)]).starts_with("parameter `a` comes after `a`"));
    assert_eq!(message(&[("a", &a), ("b", &a)]), "parameters `a` and `b` are the same variable");
    let dtype = "parameter `i` is U32, it must be f32, f64, bf16 or f16";
    assert_eq!(message(&[("i", &integers)]), dtype);
    let config = AccumConfig { dtype: AccumDType::F32, warn_above: 0 };
    assert!(GradientAccumulator::new(&named(&[("a", &a)]), config).is_err());
    for (n_micro_batches, per_window) in [(0, 1), (1, 0)] {
        assert!(Windows::new(n_micro_batches, per_window).is_err());
    }
    assert!(Windows::of_samples(0, 1, 1).is_err() && Windows::of_samples(1, 0, 1).is_err());
    assert_eq!(Windows::new(1, 1).unwrap().n_updates(0, None), 0);
}

#[test]
fn names_have_places() {
    let vars = [zeros(1, DType::F32), zeros(1, DType::F32), zeros(1, DType::F32)];
    let params = named(&[("a.w", &vars[0]), ("b", &vars[1]), ("c", &vars[2])]);
    let accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
    for (i, (name, var)) in params.iter().enumerate() {
        assert_eq!((accum.index_of(name), accum.index_of_var(var)), (Some(i), Some(i)));
    }
    let stranger = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
    assert_eq!((accum.index_of("a"), accum.index_of_var(&stranger)), (None, None));
}

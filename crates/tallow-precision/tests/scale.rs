//! The loss scale, by the names of the cases it was made for.
mod common;
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use common::{TestResult, named, one_window, sgd};
use half::{bf16, f16};
use tallow_precision::{
    DynamicScale, Error, LossScale, LossScaleState, Rule, Skip, Skips, Verdict, Window, underflow,
};
use tallow_testkit::{Reference, bits};

const POWERS: DynamicScale = DynamicScale { growth_windows: 1, ..DynamicScale::STANDARD };

/// Closes a window that was clean or overflowed.
fn window(scale: &mut LossScale, overflow: bool) -> TestResult<Verdict> {
    scale.apply(&Tensor::new(1f32, &Device::Cpu)?)?;
    Ok(scale.record(match overflow {
        true => Verdict::Overflow { name: "w".to_string() },
        false => Verdict::Finite,
    })?)
}

#[test]
fn the_reference_trace() -> TestResult {
    let reference = Reference::load().loss_scale();
    let f32_of = |key: &str| reference[key].as_f64().unwrap() as f32;
    let mut scale = LossScale::dynamic(DynamicScale {
        init: f32_of("init"),
        growth: f32_of("growth"),
        backoff: f32_of("backoff"),
        growth_windows: f32_of("growth_interval") as u32,
        ..DynamicScale::STANDARD
    })?;
    for row in reference["trace"].as_array().unwrap() {
        let overflow = row["found_inf"].as_bool().unwrap();
        // Through real gradients, so that the verdict is found, not told.
        let w = named("w", Tensor::new(&[1f32, 2.0], &Device::Cpu)?)?;
        let coefficient = if overflow { f32::INFINITY } else { 0.5 };
        let (verdict, _) = one_window(&mut scale, &w, &[[coefficient, 0.25]])?;
        assert_eq!(verdict != Verdict::Finite, overflow, "{row}");
        assert_eq!(f64::from(scale.value()), row["scale_after"].as_f64().unwrap(), "{row}");
    }
    Ok(())
}

#[test]
fn scl_1_clip_after_unscale() -> TestResult {
    for micro_batches in [&[[3f32, 4.0]][..], &[[1.5, 2.0], [1.5, 2.0]]] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let start = Tensor::new(&[1f32, 1.0], &Device::Cpu)?.to_dtype(dtype)?;
            let w = named("w", start)?;
            let mut scale = LossScale::fixed(1024.0)?;
            let (verdict, grads) = one_window(&mut scale, &w, micro_batches)?;
            assert_eq!(verdict, Verdict::Finite);
            let grad = grads.get(&w[0].1).unwrap().to_dtype(DType::F32)?.to_vec1::<f32>()?;
            let norm = grad.iter().map(|g| g * g).sum::<f32>().sqrt();
            let applied: Vec<f32> = grad.iter().map(|g| g / norm.max(1.0)).collect();
            assert_eq!((norm, applied), (5.0, vec![0.6, 0.8]), "{dtype:?}");
        }
    }
    Ok(())
}

#[test]
fn scl_1_a_second_unscale_is_an_error_and_divides_nothing() -> TestResult {
    let w = named("w", Tensor::new(&[1f32, 1.0], &Device::Cpu)?)?;
    let mut scale = LossScale::fixed(1024.0)?;
    let fresh = scale.unscale(&w, &mut GradStore::default());
    assert!(matches!(fresh, Err(Error::Unscaled { n_windows: 0 })));
    let (_, mut grads) = one_window(&mut scale, &w, &[[3.0, 4.0]])?;
    let before = scale.state();
    let again = scale.unscale(&w, &mut grads);
    assert!(matches!(again, Err(Error::Unscaled { n_windows: 1 })), "{again:?}");
    assert!(again.unwrap_err().to_string().contains("window 1"));
    assert_eq!(grads.get(&w[0].1).unwrap().to_vec1::<f32>()?, [3.0, 4.0]);
    assert_eq!(scale.state(), before);
    Ok(())
}

#[test]
fn scl_2_a_growing_scale_stops_at_the_ceiling() -> TestResult {
    let mut scale = LossScale::dynamic(POWERS)?;
    let w = named("w", Tensor::new(&[1f32, 1.0], &Device::Cpu)?)?;
    for _ in 0..200 {
        let before = w[0].1.to_vec1::<f32>()?;
        let (verdict, grads) = one_window(&mut scale, &w, &[[3.0, 4.0]])?;
        assert_eq!(verdict, Verdict::Finite);
        assert_eq!(grads.get(&w[0].1).unwrap().to_vec1::<f32>()?, [3.0, 4.0]);
        sgd(&w, &grads, 1e-3)?;
        assert!(before.iter().zip(w[0].1.to_vec1::<f32>()?).all(|(a, b)| *a != b));
    }
    assert_eq!(scale.value(), POWERS.ceiling);
    assert!((1.0 / scale.value()).is_normal());
    Ok(())
}

#[test]
fn scl_2_a_run_that_skips_for_ever_fails_with_numbers() -> TestResult {
    let config = DynamicScale { max_consecutive_skips: 4, ..DynamicScale::STANDARD };
    let fixed = Rule::Fixed { scale: 1.0, max_consecutive_skips: 4 };
    for (rule, last_scale) in [(Rule::Dynamic(config), 4096.0), (fixed, 1.0)] {
        let mut scale = LossScale::new(rule)?;
        let mut params = named("b", Tensor::new(&[1f32, 1.0], &Device::Cpu)?)?;
        params.extend(named("a", Tensor::new(&[5f32], &Device::Cpu)?)?);
        let start = bits(&params[0].1.to_vec1::<f32>()?);
        for step in 1..=4 {
            // `a` is finite, `b` is not.
            let loss = (params[0].1.sum_all()? * f64::INFINITY)?;
            let loss = (loss + params[1].1.sum_all()?)?;
            let mut grads = scale.apply(&loss)?.backward()?;
            match scale.unscale(&params, &mut grads) {
                Ok(verdict) => {
                    assert!(step < 4);
                    assert_eq!(verdict, Verdict::Overflow { name: "b".to_string() });
                }
                Err(Error::Stuck { count, scale, name }) => {
                    assert_eq!((step, count, scale, &*name), (4, 4, last_scale, "b"));
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(bits(&params[0].1.to_vec1::<f32>()?), start);
        assert_eq!((scale.skips().overflow, scale.state().n_windows), (4, 4));
    }
    Ok(())
}

#[test]
fn scl_2_the_scale_falls_below_1_where_gradients_are_large() -> TestResult {
    let w = named("w", Tensor::new(&[f16::ONE], &Device::Cpu)?)?;
    let mut scale = LossScale::dynamic(DynamicScale::STANDARD)?;
    let mut skipped = 0;
    let grad = loop {
        // The gradient 1e5 = 50000 * 2 is made in f16: 50000 fits, twice it does not.
        let loss = (w[0].1.affine(2.0, 0.0)?.to_dtype(DType::F32)? * 5e4)?.sum_all()?;
        let mut grads = scale.apply(&loss)?.backward()?;
        match scale.unscale(&w, &mut grads)? {
            Verdict::Finite => break grads.get(&w[0].1).unwrap().to_vec1::<f32>()?,
            Verdict::Overflow { name } => assert_eq!(name, "w"),
        }
        skipped += 1;
    };
    assert_eq!((scale.value(), skipped), (0.5, 17));
    // f16 holds 5e4 to 11 bits; nothing else rounds.
    assert_eq!(grad, [2.0 * f16::from_f32(5e4).to_f32()]);
    Ok(())
}

#[test]
fn scl_2_hysteresis_and_its_report() -> TestResult {
    let config = DynamicScale { hysteresis: 2, growth_windows: 3, ..DynamicScale::STANDARD };
    let mut scale = LossScale::dynamic(config)?;
    for (old_scale, new_scale) in [(65536.0, 65536.0), (65536.0, 32768.0), (32768.0, 16384.0)] {
        let _ = window(&mut scale, true)?;
        let expected = Window { old_scale, new_scale, skipped: Some(Skip::Overflow) };
        assert_eq!((scale.last(), scale.value()), (Some(expected), new_scale));
    }
    // Three clean windows refill it.
    for _ in 0..3 {
        let _ = window(&mut scale, false)?;
    }
    let _ = window(&mut scale, true)?;
    assert_eq!(scale.value(), 32768.0);
    Ok(())
}

#[test]
fn scl_2_the_floor_holds() -> TestResult {
    let mut scale = LossScale::dynamic(DynamicScale { floor: 8.0, ..DynamicScale::STANDARD })?;
    for _ in 0..20 {
        let _ = window(&mut scale, true)?;
    }
    assert_eq!(scale.value(), 8.0);
    Ok(())
}

#[test]
fn scl_3_counters_on_skipped_windows() -> TestResult {
    let mut scale = LossScale::dynamic(DynamicScale::STANDARD)?;
    let w = named("w", Tensor::new(&[1f32, 1.0], &Device::Cpu)?)?;
    let (mut n_applied, mut rates, mut log) = (0u32, Vec::new(), Vec::new());
    for overflow in [true, true, false, false] {
        let coefficient = if overflow { f32::NAN } else { 1.0 };
        let (verdict, _) = one_window(&mut scale, &w, &[[coefficient, 1.0]])?;
        if verdict == Verdict::Finite {
            rates.push(1.0 / f64::from(n_applied + 1));
            n_applied += 1;
        }
        log.push(scale.last().unwrap().skipped.is_none());
    }
    assert_eq!((&*rates, n_applied), (&[1.0, 0.5][..], 2));
    assert_eq!(log, [false, false, true, true]);
    assert_eq!((scale.state().n_windows, scale.skips().total()), (4, 2));

    // The caller finds the norm too large, after the division or before it.
    let (_, _) = one_window(&mut scale, &w, &[[1.0, 1.0]])?;
    let value = scale.value();
    scale.skip(Skip::NormLimit)?;
    assert_eq!(scale.last().unwrap().skipped, Some(Skip::NormLimit));
    scale.apply(&Tensor::new(1f32, &Device::Cpu)?)?;
    scale.skip(Skip::Empty)?;
    let (verdict, _) = one_window(&mut scale, &w, &[[1.0, 1.0]])?;
    assert_eq!((verdict, scale.value()), (Verdict::Finite, value));
    assert_eq!(scale.skips(), Skips { overflow: 2, norm_limit: 1, empty: 1, other: 0 });
    assert_eq!(scale.state().n_windows, 7);
    Ok(())
}

#[test]
fn scl_3_what_is_skipped_already_is_not_skipped_again() -> TestResult {
    let mut scale = LossScale::off();
    let none = scale.skip(Skip::Other);
    assert!(matches!(none, Err(Error::Skipped { n_windows: 0, found: None, .. })));
    assert!(none.unwrap_err().to_string().contains("never opened"));
    let _ = window(&mut scale, true)?;
    let twice = scale.skip(Skip::NormLimit);
    assert!(matches!(twice, Err(Error::Skipped { found: Some(Skip::Overflow), .. })));
    assert_eq!(scale.skips().total(), 1);
    Ok(())
}

#[test]
fn spare_3_an_f16_loss_is_scaled_in_f32() -> TestResult {
    let mut scale = LossScale::dynamic(DynamicScale::STANDARD)?;
    let loss = Tensor::new(f16::from_f32(2.0), &Device::Cpu)?;
    let scaled = scale.apply(&loss)?;
    assert_eq!((scaled.dtype(), scaled.to_scalar::<f32>()?), (DType::F32, 131_072.0));
    let whole = scale.apply(&Tensor::new(2f64, &Device::Cpu)?)?;
    assert_eq!(whole.to_scalar::<f64>()?, 131_072.0);
    let labels = scale.apply(&Tensor::new(2u32, &Device::Cpu)?);
    assert!(matches!(labels, Err(Error::DType { dtype: DType::U32, .. })));
    Ok(())
}

#[test]
fn spare_10_the_scale_is_constant_in_a_window() -> TestResult {
    let mut scale = LossScale::dynamic(POWERS)?;
    for _ in 0..3 {
        let before = scale.value();
        for micro_batch in [8usize, 3, 1] {
            let loss = Tensor::ones(micro_batch, DType::F32, &Device::Cpu)?.sum_all()?;
            let scaled = scale.apply(&loss)?.to_scalar::<f32>()?;
            assert_eq!(scaled, micro_batch as f32 * before);
            assert_eq!(scale.value(), before);
        }
        let _ = scale.record(Verdict::Finite)?;
        assert_eq!(scale.value(), 2.0 * before);
    }
    Ok(())
}

#[test]
fn spare_11_growth_counts_windows_not_micro_batches() -> TestResult {
    let config = DynamicScale { growth_windows: 2, ..DynamicScale::STANDARD };
    let mut scale = LossScale::dynamic(config)?;
    let mut values = Vec::new();
    for _ in 0..4 {
        let w = named("w", Tensor::new(&[1f32, 1.0], &Device::Cpu)?)?;
        let (verdict, _) = one_window(&mut scale, &w, &[[1.0, 1.0]; 4])?;
        assert_eq!(verdict, Verdict::Finite);
        values.push(scale.value());
    }
    assert_eq!(values, [65536.0, 131_072.0, 131_072.0, 262_144.0]);
    Ok(())
}

#[test]
fn res_2_a_resumed_scale_goes_on_as_if_nothing_had_happened() -> TestResult {
    let config =
        DynamicScale { init: 1024.0, growth_windows: 5, hysteresis: 2, ..DynamicScale::STANDARD };
    let mut straight = LossScale::dynamic(config)?;
    // Overflow three times: 1024, 512, 256. Then three clean windows.
    for overflow in [true, true, true, false, false, false] {
        let _ = window(&mut straight, overflow)?;
    }
    straight.skip(Skip::NormLimit)?;
    straight.apply(&Tensor::new(1f32, &Device::Cpu)?)?; // saved in the middle of a window
    let saved: LossScaleState = straight.state();
    assert_eq!((saved.scale, saved.clean_windows, saved.hysteresis_left), (256.0, 3, 1));
    let mut resumed =
        [LossScale::from_state(saved)?, LossScale::resume(Rule::Dynamic(config), saved, None)?];
    for scale in resumed.iter_mut().chain([&mut straight]) {
        assert_eq!(scale.state(), saved);
        let _ = scale.record(Verdict::Finite)?;
        let _ = window(scale, false)?;
        assert_eq!(scale.value(), 512.0);
    }
    assert_eq!((&resumed[0], &resumed[1]), (&straight, &straight));
    Ok(())
}

#[test]
fn res_2_an_unscaled_checkpoint_needs_a_stated_scale() -> TestResult {
    let mut off = LossScale::off();
    let _ = window(&mut off, true)?;
    let dynamic = Rule::Dynamic(DynamicScale::STANDARD);
    let silent = LossScale::resume(dynamic, off.state(), None);
    assert!(matches!(silent, Err(Error::Resume { .. })), "{silent:?}");
    let stated = LossScale::resume(dynamic, off.state(), Some(4096.0))?;
    assert_eq!((stated.value(), stated.skips().overflow), (4096.0, 1));
    let outside = LossScale::resume(dynamic, off.state(), Some(1e30));
    assert!(matches!(outside, Err(Error::Setting { .. })), "{outside:?}");
    let damaged = LossScaleState { scale: f32::NAN, ..stated.state() };
    assert!(matches!(LossScale::from_state(damaged), Err(Error::Setting { .. })));
    Ok(())
}

#[test]
fn bad_settings_name_themselves() {
    let standard = DynamicScale::STANDARD;
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40, 3e38] {
        assert!(matches!(LossScale::fixed(scale), Err(Error::Setting { .. })), "{scale}");
    }
    let rows = [
        (DynamicScale { init: 0.0, ..standard }, "initial loss scale is 0"),
        (DynamicScale { init: f32::NAN, ..standard }, "initial loss scale is NaN"),
        (DynamicScale { floor: 64.0, ceiling: 32.0, ..standard }, "floor of the loss scale is 64"),
        (DynamicScale { floor: 0.0, ..standard }, "floor of the loss scale is 0"),
        (DynamicScale { ceiling: f32::INFINITY, ..standard }, "ceiling of the loss scale is inf"),
        (DynamicScale { growth: 1.0, ..standard }, "growth of the loss scale is 1"),
        (DynamicScale { backoff: 1.0, ..standard }, "backoff of the loss scale is 1"),
        (DynamicScale { backoff: f32::NAN, ..standard }, "backoff of the loss scale is NaN"),
        (DynamicScale { growth_windows: 0, ..standard }, "growth_windows is 0"),
        (DynamicScale { hysteresis: 0, ..standard }, "hysteresis is 0"),
        (DynamicScale { max_consecutive_skips: 0, ..standard }, "max_consecutive_skips is 0"),
    ];
    for (config, expected) in rows {
        let error = LossScale::dynamic(config).expect_err(expected).to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn parameters_without_gradients_are_no_finite_window() -> TestResult {
    let w = named("w", Tensor::new(&[1f32], &Device::Cpu)?)?;
    let mut scale = LossScale::off();
    let mut grads = scale.apply(&w[0].1.sum_all()?)?.backward()?;
    for (params, n) in [(Vec::new(), 0), (named("other", Tensor::new(&[1f32], &Device::Cpu)?)?, 1)]
    {
        let none = scale.unscale(&params, &mut grads);
        assert!(matches!(none, Err(Error::NoGradients { n_params }) if n_params == n), "{none:?}");
    }
    // The window is still open: the right parameters can be given.
    assert_eq!(scale.unscale(&w, &mut grads)?, Verdict::Finite);
    Ok(())
}

#[test]
fn shared_strided_and_tied_gradients_are_divided_once() -> TestResult {
    let params: Vec<(String, Var)> = ["a", "b", "c"]
        .iter()
        .map(|name| {
            Ok((*name).to_string())
                .and_then(|n| Ok((n, Var::zeros((2, 2), DType::F32, &Device::Cpu)?)))
        })
        .collect::<candle_core::Result<_>>()?;
    let tied = ("d".to_string(), params[2].1.clone());
    let all: Vec<_> = params.iter().cloned().chain([tied]).collect();
    let mut scale = LossScale::fixed(4.0)?;
    scale.apply(&Tensor::new(1f32, &Device::Cpu)?)?;
    let shared = Tensor::new(&[[4f32, 8.0], [12.0, 16.0]], &Device::Cpu)?;
    let own = Tensor::new(&[[4f32, 8.0], [12.0, 16.0]], &Device::Cpu)?;
    let mut grads = GradStore::default();
    grads.insert(&params[0].1, shared.clone());
    grads.insert(&params[1].1, shared.t()?);
    grads.insert(&params[2].1, own.clone());
    assert_eq!(scale.unscale(&all, &mut grads)?, Verdict::Finite);
    let get = |i: usize| grads.get(&params[i].1).unwrap().to_vec2::<f32>();
    assert_eq!(get(0)?, [[1.0, 2.0], [3.0, 4.0]]);
    assert_eq!(get(1)?, [[1.0, 3.0], [2.0, 4.0]]);
    assert_eq!(get(2)?, [[1.0, 2.0], [3.0, 4.0]]);
    // What two gradients share is left alone; what one owns is written in place.
    assert_eq!(shared.to_vec2::<f32>()?, [[4.0, 8.0], [12.0, 16.0]]);
    assert_eq!(own.to_vec2::<f32>()?, [[1.0, 2.0], [3.0, 4.0]]);
    Ok(())
}

#[test]
fn small_f16_gradients_survive_the_division() -> TestResult {
    // 2^-26 is zero in f16; times 2^16 it is not, and it must not be rounded back to zero.
    let small = 2f32.powi(-26);
    let w = named("w", Tensor::new(&[f16::ONE, f16::ONE], &Device::Cpu)?)?;
    let mut scale = LossScale::dynamic(DynamicScale::STANDARD)?;
    let (verdict, grads) = one_window(&mut scale, &w, &[[small, 3.0 * small]])?;
    assert_eq!(verdict, Verdict::Finite);
    assert_eq!(grads.get(&w[0].1).unwrap().to_vec1::<f32>()?, [small, 3.0 * small]);
    let lost = underflow(&w, &grads, 1.0, DType::F16)?;
    assert_eq!((lost[0].n_nonzero, lost[0].n_lost, lost[0].share()), (2, 2, 1.0));
    assert_eq!(underflow(&w, &grads, 65536.0, DType::F16)?[0].share(), 0.0);
    assert_eq!(underflow(&w, &grads, 1.0, DType::BF16)?[0].share(), 0.0);
    Ok(())
}

#[test]
fn the_underflow_report_counts_subnormals_and_ignores_zeros() -> TestResult {
    let w = named("w", Tensor::zeros(5, DType::F32, &Device::Cpu)?)?;
    let normal = f16::MIN_POSITIVE.to_f32();
    let mut grads = GradStore::default();
    let grad = [0.0, normal, normal / 2.0, 1.0, f32::INFINITY];
    grads.insert(&w[0].1, Tensor::new(&grad, &Device::Cpu)?);
    let report = &underflow(&w, &grads, 1.0, DType::F16)?[0];
    assert_eq!((report.n_elems, report.n_nonzero, report.n_lost), (5, 4, 1));
    assert_eq!(report.share(), 0.25);
    assert!(matches!(underflow(&w, &grads, 1.0, DType::U8), Err(Error::DType { .. })));
    assert!(matches!(underflow(&[], &grads, 1.0, DType::F16), Err(Error::NoGradients { .. })));
    Ok(())
}

#[test]
fn bf16_gradients_are_divided_where_they_are() -> TestResult {
    let w = named("w", Tensor::new(&[bf16::ONE, bf16::ONE], &Device::Cpu)?)?;
    let mut scale = LossScale::fixed(256.0)?;
    let (verdict, grads) = one_window(&mut scale, &w, &[[0.5, -3.0]])?;
    assert_eq!(verdict, Verdict::Finite);
    let grad = grads.get(&w[0].1).unwrap();
    assert_eq!(grad.to_vec1::<bf16>()?, [bf16::from_f32(0.5), bf16::from_f32(-3.0)]);
    Ok(())
}

#[test]
fn the_first_overflow_is_the_first_by_name() -> TestResult {
    // Out of order on purpose.
    let params: Vec<_> = ["m", "z", "b", "a"]
        .iter()
        .map(|name| Ok(named(name, Tensor::new(&[1f32], &Device::Cpu)?)?.remove(0)))
        .collect::<TestResult<_>>()?;
    let mut grads = GradStore::default();
    for ((_, var), value) in params.iter().zip([f32::INFINITY, 1.0, f32::NAN, 1.0]) {
        grads.insert(var, Tensor::new(&[value], &Device::Cpu)?);
    }
    let mut scale = LossScale::off();
    scale.apply(&Tensor::new(1f32, &Device::Cpu)?)?;
    let verdict = scale.unscale(&params, &mut grads)?;
    assert_eq!(verdict, Verdict::Overflow { name: "b".to_string() });
    Ok(())
}

//! The catalogue's cases of accumulation, each named after its id.

mod support;
use candle_core::{DType, Device, Tensor, Var};
use support::{accum_of, add, f64_bits, f64s, grad_of, tensor, zeros};
use tallow_accum::*;
use tallow_testkit::{Tol, assert_close, values};

/// Four f32 additions and a division.
const F32: Tol = Tol::Rel(1e-6);

/// The gradient of the token-mean loss `c * w`, the tokens' `c` grouped into micro-batches.
fn token_mean(groups: &[&[f64]]) -> f64 {
    let w = Var::new(0.5f32, &Device::Cpu).unwrap();
    let mut accum = accum_of(&w, AccumDType::F32);
    for &tokens in groups {
        let c = tensor(tokens, DType::F32);
        let loss_sum = c.broadcast_mul(&w).unwrap().sum_all().unwrap();
        accum.add(loss_sum.backward().unwrap(), tokens.len() as f64).unwrap();
    }
    let window = accum.take_mean(Finish::PLAIN).unwrap();
    assert_eq!(window.report().total_weight, 4.0);
    grad_of(&window, &w)[0]
}

#[test]
fn acc_1_unequal_item_counts() {
    assert_eq!(token_mean(&[&[2.0], &[1.0, 1.0, 1.0]]), 1.25);
    for groups in [
        &[&[2.0, 1.0, 1.0, 1.0] as &[f64]] as &[&[f64]],
        &[&[2.0, 1.0], &[1.0, 1.0]],
        &[&[1.0], &[1.0], &[2.0], &[1.0]],
        &[&[1.0, 1.0, 2.0], &[1.0]],
    ] {
        assert_close("regrouped", &[token_mean(groups)], &[1.25], F32);
    }
}

/// `w -= grad` after each window, each micro-batch's gradient 1: `w` after each update.
fn sgd_over(windows: impl Iterator<Item = u64>) -> Vec<f64> {
    let w = zeros(1, DType::F32);
    let mut accum = accum_of(&w, AccumDType::F32);
    let mut path = Vec::new();
    for n_micro_batches in windows {
        for _ in 0..n_micro_batches {
            add(&mut accum, &w, &[1.0], 1.0);
        }
        let window = accum.take_mean(Finish::PLAIN).unwrap();
        assert_eq!(window.report().n_micro_batches, n_micro_batches);
        w.set(&(w.as_tensor() - window.grads().get(&w).unwrap()).unwrap()).unwrap();
        path.push(f64s(&w)[0]);
    }
    path
}

#[test]
fn acc_2_short_last_window() {
    let windows = Windows::new(10, 4).unwrap();
    assert_eq!(windows.sizes().collect::<Vec<_>>(), [4, 4, 2]);
    assert_eq!(windows.run(2, None).collect::<Vec<_>>(), [4, 4, 2, 4, 4, 2]);
    assert_eq!(sgd_over(windows.run(2, None)), [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
}

#[test]
fn acc_3_number_of_updates() {
    let (n_samples, micro_batch, n_epochs) = (9, 2, 3);
    let windows = Windows::of_samples(n_samples, micro_batch, 2).unwrap();
    assert_eq!((windows.n_micro_batches(), windows.updates_per_epoch()), (5, 3));
    assert_eq!(windows.run(n_epochs, None).sum::<u64>(), 15);
    let n_updates = windows.n_updates(n_epochs, None);
    assert_eq!((n_updates, windows.run(n_epochs, None).count()), (9, 9));

    // Linear decay counted in updates, and the samples of each micro-batch.
    let (mut rates, mut seen) = (Vec::new(), [0; 9]);
    for epoch_sizes in windows.run(n_epochs, None).collect::<Vec<_>>().chunks(3) {
        let mut starts = (0..n_samples).step_by(micro_batch as usize);
        for &size in epoch_sizes {
            for start in starts.by_ref().take(size as usize) {
                (start..n_samples.min(start + micro_batch)).for_each(|i| seen[i as usize] += 1);
            }
            rates.push((n_updates - rates.len() as u64) as f64 / 9.0);
        }
        assert_eq!(starts.next(), None);
    }
    assert_eq!(rates, [9, 8, 7, 6, 5, 4, 3, 2, 1].map(|k| f64::from(k) / 9.0));
    assert_eq!(seen, [3; 9]);

    assert_eq!(windows.n_updates(n_epochs, Some(7)), 7);
    assert_eq!(sgd_over(windows.run(n_epochs, Some(7))).len(), 7);
}

#[test]
fn acc_5_infinity_does_not_outlive_its_window() {
    let inf = f64::INFINITY;
    for first in [[inf, 1.0], [1.0, inf], [f64::NAN, 1.0], [1.0, f64::NAN], [inf, -inf]] {
        let w = Var::from_tensor(&tensor(&[0.25], DType::F32)).unwrap();
        let before = f64_bits(&w);
        let mut accum = accum_of(&w, AccumDType::F32);
        let (mut loss_scale, mut n_skipped) = (65536.0, 0);
        for grads in [first, [1.0, 1.0], [1.0, 3.0]] {
            for grad in grads {
                add(&mut accum, &w, &[grad * loss_scale], 1.0);
            }
            let window = accum.take_mean(Finish { loss_scale, clip: Clip::Norm(1e3) }).unwrap();
            match window.verdict() {
                Verdict::Finite => {
                    let mean = grads.iter().sum::<f64>() / 2.0;
                    assert_eq!(grad_of(&window, &w), [mean]);
                    assert_eq!(window.report().norm, mean);
                }
                Verdict::NonFinite { name } => {
                    assert_eq!(name, "w");
                    assert_eq!(f64_bits(&w), before);
                    loss_scale *= 0.5;
                    n_skipped += 1;
                }
            }
        }
        assert_eq!((n_skipped, loss_scale), (1, 32768.0));
    }
}

#[test]
fn acc_6_accumulator_dtype() {
    let w = zeros(1, DType::BF16);
    for (dtype, want) in
        [(AccumDType::F32, 1.5), (AccumDType::BF16, 1.0), (AccumDType::Parameter, 1.0)]
    {
        let mut accum = accum_of(&w, dtype);
        add(&mut accum, &w, &[1.0], 1.0);
        for _ in 0..256 {
            add(&mut accum, &w, &[2f64.powi(-9)], 1.0);
        }
        let window = accum.take_sum(Finish::PLAIN).unwrap();
        assert_eq!(grad_of(&window, &w), [want], "{dtype:?}");
    }
    let params = support::named(&[("w", &zeros(1000, DType::BF16))]);
    assert_eq!(accumulator_bytes(&params, AccumDType::F32), 4000);
    assert_eq!(accumulator_bytes(&params, AccumDType::BF16), 2000);
}

#[test]
fn scl_1_clip_after_unscale() {
    let w = zeros(2, DType::F32);
    for micro_batches in [&[[3.0, 4.0]] as &[[f64; 2]], &[[1.5, 2.0], [1.5, 2.0]]] {
        let mut accum = accum_of(&w, AccumDType::F32);
        for grad in micro_batches {
            add(&mut accum, &w, &grad.map(|g| g * 1024.0), 1.0);
        }
        let window = accum.take_sum(Finish { loss_scale: 1024.0, clip: Clip::Norm(1.0) }).unwrap();
        assert_eq!((window.report().norm, window.report().clipped), (5.0, true));
        assert_close("clipped", &grad_of(&window, &w), &[0.6, 0.8], Tol::Ulps(1));
        // The window is over: there is nothing left to unscale a second time.
        drop(window);
        assert!(matches!(accum.take_sum(Finish::PLAIN), Err(Error::EmptyWindow)));
    }
}

#[test]
fn spare_1_logged_loss_is_the_window_mean() {
    let losses: Vec<f64> = values(1, 8).iter().map(|x| x + 2.0).collect();
    let tokens = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0];
    let sums: Vec<f64> = losses.iter().zip(tokens).map(|(mean, n)| mean * n).collect();
    let want = sums.iter().sum::<f64>() / 31.0;
    for n in [1, 2, 4] {
        let mut run = LossSum::default();
        for (sums, tokens) in sums.chunks(n).zip(tokens.chunks(n)) {
            let mut window = LossSum::default();
            sums.iter().zip(tokens).for_each(|(&sum, &weight)| window.add(sum, weight));
            let mean = sums.iter().sum::<f64>() / tokens.iter().sum::<f64>();
            assert_close("window", &[window.mean().unwrap()], &[mean], Tol::Rel(1e-14));
            run.add(window.sum, window.weight);
        }
        assert_close("run", &[run.mean().unwrap()], &[want], Tol::Rel(1e-14));
    }
    assert_eq!(LossSum::default().mean(), None);
}

#[test]
fn spare_10_one_scale_whatever_the_micro_batch() {
    let w = zeros(1, DType::F32);
    let x: [f64; 4] = [1.0, 2.0, 4.0, 5.0];
    for cut in 1..4 {
        let mut accum = accum_of(&w, AccumDType::F32);
        for samples in [&x[..cut], &x[cut..]] {
            let scaled_sum: f64 = samples.iter().map(|x| x * 8.0).sum();
            add(&mut accum, &w, &[scaled_sum], samples.len() as f64);
        }
        let window = accum.take_mean(Finish { loss_scale: 8.0, clip: Clip::Off }).unwrap();
        assert_eq!(grad_of(&window, &w), [3.0], "cut at {cut}");
    }
}

#[test]
fn spare_11_growth_counts_windows() {
    let w = zeros(1, DType::F32);
    let mut accum = accum_of(&w, AccumDType::F32);
    let (mut loss_scale, mut n_clean, mut scales) = (2.0, 0, Vec::new());
    for _ in 0..6 {
        for _ in 0..4 {
            add(&mut accum, &w, &[loss_scale], 1.0);
        }
        let window = accum.take_mean(Finish { loss_scale, clip: Clip::Off }).unwrap();
        assert_eq!(grad_of(&window, &w), [1.0]);
        n_clean += u64::from(*window.verdict() == Verdict::Finite);
        if n_clean % 3 == 0 {
            loss_scale *= 2.0;
        }
        scales.push(loss_scale);
    }
    assert_eq!(scales, [2.0, 2.0, 4.0, 4.0, 4.0, 8.0]);
}

#[test]
fn the_drop_in_step_is_plain_candle() {
    let w = Var::new(&[1f32, -2.0], &Device::Cpu).unwrap();
    let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu).unwrap();
    let loss = |x: &Tensor| x.broadcast_mul(&w).unwrap().sqr().unwrap().sum_all().unwrap();
    let mut accum = accum_of(&w, AccumDType::F32);
    for i in 0..3 {
        accum.add(loss(&x.narrow(0, i, 1).unwrap()).backward().unwrap(), 1.0).unwrap();
    }
    let window = accum.take_mean(Finish::PLAIN).unwrap();
    // d/dw of the mean of (w x)²: 2 w times the mean of x².
    let want = [2.0 * 35.0 / 3.0, -4.0 * 56.0 / 3.0];
    assert_close("grad", &grad_of(&window, &w), &want, Tol::Rel(1e-6));
}

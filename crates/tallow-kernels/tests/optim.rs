//! Fused optimizer updates: formats of state and weight, 8-bit blocks, rounding by chance.

use half::{bf16, f16};
use tallow_kernels::{
    Element, Real,
    optim::{
        Adafactor, Adam, Block, Format, Job, Lion, Moment, Rounding, Rule, SecondMoment, Sgd, Sign,
        UpdateKey, Weight, Weights, adafactor, dynamic_map, update,
    },
};
use tallow_testkit::{Tol, assert_close, bits, max_rel, values_f32, widen};

/// Sizes around the widths of vectors, blocks, chunks and cuts.
const SIZES: [usize; 14] = [0, 1, 7, 8, 9, 255, 256, 257, 1023, 2048, 2049, 4097, 16_385, 40_000];

const ADAM: Adam = Adam { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-8, decay: 0.1, t: 1 };

fn bits8(block_elems: usize) -> Format {
    Format::Bits8(Block::new(block_elems).expect("a power of two"))
}

fn formats() -> Vec<Format> {
    let bf16 = [Rounding::Nearest, Rounding::Stochastic, Rounding::Kahan].map(Format::Bf16);
    [Format::F32, bits8(256), bits8(64), bits8(2048)].into_iter().chain(bf16).collect()
}

fn at(rule: Rule, t: u64) -> Rule {
    match rule {
        Rule::Adam(adam) => Rule::Adam(Adam { t, ..adam }),
        Rule::AdamW(adam) => Rule::AdamW(Adam { t, ..adam }),
        other => other,
    }
}

/// A parameter with its state.
struct Trained<T> {
    rule: Rule,
    format: Format,
    rounding: Rounding,
    p: Vec<T>,
    /// Main and side planes of `m` and `v`, and what rounding the weights lost.
    planes: [Vec<u8>; 5],
    t: u64,
}

impl<T: Weight> Trained<T> {
    fn new(rule: Rule, format: Format, p: Vec<T>) -> Self {
        let n = p.len() as u64;
        let [main, side, low] = [format.main_bytes(n), format.side_bytes(n), 2 * n];
        let planes = [main, side, main, side, low].map(|n_bytes| vec![0; n_bytes as usize]);
        Self { rule, format, rounding: Rounding::Nearest, p, planes, t: 0 }
    }

    fn step<G: Element>(&mut self, grad: &[G]) {
        self.t += 1;
        let n = self.p.len();
        let [m, m_side, v, v_side, low] = &mut self.planes;
        let job = Job {
            param: &mut self.p,
            grad,
            grad_factor: 1.0,
            weights: match self.rounding {
                Rounding::Nearest => Weights::Nearest,
                Rounding::Stochastic => Weights::Stochastic,
                Rounding::Kahan => Weights::Kahan(low),
            },
            m: Some(Moment::new(self.format, Sign::Signed, n, m, m_side)),
            v: Some(Moment::new(self.format, Sign::Unsigned, n, v, v_side)),
            start: 0,
        };
        let key = UpdateKey { seed: 7, parameter: 3, t: self.t };
        update(&at(self.rule, self.t), key, job);
    }

    fn wide(&self) -> Vec<f64> {
        self.p.iter().map(|p| p.widen().f64()).collect()
    }
}

fn grads(seed: u64, n: usize, t: u64) -> Vec<f32> {
    values_f32(1000 * seed + t, n)
}

fn rules() -> [Rule; 6] {
    let sgd = Sgd { lr: 0.01, momentum: 0.9, nesterov: false, decay: 0.01 };
    [
        Rule::AdamW(ADAM),
        Rule::Adam(ADAM),
        Rule::Sgd(sgd),
        Rule::Sgd(Sgd { nesterov: true, ..sgd }),
        Rule::Sgd(Sgd { momentum: 0.0, ..sgd }),
        Rule::Lion(Lion { lr: 0.01, beta1: 0.9, beta2: 0.99, decay: 0.1 }),
    ]
}

/// The formulas once more, plainly, in f64.
fn naive(rule: &Rule, p: &mut f64, g: f64, m: &mut f64, v: &mut f64) {
    match *rule {
        Rule::AdamW(a) | Rule::Adam(a) => {
            let decoupled = matches!(rule, Rule::AdamW(_));
            let g = if decoupled { g } else { g + a.decay * *p };
            if decoupled {
                *p -= a.lr * a.decay * *p;
            }
            *m = a.beta1 * *m + (1.0 - a.beta1) * g;
            *v = a.beta2 * *v + (1.0 - a.beta2) * g * g;
            let m_hat = *m / (1.0 - a.beta1.powf(a.t as f64));
            let v_hat = *v / (1.0 - a.beta2.powf(a.t as f64));
            *p -= a.lr * m_hat / (v_hat.sqrt() + a.eps);
        }
        Rule::Sgd(s) => {
            let g = g + s.decay * *p;
            *m = s.momentum * *m + g;
            *p -= s.lr * if s.nesterov { g + s.momentum * *m } else { *m };
        }
        Rule::Lion(l) => {
            let c = l.beta1 * *m + (1.0 - l.beta1) * g;
            let sign = if c == 0.0 { 0.0 } else { c.signum() };
            *p -= l.lr * (sign + l.decay * *p);
            *m = l.beta2 * *m + (1.0 - l.beta2) * g;
        }
    }
}

#[test]
fn every_rule_agrees_with_its_formula() {
    for rule in rules() {
        for n in SIZES {
            let p = values_f32(1, n);
            let mut f64s = Trained::new(rule, Format::F64, widen(&p));
            let mut f32s = Trained::new(rule, Format::F32, p.clone());
            let mut want: Vec<[f64; 3]> = widen(&p).iter().map(|p| [*p, 0.0, 0.0]).collect();
            for t in 1..=6 {
                let g = grads(2, n, t);
                f64s.step(&g);
                f32s.step(&g);
                for ([p, m, v], g) in want.iter_mut().zip(&g) {
                    naive(&at(rule, t), p, f64::from(*g), m, v);
                }
            }
            let want: Vec<f64> = want.iter().map(|[p, ..]| *p).collect();
            let what = format!("{rule:?}, {n} elements");
            assert_close(&what, &f64s.wide(), &want, Tol::Rel(1e-14));
            assert_close(&what, &f32s.wide(), &want, Tol::Rel(1e-6));
        }
    }
}

/// Bounds on the distance to f32 states after 20 updates, relative to the largest weight, which
/// they move by up to 0.2: a twentieth of the way for 8 bits, a fiftieth for bf16.
fn bound(format: Format) -> f64 {
    match format {
        Format::Bits8(_) => 1e-2,
        Format::Bf16(Rounding::Kahan) => 2e-4,
        Format::Bf16(_) => 4e-3,
        Format::F32 | Format::F64 => 0.0,
    }
}

#[test]
fn every_format_stays_near_its_f32_form() {
    for format in formats() {
        for n in [1, 255, 257, 4099] {
            let p = values_f32(3, n);
            let mut exact = Trained::new(Rule::AdamW(ADAM), Format::F32, p.clone());
            let mut stored = Trained::new(Rule::AdamW(ADAM), format, p);
            for t in 1..=20 {
                // A drift beside the noise, as in training.
                let g: Vec<f32> = grads(4, n, t).iter().map(|g| g + 0.5).collect();
                exact.step(&g);
                stored.step(&g);
            }
            let error = max_rel(&stored.wide(), &exact.wide());
            assert!(error <= bound(format), "{format:?}, {n} elements: {error:e}");
        }
    }
}

#[test]
fn results_do_not_depend_on_threads_or_on_division() {
    let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads start");
    let n = 100_001;
    for format in formats() {
        let run = || {
            let p: Vec<bf16> = values_f32(5, n).into_iter().map(bf16::from_f32).collect();
            let mut trained = Trained::new(Rule::AdamW(ADAM), format, p);
            trained.rounding = Rounding::Stochastic;
            for t in 1..=3 {
                trained.step(&grads(6, n, t));
            }
            (trained.p, trained.planes)
        };
        let one = pool(1).install(run);
        assert!(one == pool(3).install(run), "{format:?}");
    }
}

#[test]
fn a_window_at_a_time_is_the_whole_at_once() {
    let (n, window) = (10_000, 4096);
    let p: Vec<bf16> = values_f32(5, n).into_iter().map(bf16::from_f32).collect();
    let rule = Rule::Lion(Lion { lr: 0.01, beta1: 0.9, beta2: 0.99, decay: 0.1 });
    let format = Format::Bf16(Rounding::Stochastic);
    let mut whole = Trained::new(rule, format, p.clone());
    whole.rounding = Rounding::Stochastic;
    let g = grads(6, n, 1);
    whole.step(&g);
    let (mut p, mut m) = (p, vec![0; 2 * n]);
    for start in (0..n).step_by(window) {
        let end = n.min(start + window);
        let m = &mut m[2 * start..2 * end];
        let job = Job {
            param: &mut p[start..end],
            grad: &g[start..end],
            grad_factor: 1.0,
            weights: Weights::Stochastic,
            m: Some(Moment::new(format, Sign::Signed, end - start, m, &mut [])),
            v: None,
            start: start as u64,
        };
        update(&rule, UpdateKey { seed: 7, parameter: 3, t: 1 }, job);
    }
    assert!(p == whole.p && m == whole.planes[0]);
}

#[test]
fn opt_2_a_small_second_moments_do_not_explode() {
    let adam = Adam { decay: 0.0, beta2: 0.999, ..ADAM };
    // Beside the block's largest: 1e-2, and 1e-4 whose square is below the map's least value.
    for (small, n_lr) in [(1e-2f32, 2.0), (1e-4, 10.0)] {
        let g: Vec<f32> = (0..256).map(|i| if i % 2 == 0 { 1.0 } else { -small }).collect();
        let mut trained = Trained::new(Rule::Adam(adam), bits8(256), vec![0f32; 256]);
        for t in 0..100 {
            let before = trained.p.clone();
            trained.step(&g);
            for (i, (p, before)) in trained.p.iter().zip(&before).enumerate() {
                let moved = f64::from(p - before);
                assert!(moved.is_finite() && moved.abs() <= n_lr * adam.lr, "{t}, {i}: {moved}");
                assert!(moved * f64::from(g[i]) < 0.0, "{t}, {i}: {moved} along the gradient");
            }
        }
    }
}

/// The value and the code nearest to `x`, by trying all.
fn nearest(map: &[f32; 256], x: f32) -> f32 {
    let distance = |v: f32| (f64::from(v) - f64::from(x)).abs();
    map.iter().copied().min_by(|a, b| distance(*a).total_cmp(&distance(*b))).expect("256 values")
}

#[test]
fn opt_2_b_round_trip_equals_a_reference_by_block() {
    let (signed, unsigned) = (dynamic_map(Sign::Signed), dynamic_map(Sign::Unsigned));
    for block in [16, 64, 256, 2048] {
        for n in [0, 1, 7, block - 1, block, block + 1, 3 * block + 5] {
            let format = bits8(block);
            assert_eq!(format.bytes(n as u64), (n + 4 * n.div_ceil(block)) as u64);
            // At rate 0 a single update stores m = 0.1 g and v = 0.01 g^2.
            let adam = Adam { lr: 0.0, decay: 0.0, ..ADAM };
            let mut trained = Trained::new(Rule::Adam(adam), format, vec![0f32; n]);
            let g = grads(7, n, 0);
            trained.step(&g);
            let moments = [(&signed, 0, 0.1f32, false), (&unsigned, 2, 0.01, true)];
            for (map, plane, share, squared) in moments {
                for (b, g) in g.chunks(block).enumerate() {
                    let x = |g: f32| share * g * if squared { g } else { 1.0 };
                    let scale = g.iter().fold(0f32, |s, g| s.max(x(*g).abs()));
                    let at = &trained.planes[plane + 1][4 * b..4 * b + 4];
                    let stored = f32::from_le_bytes(at.try_into().expect("4 bytes"));
                    assert_close("scale", &[stored.into()], &[scale.into()], Tol::Ulps(4));
                    for (i, g) in g.iter().enumerate() {
                        let code = usize::from(trained.planes[plane][b * block + i]);
                        let x = x(*g) / scale;
                        // A positive second moment never becomes 0.
                        let want = match nearest(map, x) {
                            0.0 if squared && x > 0.0 => map[1],
                            want => want,
                        };
                        // At a tie, rounding of x decides.
                        let error = |v: f32| f64::from((v - x).abs());
                        let tie = f64::from(2.0 * f32::EPSILON * x.abs());
                        assert!(error(map[code]) <= error(want) + tie, "{block} {n} {b} {i}");
                    }
                }
            }
        }
    }
}

#[test]
fn opt_2_c_an_outlier_stays_in_its_block() {
    for outlier in [1e6, f32::INFINITY, f32::NAN] {
        let mut plain = Trained::new(Rule::AdamW(ADAM), bits8(256), values_f32(1, 600));
        let mut struck = Trained::new(Rule::AdamW(ADAM), bits8(256), values_f32(1, 600));
        for t in 1..=5 {
            let mut g = grads(8, 600, t);
            plain.step(&g);
            g[17] = outlier;
            struck.step(&g);
        }
        assert_eq!(bits(&plain.p[256..]), bits(&struck.p[256..]), "{outlier}");
        for plane in [0, 2] {
            assert_eq!(plain.planes[plane][256..], struck.planes[plane][256..], "{outlier}");
            assert_eq!(plain.planes[plane + 1][4..], struck.planes[plane + 1][4..], "{outlier}");
        }
        // What is not finite reaches its own element, and not even its neighbours in the block.
        let n_nan = struck.p.iter().filter(|p| p.is_nan()).count();
        assert_eq!(n_nan, usize::from(!outlier.is_finite()), "{outlier}");
    }
}

#[test]
fn opt_2_d_absurd_blocks_are_errors() {
    for block in [0, 1, 8, 48, 100, 4096, usize::MAX] {
        let error = Block::new(block).unwrap_err().to_string();
        assert!(error.contains(&format!("the block is {block} elements")), "{error}");
    }
}

#[test]
fn the_maps_are_those_of_the_paper() {
    let (signed, unsigned) = (dynamic_map(Sign::Signed), dynamic_map(Sign::Unsigned));
    for map in [signed, unsigned] {
        assert!(map.is_sorted() && map.contains(&0.0) && map[255] == 1.0);
    }
    // Both ends of bitsandbytes' tables.
    let want = [f64::from(signed[0]), unsigned[0].into(), unsigned[1].into(), unsigned[254].into()];
    assert_close("maps", &want, &[-0.992_968_75, 0.0, 3.25e-7, 0.996_484_375], Tol::Rel(1e-6));
    assert_eq!(signed.iter().filter(|v| **v < 0.0).count(), 127);
}

#[test]
fn a_gradient_that_is_not_finite_reaches_its_own_element() {
    for format in formats() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut plain = Trained::new(Rule::AdamW(ADAM), format, values_f32(1, 300));
            let mut struck = Trained::new(Rule::AdamW(ADAM), format, values_f32(1, 300));
            let mut g = grads(9, 300, 1);
            g[40] = 0.0;
            plain.step(&g);
            g[40] = bad;
            struck.step(&g);
            assert!(struck.p[40].is_nan(), "{format:?}, {bad}");
            struck.p[40] = plain.p[40];
            assert_eq!(bits(&plain.p), bits(&struck.p), "{format:?}, {bad}");
        }
    }
}

/// 100 updates of 6e-4 from 1.0 in each of `n` weights.
fn descend<T: Weight>(rounding: Rounding, n: usize) -> Vec<f64> {
    let one = T::narrow(T::Acc::of(1.0));
    let sgd = Sgd { lr: 6e-4, momentum: 0.0, nesterov: false, decay: 0.0 };
    let mut trained = Trained::new(Rule::Sgd(sgd), Format::F32, vec![one; n]);
    trained.rounding = rounding;
    for _ in 0..100 {
        trained.step(&vec![1f32; n]);
    }
    trained.wide()
}

#[test]
fn pre_1_updates_are_not_lost() {
    assert_eq!(descend::<bf16>(Rounding::Nearest, 1), [1.0]); // documents the failure
    // What an f32 master of 0.94 would be rounded to.
    assert_eq!(descend::<bf16>(Rounding::Kahan, 1), [0.941_406_25]);
    assert_eq!(descend::<f16>(Rounding::Kahan, 1), [0.939_941_406_25]);
    for x in
        [descend::<bf16>(Rounding::Stochastic, 4096), descend::<f16>(Rounding::Stochastic, 4096)]
    {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let standard_error = (variance / n).sqrt();
        assert!(standard_error > 0.0, "all 4096 copies are equal");
        assert!((mean - 0.94).abs() <= 4.0 * standard_error, "{mean} +- {standard_error}");
    }
    let twice = [(); 2].map(|()| descend::<bf16>(Rounding::Stochastic, 64));
    assert_eq!(twice[0], twice[1]);
}

#[test]
fn stochastic_rounding_takes_a_neighbour_and_spares_what_is_exact() {
    for x in [0.0, -0.0, 1.0, -1.5, 1e-7, 65504.0, 1e6, -1e-3, f32::INFINITY, 3.4e38, 6e-8, 1e-9] {
        for draw in [0, 1, 0x7fff, 0x8000, u16::MAX] {
            let (b, h) = (bf16::stochastic(x, draw), f16::stochastic(x, draw));
            let near = |got: f32, nearest: f32, ulp: f32| {
                got == nearest || (got - x).abs() <= ulp * x.abs().max(f32::MIN_POSITIVE)
            };
            assert!(near(b.to_f32(), bf16::from_f32(x).to_f32(), 1.0 / 128.0), "{x} {draw} {b}");
            let subnormal = (h.to_f32() - x).abs() <= 6e-8;
            assert!(near(h.to_f32(), f16::from_f32(x).to_f32(), 1.0 / 1024.0) || subnormal);
            if bf16::from_f32(x).to_f32() == x {
                assert_eq!(b.to_f32().to_bits(), x.to_bits(), "{x} {draw}");
            }
        }
    }
    assert!(bf16::stochastic(f32::NAN, 3).is_nan() && f16::stochastic(f32::NAN, 3).is_nan());
}

#[test]
fn pre_2_half_precision_weights_have_f32_arithmetic() {
    fn check<T: Weight>() {
        let start: Vec<T> = [1.0, -2.0, 0.5].map(|x| T::narrow(T::Acc::of(x))).to_vec();
        let adam = Adam { decay: 0.0, beta2: 0.999, lr: 0.125, ..ADAM };
        for format in formats() {
            let mut still = Trained::new(Rule::Adam(adam), format, start.clone());
            (0..3).for_each(|_| still.step(&[T::default(); 3]));
            assert_eq!(still.p, start, "{format:?}");
            let mut moved = Trained::new(Rule::Adam(adam), format, start.clone());
            moved.step(&[T::narrow(T::Acc::of(1e-4)); 3]);
            for (after, before) in moved.wide().iter().zip(&start) {
                let by = before.widen().f64() - after;
                assert!((by - 0.125).abs() <= 0.125e-3, "{format:?}: {by}");
            }
        }
    }
    check::<f16>();
    check::<bf16>();
}

/// Adafactor on a batch of matrices, plainly, in f64: `(p, row, col)` after the update.
fn naive_adafactor(
    a: &Adafactor,
    dims: [usize; 3],
    p: &mut [f64],
    g: &[f64],
    second: &mut [Vec<f64>; 2],
) {
    let [_, n_rows, n_cols] = dims;
    let (b, n) = ((a.t as f64).powf(a.beta2_decay), p.len() as f64);
    let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / n).sqrt();
    let [row, col] = second;
    let cell = |i: usize| (i / n_cols, i / (n_rows * n_cols) * n_cols + i % n_cols);
    let (mut new_row, mut new_col) = (vec![0.0; row.len()], vec![0.0; col.len()]);
    for (i, g) in g.iter().enumerate() {
        new_row[cell(i).0] += g * g / n_cols as f64;
        new_col[cell(i).1] += g * g / n_rows as f64;
    }
    let lerp =
        |x: &mut Vec<f64>, y: Vec<f64>| x.iter_mut().zip(y).for_each(|(x, y)| *x += b * (y - *x));
    lerp(row, new_row);
    lerp(col, new_col);
    let u: Vec<f64> = (0..p.len())
        .map(|i| {
            let (r, c) = cell(i);
            let mean = row[r / n_rows * n_rows..][..n_rows].iter().sum::<f64>() / n_rows as f64;
            g[i] / (row[r] * col[c] / mean.max(a.eps1)).max(a.eps1 * a.eps1).sqrt()
        })
        .collect();
    let alpha = a.eps2.max(rms(p)) * a.lr.min(1.0 / (a.t as f64).sqrt()) / (rms(&u) / a.d).max(1.0);
    for (p, u) in p.iter_mut().zip(u) {
        *p = *p * (1.0 - a.lr * a.decay) - alpha * u;
    }
}

#[test]
fn adafactor_agrees_with_its_formula_and_with_any_number_of_threads() {
    for dims in [[1, 1, 1], [1, 3, 7], [2, 5, 3], [3, 1, 40], [1, 300, 257], [2, 2049, 9]] {
        let n = dims.iter().product();
        let p = values_f32(1, n);
        let (n_row, n_col) = (dims[0] * dims[1], dims[0] * dims[2]);
        let run = || {
            let (mut p, mut row, mut col) = (p.clone(), vec![0; 4 * n_row], vec![0; 4 * n_col]);
            for t in 1..=3 {
                let rule = rule(t);
                let (n_rows, n_cols) = (dims[1], dims[2]);
                let second =
                    SecondMoment::Factored { n_rows, n_cols, row: &mut row, col: &mut col };
                let key = UpdateKey { seed: 0, parameter: 0, t };
                adafactor(&rule, key, &mut p, &grads(2, n, t), 1.0, Weights::Nearest, second);
            }
            p
        };
        fn rule(t: u64) -> Adafactor {
            Adafactor { lr: 0.01, beta2_decay: -0.8, eps1: 1e-7, eps2: 1e-3, d: 1.0, decay: 0.1, t }
        }
        let (mut want, mut second) = (widen(&p), [vec![0.0; n_row], vec![0.0; n_col]]);
        for t in 1..=3 {
            naive_adafactor(&rule(t), dims, &mut want, &widen(&grads(2, n, t)), &mut second);
        }
        let got = run();
        assert_close(&format!("{dims:?}"), &widen(&got), &want, Tol::Rel(1e-6));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("threads start");
        assert_eq!(bits(&got), bits(&pool.install(run)), "{dims:?}");
    }
}

//! Random models, splits and weights: micro-batches equal the full batch.

mod support;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::Linear;
use proptest::prelude::*;
use support::{config, f64_bits, f64s, named, tensor};
use tallow_accum::*;
use tallow_testkit::values;

/// `y = W x + b`, loss of sample `i`: `weights[i]` times the squared error, summed over outputs.
#[derive(Clone, Debug)]
struct Problem {
    n: usize,
    n_in: usize,
    n_out: usize,
    seed: u64,
    /// Samples of each micro-batch; they add up to `n`.
    split: Vec<usize>,
    dtype: DType,
}

impl Problem {
    /// Values exact in f32.
    fn some(&self, what: u64, n: usize) -> Vec<f64> {
        values(self.seed.wrapping_mul(8).wrapping_add(what), n)
    }
    fn w(&self) -> Vec<f64> {
        self.some(0, self.n_out * self.n_in)
    }
    fn b(&self) -> Vec<f64> {
        self.some(1, self.n_out)
    }
    fn x(&self) -> Vec<f64> {
        self.some(2, self.n * self.n_in)
    }
    fn t(&self) -> Vec<f64> {
        self.some(3, self.n * self.n_out)
    }
    fn weights(&self) -> Vec<f64> {
        self.some(4, self.n).iter().map(|w| w + 1.5).collect()
    }

    /// Gradients of `W` and `b` of the weighted mean, and the sums of their terms' sizes.
    fn exact(&self) -> [Vec<(f64, f64)>; 2] {
        let (w, b, x, t, weights) = (self.w(), self.b(), self.x(), self.t(), self.weights());
        let total: f64 = weights.iter().sum();
        let mut dw = vec![(0.0, 0.0); self.n_out * self.n_in];
        let mut db = vec![(0.0, 0.0); self.n_out];
        for i in 0..self.n {
            for o in 0..self.n_out {
                let (mut r, mut size) = (b[o] - t[i * self.n_out + o], b[o].abs());
                size += t[i * self.n_out + o].abs();
                for d in 0..self.n_in {
                    let term = w[o * self.n_in + d] * x[i * self.n_in + d];
                    (r, size) = (r + term, size + term.abs());
                }
                let c = 2.0 * weights[i] / total;
                for d in 0..self.n_in {
                    let (g, x) = (&mut dw[o * self.n_in + d], x[i * self.n_in + d]);
                    *g = (g.0 + c * r * x, g.1 + c * size * x.abs());
                }
                db[o] = (db[o].0 + c * r, db[o].1 + c * size);
            }
        }
        [dw, db]
    }

    fn run(&self, split: &[usize]) -> [Tensor; 2] {
        let shaped = |values: Vec<f64>, dims: &[usize]| {
            tensor(&values, self.dtype).reshape(dims).expect("values fill dims")
        };
        let w = Var::from_tensor(&shaped(self.w(), &[self.n_out, self.n_in])).unwrap();
        let b = Var::from_tensor(&shaped(self.b(), &[self.n_out])).unwrap();
        let model = Linear::new(w.as_tensor().clone(), Some(b.as_tensor().clone()));
        let (x, t) =
            (shaped(self.x(), &[self.n, self.n_in]), shaped(self.t(), &[self.n, self.n_out]));
        let weights = shaped(self.weights(), &[self.n, 1]);
        let params = named(&[("b", &b), ("w", &w)]);
        let mut accum = GradientAccumulator::new(&params, config(AccumDType::F32)).unwrap();
        let mut by_hand: [Option<Tensor>; 2] = [None, None];
        let mut start = 0;
        for &len in split {
            let part = |x: &Tensor| x.narrow(0, start, len).unwrap();
            let errors = (model.forward(&part(&x)).unwrap() - part(&t)).unwrap().sqr().unwrap();
            let loss_sum = errors.broadcast_mul(&part(&weights)).unwrap().sum_all().unwrap();
            let grads = loss_sum.backward().unwrap();
            for (sum, var) in by_hand.iter_mut().zip([&w, &b]) {
                let grad = grads.get(var).expect("both are used");
                *sum = Some(sum.take().map_or(grad.clone(), |sum| (sum + grad).unwrap()));
            }
            accum.add(grads, self.weights()[start..start + len].iter().sum()).unwrap();
            start += len;
        }
        let window = accum.take_mean(Finish::PLAIN).unwrap();
        let total = Tensor::new(window.report().total_weight, &Device::Cpu).unwrap();
        // In the same order the sums are the same, bit for bit.
        for (sum, var) in by_hand.iter().zip([&w, &b]) {
            let sum = sum.as_ref().expect("there is a micro-batch").to_dtype(DType::F64).unwrap();
            let mean = sum.broadcast_div(&total).unwrap().to_dtype(self.dtype).unwrap();
            assert_eq!(f64_bits(window.grads().get(var).unwrap()), f64_bits(&mean));
        }
        [&w, &b].map(|var| window.grads().get(var).unwrap().copy().unwrap())
    }
}

fn problem() -> impl Strategy<Value = Problem> {
    let split = prop::collection::vec(1usize..6, 1..9);
    let dtype = prop_oneof![Just(DType::F32), Just(DType::F64)];
    (split, 1usize..9, 1usize..5, any::<u64>(), dtype).prop_map(
        |(split, n_in, n_out, seed, dtype)| Problem {
            n: split.iter().sum(),
            n_in,
            n_out,
            seed,
            split,
            dtype,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn micro_batches_equal_the_full_batch(problem in problem()) {
        let eps = if problem.dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        // Roundings on the way of a term: a residual's `n_in` + 2, four factors, the batch's sum.
        let n = (problem.n_in + 6 + problem.n) as f64;
        let full = problem.run(&[problem.n]);
        let parts = problem.run(&problem.split);
        for ((full, parts), exact) in full.iter().zip(&parts).zip(problem.exact()) {
            for ((full, parts), (want, size)) in f64s(full).iter().zip(f64s(parts)).zip(exact) {
                let bound = n * eps * size;
                prop_assert!((parts - want).abs() <= bound, "{parts} {want} {bound}");
                prop_assert!((parts - full).abs() <= 2.0 * bound, "{parts} {full} {bound}");
            }
        }
    }
}

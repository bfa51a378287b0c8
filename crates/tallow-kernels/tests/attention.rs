//! Attention against PyTorch, a naive one in f64, and central differences.

mod support;
use half::{bf16, f16};
use support::{f64s, same_on_any_thread_count, to};
use tallow_kernels::{Element, attention::*, isa::Isa};
use tallow_testkit::{Reference, Tol, assert_close, central_difference, values, widen};

/// Against PyTorch in f64, computed in f32.
const F32: Tol = Tol::Rel(1e-5);
/// Against central differences of step `STEP` in f64.
const DIFFERENCE: Tol = Tol::Rel(1e-6);
const STEP: f64 = 1e-5;
/// Two ways to compute the same thing in f64: sums of at most 200 terms.
const F64: Tol = Tol::Rel(200.0 * f64::EPSILON);

/// One attention and what flows back into it.
struct Inputs {
    shape: AttentionShape,
    causal: bool,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    dout: Vec<f64>,
}

impl Inputs {
    /// `sizes`: batch, query heads, key-value heads, query tokens, key tokens, head dimension.
    fn new(sizes: [usize; 6], causal: bool) -> Self {
        let shape = shape(sizes);
        Self {
            shape,
            causal,
            q: values(1, shape.q_elems()).iter().map(|q| 3.0 * q).collect(),
            k: values(2, shape.kv_elems()),
            v: values(3, shape.kv_elems()),
            dout: values(4, shape.q_elems()),
        }
    }

    fn scale(&self) -> f64 {
        1.0 / (self.shape.head_dim as f64).sqrt()
    }
}

fn shape(sizes: [usize; 6]) -> AttentionShape {
    let [batch, n_heads, n_kv_heads, q_tokens, kv_tokens, head_dim] = sizes;
    AttentionShape { batch, n_heads, n_kv_heads, q_tokens, kv_tokens, head_dim }
        .checked()
        .expect("a valid shape")
}

/// Output and log-sum-exps.
fn forward<T: Element>(i: &Inputs) -> (Vec<T>, Vec<T::Acc>) {
    let [q, k, v] = [&i.q, &i.k, &i.v].map(|x| to::<T>(x));
    let mut out = to::<T>(&vec![f64::NAN; i.shape.q_elems()]);
    let mut lse = to(&vec![f64::NAN; i.shape.lse_elems()]);
    attention(&mut out, &mut lse, &q, &k, &v, &i.shape, i.causal, i.scale());
    (out, lse)
}

/// `dq`, `dk`, `dv`.
fn backward<T: Element>(i: &Inputs) -> [Vec<T>; 3] {
    let [q, k, v, dout] = [&i.q, &i.k, &i.v, &i.dout].map(|x| to::<T>(x));
    let (out, lse) = forward::<T>(i);
    let mut grads = [&q, &k, &v].map(|x| to::<T>(&vec![f64::NAN; x.len()]));
    let [dq, dk, dv] = grads.each_mut().map(|g| Some(&mut g[..]));
    let scale = i.scale();
    attention_backward(dq, dk, dv, &q, &k, &v, &out, &lse, &dout, &i.shape, i.causal, scale);
    grads
}

/// The definition, one query at a time: output and log-sum-exps.
fn naive(i: &Inputs) -> (Vec<f64>, Vec<f64>) {
    let AttentionShape { n_heads, n_kv_heads, q_tokens, kv_tokens, head_dim: d, .. } = i.shape;
    let (mut out, mut lses) = (Vec::new(), Vec::new());
    for row in 0..i.shape.lse_elems() {
        let (head, query) = (row / q_tokens, row % q_tokens);
        let kv_head = head / n_heads * n_kv_heads + head % n_heads / (n_heads / n_kv_heads);
        let kv = |x: &[f64], j: usize, c: usize| x[(kv_head * kv_tokens + j) * d + c];
        let keys: Vec<usize> =
            (0..kv_tokens).filter(|j| !i.causal || j + q_tokens <= query + kv_tokens).collect();
        let score = |j: &usize| -> f64 {
            i.scale() * (0..d).map(|c| i.q[row * d + c] * kv(&i.k, *j, c)).sum::<f64>()
        };
        let lse = keys.iter().map(|j| score(j).exp()).sum::<f64>().ln();
        out.extend(
            (0..d).map(|c| {
                keys.iter().map(|j| (score(j) - lse).exp() * kv(&i.v, *j, c)).sum::<f64>()
            }),
        );
        lses.push(lse);
    }
    (out, lses)
}

/// Sizes across tiles of 64 and vectors of 8, grouped heads, more and fewer keys than queries.
const SIZES: [[usize; 6]; 10] = [
    [1, 1, 1, 1, 1, 1],
    [2, 2, 2, 7, 7, 8],
    [1, 4, 2, 9, 17, 9],
    [1, 3, 1, 17, 9, 7],
    [1, 1, 1, 65, 65, 4],
    [1, 2, 1, 64, 129, 33],
    [1, 1, 1, 130, 63, 17],
    [2, 2, 1, 1, 70, 8],
    [1, 1, 1, 3, 5, 33],
    [1, 1, 1, 3, 0, 2],
];

#[test]
fn matches_pytorch() {
    let reference = Reference::load();
    let cases = reference.cases("scaled_dot_product_attention");
    assert_eq!(cases.len(), 4);
    for case in cases {
        let get = |part: &str| reference.values(&format!("{}.{part}", case.name));
        let (q, k) = (get("in.q"), get("in.k"));
        let [batch, n_heads, q_tokens, head_dim] = q.shape[..] else { panic!("{:?}", q.shape) };
        let inputs = Inputs {
            shape: shape([batch, n_heads, k.shape[1], q_tokens, k.shape[2], head_dim]),
            causal: case.bool("causal"),
            q: widen(&q.data),
            k: widen(&k.data),
            v: widen(&get("in.v").data),
            dout: widen(&get("dout").data),
        };
        let [dq, dk, dv] = backward::<f32>(&inputs);
        let out = forward::<f32>(&inputs).0;
        for (part, got) in [("out", out), ("grad.q", dq), ("grad.k", dk), ("grad.v", dv)] {
            assert_close(
                &format!("{}.{part}", case.name),
                &widen(&got),
                &widen(&get(part).data),
                F32,
            );
        }
    }
}

#[test]
fn matches_the_definition() {
    for sizes in SIZES {
        for causal in [false, true] {
            let inputs = Inputs::new(sizes, causal);
            let ((out, lse), (want, want_lse)) = (forward::<f64>(&inputs), naive(&inputs));
            assert_close(&format!("out {sizes:?} {causal}"), &out, &want, F64);
            assert_close(&format!("lse {sizes:?} {causal}"), &lse, &want_lse, F64);
        }
    }
}

#[test]
fn gradients_match_central_differences() {
    // One difference costs two forward passes an element: only where that is quick.
    let quick = |sizes: &[usize; 6]| shape(*sizes).q_elems() < 1000;
    for sizes in SIZES.into_iter().filter(quick) {
        for causal in [false, true] {
            let i = Inputs::new(sizes, causal);
            let loss = |q: &[f64], k: &[f64], v: &[f64]| -> f64 {
                let [q, k, v] = [q, k, v].map(<[f64]>::to_vec);
                let moved = Inputs { shape: i.shape, causal, q, k, v, dout: vec![] };
                forward::<f64>(&moved).0.iter().zip(&i.dout).map(|(o, d)| o * d).sum()
            };
            let what = format!("{sizes:?} {causal}");
            let [dq, dk, dv] = backward::<f64>(&i);
            let want = central_difference(|q| loss(q, &i.k, &i.v), &i.q, STEP);
            if sizes == [1; 6] {
                // One key: the output does not depend on the scores. The difference is exact.
                assert_eq!((&dq, &dk), (&vec![0.0], &vec![0.0]), "{what}");
            } else {
                assert_close(&format!("dq {what}"), &dq, &want, DIFFERENCE);
                let want = central_difference(|k| loss(&i.q, k, &i.v), &i.k, STEP);
                assert_close(&format!("dk {what}"), &dk, &want, DIFFERENCE);
            }
            let want = central_difference(|v| loss(&i.q, &i.k, v), &i.v, STEP);
            assert_close(&format!("dv {what}"), &dv, &want, DIFFERENCE);
        }
    }
}

/// `f16` exactly; `bf16` may have its probabilities rounded too, each by half an ulp.
#[test]
fn half_forward_is_the_f32_result_rounded_once() {
    fn check<T: Element<Acc = f32>>(sizes: [usize; 6], causal: bool, exact: bool) {
        let mut inputs = Inputs::new(sizes, causal);
        for x in [&mut inputs.q, &mut inputs.k, &mut inputs.v, &mut inputs.dout] {
            *x = f64s(&to::<T>(x));
        }
        let ((out, lse), (want, want_lse)) = (forward::<T>(&inputs), forward::<f32>(&inputs));
        let what = format!("{sizes:?} {causal}");
        let ulps = |n: f64| if exact { Tol::Exact } else { Tol::Rel(n) };
        let half = f64::from(half_ulp::<T>());
        assert_close(&what, &f64s(&out), &f64s(&to::<T>(&widen(&want))), ulps(3.0 * half));
        assert_close(&what, &widen(&lse), &widen(&want_lse), ulps(1e-6));
        // Backward also reads the rounded output, by rowsum(dout * out): up to D products off by
        // half an ulp each, on top of the rounding of the gradient itself.
        let tol = Tol::Rel(half * (1.0 + inputs.shape.head_dim as f64));
        for (got, want) in backward::<T>(&inputs).iter().zip(backward::<f32>(&inputs)) {
            assert_close(&what, &f64s(got), &widen(&want), tol);
        }
    }
    for sizes in SIZES {
        for causal in [false, true] {
            check::<bf16>(sizes, causal, Isa::best() < Isa::Avx512Bf16);
            check::<f16>(sizes, causal, true);
        }
    }
}

/// The bound above is of the worst element. On average what is rounded on the way costs less than the
/// rounding of the results alone may cost at worst.
#[test]
fn bf16_is_off_by_less_than_half_an_ulp_on_average() {
    let mut inputs = Inputs::new([1, 2, 2, 200, 200, 64], true);
    for x in [&mut inputs.q, &mut inputs.k, &mut inputs.v, &mut inputs.dout] {
        *x = f64s(&to::<bf16>(x));
    }
    let (narrow, wide) = (backward::<bf16>(&inputs), backward::<f64>(&inputs));
    for (got, want) in narrow.iter().zip(&wide) {
        let of = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let off = of(&mut f64s(got).iter().zip(want).map(|(got, want)| got - want));
        let share = off / of(&mut want.iter().copied());
        assert!(share < f64::from(half_ulp::<bf16>()), "{share:e} of the root mean square");
    }
}

#[test]
fn gradients_can_be_asked_for_one_by_one() {
    let i = Inputs::new([1, 2, 1, 9, 9, 8], true);
    let (out, lse) = forward::<f64>(&i);
    let want = backward::<f64>(&i);
    for (only, want) in want.iter().enumerate() {
        let mut got = vec![f64::NAN; want.len()];
        let [mut dq, mut dk, mut dv] = [None, None, None];
        *[&mut dq, &mut dk, &mut dv][only] = Some(&mut got[..]);
        let (dout, scale) = (&i.dout, i.scale());
        attention_backward(dq, dk, dv, &i.q, &i.k, &i.v, &out, &lse, dout, &i.shape, true, scale);
        assert_eq!(&got, want);
    }
}

#[test]
fn causal_is_aligned_to_the_last_key() {
    // Equal scores: the output is the mean of the visible values 1, 2, 3.
    for (q_tokens, want) in
        [(1, vec![2.0]), (3, vec![1.0, 1.5, 2.0]), (5, vec![0.0, 0.0, 1.0, 1.5, 2.0])]
    {
        let inputs = Inputs {
            shape: shape([1, 1, 1, q_tokens, 3, 1]),
            causal: true,
            q: vec![0.0; q_tokens],
            k: vec![1.0; 3],
            v: vec![1.0, 2.0, 3.0],
            dout: vec![1.0; q_tokens],
        };
        let (out, lse) = forward::<f64>(&inputs);
        assert_close("out", &out, &want, F64);
        for (out, lse) in out.iter().zip(lse) {
            assert_eq!(*out == 0.0, lse == f64::NEG_INFINITY);
        }
        assert!(backward::<f64>(&inputs).concat().iter().all(|g| g.is_finite()));
    }
}

#[test]
fn a_bad_query_is_nan_and_alone() {
    for bad in [f64::NAN, f64::INFINITY] {
        let mut inputs = Inputs::new([1, 1, 1, 9, 9, 4], false);
        let clean = forward::<f32>(&inputs).0;
        inputs.q[2 * 4] = bad;
        let out = forward::<f32>(&inputs).0;
        // An infinite query has scores of both signs of infinity here, or NaN by inf - inf.
        assert!(out[2 * 4..3 * 4].iter().all(|o| o.is_nan()), "{bad}: {:?}", &out[8..12]);
        assert_eq!((&out[..8], &out[12..]), (&clean[..8], &clean[12..]));
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let mut inputs = Inputs::new([1, 1, 1, 9, 70, 4], false);
    inputs.q.iter_mut().for_each(|q| *q *= 1e4);
    let (got, want) = (forward::<f32>(&inputs).0, forward::<f64>(&inputs).0);
    // Scores near 1e4 are off by 1e4 * 2^-24 in f32, and so is the logarithm of each P.
    assert_close("out", &widen(&got), &want, Tol::Rel(1e4 * f64::from(f32::EPSILON)));
}

#[test]
fn bits_do_not_depend_on_the_thread_count() {
    for causal in [false, true] {
        let inputs = Inputs::new([2, 4, 2, 150, 130, 16], causal);
        same_on_any_thread_count(|| (forward::<f32>(&inputs), backward::<bf16>(&inputs)));
    }
}

#[test]
fn shapes_are_checked() {
    let sizes = |n_heads, n_kv_heads, q_tokens, head_dim| AttentionShape {
        batch: 1,
        n_heads,
        n_kv_heads,
        q_tokens,
        kv_tokens: 1,
        head_dim,
    };
    for (n_heads, n_kv_heads) in [(3, 2), (2, 0), (2, 4)] {
        let error = sizes(n_heads, n_kv_heads, 1, 8).checked().unwrap_err();
        assert_eq!(error, ShapeError::HeadGroups { n_heads, n_kv_heads });
    }
    assert_eq!(sizes(1, 1, 1, 0).checked(), Err(ShapeError::EmptyHead));
    let shape = sizes(1, 1, usize::MAX, 2);
    assert_eq!(shape.checked(), Err(ShapeError::TooLarge { shape }));
}

#[test]
fn scratch_does_not_grow_with_the_square_of_the_tokens() {
    let at = |tokens| shape([1, 1, 1, tokens, tokens, 64]);
    assert_eq!(
        attention_scratch_bytes::<f32>(&at(1 << 10)),
        attention_scratch_bytes::<f32>(&at(1 << 20)),
    );
    let price = |tokens| attention_backward_scratch_bytes::<bf16>(&at(tokens));
    assert!(price(1 << 20) <= (1 << 10) * price(1 << 10));
}

/// Half an ulp of 1.
fn half_ulp<T: Element<Acc = f32>>() -> f32 {
    let mut e = 1f32;
    while T::narrow(1.0 + e).widen() > 1.0 {
        e *= 0.5;
    }
    e
}

//! Llama, ViT and GPT-2 of tiny sizes: segments, gradients, layouts, caches, refusals.

mod support;

use candle_core::{DType, Device, ModuleT, Tensor, Var};
use support::{LOSS, chain, chain_loss, f64s, gpt2};
use tallow_models::{
    Decoder, Error, Gpt2Config, Llama, LlamaConfig, RopeScaling, Sampling, Score, Segments, Vit,
    VitConfig, generate,
};
use tallow_tensor::{Params, missing_gradients, pass};
use tallow_testkit::{Tol, assert_close, central_difference, values};

fn llama() -> LlamaConfig {
    LlamaConfig {
        vocab: 11,
        context: 40,
        model_dim: 8,
        hidden_dim: 12,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 4,
        norm_eps: 1e-5,
        rope_theta: 100.0,
        rope_scaling: RopeScaling::Llama3 {
            factor: 4.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 10,
        },
        tied: false,
        attention_bias: true,
        mlp_bias: true,
    }
}

fn vit() -> VitConfig {
    VitConfig {
        image_size: [4, 6],
        patch: 2,
        channels: 2,
        classes: 3,
        model_dim: 8,
        hidden_dim: 10,
        n_layers: 2,
        n_heads: 2,
        norm_eps: 1e-6,
        qkv_bias: true,
        dropout: 0.25,
        dropout_seed: 5,
    }
}

/// Larger than initial values, whose gradients are tiny, and nothing at 0 or 1.
fn fill(params: &Params) {
    for (i, (_, var)) in params.all().iter().enumerate() {
        let v: Vec<f64> =
            values(i as u64 + 1, var.elem_count()).iter().map(|v| 0.8 * v + 0.1).collect();
        let v =
            Tensor::from_vec(v, var.shape(), &Device::Cpu).and_then(|v| v.to_dtype(var.dtype()));
        var.set(&v.expect("fits")).expect("one shape");
    }
}

fn build_llama(config: &LlamaConfig, dtype: DType) -> (Params, Llama) {
    let params = Params::new(1);
    let model = config.build(params.builder(dtype, &Device::Cpu)).expect("builds");
    fill(&params);
    (params, model)
}

fn build_vit(config: &VitConfig, dtype: DType) -> (Params, Vit) {
    let params = Params::new(1);
    let model = config.build(params.builder(dtype, &Device::Cpu)).expect("builds");
    fill(&params);
    (params, model)
}

fn tokens() -> (Tensor, Tensor) {
    let ids = [[1u32, 4, 2, 9, 10, 0, 0], [0, 3, 3, 7, 5, 8, 1]];
    let next = [[4i64, 2, 9, 10, -100, 3, 1], [3, 3, 7, 5, 6, 0, 2]];
    let (ids, next) = (Tensor::new(&ids, &Device::Cpu), Tensor::new(&next, &Device::Cpu));
    (ids.expect("a tensor"), next.expect("a tensor"))
}

fn images(dtype: DType) -> (Tensor, Tensor) {
    let images = Tensor::from_vec(values(77, 2 * 2 * 4 * 6), (2, 2, 4, 6), &Device::Cpu);
    let classes = Tensor::new(&[2u32, 0], &Device::Cpu).expect("a tensor");
    (images.and_then(|x| x.to_dtype(dtype)).expect("a tensor"), classes)
}

/// Forward by segments and as a whole, bit for bit; and the score of both.
fn chain_is_model<M: ModuleT + Segments>(model: &M, x: &Tensor, targets: &Tensor, head: &[&str]) {
    assert_eq!(&model.names()[..head.len()], head);
    assert_eq!(model.names().len(), 5);
    for train in [true, false] {
        pass::begin_step(5);
        let logits = model.forward_t(x, train).expect("fits");
        let whole = Score::of_logits(&logits, targets, &LOSS).expect("fits");
        pass::begin_step(5);
        let last = chain(model, x, train);
        let score = model.score(&last, targets, &LOSS).expect("fits");
        assert_eq!(score, whole, "score, train {train}");
        let loss = model.loss(&last, targets, &LOSS).expect("fits");
        assert_eq!(loss.n_counted, score.n_counted);
        assert_close("loss", &f64s(&loss.sum), &[whole.loss_sum], Tol::Rel(1e-14));
    }
}

#[test]
fn a_chain_is_its_model_bit_for_bit() {
    let (ids, next) = tokens();
    let head = ["embed", "layers.0.self_attn", "layers.0.mlp"];
    chain_is_model(&build_llama(&llama(), DType::F64).1, &ids, &next, &head);
    let (x, classes) = images(DType::F64);
    let head = ["embeddings", "layer.0.attention", "layer.0.mlp"];
    chain_is_model(&build_vit(&vit(), DType::F64).1, &x, &classes, &head);
}

/// Every parameter's gradient against central differences.
fn differences(params: &Params, loss: impl Fn() -> Tensor) {
    let grads = loss().backward().expect("a graph");
    assert_eq!(missing_gradients(&grads, &params.trainable()), [""; 0]);
    let size = |x: &[f64]| x.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let all = params.trainable();
    let largest =
        all.iter().map(|(_, var)| size(&f64s(grads.get(var).expect("one")))).fold(0.0, f64::max);
    for (name, var) in all {
        let start = f64s(&var);
        let set = |v: &[f64]| {
            let moved = Tensor::from_slice(v, var.shape(), &Device::Cpu).expect("fits");
            var.set(&moved).expect("one shape");
        };
        let moved = |v: &[f64]| {
            set(v);
            f64s(&loss())[0]
        };
        let mut want = central_difference(moved, &start, 1e-5);
        set(&start);
        let mut got = f64s(grads.get(&var).expect("checked"));
        // A key's bias has the gradient 0: judged beside a thousandth of the largest there is.
        got.push(1e-3 * largest);
        want.push(1e-3 * largest);
        assert_close(&name, &got, &want, Tol::Rel(1e-6));
    }
}

#[test]
fn gradients_equal_central_differences() {
    let (ids, next) = tokens();
    let configs = [
        llama(),
        LlamaConfig { tied: true, rope_scaling: RopeScaling::None, ..llama() },
        LlamaConfig {
            n_kv_heads: 1,
            rope_scaling: RopeScaling::Linear { factor: 2.0 },
            attention_bias: false,
            mlp_bias: false,
            ..llama()
        },
    ];
    for config in configs {
        let (params, model) = build_llama(&config, DType::F64);
        assert_eq!(params.n_trainable(), config.n_params(), "{config:?}");
        differences(&params, || chain_loss(&model, &ids, &next, true).sum);
    }
    let (x, classes) = images(DType::F64);
    for config in [vit(), VitConfig { qkv_bias: false, dropout: 0.0, ..vit() }] {
        let (params, model) = build_vit(&config, DType::F64);
        assert_eq!(params.n_trainable(), config.n_params(), "{config:?}");
        differences(&params, || {
            pass::begin_step(3);
            chain_loss(&model, &x, &classes, true).sum
        });
    }
}

/// KER-1 for each segment: the input as it lies in memory and as a transposed view, its gradient
/// against central differences.
fn ker_1(model: &dyn Segments, index: usize, dims: &[usize; 3]) {
    let [b, t, d] = *dims;
    for transposed in [false, true] {
        let stored = if transposed { [t, b, d] } else { [b, t, d] };
        let var = Tensor::from_vec(values(9, b * t * d), &stored[..], &Device::Cpu).expect("fits");
        let var = Var::from_tensor(&var).expect("a float");
        let loss = || {
            pass::begin_step(3);
            let x = var.as_tensor().clone();
            let x = if transposed { x.transpose(0, 1).expect("a view") } else { x };
            let out = model.run(index, &x, true).expect("fits");
            out.sqr().and_then(|sq| sq.sum_all()).expect("floats")
        };
        let grads = loss().backward().expect("a graph");
        let start = f64s(&var);
        let moved = |v: &[f64]| {
            let v = Tensor::from_slice(v, var.shape(), &Device::Cpu).expect("fits");
            var.set(&v).expect("one shape");
            f64s(&loss())[0]
        };
        let want = central_difference(moved, &start, 1e-5);
        let what = format!("segment {index}, transposed {transposed}");
        let got = f64s(grads.get(&var).unwrap_or_else(|| panic!("{what}: no gradient")));
        assert!(got.iter().all(|g| g.is_finite() && *g != 0.0), "{what}: {got:?}");
        assert_close(&what, &got, &want, Tol::Rel(1e-6));
    }
}

#[test]
fn ker_1_every_segment_in_both_layouts() {
    let (_, llama) = build_llama(&llama(), DType::F64);
    let (_, vit) = build_vit(&vit(), DType::F64);
    let params = Params::new(1);
    let gpt2 = gpt2().build(params.builder(DType::F64, &Device::Cpu)).expect("builds");
    fill(&params);
    for index in 1..5 {
        ker_1(&llama, index, &[2, 5, 8]);
        ker_1(&gpt2, index, &[2, 5, 8]);
        ker_1(&vit, index, &[2, 7, 8]);
    }
}

#[test]
fn inputs_may_be_transposed_views() {
    let (_, model) = build_llama(&llama(), DType::F32);
    let (ids, _) = tokens();
    let stored = ids.t().and_then(|x| x.contiguous()).expect("a matrix");
    let whole = f64s(&model.forward_t(&ids, false).expect("fits"));
    let view = stored.t().expect("a matrix");
    assert_eq!(f64s(&model.forward_t(&view, false).expect("fits")), whole);
    let (_, model) = build_vit(&vit(), DType::F32);
    let (x, _) = images(DType::F32);
    let stored = x.transpose(1, 3).and_then(|x| x.contiguous()).expect("four dimensions");
    let view = stored.transpose(1, 3).expect("four dimensions");
    let whole = f64s(&model.forward_t(&x, false).expect("fits"));
    assert_eq!(f64s(&model.forward_t(&view, false).expect("fits")), whole);
}

#[test]
fn a_token_does_not_see_what_follows_it() {
    let (_, model) = build_llama(&llama(), DType::F32);
    let logits = |ids: [u32; 4]| {
        let ids = Tensor::new(&[ids], &Device::Cpu).expect("a tensor");
        let logits = model.forward_t(&ids, false).expect("fits");
        f64s(&logits.narrow(1, 0, 3).expect("three of four"))
    };
    assert_eq!(logits([1, 2, 3, 4]), logits([1, 2, 3, 9]));
    assert_ne!(logits([1, 2, 3, 4]), logits([1, 2, 5, 4]));
}

/// Logits after each token by way of a cache, fed in pieces of these sizes, against the full forward.
fn decode<M: ModuleT + Decoder>(model: &M, pieces: &[usize], tol: Tol) {
    let n: usize = pieces.iter().sum();
    let ids: Vec<u32> = (0..2 * n as u32).map(|i| i * 7 % 11).collect();
    let ids = Tensor::from_vec(ids, (2, n), &Device::Cpu).expect("a tensor");
    let full = model.forward_t(&ids, false).expect("fits");
    // A capacity below what comes: the cache grows.
    let mut cache = model.cache(3);
    let mut first = 0;
    for &piece in pieces {
        let part = ids.narrow(1, first, piece).expect("inside");
        let got = model.next_logits(&part, &mut cache).expect("fits");
        first += piece;
        assert_eq!(cache.n_tokens(), first);
        let want = full.narrow(1, first - 1, 1).and_then(|x| x.squeeze(1)).expect("inside");
        assert_eq!(got.dims(), want.dims());
        assert_close(&format!("after {first} tokens"), &f64s(&got), &f64s(&want), tol);
        assert!(!got.track_op(), "a look at samples records no graph");
    }
}

/// One query or many, the products and the softmax are summed in another order: some roundings.
#[test]
fn a_cache_gives_the_logits_of_the_full_forward() {
    const F64: Tol = Tol::Rel(1e-12);
    const F32: Tol = Tol::Rel(1e-5);
    for pieces in [&[1; 9][..], &[5, 1, 1, 2], &[12]] {
        decode(&build_llama(&llama(), DType::F64).1, pieces, F64);
        decode(&build_llama(&llama(), DType::F32).1, pieces, F32);
        for (dtype, tol) in [(DType::F64, F64), (DType::F32, F32)] {
            let params = Params::new(1);
            let model = gpt2().build(params.builder(dtype, &Device::Cpu)).expect("builds");
            fill(&params);
            decode(&model, pieces, tol);
        }
    }
}

#[test]
fn text_goes_on_as_the_full_forward_says() {
    let (_, model) = build_llama(&llama(), DType::F64);
    let prompt = [3u32, 1, 4];
    let random = Sampling::Random { temperature: 1.5, top_k: Some(6), top_p: Some(0.9), seed: 8 };
    for sampling in [Sampling::Greedy, random] {
        let got = generate(&model, &prompt, 12, &sampling, None).expect("fits");
        let mut all = prompt.to_vec();
        for _ in 0..12 {
            let ids = Tensor::new(&all[..], &Device::Cpu).and_then(|ids| ids.unsqueeze(0));
            let ids = ids.expect("a tensor");
            let logits = model.forward_t(&ids, false).expect("fits");
            let last = logits.narrow(1, all.len() - 1, 1).expect("inside");
            all.push(sampling.pick(&f64s(&last), all.len()).expect("finite"));
        }
        assert_eq!(got, all[3..], "{sampling:?}");
        let stop = got[4];
        let first = got.iter().position(|&id| id == stop).expect("it is there");
        let cut = generate(&model, &prompt, 12, &sampling, Some(stop)).expect("fits");
        assert_eq!(cut, got[..=first]);
    }
    assert_eq!(generate(&model, &prompt, 0, &Sampling::Greedy, None).expect("fits"), [0u32; 0]);
    let error = generate(&model, &prompt, 38, &Sampling::Greedy, None).expect_err("too long");
    assert!(matches!(error, Error::TooLong { n_tokens: 41, context: 40 }), "{error}");
    let error = generate(&model, &[], 1, &Sampling::Greedy, None).expect_err("no prompt");
    assert_eq!(error.to_string(), "number of prompt tokens is 0, it must be at least 1");
}

#[test]
fn configurations_that_do_not_fit_are_refused_with_their_numbers() {
    let scaled = |low_freq_factor, high_freq_factor| RopeScaling::Llama3 {
        factor: 4.0,
        low_freq_factor,
        high_freq_factor,
        original_context: 10,
    };
    for (config, wanted) in [
        (LlamaConfig { n_kv_heads: 3, ..llama() }, "n_kv_heads 3 does not divide n_heads 4"),
        (LlamaConfig { n_kv_heads: 0, ..llama() }, "n_kv_heads is 0, it must be at least 1"),
        (LlamaConfig { head_dim: 5, ..llama() }, "head_dim is 5, it must be even"),
        (
            LlamaConfig { rope_theta: 0.0, ..llama() },
            "rope_theta is 0, it must be finite and above 0",
        ),
        (LlamaConfig { rope_theta: f64::NAN, ..llama() }, "rope_theta is NaN"),
        (LlamaConfig { norm_eps: -1.0, ..llama() }, "norm_eps is -1"),
        (LlamaConfig { vocab: 0, ..llama() }, "vocab is 0"),
        (
            LlamaConfig { rope_scaling: RopeScaling::Linear { factor: 0.0 }, ..llama() },
            "rope factor is 0",
        ),
        (
            LlamaConfig { rope_scaling: scaled(4.0, 4.0), ..llama() },
            "rope high_freq_factor is 4, it must be finite and above low_freq_factor",
        ),
    ] {
        let error =
            config.build(Params::new(0).builder(DType::F32, &Device::Cpu)).expect_err(wanted);
        assert!(error.to_string().contains(wanted), "{error}");
        assert!(config.check().is_err());
    }
    for (config, wanted) in [
        (VitConfig { patch: 4, ..vit() }, "patch 4 does not divide image width 6"),
        (VitConfig { patch: 0, ..vit() }, "patch is 0"),
        (VitConfig { n_heads: 3, ..vit() }, "n_heads 3 does not divide model_dim 8"),
        (VitConfig { dropout: 1.0, ..vit() }, "dropout is 1, it must be at least 0 and below 1"),
        (VitConfig { classes: 0, ..vit() }, "classes is 0"),
    ] {
        let error =
            config.build(Params::new(0).builder(DType::F32, &Device::Cpu)).expect_err(wanted);
        assert!(error.to_string().contains(wanted), "{error}");
    }
    let error = Gpt2Config { n_heads: 3, ..gpt2() }.check().expect_err("odd");
    assert!(matches!(error, Error::NotDivisible { n_parts: 3, n_whole: 8, .. }), "{error}");
}

#[test]
fn inputs_that_do_not_fit_are_refused_with_their_numbers() {
    let (_, model) = build_llama(&llama(), DType::F32);
    let ids = Tensor::zeros((1, 41), DType::U32, &Device::Cpu).expect("a tensor");
    let error = model.forward_t(&ids, false).expect_err("too long").to_string();
    assert!(error.contains("41 tokens, the model has positions for 40"), "{error}");
    let mut cache = model.cache(40);
    model.next_logits(&ids.narrow(1, 0, 40).expect("inside"), &mut cache).expect("fits");
    let one = ids.narrow(1, 0, 1).expect("inside");
    let error = model.next_logits(&one, &mut cache).expect_err("too long").to_string();
    assert!(error.contains("41 tokens"), "{error}");
    let none = Tensor::zeros((1, 0), DType::U32, &Device::Cpu).expect("a tensor");
    let error = model.next_logits(&none, &mut model.cache(1)).expect_err("nothing").to_string();
    assert!(error.contains("the input is [1, 0], it must be [batch, tokens]"), "{error}");
    let (_, model) = build_vit(&vit(), DType::F32);
    let x = Tensor::zeros((1, 2, 6, 4), DType::F32, &Device::Cpu).expect("a tensor");
    let error = model.forward_t(&x, false).expect_err("turned").to_string();
    assert!(error.contains("the input is [1, 2, 6, 4], it must be [batch, 2, 4, 6]"), "{error}");
}

/// By the formula of the paper on paper: a slow, a fast and a middle pair.
#[test]
fn llama3_frequencies_are_the_formulas() {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    let plain = RopeScaling::None.frequencies(128, 500_000.0).expect("even");
    let freqs = scaling.frequencies(128, 500_000.0).expect("even");
    let (mut n_slow, mut n_fast, mut n_middle) = (0, 0, 0);
    for (j, (&got, &freq)) in freqs.iter().zip(&plain).enumerate() {
        assert_close(
            "plain",
            &[freq],
            &[500_000f64.powf(-(2.0 * j as f64) / 128.0)],
            Tol::Rel(1e-14),
        );
        let wavelength = std::f64::consts::TAU / freq;
        let want = if wavelength < 8192.0 / 4.0 {
            n_fast += 1;
            freq
        } else if wavelength > 8192.0 {
            n_slow += 1;
            freq / 8.0
        } else {
            n_middle += 1;
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            (1.0 - smooth) * freq / 8.0 + smooth * freq
        };
        assert_close(&format!("pair {j}"), &[got], &[want], Tol::Rel(1e-14));
    }
    assert!(n_slow > 0 && n_fast > 0 && n_middle > 0, "{n_slow} {n_fast} {n_middle}");
}

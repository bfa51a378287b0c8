//! GPT-2: names, segments, gradients.

use candle_core::{DType, Device, ModuleT, Tensor};
use tallow_models::{Gpt2, Gpt2Config, Segments};
use tallow_tensor::{Params, missing_gradients, ops::CrossEntropy, pass};
use tallow_testkit::{Tol, assert_close, central_difference};

const LOSS: CrossEntropy = CrossEntropy { ignore_index: -100, label_smoothing: 0.0 };

fn config() -> Gpt2Config {
    Gpt2Config {
        vocab: 11,
        context: 7,
        model_dim: 8,
        n_layers: 2,
        n_heads: 2,
        dropout: 0.25,
        dropout_seed: 3,
    }
}

fn build(dtype: DType) -> (Params, Gpt2) {
    let params = Params::new(1);
    let model = config().build(params.builder(dtype, &Device::Cpu)).expect("builds");
    (params, model)
}

/// Two sequences and what follows each token.
fn tokens() -> (Tensor, Tensor) {
    let ids = [[1u32, 4, 2, 9, 10], [0, 3, 3, 7, 5]];
    let next = [[4i64, 2, 9, 10, -100], [3, 3, 7, 5, 6]];
    let (ids, next) = (Tensor::new(&ids, &Device::Cpu), Tensor::new(&next, &Device::Cpu));
    (ids.expect("a tensor"), next.expect("a tensor"))
}

fn chain_loss(model: &Gpt2, ids: &Tensor, next: &Tensor) -> Tensor {
    let mut x = ids.clone();
    for i in 0..model.names().len() {
        x = model.run(i, &x, true).expect("fits");
    }
    model.loss(&x, next, &LOSS).expect("fits").sum
}

fn f64s(x: &Tensor) -> Vec<f64> {
    let x = x.to_dtype(DType::F64).and_then(|x| x.flatten_all()).expect("a float");
    x.to_vec1().expect("host values")
}

#[test]
fn parameters_have_the_names_and_layouts_of_hugging_face() {
    let (params, _) = build(DType::F32);
    let params = params.all();
    let of_block = |suffix: &str| params.iter().find(|(name, _)| name == &format!("h.1.{suffix}"));
    for (suffix, dims) in [
        ("attn.c_attn.weight", vec![8, 24]),
        ("attn.c_attn.bias", vec![24]),
        ("attn.c_proj.weight", vec![8, 8]),
        ("mlp.c_fc.weight", vec![8, 32]),
        ("mlp.c_proj.weight", vec![32, 8]),
        ("ln_1.weight", vec![8]),
        ("ln_2.bias", vec![8]),
    ] {
        assert_eq!(of_block(suffix).expect(suffix).1.dims(), dims, "{suffix}");
    }
    let n: usize = params.iter().map(|(_, var)| var.elem_count()).sum();
    assert_eq!(n as u64, config().n_params());
    assert_eq!(Gpt2Config::small().n_params(), 124_439_808); // the published checkpoint's
}

#[test]
fn the_chain_is_the_model() {
    let (params, model) = build(DType::F64);
    let (ids, next) = tokens();
    pass::begin_step(5);
    let logits = model.forward_t(&ids, true).expect("fits");
    let whole = tallow_models::Score::of_logits(&logits, &next, &LOSS).expect("fits");
    pass::begin_step(5);
    let chain = chain_loss(&model, &ids, &next);
    assert_close("loss", &f64s(&chain), &[whole.loss_sum], Tol::Rel(1e-14));
    let grads = chain.backward().expect("backward");
    assert_eq!(missing_gradients(&grads, &params.trainable()), [] as [String; 0]);
    let mut x = ids.clone();
    for i in 0..model.names().len() {
        x = model.run(i, &x, false).expect("fits");
    }
    let score = model.score(&x, &next, &LOSS).expect("fits");
    let logits = model.forward_t(&ids, false).expect("fits");
    let whole = tallow_models::Score::of_logits(&logits, &next, &LOSS).expect("fits");
    assert_eq!((score.n_counted, score.n_right), (9, whole.n_right));
    assert_close("score", &[score.loss_sum], &[whole.loss_sum], Tol::Rel(1e-14));
}

#[test]
fn gradients_equal_central_differences() {
    let (params, model) = build(DType::F64);
    let (ids, next) = tokens();
    pass::begin_step(0);
    let grads = chain_loss(&model, &ids, &next).backward().expect("backward");
    for name in
        ["wte.weight", "wpe.weight", "h.0.attn.c_attn.weight", "h.1.mlp.c_fc.bias", "ln_f.bias"]
    {
        let all = params.trainable();
        let (_, var) = all.iter().find(|(n, _)| n == name).expect(name);
        let start = f64s(var.as_tensor());
        let loss = |values: &[f64]| {
            let moved = Tensor::from_slice(values, var.shape(), &Device::Cpu).expect("fits");
            var.set(&moved).expect("same shape");
            pass::begin_step(0);
            f64s(&chain_loss(&model, &ids, &next))[0]
        };
        let want = central_difference(loss, &start, 1e-5);
        let back = Tensor::from_slice(&start, var.shape(), &Device::Cpu).expect("fits");
        var.set(&back).expect("same shape");
        assert_close(name, &f64s(grads.get(var).expect(name)), &want, Tol::Rel(1e-7));
    }
}

#[test]
fn a_token_does_not_see_what_follows_it() {
    let (_, model) = build(DType::F32);
    let logits = |ids: [u32; 4]| {
        let ids = Tensor::new(&[ids], &Device::Cpu).expect("a tensor");
        let logits = model.forward_t(&ids, false).expect("fits");
        f64s(&logits.narrow(1, 0, 3).expect("three of four"))
    };
    assert_eq!(logits([1, 2, 3, 4]), logits([1, 2, 3, 9]));
    assert_ne!(logits([1, 2, 3, 4]), logits([1, 2, 5, 4]));
}

#[test]
fn sizes_that_do_not_fit_are_named() {
    let (_, model) = build(DType::F32);
    let ids = Tensor::zeros((1, 8), DType::U32, &Device::Cpu).expect("a tensor");
    let error = model.forward_t(&ids, false).expect_err("too long").to_string();
    assert!(error.contains("8 tokens") && error.contains("for 7"), "{error}");
    let odd = Gpt2Config { n_heads: 3, ..config() };
    let error = odd.build(Params::new(0).builder(DType::F32, &Device::Cpu)).expect_err("odd");
    assert!(error.to_string().contains("n_heads 3 does not divide model_dim 8"), "{error}");
}

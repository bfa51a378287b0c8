//! Adapters: what they add, what stays frozen, what is refused.

mod support;

use candle_core::{DType, Device, ModuleT, Tensor, TensorId, Var};
use std::collections::BTreeSet;
use support::{chain_loss, descend, f64s, gpt2};
use tallow_models::{
    Error, HfValue, LlamaConfig, Lora, RopeScaling, Segments, VitConfig, WeightLayout, frozen,
};
use tallow_tensor::{Params, missing_gradients, pass};
use tallow_testkit::{Tol, assert_close, central_difference, values};

fn lora(targets: &[&str]) -> Lora {
    Lora {
        rank: 3,
        alpha: 4.5,
        rank_stabilized: false,
        targets: targets.iter().map(|t| t.to_string()).collect(),
        dropout: 0.0,
        dropout_seed: 2,
    }
}

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
        rope_scaling: RopeScaling::None,
        tied: false,
        attention_bias: true,
        mlp_bias: false,
    }
}

fn vit() -> VitConfig {
    VitConfig {
        image_size: [4, 4],
        patch: 2,
        channels: 2,
        classes: 3,
        model_dim: 8,
        hidden_dim: 10,
        n_layers: 2,
        n_heads: 2,
        norm_eps: 1e-6,
        qkv_bias: true,
        dropout: 0.0,
        dropout_seed: 5,
    }
}

trait Model: ModuleT + Segments {}
impl<M: ModuleT + Segments> Model for M {}

/// A model on `base`, with `lora` from `adapters` if given, of one of three kinds.
fn build(
    kind: &str,
    dtype: DType,
    base: &Params,
    adapters: Option<(&Lora, &Params)>,
) -> Box<dyn Model> {
    let b = base.builder(dtype, &Device::Cpu);
    let a = adapters.map(|(lora, params)| (lora, params.builder(dtype, &Device::Cpu)));
    match (kind, a) {
        ("llama", None) => Box::new(llama().build(b).expect(kind)),
        ("llama", Some((lora, a))) => Box::new(llama().build_lora(b, lora, a).expect(kind)),
        ("gpt2", None) => Box::new(gpt2().build(b).expect(kind)),
        ("gpt2", Some((lora, a))) => Box::new(gpt2().build_lora(b, lora, a).expect(kind)),
        (_, None) => Box::new(vit().build(b).expect(kind)),
        (_, Some((lora, a))) => Box::new(vit().build_lora(b, lora, a).expect(kind)),
    }
}

fn fill(params: &Params, seed: u64) {
    for (i, (_, var)) in params.all().iter().enumerate() {
        let v: Vec<f64> =
            values(seed + i as u64, var.elem_count()).iter().map(|v| 0.7 * v + 0.1).collect();
        let v =
            Tensor::from_vec(v, var.shape(), &Device::Cpu).and_then(|v| v.to_dtype(var.dtype()));
        var.set(&v.expect("fits")).expect("one shape");
    }
}

fn batch(kind: &str, dtype: DType) -> (Tensor, Tensor) {
    if kind == "vit" {
        let x = Tensor::from_vec(values(77, 64), (2, 2, 4, 4), &Device::Cpu);
        let classes = Tensor::new(&[2u32, 0], &Device::Cpu).expect("a tensor");
        return (x.and_then(|x| x.to_dtype(dtype)).expect("a tensor"), classes);
    }
    let ids = Tensor::new(&[[1u32, 4, 2, 9, 10], [0, 3, 3, 7, 5]], &Device::Cpu);
    let next = Tensor::new(&[[4u32, 2, 9, 10, 0], [3, 3, 7, 5, 6]], &Device::Cpu);
    (ids.expect("a tensor"), next.expect("a tensor"))
}

const KINDS: [(&str, &[&str], WeightLayout); 6] = [
    ("llama", &["q_proj", "v_proj"], WeightLayout::OutIn),
    ("llama", &["up_proj"], WeightLayout::OutIn),
    ("llama", &["*"], WeightLayout::OutIn),
    ("gpt2", &["c_attn", "c_proj"], WeightLayout::InOut),
    ("gpt2", &["h.1.mlp.*"], WeightLayout::InOut),
    ("vit", &["query", "layer.0.output.dense"], WeightLayout::OutIn),
];

/// Whether a name belongs to what trains beside a frozen base.
fn n_adapted(kind: &str, lora: &Lora) -> u64 {
    match kind {
        "llama" => lora.n_params(&llama().linears()),
        "gpt2" => lora.n_params(&gpt2().linears()),
        _ => lora.n_params(&vit().linears()) + (8 + 1) * 3, // and a new classifier
    }
}

/// MEM-1 for models: the store holds the gradients of the adapters, all of them and nothing else, not
/// even one of a frozen activation that candle's own sums would leave there.
#[test]
fn mem_1_the_gradient_set_is_exactly_the_adapters() {
    for (kind, targets, _) in KINDS {
        for dropout in [0.0, 0.5] {
            let what = format!("{kind} {targets:?} {dropout}");
            let lora = Lora { dropout, ..lora(targets) };
            let (base, adapters) = (Params::new(1), Params::new(2));
            let model = build(kind, DType::F32, &base, Some((&lora, &adapters)));
            fill(&base, 10);
            fill(&adapters, 90);
            assert_eq!(adapters.n_trainable(), n_adapted(kind, &lora), "{what}");
            let (x, targets) = batch(kind, DType::F32);
            pass::begin_step(1);
            let grads = chain_loss(&*model, &x, &targets, true).sum.backward().expect("a graph");
            let trainable = adapters.trainable();
            assert_eq!(missing_gradients(&grads, &trainable), [""; 0], "{what}");
            let sorted = |ids: Vec<TensorId>| {
                ids.into_iter().map(|id| format!("{id:?}")).collect::<BTreeSet<_>>()
            };
            let wanted = sorted(trainable.iter().map(|(_, var)| var.as_tensor().id()).collect());
            assert_eq!(sorted(grads.get_ids().copied().collect()), wanted, "{what}");
        }
    }
}

#[test]
fn a_base_is_bit_equal_after_training_and_the_loss_falls() {
    for (kind, targets, _) in KINDS {
        let lora = lora(targets);
        let (base, adapters) = (Params::new(1), Params::new(2));
        let model = build(kind, DType::F32, &base, Some((&lora, &adapters)));
        fill(&base, 10);
        let (x, targets) = batch(kind, DType::F32);
        let bits = |params: &Params| -> Vec<Vec<f64>> {
            params.all().iter().map(|(_, var)| f64s(var)).collect()
        };
        // Fresh adapters add nothing: B is 0. A classifier of their own is another matter.
        if kind != "vit" {
            let plain = build(kind, DType::F32, &base, None);
            let [fresh, plain] =
                [&model, &plain].map(|m| f64s(&m.forward_t(&x, false).expect("fits")));
            assert_eq!(fresh, plain, "{kind}");
        }
        let (before, start) = (bits(&base), bits(&adapters));
        let mut losses = Vec::new();
        for _ in 0..6 {
            let loss = chain_loss(&*model, &x, &targets, true).mean().expect("counted rows");
            losses.push(f64s(&loss)[0]);
            descend(&adapters.all(), &loss.backward().expect("a graph"), 0.05);
        }
        assert_eq!(bits(&base), before, "{kind}: the base moved");
        assert_ne!(bits(&adapters), start, "{kind}");
        assert!(losses.is_sorted_by(|a, b| a > b), "{kind}: {losses:?}");
    }
}

#[test]
fn gradients_of_adapters_equal_central_differences() {
    for (kind, targets, _) in KINDS {
        for dropout in [0.0, 0.5] {
            let lora = Lora { dropout, rank_stabilized: true, ..lora(targets) };
            let (base, adapters) = (Params::new(1), Params::new(2));
            let model = build(kind, DType::F64, &base, Some((&lora, &adapters)));
            fill(&base, 10);
            fill(&adapters, 90);
            let (x, next) = batch(kind, DType::F64);
            let loss = || {
                pass::begin_step(3);
                chain_loss(&*model, &x, &next, true).sum
            };
            let grads = loss().backward().expect("a graph");
            for (name, var) in adapters.all() {
                let start = f64s(&var);
                let set = |v: &[f64]| {
                    let moved = Tensor::from_slice(v, var.shape(), &Device::Cpu).expect("fits");
                    var.set(&moved).expect("one shape");
                };
                let moved = |v: &[f64]| {
                    set(v);
                    f64s(&loss())[0]
                };
                let want = central_difference(moved, &start, 1e-5);
                set(&start);
                let what = format!("{kind} {targets:?} {dropout}: {name}");
                assert_close(&what, &f64s(grads.get(&var).expect(&what)), &want, Tol::Rel(1e-6));
            }
        }
    }
}

/// In f64 the two differ by the order of a few sums; in f32 and bf16 by their roundings, of which
/// merged weights have one each.
#[test]
fn merged_logits_are_those_of_the_adapters() {
    let bounds = [(DType::F64, 1e-13), (DType::F32, 1e-5), (DType::BF16, 0.1)];
    for (kind, targets, layout) in KINDS {
        for (dtype, bound) in bounds {
            let lora = lora(targets);
            let (base, adapters) = (Params::new(1), Params::new(2));
            let model = build(kind, dtype, &base, Some((&lora, &adapters)));
            fill(&base, 10);
            fill(&adapters, 90);
            if kind == "vit" {
                // Its classifier belongs to the adapters; the plain model needs it in the base.
                let vb = base.builder(dtype, &Device::Cpu).pp("classifier");
                vb.get((3, 8), "weight").expect("a new name");
                vb.get(3, "bias").expect("a new name");
                for name in ["classifier.weight", "classifier.bias"] {
                    let find = |params: &Params| {
                        let all = params.all();
                        all.into_iter().find(|(n, _)| n == name).expect("just made").1
                    };
                    find(&base).set(&find(&adapters)).expect("one shape");
                }
            }
            let what = format!("{kind} {targets:?} {dtype:?}");
            let (x, _) = batch(kind, dtype);
            let adapted = f64s(&model.forward_t(&x, false).expect("fits"));
            let plain = build(kind, dtype, &base, None);
            let before = f64s(&plain.forward_t(&x, false).expect("fits"));
            let names = lora.merge(&base.all(), &adapters.all(), layout).expect(&what);
            assert!(names.iter().all(|name| lora.adapts(name)) && !names.is_empty(), "{names:?}");
            let merged = f64s(&plain.forward_t(&x, false).expect("fits"));
            assert_close(&what, &merged, &adapted, Tol::Rel(bound));
            let moved = before.iter().zip(&merged).any(|(a, b)| (a - b).abs() > 0.2 * a.abs());
            assert!(moved, "{what}: the adapters did nothing");
        }
    }
}

#[test]
fn adapters_that_cannot_be_built_are_refused_with_their_numbers() {
    let build = |lora: &Lora| {
        let vb = || Params::new(0).builder(DType::F32, &Device::Cpu);
        llama().build_lora(vb(), lora, vb()).map(|_| ())
    };
    build(&lora(&["q_proj", "layers.0.*.v_proj"])).expect("both name layers");
    for (lora, wanted) in [
        (Lora { rank: 0, ..lora(&["q_proj"]) }, "LoRA rank is 0, it must be at least 1"),
        (
            Lora { alpha: 0.0, ..lora(&["q_proj"]) },
            "LoRA alpha is 0, it must be finite and above 0",
        ),
        (Lora { alpha: f64::INFINITY, ..lora(&["q_proj"]) }, "LoRA alpha is inf"),
        (Lora { dropout: 1.0, ..lora(&["q_proj"]) }, "LoRA dropout is 1"),
        (lora(&[]), "number of LoRA targets is 0"),
        (
            lora(&["q_proj", "c_attn"]),
            "LoRA target `c_attn` matches none of the model's 14 linear layers",
        ),
        (lora(&["lm_head"]), "`lm_head` matches none"),
    ] {
        let error = build(&lora).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{error}");
    }
    // Adapters without their base.
    let (base, adapters) = (Params::new(1), Params::new(2));
    adapters
        .builder(DType::F32, &Device::Cpu)
        .get((3, 8), "h.0.attn.c_attn.lora_A.weight")
        .expect("new");
    adapters
        .builder(DType::F32, &Device::Cpu)
        .get((24, 3), "h.0.attn.c_attn.lora_B.weight")
        .expect("new");
    let error = lora(&["c_attn"]).merge(&base.all(), &adapters.all(), WeightLayout::InOut);
    let error = error.expect_err("no base").to_string();
    assert!(error.contains("the first is `h.0.attn.c_attn.weight`"), "{error}");
}

#[test]
fn a_peft_configuration_comes_back_and_what_is_unknown_is_refused() {
    let lora = Lora { dropout_seed: 0, ..lora(&["q_proj", "v_proj"]) };
    let linears = llama().linears();
    let peft = lora.to_peft(&linears, WeightLayout::OutIn, &[]);
    assert_eq!(Lora::from_peft(&peft, &[]).expect("its own"), lora);
    // A star is ours alone: PEFT gets the names.
    let stars = Lora { targets: vec!["layers.1.self_attn.*".to_string()], ..lora.clone() };
    let read =
        Lora::from_peft(&stars.to_peft(&linears, WeightLayout::OutIn, &[]), &[]).expect("its own");
    let names =
        ["k_proj", "o_proj", "q_proj", "v_proj"].map(|n| format!("model.layers.1.self_attn.{n}"));
    assert_eq!(read.targets, names);
    assert_eq!(read.n_params(&linears), stars.n_params(&linears));
    let also = VitConfig::LORA_ALSO_TRAINS;
    let whole = lora.to_peft(&linears, WeightLayout::OutIn, also);
    assert_eq!(Lora::from_peft(&whole, also).expect("its own"), lora);
    assert!(Lora::from_peft(&whole, &[]).is_err());
    let HfValue::Map(fields) = peft else { panic!("an object") };
    for (name, value, wanted) in [
        ("use_dora", HfValue::Bool(true), "config field `use_dora` is true"),
        ("bias", "all".into(), "config field `bias` is \"all\""),
        ("peft_type", "IA3".into(), "config field `peft_type` is \"IA3\""),
        (
            "modules_to_save",
            HfValue::List(vec!["lm_head".into()]),
            "`modules_to_save` is [\"lm_head\"]",
        ),
        (
            "rank_pattern",
            HfValue::map([("q_proj", 8usize.into())]),
            "`rank_pattern` is {\"q_proj\": 8}",
        ),
        ("target_modules", "all-linear".into(), "`target_modules` is \"all-linear\""),
        ("r", HfValue::Null, "config field `r` is absent"),
    ] {
        let mut fields = fields.clone();
        fields.insert(name.to_string(), value);
        let error = Lora::from_peft(&HfValue::Map(fields), &[]).expect_err(wanted);
        assert!(
            matches!(error, Error::Field { .. }) && error.to_string().contains(wanted),
            "{error}"
        );
    }
}

/// Weights set after the model was built are seen: a base can be loaded late.
#[test]
fn a_frozen_builder_shares_memory_and_has_no_gradient() {
    let params = Params::new(0);
    let vb = frozen(params.builder(DType::F32, &Device::Cpu)).pp("a");
    let weight = vb.get((2, 2), "weight").expect("new");
    let [(name, var)]: [(String, Var); 1] = params.all().try_into().expect("one");
    assert_eq!(name, "a.weight");
    assert!(vb.contains_tensor("weight") && !vb.contains_tensor("bias"));
    var.set(&Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).expect("fits"))
        .expect("one shape");
    assert_eq!(f64s(&weight), [1.0, 2.0, 3.0, 4.0]);
    assert!(!weight.track_op());
}

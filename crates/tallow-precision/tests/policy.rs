//! Policies, masters and 8-bit storage, by the names of the cases they were made for.
mod common;
use candle_core::{DType, Device, Module, Tensor, Var, backprop::GradStore};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
use common::{TestResult, sgd};
use half::{bf16, f16};
use std::{cell::RefCell, collections::HashMap};
use tallow_precision::{
    DynamicScale, Error, Fp8, LossScale, Masters, Policy, Stored, Verdict, Within,
};
use tallow_testkit::{bits, values_f32};

const CPU: Device = Device::Cpu;
const HALF: [DType; 2] = [DType::BF16, DType::F16];

fn f32s(t: &Tensor) -> candle_core::Result<Vec<f32>> {
    t.detach().to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

fn policy_of(compute: DType) -> Policy {
    if compute == DType::F16 { Policy::f16() } else { Policy::bf16() }
}

#[test]
fn pre_1_updates_smaller_than_half_a_step_are_kept_by_the_master() -> TestResult {
    for (compute, published) in [(DType::BF16, 0.941_406_25f32), (DType::F16, 0.939_941_4)] {
        let store = VarMap::new();
        let masters = Masters::new(policy_of(compute), store)?;
        let w = masters.builder(&CPU).get_with_hints(1, "w", candle_nn::init::ONE)?;
        assert_eq!(w.dtype(), compute);
        for _ in 0..100 {
            // A constant gradient of 6e-4 on the master, at a rate of 1.
            let mut grads = (w.to_dtype(DType::F32)? * 6e-4)?.sum_all()?.backward()?;
            masters.gather(&mut grads)?;
            let exact = Tensor::new(&[6e-4f32], &CPU)?;
            let rounded = grads.insert(&masters.params()[0].1, exact).unwrap();
            assert!((f32s(&rounded)?[0] - 6e-4).abs() < 6e-4 / 256.0);
            sgd(&masters.params(), &grads, 1.0)?;
            masters.publish()?;
        }
        let master = f32s(&masters.params()[0].1)?[0];
        assert!((master - 0.94).abs() < 1e-5, "{master}");
        assert_eq!(f32s(&w)?, [published], "{compute:?}");
    }
    // Without a master: in bf16 nothing moves, which is the failure that masters prevent.
    let w = Var::new(&[bf16::ONE], &CPU)?;
    for _ in 0..100 {
        w.set(&(w.as_tensor() - Tensor::new(&[bf16::from_f32(6e-4)], &CPU)?)?)?;
    }
    assert_eq!(f32s(&w)?, [1.0]);
    // In f16 each step rounds to one that f16 has: 2^-11 below 1.
    let w = Var::new(&[f16::ONE], &CPU)?;
    for _ in 0..100 {
        w.set(&(w.as_tensor() - Tensor::new(&[f16::from_f32(6e-4)], &CPU)?)?)?;
    }
    assert!((f32s(&w)?[0] - 0.94).abs() > 0.005);
    Ok(())
}

#[test]
fn pre_3_what_the_policy_calls_loss_and_softmax_adds_up_in_f32() -> TestResult {
    for dtype in HALF {
        let policy = policy_of(dtype);
        let ones = Tensor::ones(4096, dtype, &CPU)?;
        let loss = policy.cast("loss", &ones)?;
        assert_eq!(loss.sum_all()?.to_scalar::<f32>()?, 4096.0);
        assert_eq!(loss.mean_all()?.to_scalar::<f32>()?, 1.0);
        let softmax = candle_nn::ops::softmax(&policy.cast("attn.softmax", &ones)?, 0)?;
        assert_eq!(f32s(&softmax)?[0], 1.0 / 4096.0);
        assert_eq!(softmax.sum_all()?.to_scalar::<f32>()?, 1.0);
    }
    Ok(())
}

/// One layer that records the dtypes it sees, as a recomputed segment would run it: twice.
fn rec_5_segment(policy: &Policy, x: &Tensor, w: &Tensor, seen: &RefCell<Vec<DType>>) -> Tensor {
    let run = || -> TestResult<Tensor> {
        let (x, w) = (policy.cast("layer", x)?, policy.cast("layer.weight", w)?);
        let y = x.matmul(&w)?;
        let norm = policy.cast("norm", &y)?;
        seen.borrow_mut().extend([x.dtype(), w.dtype(), y.dtype(), norm.dtype()]);
        Ok(norm)
    };
    run().expect("a small product")
}

#[test]
fn rec_5_a_segment_keeps_its_policy() -> TestResult {
    let default = Policy::bf16();
    for (policy, expected) in [
        (Policy::bf16(), DType::BF16),
        (Policy::f32(), DType::F32),
        (default.clone().with("layer*", DType::F16), DType::F16),
    ] {
        let seen = RefCell::new(Vec::new());
        let w = Var::from_vec(values_f32(3, 12), (4, 3), &CPU)?;
        let x = Var::from_vec(values_f32(4, 8), (2, 4), &CPU)?;
        let segment = {
            let guard = policy; // what is in force during forward; it ends with this block
            let seen = &seen;
            move |x: &Tensor, w: &Tensor| rec_5_segment(&guard, x, w, seen)
        };
        let grads_of = |out: &Tensor| -> TestResult<[Vec<u32>; 2]> {
            let grads = out.sqr()?.sum_all()?.backward()?;
            let grad = |var: &Var| -> TestResult<Vec<u32>> {
                let grad = grads.get(var).expect("a gradient");
                assert_eq!(grad.dtype(), DType::F32);
                Ok(bits(&f32s(grad)?))
            };
            Ok([grad(&x)?, grad(&w)?])
        };
        let plain = grads_of(&segment(&x, &w))?;
        let forward = seen.take();
        let again = grads_of(&segment(&x, &w))?;
        assert_eq!(forward, [expected, expected, expected, DType::F32]);
        assert_eq!((seen.take(), again), (forward, plain));
    }
    assert_eq!(default.dtype_of("other"), DType::BF16);
    Ok(())
}

#[test]
fn names_decide_dtypes() {
    let policy = Policy::f16();
    for name in [
        "layer1.0.bn1.weight",
        "bn1.bias",
        "layer2.0.downsample.1.weight",
        "model.layers.3.input_layernorm.weight",
        "transformer.h.0.ln_1.weight",
        "ln_f.weight",
        "norm",
        "bn1.running_mean",
        "lm_head.weight",
        "fc.weight",
        "loss",
        "lm_loss",
        "h.0.attn.softmax",
    ] {
        assert_eq!(policy.dtype_of(name), DType::F32, "{name}");
        assert_eq!(Policy::fp8_stored(DType::BF16).stored_of(name), None, "{name}");
    }
    for name in [
        "conv1.weight",
        "layer2.0.downsample.0.weight",
        "h.0.mlp.c_fc.weight",
        "model.embed_tokens.weight",
        "subnet.0.weight",
    ] {
        assert_eq!(policy.dtype_of(name), DType::F16, "{name}");
        assert_eq!(Policy::f32().dtype_of(name), DType::F32);
        assert_eq!(Policy::fp8_stored(DType::BF16).stored_of(name), Some(Fp8::E4m3), "{name}");
    }
    let policy = policy.with("conv*", DType::F32).with("conv2.*", DType::BF16);
    assert_eq!(policy.dtype_of("conv1.weight"), DType::F32);
    assert_eq!(policy.dtype_of("conv2.weight"), DType::BF16);
    assert_eq!(policy.unmatched(&[("conv1.weight", ())]), ["conv2.*"]);
    assert_eq!(Policy::f16().uniform().dtype_of("bn1.weight"), DType::F16);
}

#[test]
fn bad_policies_name_what_is_wrong() {
    let integers = Policy { compute: DType::U32, ..Policy::f32() };
    for (policy, expected) in [
        (integers, "compute dtype of the policy is U32"),
        (Policy { gradient: DType::F64, ..Policy::f32() }, "gradient dtype of the policy is F64"),
        (Policy::f32().with("a.*", DType::I64), "override `a.*` of the policy is I64"),
        (Policy::f32().with("", DType::F32), "override 0 of the policy has an empty pattern"),
    ] {
        let error = Masters::new(policy, VarMap::new()).err().expect(expected).to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let cast = Policy::bf16().cast("x", &Tensor::new(1u32, &CPU).unwrap());
    assert!(matches!(cast, Err(Error::DType { dtype: DType::U32, .. })));
}

/// A user's own model: an embedding tied to the head, a layer and a norm, without any cast.
struct Net {
    embed: Tensor,
    layer: candle_nn::Linear,
    norm: Within<candle_nn::Linear>,
    head: Within<candle_nn::Linear>,
}

impl Net {
    fn new(vb: VarBuilder, policy: &Policy) -> candle_core::Result<Self> {
        let norm = candle_nn::linear(8, 8, vb.pp("norm"))?;
        let head = vb.pp("embed").get_with_hints_dtype(
            (5, 8),
            "weight",
            candle_nn::init::DEFAULT_KAIMING_NORMAL,
            DType::F32,
        )?;
        Ok(Self {
            embed: vb.pp("embed").get((5, 8), "weight")?,
            layer: candle_nn::linear(8, 8, vb.pp("layer"))?,
            norm: Within { layer: norm, compute: policy.dtype_of("norm"), output: None },
            head: Within {
                layer: candle_nn::Linear::new(head, None),
                compute: DType::F32,
                output: Some(DType::F32),
            },
        })
    }

    fn loss(&self, ids: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.embed.index_select(ids, 0)?;
        let x = self.norm.forward(&self.layer.forward(&x)?)?;
        candle_nn::loss::cross_entropy(&self.head.forward(&x)?, targets)
    }
}

#[test]
fn a_model_trains_on_copies_and_its_store_keeps_the_masters() -> TestResult {
    for policy in [
        Policy::f32(),
        Policy::bf16(),
        Policy::f16(),
        Policy::fp8_stored(DType::BF16),
        Policy::fp8_stored(DType::F32),
    ] {
        let store = VarMap::new();
        let masters = Masters::new(policy.clone(), store.clone())?;
        let net = Net::new(masters.builder(&CPU), &policy)?;
        let names: Vec<String> = masters.params().into_iter().map(|(name, _)| name).collect();
        assert_eq!(
            names,
            ["embed.weight", "layer.bias", "layer.weight", "norm.bias", "norm.weight"]
        );
        let (ids, targets) =
            (Tensor::new(&[0u32, 1, 2, 3, 4], &CPU)?, Tensor::new(&[1u32, 2, 3, 4, 0], &CPU)?);
        let params = masters.params();
        let mut scale = LossScale::dynamic(DynamicScale::STANDARD)?;
        let mut sgd = SGD::new(params.iter().map(|(_, var)| var.clone()).collect(), 0.3)?;
        let (mut first, mut last) = (None, 0.0);
        for _ in 0..60 {
            let loss = net.loss(&ids, &targets)?;
            last = loss.to_scalar::<f32>()?;
            first.get_or_insert(last);
            let mut grads = scale.apply(&loss)?.backward()?;
            masters.gather(&mut grads)?;
            match scale.unscale(&params, &mut grads)? {
                Verdict::Finite => {
                    sgd.step(&grads)?;
                    masters.publish()?;
                }
                Verdict::Overflow { .. } => {}
            }
        }
        assert!(last < 0.5 * first.unwrap(), "{policy:?}: {first:?} to {last}");
        // The store's variables are the masters themselves.
        let data = store.data().lock().unwrap();
        for (name, master) in &params {
            assert_eq!((master.id(), master.dtype()), (data[name].id(), DType::F32));
        }
        for (name, copy) in masters.copies() {
            let master = data[&name].as_detached_tensor();
            assert_eq!(f32s(&copy)?, f32s(&policy.cast(&name, &master)?)?, "{name}");
        }
    }
    Ok(())
}

#[test]
fn gradients_of_a_tied_parameter_add_up_and_others_stay() -> TestResult {
    let masters = Masters::new(Policy::bf16().uniform(), VarMap::new())?;
    let vb = masters.builder(&CPU);
    let narrow = vb.get_with_hints(2, "w", candle_nn::init::ONE)?;
    let wide = vb.get_with_hints_dtype(2, "w", candle_nn::init::ONE, DType::F32)?;
    let other = Var::new(&[1f32, 1.0], &CPU)?;
    assert_eq!((narrow.dtype(), wide.dtype()), (DType::BF16, DType::F32));
    assert_eq!(vb.get(2, "w")?.id(), narrow.id());
    let loss = ((narrow.to_dtype(DType::F32)? * 3.0)? + (wide * 4.0)?)?;
    let mut grads = (loss + (other.as_tensor() * 5.0)?)?.sum_all()?.backward()?;
    masters.gather(&mut grads)?;
    assert_eq!(f32s(grads.get(&masters.params()[0].1).unwrap())?, [7.0, 7.0]);
    assert_eq!(f32s(grads.get(&other).unwrap())?, [5.0, 5.0]);
    assert!(grads.get(&narrow).is_none());
    let none = masters.gather(&mut GradStore::default());
    assert!(matches!(none, Err(Error::NoGradients { n_params: 1 })));
    Ok(())
}

#[test]
fn an_overflow_in_f16_is_seen_at_the_master() -> TestResult {
    let masters = Masters::new(Policy::f16(), VarMap::new())?;
    let w = masters.builder(&CPU).get_with_hints(1, "deep.weight", candle_nn::init::ONE)?;
    let mut scale = LossScale::dynamic(DynamicScale::STANDARD)?;
    let loss = (w.to_dtype(DType::F32)? * 2.0)?.sum_all()?;
    let mut grads = scale.apply(&loss)?.backward()?; // 131072 is infinite in f16
    masters.gather(&mut grads)?;
    let verdict = scale.unscale(&masters.params(), &mut grads)?;
    assert_eq!(verdict, Verdict::Overflow { name: "deep.weight".to_string() });
    Ok(())
}

#[test]
fn parameters_that_do_not_fit_are_named() -> TestResult {
    let masters = Masters::new(Policy::bf16(), VarMap::new())?;
    let vb = masters.builder(&CPU);
    vb.get_with_hints((2, 3), "a.weight", candle_nn::init::ONE)?;
    let error = vb.get((3, 2), "a.weight").unwrap_err().to_string();
    assert!(error.contains("`a.weight` has shape [2, 3], the model asks for [3, 2]"), "{error}");
    let error = vb.get_with_hints_dtype(2, "b", candle_nn::init::ONE, DType::U8).unwrap_err();
    assert!(error.to_string().contains("asks `b` in is U8"), "{error}");
    // A plain tensor becomes a master; a variable in another dtype would silently be left behind.
    let source = HashMap::from([("w".to_string(), Tensor::new(&[bf16::ONE], &CPU)?)]);
    let masters = Masters::new(Policy::bf16(), source)?;
    assert_eq!(masters.builder(&CPU).get(1, "w")?.dtype(), DType::BF16);
    assert_eq!(masters.params()[0].1.dtype(), DType::F32);
    let store = VarMap::new();
    VarBuilder::from_varmap(&store, DType::BF16, &CPU).get_with_hints(
        1,
        "w",
        candle_nn::init::ONE,
    )?;
    let error = Masters::new(Policy::bf16(), store)?.builder(&CPU).get(1, "w").unwrap_err();
    assert!(error.to_string().contains("`w` is BF16 in its store"), "{error}");
    Ok(())
}

#[test]
fn running_statistics_are_no_parameters_and_stay_in_f32() -> TestResult {
    let masters = Masters::new(Policy::bf16().uniform(), VarMap::new())?;
    let vb = masters.builder(&CPU);
    vb.pp("bn1").get_with_hints_dtype(4, "running_mean", candle_nn::init::ZERO, DType::F32)?;
    vb.pp("bn1").get_with_hints(4, "weight", candle_nn::init::ONE)?;
    assert_eq!(masters.params().len(), 1);
    assert_eq!(masters.copies().len(), 1);
    Ok(())
}

#[test]
fn stored_tensors_come_back_within_half_a_step() -> TestResult {
    for (format, half_step) in [(Fp8::E4m3, 1.0 / 16.0), (Fp8::E5m2, 1.0 / 8.0)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = Tensor::from_vec(values_f32(9, 600), (20, 30), &CPU)?.to_dtype(dtype)?;
            for x in [x.clone(), x.t()?, x.narrow(0, 3, 5)?] {
                let stored = Stored::store(&x, format)?;
                assert_eq!((stored.codes.dtype(), stored.codes.dims()), (DType::U8, x.dims()));
                assert_eq!(stored.bytes(), x.elem_count() as u64 + 4);
                let (x, back) = (f32s(&x)?, f32s(&stored.load(DType::F32)?)?);
                let largest = x.iter().fold(0f32, |max, x| max.max(x.abs()));
                assert_eq!(stored.scale, format.scale(largest));
                // Under the smallest normal number the step stays what it is there.
                let smallest = if format == Fp8::E4m3 { 2f32.powi(-6) } else { 2f32.powi(-14) };
                for (x, back) in x.iter().zip(&back) {
                    let bound = half_step * x.abs().max(smallest * stored.scale);
                    assert!((x - back).abs() <= bound, "{format:?} {x} {back}");
                }
                let again = Stored::store(&stored.load(DType::BF16)?, format)?;
                assert_eq!(f32s(&again.load(DType::F32)?)?, back);
            }
        }
    }
    let labels = Stored::store(&Tensor::new(&[1u32], &CPU)?, Fp8::E4m3);
    assert!(matches!(labels, Err(Error::DType { dtype: DType::U32, .. })));
    let empty = Stored::store(&Tensor::zeros((0, 3), DType::F32, &CPU)?, Fp8::E4m3)?;
    assert_eq!(empty.load(DType::BF16)?.dims(), [0, 3]);
    assert!(empty.load(DType::F64).is_err());
    Ok(())
}

#[test]
fn overflow_stays_visible_in_8_bits() -> TestResult {
    let x = Tensor::new(&[1f32, f32::INFINITY, f32::NAN], &CPU)?;
    for format in [Fp8::E4m3, Fp8::E5m2] {
        let back = f32s(&Stored::store(&x, format)?.load(DType::F32)?)?;
        assert_eq!(back[0], 1.0);
        assert!(!back[1].is_finite() && !back[2].is_finite());
    }
    Ok(())
}

#[test]
fn the_gradient_passes_through_8_bits_as_if_there_were_none() -> TestResult {
    let policy = Policy::fp8_stored(DType::BF16);
    let w = Var::from_vec(values_f32(5, 12), (3, 4), &CPU)?;
    for tensor in [w.as_tensor().clone(), w.t()?] {
        let cast = policy.cast("layer.weight", &tensor)?;
        assert_eq!(cast.dtype(), DType::BF16);
        let stored = Stored::store(&tensor, Fp8::E4m3)?.load(DType::BF16)?;
        assert_eq!(f32s(&cast)?, f32s(&stored)?);
        let grads = (cast.to_dtype(DType::F32)? * 3.0)?.sum_all()?.backward()?;
        let grad = grads.get(&w).unwrap();
        assert_eq!((grad.dtype(), f32s(grad)?), (DType::F32, vec![3.0; 12]));
    }
    Ok(())
}

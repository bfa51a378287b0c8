//! Files of weights: whole, in shards, under other prefixes, and damaged.

mod support;

use candle_core::{DType, Device, Tensor, Var};
use std::{collections::HashMap, fs, path::PathBuf};
use support::{config, data, f64s, folder};
use tallow_models::{
    Error, Gpt2Config, HfValue, LlamaConfig, VitConfig, WeightsError,
    weights::{self, Checkpoint},
};
use tallow_tensor::Params;
use tallow_testkit::values_f32;

fn var(seed: u64, dims: &[usize], dtype: DType) -> Var {
    let n = dims.iter().product();
    let t =
        Tensor::from_vec(values_f32(seed, n), dims, &Device::Cpu).and_then(|t| t.to_dtype(dtype));
    Var::from_tensor(&t.expect("a float")).expect("a float")
}

fn params(dtype: DType) -> Vec<(String, Var)> {
    [("a.bias", &[3][..]), ("a.weight", &[3, 2]), ("b", &[])]
        .into_iter()
        .enumerate()
        .map(|(i, (name, dims))| (name.to_string(), var(i as u64, dims, dtype)))
        .collect()
}

fn zeros(like: &[(String, Var)], dtype: DType) -> Vec<(String, Var)> {
    let zero = |v: &Var| Var::zeros(v.dims(), dtype, &Device::Cpu).expect("a float");
    like.iter().map(|(name, v)| (name.clone(), zero(v))).collect()
}

fn all(params: &[(String, Var)]) -> Vec<Vec<f64>> {
    params.iter().map(|(_, v)| f64s(v)).collect()
}

#[test]
fn every_float_comes_back_bit_for_bit_and_casts_to_the_parameter() {
    let path = folder("weights").join("floats.safetensors");
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let saved = params(dtype);
        weights::save(&saved, &path, "p.").expect("written");
        let file = Checkpoint::open(&[&path], "p.").expect("whole");
        assert_eq!(file.names(), ["p.a.bias", "p.a.weight", "p.b"]);
        let read = zeros(&saved, dtype);
        assert_eq!(file.load_into(&read).expect("all there"), [""; 0]);
        assert_eq!(all(&read), all(&saved), "{dtype:?}");
        let wide = zeros(&saved, DType::F64);
        file.load_into(&wide).expect("all there");
        assert_eq!(all(&wide), all(&saved), "{dtype:?}");
    }
    // A view that is no row-major tensor is written as what it shows.
    let turned = var(5, &[2, 3], DType::F32).t().expect("a matrix");
    let turned = [("t".to_string(), Var::from_tensor(&turned).expect("a float"))];
    weights::save(&turned, &path, "").expect("written");
    let read = zeros(&turned, DType::F32);
    Checkpoint::open(&[&path], "").expect("whole").load_into(&read).expect("all there");
    assert_eq!(all(&read), all(&turned));
}

/// Files of the bare model lack the prefix of those with a head; both load.
#[test]
fn names_are_found_with_and_without_the_prefix_and_in_any_shard() {
    let to = folder("shards");
    let saved = params(DType::F32);
    weights::save(&saved[..1], &to.join("1.safetensors"), "transformer.").expect("written");
    weights::save(&saved[1..], &to.join("2.safetensors"), "").expect("written");
    let extra = [("c".to_string(), var(9, &[1], DType::F32))];
    weights::save(&extra, &to.join("3.safetensors"), "").expect("written");
    let paths = ["1", "2", "3"].map(|name| to.join(format!("{name}.safetensors")));
    let file = Checkpoint::open(&paths, "transformer.").expect("whole");
    let read = zeros(&saved, DType::F32);
    assert_eq!(file.load_into(&read).expect("all there"), ["c"]);
    assert_eq!(all(&read), all(&saved));
}

#[test]
fn missing_and_misshapen_weights_are_named_and_nothing_is_changed() {
    let path = folder("weights").join("misfits.safetensors");
    weights::save(&params(DType::F32), &path, "").expect("written");
    let file = Checkpoint::open(&[&path], "model.").expect("whole");
    let mut more = params(DType::F32);
    more.push(("z.weight".to_string(), var(7, &[2], DType::F32)));
    more.push(("z.bias".to_string(), var(8, &[2], DType::F32)));
    let before = all(&more);
    let error = file.load_into(&more).expect_err("two are missing");
    assert_eq!(
        error.to_string(),
        "2 of 5 parameters are in none of the 3 tensors of the files; the first is `model.z.weight`"
    );
    let mut other = params(DType::F32);
    other[1].1 = var(4, &[2, 3], DType::F32);
    let error = file.load_into(&other).expect_err("turned").to_string();
    assert!(error.contains("`a.weight` has shape [3, 2] in "), "{error}");
    assert!(error.ends_with("misfits.safetensors, the model asks for [2, 3]"), "{error}");
    assert_eq!(all(&more), before);
    // The same by a builder of frozen parameters.
    let vb = file.builder(DType::F32, &Device::Cpu);
    vb.get((3, 2), "a.weight").expect("it is there");
    let error = vb.get((2, 3), "a.weight").expect_err("turned").to_string();
    assert!(error.contains("the model asks for [2, 3]"), "{error}");
    let error = vb.get(1, "a.scale").expect_err("missing").to_string();
    assert!(error.contains("`model.a.scale`"), "{error}");
    // And a whole model of other sizes.
    let hf = LlamaConfig::from_hf(&config("llama3", "config.json")).expect("its own");
    let files = Checkpoint::open(&[data("llama3", "model.safetensors")], "").expect("whole");
    let params = Params::new(0);
    LlamaConfig { hidden_dim: 40, ..hf }
        .build(params.builder(DType::F32, &Device::Cpu))
        .expect("builds");
    let error = files.load_into(&params.all()).expect_err("other sizes").to_string();
    assert!(error.contains("`model.layers.0.mlp.down_proj.weight` has shape [24, 36]"), "{error}");
    assert!(error.contains("asks for [24, 40]"), "{error}");
}

#[test]
fn other_dtypes_are_refused_when_asked_for() {
    let path = folder("weights").join("ids.safetensors");
    let ids =
        HashMap::from([("ids".to_string(), Tensor::new(&[1i64, 2], &Device::Cpu).expect("ids"))]);
    candle_core::safetensors::save(&ids, &path).expect("written");
    let file = Checkpoint::open(&[&path], "").expect("whole");
    let error = file.tensor("ids").expect_err("no float").to_string();
    assert!(error.contains("`ids` is I64 in ") && error.contains("must be F64, F32"), "{error}");
    assert!(file.tensor("other").expect("no error").is_none());
    let ids = [("ids".to_string(), Var::new(&[1u32], &Device::Cpu).expect("ids"))];
    let error = weights::save(&ids, &path, "").expect_err("no float");
    assert!(matches!(error, Error::Weights(WeightsError::NotFloat { .. })), "{error}");
}

/// A header's numbers are checked before a byte is allocated for them.
#[test]
fn res_5_damaged_files_are_refused() {
    let to = folder("damaged");
    let good = to.join("good.safetensors");
    weights::save(&params(DType::F32), &good, "").expect("written");
    let good = fs::read(good).expect("a file");
    let with_header = |header: &str| {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat()
    };
    let path = |name: &str| -> PathBuf { to.join(name) };
    for (name, bytes, wanted) in [
        ("empty", vec![], "cut short"),
        ("cut", good[..good.len() - 1].to_vec(), "ends behind the file"),
        (
            "huge",
            [&u64::MAX.to_le_bytes()[..], &good[8..]].concat(),
            "a header of 18446744073709551615",
        ),
        ("long", [&4096u64.to_le_bytes()[..], &good[8..]].concat(), "a header of 4096 bytes"),
        ("noise", with_header("[]"), "no JSON object"),
        ("text", with_header("{\"a\": 3}"), "the entry of `a`"),
        (
            "overflow",
            with_header(
                r#"{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,8]}}"#,
            ),
            "the shape of `a`",
        ),
        (
            "overlapping",
            with_header(
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
            ),
            "tensors that overlap",
        ),
        (
            "hole",
            with_header(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#),
            "a hole between them",
        ),
        (
            "tail",
            with_header(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#),
            "4 bytes behind the last tensor",
        ),
        (
            "twice",
            with_header(
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            ),
            "a hole between them",
        ),
        ("padded", with_header("{}\0\0"), "no JSON object"),
        (
            "backwards",
            with_header(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#),
            "the entry of `a`",
        ),
        (
            "misfit",
            with_header(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#),
            "`a` of shape [3] in 8 bytes",
        ),
        (
            "behind",
            with_header(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#),
            "ends behind the file",
        ),
    ] {
        let path = path(name);
        fs::write(&path, &bytes).expect("written");
        let error = Checkpoint::open(&[&path], "").expect_err(name);
        assert!(matches!(error, Error::Weights(WeightsError::Damaged { .. })), "{error}");
        let error = error.to_string();
        assert!(
            error.contains(wanted) && error.contains(&format!("{} bytes", bytes.len())),
            "{error}"
        );
    }
    let error = Checkpoint::open(&[path("absent")], "").expect_err("absent");
    assert!(matches!(error, Error::Weights(WeightsError::Io { .. })), "{error}");
    assert!(error.to_string().contains("absent: "), "{error}");
    let error =
        weights::save(&params(DType::F32), &path("no/such/folder"), "").expect_err("no folder");
    assert!(matches!(error, Error::Weights(WeightsError::Write { .. })), "{error}");
}

/// The header of one tensor with a name that JSON escapes.
#[test]
fn names_with_escapes_are_read() {
    let path = folder("weights").join("escapes.safetensors");
    let odd = [("a\"b\\c\u{e9}\n".to_string(), var(1, &[2], DType::F32))];
    weights::save(&odd, &path, "").expect("written");
    let read = zeros(&odd, DType::F32);
    Checkpoint::open(&[&path], "").expect("whole").load_into(&read).expect("all there");
    assert_eq!(all(&read), all(&odd));
}

#[test]
fn fields_that_are_missing_or_ask_for_the_unknown_are_named() {
    fn with(case: &str, name: &str, value: HfValue) -> HfValue {
        let HfValue::Map(mut fields) = config(case, "config.json") else { panic!("an object") };
        fields.insert(name.to_string(), value);
        HfValue::Map(fields)
    }
    let yarn = HfValue::map([("rope_type", "yarn".into()), ("factor", 2.0.into())]);
    let bare = HfValue::map([("rope_type", "llama3".into())]);
    for (name, value, wanted) in [
        ("hidden_size", HfValue::Null, "`hidden_size` is absent, it must be a whole number"),
        ("hidden_size", (-3.0).into(), "`hidden_size` is -3.0"),
        ("vocab_size", HfValue::Int(-1), "`vocab_size` is -1"),
        (
            "hidden_act",
            "gelu".into(),
            "`hidden_act` is \"gelu\", it must be absent or one of [\"silu\"]",
        ),
        ("model_type", "mistral".into(), "`model_type` is \"mistral\""),
        ("rope_parameters", yarn, "`rope_type` is \"yarn\""),
        ("rope_parameters", bare, "`factor` is absent"),
        (
            "tie_word_embeddings",
            1usize.into(),
            "`tie_word_embeddings` is 1, it must be true or false",
        ),
        ("rms_norm_eps", "small".into(), "`rms_norm_eps` is \"small\", it must be a number"),
        ("num_key_value_heads", 3usize.into(), "n_kv_heads 3 does not divide n_heads 4"),
        ("pretraining_tp", 2usize.into(), "`pretraining_tp` is 2"),
    ] {
        let error =
            LlamaConfig::from_hf(&with("llama3", name, value)).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{error}");
    }
    for (name, value, wanted) in [
        ("n_inner", 50usize.into(), "`n_inner` is 50, it must be 72 (four times n_embd) or absent"),
        ("activation_function", "relu".into(), "`activation_function` is \"relu\""),
        ("embd_pdrop", 0.5.into(), "`embd_pdrop` is 0.5, it must be 0 like resid_pdrop"),
        ("layer_norm_epsilon", 1e-6.into(), "`layer_norm_epsilon` is 1e-6"),
        ("scale_attn_weights", false.into(), "`scale_attn_weights` is false, it must be true"),
        ("n_head", 4usize.into(), "n_heads 4 does not divide model_dim 18"),
    ] {
        let error = Gpt2Config::from_hf(&with("gpt2", name, value)).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let two = HfValue::List(vec![4usize.into(), 2usize.into()]);
    for (name, value, wanted) in [
        ("patch_size", two.clone(), "`patch_size` is [4, 2], it must be square"),
        ("patch_size", 5usize.into(), "patch 5 does not divide image height 12"),
        ("hidden_act", "gelu_new".into(), "`hidden_act` is \"gelu_new\""),
        ("id2label", two, "`id2label` is [4, 2], it must be an object"),
    ] {
        let error = VitConfig::from_hf(&with("vit", name, value)).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let wide = with("vit", "image_size", HfValue::List(vec![8usize.into(), 12usize.into()]));
    let wide = VitConfig::from_hf(&wide).expect("two sizes");
    assert_eq!((wide.image_size, wide.n_patches()), ([8, 12], 6));
    assert_eq!(VitConfig::from_hf(&wide.to_hf()).expect("its own"), wide);
}

//! Reference files of `xtask/reference/huggingface_tiny.py`, and what tests of models share.
#![allow(dead_code)] // each test binary uses its part

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};
use tallow_models::{Gpt2Config, HfValue, Segments};
use tallow_tensor::ops::{CrossEntropy, Loss};

pub(crate) const LOSS: CrossEntropy = CrossEntropy { ignore_index: -100, label_smoothing: 0.0 };

/// Two small blocks.
pub(crate) fn gpt2() -> Gpt2Config {
    Gpt2Config {
        vocab: 11,
        context: 40,
        model_dim: 8,
        n_layers: 2,
        n_heads: 2,
        dropout: 0.0,
        dropout_seed: 0,
    }
}

/// The path of a reference file.
pub(crate) fn data(case: &str, file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(case).join(file)
}

/// A JSON file as the crate takes it.
pub(crate) fn config(case: &str, file: &str) -> HfValue {
    let text = fs::read_to_string(data(case, file)).expect("a reference file");
    value(serde_json::from_str(&text).expect("JSON"))
}

/// The seven arms that a reader of JSON writes.
pub(crate) fn value(json: serde_json::Value) -> HfValue {
    match json {
        serde_json::Value::Null => HfValue::Null,
        serde_json::Value::Bool(x) => HfValue::Bool(x),
        serde_json::Value::Number(x) => match x.as_i64() {
            Some(x) => HfValue::Int(x),
            None => HfValue::Float(x.as_f64().expect("a number")),
        },
        serde_json::Value::String(x) => HfValue::Text(x),
        serde_json::Value::Array(items) => HfValue::List(items.into_iter().map(value).collect()),
        serde_json::Value::Object(fields) => {
            HfValue::Map(fields.into_iter().map(|(name, x)| (name, value(x))).collect())
        }
    }
}

/// And those of a writer.
pub(crate) fn json(value: &HfValue) -> serde_json::Value {
    match value {
        HfValue::Null => serde_json::Value::Null,
        HfValue::Bool(x) => (*x).into(),
        HfValue::Int(x) => (*x).into(),
        HfValue::Float(x) => (*x).into(),
        HfValue::Text(x) => x.as_str().into(),
        HfValue::List(items) => items.iter().map(json).collect(),
        HfValue::Map(fields) => fields
            .iter()
            .map(|(name, x)| (name.clone(), json(x)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
    }
}

/// Inputs, targets, logits, loss and gradient norms of one step.
pub(crate) struct Step(HashMap<String, Tensor>);

impl Step {
    pub(crate) fn of(case: &str) -> Self {
        let path = data(case, "step.safetensors");
        Self(candle_core::safetensors::load(path, &Device::Cpu).expect("a reference file"))
    }

    #[track_caller]
    pub(crate) fn get(&self, name: &str) -> &Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("the reference has no `{name}`"))
    }

    /// Token ids as models take them, or images.
    pub(crate) fn inputs(&self) -> Tensor {
        let inputs = self.get("inputs");
        match inputs.dtype() {
            DType::I64 => inputs.to_dtype(DType::U32).expect("ids"),
            _ => inputs.clone(),
        }
    }

    pub(crate) fn targets(&self) -> &Tensor {
        self.get("targets")
    }

    /// The norm of each gradient by the name of its parameter, sorted.
    pub(crate) fn grads(&self) -> Vec<(&str, f64)> {
        let norms = self
            .0
            .iter()
            .filter_map(|(name, norm)| Some((name.strip_prefix("grad.")?, f64s(norm)[0])));
        let mut norms: Vec<_> = norms.collect();
        norms.sort_by(|a, b| a.0.cmp(b.0));
        norms
    }
}

/// The elements in row-major order.
pub(crate) fn f64s(x: &Tensor) -> Vec<f64> {
    let x = x.to_dtype(DType::F64).and_then(|x| x.flatten_all()).expect("a float");
    x.to_vec1().expect("host values")
}

/// The loss by way of the segments.
pub(crate) fn chain_loss(
    model: &dyn Segments,
    inputs: &Tensor,
    targets: &Tensor,
    train: bool,
) -> Loss {
    model.loss(&chain(model, inputs, train), targets, &LOSS).expect("fits")
}

/// The last segment's output.
pub(crate) fn chain(model: &dyn Segments, inputs: &Tensor, train: bool) -> Tensor {
    let mut x = inputs.clone();
    for i in 0..model.names().len() {
        x = model.run(i, &x, train).expect("fits");
    }
    x
}

/// One step of plain gradient descent.
pub(crate) fn descend(params: &[(String, Var)], grads: &GradStore, rate: f64) {
    for (name, var) in params {
        let grad = grads.get(var).unwrap_or_else(|| panic!("{name}: no gradient"));
        let moved = (var.as_tensor() - (grad * rate).expect("a float")).expect("one shape");
        var.set(&moved.detach()).expect("one shape");
    }
}

/// A folder for what a test writes.
pub(crate) fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("huggingface").join(name);
    fs::create_dir_all(&path).expect("a folder");
    path
}

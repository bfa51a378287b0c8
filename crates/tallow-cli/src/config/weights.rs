//! Weights to start from: safetensors files under the names of Hugging Face.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use std::{
    fs,
    path::{Path, PathBuf},
};
use tallow_models::{HfValue, WeightsError, weights::Checkpoint};
use tallow_train::{
    plan::Result as BuildResult,
    precision::{Policy, Stored},
};

const CONFIG: &str = "config.json";

/// Tensors of published files that are no parameters of ours: masks, tables, poolers, and heads
/// that are the embedding once more.
const NEVER_USED: [&str; 7] = [
    ".num_batches_tracked",
    ".attn.bias",
    ".attn.masked_bias",
    "rotary_emb.inv_freq",
    "pooler.dense.weight",
    "pooler.dense.bias",
    "lm_head.weight",
];

/// Files of weights, and the configuration beside them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Weights {
    path: PathBuf,
    files: Vec<PathBuf>,
    config: Option<HfValue>,
}

impl Weights {
    /// A safetensors file, or a folder with one or several and perhaps a `config.json`.
    /// # Errors
    /// If there is none, or one cannot be read.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let name = || format!("`{}`", path.display());
        let (files, folder) = match path.is_dir() {
            true => (in_folder(path).with_context(name)?, path),
            false => (vec![path.to_path_buf()], path.parent().unwrap_or(Path::new(""))),
        };
        ensure!(!files.is_empty(), "`{}` holds no safetensors file", path.display());
        Checkpoint::open(&files, "")?;
        let config = folder.join(CONFIG);
        let config = config.is_file().then(|| read_config(&config)).transpose()?;
        Ok(Self { path: path.to_path_buf(), files, config })
    }

    /// As given.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What the file beside them says of the network's sizes.
    pub(crate) fn config(&self) -> Option<&HfValue> {
        self.config.as_ref()
    }

    /// Which network they are of, if a file beside them says.
    pub(crate) fn model_type(&self) -> Option<&str> {
        match self.config()?.get("model_type") {
            Some(HfValue::Text(name)) => Some(name),
            _ => None,
        }
    }

    /// Gives every one of `params` its value.
    /// # Errors
    /// If one is missing or of another shape, or the files hold what the network does not have.
    pub(crate) fn read_into(&self, params: &[(String, Var)], prefix: &str) -> BuildResult<()> {
        let checkpoint = Checkpoint::open(&self.files, prefix)?;
        let unused = checkpoint.load_into(params)?;
        let is_known = |name: &String| NEVER_USED.iter().any(|end| name.ends_with(end));
        match unused.iter().find(|name| !is_known(name)) {
            None => Ok(()),
            Some(name) => {
                let (name, path) = (name.clone(), self.files[0].clone());
                Err(tallow_models::Error::from(WeightsError::Unused { name, path }).into())
            }
        }
    }

    /// A builder of constants, each read when it is asked for and rounded to what `policy` computes
    /// it in.
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn constants(
        &self,
        prefix: &str,
        policy: &Policy,
    ) -> BuildResult<VarBuilder<'static>> {
        let checkpoint = Checkpoint::open(&self.files, prefix)?;
        let constants = Constants { checkpoint, policy: policy.clone() };
        Ok(VarBuilder::from_backend(Box::new(constants), policy.compute, Device::Cpu))
    }
}

/// `model.safetensors`, or its shards, or whatever safetensors files there are.
fn in_folder(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let one = folder.join("model.safetensors");
    if one.is_file() {
        return Ok(vec![one]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        files.push(entry?.path());
    }
    files.retain(|file| file.extension().is_some_and(|end| end == "safetensors"));
    files.sort();
    let is_shard = |file: &PathBuf| {
        file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("model-"))
    };
    if files.iter().any(is_shard) {
        files.retain(is_shard);
    }
    Ok(files)
}

struct Constants {
    checkpoint: Checkpoint,
    policy: Policy,
}

impl Constants {
    fn rounded(&self, name: &str, value: &Tensor) -> candle_core::Result<Tensor> {
        let dtype = self.policy.dtype_of(name);
        match self.policy.stored_of(name) {
            None => value.to_dtype(dtype),
            Some(format) => Ok(Stored::store(value, format)?.load(dtype)?),
        }
    }
}

impl SimpleBackend for Constants {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        _dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let value = SimpleBackend::get(&self.checkpoint, shape, name, init, DType::F32, device)?;
        self.rounded(name, &value)
    }

    fn get_unchecked(
        &self,
        name: &str,
        _dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let value = SimpleBackend::get_unchecked(&self.checkpoint, name, DType::F32, device)?;
        self.rounded(name, &value)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.checkpoint.contains_tensor(name)
    }
}

/// A `config.json` of Hugging Face.
fn read_config(path: &Path) -> Result<HfValue> {
    let name = || format!("`{}`", path.display());
    let text = fs::read_to_string(path).with_context(name)?;
    Ok(hf_value(serde_json::from_str(&text).with_context(name)?))
}

fn hf_value(value: serde_json::Value) -> HfValue {
    use serde_json::Value;
    match value {
        Value::Null => HfValue::Null,
        Value::Bool(x) => HfValue::Bool(x),
        Value::Number(x) => match x.as_i64() {
            Some(x) => HfValue::Int(x),
            None => HfValue::Float(x.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(x) => HfValue::Text(x),
        Value::Array(items) => HfValue::List(items.into_iter().map(hf_value).collect()),
        Value::Object(fields) => {
            HfValue::Map(fields.into_iter().map(|(name, value)| (name, hf_value(value))).collect())
        }
    }
}

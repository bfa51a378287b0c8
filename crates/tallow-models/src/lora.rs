//! Low-rank adapters (Hu et al. 2021) on linear layers of a frozen model.

// O outputs · D inputs · R rank

use crate::{
    error::{Error, Result, at_least_one, dropout_range, positive},
    hf::{HfValue, refuse},
};
use candle_core::{DType, Device, ModuleT, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use tallow_tensor::{layers::Dropout, ops};

/// Which linear layers get an adapter, and of what size.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// `R`, at least 1.
    pub rank: usize,
    /// The correction is `alpha / rank` times `B A`, or `alpha / sqrt(rank)` times.
    pub alpha: f64,
    /// Whether to divide by the square root of the rank (Kalajdzievski 2023).
    pub rank_stabilized: bool,
    /// Names of linear layers, whole or what follows a dot; `*` stands for any characters.
    pub targets: Vec<String>,
    /// Probability of dropout on the adapters' input, `0 <= p < 1`.
    pub dropout: f64,
    /// Seed of its masks.
    pub dropout_seed: u64,
}

/// A linear layer of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearSize {
    /// Its name, that of its weight without `.weight`.
    pub name: String,
    /// `D`.
    pub in_features: usize,
    /// `O`.
    pub out_features: usize,
}

impl LinearSize {
    /// Elements of its weight.
    pub(crate) fn n_elems(&self) -> u64 {
        elems(&[self.in_features, self.out_features])
    }
}

/// Elements of a shape; the largest number where there are more, for sizes are a user's.
pub(crate) fn elems(dims: &[usize]) -> u64 {
    dims.iter().fold(1, |n, &dim| n.saturating_mul(dim as u64))
}

/// How a linear layer's weight lies in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[O, D]`, as PyTorch's `Linear`.
    OutIn,
    /// `[D, O]`, as GPT-2's `Conv1D`; PEFT's `fan_in_fan_out`.
    InOut,
}

impl Lora {
    /// Whether a linear layer of this name gets an adapter.
    pub fn adapts(&self, name: &str) -> bool {
        self.targets.iter().any(|target| names(target, name))
    }

    /// What `B A` is multiplied by.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rank_stabilized { rank.sqrt() } else { rank }
    }

    /// Number of trainable elements on these linear layers.
    pub fn n_params(&self, linears: &[LinearSize]) -> u64 {
        let adapted = linears.iter().filter(|linear| self.adapts(&linear.name));
        let elems = |l: &LinearSize| {
            elems(&[self.rank, l.in_features]).saturating_add(elems(&[self.rank, l.out_features]))
        };
        adapted.map(elems).fold(0, u64::saturating_add)
    }

    /// Refuses what cannot be built on these linear layers.
    /// # Errors
    /// If the rank is 0, a number is out of its range, or a target names none of the layers.
    pub fn check(&self, linears: &[LinearSize]) -> Result<()> {
        at_least_one(&[("LoRA rank", self.rank), ("number of LoRA targets", self.targets.len())])?;
        positive("LoRA alpha", self.alpha)?;
        dropout_range("LoRA dropout", self.dropout)?;
        let idle = |target: &&String| !linears.iter().any(|linear| names(target, &linear.name));
        match self.targets.iter().find(idle) {
            Some(target) => {
                Err(Error::NoTarget { target: target.clone(), n_linears: linears.len() })
            }
            None => Ok(()),
        }
    }

    /// Adds each adapter's `scale B A` to the weight of its layer in `base`, computed in f32 (f64 for
    /// f64) and rounded once. A model built of `base` alone then computes what the adapted one did.
    /// Returns the names of the changed layers.
    ///
    /// *Memory:* one weight three times in f32.
    /// # Errors
    /// If `base` lacks a layer or its weight has another shape than the adapter says.
    pub fn merge(
        &self,
        base: &[(String, Var)],
        adapters: &[(String, Var)],
        layout: WeightLayout,
    ) -> Result<Vec<String>> {
        let find = |vars: &[(String, Var)], name: &str| {
            let found = vars.iter().find(|(n, _)| n == name).map(|(_, var)| var.clone());
            found.ok_or_else(|| weights_missing(name, vars.len()))
        };
        let mut merged = Vec::new();
        for (name, a) in adapters {
            let Some(layer) = name.strip_suffix(".lora_A.weight") else { continue };
            let b = find(adapters, &format!("{layer}.lora_B.weight"))?;
            let weight = find(base, &format!("{layer}.weight"))?;
            let wide = if weight.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let [a, b] = [a, &b].map(|t| t.detach().to_dtype(wide));
            let mut delta = ops::matmul(&b?, &a?)?.affine(self.scale(), 0.0)?;
            if layout == WeightLayout::InOut {
                delta = delta.t()?;
            }
            let sum = weight.detach().to_dtype(wide)?.add(&delta)?;
            weight.set(&sum.to_dtype(weight.dtype())?)?;
            merged.push(layer.to_string());
        }
        Ok(merged)
    }

    /// PEFT's `adapter_config.json`; a target with a `*` is written as the names it stands for.
    /// `also_trained` are the layers that train whole beside the adapters, such as
    /// [`VitConfig::LORA_ALSO_TRAINS`](crate::VitConfig::LORA_ALSO_TRAINS).
    pub fn to_peft(
        &self,
        linears: &[LinearSize],
        layout: WeightLayout,
        also_trained: &[&str],
    ) -> HfValue {
        let mut targets = Vec::new();
        for target in &self.targets {
            let stands_for = linears.iter().map(|l| l.name.as_str()).filter(|l| names(target, l));
            let all: Vec<&str> = match target.contains('*') {
                true => stands_for.collect(),
                false => vec![target],
            };
            targets.extend(all.into_iter().map(HfValue::from));
        }
        let also_trained = match also_trained {
            [] => HfValue::Null,
            names => HfValue::List(names.iter().map(|&name| name.into()).collect()),
        };
        HfValue::map([
            ("peft_type", "LORA".into()),
            ("base_model_name_or_path", HfValue::Null),
            ("r", self.rank.into()),
            ("lora_alpha", self.alpha.into()),
            ("lora_dropout", self.dropout.into()),
            ("use_rslora", self.rank_stabilized.into()),
            ("target_modules", HfValue::List(targets)),
            ("fan_in_fan_out", (layout == WeightLayout::InOut).into()),
            ("bias", "none".into()),
            ("modules_to_save", also_trained),
        ])
    }

    /// From PEFT's `adapter_config.json`; the seed of dropout is this crate's own and 0.
    /// `also_trained` as in [`Lora::to_peft`].
    /// # Errors
    /// If a field is missing or asks for what this crate has not.
    pub fn from_peft(config: &HfValue, also_trained: &[&str]) -> Result<Self> {
        config.one_of("peft_type", &["LORA"])?;
        config.one_of("bias", &["none"])?;
        for name in ["use_dora", "lora_bias", "use_qalora"] {
            if config.flag_or(name, false)? {
                return Err(refuse(name, config.get(name), "false or absent"));
            }
        }
        let saved = config.get("modules_to_save");
        match (saved, also_trained) {
            (None, _) => (),
            (Some(HfValue::List(names)), also)
                if names.len() == also.len() && also.iter().all(|&n| names.contains(&n.into())) => {
            }
            _ => {
                return Err(refuse(
                    "modules_to_save",
                    saved,
                    &format!("absent or {also_trained:?}"),
                ));
            }
        }
        for name in ["rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern"] {
            match config.get(name) {
                None => (),
                Some(HfValue::Map(fields)) if fields.is_empty() => (),
                found => return Err(refuse(name, found, "empty or absent")),
            }
        }
        let field = config.get("target_modules");
        let text = |item: &HfValue| match item {
            HfValue::Text(text) => Some(text.clone()),
            _ => None,
        };
        let targets = match field {
            Some(HfValue::List(items)) => items.iter().map(text).collect::<Option<Vec<_>>>(),
            _ => None,
        };
        let mut targets =
            targets.ok_or_else(|| refuse("target_modules", field, "a list of names"))?;
        targets.sort(); // PEFT writes a set
        Ok(Self {
            rank: config.size("r")?,
            alpha: config.number_or("lora_alpha", 8.0)?,
            rank_stabilized: config.flag_or("use_rslora", false)?,
            targets,
            dropout: config.number_or("lora_dropout", 0.0)?,
            dropout_seed: 0,
        })
    }
}

fn weights_missing(name: &str, n_tensors: usize) -> Error {
    let first = name.to_string();
    crate::WeightsError::Missing { first, n_missing: 1, n_params: 1, n_tensors }.into()
}

/// Whether `target` is `name` or what follows a dot in it.
fn names(target: &str, name: &str) -> bool {
    let tails = name.match_indices('.').map(|(dot, _)| &name[dot + 1..]);
    std::iter::once(name).chain(tails).any(|tail| fits(target, tail))
}

/// Whether `text` is `pattern`, whose `*` stand for any characters.
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or("");
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// A builder of the same parameters as constants: no gradient is computed for them or kept. They
/// share their memory, so values set later are seen.
pub fn frozen<'a>(vb: VarBuilder<'a>) -> VarBuilder<'a> {
    let (dtype, device) = (vb.dtype(), vb.device().clone());
    VarBuilder::from_backend(Box::new(Frozen(vb)), dtype, device)
}

struct Frozen<'a>(VarBuilder<'a>);

impl SimpleBackend for Frozen<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        _device: &Device,
    ) -> candle_core::Result<Tensor> {
        Ok(self.0.get_with_hints_dtype(shape, name, init, dtype)?.detach())
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        _device: &Device,
    ) -> candle_core::Result<Tensor> {
        Ok(self.0.get_unchecked_dtype(name, dtype)?.detach())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }
}

/// Where a model's parameters come from: its own, and the adapters of its linear layers.
#[derive(Clone)]
pub(crate) struct Source<'a> {
    /// The model's own.
    pub(crate) base: VarBuilder<'a>,
    adapters: Option<(&'a Lora, VarBuilder<'a>)>,
}

impl<'a> Source<'a> {
    /// A model that trains as a whole.
    pub(crate) fn whole(base: VarBuilder<'a>) -> Self {
        Self { base, adapters: None }
    }

    /// A frozen model with adapters.
    pub(crate) fn adapted(
        base: VarBuilder<'a>,
        lora: &'a Lora,
        adapters: VarBuilder<'a>,
        linears: &[LinearSize],
    ) -> Result<Self> {
        lora.check(linears)?;
        Ok(Self { base: frozen(base), adapters: Some((lora, adapters)) })
    }

    pub(crate) fn pp(&self, name: impl ToString) -> Self {
        let name = name.to_string();
        let adapters = self.adapters.as_ref().map(|(lora, vb)| (*lora, vb.pp(&name)));
        Self { base: self.base.pp(&name), adapters }
    }

    /// A linear layer whose weight starts normal and whose bias, if any, starts at 0.
    pub(crate) fn linear(
        &self,
        (d, o): (usize, usize),
        bias: bool,
        layout: WeightLayout,
        stdev: f64,
    ) -> candle_core::Result<Projection> {
        let init = Init::Randn { mean: 0.0, stdev };
        let weight = match layout {
            WeightLayout::OutIn => self.base.get_with_hints((o, d), "weight", init)?,
            WeightLayout::InOut => self.base.get_with_hints((d, o), "weight", init)?.t()?,
        };
        let zero = Init::Const(0.0);
        let bias = bias.then(|| self.base.get_with_hints(o, "bias", zero)).transpose()?;
        let adapter = match &self.adapters {
            Some((lora, vb)) if lora.adapts(&vb.prefix()) => {
                Some(Adapter::new(lora, (d, o), vb.clone())?)
            }
            _ => None,
        };
        Ok(Projection { weight, bias, adapter })
    }
}

/// A linear layer that may have an adapter.
#[derive(Clone, Debug)]
pub(crate) struct Projection {
    /// `[O, D]`, perhaps a transposed view.
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
}

#[derive(Clone, Debug)]
struct Adapter {
    /// `[R, D]`.
    a: Tensor,
    /// `[O, R]`.
    b: Tensor,
    scale: f64,
    dropout: Option<Dropout>,
}

impl Adapter {
    fn new(lora: &Lora, (d, o): (usize, usize), vb: VarBuilder) -> candle_core::Result<Self> {
        let bound = 1.0 / (d.max(1) as f64).sqrt();
        let init = Init::Uniform { lo: -bound, up: bound };
        let dropout = (lora.dropout > 0.0).then(|| Dropout::new(lora.dropout, lora.dropout_seed));
        Ok(Self {
            a: vb.get_with_hints((lora.rank, d), "lora_A.weight", init)?,
            b: vb.get_with_hints((o, lora.rank), "lora_B.weight", Init::Const(0.0))?,
            scale: lora.scale(),
            dropout: dropout.transpose()?,
        })
    }
}

impl ModuleT for Projection {
    /// `x` `[..., D]` → `[..., O]`, in the dtype of `x`.
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let dtype = x.dtype();
        let weight = self.weight.to_dtype(dtype)?;
        let bias = self.bias.as_ref().map(|bias| bias.to_dtype(dtype)).transpose()?;
        let Some(adapter) = &self.adapter else {
            return Ok(ops::linear(x, &weight, bias.as_ref())?);
        };
        let (a, b, scale) = (adapter.a.to_dtype(dtype)?, adapter.b.to_dtype(dtype)?, adapter.scale);
        match adapter.dropout.filter(|_| train) {
            None => Ok(ops::lora_linear(x, &weight, bias.as_ref(), &a, &b, scale)?),
            Some(dropout) => {
                let dropped = dropout.forward_t(x, train)?;
                let low = ops::linear(&dropped, &a, None)?.affine(scale, 0.0)?;
                let base = ops::linear(x, &weight, bias.as_ref())?;
                Ok(ops::add(&base, &ops::linear(&low, &b, None)?)?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{fits, names};

    #[test]
    fn patterns_name_whole_layers_or_their_ends() {
        let layer = "model.layers.10.self_attn.q_proj";
        for (target, wanted) in [
            ("q_proj", true),
            ("self_attn.q_proj", true),
            (layer, true),
            ("layers.1*.q_proj", true),
            ("layers.*.self_attn.*_proj", true),
            ("*", true),
            ("proj", false),
            ("layers.0.self_attn.q_proj", false),
            ("layers.1.*", false),
            ("q_proj.", false),
            ("", false),
        ] {
            assert_eq!(names(target, layer), wanted, "{target}");
        }
        // A star takes no character twice.
        assert!(!fits("ab*ba", "aba") && fits("ab*ba", "abba") && fits("a**a", "aa"));
    }
}

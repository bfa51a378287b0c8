//! Which parameter and which layer computes in which dtype: a pure function of the name.

use crate::{Error, Result, error::COMPUTE, stored};
use candle_core::{DType, Module, ModuleT, Tensor};
use tallow_kernels::fp8::Fp8;

/// Norms by the names that Hugging Face and torchvision give them, softmax and loss.
const WIDE: [&str; 12] = [
    "*norm*",
    "bn*",
    "*.bn*",
    "ln_*",
    "*.ln_*",
    "*.downsample.1.*",
    "*running_mean",
    "*running_var",
    "*softmax*",
    "loss",
    "*.loss",
    "*_loss",
];

/// Output layers by their usual names.
const OUTPUT: [&str; 6] = ["lm_head.*", "fc.*", "head.*", "classifier.*", "score.*", "output"];

/// A pattern of names and the dtype that they compute in. `*` stands for any characters, dots too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// Such as `layer1.*.weight`.
    pub pattern: String,
    /// Such as [`DType::F32`].
    pub compute: DType,
}

/// Which dtypes a model trains in. A plain value: captured by a closure, it holds wherever and
/// whenever the closure runs, in a recomputed segment too.
///
/// What a name computes in is decided by, in this order: the last of `overrides` that matches; f32
/// for norms, softmax and loss if `wide_norms`; `output` for output layers; else `compute`.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// What matrices and convolutions compute in.
    pub compute: DType,
    /// What the trained parameters are kept in.
    pub parameter: DType,
    /// What gradients are handed to the optimizer in.
    pub gradient: DType,
    /// What the output layer computes in.
    pub output: DType,
    /// Whether norms, softmax and loss compute in f32.
    pub wide_norms: bool,
    /// The 8-bit format that weights of `compute` layers, and activations, are stored in.
    pub stored: Option<Fp8>,
    /// Exceptions; the last that matches wins.
    pub overrides: Vec<Override>,
}

impl Policy {
    const fn of(compute: DType) -> Self {
        Self {
            compute,
            parameter: DType::F32,
            gradient: DType::F32,
            output: DType::F32,
            wide_norms: true,
            stored: None,
            overrides: Vec::new(),
        }
    }

    /// Everything in f32.
    pub const fn f32() -> Self {
        Self::of(DType::F32)
    }

    /// Computes in bf16; norms, softmax, loss and output layer in f32. Needs no loss scale.
    pub const fn bf16() -> Self {
        Self::of(DType::BF16)
    }

    /// Computes in f16; norms, softmax, loss and output layer in f32. Needs a dynamic loss scale.
    pub const fn f16() -> Self {
        Self::of(DType::F16)
    }

    /// Weights and stored activations rounded to E4M3 with a scale a tensor, computed in `compute`.
    pub fn fp8_stored(compute: DType) -> Self {
        Self { stored: Some(Fp8::E4m3), ..Self::of(compute) }
    }

    /// The same, but every layer computes in `compute`, for a model without casts at the borders.
    pub fn uniform(self) -> Self {
        Self { output: self.compute, wide_norms: false, ..self }
    }

    /// The same, but names that match `pattern` compute in `compute`.
    pub fn with(mut self, pattern: &str, compute: DType) -> Self {
        self.overrides.push(Override { pattern: pattern.to_string(), compute });
        self
    }

    /// What a parameter (`layer1.0.conv1.weight`), layer (`layer1.0.conv1`) or step (`loss`,
    /// `softmax`) computes in.
    pub fn dtype_of(&self, name: &str) -> DType {
        let exception = self.overrides.iter().rev().find(|o| matches(&o.pattern, name));
        match exception {
            Some(exception) => exception.compute,
            None if self.wide_norms && is_any(&WIDE, name) => DType::F32,
            None if is_any(&OUTPUT, name) => self.output,
            None => self.compute,
        }
    }

    /// The 8-bit format that `name` is stored in: that of the policy, unless `name` is an exception,
    /// a bias, or one of the layers that are f32 by default.
    pub fn stored_of(&self, name: &str) -> Option<Fp8> {
        let exception = self.overrides.iter().any(|o| matches(&o.pattern, name));
        let wide = is_any(&WIDE, name) || is_any(&OUTPUT, name) || name.ends_with("bias");
        self.stored.filter(|_| !exception && !wide)
    }

    /// `x` as `name` computes on it: differentiable, and the gradient goes back in `x`'s dtype.
    ///
    /// On a parameter inside a recomputed segment, this makes the low-precision copy there, and it
    /// dies with the segment: only the f32 parameter is kept. With [`Policy::stored`] the values are
    /// rounded to the 8-bit format on the way, and the gradient passes as if they were not.
    ///
    /// *Memory:* the result, if the dtype differs.
    /// # Errors
    /// If `x` is not f32, bf16 or f16.
    pub fn cast(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let dtype = self.dtype_of(name);
        check_dtype(name, x.dtype())?;
        check_dtype(name, dtype)?;
        match self.stored_of(name) {
            Some(format) => stored::through(x, format, dtype),
            None => Ok(x.to_dtype(dtype)?),
        }
    }

    /// The overrides that none of `names` matches: most likely misspelt.
    pub fn unmatched<'a>(&'a self, names: &[(impl AsRef<str>, impl Sized)]) -> Vec<&'a str> {
        let patterns = self.overrides.iter().map(|o| o.pattern.as_str());
        patterns
            .filter(|pattern| !names.iter().any(|(name, _)| matches(pattern, name.as_ref())))
            .collect()
    }

    /// # Errors
    /// If a dtype is not f32, bf16 or f16, or a pattern is empty.
    pub fn check(&self) -> Result<()> {
        check_dtype("compute dtype of the policy", self.compute)?;
        check_dtype("parameter dtype of the policy", self.parameter)?;
        check_dtype("gradient dtype of the policy", self.gradient)?;
        check_dtype("output dtype of the policy", self.output)?;
        for (index, Override { pattern, compute }) in self.overrides.iter().enumerate() {
            if pattern.is_empty() {
                return Err(Error::EmptyPattern { index });
            }
            check_dtype(&format!("override `{pattern}` of the policy"), *compute)?;
        }
        Ok(())
    }
}

/// A layer whose inside computes in its own dtype: the input is cast to it, the output cast back.
///
/// For norms and output layers in a model that computes in bf16 or f16.
#[derive(Clone, Debug)]
pub struct Within<M> {
    /// The layer.
    pub layer: M,
    /// What it computes in, such as `policy.dtype_of("ln_f")`.
    pub compute: DType,
    /// What it hands on; `None` for the dtype of its input.
    pub output: Option<DType>,
}

impl<M> Within<M> {
    fn run(
        &self,
        x: &Tensor,
        forward: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Tensor> {
        forward(&x.to_dtype(self.compute)?)?.to_dtype(self.output.unwrap_or(x.dtype()))
    }
}

impl<M: Module> Module for Within<M> {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.run(x, |x| self.layer.forward(x))
    }
}

/// For layers that behave otherwise in training. A [`Module`] is one too, by candle's own rule.
#[derive(Clone, Debug)]
pub struct WithinT<M>(pub Within<M>);

impl<M: ModuleT> ModuleT for WithinT<M> {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.0.run(x, |x| self.0.layer.forward_t(x, train))
    }
}

/// `Err` unless `dtype` is one that models compute in.
pub(crate) fn check_dtype(what: &str, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => Ok(()),
        dtype => Err(Error::DType { what: what.to_string(), dtype, expected: COMPUTE }),
    }
}

fn is_any(patterns: &[&str], name: &str) -> bool {
    patterns.iter().any(|pattern| matches(pattern, name))
}

/// Whether `name` is `pattern`, where each `*` stands for any characters or none.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    // Each inner part as early as it comes leaves the most for those behind it.
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        for (pattern, yes, no) in [
            ("fc", "fc", "fc.weight"),
            ("fc.*", "fc.weight", "c_fc.weight"),
            ("*norm*", "a.layernorm.weight", "a.nor.m"),
            ("a*b*c", "aXbbc", "acb"),
            ("a*a", "aa", "a"),
            ("*", "", "-"),
            ("layer*.0.*.weight", "layer1.0.conv1.weight", "layer1.1.conv1.weight"),
        ] {
            assert!(matches(pattern, yes), "{pattern} {yes}");
            assert!(no == "-" || !matches(pattern, no), "{pattern} {no}");
        }
    }
}

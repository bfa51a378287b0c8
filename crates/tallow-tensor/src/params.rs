//! Named parameters: seeded initial values, one sorted order, and the guard against lost gradients.

use crate::{Error, Result, cpu::with_float, ops::DropKey};
use candle_core::{DType, Device, Shape, Tensor, Var, backprop::GradStore};
use candle_nn::{Init, VarBuilder, init::NormalOrUniform, var_builder::SimpleBackend};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tallow_kernels::{Element, Real, dropout};

/// A parameter store for models built by a candle [`VarBuilder`].
///
/// Initial values are a function of the seed and the parameter's name, so they depend neither on the
/// order of construction nor on candle's CPU generator, which cannot be seeded. Clones share the
/// parameters.
///
/// *Memory:* the parameters.
#[derive(Clone)]
pub struct Params {
    seed: u64,
    vars: Arc<Mutex<BTreeMap<String, Var>>>,
}

impl Params {
    /// An empty store.
    pub fn new(seed: u64) -> Self {
        Self { seed, vars: Arc::default() }
    }

    /// A builder whose parameters are made here on first use, in `dtype` on `device`.
    pub fn builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device.clone())
    }

    /// Every parameter and buffer, sorted by name.
    pub fn all(&self) -> Vec<(String, Var)> {
        self.lock().iter().map(|(name, var)| (name.clone(), var.clone())).collect()
    }

    /// The parameters that training changes, sorted by name: all but the running statistics.
    pub fn trainable(&self) -> Vec<(String, Var)> {
        let mut all = self.all();
        all.retain(|(name, _)| !is_buffer(name));
        all
    }

    /// The running statistics of batch norms, sorted by name.
    pub fn buffers(&self) -> Vec<(String, Var)> {
        let mut all = self.all();
        all.retain(|(name, _)| is_buffer(name));
        all
    }

    /// Number of trainable elements.
    pub fn n_trainable(&self) -> u64 {
        self.trainable().iter().map(|(_, var)| var.elem_count() as u64).sum()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Var>> {
        self.vars.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a name is that of a batch norm's running statistics, which no optimizer may touch.
pub fn is_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "running_mean" | "running_var" | "num_batches_tracked")
}

impl SimpleBackend for Params {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut vars = self.lock();
        if let Some(var) = vars.get(name) {
            if var.shape() != &shape {
                let (has, asked) = (var.dims().to_vec(), shape.dims().to_vec());
                return Err(Error::Parameter { name: name.to_string(), has, asked }.into());
            }
            if var.dtype() != dtype {
                let (name, has, asked) = (name.to_string(), var.dtype(), dtype);
                return Err(Error::ParameterDType { name, has, asked }.into());
            }
            return Ok(var.as_tensor().clone());
        }
        let value = initial_value(&shape, init, key(self.seed, name), dtype, device)?;
        let var = Var::from_tensor(&value)?;
        let tensor = var.as_tensor().clone();
        vars.insert(name.to_string(), var);
        Ok(tensor)
    }

    fn get_unchecked(
        &self,
        name: &str,
        _dtype: DType,
        _device: &Device,
    ) -> candle_core::Result<Tensor> {
        match self.lock().get(name) {
            Some(var) => Ok(var.as_tensor().clone()),
            None => candle_core::bail!("parameter `{name}` does not exist and no shape was given"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }
}

/// The sequence of random numbers that belongs to a name (FNV-1a, 64 bits).
fn key(seed: u64, name: &str) -> DropKey {
    let stream = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    DropKey { seed, stream }
}

/// Values drawn in f64 from `key` and rounded once.
fn initial_value(
    shape: &Shape,
    init: Init,
    key: DropKey,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let uniform = |lo: f64, up: f64| move |i: u64| lo + (up - lo) * dropout::uniform(key, i);
    let normal = |mean: f64, std: f64| move |i: u64| mean + std * dropout::normal(key, i);
    let draw: Box<dyn Fn(u64) -> f64> = match init {
        Init::Const(x) => Box::new(move |_| x),
        Init::Uniform { lo, up } => Box::new(uniform(lo, up)),
        Init::Randn { mean, stdev } => Box::new(normal(mean, stdev)),
        Init::Kaiming { dist, fan, non_linearity } => {
            let std = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => Box::new(normal(0.0, std)),
                NormalOrUniform::Uniform => {
                    Box::new(uniform(-3f64.sqrt() * std, 3f64.sqrt() * std))
                }
            }
        }
    };
    with_float!("initial value", dtype, T => {
        let values: Vec<T> = (0..shape.elem_count() as u64)
            .map(|i| T::narrow(<T as Element>::Acc::of(draw(i))))
            .collect();
        Ok(Tensor::from_vec(values, shape, device)?)
    })
}

/// The names of `params` that `grads` holds no gradient for, in order.
///
/// Candle's fused layers record no backward: everything upstream of them then stays frozen while the
/// loss still falls. A trainer calls this after its first step and fails unless the list is empty or
/// declared frozen.
pub fn missing_gradients(grads: &GradStore, params: &[(String, Var)]) -> Vec<String> {
    params
        .iter()
        .filter(|(_, var)| grads.get(var.as_tensor()).is_none())
        .map(|(name, _)| name.clone())
        .collect()
}

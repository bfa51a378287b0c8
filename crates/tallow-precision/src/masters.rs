//! Master parameters and the copies that a model computes with.

use crate::{
    Error, Policy, Result,
    stored::{Publish, detached_cast},
};
use candle_core::{DType, Device, Shape, Tensor, Var, backprop::GradStore};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Master parameters in wide floats, each with the narrow copies that a model computes with.
///
/// Stands between a model and its parameter store, a [`candle_nn::VarMap`] for one: the model asks
/// [`Masters::builder`] for parameters and gets copies in the dtypes of the [`Policy`]; the store
/// and the optimizer keep the masters. A parameter that computes in the dtype it is kept in has no
/// copy: one variable is both. A tied parameter asked for in two dtypes has two copies, and one
/// gradient. Clones share everything.
///
/// A training step: backward, [`Masters::gather`], unscale, the optimizer's step, [`Masters::publish`].
///
/// *Memory:* [`Masters::copies_bytes`], beside the masters, which the store holds.
#[derive(Clone)]
pub struct Masters {
    policy: Policy,
    source: Arc<dyn SimpleBackend>,
    entries: Arc<Mutex<BTreeMap<String, Entry>>>,
}

struct Entry {
    master: Var,
    /// No two of the same dtype.
    copies: Vec<Var>,
}

impl Masters {
    /// Copies by `policy` of what `source` holds or initialises.
    /// # Errors
    /// If the policy has an empty pattern or a dtype other than f32, bf16 and f16.
    pub fn new(policy: Policy, source: impl SimpleBackend + 'static) -> Result<Self> {
        policy.check()?;
        Ok(Self { policy, source: Arc::new(source), entries: Arc::default() })
    }

    /// The builder that a model takes its parameters from. Its default dtype is the policy's
    /// `compute`; a model that asks for another one explicitly gets that.
    pub fn builder(&self, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), self.policy.compute, device.clone())
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The master parameters, sorted by name. Running statistics of batch norms are the store's own
    /// and never copied.
    pub fn params(&self) -> Vec<(String, Var)> {
        self.lock().iter().map(|(name, entry)| (name.clone(), entry.master.clone())).collect()
    }

    /// The copies, sorted by name; parameters that need none are not among them.
    pub fn copies(&self) -> Vec<(String, Var)> {
        let entries = self.lock();
        let named = entries.iter().flat_map(|(name, e)| e.copies.iter().map(move |c| (name, c)));
        named.map(|(name, copy)| (name.clone(), copy.clone())).collect()
    }

    /// Bytes of the copies: [`copy_bytes`] of each.
    pub fn copies_bytes(&self) -> u64 {
        let bytes = |var: &Var| copy_bytes(var.elem_count() as u64, var.dtype());
        self.lock().values().flat_map(|entry| &entry.copies).map(bytes).sum()
    }

    /// Moves the gradients of the copies to their masters, in the policy's gradient dtype. Gradients
    /// of other variables stay where they are.
    ///
    /// *Memory:* the gradients in their new dtype; each old one dies once its new one is there.
    /// # Errors
    /// If no parameter has a gradient.
    pub fn gather(&self, grads: &mut GradStore) -> Result<()> {
        let entries = self.lock();
        let mut n_grads = 0;
        for entry in entries.values() {
            let mut sum: Option<Tensor> = None;
            for var in entry.copies.iter().chain([&entry.master]) {
                let Some(grad) = grads.remove(var) else { continue };
                let grad = detached_cast(&grad, self.policy.gradient)?;
                sum = Some(match sum {
                    None => grad,
                    Some(sum) => (sum + grad)?,
                });
            }
            if let Some(sum) = sum {
                grads.insert(&entry.master, sum);
                n_grads += 1;
            }
        }
        match n_grads {
            0 => Err(Error::NoGradients { n_params: entries.len() }),
            _ => Ok(()),
        }
    }

    /// Rounds the masters into their copies, in place. Call it whenever masters changed: after the
    /// optimizer's step, and after weights were loaded.
    ///
    /// *Memory:* nothing on the CPU, one parameter's copy elsewhere.
    /// # Errors
    /// Only candle's own.
    pub fn publish(&self) -> Result<()> {
        for (name, Entry { master, copies }) in self.lock().iter() {
            for copy in copies {
                if master.device().is_cpu() {
                    copy.inplace_op2(master, &Publish(self.policy.stored_of(name)))?;
                } else {
                    copy.set(&self.rounded(name, master, copy.dtype())?)?;
                }
            }
        }
        Ok(())
    }

    /// The variable that a model computes with as `name` in `dtype`.
    fn compute(&self, entry: &mut Entry, name: &str, dtype: DType) -> Result<Tensor> {
        if entry.master.dtype() == dtype && self.policy.stored_of(name).is_none() {
            return Ok(entry.master.as_tensor().clone());
        }
        if let Some(copy) = entry.copies.iter().find(|copy| copy.dtype() == dtype) {
            return Ok(copy.as_tensor().clone());
        }
        let copy = Var::from_tensor(&self.rounded(name, &entry.master, dtype)?)?;
        entry.copies.push(copy.clone());
        Ok(copy.into_inner())
    }

    fn rounded(&self, name: &str, master: &Var, dtype: DType) -> Result<Tensor> {
        let master = master.as_detached_tensor();
        match self.policy.stored_of(name) {
            None => detached_cast(&master, dtype),
            Some(format) => crate::Stored::store(&master, format)?.load(dtype),
        }
    }

    /// What `name` computes in where a model asks its builder for `asked`.
    fn dtype_for(&self, name: &str, asked: DType) -> Result<DType> {
        if asked == self.policy.compute {
            return Ok(self.policy.dtype_of(name));
        }
        crate::policy::check_dtype(&format!("the dtype that the model asks `{name}` in"), asked)?;
        Ok(asked)
    }

    /// A master from what the store gave: the store's own variable, or a new one of a plain tensor.
    fn master(&self, name: &str, given: &Tensor) -> Result<Entry> {
        let (found, asked) = (given.dtype(), self.policy.parameter);
        if given.is_variable() && found != asked {
            return Err(Error::MasterDType { name: name.to_string(), found, asked });
        }
        let master = Var::from_tensor(&given.to_dtype(asked)?)?;
        Ok(Entry { master, copies: Vec::new() })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimpleBackend for Masters {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        if is_buffer(name) {
            // Forward passes move it: a copy would be written over by the next publish.
            return self.source.get(shape, name, init, dtype, device);
        }
        let dtype = self.dtype_for(name, dtype)?;
        let mut entries = self.lock();
        let entry = match entries.get_mut(name) {
            Some(entry) => entry,
            None => {
                let parameter = self.policy.parameter;
                let given = self.source.get(shape.clone(), name, init, parameter, device)?;
                entries.entry(name.to_string()).or_insert(self.master(name, &given)?)
            }
        };
        if entry.master.shape() != &shape {
            let (has, asked) = (entry.master.dims().to_vec(), shape.dims().to_vec());
            return Err(Error::Parameter { name: name.to_string(), has, asked }.into());
        }
        Ok(self.compute(entry, name, dtype)?)
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        if is_buffer(name) {
            return self.source.get_unchecked(name, dtype, device);
        }
        let dtype = self.dtype_for(name, dtype)?;
        let mut entries = self.lock();
        let entry = match entries.get_mut(name) {
            Some(entry) => entry,
            None => {
                let given = self.source.get_unchecked(name, self.policy.parameter, device)?;
                entries.entry(name.to_string()).or_insert(self.master(name, &given)?)
            }
        };
        Ok(self.compute(entry, name, dtype)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().contains_key(name) || self.source.contains_tensor(name)
    }
}

/// Bytes of the master of a parameter of `n_elems` elements, or of its gathered gradient.
pub const fn master_bytes(n_elems: u64) -> u64 {
    4 * n_elems
}

/// Bytes of a copy of a parameter of `n_elems` elements that computes in `dtype`.
pub fn copy_bytes(n_elems: u64, dtype: DType) -> u64 {
    n_elems * dtype.size_in_bytes() as u64
}

/// Whether a name is that of a batch norm's running statistics, which no optimizer may touch.
fn is_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "running_mean" | "running_var" | "num_batches_tracked")
}

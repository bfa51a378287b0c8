//! The optimizer: parameters with their counts and states, and the steps.

use crate::{
    composed,
    config::{Config, Place, Treatment, check_grad_factor, check_learning_rate},
    error::{Error, ParameterError, Result},
    file::StateFile,
    fused::{self, Update},
    planes::Plan,
};
use candle_core::{Tensor, TensorId, Var, backprop::GradStore};
use std::{collections::HashMap, fmt};
use tallow_kernels::optim::UpdateKey;

/// Parameters, the state of each, and how they are updated.
#[derive(Debug)]
pub struct Optimizer {
    pub(crate) config: Config,
    pub(crate) params: Vec<Param>,
    /// Places in `params` of the trained ones.
    by_name: HashMap<String, usize>,
    by_id: HashMap<TensorId, usize>,
    pub(crate) file: Option<StateFile>,
}

/// A trained parameter.
#[derive(Debug)]
pub(crate) struct Param {
    pub(crate) name: String,
    pub(crate) var: Var,
    /// Its number in the list given, for random numbers.
    index: u32,
    learning_rate_factor: f64,
    weight_decay: f64,
    /// Updates applied to it.
    pub(crate) t: u64,
    pub(crate) plan: Plan,
    pub(crate) state: State,
}

/// Where a parameter's planes are.
pub(crate) enum State {
    Ram(Vec<Vec<u8>>),
    /// Where each plane starts in the state file.
    File {
        starts: Vec<u64>,
        is_torn: bool,
    },
    /// A tensor a plane, beside a parameter that is not on the CPU.
    Device(Vec<Tensor>),
}

/// Not the bytes themselves, which may be gigabytes.
impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            State::Ram(planes) => write!(f, "Ram({} planes)", planes.len()),
            State::File { starts, is_torn } => write!(f, "File({starts:?}, torn: {is_torn})"),
            State::Device(planes) => write!(f, "Device({} planes)", planes.len()),
        }
    }
}

impl Optimizer {
    /// An optimizer of the parameters that no group freezes, with states of zeros.
    ///
    /// # Errors
    /// If a setting is out of its range, no parameter is left to train, two entries are one, or a
    /// parameter is no float, does not lie in one piece, or lies where its state format does not
    /// exist.
    pub fn new(params: &[(String, Var)], config: Config) -> Result<Self> {
        config.check()?;
        let (mut by_name, mut by_id) = (HashMap::<String, usize>::new(), HashMap::new());
        let mut trained: Vec<Param> = Vec::new();
        for (index, (name, var)) in params.iter().enumerate() {
            let Treatment::Trained { learning_rate_factor, weight_decay } = config.treatment(name)
            else {
                continue;
            };
            check_parameter(name, var, &config)?;
            let twin = by_name.get(name).or(by_id.get(&var.as_tensor().id()));
            if let Some(&twin) = twin {
                let first = trained[twin].name.clone();
                return Err(ParameterError::Twice { first, second: name.clone() }.into());
            }
            by_name.insert(name.clone(), trained.len());
            by_id.insert(var.as_tensor().id(), trained.len());
            trained.push(Param {
                name: name.clone(),
                var: var.clone(),
                index: index as u32,
                learning_rate_factor,
                weight_decay,
                t: 0,
                plan: Plan::new(&config, var),
                state: State::Ram(Vec::new()),
            });
        }
        if trained.is_empty() {
            return Err(ParameterError::None { n_parameters: params.len() }.into());
        }
        let file = match &config.place {
            Place::Ram => {
                trained.iter_mut().try_for_each(Param::make_room)?;
                None
            }
            Place::File { path, window_bytes } => {
                Some(StateFile::create(path, *window_bytes, &mut trained)?)
            }
        };
        Ok(Self { config, params: trained, by_name, by_id, file })
    }

    /// Updates every parameter that has a gradient. One without keeps its value, its moments and
    /// its count; a gradient of zeros is a gradient.
    ///
    /// # Errors
    /// If a gradient does not fit its parameter: then nothing was updated.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.step_scaled(grads, 1.0)
    }

    /// As [`Optimizer::step`], by `factor` times each gradient: undoes a loss scale, or clips,
    /// without a pass of its own.
    ///
    /// # Errors
    /// If a gradient does not fit its parameter, or the factor is not finite: then nothing was
    /// updated.
    pub fn step_scaled(&mut self, grads: &GradStore, factor: f64) -> Result<()> {
        for param in &self.params {
            if let Some(grad) = grads.get(&param.var) {
                param.check_gradient(grad)?;
            }
        }
        for place in 0..self.params.len() {
            if let Some(grad) = grads.get(&self.params[place].var) {
                self.update(place, grad, factor)?;
            }
        }
        Ok(())
    }

    /// Updates one parameter as soon as its gradient exists, so that the gradient can be dropped
    /// before the next one is computed (gradient release).
    ///
    /// # Errors
    /// If there is no such trained parameter, or the gradient does not fit it.
    pub fn step_one(&mut self, name: &str, grad: &Tensor) -> Result<()> {
        self.step_one_scaled(name, grad, 1.0)
    }

    /// As [`Optimizer::step_one`], by `factor` times the gradient.
    ///
    /// # Errors
    /// As [`Optimizer::step_one`], or if the factor is not finite.
    pub fn step_one_scaled(&mut self, name: &str, grad: &Tensor, factor: f64) -> Result<()> {
        let unknown = || ParameterError::Unknown { name: name.to_owned() };
        let place = *self.by_name.get(name).ok_or_else(unknown)?;
        self.update(place, grad, factor)
    }

    /// As [`Optimizer::step_one_scaled`], for the variable itself.
    ///
    /// # Errors
    /// If the gradient does not fit, or the factor is not finite.
    pub fn step_var(&mut self, var: &Tensor, grad: &Tensor, factor: f64) -> Result<Stepped> {
        match self.by_id.get(&var.id()) {
            Some(&place) => self.update(place, grad, factor).map(|()| Stepped::Updated),
            None => Ok(Stepped::NotTrained),
        }
    }

    /// The rate of the next update, before groups' factors.
    pub fn learning_rate(&self) -> f64 {
        self.config.learning_rate
    }

    /// Sets the rate of the next update. One that is negative or not finite is refused by that
    /// update.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.config.learning_rate = learning_rate;
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Names of the trained parameters, in the order given.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.params.iter().map(|param| param.name.as_str())
    }

    /// Updates applied to a parameter; `None` if it is not trained here.
    pub fn n_updates(&self, name: &str) -> Option<u64> {
        self.by_name.get(name).map(|place| self.params[*place].t)
    }

    /// Bytes of state, wherever they are.
    pub fn state_bytes(&self) -> u64 {
        self.params.iter().map(|param| param.plan.n_bytes()).sum()
    }

    /// Bytes of state in memory: all, or the window of the state file.
    pub fn resident_state_bytes(&self) -> u64 {
        self.file.as_ref().map_or_else(|| self.state_bytes(), StateFile::window_bytes)
    }

    fn update(&mut self, place: usize, grad: &Tensor, grad_factor: f64) -> Result<()> {
        let Self { config, params, file, .. } = self;
        let param = &mut params[place];
        param.check_gradient(grad)?;
        check_learning_rate(config.learning_rate)?;
        check_grad_factor(grad_factor)?;
        let t = param.t + 1;
        let lr = config.learning_rate * param.learning_rate_factor;
        let update = Update {
            config,
            plan: &param.plan,
            dims: param.var.dims(),
            step: config.algorithm.step(lr, param.weight_decay, t, param.var.dtype()),
            grad_factor,
            key: UpdateKey { seed: config.seed, parameter: param.index, t },
        };
        match (&mut param.state, file) {
            (State::Ram(planes), _) => fused::apply(&update, &param.var, grad, planes)?,
            (State::File { starts, is_torn }, Some(file)) => {
                let mut window = file.window(&param.name, starts, is_torn)?;
                fused::apply(&update, &param.var, grad, &mut window)?;
            }
            (State::File { .. }, None) => unreachable!("a state in a file has a file"),
            (State::Device(state), _) => {
                composed::apply(&update.step, &param.var, grad, grad_factor, state)?;
            }
        }
        param.t = t;
        Ok(())
    }
}

/// Bytes of state of an optimizer of `params` by `config`, before it is made: wherever they are, and
/// in memory.
pub fn state_bytes(params: &[(String, Var)], config: &Config) -> (u64, u64) {
    let is_trained = |name: &str| matches!(config.treatment(name), Treatment::Trained { .. });
    let trained = params.iter().filter(|(name, _)| is_trained(name));
    let plans = trained.map(|(_, var)| (Plan::new(config, var), var.elem_count()));
    let (mut all, mut window) = (0, 0);
    for (plan, n_elems) in plans {
        all += plan.n_bytes();
        if let Place::File { window_bytes, .. } = config.place {
            window = crate::file::largest_chunk_bytes(&plan, n_elems, window_bytes).max(window);
        }
    }
    match config.place {
        Place::Ram => (all, all),
        Place::File { .. } => (all, window),
    }
}

/// What became of a gradient.
#[must_use = "a gradient of an untrained variable moved nothing"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stepped {
    /// The parameter was updated.
    Updated,
    /// The variable is frozen, or none of this optimizer's.
    NotTrained,
}

impl Param {
    /// A state of zeros in the memory that the parameter is in.
    fn make_room(&mut self) -> Result<()> {
        let planes = &self.plan.planes;
        self.state = if self.var.device().is_cpu() {
            State::Ram(planes.iter().map(|plane| vec![0; plane.n_bytes as usize]).collect())
        } else {
            State::Device(composed::zeros(&self.plan, &self.var)?)
        };
        Ok(())
    }

    fn check_gradient(&self, grad: &Tensor) -> Result<()> {
        if grad.shape() == self.var.shape() && fused::is_float(grad.dtype()) {
            return Ok(());
        }
        Err(Error::Gradient {
            name: self.name.clone(),
            shape: self.var.shape().clone(),
            dtype: self.var.dtype(),
            found: grad.shape().clone(),
            found_dtype: grad.dtype(),
        })
    }
}

fn check_parameter(name: &str, var: &Var, config: &Config) -> Result<(), ParameterError> {
    if !fused::is_float(var.dtype()) {
        return Err(ParameterError::DType { name: name.to_owned(), dtype: var.dtype() });
    }
    if !var.is_contiguous() {
        let (name, shape) = (name.to_owned(), var.shape().clone());
        return Err(ParameterError::Layout { name, shape });
    }
    if var.device().is_cpu() { Ok(()) } else { composed::check(name, config, var.dtype()) }
}

impl candle_nn::Optimizer for Optimizer {
    type Config = Config;

    /// Names parameters by their number; those that are no floats are left out, as candle does.
    fn new(vars: Vec<Var>, config: Config) -> candle_core::Result<Self> {
        let floats = vars.into_iter().filter(|var| fused::is_float(var.dtype()));
        let named: Vec<_> = floats.enumerate().map(|(i, var)| (i.to_string(), var)).collect();
        Ok(Optimizer::new(&named, config)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(Optimizer::step(self, grads)?)
    }

    fn learning_rate(&self) -> f64 {
        Optimizer::learning_rate(self)
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        Optimizer::set_learning_rate(self, learning_rate);
    }
}

/// The float variables of a map by name, in the order of their names.
///
/// # Panics
/// If a thread panicked while it held the map's lock.
pub fn named(map: &candle_nn::VarMap) -> Vec<(String, Var)> {
    let data = map.data().lock().expect("no thread panicked with the map");
    let floats = data.iter().filter(|(_, var)| fused::is_float(var.dtype()));
    let mut named: Vec<_> = floats.map(|(name, var)| (name.clone(), var.clone())).collect();
    named.sort_by(|(a, _), (b, _)| a.cmp(b));
    named
}

//! Parameters with chosen gradients.
#![allow(dead_code, unreachable_pub)] // each test uses its part, by `mod common`

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use std::path::PathBuf;
use tallow_optim::{Config, Optimizer, Place};
use tallow_testkit::values_f32;

/// Seeded values of this shape and type.
pub fn tensor(seed: u64, dims: &[usize], dtype: DType) -> Tensor {
    let data = values_f32(seed, dims.iter().product());
    let tensor = Tensor::from_vec(data, dims, &Device::Cpu).expect("data fills dims");
    tensor.to_dtype(dtype).expect("a float type")
}

pub fn var(seed: u64, dims: &[usize], dtype: DType) -> Var {
    Var::from_tensor(&tensor(seed, dims, dtype)).expect("a copy")
}

/// Named variables of these shapes.
pub fn params(shapes: &[(&str, &[usize])], dtype: DType) -> Vec<(String, Var)> {
    let seeds = 1..;
    shapes
        .iter()
        .zip(seeds)
        .map(|((name, dims), i)| (name.to_string(), var(i, dims, dtype)))
        .collect()
}

/// A store with these gradients: those of the sum of products.
pub fn store(grads: &[(&Var, Tensor)]) -> GradStore {
    let zero = Tensor::zeros((), DType::F64, &Device::Cpu).expect("a scalar");
    let sum = grads.iter().try_fold(zero, |sum, (var, g)| {
        let g = g.to_dtype(var.dtype())?;
        sum + (var.as_tensor() * g)?.sum_all()?.to_dtype(DType::F64)?
    });
    sum.and_then(|sum| sum.backward()).expect("products have gradients")
}

/// A store with a seeded gradient for each parameter.
pub fn seeded(params: &[(String, Var)], step: u64) -> GradStore {
    let grads: Vec<_> = params
        .iter()
        .zip(0..)
        .map(|((_, var), i)| (var, tensor(1000 + 100 * step + i, var.dims(), var.dtype())))
        .collect();
    store(&grads)
}

pub fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.to_dtype(DType::F64).and_then(|t| t.flatten_all());
    flat.and_then(|t| t.to_vec1()).expect("floats")
}

/// All weights, as bits of the numbers.
pub fn weights(params: &[(String, Var)]) -> Vec<u64> {
    params.iter().flat_map(|(_, var)| values(var)).map(f64::to_bits).collect()
}

/// A path in the system's folder for such files, of this process.
pub fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("tallow-optim-{}-{name}", std::process::id()))
}

pub fn in_file(config: &Config, name: &str, window_bytes: u64) -> Config {
    Config { place: Place::File { path: path(name), window_bytes }, ..config.clone() }
}

pub fn optimizer(params: &[(String, Var)], config: &Config) -> Optimizer {
    Optimizer::new(params, config.clone()).expect("the configuration is sound")
}

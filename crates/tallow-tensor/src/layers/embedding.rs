//! An embedding table.

use crate::ops;
use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// Rows of a table by id.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
    padding: Option<u32>,
}

impl Embedding {
    /// From the table `[V, D]`; the row `padding`, if given, has no gradient.
    pub fn new(weight: Tensor, padding: Option<u32>) -> Self {
        Self { weight, padding }
    }

    /// `[V, D]`, for a tied output layer.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Embedding {
    /// `ids` (u32) of any shape → `[..., D]`.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        Ok(ops::embedding(&self.weight, ids, self.padding)?)
    }
}

/// A table of `n_rows` by `features`, initialised as `candle_nn::embedding`.
/// # Errors
/// If the builder has no such parameters.
pub fn embedding(n_rows: usize, features: usize, vb: VarBuilder) -> Result<Embedding> {
    let init = Init::Randn { mean: 0.0, stdev: 1.0 };
    Ok(Embedding::new(vb.get_with_hints((n_rows, features), "weight", init)?, None))
}

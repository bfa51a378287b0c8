//! Rotary position embedding with its tables.

use crate::ops::{self, Rope};
use candle_core::{DeviceLocation, Result, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Turns the pairs of each head by the angles of their position (Su et al. 2021).
///
/// Tables are made for the tokens seen, not for the longest sequence a model allows, and shared by
/// clones. *Memory:* `8 * head_dim / 2` bytes a token of the longest sequence seen.
#[derive(Clone, Debug)]
pub struct Rotary {
    freqs: Arc<[f64]>,
    style: Rope,
    tables: Arc<Mutex<Option<Tables>>>,
}

/// Cosines and sines of the tokens `first..first + n`.
#[derive(Clone, Debug)]
struct Tables {
    location: DeviceLocation,
    first: usize,
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// From the radians a token of each pair, such as [`ops::rope_frequencies`].
    pub fn new(freqs: Vec<f64>, style: Rope) -> Self {
        Self { freqs: freqs.into(), style, tables: Arc::default() }
    }

    /// `x` `[..., T, D]`, whose first token stands at `first` → the same shape.
    /// # Errors
    /// If the head is not as wide as the frequencies say.
    pub fn forward(&self, x: &Tensor, first: usize) -> Result<Tensor> {
        let n_tokens = x.dims().iter().rev().nth(1).copied().unwrap_or(0);
        let Tables { cos, sin, .. } = self.tables_of(x, first, n_tokens)?;
        Ok(ops::rope(x, &cos, &sin, self.style)?)
    }

    fn tables_of(&self, x: &Tensor, first: usize, n_tokens: usize) -> Result<Tables> {
        let location = x.device().location();
        let mut kept = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let known = match &*kept {
            Some(tables) if tables.location == location && tables.first <= first => {
                let skip = first - tables.first;
                (skip + n_tokens <= tables.cos.dim(0)?).then(|| (tables.clone(), skip))
            }
            _ => None,
        };
        if let Some((Tables { first, cos, sin, .. }, skip)) = known {
            let part = |t: Tensor| t.narrow(0, skip, n_tokens);
            return Ok(Tables { location, first, cos: part(cos)?, sin: part(sin)? });
        }
        let (cos, sin) = ops::rope_table_of(first, n_tokens, &self.freqs, x.device())?;
        let tables = Tables { location, first, cos, sin };
        *kept = Some(tables.clone());
        Ok(tables)
    }
}

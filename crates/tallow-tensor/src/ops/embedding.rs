//! Rows of a table by id.

use crate::{
    Error, Result, composed,
    cpu::{Arg, Grads, Kernel, Scalar, apply, tensor},
};
use candle_core::{CpuStorage, DType, Shape, Tensor};
use tallow_kernels::embedding as kernels;

struct Embedding {
    padding: Option<u32>,
}

impl Kernel for Embedding {
    const NAME: &'static str = "embedding";
    const OPERANDS: &'static [&'static str] = &["weight", "ids"];
    const SAME_DTYPE: bool = false;

    fn forward<T: Scalar>(&self, args: &[Arg]) -> Result<(CpuStorage, Shape)> {
        let (weight, ids, d) = (args[0].dense::<T>()?, args[1].dense::<u32>()?, args[0].last_dim());
        let mut out = vec![T::default(); ids.len() * d];
        kernels::embedding(&mut out, &weight, &ids, d)?;
        let mut dims = args[1].dims().to_vec();
        dims.push(d);
        Ok((T::to_cpu_storage_owned(out), Shape::from(dims)))
    }

    fn backward<T: Scalar>(&self, args: &[Arg], _out: Arg, dout: Arg) -> Result<Grads> {
        let (ids, d) = (args[1].dense::<u32>()?, args[0].last_dim());
        let mut dweight = vec![T::default(); args[0].n_elems()];
        kernels::embedding_backward(&mut dweight, &ids, &dout.dense::<T>()?, d, self.padding)?;
        Ok(vec![tensor(dweight, args[0].shape())?, None])
    }
}

/// `weight[ids]`: `weight` `[V, D]`, `ids` (u32) of any shape → `[..., D]`.
///
/// The row `padding`, if given, has no gradient. Repeated ids are summed in f32 (f64 for f64) and
/// rounded once. Keeps `ids`.
/// # Errors
/// If an id is beyond the table, or shapes or dtypes do not fit.
pub fn embedding(weight: &Tensor, ids: &Tensor, padding: Option<u32>) -> Result<Tensor> {
    let op = Embedding::NAME;
    if weight.dims().len() != 2 {
        let (found, expected) = (weight.dims().to_vec(), "[rows, features]".to_string());
        return Err(Error::Shape { op, what: "weight", found, expected });
    }
    if ids.dtype() != DType::U32 {
        let (found, expected) = (ids.dtype(), DType::U32);
        return Err(Error::DTypeMismatch { op, what: "ids", found, expected });
    }
    apply(Embedding { padding }, &[weight, ids], || composed::embedding(weight, ids, padding))
}

use candle_core::{DType, Device, Tensor};

/// Elements with a shape, in memory: what array files hand out.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Type of an element.
    pub dtype: DType,
    /// Dimensions; none for a scalar.
    pub dims: Vec<usize>,
    /// Row-major, little-endian.
    pub bytes: Vec<u8>,
}

impl Array {
    /// The same as a tensor on `device`.
    /// # Errors
    /// Candle's, if the device refuses.
    pub fn to_tensor(&self, device: &Device) -> candle_core::Result<Tensor> {
        Tensor::from_raw_buffer(&self.bytes, self.dtype, &self.dims, device)
    }
}

/// Elements of `dims`, if a `u64` can count them.
pub(super) fn n_elems(dims: &[u64]) -> Option<u64> {
    dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))
}

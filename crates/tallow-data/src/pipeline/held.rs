use crate::batches::Batch;
use candle_core::Tensor;
use std::sync::Arc;

/// How many bytes a value keeps alive: what limits in bytes count.
///
/// Shared bytes count in full in each holder. Headers of a few dozen bytes do not count.
pub trait HeldBytes {
    /// Bytes held on the heap or the device.
    fn held_bytes(&self) -> u64;
}

macro_rules! plain {
    ($($elem:ty),*) => {$(
        impl HeldBytes for $elem {
            fn held_bytes(&self) -> u64 {
                size_of::<$elem>() as u64
            }
        }
    )*};
}
plain!(u8, u16, u32, u64, usize, i8, i16, i32, i64, f32, f64, bool, ());

impl HeldBytes for String {
    fn held_bytes(&self) -> u64 {
        self.capacity() as u64
    }
}

impl<T: HeldBytes> HeldBytes for [T] {
    /// One pass over the elements, or none if each holds the same.
    fn held_bytes(&self) -> u64 {
        if std::mem::needs_drop::<T>() {
            self.iter().map(HeldBytes::held_bytes).sum()
        } else {
            size_of_val(self) as u64
        }
    }
}

impl<T: HeldBytes> HeldBytes for Vec<T> {
    fn held_bytes(&self) -> u64 {
        let spare = self.capacity() - self.len();
        self.as_slice().held_bytes() + (spare * size_of::<T>()) as u64
    }
}

impl<T: HeldBytes, const N: usize> HeldBytes for [T; N] {
    fn held_bytes(&self) -> u64 {
        self.as_slice().held_bytes()
    }
}

impl<T: HeldBytes> HeldBytes for Option<T> {
    fn held_bytes(&self) -> u64 {
        self.as_ref().map_or(0, HeldBytes::held_bytes)
    }
}

impl<T: HeldBytes + ?Sized> HeldBytes for Box<T> {
    fn held_bytes(&self) -> u64 {
        (**self).held_bytes()
    }
}

impl<T: HeldBytes + ?Sized> HeldBytes for Arc<T> {
    fn held_bytes(&self) -> u64 {
        (**self).held_bytes()
    }
}

impl<A: HeldBytes, B: HeldBytes> HeldBytes for (A, B) {
    fn held_bytes(&self) -> u64 {
        self.0.held_bytes() + self.1.held_bytes()
    }
}

impl<A: HeldBytes, B: HeldBytes, C: HeldBytes> HeldBytes for (A, B, C) {
    fn held_bytes(&self) -> u64 {
        self.0.held_bytes() + self.1.held_bytes() + self.2.held_bytes()
    }
}

impl HeldBytes for Tensor {
    fn held_bytes(&self) -> u64 {
        (self.elem_count() * self.dtype().size_in_bytes()) as u64
    }
}

impl HeldBytes for Batch {
    fn held_bytes(&self) -> u64 {
        self.inputs.held_bytes() + self.targets.held_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_counted() {
        let bytes = Vec::<u8>::with_capacity(100);
        assert_eq!(bytes.held_bytes(), 100);
        assert_eq!((vec![1u32, 2, 3], 7u64).held_bytes(), 12 + 8);
        assert_eq!(vec![vec![0u8; 10], vec![0; 20]].held_bytes(), 30);
        assert_eq!((Some(Arc::new([0u16; 4])), (), None::<f32>).held_bytes(), 8);
        let tensor = Tensor::zeros((2, 3), candle_core::DType::BF16, &candle_core::Device::Cpu);
        assert_eq!(tensor.unwrap().held_bytes(), 12);
    }
}

//! 128 bits that stand for a tensor's bytes, and the tensor's bytes as a stream.

use candle_core::Tensor;
use std::io::{self, Write};

/// Elements handed on at a time: what a stream holds beside the tensor.
pub(crate) const CHUNK_ELEMS: usize = 1 << 16;

/// Writes the elements of `x` in order, little-endian.
pub(crate) fn write(x: &Tensor, out: &mut impl Write) -> candle_core::Result<()> {
    let flat = x.flatten_all()?;
    let n_elems = flat.elem_count();
    for start in (0..n_elems).step_by(CHUNK_ELEMS) {
        flat.narrow(0, start, CHUNK_ELEMS.min(n_elems - start))?.write_bytes(out)?;
    }
    Ok(())
}

/// Two lanes of multiply and rotate; not for adversaries.
struct Hasher {
    lanes: [u64; 2],
    n_bytes: u64,
}

impl Hasher {
    fn word(&mut self, word: u64) {
        const ODD: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f];
        for (lane, odd) in self.lanes.iter_mut().zip(ODD) {
            *lane = (*lane ^ word).wrapping_mul(odd).rotate_left(29);
        }
        self.lanes[1] = self.lanes[1].wrapping_add(self.lanes[0]);
    }
}

impl Write for Hasher {
    /// The division into calls is part of the hash: a tensor is always written in the same way.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
        self.n_bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A hash of the bits of `x`: -0 is not 0, a NaN equals itself.
pub(crate) fn digest(x: &Tensor) -> candle_core::Result<u128> {
    let mut hasher = Hasher { lanes: [1, 2], n_bytes: 0 };
    write(x, &mut hasher)?;
    hasher.word(hasher.n_bytes);
    hasher.word(0);
    Ok(u128::from(hasher.lanes[0]) << 64 | u128::from(hasher.lanes[1]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn a_bit_anywhere_changes_the_digest() {
        for n in [1, 2, 3, CHUNK_ELEMS - 1, CHUNK_ELEMS, CHUNK_ELEMS + 1] {
            for dtype in [DType::F32, DType::BF16, DType::F64, DType::U8] {
                let zeros = vec![0f32; n];
                let mut flipped = zeros.clone();
                flipped[n - 1] = 1.0;
                let of = |v: &[f32]| {
                    let x = Tensor::new(v, &Device::Cpu).and_then(|x| x.to_dtype(dtype)).unwrap();
                    digest(&x).unwrap()
                };
                assert_eq!(of(&zeros), of(&zeros), "{n} {dtype:?}");
                assert_ne!(of(&zeros), of(&flipped), "{n} {dtype:?}");
            }
        }
    }

    #[test]
    fn order_sign_and_length_count() {
        let of = |v: &[f32]| digest(&Tensor::new(v, &Device::Cpu).unwrap()).unwrap();
        assert_ne!(of(&[1.0, 2.0]), of(&[2.0, 1.0]));
        assert_ne!(of(&[0.0]), of(&[-0.0]));
        assert_ne!(of(&[0.0]), of(&[0.0, 0.0]));
        assert_eq!(of(&[f32::NAN]), of(&[f32::NAN]));
        let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        assert_eq!(digest(&x.t().unwrap()).unwrap(), of(&[1.0, 3.0, 2.0, 4.0]));
    }
}

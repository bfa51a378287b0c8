use crate::error::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, WithDType};

/// What pixel bytes become: `(byte / 255 - mean) / std`, in `dtype`, on `device`.
#[derive(Clone, Debug)]
pub struct Pixels {
    /// A float type.
    pub dtype: DType,
    /// Where batches are made.
    pub device: Device,
    /// Subtracted from the pixel scaled to `0..=1`; 0 leaves it.
    pub mean: f32,
    /// Divides what is left; 1 leaves it.
    pub std: f32,
}

impl Pixels {
    /// The normalisation of the embedded digits: their own mean and standard deviation.
    pub fn digits(dtype: DType, device: &Device) -> Self {
        Self { dtype, device: device.clone(), mean: 0.1311, std: 0.3087 }
    }
}

/// The normalised value of each of the 256 bytes, in the dtype asked for: a batch is one look-up
/// per pixel, rounded once, whatever the dtype.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    values: Tensor,
    device: Device,
}

impl Table {
    pub(crate) fn new(pixels: Pixels) -> Result<Self> {
        let Pixels { dtype, device, mean, std } = pixels;
        if !matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::Dtype { dtype });
        }
        let normalise = |byte: u8| (f64::from(byte) / 255.0 - f64::from(mean)) / f64::from(std);
        let values: Vec<f64> = (0..=u8::MAX).map(normalise).collect();
        let largest = values[0].abs().max(values[255].abs());
        // A NaN anywhere fails the comparison too.
        if !(std > 0.0 && largest <= largest_finite(dtype)) {
            return Err(Error::Normalisation { mean, std });
        }
        let values = Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)?;
        Ok(Self { values, device })
    }

    pub(crate) fn bytes_per_elem(&self) -> u64 {
        self.values.dtype().size_in_bytes() as u64
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The images one after another, as a tensor of `shape`.
    pub(crate) fn look_up<'a>(
        &self,
        images: impl Iterator<Item = &'a [u8]>,
        shape: [usize; 4],
    ) -> Result<Tensor> {
        let (storage, _) = self.values.storage_and_layout();
        let Storage::Cpu(table) = &*storage else { unreachable!("the table is made on the CPU") };
        match table {
            CpuStorage::F64(table) => gather(table, images, shape, &self.device),
            CpuStorage::F32(table) => gather(table, images, shape, &self.device),
            CpuStorage::F16(table) => gather(table, images, shape, &self.device),
            CpuStorage::BF16(table) => gather(table, images, shape, &self.device),
            _ => Err(Error::Dtype { dtype: self.values.dtype() }),
        }
    }
}

/// Candle takes the vector as the tensor's storage on the CPU, so these are its only bytes.
fn gather<'a, T: WithDType>(
    table: &[T],
    images: impl Iterator<Item = &'a [u8]>,
    shape: [usize; 4],
    device: &Device,
) -> Result<Tensor> {
    let mut elems = Vec::with_capacity(shape.iter().product());
    for image in images {
        elems.extend(image.iter().map(|&byte| table[usize::from(byte)]));
    }
    Ok(Tensor::from_vec(elems, &shape, device)?)
}

fn largest_finite(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MAX,
        DType::F16 => 65504.0,
        _ => f64::from(f32::MAX) * 0.99, // bf16 rounds the last of f32's range up to infinity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(dtype: DType, mean: f32, std: f32) -> Result<Table> {
        Table::new(Pixels { dtype, device: Device::Cpu, mean, std })
    }

    #[test]
    fn every_byte_is_rounded_once_in_every_dtype() {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let table = table(dtype, 0.25, 0.5).unwrap();
            let got = table.look_up([&bytes[..]].into_iter(), [1, 1, 16, 16]).unwrap();
            assert_eq!((got.dtype(), got.dims()), (dtype, &[1, 1, 16, 16][..]));
            let want: Vec<f64> =
                bytes.iter().map(|&byte| (f64::from(byte) / 255.0 - 0.25) / 0.5).collect();
            let want = Tensor::new(want, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let as_f64 = |tensor: &Tensor| {
                tensor
                    .flatten_all()
                    .unwrap()
                    .to_dtype(DType::F64)
                    .unwrap()
                    .to_vec1::<f64>()
                    .unwrap()
            };
            assert_eq!(as_f64(&got), as_f64(&want));
        }
    }

    #[test]
    fn what_cannot_be_normalised_is_an_error() {
        for dtype in [DType::U8, DType::U32, DType::I64, DType::F8E4M3] {
            assert!(matches!(table(dtype, 0.0, 1.0), Err(Error::Dtype { .. })), "{dtype:?}");
        }
        for (mean, std) in
            [(0.0, 0.0), (0.0, -1.0), (f32::NAN, 1.0), (0.0, f32::NAN), (f32::INFINITY, 1.0)]
        {
            assert!(
                matches!(table(DType::F32, mean, std), Err(Error::Normalisation { .. })),
                "{mean} {std}"
            );
        }
        assert!(matches!(table(DType::F16, 0.0, 1e-6), Err(Error::Normalisation { .. })));
        assert!(table(DType::BF16, 0.0, 1e-6).is_ok());
    }
}

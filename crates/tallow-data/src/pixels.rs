use crate::error::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, WithDType};

/// What pixel bytes become: `(byte / 255 - mean) / std`, in `dtype`, on `device`.
#[derive(Clone, Debug)]
pub struct Pixels {
    /// A float type.
    pub dtype: DType,
    /// Where batches are made.
    pub device: Device,
    /// Subtracted from the pixel scaled to `0..=1`; 0 leaves it. One a channel, or one for all.
    pub mean: Vec<f32>,
    /// Divides what is left; 1 leaves it. One a channel, or one for all.
    pub std: Vec<f32>,
}

impl Pixels {
    /// The normalisation of the embedded digits: their own mean and standard deviation.
    pub fn digits(dtype: DType, device: &Device) -> Self {
        Self { dtype, device: device.clone(), mean: vec![0.1311], std: vec![0.3087] }
    }

    /// The normalisation of ImageNet's photographs, red, green and blue, that most published weights
    /// were trained with.
    pub fn imagenet(dtype: DType, device: &Device) -> Self {
        let (mean, std) = (vec![0.485, 0.456, 0.406], vec![0.229, 0.224, 0.225]);
        Self { dtype, device: device.clone(), mean, std }
    }
}

/// How the bytes of an image lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[C, H, W]`: one channel after another.
    ChannelsFirst,
    /// `[H, W, C]`: one pixel after another, as decoders give them.
    ChannelsLast,
}

// B images of a batch · C channels · H height · W width
/// The normalised value of each of the 256 bytes, for each channel or for all, in the dtype asked for:
/// a batch is one look-up per pixel, rounded once, whatever the dtype.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    /// `[256]`, or `[C * 256]`.
    values: Tensor,
    device: Device,
}

impl Table {
    /// For images of `n_channels`.
    pub(crate) fn new(pixels: Pixels, n_channels: usize) -> Result<Self> {
        let Pixels { dtype, device, mean, std } = pixels;
        if !matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::Dtype { dtype });
        }
        let (n_means, n_stds) = (mean.len(), std.len());
        if [n_means, n_stds].iter().any(|&n| n != 1 && n != n_channels) {
            return Err(Error::PerChannel { n_channels, n_means, n_stds });
        }
        let mut values = Vec::new();
        for channel in 0..n_means.max(n_stds) {
            let (mean, std) = (mean[channel.min(n_means - 1)], std[channel.min(n_stds - 1)]);
            let normalise = |byte: u8| (f64::from(byte) / 255.0 - f64::from(mean)) / f64::from(std);
            let largest = normalise(0).abs().max(normalise(255).abs());
            // A NaN anywhere fails the comparison too.
            if !(std > 0.0 && largest <= largest_finite(dtype)) {
                return Err(Error::Normalisation { mean, std });
            }
            values.extend((0..=u8::MAX).map(normalise));
        }
        let values = Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)?.to_device(&device)?;
        Ok(Self { values, device })
    }

    pub(crate) fn bytes_per_elem(&self) -> u64 {
        self.values.dtype().size_in_bytes() as u64
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The images one after another, as a tensor of `shape`, `[B, C, H, W]`.
    pub(crate) fn look_up<'a>(
        &self,
        images: impl Iterator<Item = &'a [u8]>,
        layout: Layout,
        shape: [usize; 4],
    ) -> Result<Tensor> {
        if !self.device.is_cpu() {
            return self.look_up_there(images, layout, shape);
        }
        let (storage, _) = self.values.storage_and_layout();
        let Storage::Cpu(tables) = &*storage else { unreachable!("the table is on the CPU") };
        match tables {
            CpuStorage::F64(tables) => gather(tables, images, layout, shape),
            CpuStorage::F32(tables) => gather(tables, images, layout, shape),
            CpuStorage::F16(tables) => gather(tables, images, layout, shape),
            CpuStorage::BF16(tables) => gather(tables, images, layout, shape),
            _ => Err(Error::Dtype { dtype: self.values.dtype() }),
        }
    }

    /// The same on another device: bytes travel, and become floats there. Beside the batch it holds
    /// its bytes, and of one channel the numbers and the floats.
    fn look_up_there<'a>(
        &self,
        images: impl Iterator<Item = &'a [u8]>,
        layout: Layout,
        shape: [usize; 4],
    ) -> Result<Tensor> {
        let [b, c, h, w] = shape;
        let same: [u8; 256] = std::array::from_fn(|byte| byte as u8);
        let bytes = Tensor::from_vec(planes(&same, images, layout, shape), &shape, &self.device)?;
        let n_tables = self.values.elem_count() / 256;
        let out = Tensor::zeros(&shape, self.values.dtype(), &self.device)?;
        for channel in 0..c {
            // Not by the bytes: candle takes the largest number of a type as "no index", and gives 0.
            let plane = bytes.narrow(1, channel, 1)?.flatten_all()?.to_dtype(DType::U32)?;
            let table = self.values.narrow(0, channel % n_tables * 256, 256)?;
            let plane = table.index_select(&plane, 0)?.reshape((b, 1, h, w))?;
            out.slice_set(&plane, 1, channel)?;
        }
        Ok(out)
    }
}

/// Candle takes the vector as the tensor's storage on the CPU, so these are its only bytes.
fn gather<'a, T: WithDType>(
    tables: &[T],
    images: impl Iterator<Item = &'a [u8]>,
    layout: Layout,
    shape: [usize; 4],
) -> Result<Tensor> {
    Ok(Tensor::from_vec(planes(tables, images, layout, shape), &shape, &Device::Cpu)?)
}

/// The images channel by channel, each byte replaced by its entry in the channel's table of 256.
fn planes<'a, T: Copy>(
    tables: &[T],
    images: impl Iterator<Item = &'a [u8]>,
    layout: Layout,
    [b, c, h, w]: [usize; 4],
) -> Vec<T> {
    let mut elems = Vec::with_capacity(b * c * h * w);
    for image in images {
        for (channel, table) in (0..c).zip(tables.chunks_exact(256).cycle()) {
            let value = |&byte: &u8| table[usize::from(byte)];
            match layout {
                Layout::ChannelsFirst => {
                    elems.extend(image[channel * h * w..][..h * w].iter().map(value));
                }
                Layout::ChannelsLast => {
                    elems.extend(image[channel..].iter().step_by(c).map(value));
                }
            }
        }
    }
    elems
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
        Table::new(Pixels { dtype, device: Device::Cpu, mean: vec![mean], std: vec![std] }, 1)
    }

    #[test]
    fn every_byte_is_rounded_once_in_every_dtype() {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let table = table(dtype, 0.25, 0.5).unwrap();
            let got = table
                .look_up([&bytes[..]].into_iter(), Layout::ChannelsFirst, [1, 1, 16, 16])
                .unwrap();
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

    fn assert_same(left: &Tensor, right: &Tensor) {
        let values = |tensor: &Tensor| {
            let flat = tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
            flat.to_vec1::<f64>().unwrap()
        };
        assert_eq!((left.dims(), left.dtype()), (right.dims(), right.dtype()));
        assert_eq!(values(left), values(right));
    }

    #[test]
    fn channels_have_their_own_constants_in_any_layout_on_any_device() {
        let shape @ [b, c, h, w] = [2, 3, 4, 5];
        let first: Vec<u8> = (0..b * c * h * w).map(|i| (i * 7) as u8).collect();
        let mut last = vec![0; first.len()];
        for (i, &byte) in first.iter().enumerate() {
            let (image, channel, pixel) = (i / (c * h * w), i / (h * w) % c, i % (h * w));
            last[(image * h * w + pixel) * c + channel] = byte;
        }
        assert!(first.contains(&255), "the byte that candle would take for no index");
        for dtype in [DType::F32, DType::BF16] {
            let colours = Pixels::imagenet(dtype, &Device::Cpu);
            let half_grey = Pixels { mean: vec![0.5], ..colours.clone() };
            let grey = Pixels { std: vec![0.5], ..half_grey.clone() };
            for pixels in [colours, half_grey, grey] {
                let table = Table::new(pixels.clone(), c).unwrap();
                let want = first.iter().enumerate().map(|(i, &byte)| {
                    let channel = i / (h * w) % c;
                    let mean = pixels.mean[channel % pixels.mean.len()];
                    let std = pixels.std[channel % pixels.std.len()];
                    (f64::from(byte) / 255.0 - f64::from(mean)) / f64::from(std)
                });
                let want = Tensor::from_vec(want.collect(), &shape, &Device::Cpu).unwrap();
                let want = want.to_dtype(dtype).unwrap();
                let layouts = [(&first, Layout::ChannelsFirst), (&last, Layout::ChannelsLast)];
                for (bytes, layout) in layouts {
                    let images = || bytes.chunks_exact(c * h * w);
                    assert_same(&table.look_up(images(), layout, shape).unwrap(), &want);
                    assert_same(&table.look_up_there(images(), layout, shape).unwrap(), &want);
                }
            }
        }
    }

    #[test]
    fn constants_that_are_not_one_a_channel_are_refused() {
        let pixels = Pixels::imagenet(DType::F32, &Device::Cpu);
        let error = Table::new(pixels, 1).unwrap_err();
        assert!(
            matches!(error, Error::PerChannel { n_means: 3, n_stds: 3, n_channels: 1 }),
            "{error}"
        );
        let none = Pixels { mean: vec![], ..Pixels::digits(DType::F32, &Device::Cpu) };
        assert!(matches!(Table::new(none, 1), Err(Error::PerChannel { n_means: 0, .. })));
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

use super::{Image, convert::Channels};
use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// `(byte / 255 - mean) / std`, each channel by its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalise {
    values: Vec<[f32; 256]>,
}

impl Normalise {
    /// With one mean and one standard deviation for each channel.
    /// # Errors
    /// If they are not one each for `channels`, or give no finite values.
    pub fn new(channels: Channels, mean: &[f32], std: &[f32]) -> Result<Self> {
        if mean.len() != channels.count() || std.len() != channels.count() {
            return Err(Error::PerChannel {
                n_channels: channels.count(),
                n_means: mean.len(),
                n_stds: std.len(),
            });
        }
        let table = |(&mean, &std): (&f32, &f32)| {
            let value =
                |byte: usize| ((byte as f64 / 255.0 - f64::from(mean)) / f64::from(std)) as f32;
            let values: [f32; 256] = std::array::from_fn(value);
            // NaN and infinity fail here too.
            match std > 0.0 && values[0].is_finite() && values[255].is_finite() {
                true => Ok(values),
                false => Err(Error::Normalisation { mean, std }),
            }
        };
        Ok(Self { values: mean.iter().zip(std).map(table).collect::<Result<_>>()? })
    }

    /// The means and deviations of ImageNet's colours.
    pub fn imagenet() -> Self {
        let mean = [0.485, 0.456, 0.406];
        let std = [0.229, 0.224, 0.225];
        Self::new(Channels::Rgb, &mean, &std).expect("three finite constants each")
    }

    /// Writes `image` as `[C, H, W]` into `out`.
    /// # Errors
    /// If the image has other channels, or `out` is not that long.
    pub fn write(&self, image: &Image, out: &mut [f32]) -> Result<()> {
        let n_channels = self.values.len();
        let [height, width] = image.size();
        if image.channels().count() != n_channels || out.len() != image.pixels().len() {
            return Err(Error::ImageBytes { height, width, n_channels, n_bytes: out.len() as u64 });
        }
        for (channel, plane) in out.chunks_exact_mut(height * width).enumerate() {
            let table = &self.values[channel];
            let bytes = image.pixels()[channel..].iter().step_by(n_channels);
            plane
                .iter_mut()
                .zip(bytes)
                .for_each(|(value, &byte)| *value = table[usize::from(byte)]);
        }
        Ok(())
    }

    /// `image` as a tensor `[C, H, W]` of `dtype` on `device`.
    /// # Errors
    /// If the image has other channels, or candle refuses.
    pub fn to_tensor(&self, image: &Image, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut values = vec![0.0; image.pixels().len()];
        self.write(image, &mut values)?;
        let [height, width] = image.size();
        let tensor = Tensor::from_vec(values, (self.values.len(), height, width), &Device::Cpu)?;
        Ok(tensor.to_dtype(dtype)?.to_device(device)?)
    }
}

//! Images: decoding, resizing, random changes and normalising, one at a time.
//!
//! ```
//! use std::path::Path;
//! use tallow_data::image::{Augment, Channels, Decode, Filter, Image, apply, decode, encode_png};
//!
//! let grey = Image::new([2, 3], Channels::Grey, vec![0, 50, 100, 150, 200, 250])?;
//! let file = encode_png(&grey)?;
//! let image = decode(Path::new("a.png"), &file, &Decode::rgb())?;
//! assert_eq!((image.size(), image.channels()), ([2, 3], Channels::Rgb));
//! let changes = [Augment::ShortSide { pixels: 8, filter: Filter::Bilinear }, Augment::Flip { probability: 0.5 }];
//! assert_eq!(apply(&changes, image, 7)?.size(), [8, 12]);
//! # Ok::<(), tallow_data::Error>(())
//! ```

mod augment;
mod convert;
mod decode;
mod key;
mod normalise;
mod orient;
mod resize;
pub use self::{
    augment::{Augment, apply},
    convert::Channels,
    decode::{Decode, Format, decode, decode_bytes, decoding_bytes, probe},
    key::sample_key,
    normalise::Normalise,
    resize::{Filter, Region, resize},
};
use crate::error::{Error, Result};
use std::borrow::Cow;

// H height · W width · C channels
/// Pixels `[H, W, C]`, a byte each, 0 to 255.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    size: [usize; 2],
    channels: Channels,
    pixels: Vec<u8>,
}

impl Image {
    /// An image of `size` `[H, W]` from its bytes.
    /// # Errors
    /// If there are more or fewer, or none.
    pub fn new(size: [usize; 2], channels: Channels, pixels: Vec<u8>) -> Result<Self> {
        let [height, width] = size;
        let n_bytes = height.checked_mul(width).and_then(|n| n.checked_mul(channels.count()));
        match n_bytes == Some(pixels.len()) && !pixels.is_empty() {
            true => Ok(Self { size, channels, pixels }),
            false => Err(Error::ImageBytes {
                height,
                width,
                n_channels: channels.count(),
                n_bytes: pixels.len() as u64,
            }),
        }
    }

    /// `[H, W]`.
    pub fn size(&self) -> [usize; 2] {
        self.size
    }

    /// What a pixel consists of.
    pub fn channels(&self) -> Channels {
        self.channels
    }

    /// Row-major, channels innermost.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// The bytes, without a copy.
    pub fn into_pixels(self) -> Vec<u8> {
        self.pixels
    }

    /// The same picture of other channels. Holds both, unless they are as many.
    pub fn with_channels(self, channels: Channels) -> Self {
        let pixels = convert::convert(self.pixels, self.channels.count(), channels);
        Self { channels, pixels, ..self }
    }

    fn row_bytes(&self) -> usize {
        self.size[1] * self.channels.count()
    }
}

/// `image` as a PNG file.
/// # Errors
/// If it has more rows or columns than the format can say.
pub fn encode_png(image: &Image) -> Result<Vec<u8>> {
    let [height, width] = image.size;
    let too_large = || Error::Size { height, width };
    let width = u32::try_from(width).map_err(|_| too_large())?;
    let height = u32::try_from(height).map_err(|_| too_large())?;
    let mut content = Vec::new();
    let mut encoder = png::Encoder::new(&mut content, width, height);
    encoder.set_color(match image.channels {
        Channels::Grey => png::ColorType::Grayscale,
        Channels::Rgb | Channels::Rgbx => png::ColorType::Rgb,
        Channels::Rgba => png::ColorType::Rgba,
    });
    let pixels = match image.channels {
        Channels::Rgbx => Cow::Owned(image.clone().with_channels(Channels::Rgb).pixels),
        _ => Cow::Borrowed(&image.pixels[..]),
    };
    let write =
        |encoder: png::Encoder<'_, &mut Vec<u8>>| encoder.write_header()?.write_image_data(&pixels);
    write(encoder).map_err(|_| too_large())?;
    Ok(content)
}

/// What a pixel consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channels {
    /// Brightness.
    Grey,
    /// Red, green, blue.
    Rgb,
    /// Red, green, blue and opacity.
    Rgba,
    /// Red, green, blue and a byte without meaning: what is decoded and scaled fastest.
    Rgbx,
}

impl Channels {
    /// C.
    pub const fn count(self) -> usize {
        match self {
            Self::Grey => 1,
            Self::Rgb => 3,
            Self::Rgba | Self::Rgbx => 4,
        }
    }
}

/// Brightness by ITU-R BT.601, in sixteenth bits of fixed point, rounded.
fn luma([r, g, b]: [u8; 3]) -> u8 {
    ((19595 * u32::from(r) + 38470 * u32::from(g) + 7471 * u32::from(b) + 0x8000) >> 16) as u8
}

/// Pixels of `n_from` channels (1 grey, 2 with opacity, 3 colour, 4 with opacity) as `to`.
///
/// Grey becomes three equal colours; opacity is dropped, or 255 where it is asked for and not there.
pub(super) fn convert(pixels: Vec<u8>, n_from: usize, to: Channels) -> Vec<u8> {
    if n_from == to.count() {
        return pixels;
    }
    let n_pixels = pixels.len() / n_from;
    let mut out = Vec::with_capacity(n_pixels * to.count());
    for pixel in pixels.chunks_exact(n_from) {
        let (rgb, opacity) = match *pixel {
            [grey] => ([grey; 3], 255),
            [grey, opacity] => ([grey; 3], opacity),
            [r, g, b] => ([r, g, b], 255),
            [r, g, b, opacity] => ([r, g, b], opacity),
            _ => unreachable!("decoders give one to four channels"),
        };
        match to {
            Channels::Grey if n_from <= 2 => out.push(rgb[0]),
            Channels::Grey => out.push(luma(rgb)),
            Channels::Rgb => out.extend(rgb),
            Channels::Rgba | Channels::Rgbx => out.extend([rgb[0], rgb[1], rgb[2], opacity]),
        }
    }
    out
}

/// Big-endian 16-bit samples as 8-bit ones: `v * 255 / 65535`, rounded.
pub(super) fn narrow(samples: &[u8]) -> Vec<u8> {
    let (pairs, _) = samples.as_chunks::<2>();
    let narrow = |&pair: &[u8; 2]| ((u32::from(u16::from_be_bytes(pair)) + 128) / 257) as u8;
    pairs.iter().map(narrow).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_are_scaled_not_cut() {
        for value in 0..=u16::MAX {
            let want = (f64::from(value) * 255.0 / 65535.0).round() as u8;
            assert_eq!(narrow(&value.to_be_bytes()), [want]);
        }
    }

    #[test]
    fn white_stays_white() {
        assert_eq!(convert(vec![255; 3], 3, Channels::Grey), [255]);
        assert_eq!(convert(vec![9, 8], 2, Channels::Rgba), [9, 9, 9, 8]);
        assert_eq!(convert(vec![1, 2, 3, 4], 4, Channels::Rgb), [1, 2, 3]);
    }
}

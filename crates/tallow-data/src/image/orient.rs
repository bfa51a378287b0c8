//! Which way up a picture is: the orientation in EXIF metadata.
//!
//! Source: CIPA DC-008, "Exchangeable image file format", tag 0x0112.

use super::Image;

/// How stored rows and columns lie in the picture as it was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Orientation {
    /// Stored rows are columns.
    is_turned: bool,
    /// The first stored row is the last.
    rows_reversed: bool,
    columns_reversed: bool,
}

impl Orientation {
    /// By its number in the standard: 1 is as stored, and so is what is none of 2 to 8.
    const fn numbered(number: u16) -> Self {
        Self {
            is_turned: matches!(number, 5..=8),
            rows_reversed: matches!(number, 3 | 4 | 6 | 7),
            columns_reversed: matches!(number, 2 | 3 | 7 | 8),
        }
    }

    /// What the metadata of an image say; as stored where they say nothing that can be read.
    pub(super) fn of(exif: Option<&[u8]>) -> Self {
        Self::numbered(exif.and_then(number).unwrap_or(1))
    }

    /// The size `[H, W]` of the picture that is stored as `size`.
    pub(super) const fn size(self, [height, width]: [usize; 2]) -> [usize; 2] {
        if self.is_turned { [width, height] } else { [height, width] }
    }

    /// The picture that is stored as `image`. Holds both, unless nothing is to be done.
    pub(super) fn upright(self, image: Image) -> Image {
        if self == Self::default() {
            return image;
        }
        let (n_channels, row_bytes) = (image.channels.count(), image.row_bytes());
        let [stored_height, stored_width] = image.size;
        let [height, width] = self.size(image.size);
        let mut pixels = Vec::with_capacity(image.pixels.len());
        for y in 0..height {
            for x in 0..width {
                let (row, column) = if self.is_turned { (x, y) } else { (y, x) };
                let row = if self.rows_reversed { stored_height - 1 - row } else { row };
                let column = if self.columns_reversed { stored_width - 1 - column } else { column };
                let at = row * row_bytes + column * n_channels;
                pixels.extend_from_slice(&image.pixels[at..at + n_channels]);
            }
        }
        Image { size: [height, width], pixels, ..image }
    }
}

/// The number in the first directory of the TIFF structure that EXIF metadata are.
fn number(exif: &[u8]) -> Option<u16> {
    const ORIENTATION: u16 = 0x0112;
    const SHORT: u16 = 3;
    const ENTRY_BYTES: usize = 12;
    let tiff = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    let is_little = match tiff.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let two = |at: usize| {
        let bytes = *tiff.get(at..)?.first_chunk::<2>()?;
        Some(if is_little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let four = |at: usize| {
        let bytes = *tiff.get(at..)?.first_chunk::<4>()?;
        Some(if is_little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) })
    };
    let directory = usize::try_from(four(4)?).ok()?;
    let entries = directory.checked_add(2)?;
    let entry = (0..usize::from(two(directory)?))
        .map_while(|place| entries.checked_add(place * ENTRY_BYTES))
        .find(|&entry| two(entry) == Some(ORIENTATION))?;
    (two(entry + 2)? == SHORT).then(|| two(entry + 8))?
}

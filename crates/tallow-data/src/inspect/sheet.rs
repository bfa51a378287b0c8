use crate::{
    error::{Error, Result},
    formats::Encoded,
    image::{Channels, Decode, Filter, Image, Region, decode, encode_png, resize},
    source::Source,
};

/// How a contact sheet is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sheet {
    /// Images side by side.
    pub columns: usize,
    /// Rows of images at most.
    pub rows: usize,
    /// Height and width of each.
    pub cell_pixels: usize,
}

impl Sheet {
    /// Eight by eight, 96 pixels each.
    pub const fn small() -> Self {
        Self { columns: 8, rows: 8, cell_pixels: 96 }
    }
}

/// Images of `source`, evenly spaced over it, side by side, as a PNG file; a bad one is a red cell.
///
/// Holds the sheet and one image.
/// # Errors
/// If the source is empty or the sheet has no size.
pub fn contact_sheet(source: &impl Source<Item = Encoded>, sheet: Sheet) -> Result<Vec<u8>> {
    let image = |index| {
        let encoded = source.get(index)?;
        decode(&encoded.path, &encoded.bytes, &Decode::rgb())
    };
    sheet_of(source.n_samples(), image, sheet)
}

/// [`contact_sheet`] of `n_samples` images of three colours.
pub(super) fn sheet_of(
    n_samples: u64,
    image: impl Fn(u64) -> Result<Image>,
    sheet: Sheet,
) -> Result<Vec<u8>> {
    let Sheet { columns, rows, cell_pixels } = sheet;
    let n_shown = n_samples.min((columns * rows) as u64);
    if n_shown == 0 || cell_pixels == 0 {
        return Err(Error::EmptySet);
    }
    let n_rows = (n_shown as usize).div_ceil(columns);
    let (row_bytes, width) = (columns * cell_pixels * 3, columns * cell_pixels);
    let mut pixels = vec![255; n_rows * cell_pixels * row_bytes];
    for place in 0..n_shown {
        // Evenly spaced, and never beyond the last: in 128 bits the product cannot overflow.
        let index = (u128::from(place) * u128::from(n_samples) / u128::from(n_shown)) as u64;
        let cell = cell(image(index), cell_pixels)?;
        let (row, column) = (place as usize / columns, place as usize % columns);
        let first = row * cell_pixels * row_bytes + column * cell_pixels * 3;
        for (line, bytes) in cell.pixels().chunks_exact(cell_pixels * 3).enumerate() {
            let to = first + line * row_bytes;
            pixels[to..to + bytes.len()].copy_from_slice(bytes);
        }
    }
    encode_png(&Image::new([n_rows * cell_pixels, width], Channels::Rgb, pixels)?)
}

fn cell(decoded: Result<Image>, side: usize) -> Result<Image> {
    let cut = decoded.and_then(|image| {
        let [height, width] = image.size();
        let short = height.min(width);
        let (top, left) = ((height - short) / 2, (width - short) / 2);
        let middle = Region { top, left, size: [short, short] };
        resize(&image, middle, [side, side], Filter::Bilinear)
    });
    match cut {
        Ok(image) => Ok(image),
        Err(_) => Image::new([side, side], Channels::Rgb, [200, 0, 0].repeat(side * side)),
    }
}

use super::{Image, convert::Channels};
use crate::error::{Error, Result};
use fast_image_resize::{
    FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer,
    images::{Image as Pixels, ImageRef},
};

/// How pixels between pixels are found. All but the first look at every pixel they cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the filters")]
pub enum Filter {
    Nearest,
    Bilinear,
    Bicubic,
    Lanczos,
}

/// A part of an image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Region {
    /// First row.
    pub top: usize,
    /// First column.
    pub left: usize,
    /// `[H, W]`.
    pub size: [usize; 2],
}

impl Region {
    /// All of an image of `size`.
    pub const fn whole(size: [usize; 2]) -> Self {
        Self { top: 0, left: 0, size }
    }
}

/// The `region` of `image` in another `size`, `[H, W]`. Holds the result and, inside, rows of the
/// result's width for the region's height.
/// # Errors
/// If the region is not within the image, or a size is 0 or above 2^32.
pub fn resize(image: &Image, region: Region, size: [usize; 2], filter: Filter) -> Result<Image> {
    let [height, width] = size;
    let wrong = || Error::Size { height, width };
    let [rows, columns] = image.size();
    let is_inside = region.top.checked_add(region.size[0]).is_some_and(|end| end <= rows)
        && region.left.checked_add(region.size[1]).is_some_and(|end| end <= columns);
    if !is_inside || region.size.contains(&0) {
        return Err(Error::Region { region: Box::new(region), height: rows, width: columns });
    }
    let [height, width] = [height, width].map(|side| u32::try_from(side).unwrap_or(0));
    if height == 0 || width == 0 {
        return Err(wrong());
    }
    if region.size == size {
        return crop(image, region);
    }
    let kind = match image.channels() {
        Channels::Grey => PixelType::U8,
        Channels::Rgb => PixelType::U8x3,
        Channels::Rgba => PixelType::U8x4,
    };
    let algorithm = match filter {
        Filter::Nearest => ResizeAlg::Nearest,
        Filter::Bilinear => ResizeAlg::Convolution(FilterType::Bilinear),
        Filter::Bicubic => ResizeAlg::Convolution(FilterType::CatmullRom),
        Filter::Lanczos => ResizeAlg::Convolution(FilterType::Lanczos3),
    };
    let from =
        ImageRef::new(columns as u32, rows as u32, image.pixels(), kind).map_err(|_| wrong())?;
    let mut to = Pixels::new(width, height, kind);
    let [left, top, columns, rows] =
        [region.left, region.top, region.size[1], region.size[0]].map(|n| n as f64);
    let options = ResizeOptions::new().resize_alg(algorithm).crop(left, top, columns, rows);
    Resizer::new().resize(&from, &mut to, &options).map_err(|_| wrong())?;
    Image::new(size, image.channels(), to.into_vec())
}

/// Copies the `region`, which lies within the image.
fn crop(image: &Image, region: Region) -> Result<Image> {
    let n_channels = image.channels().count();
    let [height, width] = region.size;
    let mut pixels = Vec::with_capacity(height * width * n_channels);
    let rows = image.pixels().chunks_exact(image.row_bytes());
    for row in rows.skip(region.top).take(height) {
        let first = region.left * n_channels;
        pixels.extend_from_slice(&row[first..first + width * n_channels]);
    }
    Image::new(region.size, image.channels(), pixels)
}

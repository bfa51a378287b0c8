use super::{Image, convert::Channels};
use crate::error::{Error, Result};
use fast_image_resize::{
    FilterType, ResizeAlg, ResizeOptions, Resizer,
    images::{TypedImage, TypedImageRef},
    pixels::U8x4,
};
use std::borrow::Cow;

/// Largest result of a resize: a thin image scaled by its short side could ask for any size.
const MOST_PIXELS: usize = 1 << 28;

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

/// The `region` of `image` in another `size`, `[H, W]`. Holds the result, and the region and the
/// result in four bytes a pixel unless it is all of an image that has four.
/// # Errors
/// If the region is not within the image, or the result has no pixels or more than 2^28.
pub fn resize(image: &Image, region: Region, size: [usize; 2], filter: Filter) -> Result<Image> {
    let [height, width] = size;
    let wrong = || Error::Size { height, width };
    let [rows, columns] = image.size();
    let is_inside = region.top.checked_add(region.size[0]).is_some_and(|end| end <= rows)
        && region.left.checked_add(region.size[1]).is_some_and(|end| end <= columns);
    if !is_inside || region.size.contains(&0) {
        return Err(Error::Region { region: Box::new(region), height: rows, width: columns });
    }
    let n_pixels = height.checked_mul(width);
    if n_pixels.is_none_or(|n| n == 0 || n > MOST_PIXELS) {
        return Err(wrong());
    }
    if region.size == size {
        return crop(image, region);
    }
    let algorithm = match filter {
        Filter::Nearest => ResizeAlg::Nearest,
        Filter::Bilinear => ResizeAlg::Convolution(FilterType::Bilinear),
        Filter::Bicubic => ResizeAlg::Convolution(FilterType::CatmullRom),
        Filter::Lanczos => ResizeAlg::Convolution(FilterType::Lanczos3),
    };
    // Only real opacity weighs the colours.
    let use_alpha = image.channels() == Channels::Rgba;
    let options = ResizeOptions::new().resize_alg(algorithm).use_alpha(use_alpha);
    let to = resize_quads(&quads(image, region), region.size, size, &options).ok_or_else(wrong)?;
    Image::new(size, image.channels(), without_padding(to, image.channels()))
}

/// The `region`'s pixels as four bytes each, grey and colour padded. A part is copied: what is beside
/// it must not shine in.
fn quads(image: &Image, region: Region) -> Cow<'_, [u8]> {
    if image.channels().count() == 4 && region == Region::whole(image.size()) {
        return Cow::Borrowed(image.pixels());
    }
    let n_channels = image.channels().count();
    let mut out = Vec::with_capacity(region.size[0] * region.size[1] * 4);
    let rows = image.pixels().chunks_exact(image.row_bytes());
    for row in rows.skip(region.top).take(region.size[0]) {
        let first = region.left * n_channels;
        let row = &row[first..first + region.size[1] * n_channels];
        match image.channels() {
            Channels::Grey => row.iter().for_each(|&grey| out.extend([grey, 0, 0, 255])),
            Channels::Rgb => {
                let (pixels, _) = row.as_chunks::<3>();
                pixels.iter().for_each(|&[r, g, b]| out.extend([r, g, b, 255]));
            }
            Channels::Rgba | Channels::Rgbx => out.extend_from_slice(row),
        }
    }
    Cow::Owned(out)
}

fn without_padding(quads: Vec<u8>, channels: Channels) -> Vec<u8> {
    let (pixels, _) = quads.as_chunks::<4>();
    match channels {
        Channels::Grey => pixels.iter().map(|pixel| pixel[0]).collect(),
        Channels::Rgb => pixels.iter().flat_map(|&[r, g, b, _]| [r, g, b]).collect(),
        Channels::Rgba | Channels::Rgbx => quads,
    }
}

/// The library is generic and compiled into this crate for each kind of pixel, a minute each: pixels
/// of four bytes, its fastest, are the only kind that is asked for.
fn resize_quads(
    quads: &[u8],
    from: [usize; 2],
    to: [usize; 2],
    options: &ResizeOptions,
) -> Option<Vec<u8>> {
    let [rows, columns] = from.map(|side| side as u32);
    let from = TypedImageRef::<U8x4>::from_buffer(columns, rows, quads).ok()?;
    let mut pixels = vec![0; to[0] * to[1] * 4];
    let mut to = TypedImage::<U8x4>::from_buffer(to[1] as u32, to[0] as u32, &mut pixels).ok()?;
    Resizer::new().resize_typed(&from, &mut to, options).ok()?;
    Some(pixels)
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

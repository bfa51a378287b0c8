use super::{
    Image,
    key::Draws,
    resize::{Filter, Region, resize},
};
use crate::error::Result;

/// A change of an image. What is random in it depends on the sample's key and its place in the list
/// of changes, and on nothing else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Augment {
    /// To `size`, `[H, W]`, whatever the shape was.
    Resize {
        /// `[H, W]`.
        size: [usize; 2],
        /// How.
        filter: Filter,
    },
    /// The shorter side becomes `pixels` long, the shape stays.
    ShortSide {
        /// Length of the shorter side.
        pixels: usize,
        /// How.
        filter: Filter,
    },
    /// The middle `size`; what is missing is black.
    CenterCrop {
        /// `[H, W]`.
        size: [usize; 2],
    },
    /// A random part, resized: the augmentation of ImageNet training.
    RandomResizedCrop {
        /// `[H, W]` of the result.
        size: [usize; 2],
        /// Least and largest share of the area.
        area: [f64; 2],
        /// Least and largest width over height; drawn evenly in its logarithm.
        aspect: [f64; 2],
        /// How.
        filter: Filter,
    },
    /// A random part of `size` of the image with a black border of `padding` pixels.
    RandomCrop {
        /// `[H, W]`.
        size: [usize; 2],
        /// Pixels added on each side.
        padding: usize,
    },
    /// Left and right are exchanged, or not.
    Flip {
        /// How often.
        probability: f64,
    },
}

impl Augment {
    /// [`Augment::RandomResizedCrop`] with the usual ranges: 8 % to all of the area, 3:4 to 4:3.
    pub const fn random_resized_crop(size: [usize; 2]) -> Self {
        let (area, aspect) = ([0.08, 1.0], [3.0 / 4.0, 4.0 / 3.0]);
        Self::RandomResizedCrop { size, area, aspect, filter: Filter::Bilinear }
    }
}

/// Applies `changes` in their order; `key` is the sample's, see [`sample_key`](super::sample_key).
/// # Errors
/// If a size is 0.
pub fn apply(changes: &[Augment], image: Image, key: u64) -> Result<Image> {
    changes.iter().zip(0..).try_fold(image, |image, (change, place)| {
        let mut draws = Draws::new(key, place);
        match *change {
            Augment::Resize { size, .. } | Augment::CenterCrop { size } if size == image.size() => {
                Ok(image)
            }
            Augment::Resize { size, filter } => {
                resize(&image, Region::whole(image.size()), size, filter)
            }
            Augment::ShortSide { pixels, filter } => {
                let size = short_side(image.size(), pixels);
                resize(&image, Region::whole(image.size()), size, filter)
            }
            Augment::CenterCrop { size } => {
                let [top, left] = [0, 1].map(|i| middle(image.size()[i], size[i]));
                window(&image, [top, left], size)
            }
            Augment::RandomResizedCrop { size, area, aspect, filter } => {
                let region = random_region(image.size(), area, aspect, &mut draws);
                resize(&image, region, size, filter)
            }
            Augment::RandomCrop { size, padding } => {
                let corner = [0, 1].map(|i| {
                    let room = (image.size()[i] + 2 * padding).saturating_sub(size[i]);
                    draws.below(room + 1) as i64 - padding as i64
                });
                window(&image, corner, size)
            }
            Augment::Flip { probability } if draws.unit() < probability => Ok(flipped(image)),
            Augment::Flip { .. } => Ok(image),
        }
    })
}

fn short_side([height, width]: [usize; 2], pixels: usize) -> [usize; 2] {
    let other = |long: usize, short: usize| {
        let product = long as u128 * pixels as u128;
        usize::try_from(product / short.max(1) as u128).unwrap_or(usize::MAX)
    };
    match height <= width {
        true => [pixels, other(width, height)],
        false => [other(height, width), pixels],
    }
}

fn middle(whole: usize, part: usize) -> i64 {
    (whole as i64 - part as i64).div_euclid(2)
}

/// Ten tries for a part of the asked area and aspect that lies inside; else the middle one whose
/// aspect is nearest.
fn random_region(size: [usize; 2], area: [f64; 2], aspect: [f64; 2], draws: &mut Draws) -> Region {
    let [height, width] = size;
    let whole = height as f64 * width as f64;
    for _ in 0..10 {
        let target = whole * draws.between(area[0], area[1]);
        let ratio = draws.between(aspect[0].ln(), aspect[1].ln()).exp();
        let columns = (target * ratio).sqrt().round() as usize;
        let rows = (target / ratio).sqrt().round() as usize;
        if (1..=height).contains(&rows) && (1..=width).contains(&columns) {
            let (top, left) = (draws.below(height - rows + 1), draws.below(width - columns + 1));
            return Region { top, left, size: [rows, columns] };
        }
    }
    let ratio =
        (width as f64 / height as f64).clamp(aspect[0].min(aspect[1]), aspect[1].max(aspect[0]));
    let rows = height.min((width as f64 / ratio).round() as usize).max(1);
    let columns = width.min((rows as f64 * ratio).round() as usize).max(1);
    Region { top: (height - rows) / 2, left: (width - columns) / 2, size: [rows, columns] }
}

/// The `size` from `[top, left]` on, which may lie outside; what is outside is black.
fn window(image: &Image, [top, left]: [i64; 2], size: [usize; 2]) -> Result<Image> {
    let n_channels = image.channels().count();
    let [height, width] = size;
    let is_inside = |first: i64, n: usize, whole: usize| {
        usize::try_from(first)
            .ok()
            .and_then(|first| first.checked_add(n))
            .is_some_and(|end| end <= whole)
    };
    if is_inside(top, height, image.size()[0]) && is_inside(left, width, image.size()[1]) {
        let region = Region { top: top as usize, left: left as usize, size };
        return resize(image, region, size, Filter::Nearest);
    }
    let n_bytes = height.checked_mul(width).and_then(|n| n.checked_mul(n_channels));
    let n_bytes = n_bytes.filter(|&n| n > 0 && isize::try_from(n).is_ok());
    let mut pixels = vec![0; n_bytes.ok_or(crate::Error::Size { height, width })?];
    let columns = (-left).max(0)..(image.size()[1] as i64 - left).min(width as i64);
    for row in 0..height {
        let from = top + row as i64;
        if from < 0 || from >= image.size()[0] as i64 || columns.is_empty() {
            continue;
        }
        let first =
            from as usize * image.row_bytes() + (left + columns.start) as usize * n_channels;
        let n_bytes = (columns.end - columns.start) as usize * n_channels;
        let to = row * width * n_channels + columns.start as usize * n_channels;
        pixels[to..to + n_bytes].copy_from_slice(&image.pixels()[first..first + n_bytes]);
    }
    Image::new(size, image.channels(), pixels)
}

fn flipped(mut image: Image) -> Image {
    let (row_bytes, n_channels) = (image.row_bytes(), image.channels().count());
    for row in image.pixels.chunks_exact_mut(row_bytes) {
        let (mut first, mut last) = (0, image.size[1] - 1);
        while first < last {
            (0..n_channels).for_each(|c| row.swap(first * n_channels + c, last * n_channels + c));
            (first, last) = (first + 1, last - 1);
        }
    }
    image
}

use crate::{
    error::{Error, Result},
    folder,
    idx::{self, IdxBytes, IdxFault},
};
use std::{borrow::Cow, path::Path, sync::Arc};

// N images · H height · W width
/// Bytes an [`ImageSet`] of `n_images` holds: a byte a pixel, a byte a label.
pub const fn set_bytes(n_images: u64, height: u64, width: u64) -> u64 {
    n_images * (height * width + 1)
}

/// Grey images `[N, 1, H, W]` and their labels `[N]`, in memory, a byte each.
///
/// A clone or a [`split`](ImageSet::split) is another view of the same bytes; the last view frees them.
#[derive(Clone, Debug)]
pub struct ImageSet {
    store: Arc<Store>,
    first: usize,
    n_images: usize,
    n_classes: usize,
}

#[derive(Debug)]
struct Store {
    images: Cow<'static, [u8]>,
    labels: Cow<'static, [u8]>,
    height: usize,
    width: usize,
}

impl ImageSet {
    /// The embedded 10 000 handwritten digits, 28x28, of MNIST (Y. LeCun, C. Cortes, C. Burges).
    ///
    /// Decompresses 7.85 MB at every call: keep the set, or clone it.
    ///
    /// # Errors
    /// None, unless the binary was damaged.
    pub fn digits() -> Result<Self> {
        let images_path = Path::new("mnist-10k-images-idx3-ubyte.gz");
        let labels_path = Path::new("mnist-10k-labels-idx1-ubyte.gz");
        let images = include_bytes!("../data/mnist-10k-images-idx3-ubyte.gz");
        let labels = include_bytes!("../data/mnist-10k-labels-idx1-ubyte.gz");
        let images = idx::parse_u8(images_path, images, 3)?;
        let labels = idx::parse_u8(labels_path, labels, 1)?;
        Self::from_arrays(images_path, images, labels_path, labels)?.with_classes(10)
    }

    /// The images and labels of two IDX files, plain or gzip.
    ///
    /// Classes are counted as the largest label + 1; say how many there are, and have the labels
    /// checked, with [`ImageSet::with_classes`]. Holds [`set_bytes`], up to twice that while it reads.
    ///
    /// # Errors
    /// If a file is missing or not such an array, or the counts differ.
    pub fn from_idx(images_path: impl AsRef<Path>, labels_path: impl AsRef<Path>) -> Result<Self> {
        let (images_path, labels_path) = (images_path.as_ref(), labels_path.as_ref());
        let images = idx::read_u8(images_path, 3)?;
        let labels = idx::read_u8(labels_path, 1)?;
        Self::from_arrays(images_path, images, labels_path, labels)
    }

    /// [`ImageSet::from_idx`] of the files `*images*idx3-ubyte[.gz]` and `*labels*idx1-ubyte[.gz]` in `folder`.
    ///
    /// # Errors
    /// If the folder does not hold exactly one of each, and those of [`ImageSet::from_idx`].
    pub fn open_dir(folder: impl AsRef<Path>) -> Result<Self> {
        let (images_path, labels_path) = folder::find_idx_pair(folder.as_ref())?;
        Self::from_idx(images_path, labels_path)
    }

    /// Images given as bytes, `height * width` for each label. Takes the bytes, copies none.
    ///
    /// # Errors
    /// If there are more or fewer bytes, or images of no pixels.
    pub fn from_pixels(
        images: impl Into<Cow<'static, [u8]>>,
        labels: impl Into<Cow<'static, [u8]>>,
        [height, width]: [usize; 2],
    ) -> Result<Self> {
        let (images, labels) = (images.into(), labels.into());
        let n_images = labels.len();
        let need_bytes =
            height.checked_mul(width).and_then(|n_pixels| n_pixels.checked_mul(n_images));
        if height == 0 || width == 0 || need_bytes != Some(images.len()) {
            let (n_bytes, n_labels) = (images.len() as u64, n_images as u64);
            return Err(Error::Pixels { n_bytes, n_labels, height, width });
        }
        let n_classes = labels.iter().max().map_or(0, |&largest| usize::from(largest) + 1);
        let store = Arc::new(Store { images, labels, height, width });
        Ok(Self { store, first: 0, n_images, n_classes })
    }

    fn from_arrays(
        images_path: &Path,
        images: IdxBytes<'static>,
        labels_path: &Path,
        labels: IdxBytes<'static>,
    ) -> Result<Self> {
        let [n_images, height, width] = images.dims[..] else {
            unreachable!("images are read with rank 3")
        };
        if height == 0 || width == 0 {
            let fault =
                IdxFault::Dims { dims: images.dims.iter().map(|&dim| dim as u64).collect() };
            return Err(Error::Idx { path: images_path.to_owned(), fault });
        }
        let n_labels = labels.bytes.len();
        if n_images != n_labels {
            let (images_path, labels_path) = (images_path.to_owned(), labels_path.to_owned());
            let (n_images, n_labels) = (n_images as u64, n_labels as u64);
            return Err(Error::Counts { images_path, n_images, labels_path, n_labels });
        }
        Self::from_pixels(images.bytes, labels.bytes, [height, width])
    }

    /// The same images, each labelled with one of `n_classes`.
    ///
    /// # Errors
    /// At the first label that is not below `n_classes`.
    pub fn with_classes(self, n_classes: usize) -> Result<Self> {
        match self.labels().iter().position(|&label| usize::from(label) >= n_classes) {
            Some(index) => {
                Err(Error::Label { index: index as u64, label: self.label(index), n_classes })
            }
            None => Ok(Self { n_classes, ..self }),
        }
    }

    /// Views of the first `n_train` images and of the rest. Copies no pixel.
    ///
    /// # Errors
    /// If the set has fewer images.
    pub fn split(&self, n_train: usize) -> Result<(Self, Self)> {
        let Some(n_rest) = self.n_images.checked_sub(n_train) else {
            return Err(Error::Split { n_train: n_train as u64, n_images: self.n_images as u64 });
        };
        let train = Self { n_images: n_train, ..self.clone() };
        let rest = Self { first: self.first + n_train, n_images: n_rest, ..self.clone() };
        Ok((train, rest))
    }

    /// N: images in this view.
    pub fn n_images(&self) -> usize {
        self.n_images
    }

    /// H: rows of an image.
    pub fn height(&self) -> usize {
        self.store.height
    }

    /// W: columns of an image.
    pub fn width(&self) -> usize {
        self.store.width
    }

    /// Labels are below this.
    pub fn n_classes(&self) -> usize {
        self.n_classes
    }

    /// The `H * W` pixels of an image, row-major.
    ///
    /// # Panics
    /// If `index` is not below [`ImageSet::n_images`].
    pub fn image(&self, index: usize) -> &[u8] {
        assert!(index < self.n_images, "ImageSet::image: index {index} of {}", self.n_images);
        let n_pixels = self.store.height * self.store.width;
        let start = (self.first + index) * n_pixels;
        &self.store.images[start..start + n_pixels]
    }

    /// The label of an image.
    ///
    /// # Panics
    /// If `index` is not below [`ImageSet::n_images`].
    pub fn label(&self, index: usize) -> u8 {
        self.labels()[index]
    }

    /// The labels of this view.
    pub fn labels(&self) -> &[u8] {
        &self.store.labels[self.first..self.first + self.n_images]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digits_are_what_they_were() {
        let digits = ImageSet::digits().unwrap();
        assert_eq!(
            (digits.n_images(), digits.height(), digits.width(), digits.n_classes()),
            (10_000, 28, 28, 10)
        );
        assert_eq!(digits.labels()[..12], [9, 7, 2, 8, 4, 4, 0, 6, 0, 9, 7, 4]);
        let mut per_class = [0; 10];
        digits.labels().iter().for_each(|&label| per_class[usize::from(label)] += 1);
        assert_eq!(per_class, [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978]);
    }

    /// The constants of `Pixels::digits` are these moments, rounded to four digits.
    #[test]
    fn the_digits_have_the_moments_we_normalise_by() {
        let digits = ImageSet::digits().unwrap();
        let pixels = &digits.store.images;
        let n = pixels.len() as f64;
        let mean = pixels.iter().map(|&byte| f64::from(byte) / 255.0).sum::<f64>() / n;
        let variance =
            pixels.iter().map(|&byte| (f64::from(byte) / 255.0 - mean).powi(2)).sum::<f64>() / n;
        assert_eq!(format!("{mean:.4} {:.4}", variance.sqrt()), "0.1311 0.3087");
    }

    #[test]
    fn a_split_shares_the_bytes() {
        let set =
            ImageSet::from_pixels((0..12).collect::<Vec<u8>>(), vec![0, 1, 2], [2, 2]).unwrap();
        let (train, rest) = set.split(2).unwrap();
        assert_eq!((train.n_images(), rest.n_images(), rest.n_classes()), (2, 1, 3));
        assert_eq!((rest.image(0), rest.label(0)), (&[8, 9, 10, 11][..], 2));
        assert!(std::ptr::eq(rest.image(0), set.image(2)));
        let (none, all) = rest.split(0).unwrap();
        assert_eq!((none.n_images(), all.labels()), (0, &[2][..]));
        assert!(matches!(train.split(3), Err(Error::Split { n_train: 3, n_images: 2 })));
    }

    #[test]
    fn a_label_outside_is_named_by_its_place_in_the_view() {
        let set = ImageSet::from_pixels(vec![0; 4], vec![1, 0, 9, 4], [1, 1]).unwrap();
        let error = set.split(1).unwrap().1.with_classes(5).unwrap_err();
        assert_eq!(error.to_string(), "label 1 is 9, outside 0..5");
        assert_eq!(set.with_classes(10).unwrap().n_classes(), 10);
    }

    #[test]
    fn bytes_that_are_not_images_are_refused() {
        for (n_bytes, n_labels, size) in [
            (5, 1, [2, 2]),
            (3, 1, [2, 2]),
            (0, 0, [0, 3]),
            (0, 2, [0, 3]),
            (0, 4, [usize::MAX, 2]),
        ] {
            let error =
                ImageSet::from_pixels(vec![0; n_bytes], vec![0; n_labels], size).unwrap_err();
            assert!(matches!(error, Error::Pixels { .. }), "{error}");
        }
    }
}

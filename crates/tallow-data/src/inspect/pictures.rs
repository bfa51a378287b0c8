//! The images of a set. A header does not tell whether one is whole: each is decoded.

use super::Report;
#[cfg(feature = "images")]
use super::Sizes;
use crate::error::Result;
#[cfg(feature = "images")]
use crate::image::{Decode, Format, decode, probe};
use std::path::Path;

/// Members of a tar shard that hold an image.
#[cfg(feature = "tar")]
pub(super) const IMAGE_ENDINGS: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

/// What was seen so far.
#[derive(Debug, Default)]
pub(super) struct Pictures {
    #[cfg(feature = "images")]
    formats: [u64; 3],
    #[cfg(feature = "images")]
    sizes: Sizes,
}

#[cfg(feature = "images")]
impl Pictures {
    /// Decodes one, which errors call `name`.
    pub(super) fn look(&mut self, name: &Path, content: &[u8]) -> Result<()> {
        let image = decode(name, content, &Decode::rgb())?;
        let (format, _) = probe(name, content, &Decode::rgb())?;
        self.formats[format as usize] += 1;
        self.sizes.add(&image.size().map(|side| side as u64));
        Ok(())
    }

    /// Adds their sizes to the report, and how many files have which format where they are files.
    pub(super) fn tell(self, report: &mut Report, are_files: bool) {
        for (format, n) in [Format::Jpeg, Format::Png, Format::Webp].into_iter().zip(self.formats) {
            if n > 0 && are_files {
                report.field(format.to_string(), "U8", format!("{n} files"));
            }
        }
        if self.formats != [0; 3] {
            report.field("image", "U8", self.sizes.text());
        }
    }
}

/// Whether `content` starts like an image.
#[cfg(all(feature = "images", feature = "parquet"))]
pub(super) fn is_image(content: &[u8]) -> bool {
    Format::of(content).is_some()
}

/// This build decodes none.
#[cfg(not(feature = "images"))]
impl Pictures {
    pub(super) fn look(&mut self, _: &Path, _: &[u8]) -> Result<()> {
        Ok(())
    }

    pub(super) fn tell(self, _: &mut Report, _: bool) {}
}

#[cfg(all(not(feature = "images"), feature = "parquet"))]
pub(super) fn is_image(_: &[u8]) -> bool {
    false
}

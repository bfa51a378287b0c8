//! What is at a path: kind, count, shapes, bytes, and which samples are bad.
//!
//! Every sample is read once, one at a time. *Memory:* what the source holds, one sample, and the
//! report, whose lists are bounded.

mod kinds;
mod open;
mod pictures;
#[cfg(feature = "images")]
mod sheet;
#[cfg(feature = "images")]
mod shown;
#[cfg(feature = "images")]
pub use self::sheet::{Sheet, contact_sheet};
use crate::{error::Result, source::Source};
use std::path::Path;

/// Bad samples that are named; the others are counted.
pub const MOST_NAMED: usize = 20;

/// What was found at a path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// What it is, in a few words.
    pub kind: String,
    /// Samples, bad ones included.
    pub n_samples: u64,
    /// Bytes of the file or of the samples' files.
    pub n_bytes: u64,
    /// What a sample consists of: a column, tensor or member, its type and its shape.
    pub fields: Vec<Field>,
    /// Classes and how many samples each has, where there are classes.
    pub classes: Vec<(String, u64)>,
    /// Samples that cannot be read.
    pub n_bad: u64,
    /// The first [`MOST_NAMED`] of them.
    pub bad: Vec<Bad>,
}

/// A part of every sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// What the format calls it.
    pub name: String,
    /// Type of its elements.
    pub dtype: String,
    /// Its shapes, the least and the largest where they differ.
    pub shape: String,
}

/// A sample that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bad {
    /// The sample.
    pub name: String,
    /// Why.
    pub reason: String,
}

impl Report {
    fn bad(&mut self, name: String, error: &crate::Error) {
        self.n_bad += 1;
        if self.bad.len() < MOST_NAMED {
            self.bad.push(Bad { name, reason: error.to_string() });
        }
    }

    fn field(
        &mut self,
        name: impl Into<String>,
        dtype: impl Into<String>,
        shape: impl Into<String>,
    ) {
        self.fields.push(Field { name: name.into(), dtype: dtype.into(), shape: shape.into() });
    }
}

/// Looks at the file or folder at `path` and reads every sample once.
///
/// A folder is IDX files, images, or shards: the files of the kind of its first, where one that cannot
/// be opened counts as a bad sample. A file is what its content says, or its ending where content says
/// nothing (CSV, TSV, JSON lines, text, lists of images, tokens of 16 bits). Images are decoded, in folders,
/// lists, tar shards and parquet.
/// # Errors
/// If there is nothing, it is no data set that is known, or it is damaged so that no sample can be
/// told from another.
pub fn inspect(path: &Path) -> Result<Report> {
    open::report(path)
}

/// A sheet of the images at `path`: in a folder, a list, IDX files, tar shards or parquet; see
/// [`contact_sheet`].
/// # Errors
/// If there are none.
#[cfg(feature = "images")]
pub fn contact_sheet_at(path: &Path, sheet: Sheet) -> Result<Vec<u8>> {
    shown::at(path, sheet)
}

/// Reads every sample of `source` and lets `look` see it and its number; bad ones are noted.
fn each<S: Source>(
    report: &mut Report,
    source: &S,
    mut look: impl FnMut(&mut Report, u64, &S::Item) -> Result<()>,
) {
    report.n_samples += source.n_samples();
    for index in 0..source.n_samples() {
        let outcome = source.get(index).and_then(|sample| look(report, index, &sample));
        if let Err(error) = outcome {
            report.bad(source.name(index), &error);
        }
    }
}

/// The least and the largest of shapes of one rank, each side by itself.
#[derive(Debug, Default)]
struct Sizes {
    least: Vec<u64>,
    largest: Vec<u64>,
}

impl Sizes {
    fn add(&mut self, dims: &[u64]) {
        if self.least.is_empty() {
            (self.least, self.largest) = (dims.to_vec(), dims.to_vec());
        }
        self.least.iter_mut().zip(dims).for_each(|(least, &dim)| *least = dim.min(*least));
        self.largest.iter_mut().zip(dims).for_each(|(largest, &dim)| *largest = dim.max(*largest));
    }

    fn text(&self) -> String {
        match self.least == self.largest {
            true => format!("{:?}", self.least),
            false => format!("{:?} to {:?}", self.least, self.largest),
        }
    }
}

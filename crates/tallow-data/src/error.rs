use crate::idx::IdxFault;
use candle_core::DType;
use std::{io, path::PathBuf};

/// The result of everything here that can go wrong.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What was wrong with a data set, or with what was asked of it.
///
/// Converts into [`candle_core::Error`] with its message, where a candle signature demands that.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// There is no such file or folder.
    #[error("`{}` does not exist", path.display())]
    NotFound { path: PathBuf },
    /// The system could not read the file or folder.
    #[error("`{}`: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    /// The content is not the IDX file it should be.
    #[error("`{}`: {fault}", path.display())]
    Idx { path: PathBuf, fault: IdxFault },
    /// An image file and a label file that do not belong together.
    #[error(
        "`{}` holds {n_images} images, `{}` holds {n_labels} labels",
        images_path.display(), labels_path.display()
    )]
    Counts { images_path: PathBuf, n_images: u64, labels_path: PathBuf, n_labels: u64 },
    /// Bytes in memory that are not that many images.
    #[error("{n_labels} images of {height} x {width} pixels are not {n_bytes} bytes")]
    Pixels { n_bytes: u64, n_labels: u64, height: usize, width: usize },
    /// A label that is not a class.
    #[error("label {index} is {label}, outside 0..{n_classes}")]
    Label { index: u64, label: u8, n_classes: usize },
    /// A folder without the file looked for.
    #[error("`{}` holds no file `{pattern}`; it holds {}", folder.display(), names(present))]
    NoFile { folder: PathBuf, pattern: String, present: Vec<String> },
    /// A folder with more than one candidate.
    #[error("`{}` holds {} files `{pattern}`, one is needed: {}", folder.display(), found.len(), names(found))]
    Ambiguous { folder: PathBuf, pattern: String, found: Vec<String> },
    /// A split at a place the set does not reach.
    #[error("a split after {n_train} images, the set has {n_images}")]
    Split { n_train: u64, n_images: u64 },
    /// Batches of no images.
    #[error("the batch is 0 images, 1 is the least")]
    ZeroBatch,
    /// Batches of a set without images.
    #[error("the set has 0 images, there is nothing to make a batch of")]
    EmptySet,
    /// Dropping the incomplete batch would leave none.
    #[error(
        "the set has {n_images} images, less than one batch of {batch_images}, and the incomplete batch is dropped"
    )]
    NoWholeBatch { n_images: u64, batch_images: u64 },
    /// A cursor of another set.
    #[error("the cursor is at image {position} of the epoch, the set has {n_images}")]
    Cursor { position: u64, n_images: u64 },
    /// Pixels cannot be normalised to this.
    #[error("pixels become F64, F32, F16 or BF16, not {dtype:?}")]
    Dtype { dtype: DType },
    /// Normalising with these constants gives no finite number.
    #[error("pixels cannot be normalised by mean {mean} and standard deviation {std}")]
    Normalisation { mean: f32, std: f32 },
    /// A sample, or what lies around it, that is not what its format says.
    #[error("`{}`{}: {reason}", path.display(), at(offset))]
    Corrupt { path: PathBuf, offset: Option<u64>, reason: String },
    /// An array that is no whole number of rows.
    #[error("{n_elems} elements are not a whole number of rows of {row}")]
    Rows { n_elems: u64, row: u64 },
    /// A rank that is none of the run's.
    #[error("rank {rank} is outside 0..{n_ranks}")]
    Rank { rank: u64, n_ranks: u64 },
    /// A shuffle buffer, or a window, of nothing.
    #[error("the window is 0 samples, 1 is the least")]
    ZeroWindow,
    /// A global shuffle of samples that cannot be asked for by number.
    #[error("a stream has no global shuffle: shuffle within a window")]
    GlobalShuffle,
    /// The weights of a mix cannot be kept.
    #[error(
        "weights {weights:?} of {n_sources} sources: as many, above 0, and at most {most} together are needed"
    )]
    Weights { weights: Vec<u32>, n_sources: usize, most: u32 },
    /// A sample that failed with an error which does not say where.
    #[error("{name}: {error}")]
    Sample { name: String, error: Box<Error> },
    /// A closure of the pipeline, or a source, panicked.
    #[error("panicked: {message}")]
    Panicked { message: String },
    /// A thread of the pipeline is gone.
    #[error("a worker thread ended by a panic")]
    DeadWorker,
    /// The system starts no more threads.
    #[error("no thread can be started: {error}")]
    Thread { error: io::Error },
    /// More samples were corrupt than may be left out.
    #[error("more than {limit} corrupt samples in this epoch; the next is {error}")]
    Skipped { limit: u64, error: Box<Error> },
    /// A sample that does not fit a batch or a sequence.
    #[error("sample of {n_tokens} tokens, at most {max_tokens} fit")]
    TooLong { n_tokens: u64, max_tokens: u64 },
    /// A cursor inside a group that is smaller now.
    #[error("the cursor is {within} into the group at sample {position}, which has {n}")]
    Within { position: u64, within: u64, n: u64 },
    /// A sample of another shape than the batch's.
    #[error("a sample of {got:?}, the batch is of {want:?}")]
    SampleShape { got: Vec<usize>, want: Vec<usize> },
    /// A size that no image can have.
    #[error("an image cannot be {height} x {width} pixels")]
    Size { height: usize, width: usize },
    /// Constants for another number of channels.
    #[error("{n_channels} channels need as many means and deviations, not {n_means} and {n_stds}")]
    PerChannel { n_channels: usize, n_means: usize, n_stds: usize },
    /// A folder that cannot be this cache.
    #[error("`{}`: {reason}", path.display())]
    Cache { path: PathBuf, reason: String },
    /// A sample that is not there.
    #[error("`{}`: sample {index}, there are {n_samples}", path.display())]
    Index { path: PathBuf, index: u64, n_samples: u64 },
    /// A column, tensor or field that is not there.
    #[error("`{}` holds no `{name}`; it holds {}", path.display(), names(present))]
    NoName { path: PathBuf, name: String, present: Vec<String> },
    /// Fewer tokens than one sequence with its last target.
    #[error("`{}` holds {n_tokens} tokens, a sequence of {seq_tokens} needs one more than that, and at least 2", path.display())]
    NoSequence { path: PathBuf, n_tokens: u64, seq_tokens: u64 },
    /// A store that does not answer as it should.
    #[error("`{name}`, object `{path}`: {reason}")]
    Store { name: String, path: String, reason: String },
    /// Pixels that are not that image.
    #[error(
        "an image of {height} x {width} pixels of {n_channels} channels is not {n_bytes} bytes"
    )]
    ImageBytes { height: usize, width: usize, n_channels: usize, n_bytes: u64 },
    /// A part that is not inside its image.
    #[cfg(feature = "images")]
    #[error("{region:?} is no part of an image of {height} x {width} pixels")]
    Region { region: Box<crate::image::Region>, height: usize, width: usize },
    /// Candle's own error, while a batch was made.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// Whether it is about one sample, and the others can be read without it: what
    /// [`OnCorrupt::Skip`](crate::OnCorrupt::Skip) leaves out. Panics and errors of candle are not.
    pub fn is_of_one_sample(&self) -> bool {
        match self {
            Self::Corrupt { .. } | Self::NotFound { .. } | Self::Io { .. } | Self::Idx { .. } => {
                true
            }
            Self::Sample { error, .. } => error.is_of_one_sample(),
            _ => false,
        }
    }

    /// With the sample's name, unless it says where it is from.
    pub(crate) fn of_sample(self, name: impl FnOnce() -> String) -> Self {
        match self {
            Self::Corrupt { .. } | Self::NotFound { .. } | Self::Io { .. } | Self::Idx { .. } => {
                self
            }
            Self::Sample { .. } => self,
            error => Self::Sample { name: name(), error: Box::new(error) },
        }
    }

    /// The error of a path that the system refused.
    pub(crate) fn from_io(path: &std::path::Path, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound { path: path.to_owned() },
            _ => Self::Io { path: path.to_owned(), error },
        }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => Self::Wrapped(Box::new(error)),
        }
    }
}

fn at(offset: &Option<u64>) -> String {
    offset.map_or(String::new(), |offset| format!(" at byte {offset}"))
}

/// At most eight names, and how many more there are.
fn names(all: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown =
        all.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match all.len() {
        0 => "nothing".to_owned(),
        n if n <= SHOWN => shown,
        n => format!("{shown} and {} more", n - SHOWN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candle_keeps_the_message() {
        let error = Error::NoWholeBatch { n_images: 3, batch_images: 64 };
        let message = error.to_string();
        assert!(message.contains("3 images") && message.contains("batch of 64"));
        assert!(candle_core::Error::from(error).to_string().contains(&message));
    }

    #[test]
    fn a_candle_error_goes_through_unchanged() {
        let there = Error::from(candle_core::Error::Msg("shape 3 against 4".into()));
        assert!(candle_core::Error::from(there).to_string().contains("shape 3 against 4"));
    }

    #[test]
    fn long_listings_are_cut() {
        let present: Vec<String> = (0..11).map(|i| format!("f{i}")).collect();
        let error = Error::NoFile { folder: "d".into(), pattern: "*x".into(), present };
        assert!(error.to_string().ends_with("`f7` and 3 more"), "{error}");
    }
}

//! A sheet of the images at a path, whatever they lie in.

#[cfg(feature = "tar")]
use super::pictures::IMAGE_ENDINGS;
use super::{
    Sheet, contact_sheet, kinds,
    open::{Kind, shards},
    sheet::sheet_of,
};
#[cfg(any(feature = "tar", feature = "parquet"))]
use crate::image::{Decode, decode};
use crate::{
    error::{Error, Result},
    formats::{Concat, ImageFolder, Input},
    image::{Channels, Image},
    image_set::ImageSet,
    source::Source,
};
use std::{fs, path::Path};

/// See [`contact_sheet_at`](super::contact_sheet_at).
pub(super) fn at(path: &Path, sheet: Sheet) -> Result<Vec<u8>> {
    let metadata = fs::metadata(path).map_err(|error| Error::from_io(path, error))?;
    let found = if metadata.is_dir() {
        match ImageSet::open_dir(path) {
            Ok(set) => return idx(&set, sheet),
            Err(Error::NoFile { .. }) => {}
            Err(error) => return Err(error),
        }
        match ImageFolder::open(path) {
            Ok(folder) => return contact_sheet(&folder, sheet),
            Err(Error::NoFile { .. }) => shards(path)?,
            Err(error) => return Err(error),
        }
    } else {
        let input = Input::open(path)?;
        Kind::of(path, &input)?.map(|kind| (kind, vec![input]))
    };
    let shown = match &found {
        Some((Kind::List, inputs)) => Some(contact_sheet(&all(inputs, kinds::open_list)?, sheet)?),
        Some((Kind::Tar, inputs)) => tar(inputs, sheet)?,
        Some((Kind::Parquet, inputs)) => parquet(inputs, sheet)?,
        _ => None,
    };
    let reason = "no images that a sheet could show".to_owned();
    shown.ok_or(Error::Corrupt { path: path.to_owned(), offset: None, reason })
}

fn idx(set: &ImageSet, sheet: Sheet) -> Result<Vec<u8>> {
    let size = [set.height(), set.width()];
    let image = |index: u64| {
        let pixels = set.image(index as usize).to_vec();
        Ok(Image::new(size, Channels::Grey, pixels)?.with_channels(Channels::Rgb))
    };
    sheet_of(set.n_images() as u64, image, sheet)
}

/// All of `inputs`, which must open.
fn all<S: Source>(inputs: &[Input], open: impl Fn(Input) -> Result<S>) -> Result<Concat<S>> {
    Ok(Concat::new(inputs.iter().cloned().map(open).collect::<Result<Vec<S>>>()?))
}

/// Of the first image in each sample; none if the first sample has none.
#[cfg(feature = "tar")]
fn tar(inputs: &[Input], sheet: Sheet) -> Result<Option<Vec<u8>>> {
    use crate::formats::TarShard;
    let shards = all(inputs, |input| Ok(TarShard::open(input, &[])?.only(&IMAGE_ENDINGS)))?;
    if shards.n_samples() == 0 || shards.get(0)?.members.is_empty() {
        return Ok(None);
    }
    let image = |index: u64| {
        let (_, bytes) = shards.get(index)?.members.into_iter().next().ok_or(Error::EmptySet)?;
        decode(shards.name(index).as_ref(), &bytes, &Decode::rgb())
    };
    sheet_of(shards.n_samples(), image, sheet).map(Some)
}

/// Of the first column of images; none if there is none.
#[cfg(feature = "parquet")]
fn parquet(inputs: &[Input], sheet: Sheet) -> Result<Option<Vec<u8>>> {
    use crate::formats::{Cell, ParquetRows};
    let rows = all(inputs, |input| ParquetRows::open(input, &[]))?;
    let n_columns = rows.parts().first().map_or(0, |first| first.columns().len());
    let are_images = kinds::image_columns(&rows, n_columns);
    let Some(column) = are_images.into_iter().position(|are_images| are_images) else {
        return Ok(None);
    };
    let image = |index: u64| match rows.get(index)?.swap_remove(column) {
        Cell::Bytes(bytes) => decode(rows.name(index).as_ref(), &bytes, &Decode::rgb()),
        _ => Err(Error::EmptySet),
    };
    sheet_of(rows.n_samples(), image, sheet).map(Some)
}

#[cfg(not(feature = "tar"))]
fn tar(_: &[Input], _: Sheet) -> Result<Option<Vec<u8>>> {
    Ok(None)
}

#[cfg(not(feature = "parquet"))]
fn parquet(_: &[Input], _: Sheet) -> Result<Option<Vec<u8>>> {
    Ok(None)
}

//! Files of one kind, as one set.

#[cfg(feature = "tar")]
use super::pictures::IMAGE_ENDINGS;
#[cfg(feature = "parquet")]
use super::pictures::is_image;
use super::{Report, Sizes, each, pictures::Pictures};
use crate::{
    error::Result,
    formats::{
        Array, Concat, Csv, CsvOptions, ImageList, Input, JsonFields, Lines, Npy, SafetensorsFile,
    },
    source::Source,
};
use std::collections::BTreeMap;

/// A report that counts no samples yet, and the files that can be opened. The only one must be.
fn opened<S: Source>(
    kind: &str,
    inputs: &[Input],
    open: impl Fn(Input) -> Result<S>,
) -> Result<(Report, Concat<S>)> {
    let mut report = Report {
        kind: if inputs.len() > 1 {
            format!("{} files of {kind}", inputs.len())
        } else {
            kind.into()
        },
        n_bytes: inputs.iter().map(Input::n_bytes).sum(),
        ..Report::default()
    };
    let mut parts = Vec::new();
    for input in inputs {
        match open(input.clone()) {
            Ok(part) => parts.push(part),
            Err(error) if inputs.len() == 1 => return Err(error),
            Err(error) => {
                report.n_samples += 1;
                report.bad(input.path().display().to_string(), &error);
            }
        }
    }
    Ok((report, Concat::new(parts)))
}

pub(super) fn npy(inputs: &[Input]) -> Result<Report> {
    let (mut report, source) = opened(".npy rows", inputs, Npy::open)?;
    if let Some(first) = source.parts().first() {
        report.field("row", format!("{:?}", first.dtype()), format!("{:?}", first.row_dims()));
    }
    each(&mut report, &source, |_, _, _: &Array| Ok(()));
    Ok(report)
}

pub(super) fn safetensors(inputs: &[Input]) -> Result<Report> {
    let (mut report, files) =
        opened("safetensors", inputs, |input| Ok(Tensors(SafetensorsFile::open(input)?)))?;
    report.n_samples += files.n_samples();
    for info in files.parts().iter().flat_map(|file| file.0.tensors()) {
        let dtype =
            info.dtype.map_or("a type that is not read".into(), |dtype| format!("{dtype:?}"));
        report.field(&info.name, dtype, format!("{:?}", info.dims));
    }
    Ok(report)
}

pub(super) fn csv(inputs: &[Input], options: CsvOptions) -> Result<Report> {
    let (mut report, source) = opened("CSV", inputs, |input| Csv::open(input, options))?;
    let columns = source.parts().first().map_or(Vec::new(), |first| first.columns().to_vec());
    let mut is_number = vec![true; columns.len()];
    each(&mut report, &source, |_, _, record| {
        for (is_number, field) in is_number.iter_mut().zip(record) {
            *is_number = *is_number && field.trim().parse::<f64>().is_ok();
        }
        Ok(())
    });
    for (name, is_number) in columns.iter().zip(is_number) {
        report.field(name, if is_number { "number" } else { "text" }, "[]");
    }
    Ok(report)
}

pub(super) fn text(inputs: &[Input]) -> Result<Report> {
    let (mut report, source) = opened("lines of text", inputs, Lines::open)?;
    let mut sizes = Sizes::default();
    each(&mut report, &source, |_, _, line| {
        sizes.add(&[line.len() as u64]);
        Ok(())
    });
    report.field("line", "text", format!("{} bytes", sizes.text()));
    Ok(report)
}

/// Paths are below the folder of their list.
pub(super) fn open_list(input: Input) -> Result<ImageList> {
    let root = input.path().parent().unwrap_or("".as_ref()).to_owned();
    ImageList::open(input, root)
}

pub(super) fn list(inputs: &[Input]) -> Result<Report> {
    let (mut report, source) = opened("list of images", inputs, open_list)?;
    let (mut pictures, mut counts) = (Pictures::default(), BTreeMap::<u32, u64>::new());
    each(&mut report, &source, |_, _, sample| {
        *counts.entry(sample.label).or_default() += 1;
        pictures.look(&sample.path, &sample.bytes)
    });
    report.classes = counts.into_iter().map(|(label, n)| (label.to_string(), n)).collect();
    pictures.tell(&mut report, true);
    Ok(report)
}

/// The first line names the fields; every line must parse.
pub(super) fn json_lines(inputs: &[Input]) -> Result<Report> {
    let (mut report, source) = opened("JSON lines", inputs, JsonFields::open)?;
    let mut names: Vec<String> = Vec::new();
    each(&mut report, &source, |_, _, fields| {
        if names.is_empty() {
            names.clone_from(fields);
        }
        Ok(())
    });
    names.into_iter().for_each(|name| report.field(name, "JSON", "[]"));
    Ok(report)
}

#[cfg(feature = "tar")]
pub(super) fn tar(inputs: &[Input]) -> Result<Report> {
    let open = |input| crate::formats::TarShard::open(input, &[]);
    let (mut report, source) = opened("WebDataset shard", inputs, open)?;
    let (mut endings, mut pictures) = (Vec::<(String, u64)>::new(), Pictures::default());
    each(&mut report, &source, |_, index, sample| {
        for (ending, content) in &sample.members {
            if IMAGE_ENDINGS.contains(&ending.as_str()) {
                pictures.look(source.name(index).as_ref(), content)?;
            }
            if let Some((_, n)) = endings.iter_mut().find(|(known, _)| known == ending) {
                *n += 1;
            } else if endings.len() < super::MOST_NAMED {
                endings.push((ending.clone(), 1));
            }
        }
        Ok(())
    });
    endings
        .into_iter()
        .for_each(|(ending, n)| report.field(ending, "bytes", format!("{n} members")));
    pictures.tell(&mut report, false);
    Ok(report)
}

#[cfg(feature = "parquet")]
pub(super) fn parquet(inputs: &[Input]) -> Result<Report> {
    use crate::formats::{Cell, ParquetRows};
    let (mut report, source) =
        opened("parquet rows", inputs, |input| ParquetRows::open(input, &[]))?;
    let names = source.parts().first().map_or(Vec::new(), ParquetRows::columns);
    let mut dtypes = vec!["null"; names.len()];
    let are_images = image_columns(&source, names.len());
    let pictures = are_images.into_iter().map(|are_images| are_images.then(Pictures::default));
    let mut pictures: Vec<Option<Pictures>> = pictures.collect();
    each(&mut report, &source, |_, index, row| {
        for ((dtype, pictures), cell) in dtypes.iter_mut().zip(&mut pictures).zip(row) {
            *dtype = match cell {
                Cell::Null => *dtype,
                Cell::Bool(_) => "bool",
                Cell::Int(_) => "integer",
                Cell::Float(_) => "number",
                Cell::Text(_) => "text",
                Cell::Bytes(_) => "bytes",
            };
            if let (Some(pictures), Cell::Bytes(bytes)) = (pictures, cell) {
                pictures.look(source.name(index).as_ref(), bytes)?;
            }
        }
        Ok(())
    });
    names.into_iter().zip(dtypes).for_each(|(name, dtype)| report.field(name, dtype, "[]"));
    pictures.into_iter().flatten().for_each(|pictures| pictures.tell(&mut report, false));
    Ok(report)
}

/// Where one of the first values is an image, all must be.
#[cfg(feature = "parquet")]
pub(super) fn image_columns(
    rows: &Concat<crate::formats::ParquetRows>,
    n_columns: usize,
) -> Vec<bool> {
    use crate::formats::Cell;
    let mut are_images = vec![false; n_columns];
    for row in (0..rows.n_samples().min(16)).filter_map(|index| rows.get(index).ok()) {
        for (are_images, cell) in are_images.iter_mut().zip(&row) {
            *are_images |= matches!(cell, Cell::Bytes(bytes) if is_image(bytes));
        }
    }
    are_images
}

#[cfg(not(feature = "tar"))]
pub(super) fn tar(inputs: &[Input]) -> Result<Report> {
    Err(inputs[0].corrupt(None, "a tar file; this build reads none"))
}

#[cfg(not(feature = "parquet"))]
pub(super) fn parquet(inputs: &[Input]) -> Result<Report> {
    Err(inputs[0].corrupt(None, "a parquet file; this build reads none"))
}

/// A sample is one tensor; its bytes were compared with the header when the file was opened.
struct Tensors(SafetensorsFile);

impl Source for Tensors {
    type Item = ();

    fn n_samples(&self) -> u64 {
        self.0.tensors().len() as u64
    }

    fn get(&self, _: u64) -> Result<()> {
        Ok(())
    }
}

/// Tokens of 16 bits, and the range of them. A sample is a token.
pub(super) fn tokens(inputs: &[Input]) -> Result<Report> {
    let open = |input: Input| match input.n_bytes().is_multiple_of(2) {
        true => Ok(Blocks(input)),
        false => Err(input.corrupt(None, "an odd number of bytes is no tokens of 16 bits")),
    };
    let (mut report, source) = opened("tokens of 16 bits", inputs, open)?;
    let mut range: Option<(u16, u16)> = None;
    each(&mut report, &source, |_, _, tokens| {
        for &token in tokens {
            let (least, largest) = range.unwrap_or((token, token));
            range = Some((token.min(least), token.max(largest)));
        }
        Ok(())
    });
    let n_tokens = source.parts().iter().map(|file| file.0.n_bytes() / 2).sum::<u64>();
    report.n_samples = report.n_samples - source.n_samples() + n_tokens;
    if let Some((least, largest)) = range {
        report.field("token", "U16", format!("{least} to {largest}"));
    }
    Ok(report)
}

/// A file of tokens, some at a time.
struct Blocks(Input);

impl Blocks {
    const BYTES: u64 = 64 << 10;
}

impl Source for Blocks {
    type Item = Vec<u16>;

    fn n_samples(&self) -> u64 {
        self.0.n_bytes().div_ceil(Self::BYTES)
    }

    fn get(&self, index: u64) -> Result<Vec<u16>> {
        let offset = index * Self::BYTES;
        let bytes = self.0.read_vec(offset, Self::BYTES.min(self.0.n_bytes() - offset))?;
        Ok(bytes.as_chunks::<2>().0.iter().map(|&pair| u16::from_le_bytes(pair)).collect())
    }
}

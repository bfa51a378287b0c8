use super::Report;
use crate::{
    error::{Error, Result},
    formats::{Array, Csv, CsvOptions, Input, Lines, Npy, SafetensorsFile},
    image_set::ImageSet,
    source::Source,
};
use std::{fs, path::Path};

pub(super) fn report(path: &Path) -> Result<Report> {
    let metadata = fs::metadata(path).map_err(|error| Error::from_io(path, error))?;
    match metadata.is_dir() {
        true => folder(path),
        false => file(path, &Input::open(path)?),
    }
}

/// A folder of IDX files if there is one, else of images.
fn folder(path: &Path) -> Result<Report> {
    match ImageSet::open_dir(path) {
        Ok(set) => Ok(idx(&set)),
        Err(Error::NoFile { .. }) => images(path),
        Err(error) => Err(error),
    }
}

fn idx(set: &ImageSet) -> Report {
    let [height, width] = [set.height(), set.width()];
    let mut counts = vec![0; set.n_classes()];
    set.labels().iter().for_each(|&label| counts[usize::from(label)] += 1);
    let n_samples = set.n_images() as u64;
    let mut report = Report {
        kind: "IDX images and labels".into(),
        n_samples,
        n_bytes: crate::set_bytes(n_samples, height as u64, width as u64),
        classes: (0..).map(|class: u32| class.to_string()).zip(counts).collect(),
        ..Report::default()
    };
    report.field("image", "U8", format!("[1, {height}, {width}]"));
    report
}

#[cfg(not(feature = "images"))]
fn images(path: &Path) -> Result<Report> {
    let folder = crate::formats::ImageFolder::open(path)?;
    let mut report = image_folder(&folder);
    each(&mut report, &folder, |report, sample| {
        report.n_bytes += sample.bytes.len() as u64;
        Ok(())
    });
    Ok(report)
}

fn image_folder(folder: &crate::formats::ImageFolder) -> Report {
    let classes = folder.classes().iter().cloned().zip(folder.class_counts());
    Report { kind: "folder of images".into(), classes: classes.collect(), ..Report::default() }
}

/// Decodes every image: a header does not tell whether a file is whole.
#[cfg(feature = "images")]
fn images(path: &Path) -> Result<Report> {
    use crate::image::{Decode, Format, decode, probe};
    let folder = crate::formats::ImageFolder::open(path)?;
    let mut report = image_folder(&folder);
    let (mut formats, mut sizes) = ([0u64; 3], Sizes::default());
    each(&mut report, &folder, |report, sample| {
        report.n_bytes += sample.bytes.len() as u64;
        let image = decode(&sample.path, &sample.bytes, &Decode::rgb())?;
        let (format, _) = probe(&sample.path, &sample.bytes, &Decode::rgb())?;
        formats[format as usize] += 1;
        sizes.add(&image.size().map(|side| side as u64));
        Ok(())
    });
    for (format, n) in [Format::Jpeg, Format::Png, Format::Webp].into_iter().zip(formats) {
        if n > 0 {
            report.field(format.to_string(), "U8", format!("{n} files"));
        }
    }
    report.field("image", "U8", sizes.text());
    Ok(report)
}

fn file(path: &Path, input: &Input) -> Result<Report> {
    let mut start = [0; 263];
    let n_start = input.read_some(0, &mut start)?;
    let start = &start[..n_start];
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    match ending.as_deref() {
        _ if start.starts_with(b"\x93NUMPY") => npy(input),
        _ if start.starts_with(b"PAR1") => parquet(input),
        _ if start.get(257..262) == Some(b"ustar") => tar(input),
        Some("safetensors") => safetensors(input),
        Some("parquet") => parquet(input),
        Some("tar") => tar(input),
        Some("csv") => csv(input, CsvOptions::comma()),
        Some("tsv") => csv(input, CsvOptions::tab()),
        Some("jsonl" | "ndjson") => json_lines(input),
        Some("txt") => text(input),
        _ => Err(input.corrupt(
            None,
            "no data set that is known: folders of images or IDX files, .npy, .safetensors, .parquet, .tar, .csv, .tsv, .jsonl and .txt are",
        )),
    }
}

/// Reads every sample of `source` and lets `look` see it; bad ones are noted.
fn each<S: Source>(
    report: &mut Report,
    source: &S,
    mut look: impl FnMut(&mut Report, &S::Item) -> Result<()>,
) {
    report.n_samples = source.n_samples();
    for index in 0..source.n_samples() {
        let outcome = source.get(index).and_then(|sample| look(report, &sample));
        if let Err(error) = outcome {
            report.bad(source.name(index), &error);
        }
    }
}

fn of_file(kind: &str, input: &Input) -> Report {
    Report { kind: kind.into(), n_bytes: input.n_bytes(), ..Report::default() }
}

fn npy(input: &Input) -> Result<Report> {
    let source = Npy::open(input.clone())?;
    let mut report = of_file(".npy rows", input);
    report.field("row", format!("{:?}", source.dtype()), format!("{:?}", source.row_dims()));
    each(&mut report, &source, |_, _: &Array| Ok(()));
    Ok(report)
}

fn safetensors(input: &Input) -> Result<Report> {
    let source = SafetensorsFile::open(input.clone())?;
    let mut report = of_file("safetensors", input);
    report.n_samples = source.tensors().len() as u64;
    for info in source.tensors() {
        let dtype =
            info.dtype.map_or("a type that is not read".into(), |dtype| format!("{dtype:?}"));
        report.field(&info.name, dtype, format!("{:?}", info.dims));
    }
    Ok(report)
}

fn csv(input: &Input, options: CsvOptions) -> Result<Report> {
    let source = Csv::open(input.clone(), options)?;
    let mut report = of_file("CSV", input);
    let mut is_number = vec![true; source.columns().len()];
    each(&mut report, &source, |_, record| {
        for (is_number, field) in is_number.iter_mut().zip(record) {
            *is_number = *is_number && field.trim().parse::<f64>().is_ok();
        }
        Ok(())
    });
    for (name, is_number) in source.columns().iter().zip(is_number) {
        report.field(name, if is_number { "number" } else { "text" }, "[]");
    }
    Ok(report)
}

fn text(input: &Input) -> Result<Report> {
    let source = Lines::open(input.clone())?;
    let (mut report, mut sizes) = (of_file("lines of text", input), Sizes::default());
    each(&mut report, &source, |_, line| {
        sizes.add(&[line.len() as u64]);
        Ok(())
    });
    report.field("line", "text", format!("{} bytes", sizes.text()));
    Ok(report)
}

/// The first line names the fields; every line must parse.
fn json_lines(input: &Input) -> Result<Report> {
    let source = crate::formats::JsonFields::open(input.clone())?;
    let mut report = of_file("JSON lines", input);
    let mut names: Vec<String> = Vec::new();
    each(&mut report, &source, |_, fields| {
        if names.is_empty() {
            names.clone_from(fields);
        }
        Ok(())
    });
    names.into_iter().for_each(|name| report.field(name, "JSON", "[]"));
    Ok(report)
}

#[cfg(feature = "tar")]
fn tar(input: &Input) -> Result<Report> {
    let source = crate::formats::TarShard::open(input.clone(), &[])?;
    let mut report = of_file("WebDataset shard", input);
    let mut endings: Vec<(String, u64)> = Vec::new();
    each(&mut report, &source, |_, sample| {
        for (ending, _) in &sample.members {
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
    Ok(report)
}

#[cfg(feature = "parquet")]
fn parquet(input: &Input) -> Result<Report> {
    use crate::formats::{Cell, ParquetRows};
    let source = ParquetRows::open(input.clone(), &[])?;
    let mut report = of_file("parquet rows", input);
    let mut dtypes = vec!["null"; source.columns().len()];
    each(&mut report, &source, |_, row| {
        for (dtype, cell) in dtypes.iter_mut().zip(row) {
            *dtype = match cell {
                Cell::Null => *dtype,
                Cell::Bool(_) => "bool",
                Cell::Int(_) => "integer",
                Cell::Float(_) => "number",
                Cell::Text(_) => "text",
                Cell::Bytes(_) => "bytes",
            };
        }
        Ok(())
    });
    source
        .columns()
        .into_iter()
        .zip(dtypes)
        .for_each(|(name, dtype)| report.field(name, dtype, "[]"));
    Ok(report)
}

#[cfg(not(feature = "tar"))]
fn tar(input: &Input) -> Result<Report> {
    Err(input.corrupt(None, "a tar file; this build reads none"))
}

#[cfg(not(feature = "parquet"))]
fn parquet(input: &Input) -> Result<Report> {
    Err(input.corrupt(None, "a parquet file; this build reads none"))
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

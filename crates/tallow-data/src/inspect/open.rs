use super::{Report, each, kinds, pictures::Pictures};
use crate::{
    error::{Error, Result},
    formats::{CsvOptions, Input},
    image_set::ImageSet,
};
use std::{fs, path::Path};

pub(super) fn report(path: &Path) -> Result<Report> {
    let metadata = fs::metadata(path).map_err(|error| Error::from_io(path, error))?;
    match metadata.is_dir() {
        true => folder(path),
        false => file(path),
    }
}

/// A folder of IDX files if there is one, else of images, else of shards.
fn folder(path: &Path) -> Result<Report> {
    match ImageSet::open_dir(path) {
        Ok(set) => return Ok(idx(&set)),
        Err(Error::NoFile { .. }) => {}
        Err(error) => return Err(error),
    }
    match images(path) {
        Err(Error::NoFile { folder, pattern, present }) => {
            let none = Error::NoFile { folder, pattern, present };
            let (kind, inputs) = shards(path)?.ok_or(none)?;
            kind.report(&inputs)
        }
        outcome => outcome,
    }
}

/// The files of the kind of the first that is known, as one set; none if none is known.
pub(super) fn shards(folder: &Path) -> Result<Option<(Kind, Vec<Input>)>> {
    let fault = |error| Error::from_io(folder, error);
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(fault)? {
        let path = entry.map_err(fault)?.path();
        let is_hidden = path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
        if path.is_file() && !is_hidden {
            paths.push(path);
        }
    }
    paths.sort();
    let mut found: Option<(Kind, Vec<Input>)> = None;
    for path in paths {
        let input = Input::open(&path)?;
        match (Kind::of(&path, &input)?, &mut found) {
            (Some(kind), None) => found = Some((kind, vec![input])),
            (Some(kind), Some((first, inputs))) if kind == *first => inputs.push(input),
            _ => {}
        }
    }
    Ok(found)
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

fn images(path: &Path) -> Result<Report> {
    let folder = crate::formats::ImageFolder::open(path)?;
    let classes = folder.classes().iter().cloned().zip(folder.class_counts());
    let kind = "folder of images".into();
    let mut report = Report { kind, classes: classes.collect(), ..Report::default() };
    let mut pictures = Pictures::default();
    each(&mut report, &folder, |report, _, sample| {
        report.n_bytes += sample.bytes.len() as u64;
        pictures.look(&sample.path, &sample.bytes)
    });
    pictures.tell(&mut report, true);
    Ok(report)
}

fn file(path: &Path) -> Result<Report> {
    let input = Input::open(path)?;
    match Kind::of(path, &input)? {
        Some(kind) => kind.report(&[input]),
        None => Err(input.corrupt(
            None,
            "no data set that is known: folders of images, IDX files or shards, .npy, .safetensors, .parquet, .tar, .csv, .tsv, .jsonl, .lst, .txt and .bin are",
        )),
    }
}

/// What a file is.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Npy,
    Parquet,
    Tar,
    Safetensors,
    Csv(CsvOptions),
    JsonLines,
    List,
    Text,
    Tokens,
}

impl Kind {
    /// By its content, or by its ending where content says nothing.
    pub(super) fn of(path: &Path, input: &Input) -> Result<Option<Self>> {
        let mut start = [0; 263];
        let n_start = input.read_some(0, &mut start)?;
        let start = &start[..n_start];
        let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
        Ok(Some(match ending.as_deref() {
            _ if start.starts_with(b"\x93NUMPY") => Self::Npy,
            _ if start.starts_with(b"PAR1") => Self::Parquet,
            _ if start.get(257..262) == Some(b"ustar") => Self::Tar,
            Some("npy") => Self::Npy,
            Some("safetensors") => Self::Safetensors,
            Some("parquet") => Self::Parquet,
            Some("tar") => Self::Tar,
            Some("csv") => Self::Csv(CsvOptions::comma()),
            Some("tsv") => Self::Csv(CsvOptions::tab()),
            Some("jsonl" | "ndjson") => Self::JsonLines,
            Some("lst") => Self::List,
            Some("txt") => Self::Text,
            Some("bin") => Self::Tokens,
            _ => return Ok(None),
        }))
    }

    fn report(self, inputs: &[Input]) -> Result<Report> {
        match self {
            Self::Npy => kinds::npy(inputs),
            Self::Parquet => kinds::parquet(inputs),
            Self::Tar => kinds::tar(inputs),
            Self::Safetensors => kinds::safetensors(inputs),
            Self::Csv(options) => kinds::csv(inputs, options),
            Self::JsonLines => kinds::json_lines(inputs),
            Self::List => kinds::list(inputs),
            Self::Text => kinds::text(inputs),
            Self::Tokens => kinds::tokens(inputs),
        }
    }
}

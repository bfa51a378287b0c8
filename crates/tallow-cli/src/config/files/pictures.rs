//! Labelled images from any format, read one at a time.

use super::{format::Format, place::Place};
use anyhow::{Context, Result, bail, ensure};
use candle_core::DType;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use tallow_data::{
    Error, HeldBytes, Source,
    formats::{
        Array, Cell, Concat, Csv, CsvOptions, Encoded, ImageFolder, ImageList, Input, Npy,
        ParquetRows, SafetensorsFile, TarShard,
    },
    image::{Channels, Image},
};

type Fallible<T> = tallow_data::Result<T>;

/// An image as it lies in its file, and its class.
pub(crate) enum Picture {
    File(Encoded),
    Pixels { path: PathBuf, image: Image, label: u32 },
}

impl HeldBytes for Picture {
    fn held_bytes(&self) -> u64 {
        match self {
            Self::File(encoded) => encoded.bytes.held_bytes(),
            Self::Pixels { image, .. } => image.pixels().len() as u64,
        }
    }
}

/// Pictures, and what is known of their classes.
pub(crate) struct Pictures {
    pub(crate) source: Arc<dyn Source<Item = Picture>>,
    pub(crate) classes: Classes,
}

/// How many classes there are.
pub(crate) enum Classes {
    Known(usize),
    /// One more than the largest of these.
    Labels(Arc<dyn Source<Item = u32>>),
}

/// What `data` says of a set of pictures beside its place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Columns {
    /// Column, tensor or member with the image.
    pub(crate) image: Option<String>,
    /// That with the class.
    pub(crate) label: Option<String>,
    /// A `.npy` file of classes.
    pub(crate) labels: Option<PathBuf>,
    /// Channels, height and width of pixels that lie in a row without a shape.
    pub(crate) dims: [usize; 3],
}

/// A source through a function.
struct Mapped<S, F> {
    source: S,
    read: F,
}

impl<S: Source, T: Send, F: Fn(&S, u64) -> Fallible<T> + Send + Sync> Source for Mapped<S, F> {
    type Item = T;

    fn n_samples(&self) -> u64 {
        self.source.n_samples()
    }

    fn get(&self, index: u64) -> Fallible<T> {
        (self.read)(&self.source, index)
    }

    fn name(&self, index: u64) -> String {
        self.source.name(index)
    }
}

/// `source` read by `read`.
pub(super) fn mapped<S: Source + 'static, T: Send + 'static>(
    source: S,
    read: impl Fn(&S, u64) -> Fallible<T> + Send + Sync + 'static,
) -> Arc<dyn Source<Item = T>> {
    Arc::new(Mapped { source, read })
}

/// That a sample is not what it should be.
pub(super) fn wrong<S: Source>(source: &S, index: u64, reason: impl Into<String>) -> Error {
    Error::Corrupt { path: source.name(index).into(), offset: None, reason: reason.into() }
}

/// All files of `place`, opened by `open`, as one source.
pub(super) fn shards<S: Source>(
    place: &Place,
    format: Format,
    open: impl Fn(Input) -> Fallible<S>,
) -> Result<Concat<S>> {
    let inputs = place.inputs(format.endings())?;
    let shards: Fallible<Vec<S>> = inputs.into_iter().map(open).collect();
    Ok(Concat::new(shards.context("data.source")?))
}

/// The pictures at `place`.
/// # Errors
/// If they cannot be opened, or lack what `columns` names.
pub(crate) fn open(place: &Place, format: Format, columns: &Columns) -> Result<Pictures> {
    let path = Path::new(&place.name);
    match format {
        Format::Images => folder(path),
        Format::List => list(path),
        Format::Tar => tar(place, columns),
        Format::Parquet => parquet(place, columns),
        Format::Csv(options) => csv(place, options, columns),
        Format::Safetensors => safetensors(place, columns),
        Format::Npy => npy(place, columns),
        Format::JsonLines | Format::Text | Format::Raw(_) => {
            unreachable!("{} has no images, so it was refused as a source of them", format.name())
        }
    }
}

fn folder(path: &Path) -> Result<Pictures> {
    let images = ImageFolder::open(path).context("data.source")?;
    let classes = Classes::Known(images.classes().len());
    let source = mapped(images, |images, index| Ok(Picture::File(images.get(index)?)));
    Ok(Pictures { source, classes })
}

/// Paths of a list are below its folder. Reading a label reads the image too.
fn list(path: &Path) -> Result<Pictures> {
    let root = path.parent().unwrap_or(path);
    let input = Input::open(path).context("data.source")?;
    let images = ImageList::open(input, root).context("data.source")?;
    let labels = mapped(images.clone(), |images, index| Ok(images.get(index)?.label));
    let source = mapped(images, |images, index| Ok(Picture::File(images.get(index)?)));
    Ok(Pictures { source, classes: Classes::Labels(labels) })
}

/// Members that hold an image, where none is named.
const IMAGE_MEMBERS: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

fn tar(place: &Place, columns: &Columns) -> Result<Pictures> {
    let label = columns.label.clone().unwrap_or_else(|| "cls".to_string());
    let all = shards(place, Format::Tar, |input| TarShard::open(input, &[&label]))?;
    let images: Vec<String> = match &columns.image {
        Some(name) => vec![name.clone()],
        None => IMAGE_MEMBERS.map(str::to_string).to_vec(),
    };
    let only = |endings: &[&str]| {
        Concat::new(all.parts().iter().map(|shard| shard.only(endings)).collect())
    };
    let wanted: Vec<&str> = images.iter().chain([&label]).map(String::as_str).collect();
    let (classes, shards) = (only(&[&label]), only(&wanted));
    let label_of = move |shards: &Concat<TarShard>, index, members: &[(String, Vec<u8>)]| {
        let content = members.iter().find(|(name, _)| *name == label).map(|(_, bytes)| &bytes[..]);
        let text = content.and_then(|bytes| std::str::from_utf8(bytes).ok());
        text.and_then(|text| text.trim().parse().ok()).ok_or_else(|| {
            wrong(shards, index, format!("member `{label}` is no number of a class"))
        })
    };
    let label_alone = label_of.clone();
    let labels = mapped(classes, move |shards, index| {
        label_alone(shards, index, &shards.get(index)?.members)
    });
    let source = mapped(shards, move |shards, index| {
        let mut members = shards.get(index)?.members;
        let label = label_of(shards, index, &members)?;
        let found = members.iter().position(|(name, _)| images.contains(name));
        let found = found
            .ok_or_else(|| wrong(shards, index, format!("no member `{}`", images.join("`, `"))))?;
        let bytes = members.swap_remove(found).1;
        Ok(Picture::File(Encoded { path: shards.name(index).into(), bytes, label }))
    });
    Ok(Pictures { source, classes: Classes::Labels(labels) })
}

fn parquet(place: &Place, columns: &Columns) -> Result<Pictures> {
    let image = columns.image.clone().unwrap_or_else(|| "image.bytes".to_string());
    let label = columns.label.clone().unwrap_or_else(|| "label".to_string());
    let rows = shards(place, Format::Parquet, |input| ParquetRows::open(input, &[&image, &label]))?;
    let alone = shards(place, Format::Parquet, |input| ParquetRows::open(input, &[&label]))?;
    let class = move |rows: &Concat<ParquetRows>, index, cell: Option<Cell>| match cell {
        Some(Cell::Int(class)) if u32::try_from(class).is_ok() => Ok(class as u32),
        Some(Cell::Int(number)) => {
            Err(wrong(rows, index, format!("column `{label}` is {number}, no class")))
        }
        _ => Err(wrong(rows, index, format!("column `{label}` holds no whole number"))),
    };
    let class_alone = class.clone();
    let labels = mapped(alone, move |rows, index| class_alone(rows, index, rows.get(index)?.pop()));
    let source = mapped(rows, move |rows, index| {
        let mut row = rows.get(index)?;
        let label = class(rows, index, row.pop())?;
        match row.pop() {
            Some(Cell::Bytes(bytes)) => {
                Ok(Picture::File(Encoded { path: rows.name(index).into(), bytes, label }))
            }
            _ => Err(wrong(rows, index, format!("column `{image}` holds no bytes"))),
        }
    });
    Ok(Pictures { source, classes: Classes::Labels(labels) })
}

/// A column of paths, relative to the file's folder, or else a pixel in each column but the label's.
fn csv(place: &Place, options: CsvOptions, columns: &Columns) -> Result<Pictures> {
    let rows = Arc::new(shards(place, Format::Csv(options), |input| Csv::open(input, options))?);
    let first = &rows.parts()[0]; // `inputs` has refused a place without files
    let named = |name: &str| first.column(name).context("data.source");
    let label = named(columns.label.as_deref().unwrap_or("label"))?;
    let path = match &columns.image {
        Some(name) => Some(named(name)?),
        None => first.column("path").ok(),
    };
    let class = move |rows: &Concat<Csv>, index| {
        let record = rows.get(index)?;
        let field = record.as_slice().get(label).map_or("", |field| field.trim());
        let class = field.parse::<u32>();
        class.map_err(|_| wrong(rows, index, format!("the class `{field}` is no number")))
    };
    let labels = mapped(rows.clone(), move |rows, index| class(rows, index));
    let root = Path::new(&place.name).to_owned();
    let root = if root.is_dir() { root } else { root.parent().unwrap_or(&root).to_owned() };
    let source = match path {
        Some(path) => {
            ensure!(
                !Place::is_url(&place.name),
                "data.source `{}` is in a store, where the images it names are not looked for",
                place.name
            );
            mapped(rows, move |rows, index| {
                let (label, record) = (class(rows, index)?, rows.get(index)?);
                let path = root.join(record.as_slice().get(path).map_or("", |field| field.trim()));
                let image = Encoded::read(path, label);
                let image = image.map_err(|error| wrong(rows, index, error.to_string()))?;
                Ok(Picture::File(image))
            })
        }
        None => {
            let pixels: Vec<usize> = (0..first.columns().len()).filter(|&i| i != label).collect();
            let dims = columns.dims;
            let n_pixels = dims.iter().product::<usize>();
            ensure!(
                pixels.len() == n_pixels,
                "data.source `{}` has {} columns beside the label, {dims:?} are {n_pixels} pixels",
                place.name,
                pixels.len()
            );
            mapped(rows, move |rows, index| {
                let (label, record) = (class(rows, index)?, rows.get(index)?);
                let field =
                    |column: usize| record.as_slice().get(column).map_or("", |field| field.trim());
                let byte = |&column: &usize| field(column).parse::<u8>();
                let bytes: Result<Vec<u8>, _> = pixels.iter().map(byte).collect();
                let bytes =
                    bytes.map_err(|_| wrong(rows, index, "a pixel is not from 0 to 255"))?;
                let image = image(bytes, dims, Layout::ChannelsLast)?;
                Ok(Picture::Pixels { path: rows.name(index).into(), image, label })
            })
        }
    };
    Ok(Pictures { source, classes: Classes::Labels(labels) })
}

fn safetensors(place: &Place, columns: &Columns) -> Result<Pictures> {
    let image = columns.image.clone().unwrap_or_else(|| "images".to_string());
    let label = columns.label.clone().unwrap_or_else(|| "labels".to_string());
    let rows = |names: &[&str]| {
        shards(place, Format::Safetensors, |input| SafetensorsFile::open(input)?.rows(names))
    };
    let labels = mapped(rows(&[&label])?, |rows, index| class(rows, index, &rows.get(index)?[0]));
    let source = mapped(rows(&[&image, &label])?, |rows, index| {
        let mut arrays = rows.get(index)?; // one of each name
        let label = class(rows, index, &arrays[1])?;
        pixels(rows, index, arrays.swap_remove(0), label)
    });
    Ok(Pictures { source, classes: Classes::Labels(labels) })
}

fn npy(place: &Place, columns: &Columns) -> Result<Pictures> {
    let Some(path) = &columns.labels else {
        bail!(
            "data.source `{}` has no classes: name a .npy file of them as data.labels",
            place.name
        )
    };
    let classes = Input::open(path).and_then(Npy::open).context("data.labels")?;
    let images = shards(place, Format::Npy, Npy::open)?;
    let (n_images, n_classes) = (images.n_samples(), classes.n_samples());
    ensure!(
        n_images == n_classes,
        "data.source has {n_images} rows, data.labels `{}` has {n_classes}",
        path.display()
    );
    let classes = Arc::new(classes);
    let labels = mapped(classes.clone(), |rows, index| class(rows, index, &rows.get(index)?));
    let source = mapped(images, move |images, index| {
        let label = class(&classes, index, &classes.get(index)?)?;
        pixels(images, index, images.get(index)?, label)
    });
    Ok(Pictures { source, classes: Classes::Labels(labels) })
}

/// A class of any type of whole numbers.
fn class<S: Source>(rows: &S, index: u64, array: &Array) -> Fallible<u32> {
    let number = match (array.dtype, &array.bytes[..]) {
        (DType::U8, [byte]) => Some(u32::from(*byte)),
        (DType::I16, &[a, b]) => u32::try_from(i16::from_le_bytes([a, b])).ok(),
        (DType::U32, &[a, b, c, d]) => Some(u32::from_le_bytes([a, b, c, d])),
        (DType::I32, &[a, b, c, d]) => u32::try_from(i32::from_le_bytes([a, b, c, d])).ok(),
        (DType::I64, bytes) => {
            bytes.try_into().ok().and_then(|b| u32::try_from(i64::from_le_bytes(b)).ok())
        }
        _ => None,
    };
    number.ok_or_else(|| {
        let reason = format!("a class is one whole number, not {:?} {:?}", array.dtype, array.dims);
        wrong(rows, index, reason)
    })
}

#[derive(Clone, Copy)]
enum Layout {
    ChannelsFirst,
    ChannelsLast,
}

/// An array of bytes `[H, W]`, `[C, H, W]` or `[H, W, C]` with one or three channels as an image.
fn pixels<S: Source>(rows: &S, index: u64, array: Array, label: u32) -> Fallible<Picture> {
    let Array { dtype, dims, bytes } = array;
    let shape = match dims[..] {
        [height, width] => Some(([1, height, width], Layout::ChannelsLast)),
        [channels @ (1 | 3), height, width] => {
            Some(([channels, height, width], Layout::ChannelsFirst))
        }
        [height, width, channels @ (1 | 3)] => {
            Some(([channels, height, width], Layout::ChannelsLast))
        }
        _ => None,
    };
    let Some((shape, layout)) = shape.filter(|_| dtype == DType::U8) else {
        let reason = format!("an image is bytes of one or three channels, not {dtype:?} {dims:?}");
        return Err(wrong(rows, index, reason));
    };
    Ok(Picture::Pixels {
        path: rows.name(index).into(),
        image: image(bytes, shape, layout)?,
        label,
    })
}

fn image(bytes: Vec<u8>, [channels, height, width]: [usize; 3], layout: Layout) -> Fallible<Image> {
    let bytes = match layout {
        Layout::ChannelsFirst if channels > 1 => {
            let n = height * width;
            (0..n * channels).map(|i| bytes[i % channels * n + i / channels]).collect()
        }
        _ => bytes,
    };
    let kind = if channels == 1 { Channels::Grey } else { Channels::Rgb };
    Image::new([height, width], kind, bytes)
}

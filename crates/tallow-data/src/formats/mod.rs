//! Readers of file formats, each a [`Source`](crate::Source) over an [`Input`].
//!
//! A reader keeps the shape of a file, never its content: positions are read when a sample is asked
//! for. What a header announces is compared with the bytes that are there before room is made.

mod array;
mod concat;
mod csv;
mod image_folder;
mod index;
mod input;
mod json;
mod jsonl;
mod lines;
mod npy;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod safetensors;
#[cfg(feature = "parquet")]
mod thrift;
#[cfg(feature = "text")]
mod tokenized;
mod tokens;
#[cfg(feature = "tar")]
mod webdataset;
#[cfg(feature = "parquet")]
pub use self::parquet_rows::{Cell, ParquetRows};
#[cfg(feature = "text")]
pub use self::tokenized::{Tokenized, Tokenizer, encode_to_file};
#[cfg(feature = "tar")]
pub use self::webdataset::{TarSample, TarShard};
pub use self::{
    array::Array,
    concat::Concat,
    csv::{Csv, CsvOptions},
    image_folder::{Encoded, ImageFolder, ImageList},
    index::index_bytes,
    input::{Input, ReadAt},
    jsonl::{JsonFields, JsonLines},
    lines::Lines,
    npy::Npy,
    safetensors::{SafetensorsFile, SafetensorsRows, TensorInfo},
    tokens::{Token, Tokens},
};

//! Readers of file formats, each a [`Source`](crate::Source) over an [`Input`].
//!
//! A reader keeps the shape of a file, never its content: positions are read when a sample is asked
//! for. What a header announces is compared with the bytes that are there before room is made.

mod array;
mod csv;
mod index;
mod input;
mod json;
mod jsonl;
mod lines;
mod npy;
mod safetensors;
mod tokens;
pub use self::{
    array::Array,
    csv::{Csv, CsvOptions},
    index::index_bytes,
    input::{Input, ReadAt},
    jsonl::JsonLines,
    lines::Lines,
    npy::Npy,
    safetensors::{SafetensorsFile, SafetensorsRows, TensorInfo},
    tokens::{Token, Tokens},
};

//! What kind of file samples lie in.

use super::place::{Place, files_in};
use anyhow::{Result, bail};
use std::path::Path;
use tallow_data::formats::{CsvOptions, Token};

/// `data.format`, or what the name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// A folder with a folder of images for each class.
    Images,
    /// A file with the path of an image and its class on each line.
    List,
    /// WebDataset shards.
    Tar,
    Parquet,
    Csv(CsvOptions),
    JsonLines,
    Safetensors,
    Npy,
    /// Lines of text, which a tokenizer reads.
    Text,
    /// Tokens without a header; `U8` is any text, byte by byte.
    Raw(Token),
}

/// Names of formats, and the endings of their files.
const FORMATS: [(&str, Format, &[&str]); 13] = [
    ("images", Format::Images, &[]),
    ("list", Format::List, &["lst"]),
    ("tar", Format::Tar, &["tar"]),
    ("parquet", Format::Parquet, &["parquet"]),
    ("csv", Format::Csv(CsvOptions::comma()), &["csv"]),
    ("tsv", Format::Csv(CsvOptions::tab()), &["tsv"]),
    ("jsonl", Format::JsonLines, &["jsonl", "ndjson"]),
    ("safetensors", Format::Safetensors, &["safetensors"]),
    ("npy", Format::Npy, &["npy"]),
    ("text", Format::Text, &["txt"]),
    ("u16", Format::Raw(Token::U16), &["bin"]),
    ("u32", Format::Raw(Token::U32), &["bin"]),
    ("bytes", Format::Raw(Token::U8), &["txt"]),
];

/// The words of `data.format`.
pub(crate) const FORMAT_NAMES: [&str; FORMATS.len()] = {
    let mut names = [""; FORMATS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = FORMATS[i].0;
        i += 1;
    }
    names
};

impl Format {
    /// As `data.format` has it.
    /// # Errors
    /// If the word is unknown.
    pub(crate) fn named(word: &str) -> Result<Self> {
        match FORMATS.iter().find(|(name, ..)| *name == word) {
            Some((_, format, _)) => Ok(*format),
            None => bail!("data.format `{word}` is unknown; there are {}", FORMAT_NAMES.join(", ")),
        }
    }

    /// By the ending of `name`, or of what is in the folder of that name; any other file is text.
    /// # Errors
    /// If it is a folder of a store: what is in it is not known before it is listed.
    pub(crate) fn of(name: &str, has_tokenizer: bool) -> Result<Self> {
        let path = Path::new(name);
        if Place::is_url(name) && name.ends_with('/') {
            bail!("data.source `{name}` is a folder of a store: name its data.format")
        }
        if path.is_dir() {
            let mut entries = std::fs::read_dir(path)?.flatten();
            if entries.any(|entry| entry.path().is_dir()) {
                return Ok(Self::Images); // a class each
            }
            let files = files_in(path)?;
            let found = files.iter().find_map(|path| by_ending(path)).unwrap_or(Self::Images);
            return Ok(found.read_by(has_tokenizer));
        }
        Ok(by_ending(path).unwrap_or(Self::Raw(Token::U8)).read_by(has_tokenizer))
    }

    /// Text with a tokenizer is read by it, without one byte by byte.
    fn read_by(self, has_tokenizer: bool) -> Self {
        match self {
            Self::Raw(Token::U8) | Self::Text if has_tokenizer => Self::Text,
            Self::Text => Self::Raw(Token::U8),
            format => format,
        }
    }

    /// As `data.format` has it.
    pub(crate) fn name(self) -> &'static str {
        FORMATS.iter().find(|(_, format, _)| *format == self).map_or("", |(name, ..)| name)
    }

    /// Endings of its files.
    pub(crate) fn endings(self) -> &'static [&'static str] {
        FORMATS.iter().find(|(_, format, _)| *format == self).map_or(&[], |(.., endings)| endings)
    }

    /// Whether it can hold nothing but tokens.
    pub(crate) fn is_tokens(self) -> bool {
        matches!(self, Self::Raw(_) | Self::Text | Self::JsonLines)
    }

    /// Whether it can hold nothing but images.
    pub(crate) fn is_images(self) -> bool {
        matches!(self, Self::Images | Self::List)
    }

    /// Whether tokens are made of its texts.
    pub(crate) fn has_texts(self) -> bool {
        matches!(self, Self::Text | Self::JsonLines | Self::Csv(_) | Self::Parquet | Self::Tar)
    }
}

fn by_ending(path: &Path) -> Option<Format> {
    let ending = path.extension()?.to_string_lossy().to_lowercase();
    let known = |entry: &&(&str, Format, &[&str])| entry.2.contains(&ending.as_str());
    FORMATS.iter().find(known).map(|(_, format, _)| *format)
}

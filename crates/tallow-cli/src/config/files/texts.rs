//! Texts through a tokenizer, once, into a file of tokens.

use super::{
    format::Format,
    pictures::{mapped, shards, wrong},
    place::Place,
};
use crate::view::note_line;
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    sync::Arc,
};
use tallow_data::{
    Source,
    formats::{
        Cell, Csv, Input, JsonLines, Lines, ParquetRows, TarShard, Token, Tokenizer, encode_to_file,
    },
};

/// How texts become tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reader {
    /// A `tokenizer.json`.
    pub(crate) tokenizer: PathBuf,
    /// The token after each text; `None`: the tokenizer's end of text, if it has one of a usual name.
    pub(crate) separator: Option<String>,
    /// Column, field or member with the text.
    pub(crate) column: Option<String>,
}

/// Names of the token between documents.
const SEPARATORS: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"];

/// Largest vocabulary whose tokens are two bytes each.
const MOST_U16: usize = 1 << 16;

/// The tokenizer in the file `path`.
/// # Errors
/// If it is none.
pub(crate) fn tokenizer(path: &Path) -> Result<Tokenizer> {
    Input::open(path).and_then(|input| Tokenizer::open(&input)).context("data.tokenizer")
}

impl Reader {
    /// A file with the tokens of all texts at `place`, made if it is not there from an earlier run,
    /// and the type of one.
    /// # Errors
    /// If a text cannot be read, or the tokens cannot be written.
    pub(crate) fn tokens(
        &self,
        place: &Place,
        format: Format,
        vocab: usize,
    ) -> Result<(PathBuf, Token)> {
        let tokenizer = tokenizer(&self.tokenizer)?;
        let n_tokens = tokenizer.vocab() as usize;
        ensure!(
            n_tokens <= vocab,
            "model.vocab is {vocab}, data.tokenizer `{}` has {n_tokens} tokens",
            self.tokenizer.display()
        );
        let separator = self.separator(&tokenizer)?;
        let token = if vocab <= MOST_U16 { Token::U16 } else { Token::U32 };
        let folder = &place.cache_dir;
        fs::create_dir_all(folder)
            .with_context(|| format!("data.cache_dir `{}`", folder.display()))?;
        let path = folder.join(format!("tokens-{:016x}.bin", self.hash(place, format, token)?));
        if !path.is_file() {
            let texts = texts(place, format, self.column.as_deref())?;
            let n = encode_to_file(&texts, &tokenizer, separator, token, &path)
                .context("data.source")?;
            let n_texts = texts.n_samples();
            note_line(&format!("{n_texts} texts are {n} tokens, kept in {}", path.display()));
        }
        Ok((path, token))
    }

    fn separator(&self, tokenizer: &Tokenizer) -> Result<Option<u32>> {
        match &self.separator {
            None => Ok(SEPARATORS.iter().find_map(|name| tokenizer.token(name))),
            Some(name) if name.is_empty() => Ok(None),
            Some(name) => match tokenizer.token(name) {
                Some(token) => Ok(Some(token)),
                None => bail!("data.separator `{name}` is no token of data.tokenizer"),
            },
        }
    }

    /// Of everything that the tokens depend on; of the texts it is their names, bytes and times.
    fn hash(&self, place: &Place, format: Format, token: Token) -> Result<u64> {
        let mut hasher = DefaultHasher::new();
        let content = fs::read(&self.tokenizer).context("data.tokenizer")?;
        (content, &self.separator, &self.column, format.name(), token.n_bytes()).hash(&mut hasher);
        for input in place.inputs(format.endings())? {
            let changed = fs::metadata(input.path()).and_then(|metadata| metadata.modified()).ok();
            (input.path(), input.n_bytes(), changed).hash(&mut hasher);
        }
        Ok(hasher.finish())
    }
}

/// The texts at `place`, one after another.
fn texts(
    place: &Place,
    format: Format,
    column: Option<&str>,
) -> Result<Arc<dyn Source<Item = String>>> {
    let name = column.unwrap_or(if format == Format::Tar { "txt" } else { "text" }).to_string();
    Ok(match format {
        Format::Text => {
            let lines = shards(place, format, Lines::open)?;
            mapped(lines, |lines, index| Ok(lines.get(index)? + "\n"))
        }
        Format::JsonLines => {
            Arc::new(shards(place, format, |input| JsonLines::open(input, name.as_str()))?)
        }
        Format::Csv(options) => {
            let rows = shards(place, format, |input| Csv::open(input, options))?;
            // `inputs` has refused a place without files.
            let column = rows.parts()[0].column(&name).context("data.source")?;
            mapped(rows, move |rows, index| {
                let mut record = rows.get(index)?;
                match column < record.len() {
                    true => Ok(record.swap_remove(column)),
                    // Opening has counted the fields: the file has changed since.
                    false => Err(wrong(rows, index, "a record without the column of text")),
                }
            })
        }
        Format::Parquet => {
            let rows = shards(place, format, |input| ParquetRows::open(input, &[&name]))?;
            mapped(rows, move |rows, index| match rows.get(index)?.pop() {
                Some(Cell::Text(text)) => Ok(text),
                Some(Cell::Null) | None => Ok(String::new()),
                Some(_) => Err(wrong(rows, index, format!("column `{name}` is no text"))),
            })
        }
        Format::Tar => {
            let samples = shards(place, format, |input| TarShard::open(input, &[&name]))?;
            mapped(samples, move |samples, index| {
                let sample = samples.get(index)?;
                let text = std::str::from_utf8(sample.member(&name).unwrap_or_default());
                let text = text
                    .map_err(|_| wrong(samples, index, format!("member `{name}` is not UTF-8")))?;
                Ok(text.to_string())
            })
        }
        Format::Images | Format::List | Format::Safetensors | Format::Npy | Format::Raw(_) => {
            unreachable!("{} has no texts, so no tokenizer was taken for it", format.name())
        }
    })
}

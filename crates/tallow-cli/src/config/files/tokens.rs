//! Sequences of tokens.

use super::{
    Noted, Part, Reading, Spent,
    format::Format,
    n_held_out,
    pictures::{mapped, shards, wrong},
    place::Place,
    texts::Reader,
};
use crate::config::source::{Opened, Samples};
use anyhow::{Context, Result};
use candle_core::{DType, Device};
use std::sync::Arc;
use tallow_data::{
    Dataset, Loader, Source, TokenBatches,
    formats::{Array, Concat, Input, Npy, SafetensorsFile, Tokens},
};

type Fallible<T> = tallow_data::Result<T>;

/// Sequences of tokens.
#[derive(Clone)]
pub(crate) struct Sequences {
    part: Part<dyn Source<Item = Vec<u32>>>,
    seq_tokens: usize,
    reading: Reading,
}

impl Sequences {
    pub(crate) fn n_samples(&self) -> usize {
        self.part.n_samples() as usize
    }

    pub(crate) fn dataset(&self) -> Box<dyn Dataset> {
        let spent = Arc::clone(&self.part.spent);
        Box::new(Noted { loader: self.loader(), spent })
    }

    pub(crate) fn n_threads(&self) -> usize {
        self.reading.n_threads(0)
    }

    pub(crate) fn spent(&self) -> &Spent {
        self.part.spent()
    }

    /// Bytes of batches of `n_samples` and of what is read ahead of them.
    pub(crate) fn held_bytes(&self, n_samples: usize) -> u64 {
        match self.reading.prefetch_bytes {
            0 => self.loader().batch_bytes(n_samples),
            _ => self.loader().held_bytes(n_samples),
        }
    }

    fn loader(&self) -> Loader<TokenBatches> {
        let collate = TokenBatches { seq_tokens: self.seq_tokens, device: Device::Cpu };
        let loading = self.reading.loading(0);
        Loader::new(self.part.clone(), |tokens, _| Ok(tokens), collate, loading)
    }
}

/// Where tokens are, and how texts become some.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenSource {
    pub(crate) place: Place,
    pub(crate) format: Format,
    /// Of texts alone.
    pub(crate) reader: Option<Reader>,
    /// Tensor with rows of tokens.
    pub(crate) column: Option<String>,
    pub(crate) held_out: Option<usize>,
    /// Tokens of a sequence, and of the model's vocabulary.
    pub(crate) sizes: (usize, usize),
    pub(crate) reading: Reading,
}

impl TokenSource {
    /// The sequences; the last of them are held out.
    /// # Errors
    /// If they cannot be read, or are too few.
    pub(crate) fn open(&self) -> Result<Opened> {
        let sequences = self.sequences()?;
        let held_out = n_held_out(self.held_out, sequences.n_samples(), "sequences")?;
        let (train, judged) = Part::split(sequences, None, held_out);
        let seq_tokens = self.sizes.0;
        let sequences =
            |part| Samples::Tokens(Sequences { part, seq_tokens, reading: self.reading.clone() });
        Ok(Opened {
            train: sequences(train),
            held_out: sequences(judged),
            channels: 0,
            n_classes: 0,
            size: vec![seq_tokens],
        })
    }

    fn sequences(&self) -> Result<Arc<dyn Source<Item = Vec<u32>>>> {
        let (seq_tokens, vocab) = (self.sizes.0 as u64, self.sizes.1 as u32);
        let (place, format) = (&self.place, self.format);
        let raw =
            |input: Input, token| Ok(Tokens::raw(input, token, seq_tokens)?.with_vocab(vocab));
        if let Some(reader) = &self.reader {
            let (path, token) = reader.tokens(place, format, self.sizes.1)?;
            let tokens = Input::open(&path).and_then(|input| raw(input, token));
            return Ok(Arc::new(tokens.context("data.source")?));
        }
        Ok(match format {
            Format::Raw(token) => Arc::new(shards(place, format, |input| raw(input, token))?),
            Format::Npy => match self.is_matrix()? {
                false => Arc::new(shards(place, format, |input| {
                    Ok(Tokens::npy(input, seq_tokens)?.with_vocab(vocab))
                })?),
                true => self.rows(shards(place, format, Npy::open)?, |row: &Array| row),
            },
            Format::Safetensors => {
                let name = self.column.as_deref().unwrap_or("tokens");
                let open = |input| SafetensorsFile::open(input)?.rows(&[name]);
                self.rows(shards(place, format, open)?, |row: &Vec<Array>| &row[0])
            }
            _ => unreachable!(
                "{} holds no tokens, and without a reader it was refused",
                format.name()
            ),
        })
    }

    fn is_matrix(&self) -> Result<bool> {
        let inputs = self.place.inputs(self.format.endings())?;
        let first = inputs.into_iter().next().expect("`inputs` has refused a place without files");
        // Tokens of two bytes have no tensor: those are read as one long row.
        Ok(Npy::open(first).is_ok_and(|array| !array.row_dims().is_empty()))
    }

    /// Rows of `T + 1` tokens each.
    fn rows<S>(
        &self,
        rows: Concat<S>,
        array: fn(&S::Item) -> &Array,
    ) -> Arc<dyn Source<Item = Vec<u32>>>
    where
        S: Source + 'static,
    {
        let (n_tokens, vocab) = (self.sizes.0 + 1, self.sizes.1);
        mapped(rows, move |rows, index| {
            let row = rows.get(index)?;
            let row = tokens(rows, index, array(&row))?;
            let outside = row.iter().find(|&&token| token as usize >= vocab);
            match outside {
                _ if row.len() != n_tokens => {
                    let reason = format!("{} tokens in a row, {n_tokens} are needed", row.len());
                    Err(wrong(rows, index, reason))
                }
                Some(token) => Err(wrong(
                    rows,
                    index,
                    format!("token {token} is outside the {vocab} of the vocabulary"),
                )),
                None => Ok(row),
            }
        })
    }
}

/// Whole numbers of any type as tokens.
fn tokens<S: Source>(rows: &S, index: u64, array: &Array) -> Fallible<Vec<u32>> {
    let negative = |_| wrong(rows, index, "a token is below 0");
    let bytes = &array.bytes;
    match array.dtype {
        DType::U8 => Ok(bytes.iter().map(|&byte| u32::from(byte)).collect()),
        DType::U32 => Ok(bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect()),
        DType::I32 => {
            let numbers = bytes.as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b));
            numbers.map(u32::try_from).collect::<Result<_, _>>().map_err(negative)
        }
        DType::I64 => {
            let numbers = bytes.as_chunks::<8>().0.iter().map(|&b| i64::from_le_bytes(b));
            numbers.map(u32::try_from).collect::<Result<_, _>>().map_err(negative)
        }
        dtype => {
            let reason = format!("tokens are u8, u32, i32 or i64, not {dtype:?}");
            Err(wrong(rows, index, reason))
        }
    }
}

use super::{index::SparseIndex, input::Input};
use crate::{
    error::{Error, Result},
    source::Source,
};
use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

/// Largest record that is read: a quote that is never closed would swallow the file.
const MOST_RECORD_BYTES: usize = 16 << 20;
const MOST_FIELDS: usize = 64 << 10;
const BLOCK_BYTES: usize = 64 << 10;

/// How a file separates its fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CsvOptions {
    /// Between two fields: a comma, or a tab for TSV.
    pub delimiter: u8,
    /// Whether the first record names the columns.
    pub has_header: bool,
}

impl CsvOptions {
    /// Commas, and a first record that names the columns.
    pub const fn comma() -> Self {
        Self { delimiter: b',', has_header: true }
    }

    /// Tabs, and a first record that names the columns.
    pub const fn tab() -> Self {
        Self { delimiter: b'\t', has_header: true }
    }
}

/// The records of a CSV file, quotes and line ends in fields understood.
///
/// Opening it reads the file once, compares the number of fields of all records, and keeps
/// [`index_bytes`](super::index_bytes) and the column names; a sample is read from the mark before
/// it. A record may have 16 MiB.
#[derive(Clone, Debug)]
pub struct Csv {
    input: Input,
    options: CsvOptions,
    columns: Vec<String>,
    index: SparseIndex,
}

impl Csv {
    /// Finds the records of `input`.
    /// # Errors
    /// If a record has another number of fields than the first, or is above 16 MiB.
    pub fn open(input: Input, options: CsvOptions) -> Result<Self> {
        let mut scanner = Scanner::new(&input, options, 0);
        let mut columns = Vec::new();
        if options.has_header && scanner.next_record()?.is_some() {
            columns = scanner.fields()?;
        }
        let (mut index, mut n_fields) = (SparseIndex::default(), None);
        n_fields = n_fields.or((!columns.is_empty()).then_some(columns.len()));
        while let Some(offset) = scanner.next_record()? {
            let found = scanner.n_fields;
            let expected = *n_fields.get_or_insert(found);
            if found != expected {
                let n_before = index.n_samples();
                let reason = format!("record {n_before} has {found} fields, the others {expected}");
                return Err(input.corrupt(offset, reason));
            }
            index.push(offset);
        }
        if columns.is_empty() {
            columns = (0..n_fields.unwrap_or(0)).map(|column| column.to_string()).collect();
        }
        drop(scanner);
        Ok(Self { input, options, columns, index: index.finish() })
    }

    /// Names of the columns; their numbers where the file names none.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// The number of the column called `name`.
    /// # Errors
    /// If there is none; the error names those there are.
    pub fn column(&self, name: &str) -> Result<usize> {
        self.columns.iter().position(|column| column == name).ok_or_else(|| Error::NoName {
            path: self.input.path().to_owned(),
            name: name.to_owned(),
            present: self.columns.clone(),
        })
    }

    /// The fields `columns` of the record `index` as numbers.
    /// # Errors
    /// If one is no number; the error names the column.
    pub fn numbers(&self, index: u64, columns: &[usize]) -> Result<Vec<f32>> {
        let (offset, fields) = self.record(index)?;
        let number = |&column: &usize| {
            let field = fields.as_slice().get(column).map_or("", |field| field.trim());
            field.parse().map_err(|_| {
                let name = self.columns.as_slice().get(column).map_or("", String::as_str);
                self.input
                    .corrupt(offset, format!("column `{name}` of record {index} is no number"))
            })
        };
        columns.iter().map(number).collect()
    }

    fn record(&self, index: u64) -> Result<(u64, Vec<String>)> {
        if index >= self.index.n_samples() {
            return Err(self.input.out_of_range(index, self.index.n_samples()));
        }
        let (offset, n_between) = self.index.find(index);
        let mut scanner = Scanner::new(&self.input, self.options, offset);
        for _ in 0..=n_between {
            if scanner.next_record()?.is_none() {
                let reason = "the file has fewer records than when it was opened";
                return Err(self.input.corrupt(offset, reason));
            }
        }
        Ok((scanner.start, scanner.fields()?))
    }
}

impl Source for Csv {
    type Item = Vec<String>;

    fn n_samples(&self) -> u64 {
        self.index.n_samples()
    }

    fn get(&self, index: u64) -> Result<Vec<String>> {
        Ok(self.record(index)?.1)
    }

    fn name(&self, index: u64) -> String {
        format!("{}: record {index}", self.input.path().display())
    }
}

/// Goes from record to record; keeps the fields of the last.
struct Scanner<'a> {
    input: &'a Input,
    reader: Reader,
    block: Vec<u8>,
    at: usize,
    offset: u64,
    start: u64,
    text: Vec<u8>,
    ends: Vec<usize>,
    n_fields: usize,
}

impl<'a> Scanner<'a> {
    fn new(input: &'a Input, options: CsvOptions, offset: u64) -> Self {
        let reader = ReaderBuilder::new().delimiter(options.delimiter).build();
        let (text, ends) = (vec![0; 1 << 10], vec![0; 16]);
        let (block, at, start) = (Vec::new(), 0, offset);
        Self { input, reader, block, at, offset, start, text, ends, n_fields: 0 }
    }

    fn fill(&mut self) -> Result<()> {
        if self.at == self.block.len() {
            self.block.resize(BLOCK_BYTES, 0);
            let n_bytes = self.input.read_some(self.offset, &mut self.block)?;
            self.block.truncate(n_bytes);
            self.at = 0;
        }
        Ok(())
    }

    /// Reads the next record and says where it starts.
    fn next_record(&mut self) -> Result<Option<u64>> {
        self.start = self.offset;
        let (mut n_text, mut n_ends) = (0, 0);
        loop {
            self.fill()?;
            let (result, n_read, n_written, n_ended) = self.reader.read_record(
                &self.block[self.at..],
                &mut self.text[n_text..],
                &mut self.ends[n_ends..],
            );
            self.at += n_read;
            self.offset += n_read as u64;
            n_text += n_written;
            n_ends += n_ended;
            match result {
                ReadRecordResult::InputEmpty => {}
                ReadRecordResult::OutputFull => self.grow_text()?,
                ReadRecordResult::OutputEndsFull => self.grow_ends()?,
                ReadRecordResult::Record => {
                    self.n_fields = n_ends;
                    return Ok(Some(self.start));
                }
                ReadRecordResult::End => return Ok(None),
            }
        }
    }

    fn grow_text(&mut self) -> Result<()> {
        if self.text.len() >= MOST_RECORD_BYTES {
            let reason =
                format!("a record above {MOST_RECORD_BYTES} bytes; a quote may be missing");
            return Err(self.input.corrupt(self.start, reason));
        }
        self.text.resize(2 * self.text.len(), 0);
        Ok(())
    }

    fn grow_ends(&mut self) -> Result<()> {
        if self.ends.len() >= MOST_FIELDS {
            let reason = format!("a record of more than {MOST_FIELDS} fields");
            return Err(self.input.corrupt(self.start, reason));
        }
        self.ends.resize(2 * self.ends.len(), 0);
        Ok(())
    }

    /// The fields of the record read last.
    fn fields(&self) -> Result<Vec<String>> {
        let mut first = 0;
        let field = |&end: &usize| {
            let text = &self.text[std::mem::replace(&mut first, end)..end];
            let text = std::str::from_utf8(text);
            text.map(str::to_owned)
                .map_err(|_| self.input.corrupt(self.start, "a record that is not UTF-8"))
        };
        self.ends[..self.n_fields].iter().map(field).collect()
    }
}

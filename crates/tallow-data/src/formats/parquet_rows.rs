use super::{input::Input, thrift::is_plausible};
use crate::{
    error::{Error, Result},
    source::Source,
};
use bytes::Bytes;
use parquet::{
    basic::{ConvertedType, LogicalType, Type},
    column::reader::{ColumnReader, ColumnReaderImpl},
    data_type::DataType,
    errors::{ParquetError, Result as ParquetResult},
    file::{
        metadata::ColumnChunkMetaData,
        reader::{ChunkReader, FileReader, Length, SerializedFileReader},
        serialized_reader::ReadOptionsBuilder,
    },
};
use std::{
    fmt,
    io::{BufReader, Read},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
};

/// Readers kept between samples, so that samples in order cost one pass: enough for a few threads.
const MOST_CURSORS: usize = 4;

/// The length of the footer, and the mark at the end of the file.
const TAIL_BYTES: u64 = 8;

/// One value of a row.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are the types")]
pub enum Cell {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
}

/// Rows of some columns of a parquet file.
///
/// A column is named by its path, `image.bytes` for a field of a group; repeated ones are refused.
/// Holds the file's footer and, for each reader kept between samples, a page and a dictionary of each
/// column. Rows in order cost one pass over the pages; any other order skips pages from the start of
/// the row's group.
pub struct ParquetRows {
    input: Input,
    reader: SerializedFileReader<Chunks>,
    columns: Vec<Column>,
    /// Rows in a row group and all before it.
    ends: Vec<u64>,
    cursors: Mutex<Vec<Cursor>>,
}

#[derive(Clone, Debug)]
struct Column {
    name: String,
    place: usize,
    is_text: bool,
}

impl fmt::Debug for ParquetRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParquetRows({:?}, {} rows)", self.input, self.n_samples())
    }
}

impl ParquetRows {
    /// Reads the footer of `input` and finds `columns`; none means all that are not repeated.
    /// # Errors
    /// If it is no whole parquet file, or a column is missing or repeated.
    pub fn open(input: Input, columns: &[&str]) -> Result<Self> {
        check_footer(&input)?;
        let reader = guarded(&input, || {
            let options = ReadOptionsBuilder::new().build();
            SerializedFileReader::new_with_options(Chunks(input.clone()), options)
        })?;
        let (mut ends, mut n_rows) = (Vec::new(), 0u64);
        for group in reader.metadata().row_groups() {
            let n_here = u64::try_from(group.num_rows()).ok();
            n_rows = n_here.and_then(|n| n_rows.checked_add(n)).ok_or_else(|| {
                input.corrupt(None, format!("a row group of {} rows", group.num_rows()))
            })?;
            // The library panics at these.
            let is_negative = |column: &ColumnChunkMetaData| {
                let places = [column.data_page_offset(), column.compressed_size()];
                places.into_iter().chain(column.dictionary_page_offset()).any(|place| place < 0)
            };
            if group.columns().iter().any(is_negative) {
                return Err(input.corrupt(None, "a column that starts before the file"));
            }
            ends.push(n_rows);
        }
        let columns = find_columns(&input, &reader, columns)?;
        Ok(Self { input, reader, columns, ends, cursors: Mutex::new(Vec::new()) })
    }

    /// Names of the columns, in the order of a row's values.
    pub fn columns(&self) -> Vec<&str> {
        self.columns.iter().map(|column| column.name.as_str()).collect()
    }

    /// The reader that needs to skip least, or a new one at the start of the group.
    fn cursor(&self, group: usize, row: u64) -> Result<Cursor> {
        let mut kept = self.cursors.lock().unwrap_or_else(PoisonError::into_inner);
        let usable = |cursor: &Cursor| cursor.group == group && cursor.next_row <= row;
        let best = (0..kept.len()).filter(|&i| usable(&kept[i])).max_by_key(|&i| kept[i].next_row);
        if let Some(best) = best {
            return Ok(kept.swap_remove(best));
        }
        drop(kept);
        let columns = guarded(&self.input, || {
            let group = self.reader.get_row_group(group)?;
            self.columns.iter().map(|column| group.get_column_reader(column.place)).collect()
        })?;
        Ok(Cursor { group, next_row: 0, columns })
    }

    fn keep(&self, cursor: Cursor) {
        let mut kept = self.cursors.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == MOST_CURSORS {
            kept.remove(0);
        }
        kept.push(cursor);
    }
}

impl Source for ParquetRows {
    type Item = Vec<Cell>;

    fn n_samples(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn get(&self, index: u64) -> Result<Vec<Cell>> {
        if index >= self.n_samples() {
            return Err(self.input.out_of_range(index, self.n_samples()));
        }
        let group = self.ends.partition_point(|&end| end <= index);
        let row = index - group.checked_sub(1).map_or(0, |before| self.ends[before]);
        let mut cursor = self.cursor(group, row)?;
        let n_between = row - cursor.next_row;
        let cells = guarded(&self.input, || {
            let pairs = cursor.columns.iter_mut().zip(&self.columns);
            pairs.map(|(reader, column)| next_cell(reader, column, n_between as usize)).collect()
        })?;
        cursor.next_row = row + 1;
        self.keep(cursor);
        Ok(cells)
    }

    fn name(&self, index: u64) -> String {
        format!("{}: row {index}", self.input.path().display())
    }
}

/// Where in a row group some columns are.
struct Cursor {
    group: usize,
    next_row: u64,
    columns: Vec<ColumnReader>,
}

fn find_columns(
    input: &Input,
    reader: &SerializedFileReader<Chunks>,
    names: &[&str],
) -> Result<Vec<Column>> {
    let schema = reader.metadata().file_metadata().schema_descr();
    let mut all = Vec::new();
    for (place, column) in schema.columns().iter().enumerate() {
        let is_read = column.max_rep_level() == 0 && column.physical_type() != Type::INT96;
        let is_text = column.converted_type() == ConvertedType::UTF8
            || matches!(column.logical_type_ref(), Some(LogicalType::String));
        all.push((is_read, Column { name: column.path().string(), place, is_text }));
    }
    let present = || all.iter().map(|(_, column)| column.name.clone()).collect();
    if names.is_empty() {
        return Ok(all
            .into_iter()
            .filter(|(is_read, _)| *is_read)
            .map(|(_, column)| column)
            .collect());
    }
    let find = |name: &&str| match all.iter().find(|(_, column)| column.name == *name) {
        Some((true, column)) => Ok(column.clone()),
        Some((false, _)) => {
            Err(input.corrupt(None, format!("column `{name}` is repeated, or of a type not read")))
        }
        None => Err(Error::NoName {
            path: input.path().to_owned(),
            name: (*name).to_owned(),
            present: present(),
        }),
    };
    names.iter().map(find).collect()
}

/// The library makes room for what the footer announces: looks at it before.
fn check_footer(input: &Input) -> Result<()> {
    let tail_offset = input.n_bytes().saturating_sub(TAIL_BYTES);
    let tail = input.read_vec(tail_offset, TAIL_BYTES)?;
    let [a, b, c, d, mark @ ..] = &tail[..] else { unreachable!("eight bytes were read") };
    let footer_bytes = u64::from(u32::from_le_bytes([*a, *b, *c, *d]));
    if mark != b"PAR1" || footer_bytes > tail_offset {
        let reason = "no parquet file, or cut short: it does not end with a footer that fits";
        return Err(input.corrupt(tail_offset, reason));
    }
    let footer_offset = tail_offset - footer_bytes;
    match is_plausible(&input.read_vec(footer_offset, footer_bytes)?) {
        true => Ok(()),
        false => Err(input.corrupt(footer_offset, "a footer that announces more than it holds")),
    }
}

/// The library is not meant to panic; if it does, it is the file's fault all the same.
fn guarded<T>(input: &Input, work: impl FnOnce() -> ParquetResult<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(input.corrupt(None, error.to_string())),
        Err(_) => Err(input.corrupt(None, "the parquet reader could not cope with it")),
    }
}

/// The value after `n_between` others.
fn next_cell(reader: &mut ColumnReader, column: &Column, n_between: usize) -> ParquetResult<Cell> {
    let text = |bytes: &[u8]| match column.is_text {
        true => String::from_utf8(bytes.to_vec()).map(Cell::Text).map_err(|_| {
            ParquetError::General(format!("column `{}` holds text that is not UTF-8", column.name))
        }),
        false => Ok(Cell::Bytes(bytes.to_vec())),
    };
    let cell = match reader {
        ColumnReader::BoolColumnReader(reader) => {
            next_value(reader, column, n_between)?.map(Cell::Bool)
        }
        ColumnReader::Int32ColumnReader(reader) => {
            next_value(reader, column, n_between)?.map(|value| Cell::Int(value.into()))
        }
        ColumnReader::Int64ColumnReader(reader) => {
            next_value(reader, column, n_between)?.map(Cell::Int)
        }
        ColumnReader::FloatColumnReader(reader) => {
            next_value(reader, column, n_between)?.map(|value| Cell::Float(value.into()))
        }
        ColumnReader::DoubleColumnReader(reader) => {
            next_value(reader, column, n_between)?.map(Cell::Float)
        }
        ColumnReader::ByteArrayColumnReader(reader) => {
            next_value(reader, column, n_between)?.map(|value| text(value.data())).transpose()?
        }
        ColumnReader::FixedLenByteArrayColumnReader(reader) => {
            next_value(reader, column, n_between)?.map(|value| text(value.data())).transpose()?
        }
        ColumnReader::Int96ColumnReader(_) => None,
    };
    Ok(cell.unwrap_or(Cell::Null))
}

fn next_value<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    column: &Column,
    n_between: usize,
) -> ParquetResult<Option<T::T>> {
    let ends =
        || ParquetError::General(format!("column `{}` has fewer rows than its group", column.name));
    if n_between > 0 && reader.skip_records(n_between)? != n_between {
        return Err(ends());
    }
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    let (n_records, _, _) = reader.read_records(1, Some(&mut levels), None, &mut values)?;
    match n_records {
        1 => Ok(values.pop()),
        _ => Err(ends()),
    }
}

/// An input as the library wants it; nothing is promised that the file cannot hold.
struct Chunks(Input);

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.0.n_bytes()
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<Box<dyn Read + Send>>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        check_page(&self.0, start)?;
        Ok(BufReader::with_capacity(4096, Box::new(Tail { input: self.0.clone(), offset: start })))
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        let bytes = self
            .0
            .read_vec(start, length as u64)
            .map_err(|error| ParquetError::External(Box::new(error)))?;
        Ok(bytes.into())
    }
}

/// The input from an offset on, owned: the library keeps it.
struct Tail {
    input: Input,
    offset: u64,
}

impl Read for Tail {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let n_bytes = self.input.read_some(self.offset, buf).map_err(std::io::Error::other)?;
        self.offset += n_bytes as u64;
        Ok(n_bytes)
    }
}

/// Most bytes of a decompressed page of a file of `file_bytes`: no usual compression gains more than
/// a factor of a thousand.
const fn most_page_bytes(file_bytes: u64) -> u64 {
    let by_ratio = file_bytes.saturating_mul(1000);
    if by_ratio < 1 << 30 { by_ratio } else { 1 << 30 }
}

/// The library makes room for a page as its header announces it: looks at the announcement before.
///
/// A page header starts with three 32-bit fields in Thrift's compact form: kind, bytes
/// decompressed, bytes compressed.
fn check_page(input: &Input, start: u64) -> ParquetResult<()> {
    let mut head = [0; 24];
    let n_head = input
        .read_some(start, &mut head)
        .map_err(|error| ParquetError::External(Box::new(error)))?;
    let mut rest = &head[..n_head];
    let announced = number(&mut rest).and_then(|_| number(&mut rest));
    match announced {
        Some(n_bytes) if n_bytes > most_page_bytes(input.n_bytes()) => {
            let n_all = input.n_bytes();
            let reason = format!("a page of {n_bytes} bytes at byte {start} of a file of {n_all}");
            Err(ParquetError::General(reason))
        }
        _ => Ok(()),
    }
}

/// The next 32-bit field, if its number is one more than the last one's.
fn number(rest: &mut &[u8]) -> Option<u64> {
    const NEXT_I32: u8 = 0x15;
    *rest = rest.strip_prefix(&[NEXT_I32])?;
    let (mut value, mut shift) = (0u64, 0);
    loop {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            // Zigzag: a negative number of bytes is the library's to refuse.
            return Some(value >> 1);
        }
        shift += 7;
        if shift > 35 {
            return None;
        }
    }
}

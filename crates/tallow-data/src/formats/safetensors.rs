use super::{
    array::{Array, n_elems},
    input::Input,
    json::{Events, Fault},
};
use crate::{
    error::{Error, Result},
    source::Source,
};
use candle_core::DType;

/// Largest header that is read; the format's own limit.
const MOST_HEADER_BYTES: u64 = 100_000_000;
const PREFIX_BYTES: u64 = 8;

/// One tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// What the file calls it.
    pub name: String,
    /// Type of an element; none where candle has no such type.
    pub dtype: Option<DType>,
    /// Dimensions; none for a scalar.
    pub dims: Vec<u64>,
    /// Where its bytes start in the file.
    pub offset: u64,
    /// Bytes it has.
    pub n_bytes: u64,
}

/// The tensors of a safetensors file.
///
/// Holds the parsed header, no data. Stricter than the format asks, as a reader of foreign files
/// has to be: bytes that belong to two tensors or to none, and names used twice, are refused.
#[derive(Clone, Debug)]
pub struct SafetensorsFile {
    input: Input,
    tensors: Vec<TensorInfo>,
}

impl SafetensorsFile {
    /// Reads the header of `input` and compares it with the length of the file.
    ///
    /// Needs room for the header while it reads it, never for more than is there.
    /// # Errors
    /// If the file is not whole and well formed; the error names the field.
    pub fn open(input: Input) -> Result<Self> {
        let length =
            u64::from_le_bytes(*input.read_vec(0, PREFIX_BYTES)?.first_chunk().unwrap_or(&[0; 8]));
        let left_bytes = input.n_bytes() - PREFIX_BYTES;
        if length > left_bytes || length > MOST_HEADER_BYTES {
            let reason = format!(
                "a header of {length} bytes is announced, {left_bytes} follow and {MOST_HEADER_BYTES} are the most"
            );
            return Err(input.corrupt(0, reason));
        }
        let header = input.read_vec(PREFIX_BYTES, length)?;
        let mut tensors =
            parse(&header).map_err(|(at, reason)| input.corrupt(PREFIX_BYTES + at, reason))?;
        drop(header);
        let data_offset = PREFIX_BYTES + length;
        check_names(&mut tensors)
            .and_then(|()| check_extents(&mut tensors, left_bytes - length, data_offset))
            .map_err(|reason| input.corrupt(None, reason))?;
        Ok(Self { input, tensors })
    }

    /// The tensors, by their place in the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Reads the tensor `name`. Holds its bytes.
    /// # Errors
    /// If there is none, or candle has no type for its elements.
    pub fn read(&self, name: &str) -> Result<Array> {
        let (info, dtype) = self.find(name)?;
        let bytes = self.input.read_vec(info.offset, info.n_bytes)?;
        Ok(Array { dtype, dims: info.dims.iter().map(|&dim| dim as usize).collect(), bytes })
    }

    /// The rows of the tensors `names` along their first dimension, which is the number of samples.
    /// # Errors
    /// If one is missing or a scalar, or they have different numbers of rows.
    pub fn rows(&self, names: &[&str]) -> Result<SafetensorsRows> {
        let (mut columns, mut n_rows) = (Vec::with_capacity(names.len()), None);
        for &name in names {
            let (info, dtype) = self.find(name)?;
            let wrong = |reason: String| self.input.corrupt(info.offset, reason);
            let Some((&n_here, row_dims)) = info.dims.split_first() else {
                return Err(wrong(format!("tensor `{name}` is a single number, it has no rows")));
            };
            let n_others = *n_rows.get_or_insert(n_here);
            if n_here != n_others {
                let reason =
                    format!("tensor `{name}` has {n_here} rows, `{}` {n_others}", names[0]);
                return Err(wrong(reason));
            }
            let row_bytes = info.n_bytes.checked_div(n_here).unwrap_or(0);
            let dims = row_dims.iter().map(|&dim| dim as usize).collect();
            columns.push(Column { offset: info.offset, dtype, dims, row_bytes });
        }
        let (input, n_rows) = (self.input.clone(), n_rows.unwrap_or(0));
        Ok(SafetensorsRows { input, columns, n_rows })
    }

    fn find(&self, name: &str) -> Result<(&TensorInfo, DType)> {
        let Some(info) = self.tensors.iter().find(|info| info.name == name) else {
            return Err(Error::NoName {
                path: self.input.path().to_owned(),
                name: name.to_owned(),
                present: self.tensors.iter().map(|info| info.name.clone()).collect(),
            });
        };
        let dtype = info.dtype.ok_or_else(|| {
            let reason = format!("tensor `{name}` has elements that no tensor here can hold");
            self.input.corrupt(info.offset, reason)
        })?;
        Ok((info, dtype))
    }
}

/// Samples cut from tensors: row `i` of each.
#[derive(Clone, Debug)]
pub struct SafetensorsRows {
    input: Input,
    columns: Vec<Column>,
    n_rows: u64,
}

#[derive(Clone, Debug)]
struct Column {
    offset: u64,
    dtype: DType,
    dims: Vec<usize>,
    row_bytes: u64,
}

impl Source for SafetensorsRows {
    type Item = Vec<Array>;

    fn n_samples(&self) -> u64 {
        self.n_rows
    }

    fn get(&self, index: u64) -> Result<Vec<Array>> {
        if index >= self.n_rows {
            return Err(self.input.out_of_range(index, self.n_rows));
        }
        let row = |column: &Column| {
            let offset = column.offset + index * column.row_bytes;
            let bytes = self.input.read_vec(offset, column.row_bytes)?;
            Ok(Array { dtype: column.dtype, dims: column.dims.clone(), bytes })
        };
        self.columns.iter().map(row).collect()
    }

    fn name(&self, index: u64) -> String {
        format!("{}: row {index}", self.input.path().display())
    }
}

/// Bits of an element, and candle's type for it.
fn element(dtype: &str) -> Option<(u64, Option<DType>)> {
    Some(match dtype {
        "BOOL" | "U8" => (8, Some(DType::U8)),
        "F8_E4M3" => (8, Some(DType::F8E4M3)),
        "I16" => (16, Some(DType::I16)),
        "BF16" => (16, Some(DType::BF16)),
        "F16" => (16, Some(DType::F16)),
        "U32" => (32, Some(DType::U32)),
        "I32" => (32, Some(DType::I32)),
        "F32" => (32, Some(DType::F32)),
        "I64" => (64, Some(DType::I64)),
        "F64" => (64, Some(DType::F64)),
        "I8" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => (8, None),
        "U16" => (16, None),
        "U64" | "C64" => (64, None),
        "F4" => (4, None),
        "F6_E2M3" | "F6_E3M2" => (6, None),
        _ => return None,
    })
}

/// The tensors of a header; offsets still count from the end of it.
fn parse(header: &[u8]) -> Result<Vec<TensorInfo>, Fault> {
    let (mut events, mut tensors) = (Events::new(header), Vec::new());
    let mut seen_metadata = false;
    events.start_object("the header")?;
    while let Some(name) = events.key()? {
        if name != "__metadata__" {
            tensors.push(parse_tensor(&mut events, name.into_owned())?);
        } else if std::mem::replace(&mut seen_metadata, true) {
            return Err((0, "`__metadata__` is there twice".into()));
        } else {
            events.start_object("`__metadata__`")?;
            while let Some(key) = events.key()? {
                events.string(&format!("`__metadata__`, `{key}`"))?;
            }
        }
    }
    events.end()?;
    Ok(tensors)
}

fn parse_tensor(events: &mut Events<'_>, name: String) -> Result<TensorInfo, Fault> {
    let (mut dtype, mut dims, mut offsets) = (None, None, None);
    let fault = |reason: &str| (0, format!("tensor `{name}`: {reason}"));
    events.start_object(&format!("tensor `{name}`"))?;
    while let Some(key) = events.key()? {
        let what = format!("tensor `{name}`, `{key}`");
        let is_second = match &*key {
            "dtype" => dtype.replace(events.string(&what)?.into_owned()).is_some(),
            "shape" => dims.replace(events.naturals(&what)?).is_some(),
            "data_offsets" => offsets.replace(events.naturals(&what)?).is_some(),
            _ => return Err((0, format!("{what} is no field of a tensor"))),
        };
        if is_second {
            return Err((0, format!("{what} is there twice")));
        }
    }
    let (Some(dtype), Some(dims), Some(offsets)) = (dtype, dims, offsets) else {
        return Err(fault("dtype, shape and data_offsets are needed"));
    };
    let Some((bits, dtype)) = element(&dtype) else {
        return Err(fault(&format!("`{dtype}` is no element type")));
    };
    let [start, end] = offsets[..] else {
        return Err(fault(&format!("data_offsets are two numbers, not {}", offsets.len())));
    };
    let n_bits = n_elems(&dims).and_then(|n| n.checked_mul(bits));
    let n_bytes = end.checked_sub(start);
    if n_bytes.is_none() || n_bytes.and_then(|n| n.checked_mul(8)) != n_bits {
        let reason =
            format!("shape {dims:?} of {bits} bits does not fill data_offsets [{start}, {end}]");
        return Err(fault(&reason));
    }
    Ok(TensorInfo { name, dtype, dims, offset: start, n_bytes: end - start })
}

fn check_names(tensors: &mut [TensorInfo]) -> Result<(), String> {
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    match tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(format!("tensor `{}` is there twice", pair[0].name)),
        None => Ok(()),
    }
}

/// Sorts by place and moves offsets to the file's; the data must be covered once, without a rest.
fn check_extents(
    tensors: &mut [TensorInfo],
    data_bytes: u64,
    data_offset: u64,
) -> Result<(), String> {
    tensors.sort_by_key(|info| (info.offset, info.n_bytes));
    let mut covered_bytes = 0;
    for info in tensors {
        let (start, end) = (info.offset, info.offset + info.n_bytes);
        if start != covered_bytes {
            let what =
                if start < covered_bytes { "overlaps the one before" } else { "leaves a hole" };
            let reason = format!("starts at {start}, the one before ends at {covered_bytes}");
            return Err(format!("tensor `{}`, data_offsets: {what}: {reason}", info.name));
        }
        covered_bytes = end;
        info.offset += data_offset;
    }
    match covered_bytes == data_bytes {
        true => Ok(()),
        false => {
            Err(format!("data_offsets cover {covered_bytes} bytes, {data_bytes} follow the header"))
        }
    }
}

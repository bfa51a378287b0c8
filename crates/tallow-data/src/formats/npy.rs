use super::{
    array::{Array, n_elems},
    input::Input,
};
use crate::{error::Result, source::Source};
use candle_core::DType;

// N rows · the dimensions after the first are a sample's
/// What an element is in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    /// `b`, `i`, `u` or `f`.
    pub(crate) kind: u8,
    pub(crate) n_bytes: u8,
    pub(crate) big_endian: bool,
}

impl Element {
    fn parse(descr: &str) -> Option<Self> {
        let (order, rest) = descr.split_at_checked(1)?;
        let (kind, n_bytes) = rest.split_at_checked(1)?;
        let element = Self {
            kind: kind.as_bytes()[0],
            n_bytes: n_bytes.parse().ok().filter(|_| n_bytes.len() == 1)?,
            big_endian: order == ">",
        };
        let known = matches!(
            (element.kind, element.n_bytes),
            (b'b', 1) | (b'i' | b'u', 1 | 2 | 4 | 8) | (b'f', 2 | 4 | 8)
        );
        let ordered = order == "<" || order == ">" || (order == "|" && element.n_bytes == 1);
        (known && ordered).then_some(element)
    }

    /// The candle type that holds it, if there is one.
    fn dtype(self) -> Option<DType> {
        Some(match (self.kind, self.n_bytes) {
            (b'b' | b'u', 1) => DType::U8,
            (b'u', 4) => DType::U32,
            (b'i', 2) => DType::I16,
            (b'i', 4) => DType::I32,
            (b'i', 8) => DType::I64,
            (b'f', 2) => DType::F16,
            (b'f', 4) => DType::F32,
            (b'f', 8) => DType::F64,
            _ => return None,
        })
    }
}

/// A `.npy` header that agrees with the bytes after it.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub(crate) element: Element,
    pub(crate) dims: Vec<u64>,
    pub(crate) data_offset: u64,
}

/// The rows of a NumPy `.npy` file along its first dimension.
///
/// Holds the header's dimensions, no data; a sample is one positioned read. Big-endian elements are
/// turned round. Fortran order is refused unless it is the same as C order: one row of it lies all
/// over the file.
#[derive(Clone, Debug)]
pub struct Npy {
    input: Input,
    header: Header,
    dtype: DType,
    row_dims: Vec<usize>,
    row_bytes: u64,
}

impl Npy {
    /// Reads the header of `input`.
    /// # Errors
    /// If it is no `.npy` of numbers in C order with at least one dimension, or is cut short.
    pub fn open(input: Input) -> Result<Self> {
        let header = read_header(&input)?;
        let Element { kind, n_bytes, .. } = header.element;
        let dtype = header.element.dtype().ok_or_else(|| {
            let kind = char::from(kind);
            input.corrupt(10, format!("no tensor has the element type `{kind}{n_bytes}`"))
        })?;
        let Some((_, row_dims)) = header.dims.split_first() else {
            return Err(input.corrupt(10, "a single number has no rows"));
        };
        // The header was compared with the file: these products are no larger.
        let row_bytes = n_elems(row_dims).unwrap_or(0).saturating_mul(u64::from(n_bytes));
        let row_dims = row_dims.iter().map(|&dim| dim as usize).collect();
        Ok(Self { input, header, dtype, row_dims, row_bytes })
    }

    /// Type of an element.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Dimensions of a sample: all but the first.
    pub fn row_dims(&self) -> &[usize] {
        &self.row_dims
    }

    /// Bytes of a sample.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }
}

impl Source for Npy {
    type Item = Array;

    fn n_samples(&self) -> u64 {
        self.header.dims[0]
    }

    fn get(&self, index: u64) -> Result<Array> {
        if index >= self.n_samples() {
            return Err(self.input.out_of_range(index, self.n_samples()));
        }
        let offset = self.header.data_offset + index * self.row_bytes;
        let mut bytes = self.input.read_vec(offset, self.row_bytes)?;
        if self.header.element.big_endian {
            bytes
                .chunks_exact_mut(usize::from(self.header.element.n_bytes))
                .for_each(<[u8]>::reverse);
        }
        Ok(Array { dtype: self.dtype, dims: self.row_dims.clone(), bytes })
    }

    fn name(&self, index: u64) -> String {
        format!("{}[{index}]", self.input.path().display())
    }
}

pub(crate) const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// Reads the header and compares it with the length of the input.
pub(crate) fn read_header(input: &Input) -> Result<Header> {
    /// NumPy itself refuses headers above 10 000 bytes unless told otherwise.
    const MOST_BYTES: u64 = 64 << 10;
    let mut start = [0; 12];
    let n_start = input.read_some(0, &mut start)?;
    if n_start < 10 || &start[..6] != MAGIC {
        return Err(input.corrupt(0, "not a .npy file"));
    }
    let (length, text_offset) = match start[6] {
        1 => (u64::from(u16::from_le_bytes([start[8], start[9]])), 10),
        2 | 3 if n_start == 12 => {
            (u64::from(u32::from_le_bytes([start[8], start[9], start[10], start[11]])), 12)
        }
        version => return Err(input.corrupt(6, format!("version {version} of .npy is not known"))),
    };
    if length > MOST_BYTES {
        let reason = format!("a header of {length} bytes, {MOST_BYTES} are the most");
        return Err(input.corrupt(8, reason));
    }
    let text = input.read_vec(text_offset, length)?;
    let fields = Dict::parse(&text)
        .map_err(|(at, reason)| input.corrupt(text_offset + at as u64, reason))?;
    checked(input, fields, text_offset + length)
}

fn checked(input: &Input, fields: Dict, data_offset: u64) -> Result<Header> {
    let Dict { descr, fortran_order, dims } = fields;
    let element = Element::parse(&descr)
        .ok_or_else(|| input.corrupt(10, format!("elements of type `{descr}` are not read")))?;
    // With one dimension above 1 both orders are the same.
    if fortran_order && dims.iter().filter(|&&dim| dim > 1).count() > 1 {
        let reason = format!("{dims:?} in Fortran order; save it with numpy.ascontiguousarray");
        return Err(input.corrupt(10, reason));
    }
    let need_bytes = n_elems(&dims).and_then(|n| n.checked_mul(u64::from(element.n_bytes)));
    let found_bytes = input.n_bytes() - data_offset;
    if need_bytes != Some(found_bytes) || dims.iter().any(|&dim| usize::try_from(dim).is_err()) {
        let bits = 8 * element.n_bytes;
        let reason =
            format!("{dims:?} elements of {bits} bits are announced, {found_bytes} bytes follow");
        return Err(input.corrupt(data_offset, reason));
    }
    // A row of no elements would be a sample without bytes, and there may be 2^64 of them.
    if found_bytes == 0 && dims.iter().any(|&dim| dim > 0) {
        return Err(input.corrupt(10, format!("{dims:?} is no array with elements")));
    }
    Ok(Header { element, dims, data_offset })
}

/// The Python literal of a header: a dictionary of a string, a bool and a tuple of numbers.
#[derive(Debug, Default)]
struct Dict {
    descr: String,
    fortran_order: bool,
    dims: Vec<u64>,
}

type Fault = (usize, String);

impl Dict {
    fn parse(text: &[u8]) -> Result<Self, Fault> {
        const MOST_DIMS: usize = 64; // NumPy's limit
        let mut cursor = Cursor { text, at: 0 };
        let (mut dict, mut seen) = (Self::default(), [false; 3]);
        cursor.expect(b'{')?;
        while !cursor.eat(b'}') {
            let (key, at) = (cursor.string()?, cursor.at);
            cursor.expect(b':')?;
            let field = match key.as_str() {
                "descr" => 0,
                "fortran_order" => 1,
                "shape" => 2,
                _ => return Err((at, format!("`{key}` is no field of a .npy header"))),
            };
            if std::mem::replace(&mut seen[field], true) {
                return Err((at, format!("`{key}` is there twice")));
            }
            match field {
                0 => dict.descr = cursor.string()?,
                1 => dict.fortran_order = cursor.boolean()?,
                _ => dict.dims = cursor.tuple(MOST_DIMS)?,
            }
            if !cursor.eat(b',') {
                cursor.expect(b'}')?;
                break;
            }
        }
        cursor.skip_space();
        match seen == [true; 3] && cursor.at == text.len() {
            true => Ok(dict),
            false => {
                Err((cursor.at, "descr, fortran_order and shape are needed, nothing else".into()))
            }
        }
    }
}

struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn skip_space(&mut self) {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    fn eat(&mut self, byte: u8) -> bool {
        self.skip_space();
        let found = self.text.get(self.at) == Some(&byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Result<(), Fault> {
        match self.eat(byte) {
            true => Ok(()),
            false => Err((self.at, format!("`{}` is expected", char::from(byte)))),
        }
    }

    fn string(&mut self) -> Result<String, Fault> {
        let quote = if self.eat(b'"') { b'"' } else { b'\'' };
        if quote == b'\'' {
            self.expect(b'\'')?;
        }
        let rest = &self.text[self.at..];
        let n_bytes = rest.iter().position(|&byte| byte == quote);
        let text = n_bytes.and_then(|n| std::str::from_utf8(&rest[..n]).ok());
        let text = text.ok_or((self.at, "a string is expected".to_owned()))?.to_owned();
        self.at += text.len() + 1;
        Ok(text)
    }

    fn boolean(&mut self) -> Result<bool, Fault> {
        self.skip_space();
        for (word, value) in [("True", true), ("False", false)] {
            if self.text[self.at..].starts_with(word.as_bytes()) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err((self.at, "True or False is expected".into()))
    }

    fn tuple(&mut self, most: usize) -> Result<Vec<u64>, Fault> {
        let mut numbers = Vec::new();
        self.expect(b'(')?;
        while !self.eat(b')') {
            if numbers.len() == most {
                return Err((self.at, format!("more than {most} dimensions")));
            }
            numbers.push(self.number()?);
            if !self.eat(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(numbers)
    }

    fn number(&mut self) -> Result<u64, Fault> {
        self.skip_space();
        let rest = &self.text[self.at..];
        let n_digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let digits = std::str::from_utf8(&rest[..n_digits]).unwrap_or("");
        let number = digits.parse().map_err(|_| (self.at, "a dimension is expected".to_owned()))?;
        self.at += n_digits;
        Ok(number)
    }
}

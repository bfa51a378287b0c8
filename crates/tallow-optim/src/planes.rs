//! The arrays of bytes that make up a parameter's state, one list for memory, file and checkpoint.

use crate::{
    config::{Algorithm, Config},
    price::adafactor_numbers,
};
use candle_core::{DType, Tensor};
use safetensors::Dtype;
use tallow_kernels::optim::{Format, Rounding};

/// One array of bytes.
#[derive(Clone, Debug)]
pub(crate) struct Plane {
    /// What follows the parameter's name in a checkpoint.
    pub(crate) suffix: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) dims: Vec<usize>,
    pub(crate) n_bytes: u64,
    part: Part,
}

/// How a plane grows with the elements of its parameter.
#[derive(Clone, Copy, Debug)]
enum Part {
    Main(Format),
    Side(Format),
    /// A bf16 an element.
    Kahan,
    /// Not with its elements.
    Factor,
}

/// What a parameter's state consists of.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) m: Option<Format>,
    pub(crate) v: Option<Format>,
    pub(crate) kahan: bool,
    /// In this order: `m`, its side plane, `v`, its side plane or `row` and `col`, `kahan`.
    pub(crate) planes: Vec<Plane>,
}

impl Plan {
    pub(crate) fn new(config: &Config, param: &Tensor) -> Plan {
        let (n_elems, dims) = (param.elem_count(), param.dims());
        let format = config.format(param.dtype(), n_elems);
        let factored = matches!(config.algorithm, Algorithm::Adafactor { .. });
        let (m, v) = config.algorithm.moments();
        let (m, v) = (m.then_some(format), (v && !factored).then_some(format));
        let is_short = matches!(param.dtype(), DType::BF16 | DType::F16);
        let kahan = is_short && config.weights == Rounding::Kahan;
        let mut planes = Vec::new();
        for (format, names) in [(m, ["m", "m.low", "m.absmax"]), (v, ["v", "v.low", "v.absmax"])] {
            let Some(format) = format else { continue };
            planes.push(Plane::new(names[0], Part::Main(format), dims, n_elems));
            match format {
                Format::Bf16(Rounding::Kahan) => {
                    planes.push(Plane::new(names[1], Part::Side(format), dims, n_elems));
                }
                Format::Bits8(block) => {
                    let n_blocks = [n_elems.div_ceil(block.n_elems())];
                    planes.push(Plane::new(names[2], Part::Side(format), &n_blocks, n_elems));
                }
                _ => {}
            }
        }
        if factored {
            planes.extend(factors(dims, format));
        }
        if kahan {
            planes.push(Plane::new("kahan", Part::Kahan, dims, n_elems));
        }
        Plan { m, v, kahan, planes }
    }

    /// Bytes of the whole state.
    pub(crate) fn n_bytes(&self) -> u64 {
        self.planes.iter().map(|plane| plane.n_bytes).sum()
    }

    /// Bytes of the state of `n_elems` elements.
    pub(crate) fn bytes_of(&self, n_elems: u64) -> u64 {
        self.planes.iter().map(|plane| plane.bytes_of(n_elems)).sum()
    }
}

/// The planes of Adafactor's second moment.
fn factors(dims: &[usize], format: Format) -> Vec<Plane> {
    let dtype = if format == Format::F64 { Dtype::F64 } else { Dtype::F32 };
    let plane = |suffix, dims: Vec<usize>| {
        let n_bytes = format.bytes(dims.iter().map(|d| *d as u64).product());
        Plane { suffix, dtype, dims, n_bytes, part: Part::Factor }
    };
    match adafactor_numbers(dims) {
        (_, 0) => vec![plane("v", dims.to_vec())],
        _ => {
            let (mut row, mut col) = (dims.to_vec(), dims.to_vec());
            row.pop();
            col.remove(dims.len() - 2);
            vec![plane("row", row), plane("col", col)]
        }
    }
}

impl Plane {
    fn new(suffix: &'static str, part: Part, dims: &[usize], n_elems: usize) -> Plane {
        let dtype = match part {
            Part::Main(Format::F64) => Dtype::F64,
            Part::Main(Format::F32) | Part::Side(Format::Bits8(_)) | Part::Factor => Dtype::F32,
            Part::Main(Format::Bits8(_)) => Dtype::U8,
            Part::Main(Format::Bf16(_)) | Part::Side(_) | Part::Kahan => Dtype::BF16,
        };
        let mut plane = Plane { suffix, dtype, dims: dims.to_vec(), n_bytes: 0, part };
        plane.n_bytes = plane.bytes_of(n_elems as u64);
        plane
    }

    /// Bytes of the first `n_elems` elements, whole blocks of them.
    pub(crate) fn bytes_of(&self, n_elems: u64) -> u64 {
        match self.part {
            Part::Main(format) => format.main_bytes(n_elems),
            Part::Side(format) => format.side_bytes(n_elems),
            Part::Kahan => 2 * n_elems,
            Part::Factor => self.n_bytes,
        }
    }
}

//! `.npy`, safetensors and token files: right values, and an error for each way to be wrong.
mod common;
use candle_core::{DType, Device};
use common::{npy, safetensors};
use tallow_data::{
    Source,
    formats::{Input, Npy, SafetensorsFile, Token, Tokens},
};

fn input(content: Vec<u8>) -> Input {
    Input::new("the.file", content)
}

fn f32_bytes(values: &[f32], big_endian: bool) -> Vec<u8> {
    let bytes = |v: &f32| if big_endian { v.to_be_bytes() } else { v.to_le_bytes() };
    values.iter().flat_map(bytes).collect()
}

const SIX: [f32; 6] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0];

#[test]
fn rows_of_an_npy() {
    for (descr, big_endian) in [("<f4", false), (">f4", true)] {
        let rows =
            Npy::open(input(npy(descr, false, "(2, 3)", &f32_bytes(&SIX, big_endian)))).unwrap();
        assert_eq!((rows.n_samples(), rows.row_dims(), rows.row_bytes()), (2, &[3][..], 12));
        let row = rows.get(1).unwrap().to_tensor(&Device::Cpu).unwrap();
        assert_eq!(row.to_vec1::<f32>().unwrap(), [3.0, 4.0, 5.0]);
        assert_eq!(rows.get(2).unwrap_err().to_string(), "`the.file`: sample 2, there are 2");
    }
    let bytes = Npy::open(input(npy("|b1", false, "(2,)", &[1, 0]))).unwrap();
    assert_eq!((bytes.dtype(), bytes.get(0).unwrap().bytes), (DType::U8, vec![1]));
}

/// NumPy's own Fortran array of 2x3 is refused; the orders that are the same are read.
#[test]
fn spare_6_fortran_order_is_never_transposed() {
    let columns = f32_bytes(&[0.0, 3.0, 1.0, 4.0, 2.0, 5.0], false);
    let error = Npy::open(input(npy("<f4", true, "(2, 3)", &columns))).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("[2, 3] in Fortran order") && error.contains("ascontiguousarray"),
        "{error}"
    );
    for shape in ["(6,)", "(6, 1)", "(1, 6)", "(1, 6, 1)"] {
        let same = Npy::open(input(npy("<f4", true, shape, &f32_bytes(&SIX, false)))).unwrap();
        let first = same.get(same.n_samples() - 1).unwrap().bytes;
        assert_eq!(first[first.len() - 4..], 5f32.to_le_bytes());
    }
}

#[test]
fn an_npy_is_refused_with_its_place() {
    let data = f32_bytes(&SIX, false);
    let good = npy("<f4", false, "(2, 3)", &data);
    let mut version_9 = good.clone();
    version_9[6] = 9;
    let cut = good[..good.len() - 1].to_vec();
    let long = [&good[..], &[0]].concat();
    let mut long_header = b"\x93NUMPY\x02\x00".to_vec();
    long_header.extend(u32::MAX.to_le_bytes());
    for (content, needle) in [
        (b"PK\x03\x04 not that".to_vec(), "at byte 0: not a .npy file"),
        (vec![], "not a .npy file"),
        (version_9, "at byte 6: version 9"),
        (cut, "32 bits are announced, 23 bytes follow"),
        (long, "32 bits are announced, 25 bytes follow"),
        (long_header, "a header of 4294967295 bytes, 65536 are the most"),
        (npy("<f4", false, "(4294967296, 4294967296, 4)", &data), "are announced, 24 bytes follow"),
        (npy("<f4", false, "(99999999999999999999,)", &data), "a dimension is expected"),
        (npy("<f4", false, "(5, 0)", &[]), "[5, 0] is no array with elements"),
        (npy("<c8", false, "(3,)", &data), "elements of type `<c8` are not read"),
        (npy("<u8", false, "(3,)", &data), "no tensor has the element type `u8`"),
        (npy("<f4", false, "()", &data[..4]), "a single number has no rows"),
        (npy("<f4', 'descr': '<f4", false, "(6,)", &data), "`descr` is there twice"),
    ] {
        let error = Npy::open(input(content)).unwrap_err().to_string();
        assert!(error.starts_with("`the.file`") && error.contains(needle), "{error} / {needle}");
    }
}

#[test]
fn sequences_overlap_by_one_token() {
    let tokens: Vec<u32> = (0..11).map(|i| i * 7).collect();
    let u16s: Vec<u8> = tokens.iter().flat_map(|&t| (t as u16).to_le_bytes()).collect();
    let u32s: Vec<u8> = tokens.iter().flat_map(|&t| t.to_le_bytes()).collect();
    for source in [
        Tokens::raw(input(u16s.clone()), Token::U16, 3).unwrap(),
        Tokens::raw(input(u32s.clone()), Token::U32, 3).unwrap(),
        Tokens::npy(input(npy("<u2", false, "(11,)", &u16s)), 3).unwrap(),
        Tokens::npy(input(npy("<u4", false, "(11,)", &u32s)), 3).unwrap(),
    ] {
        assert_eq!((source.n_tokens(), source.n_samples()), (11, 3));
        assert_eq!(source.get(0).unwrap(), [0, 7, 14, 21]);
        assert_eq!(source.get(2).unwrap(), [42, 49, 56, 63]);
        let checked = source.with_vocab(50);
        assert!(checked.get(0).is_ok());
        assert!(checked.get(2).unwrap_err().to_string().contains("token 56 is outside the 50"));
    }
    for (content, seq_tokens, needle) in [
        (u16s[..21].to_vec(), 3, "21 bytes are no whole number of U16 tokens"),
        (u16s.clone(), 11, "holds 11 tokens, a sequence of 11 needs one more"),
        (u16s.clone(), 0, "a sequence of 0"),
        (vec![], 3, "holds 0 tokens"),
        (u16s, u64::MAX, "holds 11 tokens"),
    ] {
        let error = Tokens::raw(input(content), Token::U16, seq_tokens).unwrap_err().to_string();
        assert!(error.contains(needle), "{error}");
    }
    let error = Tokens::npy(input(npy("<f4", false, "(2,)", &[0; 8])), 1).unwrap_err().to_string();
    assert!(error.contains("tokens are little-endian u16 or u32"), "{error}");
}

#[test]
fn a_file_cut_while_it_is_open_is_an_error() {
    let path = common::folder("cut").join("t.bin");
    std::fs::write(&path, [0; 40]).unwrap();
    let source = Tokens::raw(Input::open(&path).unwrap(), Token::U16, 4).unwrap();
    std::fs::write(&path, [0; 15]).unwrap();
    assert_eq!(source.get(0).unwrap(), [0; 5]);
    let error = source.get(1).unwrap_err().to_string();
    assert!(
        error.ends_with("t.bin` at byte 8: cut short, 10 bytes are expected and 7 found"),
        "{error}"
    );
}

const XY: &str = r#"{"__metadata__":{"k":"v"},"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"y":{"dtype":"U8","shape":[2],"data_offsets":[24,26]}}"#;

fn xy_data() -> Vec<u8> {
    [f32_bytes(&SIX, false), vec![8, 9]].concat()
}

#[test]
fn rows_of_safetensors() {
    let file = SafetensorsFile::open(input(safetensors(XY, &xy_data()))).unwrap();
    assert_eq!(file.tensors().len(), 2);
    assert_eq!(file.read("x").unwrap().to_tensor(&Device::Cpu).unwrap().dims(), [2, 3]);
    let rows = file.rows(&["x", "y"]).unwrap();
    let row = rows.get(1).unwrap();
    assert_eq!(
        (rows.n_samples(), &row[0].bytes[..], &row[1].bytes[..]),
        (2, &f32_bytes(&SIX[3..], false)[..], &[9][..])
    );
    let error = file.read("z").unwrap_err().to_string();
    assert_eq!(error, "`the.file` holds no `z`; it holds `x`, `y`");
}

/// What the `safetensors` crate writes, this reads.
#[test]
fn safetensors_of_the_crate_load() {
    let tensor = candle_core::Tensor::arange(0f32, 6.0, &Device::Cpu).unwrap();
    let path = common::folder("crate").join("t.safetensors");
    candle_core::safetensors::save(&[("t", tensor)].into(), &path).unwrap();
    let file = SafetensorsFile::open(Input::open(&path).unwrap()).unwrap();
    assert_eq!(file.read("t").unwrap().bytes, f32_bytes(&SIX, false));
}

#[test]
fn res_5_malformed_safetensors() {
    let data = xy_data();
    let good = safetensors(XY, &data);
    let with = |from: &str, to: &str| safetensors(&XY.replacen(from, to, 1), &data);
    let prefix = |length: u64| [&length.to_le_bytes(), &good[8..]].concat();
    let length = XY.len() as u64;
    let nul_padded = safetensors(&format!("{XY}\0\0\0"), &data);
    for (content, needle) in [
        (prefix(0), "not JSON"),
        (prefix(1 << 63), "a header of 9223372036854775808 bytes is announced"),
        (prefix(good.len() as u64 + 1), "bytes is announced"),
        (prefix(length - 1), "not JSON"),
        (good[..5].to_vec(), "8 bytes are expected and 5 found"),
        (vec![], "8 bytes are expected and 0 found"),
        (
            with("[0,24]", "[24,0]"),
            "tensor `x`: shape [2, 3] of 32 bits does not fill data_offsets [24, 0]",
        ),
        (with("[24,26]", "[25,27]"), "tensor `y`, data_offsets: leaves a hole"),
        (with("[24,26]", "[23,25]"), "tensor `y`, data_offsets: overlaps"),
        (
            with("[2],\"data_offsets\":[24,26]", "[99],\"data_offsets\":[24,123]"),
            "cover 123 bytes, 26 follow",
        ),
        (with("[24,26]", "[18446744073709551613,18446744073709551615]"), "leaves a hole"),
        (with("[2,3]", "[4294967296,4294967296]"), "tensor `x`: shape"),
        (with("[2,3]", "[2,2]"), "tensor `x`: shape"),
        (with("[2,3]", "[-2,3]"), "tensor `x`, `shape` is no array of whole numbers"),
        (with("[2,3]", "[2.5,3]"), "`shape` is no array"),
        (with("F32", "F33"), "tensor `x`: `F33` is no element type"),
        (with("\"y\"", "\"x\""), "tensor `x` is there twice"),
        (with("\"shape\":[2]", "\"dtype\":\"U8\""), "tensor `y`, `dtype` is there twice"),
        (with("[0,24]", "[0,24,24]"), "data_offsets are two numbers, not 3"),
        (nul_padded, "not JSON"),
        (good[..good.len() - 1].to_vec(), "data_offsets cover 26 bytes, 25 follow the header"),
        ([&good[..], &[0]].concat(), "data_offsets cover 26 bytes, 27 follow the header"),
    ] {
        let error = SafetensorsFile::open(input(content)).unwrap_err().to_string();
        assert!(error.starts_with("`the.file`") && error.contains(needle), "{error} / {needle}");
    }
}

/// Some readers cut headers where they cross a fetch's boundary.
#[test]
fn res_5_headers_of_any_length_load() {
    for length in 99_991..=100_001 {
        let padded = format!("{XY}{}", " ".repeat(length - XY.len()));
        let file = SafetensorsFile::open(input(safetensors(&padded, &xy_data()))).unwrap();
        assert_eq!(file.read("y").unwrap().bytes, [8, 9]);
    }
}

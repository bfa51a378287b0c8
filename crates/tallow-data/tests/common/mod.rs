//! Files made by hand, files made wrong, and a folder to put them in.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses a part of it")]
use flate2::{Compression, write::GzEncoder};
use std::{fs, io::Write, path::PathBuf};

/// A header of bytes with `dims`, then `bytes`.
pub fn idx(dims: &[u32], bytes: &[u8]) -> Vec<u8> {
    let mut content = vec![0, 0, 0x08, dims.len() as u8];
    dims.iter().for_each(|dim| content.extend(dim.to_be_bytes()));
    content.extend(bytes);
    content
}

pub fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

/// An empty folder of the test named `name`.
pub fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("tallow-data").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Fills `bytes` from `offset` on.
pub fn read_exact_at(file: &fs::File, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, bytes, offset).and_then(|n| {
        if n == bytes.len() { Ok(()) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
    });
}
/// SplitMix64, by its state.
pub struct Draw(pub u64);

impl Draw {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// One to three truncations, bit flips, byte changes, header edits, insertions or repetitions.
pub fn mutate(content: &[u8], draw: &mut Draw) -> Vec<u8> {
    let mut mutant = content.to_vec();
    for _ in 0..=draw.below(3) {
        let at = draw.below(mutant.len() + 1);
        match draw.below(6) {
            0 => mutant.truncate(at),
            1 => mutant.insert(at, draw.next() as u8),
            2 => mutant.extend_from_within(at..),
            kind if at < mutant.len() => {
                let at = if kind == 5 { at % 20 } else { at };
                match mutant.get_mut(at) {
                    Some(byte) if kind == 3 => *byte ^= 1 << draw.below(8),
                    Some(byte) => *byte = draw.next() as u8,
                    None => {}
                }
            }
            _ => {}
        }
    }
    mutant
}

/// A `.npy` file, version 1.
pub fn npy(descr: &str, fortran_order: bool, shape: &str, data: &[u8]) -> Vec<u8> {
    let order = if fortran_order { "True" } else { "False" };
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
    while !(10 + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let mut content = b"\x93NUMPY\x01\x00".to_vec();
    content.extend((header.len() as u16).to_le_bytes());
    content.extend(header.as_bytes());
    content.extend(data);
    content
}

/// A safetensors file: length, header, data.
pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut content = (header.len() as u64).to_le_bytes().to_vec();
    content.extend(header.as_bytes());
    content.extend(data);
    content
}

#[cfg(feature = "images")]
pub mod images {
    //! Pictures, encoded by other libraries than the ones that decode them where there are such.
    use std::{fs, path::PathBuf};
    use tallow_data::image::{Channels, Image, encode_png};

    /// A smooth colour picture of `[H, W]`.
    pub fn gradient(size: [usize; 2]) -> Image {
        let [height, width] = size;
        let pixel = |i: usize| {
            let (y, x) = (i / width, i % width);
            [
                (x * 255 / width) as u8,
                (y * 255 / height) as u8,
                ((x + y) * 127 / (width + height)) as u8,
            ]
        };
        Image::new(size, Channels::Rgb, (0..height * width).flat_map(pixel).collect()).unwrap()
    }

    pub fn jpeg(image: &Image, progressive: bool) -> Vec<u8> {
        let mut content = Vec::new();
        let mut encoder = jpeg_encoder::Encoder::new(&mut content, 95);
        encoder.set_progressive(progressive);
        let colour = match image.channels() {
            Channels::Grey => jpeg_encoder::ColorType::Luma,
            Channels::Rgb => jpeg_encoder::ColorType::Rgb,
            Channels::Rgba | Channels::Rgbx => jpeg_encoder::ColorType::Rgba,
        };
        let [height, width] = image.size().map(|side| side as u16);
        encoder.encode(image.pixels(), width, height, colour).unwrap();
        content
    }

    pub fn png(
        size: [u32; 2],
        colour: png::ColorType,
        depth: png::BitDepth,
        data: &[u8],
    ) -> Vec<u8> {
        let mut content = Vec::new();
        let mut encoder = png::Encoder::new(&mut content, size[1], size[0]);
        encoder.set_color(colour);
        encoder.set_depth(depth);
        encoder.write_header().unwrap().write_image_data(data).unwrap();
        content
    }

    pub fn webp(image: &Image) -> Vec<u8> {
        let mut content = Vec::new();
        let [height, width] = image.size().map(|side| side as u32);
        image_webp::WebPEncoder::new(&mut content)
            .encode(image.pixels(), width, height, image_webp::ColorType::Rgb8)
            .unwrap();
        content
    }

    /// Case DAT-2's folder: five good JPEGs, one cut at half, one empty, one PNG named `.jpg`.
    pub fn folder_of_8(name: &str) -> PathBuf {
        let root = super::folder(name);
        let (a, b) = (root.join("a"), root.join("b"));
        fs::create_dir_all(&a).unwrap();
        fs::create_dir_all(&b).unwrap();
        let good = jpeg(&gradient([20, 30]), false);
        (0..4).for_each(|i| fs::write(a.join(format!("{i}.jpg")), &good).unwrap());
        fs::write(b.join("4.JPG"), &good).unwrap();
        fs::write(b.join("cut.jpg"), &good[..good.len() / 2]).unwrap();
        fs::write(b.join("empty.jpg"), b"").unwrap();
        fs::write(b.join("png_inside.jpg"), encode_png(&gradient([20, 30])).unwrap()).unwrap();
        fs::write(b.join(".hidden.jpg"), &good).unwrap();
        fs::write(b.join("labels.csv"), "x").unwrap();
        root
    }
}

/// A tar file of `members`, names and contents.
#[cfg(feature = "tar")]
pub fn shard(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// A parquet file of `n_groups` groups of `n_rows`: a number, a text or null, bytes in a group, a
/// float, and a repeated column.
#[cfg(feature = "parquet")]
pub fn parquet_file(n_rows: i64, n_groups: i64) -> Vec<u8> {
    use parquet::{
        basic::Compression,
        data_type::{ByteArrayType, DoubleType, Int64Type},
        file::{properties::WriterProperties, writer::SerializedFileWriter},
        schema::parser::parse_message_type,
    };
    use std::sync::Arc;
    let schema = "message m {
        REQUIRED INT64 id; OPTIONAL BYTE_ARRAY text (UTF8);
        REQUIRED GROUP image { REQUIRED BYTE_ARRAY bytes; }
        REQUIRED DOUBLE x;
        REQUIRED GROUP tags (LIST) { REPEATED GROUP list { REQUIRED INT64 element; } }
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_data_page_row_count_limit(16)
        .set_write_batch_size(16);
    let mut content = Vec::new();
    let mut file =
        SerializedFileWriter::new(&mut content, schema, Arc::new(properties.build())).unwrap();
    for group in 0..n_groups {
        let ids: Vec<i64> = (group * n_rows..(group + 1) * n_rows).collect();
        let mut rows = file.next_row_group().unwrap();
        let mut column = rows.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let texts: Vec<_> = ids
            .iter()
            .filter(|i| *i % 3 != 0)
            .map(|i| format!("row {i}").into_bytes().into())
            .collect();
        let levels: Vec<i16> = ids.iter().map(|i| i16::from(i % 3 != 0)).collect();
        let mut column = rows.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None).unwrap();
        column.close().unwrap();
        let blobs: Vec<_> = ids.iter().map(|&i| vec![i as u8; 5].into()).collect();
        let mut column = rows.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&blobs, None, None).unwrap();
        column.close().unwrap();
        let floats: Vec<f64> = ids.iter().map(|&i| i as f64 / 4.0).collect();
        let mut column = rows.next_column().unwrap().unwrap();
        column.typed::<DoubleType>().write_batch(&floats, None, None).unwrap();
        column.close().unwrap();
        let mut column = rows.next_column().unwrap().unwrap();
        let (ones, zeros) = (vec![1; ids.len()], vec![0; ids.len()]);
        column.typed::<Int64Type>().write_batch(&ids, Some(&ones), Some(&zeros)).unwrap();
        column.close().unwrap();
        rows.close().unwrap();
    }
    file.close().unwrap();
    content
}

/// Words of a tiny vocabulary; padding and truncation are asked for, and must not be applied.
pub const WORDS: &str = r#"{"version":"1.0",
"truncation":{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0},
"padding":{"strategy":{"Fixed":9},"direction":"Right","pad_to_multiple_of":null,"pad_id":0,"pad_type_id":0,"pad_token":"?"},
"added_tokens":[{"id":4,"content":"<end>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
"normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
"model":{"type":"WordLevel","vocab":{"?":0,"the":1,"cat":2,"sat":70000},"unk_token":"?"}}"#;

/// A column `image.bytes`.
#[cfg(feature = "parquet")]
pub fn parquet_of_bytes(values: &[Vec<u8>]) -> Vec<u8> {
    use parquet::{
        data_type::ByteArrayType, file::writer::SerializedFileWriter,
        schema::parser::parse_message_type,
    };
    let schema = "message m { REQUIRED GROUP image { REQUIRED BYTE_ARRAY bytes; } }";
    let schema = std::sync::Arc::new(parse_message_type(schema).unwrap());
    let mut content = Vec::new();
    let mut file = SerializedFileWriter::new(&mut content, schema, Default::default()).unwrap();
    let mut rows = file.next_row_group().unwrap();
    let mut column = rows.next_column().unwrap().unwrap();
    let values: Vec<_> = values.iter().map(|value| value.clone().into()).collect();
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    rows.close().unwrap();
    file.close().unwrap();
    content
}

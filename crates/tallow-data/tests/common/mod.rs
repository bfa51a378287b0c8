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

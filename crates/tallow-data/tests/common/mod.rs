//! IDX files made by hand, and a folder to put them in.
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

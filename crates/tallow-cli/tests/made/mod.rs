//! Files that tests make: shards, tables, arrays.

use serde_json::json;
use std::{fs, path::PathBuf, sync::Arc};

/// A folder of its own, gone with the test.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tallow-made-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(&path, content).expect("written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A tar file.
pub(crate) fn shard(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, &content[..]).expect("written");
    }
    builder.into_inner().expect("written")
}

/// A parquet file of a column of bytes or text, and one of numbers.
pub(crate) fn parquet(schema: &str, blobs: &[Vec<u8>], numbers: &[i64]) -> Vec<u8> {
    use parquet::{
        data_type::{ByteArrayType, Int64Type},
        file::{properties::WriterProperties, writer::SerializedFileWriter},
        schema::parser::parse_message_type,
    };
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let properties = Arc::new(WriterProperties::builder().build());
    let mut content = Vec::new();
    let mut file = SerializedFileWriter::new(&mut content, schema, properties).expect("a file");
    let half = blobs.len().div_ceil(2);
    for (blobs, numbers) in blobs.chunks(half).zip(numbers.chunks(half)) {
        let mut rows = file.next_row_group().expect("a group");
        let blobs: Vec<_> = blobs.iter().map(|blob| blob.clone().into()).collect();
        let mut column = rows.next_column().expect("a column").expect("one");
        column.typed::<ByteArrayType>().write_batch(&blobs, None, None).expect("written");
        column.close().expect("closed");
        let mut column = rows.next_column().expect("a column").expect("one");
        column.typed::<Int64Type>().write_batch(numbers, None, None).expect("written");
        column.close().expect("closed");
        rows.close().expect("closed");
    }
    file.close().expect("closed");
    content
}

/// A name, a type as safetensors has it, a shape, and bytes.
pub(crate) type Tensor<'a> = (&'a str, &'a str, &'a [usize], &'a [u8]);

pub(crate) fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let ends = [data.len(), data.len() + bytes.len()];
        let tensor = json!({"dtype": dtype, "shape": shape, "data_offsets": ends});
        header.insert(name.to_string(), tensor);
        data.extend(*bytes);
    }
    let header = json!(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

pub(crate) fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    let length = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), data].concat()
}

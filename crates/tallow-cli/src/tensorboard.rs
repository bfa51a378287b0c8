//! Event files of TensorBoard: records of a length, its checksum, an `Event` in protobuf, its checksum.

use anyhow::{Context, Result};
use serde_json::Value;
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// How TensorBoard knows its files.
const NAME: &str = "events.out.tfevents";
const VERSION: &str = "brain.Event:2";

/// What TensorBoard shows, and the key of a line of the metrics.
const TAGS: [(&str, &str); 7] = [
    ("loss/train", "loss"),
    ("learning_rate", "learning_rate"),
    ("loss_scale", "loss_scale"),
    ("memory/live_bytes", "live_bytes"),
    ("memory/peak_bytes", "peak_bytes"),
    ("loss/held_out", "held_out_loss"),
    ("accuracy/held_out", "accuracy"),
];

/// The open file.
pub(crate) struct Events {
    path: PathBuf,
    file: File,
}

impl Events {
    /// Begins a file in `folder` that goes on after `n_windows` updates: TensorBoard then forgets what was
    /// written of the last of them and later, and `newest`, what stays of the last, is written again. Files
    /// of an earlier run go with its first update.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(crate) fn open(folder: &Path, n_windows: u64, newest: &[Value]) -> Result<Self> {
        let mut n_files = 0;
        for entry in fs::read_dir(folder).with_context(|| format!("`{}`", folder.display()))? {
            let path = entry.with_context(|| format!("`{}`", folder.display()))?.path();
            let is_ours = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(NAME);
            if path.file_name().is_some_and(is_ours) {
                match n_windows {
                    0 => fs::remove_file(&path).with_context(|| format!("`{}`", path.display()))?,
                    _ => n_files += 1,
                }
            }
        }
        // Files are read in the order of their names.
        let path = folder.join(format!("{NAME}.{:010}.{n_files:06}.tallow", now() as u64));
        let file = File::create(&path).with_context(|| format!("`{}`", path.display()))?;
        let mut events = Self { path, file };
        let mut version = moment(0);
        text(&mut version, 3, VERSION.as_bytes());
        events.put(&version)?;
        if n_windows > 0 {
            let mut start = moment(n_windows);
            text(&mut start, 7, &[8, 1]); // a session log whose status is START
            events.put(&start)?;
            newest.iter().try_for_each(|line| events.write(line))?;
        }
        Ok(events)
    }

    /// Adds a line of the metrics.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn write(&mut self, line: &Value) -> Result<()> {
        let value = |(tag, key): (&'static str, &str)| Some((tag, line.get(key)?.as_f64()?));
        let values: Vec<_> = TAGS.into_iter().filter_map(value).collect();
        self.put(&scalars(line["update"].as_u64().unwrap_or(0), &values))
    }

    fn put(&mut self, event: &[u8]) -> Result<()> {
        // One call: a kill leaves whole records, or one that TensorBoard waits for.
        let written = self.file.write_all(&record(event));
        written.with_context(|| format!("`{}`", self.path.display()))
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// An `Event` at update `step`, to which fields are added.
fn moment(step: u64) -> Vec<u8> {
    let mut event = vec![1 << 3 | 1];
    event.extend(now().to_le_bytes());
    event.push(2 << 3);
    varint(&mut event, step);
    event
}

fn scalars(step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, x) in values {
        let mut value = Vec::new();
        text(&mut value, 1, tag.as_bytes());
        value.push(2 << 3 | 5);
        value.extend((*x as f32).to_le_bytes());
        text(&mut summary, 1, &value);
    }
    let mut event = moment(step);
    text(&mut event, 5, &summary);
    event
}

/// A field of bytes: a text, or a message.
fn text(to: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    to.push(field << 3 | 2);
    varint(to, bytes.len() as u64);
    to.extend(bytes);
}

fn varint(to: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        to.push(x as u8 | 0x80);
        x >>= 7;
    }
    to.push(x as u8);
}

fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(masked(&length).to_le_bytes());
    record.extend(event);
    record.extend(masked(event).to_le_bytes());
    record
}

/// A checksum that does not become another one where it is itself summed.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), a bit at a time: some hundred bytes an update.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & 0u32.wrapping_sub(crc & 1))
        })
    };
    !bytes.iter().fold(!0, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_castagnolis() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn numbers_of_any_length_are_written() {
        for (x, bytes) in [(0, &[0][..]), (127, &[127]), (128, &[0x80, 1]), (300, &[0xac, 2])] {
            let mut to = Vec::new();
            varint(&mut to, x);
            assert_eq!(to, bytes);
        }
    }
}

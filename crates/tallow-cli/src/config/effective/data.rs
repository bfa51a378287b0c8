//! Section `data`, as its source has it.

use super::{put, put_if};
use crate::config::{
    files::{PhotoSource, Place, Reading, TokenSource},
    source::Source,
};
use std::path::Path;
use tallow_data::{Kind, OnCorrupt};
use toml::{Table, Value};

pub(super) fn section(source: &Source) -> Table {
    let mut table = Table::new();
    put(&mut table, "source", source.name());
    let held_out = match source {
        Source::Images { held_out, .. } => *held_out,
        Source::Photos(photos) => photos.held_out,
        Source::Tokens(tokens) => tokens.held_out,
        Source::Synthetic { n_samples: [_, held_out], .. } => Some(*held_out),
    };
    put_if(&mut table, "held_out", held_out.map(|n| n as i64));
    match source {
        Source::Images { .. } => {}
        Source::Photos(source) => photos(&mut table, source),
        Source::Tokens(source) => tokens(&mut table, source),
        Source::Synthetic { n_samples: [n_samples, _], kind } => {
            put(&mut table, "n_samples", *n_samples as i64);
            match kind {
                Kind::Images { dims: [_, height, width], n_classes, .. } => {
                    put(&mut table, "image_size", size([*height, *width]));
                    put(&mut table, "n_classes", *n_classes as i64);
                }
                Kind::Tokens { n_tokens, .. } => put(&mut table, "seq_tokens", *n_tokens as i64),
            }
        }
    }
    table
}

fn size([height, width]: [usize; 2]) -> Vec<i64> {
    vec![height as i64, width as i64]
}

fn photos(table: &mut Table, source: &PhotoSource) {
    let PhotoSource { place, format, columns, n_classes, held_out: _, reading } = source;
    let [_, height, width] = columns.dims;
    put(table, "format", format.name());
    put(table, "image_size", size([height, width]));
    put_if(table, "n_classes", n_classes.map(|n| n as i64));
    put_if(table, "image_column", columns.image.clone());
    put_if(table, "label_column", columns.label.clone());
    put_if(table, "labels", columns.labels.as_deref().map(text));
    put(table, "augment", reading.augment);
    match reading.on_corrupt {
        OnCorrupt::Skip { limit } => {
            put(table, "on_corrupt", "skip");
            put(table, "max_skipped", limit as i64);
        }
        OnCorrupt::Fail => put(table, "on_corrupt", "fail"),
    }
    read(table, reading);
    store(table, place);
}

fn tokens(table: &mut Table, source: &TokenSource) {
    let TokenSource { place, format, reader, column, held_out: _, sizes, reading } = source;
    put(table, "format", format.name());
    put(table, "seq_tokens", sizes.0 as i64);
    put_if(table, "text_column", column.clone());
    if let Some(reader) = reader {
        put(table, "tokenizer", text(&reader.tokenizer));
        put_if(table, "separator", reader.separator.clone());
        put(table, "cache_dir", text(&place.cache_dir));
    }
    read(table, reading);
    store(table, place);
}

fn read(table: &mut Table, reading: &Reading) {
    let bytes = reading.prefetch_bytes;
    put_if(table, "prefetch_bytes", (bytes > 0).then_some(bytes as i64));
}

/// What only a place in a store has.
fn store(table: &mut Table, place: &Place) {
    if !Place::is_url(&place.name) {
        return;
    }
    put(table, "cache_dir", text(&place.cache_dir));
    put(table, "cache_bytes", place.cache_bytes as i64);
    let options =
        place.options.iter().map(|(key, value)| (key.clone(), Value::from(value.clone())));
    put_if(table, "store", (!place.options.is_empty()).then(|| options.collect::<Table>()));
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

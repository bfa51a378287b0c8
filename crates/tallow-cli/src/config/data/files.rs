//! Sources in files and stores, by their names.

use super::{DataSection, image_size, learns_images, only_has, seq_tokens};
use crate::config::{
    files::{Columns, Format, PhotoSource, Place, Reader, TokenSource},
    network::{MOST, Network},
    source::Source,
};
use anyhow::{Result, bail, ensure};
use std::path::{Path, PathBuf};

/// By what the source's name or `data.format` says, and what the network learns.
pub(super) fn source(
    network: &Network,
    data: &DataSection,
    name: &str,
    seed: u64,
) -> Result<Source> {
    if Path::new(name).is_dir() && data.format.is_none() && has_idx(Path::new(name)) {
        learns_images(network, name)?;
        only_has(data, "with IDX files", &[])?;
        let folder = Some(PathBuf::from(name));
        return Ok(Source::Images { folder, held_out: data.held_out });
    }
    let is_one_path = !Place::is_url(name) && !name.contains('{');
    ensure!(!is_one_path || Path::new(name).exists(), "data.source: `{name}` does not exist");
    let format = data.format(name)?;
    match network.tokens() {
        Some((vocab, context)) if !format.is_images() => {
            tokens(data, name, format, (seq_tokens(data, context)?, vocab), seed)
        }
        _ => {
            let images = learns_images(network, name)?;
            ensure!(
                !format.is_tokens(),
                "data.source `{name}` is a file of tokens, but {} learns images",
                network.name()
            );
            photos(data, name, format, images, seed)
        }
    }
}

fn has_idx(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|entries| {
        entries.flatten().any(|e| e.file_name().to_string_lossy().contains("idx3-ubyte"))
    })
}

/// Keys that a source in a store has beside the others.
const STORE_KEYS: [&str; 3] = ["cache_dir", "cache_bytes", "store"];

fn tokens(
    data: &DataSection,
    name: &str,
    format: Format,
    sizes: (usize, usize),
    seed: u64,
) -> Result<Source> {
    let mut keys = vec!["seq_tokens", "format", "prefetch_bytes"];
    match (&data.tokenizer, format.has_texts()) {
        (None, true) => bail!(
            "data.source `{name}` holds texts ({}): name a tokenizer.json as data.tokenizer",
            format.name()
        ),
        (Some(_), false) => bail!(
            "data.tokenizer is given, but data.source `{name}` ({}) holds no texts",
            format.name()
        ),
        (Some(_), true) => keys.extend(["tokenizer", "separator", "cache_dir"]),
        (None, false) => {}
    }
    match format {
        Format::Text | Format::Raw(_) | Format::Npy => {}
        _ => keys.push("text_column"),
    }
    if Place::is_url(name) {
        keys.extend(STORE_KEYS);
    }
    only_has(data, &format!("`{name}` ({})", format.name()), &keys)?;
    let reader = data.tokenizer.clone().map(|tokenizer| Reader {
        tokenizer,
        separator: data.separator.clone(),
        column: data.text_column.clone(),
    });
    Ok(Source::Tokens(TokenSource {
        place: data.place(name)?,
        format,
        reader,
        column: data.text_column.clone(),
        held_out: data.held_out,
        sizes,
        reading: data.reading(seed)?,
    }))
}

fn photos(
    data: &DataSection,
    name: &str,
    format: Format,
    (channels, size): (usize, [usize; 2]),
    seed: u64,
) -> Result<Source> {
    let mut keys =
        vec!["format", "image_size", "augment", "on_corrupt", "max_skipped", "prefetch_bytes"];
    match format {
        Format::Images => {}
        Format::List => keys.push("n_classes"),
        Format::Npy => keys.extend(["n_classes", "labels"]),
        _ => keys.extend(["n_classes", "image_column", "label_column"]),
    }
    if Place::is_url(name) {
        ensure!(
            !format.is_images(),
            "data.source `{name}`: data.format {} is read from paths alone",
            format.name()
        );
        keys.extend(STORE_KEYS);
    }
    only_has(data, &format!("`{name}` ({})", format.name()), &keys)?;
    ensure!(
        data.n_classes.is_none_or(|n| (2..=MOST).contains(&n)),
        "data.n_classes is {}, 2 is the least and {MOST} the most",
        data.n_classes.unwrap_or(0)
    );
    let [height, width] = image_size(data, size)?;
    Ok(Source::Photos(PhotoSource {
        place: data.place(name)?,
        format,
        columns: Columns {
            image: data.image_column.clone(),
            label: data.label_column.clone(),
            labels: data.labels.clone(),
            dims: [channels, height, width],
        },
        n_classes: data.n_classes,
        held_out: data.held_out,
        reading: data.reading(seed)?,
    }))
}

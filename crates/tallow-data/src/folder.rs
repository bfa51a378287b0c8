use crate::error::{Error, Result};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The one image file and the one label file of an IDX data set in `folder`.
pub(crate) fn find_idx_pair(folder: &Path) -> Result<(PathBuf, PathBuf)> {
    let names = file_names(folder).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NotFound { path: folder.to_owned() },
        _ => Error::Io { path: folder.to_owned(), error },
    })?;
    Ok((
        find_one(folder, &names, "images", "idx3-ubyte")?,
        find_one(folder, &names, "labels", "idx1-ubyte")?,
    ))
}

/// The files in `folder`, links followed, sorted: a listing has no order of its own.
fn file_names(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = PathBuf::from(entry?.file_name());
        if folder.join(&name).is_file() {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn find_one(folder: &Path, names: &[PathBuf], word: &str, ending: &str) -> Result<PathBuf> {
    let is_match = |name: &&PathBuf| {
        let name = name.to_string_lossy();
        let stem = name.strip_suffix(".gz").unwrap_or(&name).strip_suffix(ending);
        stem.is_some_and(|stem| stem.contains(word))
    };
    let found: Vec<&PathBuf> = names.iter().filter(is_match).collect();
    let listed = |names: &mut dyn Iterator<Item = &PathBuf>| {
        names.map(|name| name.display().to_string()).collect()
    };
    let (folder_path, pattern) = (folder.to_owned(), format!("*{word}*{ending}[.gz]"));
    match found[..] {
        [name] => Ok(folder.join(name)),
        [] => {
            Err(Error::NoFile { folder: folder_path, pattern, present: listed(&mut names.iter()) })
        }
        _ => Err(Error::Ambiguous {
            folder: folder_path,
            pattern,
            found: listed(&mut found.into_iter()),
        }),
    }
}

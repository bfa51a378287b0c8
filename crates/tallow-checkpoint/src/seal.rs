//! Closes a folder: lengths and checksums of its files, then its name.
//!
//! So a name without the seal, or a file that disagrees with it, is what a crash or a damaged disk left.

use crate::{Error, Result, folder::io_error};
use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

/// Lengths and checksums of the other files.
const SEAL: &str = "seal.txt";

/// Length and CRC-32 of a file.
fn sum(path: &Path) -> io::Result<(u64, u32)> {
    let (mut file, mut hasher) = (File::open(path)?, crc32fast::Hasher::new());
    let (mut buffer, mut n_bytes) = (vec![0; 1 << 16], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((n_bytes, hasher.finalize())),
            n => {
                hasher.update(&buffer[..n]);
                n_bytes += n as u64;
            }
        }
    }
}

fn files(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.retain(|name| name != SEAL);
    names.sort_unstable();
    Ok(names)
}

/// Forces what `part` holds to the disk, seals it, and gives it the name `folder`.
pub(crate) fn close(part: &Path, folder: &Path) -> Result<()> {
    let mut seal = String::new();
    for name in files(part).map_err(io_error(part))? {
        let path = part.join(&name);
        File::open(&path).and_then(|file| file.sync_all()).map_err(io_error(&path))?;
        let (n_bytes, crc) = sum(&path).map_err(io_error(&path))?;
        seal += &format!("{n_bytes} {crc:08x} {name}\n");
    }
    let path = part.join(SEAL);
    fs::write(&path, seal).map_err(io_error(&path))?;
    File::open(&path).and_then(|file| file.sync_all()).map_err(io_error(&path))?;
    sync_folder(part).map_err(io_error(part))?;
    fs::rename(part, folder).map_err(io_error(folder))?;
    let parent = folder.parent().filter(|p| !p.as_os_str().is_empty());
    sync_folder(parent.unwrap_or(Path::new("."))).map_err(io_error(folder))
}

/// Not every system opens folders.
fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder) {
        Ok(folder) => folder.sync_all(),
        Err(_) => Ok(()),
    }
}

/// That a folder holds what was sealed, byte for byte.
pub(crate) fn check(folder: &Path) -> Result<()> {
    let path = folder.join(SEAL);
    let seal = fs::read_to_string(&path).map_err(io_error(&path))?;
    if !seal.ends_with('\n') {
        return Err(damaged(path, "it ends in the midst of a line".to_string()));
    }
    let mut sealed = Vec::new();
    for line in seal.lines() {
        let mut words = line.splitn(3, ' ');
        let n_bytes = words.next().and_then(|n| n.parse::<u64>().ok());
        let crc = words.next().and_then(|crc| u32::from_str_radix(crc, 16).ok());
        let (Some(n_bytes), Some(crc), Some(name)) = (n_bytes, crc, words.next()) else {
            return Err(damaged(path, format!("`{line}` is no line of a seal")));
        };
        let file = folder.join(name);
        let found = sum(&file).map_err(io_error(&file))?;
        if found.0 != n_bytes {
            let how = format!("{} bytes, {n_bytes} were written", found.0);
            return Err(damaged(file, how));
        }
        if found.1 != crc {
            return Err(damaged(file, "its checksum differs".to_string()));
        }
        sealed.push(name);
    }
    if sealed.is_empty() {
        return Err(damaged(path, "it seals no file".to_string()));
    }
    // A seal that ends too early; what begins with a dot is the system's own.
    let is_open = |name: &String| !name.starts_with('.') && !sealed.contains(&&**name);
    match files(folder).map_err(io_error(folder))?.into_iter().find(is_open) {
        Some(name) => Err(damaged(path, format!("it does not seal `{name}`"))),
        None => Ok(()),
    }
}

fn damaged(path: PathBuf, how: String) -> Error {
    Error::Damaged { path, how }
}

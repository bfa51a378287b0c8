use super::{
    input::{Input, open_file},
    lines::Lines,
};
use crate::{
    error::{Error, Result},
    source::Source,
};
use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

/// Largest file that is read as one image.
const MOST_FILE_BYTES: u64 = 256 << 20;
/// Deepest folder below a class; links may lead in circles.
const MOST_DEPTH: usize = 16;

/// An image's file as it is on disk, and its class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Where it is from.
    pub path: PathBuf,
    /// The file's content, not decoded.
    pub bytes: Vec<u8>,
    /// Its class.
    pub label: u32,
}

impl Encoded {
    /// The image in the file at `path`.
    /// # Errors
    /// If it cannot be read, or is above 256 MiB.
    pub fn read(path: PathBuf, label: u32) -> Result<Self> {
        Ok(Self { bytes: read_file(&path)?, path, label })
    }
}

/// Images in folders: each folder below the root is a class, in the order of their names.
///
/// A file counts by its ending (`jpg`, `jpeg`, `png`, `webp`, any case), is decoded by its content.
/// Hidden files are left out. Holds the names, [`ImageFolder::held_bytes`]; a sample is one file read.
#[derive(Clone, Debug)]
pub struct ImageFolder {
    root: PathBuf,
    classes: Vec<String>,
    /// Number of the first file of each class, and that after the last.
    first_of_class: Vec<u64>,
    /// Paths below the root, one after another, and where each ends.
    names: String,
    ends: Vec<u64>,
}

impl ImageFolder {
    /// Lists the classes and files below `root`. Without folders in it, its files are one class.
    /// # Errors
    /// If it cannot be read or holds no image.
    pub fn open(root: impl AsRef<Path>) -> Result<Self> {
        let root = root.as_ref().to_owned();
        let entries = list(&root)?;
        let mut classes: Vec<String> =
            entries.iter().filter(|e| e.is_folder).map(|e| e.name.clone()).collect();
        let mut folder = Self {
            root,
            classes: Vec::new(),
            first_of_class: vec![0],
            names: String::new(),
            ends: Vec::new(),
        };
        if classes.is_empty() {
            classes.push(String::new());
        }
        for class in &classes {
            folder.add(class, 0)?;
            folder.first_of_class.push(folder.ends.len() as u64);
        }
        if folder.ends.is_empty() {
            let present = entries.into_iter().map(|entry| entry.name).collect();
            let pattern = "*.jpg, *.jpeg, *.png or *.webp".to_owned();
            return Err(Error::NoFile { folder: folder.root, pattern, present });
        }
        folder.classes = classes;
        folder.names.shrink_to_fit();
        folder.ends.shrink_to_fit();
        Ok(folder)
    }

    /// Adds the images in the folder `below` the root, and in its folders.
    fn add(&mut self, below: &str, depth: usize) -> Result<()> {
        let path = self.root.join(below);
        if depth > MOST_DEPTH {
            let reason = format!("folders are nested deeper than {MOST_DEPTH}");
            return Err(Error::Corrupt { path, offset: None, reason });
        }
        for entry in list(&path)? {
            let name = match below {
                "" => entry.name,
                below => format!("{below}/{}", entry.name),
            };
            if entry.is_folder && !below.is_empty() {
                self.add(&name, depth + 1)?;
            } else if !entry.is_folder && is_image(&name) {
                self.names.push_str(&name);
                self.ends.push(self.names.len() as u64);
            }
        }
        Ok(())
    }

    /// Names of the classes; a label is a place in them.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Images of each class.
    pub fn class_counts(&self) -> Vec<u64> {
        self.first_of_class.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// The class of a file.
    pub fn label(&self, index: u64) -> u32 {
        (self.first_of_class.partition_point(|&first| first <= index) - 1) as u32
    }

    /// Bytes held: the names and 8 for each file, and the classes.
    pub fn held_bytes(&self) -> u64 {
        let classes: usize =
            self.classes.iter().map(|class| class.len() + size_of::<String>() + 8).sum();
        (self.names.len() + 8 * self.ends.len() + classes + self.root.as_os_str().len()) as u64
    }

    /// Where a file is.
    pub fn path(&self, index: u64) -> PathBuf {
        let index = index as usize;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]) as usize;
        self.root.join(&self.names[start..self.ends[index] as usize])
    }
}

impl Source for ImageFolder {
    type Item = Encoded;

    fn n_samples(&self) -> u64 {
        self.ends.len() as u64
    }

    fn get(&self, index: u64) -> Result<Encoded> {
        let n_samples = self.n_samples();
        if index >= n_samples {
            return Err(Error::Index { path: self.root.clone(), index, n_samples });
        }
        Encoded::read(self.path(index), self.label(index))
    }

    fn name(&self, index: u64) -> String {
        self.path(index).display().to_string()
    }
}

/// Images named in a text file: on each line a path, a tab or spaces, and the number of a class.
///
/// Relative paths are below `root`. Holds what [`Lines`] holds.
#[derive(Clone, Debug)]
pub struct ImageList {
    lines: Lines,
    root: PathBuf,
}

impl ImageList {
    /// Finds the lines of `list`.
    /// # Errors
    /// Those of [`Lines::open`].
    pub fn open(list: Input, root: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self { lines: Lines::open(list)?, root: root.into() })
    }
}

impl Source for ImageList {
    type Item = Encoded;

    fn n_samples(&self) -> u64 {
        self.lines.n_samples()
    }

    fn get(&self, index: u64) -> Result<Encoded> {
        let (offset, line) = self.lines.line(index)?;
        let wrong = |reason: &str| self.lines.input().corrupt(offset, reason);
        let line = std::str::from_utf8(&line).map_err(|_| wrong("not UTF-8"))?;
        let (name, label) = line
            .rsplit_once(['\t', ' '])
            .ok_or_else(|| wrong("a path and a class are expected"))?;
        let label = label.parse().map_err(|_| wrong("the class after the path is no number"))?;
        Encoded::read(self.root.join(name.trim_end()), label)
    }

    fn name(&self, index: u64) -> String {
        self.lines.name(index)
    }
}

struct Entry {
    name: String,
    is_folder: bool,
}

/// What is in a folder and not hidden, links followed, sorted by name.
fn list(folder: &Path) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let fault = |error| Error::from_io(folder, error);
    for entry in fs::read_dir(folder).map_err(fault)? {
        let entry = entry.map_err(fault)?;
        let Ok(name) = entry.file_name().into_string() else {
            let (path, reason) = (entry.path(), "the name is not UTF-8".to_owned());
            return Err(Error::Corrupt { path, offset: None, reason });
        };
        if !name.starts_with('.') {
            entries.push(Entry { name, is_folder: entry.path().is_dir() });
        }
    }
    entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

fn is_image(name: &str) -> bool {
    let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
    ["jpg", "jpeg", "png", "webp"].iter().any(|known| ending.eq_ignore_ascii_case(known))
}

/// A whole file, if it is small enough to be an image.
fn read_file(path: &Path) -> Result<Vec<u8>> {
    let (file, n_bytes) = open_file(path)?;
    if n_bytes > MOST_FILE_BYTES {
        let reason = format!("{n_bytes} bytes, an image has {MOST_FILE_BYTES} at most");
        return Err(Error::Corrupt { path: path.to_owned(), offset: None, reason });
    }
    let mut bytes = Vec::with_capacity(n_bytes as usize);
    let read = file.take(MOST_FILE_BYTES).read_to_end(&mut bytes);
    read.map_err(|error| Error::from_io(path, error))?;
    Ok(bytes)
}

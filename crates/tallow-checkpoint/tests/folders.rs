//! Folders of bytes: whole, torn, flipped, replaced, few.

use std::{
    fs,
    path::{Path, PathBuf},
};
use tallow_checkpoint::{Checkpoints, Error, Kind, Record};

const KIND: Kind = Kind { prefix: "step-", format: 3, best_by: "loss" };

/// A folder of its own, gone with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let id = std::process::id();
        let path = std::env::temp_dir().join(format!("tallow-checkpoint-{name}-{id}"));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn save(all: &Checkpoints, name: &str, loss: Option<f64>, bytes: &[u8]) -> Result<PathBuf, Error> {
    let mut record = Record::default();
    if let Some(loss) = loss {
        record.put("loss", loss);
    }
    all.save(name, record, |folder| {
        let path = folder.join("bytes");
        fs::write(&path, bytes).map_err(|source| Error::Io { path, source })
    })
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<_> = entries.map(name).map(|n| n.to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

#[test]
fn any_byte_that_changes_is_found() {
    let folder = Folder::new("damaged");
    let all = Checkpoints::open(KIND, &folder.0, 9).expect("a folder");
    let old = save(&all, "1", None, b"old").expect("saves");
    let new = save(&all, "2", Some(0.5), b"new").expect("saves");
    assert_eq!(all.newest().expect("whole").path, new);
    for entry in fs::read_dir(&new).expect("a folder").map(|e| e.expect("an entry").path()) {
        let whole = fs::read(&entry).expect("bytes");
        for i in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[i] ^= 1;
            for damaged in [&flipped[..], &whole[..i]] {
                fs::write(&entry, damaged).expect("written");
                let newest = all.newest().expect("the one before");
                assert_eq!((&newest.path, newest.passed_over.len()), (&old, 1), "{entry:?} {i}");
                assert!(KIND.read(&new).is_err(), "{entry:?} {i}");
            }
        }
        fs::write(&entry, &whole).expect("written");
    }
    assert_eq!(KIND.read(&new).expect("whole again").get::<f64>("loss").expect("put"), 0.5);
}

#[test]
fn a_write_that_fails_leaves_nothing() {
    let folder = Folder::new("refused");
    let all = Checkpoints::open(KIND, &folder.0, 9).expect("a folder");
    let old = save(&all, "1", None, b"old").expect("saves");
    let refuse = |folder: &Path| Err(Error::None { path: folder.to_owned() });
    let error = all.save("2", Record::default(), refuse).expect_err("refused");
    assert!(matches!(error, Error::None { .. }), "{error}");
    assert_eq!(names(&folder.0), ["step-1"]);
    assert_eq!(all.newest().expect("whole").path, old);
    // One of the same name is replaced as a whole.
    save(&all, "1", None, b"again").expect("saves");
    assert_eq!(fs::read(old.join("bytes")).expect("bytes"), b"again");
}

#[test]
fn the_last_and_the_best_stay_and_others_folders_are_left_alone() {
    let folder = Folder::new("kept");
    let all = Checkpoints::open(KIND, &folder.0, 2).expect("a folder");
    fs::create_dir(folder.0.join("mine.part")).expect("a folder");
    for (i, loss) in [Some(3.0), Some(1.0), None, Some(f64::NAN), None].into_iter().enumerate() {
        save(&all, &i.to_string(), loss, b"bytes").expect("saves");
    }
    assert_eq!(names(&folder.0), ["mine.part", "step-1", "step-3", "step-4"]);
    fs::create_dir(folder.0.join("step-5.part")).expect("as a crash leaves it");
    let looked = Checkpoints::look(KIND, &folder.0);
    assert!(looked.newest().expect("whole").path.ends_with("step-4"));
    Checkpoints::open(KIND, &folder.0, 2).expect("a folder");
    assert_eq!(names(&folder.0), ["mine.part", "step-1", "step-3", "step-4"]);
}

#[test]
fn another_format_is_refused() {
    let folder = Folder::new("format");
    let all = Checkpoints::open(KIND, &folder.0, 1).expect("a folder");
    let path = save(&all, "1", None, b"bytes").expect("saves");
    let error = Kind { format: 4, ..KIND }.read(&path).expect_err("of format 3").to_string();
    assert!(error.ends_with("has format 3, this version reads 4"), "{error}");
    let empty = Checkpoints::look(KIND, folder.0.join("step-1")).newest().expect_err("none");
    assert!(empty.to_string().ends_with("holds no whole checkpoint"), "{empty}");
}

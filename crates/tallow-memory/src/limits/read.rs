use super::{NO_LIMIT_BYTES, Notice};
use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

const MAX_FILE_BYTES: u64 = 1 << 16;

/// Reads small files below a root, and writes down what was not as expected.
pub(super) struct Reader<'a> {
    root: &'a Path,
    pub(super) notices: Vec<Notice>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(root: &'a Path) -> Self {
        Self { root, notices: Vec::new() }
    }

    pub(super) fn is_dir(&self, path: &Path) -> bool {
        self.root.join(path).is_dir()
    }

    /// The file's text; a notice if there is none to be had.
    pub(super) fn text(&mut self, path: &Path) -> Option<String> {
        self.text_or(path).map_err(|error| self.unreadable(path, &error)).ok()
    }

    /// The file's text, or `None` without a notice where the kernel need not have made the file.
    pub(super) fn optional_text(&mut self, path: &Path) -> Option<String> {
        match self.text_or(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            other => other.map_err(|error| self.unreadable(path, &error)).ok(),
        }
    }

    fn text_or(&self, path: &Path) -> io::Result<String> {
        let mut bytes = Vec::new();
        File::open(self.root.join(path))?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn unreadable(&mut self, path: &Path, error: &io::Error) {
        let (path, reason) = (path.to_owned(), error.to_string());
        self.push(Notice::Unreadable { path, reason });
    }

    /// One file may be read for two figures; it is one notice.
    pub(super) fn push(&mut self, notice: Notice) {
        if !self.notices.contains(&notice) {
            self.notices.push(notice);
        }
    }

    fn garbled(&mut self, path: &Path, field: &'static str, found: &str) {
        let (path, found) = (PathBuf::from(path), found.trim().chars().take(64).collect());
        self.push(Notice::Garbled { path, field, found });
    }

    /// A file that is one number of bytes.
    pub(super) fn number(&mut self, path: &Path, text: &str) -> Option<u64> {
        let number = parse(text);
        if number.is_none() {
            self.garbled(path, "", text);
        }
        number
    }

    /// A file that is one limit; `max` and the huge are none.
    pub(super) fn limit(&mut self, path: &Path, text: &str) -> Option<u64> {
        if text.trim() == "max" {
            return None;
        }
        self.number(path, text).filter(|limit_bytes| *limit_bytes < NO_LIMIT_BYTES)
    }

    /// The number after `field` and spaces, in a file of such lines.
    pub(super) fn field(&mut self, path: &Path, text: &str, field: &'static str) -> Option<u64> {
        let after = |line: &str| line.strip_prefix(field)?.strip_prefix(' ').and_then(parse);
        let number = text.lines().find_map(after);
        if number.is_none() {
            let line = text.lines().find(|line| line.starts_with(field));
            self.garbled(path, field, line.unwrap_or_default());
        }
        number
    }

    /// The bytes of a line `field   1234 kB`; the kernel's kB are 1024 bytes.
    pub(super) fn kb_field(&mut self, path: &Path, text: &str, field: &'static str) -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(field));
        let kb = line.and_then(|value| parse(value.trim_end().strip_suffix("kB")?));
        let n_bytes = kb.and_then(|kb| kb.checked_mul(1024));
        if n_bytes.is_none() {
            self.garbled(path, field, line.unwrap_or_default());
        }
        n_bytes
    }

    /// The first column after `row` in `/proc/self/limits`.
    pub(super) fn soft_limit(&mut self, path: &Path, text: &str, row: &'static str) -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(row));
        let soft = line.and_then(|columns| columns.split_whitespace().next());
        if soft == Some("unlimited") {
            return None;
        }
        let limit_bytes = soft.and_then(parse);
        if limit_bytes.is_none() {
            self.garbled(path, row, line.unwrap_or_default());
        }
        limit_bytes.filter(|limit_bytes| *limit_bytes < NO_LIMIT_BYTES)
    }
}

/// Digits between blanks, and nothing else: `parse` alone would take a sign.
fn parse(text: &str) -> Option<u64> {
    let digits = text.trim();
    let all_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
    all_digits.then(|| digits.parse().ok()).flatten()
}

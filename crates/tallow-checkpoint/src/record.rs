//! Numbers and words under names, as lines of text: every bit comes back.

use crate::{Error, Result};
use std::{
    collections::BTreeMap,
    fmt::{Debug, Write},
    path::{Path, PathBuf},
    str::FromStr,
};

/// `name value` lines, sorted by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    lines: BTreeMap<String, String>,
    /// Where it was read, for messages; empty for one that was not.
    path: PathBuf,
}

impl Record {
    /// The record in `text`, which was read from `path`.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self> {
        let mut record = Self { lines: BTreeMap::new(), path: path.to_owned() };
        for line in text.lines() {
            let (name, value) = line.split_once(' ').ok_or_else(|| record.unreadable(line))?;
            record.lines.insert(name.to_string(), value.to_string());
        }
        Ok(record)
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.lines {
            let _ = writeln!(text, "{name} {value}"); // a string takes all
        }
        text
    }

    /// Integers, booleans and floats; of these `{:?}` prints the shortest that reads back the same.
    /// `name` is one word.
    pub fn put(&mut self, name: &str, value: impl Debug) {
        self.put_text(name, format!("{value:?}"));
    }

    /// A text of one line.
    pub fn put_text(&mut self, name: &str, text: String) {
        self.lines.insert(name.to_string(), text);
    }

    /// What was put as `name`.
    /// # Errors
    /// [`Error::Damaged`] if there is no such line, or it says nothing of this kind.
    pub fn get<T: FromStr>(&self, name: &str) -> Result<T> {
        let value = self.text_of(name).and_then(|value| value.parse().ok());
        value.ok_or_else(|| self.unreadable(name))
    }

    /// The same where no line means `None`.
    /// # Errors
    /// [`Error::Damaged`] if the line says nothing of this kind.
    pub fn find<T: FromStr>(&self, name: &str) -> Result<Option<T>> {
        self.lines.contains_key(name).then(|| self.get(name)).transpose()
    }

    /// The line of this name as it stands.
    pub fn text_of(&self, name: &str) -> Option<&str> {
        self.lines.get(name).map(String::as_str)
    }

    /// What to say of the line `name` if it is missing or makes no sense.
    pub fn unreadable(&self, name: &str) -> Error {
        let how = format!("`{name}` is missing or cannot be read");
        Error::Damaged { path: self.path.clone(), how }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_comes_back() {
        let mut record = Record::default();
        record.put("most", u64::MAX);
        record.put("open", true);
        record.put("loss", 0.1f64 + 0.2);
        record.put("none", f64::NAN);
        record.put_text("words", "two words".to_string());
        let back = Record::parse(&record.text(), Path::new("")).expect("lines");
        assert_eq!(back, record);
        assert_eq!(back.get::<u64>("most").expect("a number"), u64::MAX);
        assert!(back.get::<bool>("open").expect("a boolean"));
        assert_eq!(back.get::<f64>("loss").expect("a float").to_bits(), (0.1f64 + 0.2).to_bits());
        assert!(back.get::<f64>("none").expect("a float").is_nan());
        assert_eq!(back.text_of("words"), Some("two words"));
    }

    #[test]
    fn what_is_missing_or_no_number_is_named() {
        let record = Record::parse("a 1\nb x\n", Path::new("state.txt")).expect("lines");
        let message = |name| {
            format!("checkpoint `state.txt` is damaged: `{name}` is missing or cannot be read")
        };
        assert_eq!(record.get::<u64>("a").expect("a number"), 1);
        for name in ["b", "c"] {
            assert_eq!(record.get::<u64>(name).expect_err("none").to_string(), message(name));
        }
        assert_eq!(record.find::<u64>("c").expect("no line"), None);
        let error = Record::parse("alone\n", Path::new("state.txt")).expect_err("no value");
        assert_eq!(error.to_string(), message("alone"));
    }
}

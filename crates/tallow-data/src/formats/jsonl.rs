use super::{input::Input, json, lines::Lines};
use crate::{error::Result, source::Source};

/// One string of each line of a JSON lines file: the text of a document, say.
///
/// Holds what [`Lines`] holds. A line is parsed when it is asked for, whole, and must be one object.
#[derive(Clone, Debug)]
pub struct JsonLines {
    lines: Lines,
    field: String,
}

impl JsonLines {
    /// The strings at the key `field` of the lines of `input`.
    /// # Errors
    /// Those of [`Lines::open`].
    pub fn open(input: Input, field: impl Into<String>) -> Result<Self> {
        Ok(Self { lines: Lines::open(input)?, field: field.into() })
    }
}

impl Source for JsonLines {
    type Item = String;

    fn n_samples(&self) -> u64 {
        self.lines.n_samples()
    }

    fn get(&self, index: u64) -> Result<String> {
        let (offset, line) = self.lines.line(index)?;
        json::string_field(&line, &self.field)
            .map_err(|(at, reason)| self.lines.input().corrupt(offset + at, reason))
    }

    fn name(&self, index: u64) -> String {
        self.lines.name(index)
    }
}

/// The keys of each line of a JSON lines file, which must be one object.
///
/// Holds what [`Lines`] holds.
#[derive(Clone, Debug)]
pub struct JsonFields {
    lines: Lines,
}

impl JsonFields {
    /// The lines of `input`.
    /// # Errors
    /// Those of [`Lines::open`].
    pub fn open(input: Input) -> Result<Self> {
        Ok(Self { lines: Lines::open(input)? })
    }
}

impl Source for JsonFields {
    type Item = Vec<String>;

    fn n_samples(&self) -> u64 {
        self.lines.n_samples()
    }

    fn get(&self, index: u64) -> Result<Vec<String>> {
        let (offset, line) = self.lines.line(index)?;
        json::keys(&line).map_err(|(at, reason)| self.lines.input().corrupt(offset + at, reason))
    }

    fn name(&self, index: u64) -> String {
        self.lines.name(index)
    }
}

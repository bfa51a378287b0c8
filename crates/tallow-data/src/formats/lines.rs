use super::{index::SparseIndex, input::Input};
use crate::{error::Result, source::Source};

/// Longest line that is read.
const MOST_LINE_BYTES: usize = 16 << 20;
const BLOCK_BYTES: usize = 64 << 10;

/// The lines of a UTF-8 text file, without their ends; blank lines are no samples.
///
/// Opening it reads the file once and keeps [`index_bytes`](super::index_bytes); a sample is read
/// from the mark before it. A line may have 16 MiB.
#[derive(Clone, Debug)]
pub struct Lines {
    input: Input,
    index: SparseIndex,
}

impl Lines {
    /// Finds the lines of `input`.
    /// # Errors
    /// If it cannot be read, or has a line above 16 MiB.
    pub fn open(input: Input) -> Result<Self> {
        let mut index = SparseIndex::default();
        let mut scanner = Scanner::new(&input, 0);
        while let Some(offset) = scanner.next_line(None)? {
            index.push(offset);
        }
        Ok(Self { input, index: index.finish() })
    }

    /// The bytes of a line and where it starts.
    pub(super) fn line(&self, index: u64) -> Result<(u64, Vec<u8>)> {
        if index >= self.index.n_samples() {
            return Err(self.input.out_of_range(index, self.index.n_samples()));
        }
        let (offset, n_between) = self.index.find(index);
        let mut scanner = Scanner::new(&self.input, offset);
        for _ in 0..n_between {
            scanner.next_line(None)?;
        }
        let mut line = Vec::new();
        match scanner.next_line(Some(&mut line))? {
            Some(offset) => {
                line.truncate(line.trim_ascii_end().len());
                Ok((offset, line))
            }
            None => {
                Err(self.input.corrupt(offset, "the file has fewer lines than when it was opened"))
            }
        }
    }

    pub(super) fn input(&self) -> &Input {
        &self.input
    }
}

impl Source for Lines {
    type Item = String;

    fn n_samples(&self) -> u64 {
        self.index.n_samples()
    }

    fn get(&self, index: u64) -> Result<String> {
        let (offset, line) = self.line(index)?;
        String::from_utf8(line).map_err(|error| {
            let at = offset + error.utf8_error().valid_up_to() as u64;
            self.input.corrupt(at, "not UTF-8")
        })
    }

    fn name(&self, index: u64) -> String {
        format!("{}: line {index} that is not blank", self.input.path().display())
    }
}

/// Goes from line to line through one block of bytes.
struct Scanner<'a> {
    input: &'a Input,
    block: Vec<u8>,
    at: usize,
    offset: u64,
}

impl<'a> Scanner<'a> {
    fn new(input: &'a Input, offset: u64) -> Self {
        Self { input, block: Vec::new(), at: 0, offset }
    }

    fn fill(&mut self) -> Result<bool> {
        if self.at < self.block.len() {
            return Ok(true);
        }
        self.block.resize(BLOCK_BYTES, 0);
        let n_bytes = self.input.read_some(self.offset, &mut self.block)?;
        self.block.truncate(n_bytes);
        self.at = 0;
        Ok(n_bytes > 0)
    }

    /// Passes the next line that is not blank, and says where it starts.
    fn next_line(&mut self, mut into: Option<&mut Vec<u8>>) -> Result<Option<u64>> {
        let (mut start, mut n_bytes, mut is_blank) = (self.offset, 0, true);
        while self.fill()? {
            let rest = &self.block[self.at..];
            let end = memchr::memchr(b'\n', rest);
            let piece = &rest[..end.unwrap_or(rest.len())];
            n_bytes += piece.len();
            if n_bytes > MOST_LINE_BYTES {
                let reason = format!("a line above {MOST_LINE_BYTES} bytes");
                return Err(self.input.corrupt(start, reason));
            }
            is_blank = is_blank && piece.iter().all(u8::is_ascii_whitespace);
            if let Some(line) = &mut into {
                line.extend_from_slice(piece);
            }
            let n_passed = piece.len() + usize::from(end.is_some());
            self.at += n_passed;
            self.offset += n_passed as u64;
            match (end, is_blank) {
                (Some(_), false) => return Ok(Some(start)),
                (Some(_), true) => {
                    (start, n_bytes) = (self.offset, 0);
                    if let Some(line) = &mut into {
                        line.clear();
                    }
                }
                (None, _) => {}
            }
        }
        Ok((!is_blank).then_some(start))
    }
}

use super::{input::Input, tokens::Token};
use crate::{
    error::{Error, Result},
    source::Source,
};
use std::{
    fmt,
    fs::File,
    io::{BufWriter, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Largest `tokenizer.json` that is read.
const MOST_FILE_BYTES: u64 = 256 << 20;

/// What turns text into tokens, as a Hugging Face `tokenizer.json` says. Clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    path: PathBuf,
    inner: Arc<tokenizers::Tokenizer>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({}, {} tokens)", self.path.display(), self.vocab())
    }
}

impl Tokenizer {
    /// Reads the `tokenizer.json` in `input`.
    /// # Errors
    /// If it is no such file.
    pub fn open(input: &Input) -> Result<Self> {
        if input.n_bytes() > MOST_FILE_BYTES {
            let reason =
                format!("{} bytes, a tokenizer has {MOST_FILE_BYTES} at most", input.n_bytes());
            return Err(input.corrupt(None, reason));
        }
        let content = input.read_vec(0, input.n_bytes())?;
        // The library panics at some files that are no tokenizer.
        let parsed = catch_unwind(|| tokenizers::Tokenizer::from_bytes(content));
        let mut inner = parsed
            .map_err(|_| input.corrupt(None, "no tokenizer: its parts do not parse"))?
            .map_err(|error| input.corrupt(None, format!("no tokenizer: {error}")))?;
        // Documents are cut into sequences later, whatever the file asks for.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| input.corrupt(None, error.to_string()))?;
        Ok(Self { path: input.path().to_owned(), inner: Arc::new(inner) })
    }

    /// Tokens there are, added ones included.
    pub fn vocab(&self) -> u32 {
        self.inner.get_vocab_size(true) as u32
    }

    /// The number of the token `text`, such as the one between documents.
    pub fn token(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The tokens of `text`, without special ones.
    /// # Errors
    /// If the tokenizer refuses it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encode = || self.inner.encode_fast(text, false);
        let encoded = catch_unwind(AssertUnwindSafe(encode))
            .map_err(|_| self.fault("the tokenizer could not cope with a text".into()))?;
        let encoded = encoded.map_err(|error| self.fault(error.to_string()))?;
        Ok(encoded.get_ids().to_vec())
    }

    /// The text of `tokens`, without special ones.
    /// # Errors
    /// If the tokenizer refuses them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let decode = || self.inner.decode(tokens, true);
        let decoded = catch_unwind(AssertUnwindSafe(decode))
            .map_err(|_| self.fault("the tokenizer could not cope with its tokens".into()))?;
        decoded.map_err(|error| self.fault(error.to_string()))
    }

    fn fault(&self, reason: String) -> Error {
        Error::Corrupt { path: self.path.clone(), offset: None, reason }
    }
}

/// The tokens of each text of a source.
#[derive(Clone, Debug)]
pub struct Tokenized<S> {
    source: S,
    tokenizer: Tokenizer,
}

impl<S: Source<Item = String>> Tokenized<S> {
    /// The texts of `source` through `tokenizer`.
    pub fn new(source: S, tokenizer: Tokenizer) -> Self {
        Self { source, tokenizer }
    }
}

impl<S: Source<Item = String>> Source for Tokenized<S> {
    type Item = Vec<u32>;

    fn n_samples(&self) -> u64 {
        self.source.n_samples()
    }

    fn get(&self, index: u64) -> Result<Vec<u32>> {
        self.tokenizer.encode(&self.source.get(index)?)
    }

    fn name(&self, index: u64) -> String {
        self.source.name(index)
    }
}

/// Writes the tokens of all texts of `source`, `separator` after each, to the token file `path`, and
/// says how many there are. The file appears when it is whole. Holds one text at a time.
/// # Errors
/// If a text cannot be read, a token does not fit, or the file cannot be written.
pub fn encode_to_file(
    source: &impl Source<Item = String>,
    tokenizer: &Tokenizer,
    separator: Option<u32>,
    token: Token,
    path: &Path,
) -> Result<u64> {
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{}.part", std::process::id()));
    let part = PathBuf::from(part);
    let outcome = write_tokens(source, tokenizer, separator, token, &part).and_then(|n| {
        std::fs::rename(&part, path).map(|()| n).map_err(|e| Error::from_io(path, e))
    });
    if outcome.is_err() {
        let _ = std::fs::remove_file(&part); // it may not be there
    }
    outcome
}

fn write_tokens(
    source: &impl Source<Item = String>,
    tokenizer: &Tokenizer,
    separator: Option<u32>,
    token: Token,
    part: &Path,
) -> Result<u64> {
    let fault = |error| Error::from_io(part, error);
    let mut out = BufWriter::new(File::create(part).map_err(fault)?);
    let mut n_tokens = 0;
    for index in 0..source.n_samples() {
        let ids = tokenizer.encode(&source.get(index)?)?;
        for &id in ids.iter().chain(&separator) {
            let n_bytes = token.n_bytes() as usize;
            let bytes = id.to_le_bytes();
            let (kept, lost) = bytes.split_at(n_bytes);
            if lost.iter().any(|&byte| byte != 0) {
                let (name, n_bits) = (source.name(index), 8 * n_bytes);
                let reason = format!("token {id} of `{name}` does not fit {n_bits} bits");
                return Err(tokenizer.fault(reason));
            }
            out.write_all(kept).map_err(fault)?;
            n_tokens += 1;
        }
    }
    let file = out.into_inner().map_err(|error| fault(error.into_error()))?;
    file.sync_all().map_err(fault)?;
    Ok(n_tokens)
}

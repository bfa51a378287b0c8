use super::{input::Input, npy};
use crate::{
    error::{Error, Result},
    source::Source,
};

// T tokens of a sequence
/// How a file stores a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the types")]
pub enum Token {
    U8,
    U16,
    U32,
}

impl Token {
    /// Bytes of a token in the file.
    pub const fn n_bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}

/// Sequences of `T + 1` tokens from a file of nothing but tokens: inputs are the first `T`, targets
/// the last.
///
/// Sequence `i` starts at token `i * T`, so each token is a target once; tokens that fill no whole
/// sequence are left out. Holds no tokens: a sample is one positioned read.
#[derive(Clone, Debug)]
pub struct Tokens {
    input: Input,
    token: Token,
    data_offset: u64,
    n_tokens: u64,
    seq_tokens: u64,
    vocab: Option<u32>,
}

impl Tokens {
    /// Little-endian tokens without a header, or the bytes of any text, in sequences of `seq_tokens + 1`.
    /// # Errors
    /// If there is not one sequence, or the bytes are no whole number of tokens.
    pub fn raw(input: Input, token: Token, seq_tokens: u64) -> Result<Self> {
        Self::new(input, token, 0, seq_tokens)
    }

    /// The tokens of a `.npy` file of one dimension of `u16` or `u32`.
    /// # Errors
    /// If it is not such a file, or there is not one sequence.
    pub fn npy(input: Input, seq_tokens: u64) -> Result<Self> {
        let header = npy::read_header(&input)?;
        let token = match (header.element.kind, header.element.n_bytes, header.element.big_endian) {
            (b'u', 2, false) => Token::U16,
            (b'u', 4, false) => Token::U32,
            _ => return Err(input.corrupt(10, "tokens are little-endian u16 or u32")),
        };
        if header.dims.len() != 1 {
            let reason = format!("tokens have one dimension, not the {:?} here", header.dims);
            return Err(input.corrupt(10, reason));
        }
        Self::new(input, token, header.data_offset, seq_tokens)
    }

    fn new(input: Input, token: Token, data_offset: u64, seq_tokens: u64) -> Result<Self> {
        let data_bytes = input.n_bytes() - data_offset;
        let n_tokens = data_bytes / token.n_bytes();
        if !data_bytes.is_multiple_of(token.n_bytes()) {
            let reason = format!("{data_bytes} bytes are no whole number of {token:?} tokens");
            return Err(input.corrupt(None, reason));
        }
        if seq_tokens == 0 || n_tokens <= seq_tokens {
            let path = input.path().to_owned();
            return Err(Error::NoSequence { path, n_tokens, seq_tokens });
        }
        Ok(Self { input, token, data_offset, n_tokens, seq_tokens, vocab: None })
    }

    /// The same, with each token checked when it is read: below `vocab`.
    #[must_use]
    pub fn with_vocab(self, vocab: u32) -> Self {
        Self { vocab: Some(vocab), ..self }
    }

    /// Tokens in the file.
    pub fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    /// T.
    pub fn seq_tokens(&self) -> u64 {
        self.seq_tokens
    }

    fn check(&self, tokens: &[u32], offset: u64) -> Result<()> {
        let Some(vocab) = self.vocab else { return Ok(()) };
        match tokens.iter().position(|&token| token >= vocab) {
            None => Ok(()),
            Some(place) => {
                let at = offset + place as u64 * self.token.n_bytes();
                let reason =
                    format!("token {} is outside the {vocab} of the vocabulary", tokens[place]);
                Err(self.input.corrupt(at, reason))
            }
        }
    }
}

impl Source for Tokens {
    type Item = Vec<u32>;

    fn n_samples(&self) -> u64 {
        (self.n_tokens - 1) / self.seq_tokens
    }

    fn get(&self, index: u64) -> Result<Vec<u32>> {
        if index >= self.n_samples() {
            return Err(self.input.out_of_range(index, self.n_samples()));
        }
        let n_bytes = self.token.n_bytes();
        let offset = self.data_offset + index * self.seq_tokens * n_bytes;
        let bytes = self.input.read_vec(offset, (self.seq_tokens + 1) * n_bytes)?;
        let tokens: Vec<u32> = match self.token {
            Token::U8 => bytes.iter().map(|&byte| u32::from(byte)).collect(),
            Token::U16 => {
                let (pairs, _) = bytes.as_chunks::<2>();
                pairs.iter().map(|&pair| u32::from(u16::from_le_bytes(pair))).collect()
            }
            Token::U32 => {
                let (quads, _) = bytes.as_chunks::<4>();
                quads.iter().map(|&quad| u32::from_le_bytes(quad)).collect()
            }
        };
        self.check(&tokens, offset)?;
        Ok(tokens)
    }

    fn name(&self, index: u64) -> String {
        format!("{}: tokens from {}", self.input.path().display(), index * self.seq_tokens)
    }
}

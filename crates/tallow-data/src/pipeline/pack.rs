//! Documents as sequences of one length, for language models.

use super::{Flow, Groups, HeldBytes, Placed, Samples};
use crate::{
    batches::{Cursor, Tail},
    error::{Error, Result},
    permutation::Permutation,
    rng::Rng,
};
use candle_core::{Device, Tensor};
use std::collections::{BTreeSet, VecDeque};

// B sequences of a batch · T tokens of a sequence
/// The target of a token without a next one: the last of a document, and padding. What PyTorch's and
/// tallow's cross-entropy leave out.
pub const IGNORED: i64 = -100;

/// How documents become sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pack {
    /// T.
    pub seq_tokens: usize,
    /// The token that fills sequences up.
    pub pad_id: u32,
    /// What may be cut.
    pub packing: Packing,
}

/// What may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Documents one after another, cut where a sequence is full. No padding, but in the last.
    Split {
        /// What becomes of the last sequence.
        tail: Tail,
    },
    /// Documents stay whole, unless longer than a sequence. Those of a window of at least so many
    /// tokens are put where they fit best, longest first (best-fit decreasing); the rest is padding.
    Whole {
        /// Tokens read at once. A resumed run reads its window again.
        window_tokens: u64,
    },
}

/// A sequence of T tokens of one or more documents, and what keeps them apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Tokens.
    pub ids: Vec<u32>,
    /// The next token of the same document, or [`IGNORED`]. Where a document goes on in another
    /// sequence, its next token is still the target.
    pub targets: Vec<i64>,
    /// Place in the document, from 0 in each sequence.
    pub positions: Vec<u32>,
    /// 1, 2, ...: a token may attend to those of its own segment. 0 is padding.
    pub segments: Vec<u32>,
}

/// Bytes of `n` packed sequences, on the host or as tensors: 20 a token.
pub const fn packed_bytes(n: u64, seq_tokens: u64) -> u64 {
    n.saturating_mul(seq_tokens).saturating_mul(20)
}

/// Bytes that packing holds beside the sequence it makes: the document that is being cut, or a window
/// of documents, 160 bytes more for each.
pub const fn packing_bytes(packing: Packing, longest_tokens: u64, mean_tokens: u64) -> u64 {
    match packing {
        Packing::Split { .. } => longest_tokens.saturating_mul(4),
        Packing::Whole { window_tokens } => {
            let mean_tokens = if mean_tokens == 0 { 1 } else { mean_tokens };
            let n_documents = (window_tokens / mean_tokens).saturating_add(1);
            let tokens = window_tokens.saturating_add(longest_tokens);
            tokens.saturating_mul(4).saturating_add(n_documents.saturating_mul(160))
        }
    }
}

impl HeldBytes for Packed {
    fn held_bytes(&self) -> u64 {
        self.ids.held_bytes()
            + self.targets.held_bytes()
            + self.positions.held_bytes()
            + self.segments.held_bytes()
    }
}

impl Packed {
    fn new(n_tokens: usize) -> Self {
        Self {
            ids: Vec::with_capacity(n_tokens),
            targets: Vec::with_capacity(n_tokens),
            positions: Vec::with_capacity(n_tokens),
            segments: Vec::with_capacity(n_tokens),
        }
    }

    /// Adds `document[start..start + n]` as one segment.
    fn push(&mut self, document: &[u32], start: usize, n: usize) {
        let next = self.segments.last().map_or(1, |last| last + 1);
        self.ids.extend(&document[start..start + n]);
        let target = |i| document.get(i + 1).map_or(IGNORED, |&id| i64::from(id));
        self.targets.extend((start..start + n).map(target));
        self.positions.extend(0..n as u32);
        self.segments.extend(std::iter::repeat_n(next, n));
    }

    fn fill(&mut self, n_tokens: usize, pad_id: u32) {
        self.ids.resize(n_tokens, pad_id);
        self.targets.resize(n_tokens, IGNORED);
        self.positions.resize(n_tokens, 0);
        self.segments.resize(n_tokens, 0);
    }
}

/// Packed sequences on the device.
#[derive(Clone, Debug)]
pub struct PackedBatch {
    /// `[B, T]`, u32.
    pub ids: Tensor,
    /// `[B, T]`, i64.
    pub targets: Tensor,
    /// `[B, T]`, u32.
    pub positions: Tensor,
    /// `[B, T]`, u32.
    pub segments: Tensor,
}

impl PackedBatch {
    /// Sequences of one length, on `device`.
    /// # Errors
    /// Candle's, also if there is none or the lengths differ.
    pub fn new(sequences: &[Packed], device: &Device) -> Result<Self> {
        let n_tokens = sequences.first().map_or(0, |sequence| sequence.ids.len());
        let shape = (sequences.len(), n_tokens);
        let ids = |of: fn(&Packed) -> &[u32]| {
            let all: Vec<u32> = sequences.iter().flat_map(|s| of(s).iter().copied()).collect();
            Tensor::from_vec(all, shape, device)
        };
        let targets: Vec<i64> = sequences.iter().flat_map(|s| s.targets.iter().copied()).collect();
        Ok(Self {
            ids: ids(|s| &s.ids)?,
            targets: Tensor::from_vec(targets, shape, device)?,
            positions: ids(|s| &s.positions)?,
            segments: ids(|s| &s.segments)?,
        })
    }
}

impl HeldBytes for PackedBatch {
    fn held_bytes(&self) -> u64 {
        self.ids.held_bytes()
            + self.targets.held_bytes()
            + self.positions.held_bytes()
            + self.segments.held_bytes()
    }
}

impl Samples<Vec<u32>> {
    /// Documents as sequences of one length; see [`Packed`]. Held: [`packing_bytes`].
    /// # Errors
    /// If a sequence or a window is 0 tokens.
    pub fn pack(self, pack: Pack) -> Result<Groups<Packed>> {
        if pack.seq_tokens == 0 || pack.packing == (Packing::Whole { window_tokens: 0 }) {
            return Err(Error::ZeroWindow);
        }
        Ok(Groups::new(move |cursor, shared| {
            let documents = self.flow(cursor, shared)?;
            Ok(match pack.packing {
                Packing::Split { tail } => {
                    Box::new(Split { documents, pack, tail, before: cursor, document: None })
                }
                Packing::Whole { window_tokens } => Box::new(Whole {
                    documents,
                    pack,
                    window_tokens,
                    seed: self.seed(),
                    start: cursor,
                    window: None,
                }),
            })
        }))
    }
}

/// The cursor after a sequence is before the document that it ends in, and the tokens of it that are done.
struct Split {
    documents: Flow<Vec<u32>>,
    pack: Pack,
    tail: Tail,
    /// Before the next document; within it, what was done before this run.
    before: Cursor,
    document: Option<Document>,
}

struct Document {
    ids: Vec<u32>,
    n_done: usize,
    after: Cursor,
}

impl Split {
    /// The document to go on with; nothing at the end.
    fn open(&mut self) -> Result<Option<&mut Document>> {
        while self.document.as_ref().is_none_or(|document| document.n_done == document.ids.len()) {
            if let Some(document) = self.document.take() {
                self.before = document.after;
            }
            let Some(document) = self.documents.next() else { return Ok(None) };
            let Placed { value: ids, after } = document?;
            let Cursor { position, within, .. } = self.before;
            if within > ids.len() as u64 {
                return Err(Error::Within { position, within, n: ids.len() as u64 });
            }
            self.document = Some(Document { ids, n_done: within as usize, after });
        }
        Ok(self.document.as_mut())
    }

    fn sequence(&mut self) -> Result<Option<Packed>> {
        let n_tokens = self.pack.seq_tokens;
        let mut packed = Packed::new(n_tokens);
        while packed.ids.len() < n_tokens {
            let Some(document) = self.open()? else { break };
            let n = (document.ids.len() - document.n_done).min(n_tokens - packed.ids.len());
            packed.push(&document.ids, document.n_done, n);
            document.n_done += n;
        }
        let n = packed.ids.len();
        if n == 0 || (n < n_tokens && self.tail == Tail::Drop) {
            return Ok(None);
        }
        packed.fill(n_tokens, self.pack.pad_id);
        Ok(Some(packed))
    }

    fn after(&self) -> Cursor {
        match &self.document {
            Some(document) if document.n_done < document.ids.len() => {
                Cursor { within: document.n_done as u64, ..self.before }
            }
            Some(document) => document.after,
            None => self.before,
        }
    }
}

impl Iterator for Split {
    type Item = Result<Placed<Packed>>;

    fn next(&mut self) -> Option<Self::Item> {
        let packed = self.sequence().transpose()?;
        Some(packed.map(|value| Placed { value, after: self.after() }))
    }
}

/// The cursor after a sequence is the start of its window and the sequences of it that are done.
struct Whole {
    documents: Flow<Vec<u32>>,
    pack: Pack,
    window_tokens: u64,
    seed: u64,
    start: Cursor,
    window: Option<Window>,
}

struct Window {
    documents: Vec<Vec<u32>>,
    /// Pieces of each sequence that is not made yet, in the order they are handed out.
    bins: VecDeque<Vec<Piece>>,
    n_done: u64,
    after: Cursor,
}

#[derive(Clone, Copy)]
struct Piece {
    document: usize,
    start: usize,
    n: usize,
}

impl Whole {
    fn read(&mut self) -> Result<Option<Window>> {
        let (mut documents, mut n_tokens, mut after) = (Vec::new(), 0, None);
        while n_tokens < self.window_tokens {
            let Some(document) = self.documents.next() else { break };
            let document = document?;
            n_tokens += document.value.len() as u64;
            after = Some(document.after);
            if !document.value.is_empty() {
                documents.push(document.value);
            }
        }
        let Some(after) = after else { return Ok(None) };
        let mut bins = best_fit(&documents, self.pack.seq_tokens);
        let Cursor { epoch, position, within, .. } = self.start;
        let n = bins.len() as u64;
        if within > n {
            return Err(Error::Within { position, within, n });
        }
        // Else all full sequences come first.
        let key = Rng::keyed(&[self.seed, epoch]).next_u64();
        let order = Permutation::new(n, key, position);
        let left = within..n;
        let bins =
            left.map(|place| std::mem::take(&mut bins[order.index(place) as usize])).collect();
        Ok(Some(Window { documents, bins, n_done: within, after }))
    }

    fn sequence(&mut self) -> Result<Option<Placed<Packed>>> {
        loop {
            let Some(window) = &mut self.window else {
                self.window = self.read()?;
                if self.window.is_none() {
                    return Ok(None);
                }
                continue;
            };
            let Some(pieces) = window.bins.pop_front() else {
                self.start = window.after;
                self.window = None;
                continue;
            };
            window.n_done += 1;
            let mut value = Packed::new(self.pack.seq_tokens);
            for Piece { document, start, n } in pieces {
                value.push(&window.documents[document], start, n);
            }
            value.fill(self.pack.seq_tokens, self.pack.pad_id);
            let after = match window.bins.is_empty() {
                true => window.after,
                false => Cursor { within: window.n_done, ..self.start },
            };
            return Ok(Some(Placed { value, after }));
        }
    }
}

impl Iterator for Whole {
    type Item = Result<Placed<Packed>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.sequence().transpose()
    }
}

/// The longest piece first, each where it leaves least room: at most 11/9 of the fewest sequences, and 6
/// (D. Johnson et al., *Worst-case performance bounds for simple one-dimensional packing*, 1974).
fn best_fit(documents: &[Vec<u32>], seq_tokens: usize) -> Vec<Vec<Piece>> {
    let mut pieces: Vec<Piece> = Vec::new();
    for (document, ids) in documents.iter().enumerate() {
        for start in (0..ids.len()).step_by(seq_tokens) {
            pieces.push(Piece { document, start, n: seq_tokens.min(ids.len() - start) });
        }
    }
    pieces.sort_by_key(|piece| std::cmp::Reverse(piece.n));
    let mut bins: Vec<Vec<Piece>> = Vec::new();
    let mut room: BTreeSet<(usize, usize)> = BTreeSet::new();
    for piece in pieces {
        let (left, bin) = match room.range((piece.n, 0)..).next().copied() {
            Some(least) => {
                room.remove(&least);
                least
            }
            None => {
                bins.push(Vec::new());
                (seq_tokens, bins.len() - 1)
            }
        };
        bins[bin].push(piece);
        if left > piece.n {
            room.insert((left - piece.n, bin));
        }
    }
    bins
}

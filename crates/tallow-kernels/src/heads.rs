//! Heads of attention between the order that linear layers write, tokens first, and the order that
//! attention reads, heads first.

// B batch · T tokens · W width of a token's row · H heads · D elements of one head

use crate::{Element, par};

/// Heads that stand side by side in the rows of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Sequences, `B`.
    pub batch: usize,
    /// Tokens of each, `T`.
    pub tokens: usize,
    /// Elements of a token's row, `W`.
    pub width: usize,
    /// Where in a row the first head begins.
    pub first: usize,
    /// Heads, `H`.
    pub n_heads: usize,
    /// Elements of one, `D`.
    pub head_dim: usize,
}

impl Heads {
    fn assert_lens(&self, what: &str, n_rows: usize, n_heads: usize) {
        let Self { batch, tokens, width, first, .. } = *self;
        let n = self.n_heads * self.head_dim;
        assert!(first + n <= width, "{what}: heads end beyond a row: {self:?}");
        assert_eq!(n_rows, batch * tokens * width, "{what}: not [B, T, W] of {self:?}");
        assert_eq!(n_heads, batch * tokens * n, "{what}: not [B, H, T, D] of {self:?}");
    }
}

/// `heads[b, h, t, d] = rows[b, t, first + h D + d]`.
///
/// *Scratch:* none.
/// # Panics
/// If a length does not match.
pub fn split_heads<T: Element>(heads: &mut [T], rows: &[T], shape: &Heads) {
    shape.assert_lens("split_heads", rows.len(), heads.len());
    let Heads { tokens, width, first, n_heads, head_dim, .. } = *shape;
    par::rows(
        heads,
        tokens * head_dim,
        #[inline(always)]
        |i, head| {
            let (b, h) = (i / n_heads, i % n_heads);
            let rows = &rows[b * tokens * width + first + h * head_dim..];
            for (t, dst) in head.chunks_exact_mut(head_dim).enumerate() {
                dst.copy_from_slice(&rows[t * width..][..head_dim]);
            }
        },
    );
}

/// The reverse of [`split_heads`]: `rows[b, t, first + h D + d] = heads[b, h, t, d]`; the rest of the
/// rows stays as it is.
///
/// *Scratch:* none.
/// # Panics
/// If a length does not match.
pub fn merge_heads<T: Element>(rows: &mut [T], heads: &[T], shape: &Heads) {
    shape.assert_lens("merge_heads", rows.len(), heads.len());
    let Heads { tokens, width, first, n_heads, head_dim, .. } = *shape;
    par::rows(
        rows,
        width,
        #[inline(always)]
        |i, row| {
            let (b, t) = (i / tokens, i % tokens);
            let dst = &mut row[first..first + n_heads * head_dim];
            for (h, dst) in dst.chunks_exact_mut(head_dim.max(1)).enumerate() {
                dst.copy_from_slice(
                    &heads[((b * n_heads + h) * tokens + t) * head_dim..][..head_dim],
                );
            }
        },
    );
}

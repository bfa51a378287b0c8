//! Embedding: rows of a table picked by id, and the gradient of the table.

use crate::{
    Element, Real,
    par::{self, Disjoint},
    reduce::n_rows,
};
use rayon::prelude::*;

/// What the embedding kernels refuse.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmbeddingError {
    /// An id beyond the table.
    #[error("embedding: id {id} at position {position} is beyond the table's {n_ids} rows")]
    Id {
        /// The id.
        id: u32,
        /// Where in `ids` it stands first.
        position: usize,
        /// Rows of the table, `V`.
        n_ids: usize,
    },
}

/// `out[i] = weight[ids[i]]`: `weight` `[V, D]`, `ids` `[N]` → `out` `[N, D]`.
///
/// *Kept:* the ids. *Scratch:* none.
/// # Errors
/// If an id is not below `V`; `out` is untouched then.
/// # Panics
/// If a length does not match.
pub fn embedding<T: Element>(
    out: &mut [T],
    weight: &[T],
    ids: &[u32],
    d: usize,
) -> Result<(), EmbeddingError> {
    assert_eq!(out.len(), ids.len() * d, "embedding: out is not one row of {d} per id");
    check_ids(ids, n_rows("embedding: weight", weight.len(), d), d)?;
    par::rows(
        out,
        d,
        #[inline(always)]
        |i, row| row.copy_from_slice(&weight[ids[i] as usize * d..][..d]),
    );
    Ok(())
}

/// `dweight[v] = sum of dout[i] over the i with ids[i] == v`, all of `dweight` `[V, D]` written.
///
/// Rows of one id are added in the order of their positions, in the accumulator type, and rounded
/// once. The row of the id `padding` gets no gradient.
///
/// *Scratch:* [`embedding_backward_scratch_bytes`].
/// # Errors
/// If an id is not below `V`; `dweight` is untouched then.
/// # Panics
/// If a length does not match.
pub fn embedding_backward<T: Element>(
    dweight: &mut [T],
    ids: &[u32],
    dout: &[T],
    d: usize,
    padding: Option<u32>,
) -> Result<(), EmbeddingError> {
    assert_eq!(dout.len(), ids.len() * d, "embedding_backward: dout is not one row of {d} per id");
    check_ids(ids, n_rows("embedding_backward: dweight", dweight.len(), d), d)?;
    par::elems(
        dweight,
        #[inline(always)]
        |_, cut| cut.fill(T::default()),
    );
    if d == 0 {
        return Ok(());
    }
    // (id, position): sorted, the positions of one id stand together and in order.
    let mut places: Vec<(u32, usize)> = ids.iter().copied().zip(0..).collect();
    places.retain(|&(id, _)| Some(id) != padding);
    places.sort_unstable();
    let groups: Vec<&[(u32, usize)]> = places.chunk_by(|a, b| a.0 == b.0).collect();
    let dweight = Disjoint::new(dweight);
    groups.par_iter().for_each(|group| {
        // SAFETY: each id has one group, so one row; `dweight` is borrowed by this function.
        let row = unsafe { dweight.slice(group[0].0 as usize * d, d) };
        for (c, cut) in row.chunks_mut(ACC_ELEMS).enumerate() {
            let mut acc = [T::Acc::of(0.0); ACC_ELEMS];
            for &(_, position) in *group {
                let dout = &dout[position * d + c * ACC_ELEMS..][..cut.len()];
                for (a, g) in acc.iter_mut().zip(dout) {
                    *a += g.widen();
                }
            }
            for (w, a) in cut.iter_mut().zip(acc) {
                *w = T::narrow(a);
            }
        }
    });
    Ok(())
}

/// Columns of a gradient row added up at a time: they stay on the stack.
const ACC_ELEMS: usize = 128;

/// Bytes [`embedding_backward`] borrows at most: its ids sorted, and one slice per distinct id.
pub const fn embedding_backward_scratch_bytes(n_ids: u64) -> u64 {
    n_ids * (size_of::<(u32, usize)>() + size_of::<&[u8]>()) as u64
}

/// Refuses the first id beyond the table; a table without columns has no rows to be beyond.
fn check_ids(ids: &[u32], n_ids: usize, d: usize) -> Result<(), EmbeddingError> {
    match ids.iter().position(|&id| id as usize >= n_ids) {
        Some(position) if d > 0 => Err(EmbeddingError::Id { id: ids[position], position, n_ids }),
        _ => Ok(()),
    }
}

use std::ops::Range;

/// A stretch of a batch that goes through the model at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    start: usize,
    n_items: usize,
    n_total: usize,
}

impl Piece {
    /// Which items of the batch.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.n_items
    }

    /// How many; at least 1.
    pub fn n_items(&self) -> usize {
        self.n_items
    }

    /// Its share of the batch, by items: multiplies a mean over the piece in a mean over the batch.
    pub fn weight(&self) -> f64 {
        self.n_items as f64 / self.n_total as f64
    }
}

/// Splits `n_items` into pieces of `piece_items`, the last as short as it must be; no piece of none.
///
/// # Panics
/// If `piece_items` is 0.
pub fn pieces(n_items: usize, piece_items: usize) -> Pieces {
    assert!(piece_items > 0, "pieces: pieces of 0 items");
    Pieces { start: 0, n_total: n_items, piece_items }
}

/// The pieces of a batch, in order: see [`pieces`].
#[derive(Clone, Debug)]
pub struct Pieces {
    start: usize,
    n_total: usize,
    piece_items: usize,
}

impl Pieces {
    /// Items of a full piece.
    pub fn piece_items(&self) -> usize {
        self.piece_items
    }
}

impl Iterator for Pieces {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let n_items = self.piece_items.min(self.n_total - self.start);
        let piece = Piece { start: self.start, n_items, n_total: self.n_total };
        self.start += n_items;
        (n_items > 0).then_some(piece)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let n_left = (self.n_total - self.start).div_ceil(self.piece_items);
        (n_left, Some(n_left))
    }
}

impl ExactSizeIterator for Pieces {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_item_once_and_weigh_one() {
        for n_items in [0, 1, 2, 7, 10, 16, 100, 1023] {
            for piece_items in [1, 2, 3, 4, 16, 1000, usize::MAX] {
                let split = pieces(n_items, piece_items);
                let (n_pieces, piece_items_) = (split.len(), split.piece_items());
                let covered: Vec<usize> = split.clone().flat_map(|piece| piece.range()).collect();
                assert!(covered.into_iter().eq(0..n_items), "{n_items} by {piece_items}");
                assert_eq!((split.clone().count(), piece_items_), (n_pieces, piece_items));
                assert!(split.clone().all(|piece| (1..=piece_items).contains(&piece.n_items())));
                let weight: f64 = split.map(|piece| piece.weight()).sum();
                let n_roundings = n_pieces as f64;
                assert!(n_items == 0 || (weight - 1.0).abs() <= n_roundings * f64::EPSILON);
            }
        }
    }

    #[test]
    fn weights_are_by_items() {
        let weights: Vec<f64> = pieces(10, 4).map(|piece| piece.weight()).collect();
        assert_eq!(weights, [0.4, 0.4, 0.2]);
    }

    #[test]
    #[should_panic(expected = "pieces of 0 items")]
    fn pieces_of_nothing_are_a_programmer_error() {
        let _ = pieces(3, 0);
    }
}

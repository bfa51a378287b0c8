//! Rows of different lengths, as one array.

use crate::error::Result;
use candle_core::{Device, Tensor, WithDType};

/// Rows filled up to the longest: `[B, width]`, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Padded<T> {
    /// `B * width` elements.
    pub values: Vec<T>,
    /// Elements of a row, padding included.
    pub width: usize,
    /// Elements of each row, padding excluded.
    pub lens: Vec<u32>,
}

/// Rows filled up with `fill` to the longest, and to a multiple of `multiple_of`.
/// # Panics
/// If `multiple_of` is 0.
pub fn pad<T: Copy>(rows: &[Vec<T>], fill: T, multiple_of: usize) -> Padded<T> {
    let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = longest.next_multiple_of(multiple_of);
    let mut values = Vec::with_capacity(rows.len() * width);
    for row in rows {
        values.extend_from_slice(row);
        values.resize(values.len() + width - row.len(), fill);
    }
    Padded { values, width, lens: rows.iter().map(|row| row.len() as u32).collect() }
}

impl<T: WithDType> Padded<T> {
    /// The values `[B, width]` and the lengths `[B]`, u32, on `device`.
    /// # Errors
    /// Candle's.
    pub fn into_tensors(self, device: &Device) -> Result<(Tensor, Tensor)> {
        let n_rows = self.lens.len();
        let values = Tensor::from_vec(self.values, (n_rows, self.width), device)?;
        Ok((values, Tensor::from_vec(self.lens, n_rows, device)?))
    }
}

/// Rows one after another, without padding.
#[derive(Clone, Debug, PartialEq)]
pub struct Ragged<T> {
    /// All elements.
    pub values: Vec<T>,
    /// `B + 1` places: row `i` is `values[offsets[i]..offsets[i + 1]]`.
    pub offsets: Vec<usize>,
}

/// Rows one after another, and where each begins.
pub fn ragged<T: Copy>(rows: &[Vec<T>]) -> Ragged<T> {
    let mut offsets = vec![0];
    offsets.extend(rows.iter().scan(0, |end, row| {
        *end += row.len();
        Some(*end)
    }));
    Ragged { values: rows.concat(), offsets }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_padded_to_the_longest() {
        let rows = [vec![1u32, 2, 3], vec![], vec![4]];
        let padded = pad(&rows, 9, 2);
        assert_eq!((padded.width, &padded.lens[..]), (4, &[3, 0, 1][..]));
        assert_eq!(padded.values, [1, 2, 3, 9, 9, 9, 9, 9, 4, 9, 9, 9]);
        let (values, lens) = padded.into_tensors(&Device::Cpu).unwrap();
        assert_eq!((values.dims(), lens.dims()), (&[3, 4][..], &[3][..]));
        assert_eq!(pad::<u32>(&[], 0, 8).width, 0);
    }

    #[test]
    fn ragged_rows_keep_their_lengths() {
        let ragged = ragged(&[vec![1u8, 2], vec![], vec![3]]);
        assert_eq!((ragged.values, ragged.offsets), (vec![1, 2, 3], vec![0, 2, 2, 3]));
    }
}

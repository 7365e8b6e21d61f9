//! Cutting a large tensor into pieces that fit any adapter's bindings.
//!
//! A storage binding may be limited to 128 MiB, while vocabulary matrices reach gigabytes. The cut is a property of
//! the tensor alone — the same on every adapter and at every budget — because results must not depend on either.

use crate::error::{Error, Result};
use std::ops::Range;

/// The most bytes of a piece: 128 MiB, the least binding size that WebGPU guarantees.
pub const PIECE_BYTES: u64 = 128 << 20;

/// Pieces begin at multiples of this many rows where so many rows fit into [`PIECE_BYTES`].
pub const PIECE_ROWS: u64 = 1024;

/// A part of a weight that is stored, bound and moved as one.
///
/// Rows are those of the tensor seen as a matrix: its last dimension is a row, all dimensions before it are counted
/// through. A vector has rows of one element, a scalar is one row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The rows, counted from the tensor's first.
    pub rows: Range<u64>,
    /// The bytes, counted from the start of the source.
    pub range: Range<u64>,
}

/// Rows and elements a row of a tensor seen as a matrix.
pub fn rows_and_columns(shape: &[u64]) -> (u64, u64) {
    match shape {
        [] => (1, 1),
        [n] => (*n, 1),
        [leading @ .., last] => (leading.iter().fold(1, |n: u64, d| n.saturating_mul(*d)), *last),
    }
}

/// Cuts the tensor `name` of this shape, whose bytes are at `range`. One piece up to [`PIECE_BYTES`], also for a
/// tensor without bytes.
///
/// Errors: [`Error::Limit`] if a single row is larger than a piece may be.
pub(crate) fn cut(name: &str, shape: &[u64], range: &Range<u64>) -> Result<Vec<Piece>> {
    let bytes = range.end - range.start;
    if bytes == 0 {
        // The rows of an empty tensor are not computed: [2^40, 2^40, 0] is legal, its row count no number.
        return Ok(vec![Piece { rows: 0..0, range: range.clone() }]);
    }
    let (rows, _) = rows_and_columns(shape);
    if bytes <= PIECE_BYTES {
        return Ok(vec![Piece { rows: 0..rows, range: range.clone() }]);
    }
    let row_bytes = bytes / rows;
    let fit = PIECE_BYTES / row_bytes;
    if fit == 0 {
        return Err(Error::Limit { what: format!("a row of tensor `{name}`"), need: row_bytes, have: PIECE_BYTES });
    }
    let step = if fit >= PIECE_ROWS { fit - fit % PIECE_ROWS } else { fit };
    let mut pieces = Vec::new();
    let mut first = 0;
    while first < rows {
        let next = rows.min(first + step);
        pieces
            .push(Piece { rows: first..next, range: range.start + first * row_bytes..range.start + next * row_bytes });
        first = next;
    }
    Ok(pieces)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    fn check(shape: &[u64], element: u64, begin: u64) -> Vec<Piece> {
        let bytes = shape.iter().product::<u64>() * element;
        let pieces = cut("t", shape, &(begin..begin + bytes)).unwrap();
        let (rows, columns) = rows_and_columns(shape);
        let (mut row, mut byte) = (0, begin);
        for piece in &pieces {
            assert_eq!((piece.rows.start, piece.range.start), (row, byte));
            assert_eq!(piece.range.end - piece.range.start, (piece.rows.end - row) * columns * element);
            assert!(piece.range.end - byte <= PIECE_BYTES);
            (row, byte) = (piece.rows.end, piece.range.end);
        }
        assert_eq!((row, byte), (rows, begin + bytes));
        pieces
    }

    #[test]
    fn a_tensor_of_exactly_128_mib_is_one_piece_and_one_row_more_makes_two() {
        assert_eq!(check(&[32_768, 1024], 4, 100).len(), 1);
        let two = check(&[32_769, 1024], 4, 100);
        assert_eq!(two.len(), 2);
        assert_eq!(two[1].rows, 32_768..32_769);
    }

    #[test]
    fn cuts_are_at_multiples_of_1024_rows_where_1024_rows_fit() {
        let pieces = check(&[151_936, 2560], 2, 8);
        assert_eq!(pieces[0].rows.end, 25_600);
        assert!(pieces.iter().all(|p| p.rows.start % 1024 == 0));
    }

    #[test]
    fn where_1024_rows_do_not_fit_as_many_as_fit_are_taken() {
        let pieces = check(&[2000, 100_000], 4, 0);
        assert_eq!(pieces[0].rows, 0..335);
    }

    #[test]
    fn rows_are_counted_through_the_leading_dimensions_and_a_vector_has_rows_of_one() {
        check(&[1, 1, 40_000, 1024], 4, 0);
        check(&[40_000_000], 4, 2);
        check(&[64, 1024, 1024], 4, 0);
    }

    #[test]
    fn a_row_larger_than_a_piece_is_a_limit_error() {
        let columns = PIECE_BYTES / 4 + 1;
        let error = cut("wide", &[2, columns], &(0..columns * 8)).unwrap_err();
        assert!(matches!(error, Error::Limit { need, .. } if need == columns * 4));
        assert!(error.to_string().contains("wide"));
    }

    #[test]
    fn an_empty_tensor_is_one_piece_without_bytes() {
        let pieces = cut("t", &[1 << 40, 1 << 40, 0], &(24..24)).unwrap();
        assert_eq!(pieces, [Piece { rows: 0..0, range: 24..24 }]);
    }
}

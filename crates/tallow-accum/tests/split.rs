//! Batch arithmetic: case CLI-1.

use tallow_accum::{BatchSplit, SplitError};

#[test]
fn cli_1_any_two_numbers_derive_the_third() {
    // (batch, micro_batch, accumulate, ranks) -> (batch, micro_batch, accumulate)
    for (given, want) in [
        ((Some(64), None, None, 1), (64, 64, 1)),
        ((Some(10), Some(4), None, 1), (10, 4, 3)),
        ((Some(10), None, Some(3), 1), (10, 4, 3)),
        ((None, Some(4), Some(3), 1), (12, 4, 3)),
        ((Some(10), Some(4), Some(3), 1), (10, 4, 3)),
        ((Some(24), Some(4), None, 3), (24, 4, 2)),
        ((None, Some(4), Some(2), 3), (24, 4, 2)),
        ((Some(1), Some(1), Some(1), 1), (1, 1, 1)),
    ] {
        let (batch, micro, accumulate, ranks) = given;
        let split = BatchSplit::derive(batch, micro, accumulate, ranks).expect("they fit");
        assert_eq!((split.batch(), split.micro_batch(), split.accumulate()), want, "{given:?}");
    }
}

#[test]
fn cli_1_numbers_that_do_not_fit_are_refused() {
    use SplitError::*;
    let derive = |b, m, a, r| BatchSplit::derive(b, m, a, r).expect_err("must be refused");
    for (error, want) in [
        (derive(Some(0), None, None, 1), Zero { what: "batch" }),
        (derive(Some(8), Some(0), None, 1), Zero { what: "micro_batch" }),
        (derive(Some(8), None, Some(0), 1), Zero { what: "accumulate" }),
        (derive(Some(8), None, None, 0), Zero { what: "ranks" }),
        (derive(None, Some(8), None, 1), NoBatch),
        (derive(Some(8), Some(16), None, 1), MicroTooLarge { micro_batch: 16, rank_batch: 8 }),
        (derive(Some(8), None, Some(9), 1), TooManyPieces { accumulate: 9, rank_batch: 8 }),
        (derive(Some(8), None, None, 3), Ranks { batch: 8, ranks: 3, below: 6, above: 9 }),
        (derive(Some(2), None, None, 3), Ranks { batch: 2, ranks: 3, below: 3, above: 3 }),
    ] {
        assert_eq!(error, want);
    }
    let huge = derive(None, Some(usize::MAX), Some(2), 1);
    assert_eq!(huge, Overflow { micro_batch: usize::MAX, accumulate: 2, ranks: 1 });
    let error = derive(Some(10), Some(4), Some(2), 1).to_string();
    assert!(error.contains("makes 3 of them, not accumulate 2"), "{error}");
}

#[test]
fn pieces_hold_every_sample_once() {
    let split = BatchSplit::derive(Some(10), Some(4), None, 1).expect("they fit");
    assert_eq!(split.pieces(10).collect::<Vec<_>>(), [0..4, 4..8, 8..10]);
    assert_eq!(split.pieces(3).collect::<Vec<_>>(), vec![0..3; 1]);
    assert_eq!(split.pieces(0).count(), 0);
}

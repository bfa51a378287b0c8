//! Numbers as tables have them.

/// The middle of `numbers`, or the mean of the middle two; `None` of none.
pub(super) fn median(numbers: &[f64]) -> Option<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[half]),
        _ => Some((sorted[half - 1] + sorted[half]) / 2.0),
    }
}

/// `None` of none.
pub(super) fn mean(numbers: &[f64]) -> Option<f64> {
    if numbers.is_empty() { None } else { Some(numbers.iter().sum::<f64>() / numbers.len() as f64) }
}

/// The largest of `numbers`, 0 of none.
pub(super) fn largest(numbers: &[f64]) -> f64 {
    numbers.iter().copied().fold(0.0, f64::max)
}

/// `n` numbers, each the same factor above the one before, from `first` to `last`; those that round
/// to the same bytes once.
pub(super) fn ladder(first: u64, last: u64, n: usize) -> Vec<u64> {
    let factor = (last as f64 / first as f64).powf(1.0 / (n.max(2) - 1) as f64);
    let mut steps: Vec<u64> =
        (0..n).map(|i| (first as f64 * factor.powi(i as i32)).round() as u64).collect();
    steps.dedup();
    steps
}

/// MiB with one digit after the point.
pub(super) fn mib(bytes: f64) -> String {
    format!("{:.1}", bytes / f64::from(1 << 20))
}

/// `number` with `digits` after the point, or a dash.
pub(super) fn cell(number: Option<f64>, digits: usize) -> String {
    number.map_or("-".to_string(), |number| format!("{number:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        for (numbers, middle) in [
            (&[][..], None),
            (&[3.0][..], Some(3.0)),
            (&[3.0, 1.0][..], Some(2.0)),
            (&[9.0, 1.0, 2.0][..], Some(2.0)),
            (&[4.0, 1.0, 3.0, 2.0][..], Some(2.5)),
        ] {
            assert_eq!(median(numbers), middle, "{numbers:?}");
        }
        assert_eq!((mean(&[1.0, 4.0]), mean(&[])), (Some(2.5), None));
        assert_eq!(largest(&[2.0, 5.0, 1.0]), 5.0);
        assert_eq!(largest(&[]), 0.0);
    }

    #[test]
    fn a_ladder_is_geometric_and_ends_where_it_should() {
        assert_eq!(ladder(100, 1600, 5), [100, 200, 400, 800, 1600]);
        assert_eq!(ladder(7, 7, 4), [7]);
        assert_eq!(ladder(7, 70, 1), [7]);
        let steps = ladder(6_123_457, 98_765_431, 6);
        assert_eq!((steps[0], steps[5], steps.len()), (6_123_457, 98_765_431, 6));
        assert!(steps.is_sorted());
    }

    #[test]
    fn cells() {
        assert_eq!(mib(1_572_864.0), "1.5");
        assert_eq!(cell(Some(1.2345), 2), "1.23");
        assert_eq!(cell(None, 2), "-");
    }
}

//! Which law numbers follow.

/// Powers that are tried: a constant and one of these.
const POWERS: [(f64, &str); 4] = [(0.5, "x^0.5"), (1.0, "x"), (1.5, "x^1.5"), (2.0, "x^2")];

/// `y = start + slope x^power`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Law {
    pub(super) start: f64,
    pub(super) slope: f64,
    power: usize,
    /// The share of the variance that it explains.
    pub(super) explained: f64,
}

impl Law {
    /// The law with the least squared error, `None` of fewer than three points.
    pub(super) fn of(points: &[(f64, f64)]) -> Option<Self> {
        if points.len() < 3 {
            return None;
        }
        let laws = (0..POWERS.len()).filter_map(|power| Self::with(points, power));
        laws.max_by(|a, b| a.explained.total_cmp(&b.explained))
    }

    fn with(points: &[(f64, f64)], power: usize) -> Option<Self> {
        let n = points.len() as f64;
        let points: Vec<(f64, f64)> =
            points.iter().map(|(x, y)| (x.powf(POWERS[power].0), *y)).collect();
        let mean_x = points.iter().map(|p| p.0).sum::<f64>() / n;
        let mean_y = points.iter().map(|p| p.1).sum::<f64>() / n;
        let xx: f64 = points.iter().map(|p| (p.0 - mean_x).powi(2)).sum();
        let yy: f64 = points.iter().map(|p| (p.1 - mean_y).powi(2)).sum();
        let xy: f64 = points.iter().map(|p| (p.0 - mean_x) * (p.1 - mean_y)).sum();
        if xx == 0.0 || yy == 0.0 {
            return None;
        }
        let slope = xy / xx;
        Some(Self { start: mean_y - slope * mean_x, slope, power, explained: slope * xy / yy })
    }

    pub(super) fn at(&self, x: f64) -> f64 {
        self.start + self.slope * x.powf(POWERS[self.power].0)
    }

    /// As tables have it.
    pub(super) fn text(&self) -> String {
        let Self { start, slope, power, explained } = self;
        // Of pixels squared there is little each.
        let slope = match slope.abs() < 0.01 {
            true => format!("{slope:.2e}"),
            false => format!("{slope:.4}"),
        };
        format!("{start:.3} + {slope} {} (R2 {explained:.3})", POWERS[*power].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laws_are_found() {
        for (power, name) in POWERS {
            let points = [1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, 3.0 + 2.0 * x.powf(power)));
            let law = Law::of(&points).expect("points enough");
            assert!((law.start - 3.0).abs() < 1e-9 && (law.slope - 2.0).abs() < 1e-9, "{law:?}");
            assert_eq!(law.text(), format!("3.000 + 2.0000 {name} (R2 1.000)"));
            assert!((law.at(4.0) - points[2].1).abs() < 1e-9);
        }
    }

    #[test]
    fn small_slopes_keep_their_digits() {
        let points = [100.0, 200.0, 400.0].map(|x: f64| (x, 1.0 + 3.25e-5 * x * x));
        let law = Law::of(&points).expect("points enough");
        assert_eq!(law.text(), "1.000 + 3.25e-5 x^2 (R2 1.000)");
    }

    #[test]
    fn too_little_has_no_law() {
        assert_eq!(Law::of(&[(1.0, 1.0), (2.0, 2.0)]), None);
        assert_eq!(Law::of(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
    }
}

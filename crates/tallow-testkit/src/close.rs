//! Comparison with a tolerance that has a name.

/// How far a value may be from the one wanted. Where a bound comes from belongs in
/// `docs/numerics.md`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tol {
    /// Equal as numbers: `0.0` and `-0.0` are equal. For equality of bits compare [`crate::bits`].
    Exact,
    /// At most so many f32 ulps of the wanted value; below the smallest normal f32 an ulp is 2^-149.
    Ulps(u32),
    /// At most this fraction of the largest finite `|want|` in the slice. Near-zero entries are so
    /// judged against the tensor's size, because cancellation makes their own size meaningless.
    Rel(f64),
}

/// Panics unless every `got[i]` is within `tol` of `want[i]`.
///
/// NaN equals NaN, and an infinity equals the infinity of the same sign; nothing else equals them.
/// The message names the worst entry, with its error in the unit of the tolerance.
///
/// # Panics
/// If the lengths differ or an entry is out of tolerance.
#[track_caller]
pub fn assert_close(what: &str, got: &[f64], want: &[f64], tol: Tol) {
    let (n_got, n_want) = (got.len(), want.len());
    assert!(n_got == n_want, "{what}: {n_got} values, wanted {n_want}");
    let (error_of, limit, unit): (&dyn Fn(f64, f64) -> f64, f64, &str) = match tol {
        Tol::Exact => (&|got, want| (got - want).abs(), 0.0, "absolute"),
        Tol::Ulps(n_ulps) => {
            (&|got, want| (got - want).abs() / ulp(want), f64::from(n_ulps), "ulps")
        }
        Tol::Rel(rel) => {
            let scale = scale(want);
            (&move |got, want| relative(got, want, scale), rel, "relative to the largest wanted")
        }
    };
    let Some((i, error)) = worst(got, want, error_of) else {
        return;
    };
    assert!(
        error <= limit,
        "{what}[{i}]: got {:?}, wanted {:?}: error {error:.6e} ({unit}), allowed {tol:?}",
        got[i],
        want[i],
    );
}

/// The largest error of `got`, relative to the largest finite `|want|`: the least `rel` that
/// [`Tol::Rel`] accepts. Infinite when a NaN or an infinity has no equal on the other side.
///
/// # Panics
/// If the lengths differ.
pub fn max_rel(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len(), "max_rel: lengths differ");
    let scale = scale(want);
    worst(got, want, &|got, want| relative(got, want, scale)).map_or(0.0, |(_, error)| error)
}

/// The index and the size of the largest error, the first one on a tie.
fn worst(got: &[f64], want: &[f64], error_of: &dyn Fn(f64, f64) -> f64) -> Option<(usize, f64)> {
    let mut worst: Option<(usize, f64)> = None;
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = match () {
            _ if got == want || (got.is_nan() && want.is_nan()) => 0.0,
            _ if !got.is_finite() || !want.is_finite() => f64::INFINITY,
            _ => error_of(got, want),
        };
        if worst.is_none_or(|(_, largest)| error > largest) {
            worst = Some((i, error));
        }
    }
    worst
}

fn scale(want: &[f64]) -> f64 {
    want.iter().filter(|w| w.is_finite()).fold(0.0, |scale, w| w.abs().max(scale))
}

/// An all-zero `want` has scale 0, and then any difference is infinite.
fn relative(got: f64, want: f64, scale: f64) -> f64 {
    (got - want).abs() / scale
}

/// The distance between neighbouring f32 in the binade of `want`.
fn ulp(want: f64) -> f64 {
    const EXPONENT_BITS: u32 = 0x7f80_0000;
    let magnitude = (want.abs() as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
    f64::from(f32::from_bits(magnitude.to_bits() & EXPONENT_BITS)) * f64::from(f32::EPSILON)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The panic message of `assert_close`, or nothing where it accepts.
    fn verdict(got: &[f64], want: &[f64], tol: Tol) -> Option<String> {
        let caught = std::panic::catch_unwind(|| assert_close("x", got, want, tol));
        caught.err().map(|message| *message.downcast::<String>().unwrap())
    }

    const TOLERANCES: [Tol; 3] = [Tol::Exact, Tol::Ulps(4), Tol::Rel(1e-6)];

    #[test]
    fn accepts() {
        let eps = f64::from(f32::EPSILON);
        let rows: [(&[f64], &[f64], Tol); 9] = [
            (&[], &[], Tol::Exact),
            (&[0.0, 1.5], &[-0.0, 1.5], Tol::Exact),
            (&[1.0 + 2.0 * eps], &[1.0], Tol::Ulps(2)),
            (&[-4.0 - 8.0 * eps], &[-4.0], Tol::Ulps(2)),
            (&[2f64.powi(-149)], &[0.0], Tol::Ulps(1)),
            (&[f64::from(f32::MAX)], &[f64::from(f32::MAX.next_down())], Tol::Ulps(1)),
            // The entry near zero is judged against the 10.0 beside it.
            (&[1e-6, 10.0], &[0.0, 10.0], Tol::Rel(1e-7)),
            (&[0.0, 0.0], &[0.0, 0.0], Tol::Rel(0.0)),
            // An infinity does not become the scale.
            (&[f64::INFINITY, 1.0], &[f64::INFINITY, 1.0 + 1e-9], Tol::Rel(1e-8)),
        ];
        for (got, want, tol) in rows {
            assert_eq!(verdict(got, want, tol), None, "{got:?} {want:?}");
        }
    }

    #[test]
    fn rejects_beyond_each_tolerance() {
        let eps = f64::from(f32::EPSILON);
        let rows: [(&[f64], &[f64], Tol); 8] = [
            (&[1.0 + f64::EPSILON], &[1.0], Tol::Exact),
            (&[1.0 + 0.01 * eps], &[1.0], Tol::Ulps(0)),
            (&[1.0 + 2.01 * eps], &[1.0], Tol::Ulps(2)),
            (&[-4.0 + 8.01 * eps], &[-4.0], Tol::Ulps(2)),
            (&[2f64.powi(-148)], &[0.0], Tol::Ulps(1)),
            (&[1.1e-6, 10.0], &[0.0, 10.0], Tol::Rel(1e-7)),
            (&[1e-30], &[0.0], Tol::Rel(1.0)),
            (&[f64::INFINITY, 1.0], &[f64::INFINITY, 1.0 + 1e-7], Tol::Rel(1e-8)),
        ];
        for (got, want, tol) in rows {
            assert!(verdict(got, want, tol).is_some(), "{got:?} {want:?} {tol:?}");
        }
    }

    #[test]
    fn rejects_lengths_that_differ() {
        for tol in TOLERANCES {
            let message = verdict(&[1.0], &[1.0, 2.0], tol).unwrap();
            assert_eq!(message, "x: 1 values, wanted 2");
        }
    }

    #[test]
    fn non_finite_equals_only_itself() {
        let all = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1.0];
        for tol in TOLERANCES {
            for (i, got) in all.into_iter().enumerate() {
                for (j, want) in all.into_iter().enumerate() {
                    // The 1.0 in front shows that one bad entry is enough.
                    let rejected = verdict(&[1.0, got], &[1.0, want], tol).is_some();
                    assert_eq!(rejected, i != j, "{got} {want} {tol:?}");
                }
            }
        }
    }

    #[test]
    fn the_message_names_the_worst_entry() {
        let message = verdict(&[1.25, 2.5, 2.0], &[1.0, 2.0, 2.0], Tol::Rel(0.125)).unwrap();
        assert!(message.starts_with("x[1]: got 2.5, wanted 2.0: error 2.5"), "{message}");
        assert!(
            message.contains("relative") && message.ends_with("allowed Rel(0.125)"),
            "{message}"
        );
        let message = verdict(&[1.0 + f64::from(f32::EPSILON)], &[1.0], Tol::Ulps(0)).unwrap();
        assert!(message.contains("error 1.000000e0 (ulps)"), "{message}");
    }

    #[test]
    fn max_rel_is_the_least_accepted() {
        let (got, want) = ([1.25, 2.5, -4.0], [1.0, 2.0, -4.0]);
        assert_eq!(max_rel(&got, &want), 0.125);
        assert_eq!(verdict(&got, &want, Tol::Rel(0.125)), None);
        assert_eq!(max_rel(&[], &[]), 0.0);
        assert_eq!(max_rel(&[f64::NAN], &[1.0]), f64::INFINITY);
    }

    #[test]
    #[should_panic(expected = "lengths differ")]
    fn max_rel_rejects_lengths_that_differ() {
        max_rel(&[1.0], &[]);
    }
}

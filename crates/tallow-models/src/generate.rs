//! Text from a model: a look at what it has learned.

use crate::{
    error::{Error, Result, at_least_one, positive},
    text::Decoder,
};
use candle_core::{DType, Tensor};
use tallow_tensor::ops::{DropKey, uniform};

/// How the next token is chosen from its logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The largest logit; the lowest id of several.
    Greedy,
    /// A draw from the softmax, of the tokens that are left.
    Random {
        /// Divides the logits, above 0.
        temperature: f64,
        /// Leaves this many of the largest, at least 1; the lowest ids of equals.
        top_k: Option<usize>,
        /// Then leaves the fewest of the largest whose probabilities sum to at least this,
        /// `0 < p <= 1` (Holtzman et al. 2019).
        top_p: Option<f64>,
        /// The draw at position `i` is a function of the seed and `i`.
        seed: u64,
    },
}

/// The sequences of random numbers of generation, among those of a seed.
const STREAM: u64 = 0x6765_6e65_7261_7465;

impl Sampling {
    /// Refuses numbers out of their range.
    /// # Errors
    /// If one is.
    pub fn check(&self) -> Result<()> {
        let Self::Random { temperature, top_k, top_p, .. } = *self else { return Ok(()) };
        positive("temperature", temperature)?;
        at_least_one(&[("top_k", top_k.unwrap_or(1))])?;
        match top_p {
            Some(found) if !(found > 0.0 && found <= 1.0) => {
                Err(Error::Range { name: "top_p", found, expected: "above 0 and at most 1" })
            }
            _ => Ok(()),
        }
    }

    /// The token that follows `n_tokens` others, by its logits.
    /// # Errors
    /// If no logit is finite, or one is NaN or positive infinity, or a number is out of its range.
    pub fn pick(&self, logits: &[f64], n_tokens: usize) -> Result<u32> {
        self.check()?;
        let largest = logits.iter().fold(f64::NEG_INFINITY, |largest, &x| largest.max(x));
        if !largest.is_finite() || logits.iter().any(|x| x.is_nan()) {
            return Err(Error::Logits { n_tokens });
        }
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let logit = |id: u32| logits[id as usize];
        // Stable: of equal logits the lowest id comes first.
        order.sort_by(|&a, &b| logit(b).total_cmp(&logit(a)));
        let Self::Random { temperature, top_k, top_p, seed } = *self else { return Ok(order[0]) };
        order.truncate(top_k.unwrap_or(usize::MAX));
        let weight = |&id: &u32| ((logit(id) - largest) / temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        if let Some(top_p) = top_p {
            let enough = top_p * weights.iter().sum::<f64>();
            weights.truncate(first_above(&weights, |sum| sum >= enough) + 1);
        }
        let drawn = uniform(DropKey { seed, stream: STREAM }, n_tokens as u64);
        let point = drawn * weights.iter().sum::<f64>();
        Ok(order[first_above(&weights, |sum| sum > point)])
    }
}

/// The first index at which the running sum has come far enough, or the last.
fn first_above(weights: &[f64], far_enough: impl Fn(f64) -> bool) -> usize {
    let mut sum = 0.0;
    let found = weights.iter().position(|weight| {
        sum += weight;
        far_enough(sum)
    });
    found.unwrap_or(weights.len().saturating_sub(1))
}

/// Up to `n_new` tokens that follow `prompt`, fewer if `stop` is drawn, which ends the result.
///
/// *Memory:* the cache of `prompt` and the new tokens; the logits of one token.
/// # Errors
/// If the prompt is empty, the two are longer than the model's context, or a number of `sampling` is
/// out of its range.
pub fn generate(
    model: &(impl Decoder + ?Sized),
    prompt: &[u32],
    n_new: usize,
    sampling: &Sampling,
    stop: Option<u32>,
) -> Result<Vec<u32>> {
    sampling.check()?;
    at_least_one(&[("number of prompt tokens", prompt.len())])?;
    let (n_tokens, context) = (prompt.len().saturating_add(n_new), model.context());
    if n_tokens > context {
        return Err(Error::TooLong { n_tokens, context });
    }
    let mut cache = model.cache(n_tokens);
    let mut new = Vec::with_capacity(n_new);
    let mut given = prompt.to_vec();
    while new.len() < n_new {
        let ids_bt = Tensor::new(&given[..], model.device())?.unsqueeze(0)?;
        let logits = model.next_logits(&ids_bt, &mut cache)?.squeeze(0)?;
        let logits: Vec<f64> = logits.to_dtype(DType::F64)?.to_vec1()?;
        let next = sampling.pick(&logits, prompt.len() + new.len())?;
        new.push(next);
        if stop == Some(next) {
            break;
        }
        given = vec![next];
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::{Sampling, first_above};

    const LOGITS: [f64; 5] = [0.5, 2.0, -1.0, 2.0, f64::NEG_INFINITY];

    fn random(temperature: f64, top_k: Option<usize>, top_p: Option<f64>, seed: u64) -> Sampling {
        Sampling::Random { temperature, top_k, top_p, seed }
    }

    /// How often each token is drawn at 20 000 positions.
    fn counts(sampling: Sampling) -> [f64; 5] {
        let mut counts = [0.0; 5];
        for i in 0..20_000 {
            counts[sampling.pick(&LOGITS, i).expect("finite") as usize] += 1.0;
        }
        counts
    }

    #[test]
    fn draws_follow_the_softmax_of_what_is_left() {
        for (temperature, top_k, top_p, left) in [
            (1.0, None, None, &[0, 1, 2, 3][..]),
            (2.0, None, None, &[0, 1, 2, 3]),
            (0.5, Some(3), None, &[0, 1, 3]),
            // Both largest have 0.44 each, the third 0.1.
            (1.0, None, Some(0.43), &[1]),
            (1.0, None, Some(0.5), &[1, 3]),
            (1.0, None, Some(0.95), &[0, 1, 3]),
            (1.0, Some(2), Some(1.0), &[1, 3]),
        ] {
            let got = counts(random(temperature, top_k, top_p, 11));
            let weight = |i: &usize| (LOGITS[*i] / temperature).exp();
            let sum: f64 = left.iter().map(weight).sum();
            for i in 0..5 {
                let p = if left.contains(&i) { weight(&i) / sum } else { 0.0 };
                let (want, sigma) = (20_000.0 * p, (20_000.0 * p * (1.0 - p)).sqrt());
                // Fixed seed: five standard deviations are exceeded by one seed in a million.
                let what = format!("{temperature} {top_k:?} {top_p:?}: {i}");
                assert!((got[i] - want).abs() <= 5.0 * sigma, "{what}: {} of {want}", got[i]);
            }
        }
    }

    #[test]
    fn a_draw_is_a_function_of_seed_and_position() {
        let draws = |seed: u64| -> Vec<u32> {
            (0..64)
                .map(|i| random(1.0, None, None, seed).pick(&LOGITS, i).expect("finite"))
                .collect()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
    }

    #[test]
    fn the_largest_wins_without_chance() {
        assert_eq!(Sampling::Greedy.pick(&LOGITS, 3).expect("finite"), 1);
        for seed in 0..50 {
            assert_eq!(random(1.0, Some(1), None, seed).pick(&LOGITS, 3).expect("finite"), 1);
            assert_eq!(
                random(1e-3, Some(3), Some(1e-9), seed).pick(&LOGITS, 3).expect("finite"),
                1
            );
        }
    }

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        for (sampling, wanted) in [
            (random(0.0, None, None, 0), "temperature is 0, it must be finite and above 0"),
            (random(f64::NAN, None, None, 0), "temperature is NaN"),
            (random(1.0, Some(0), None, 0), "top_k is 0, it must be at least 1"),
            (random(1.0, None, Some(1.5), 0), "top_p is 1.5, it must be above 0 and at most 1"),
        ] {
            let error = sampling.pick(&LOGITS, 0).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{error}");
        }
        for bad in [&[f64::NAN, 1.0][..], &[f64::INFINITY], &[f64::NEG_INFINITY], &[]] {
            let error = Sampling::Greedy.pick(bad, 7).expect_err("no maximum").to_string();
            assert!(error.contains("after 7 tokens"), "{error}");
        }
    }

    #[test]
    fn running_sums_end_at_the_last() {
        assert_eq!(first_above(&[1.0, 2.0], |sum| sum > 1.0), 1);
        assert_eq!(first_above(&[1.0, 2.0], |sum| sum > 9.0), 1);
    }
}

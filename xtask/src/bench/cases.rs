//! What `bench plan-sweep` trains: models small enough that each row takes seconds.

use super::owned;

/// A model and its batch.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) batch: u64,
    /// Settings that make it, two updates long.
    pub(super) settings: Vec<String>,
    /// How many budgets it is given.
    pub(super) n_budgets: usize,
}

/// A name, the settings of the model and its data, the batches.
type Model = (&'static str, &'static [&'static str], &'static [u64]);

const SYNTHETIC: &str = "data.source=synthetic";

const DIGITS: Model = ("resnet-digits, digits", &["data.held_out=32"], &[32, 128]);
const TINY_GPT: Model = (
    "gpt2, 1000 x 64, 2 layers, 64 tokens",
    &[
        "model.name=gpt2",
        "model.vocab=1000",
        "model.model_dim=64",
        "model.n_layers=2",
        "model.n_heads=2",
        "model.context=64",
        SYNTHETIC,
    ],
    &[16, 64],
);

const MODELS: [Model; 8] = [
    DIGITS,
    (
        "resnet-digits, 48 px",
        &["model.name=resnet-digits", "data.image_size=[48,48]", SYNTHETIC],
        &[16, 64],
    ),
    // The last planes are 1x1: a batch norm needs two samples of them.
    (
        "resnet18, 32 px",
        &["model.name=resnet18", "data.image_size=[32,32]", "data.n_classes=100", SYNTHETIC],
        &[16],
    ),
    (
        "resnet18, 64 px",
        &["model.name=resnet18", "data.image_size=[64,64]", "data.n_classes=100", SYNTHETIC],
        &[8, 32],
    ),
    (
        "resnet50, 64 px",
        &["model.name=resnet50", "data.image_size=[64,64]", "data.n_classes=100", SYNTHETIC],
        &[8, 16],
    ),
    TINY_GPT,
    (
        "gpt2, 4000 x 128, 4 layers, 128 tokens",
        &[
            "model.name=gpt2",
            "model.vocab=4000",
            "model.model_dim=128",
            "model.n_layers=4",
            "model.n_heads=4",
            "model.context=128",
            SYNTHETIC,
        ],
        &[8, 32],
    ),
    (
        "gpt2, 8000 x 256, 6 layers, 256 tokens",
        &[
            "model.name=gpt2",
            "model.vocab=8000",
            "model.model_dim=256",
            "model.n_layers=6",
            "model.n_heads=4",
            "model.context=256",
            SYNTHETIC,
        ],
        &[4, 16],
    ),
];

/// All of them, or a handful.
pub(super) fn cases(quick: bool) -> Vec<Case> {
    if quick {
        return [DIGITS, TINY_GPT].iter().map(|model| case(model, model.2[0], 3)).collect();
    }
    let cases = MODELS.iter().flat_map(|model| model.2.iter().map(move |&b| case(model, b, 5)));
    cases.collect()
}

fn case(&(name, settings, _): &Model, batch: u64, n_budgets: usize) -> Case {
    let mut settings = owned(settings);
    if settings.iter().any(|setting| setting == SYNTHETIC) {
        settings.extend([format!("data.n_samples={}", 2 * batch), "data.held_out=4".to_string()]);
    }
    settings.extend(owned(&["train.epochs=1", "train.max_updates=2"]));
    settings.push(format!("train.batch={batch}"));
    Case { name, batch, settings, n_budgets }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sweep_is_wide_and_the_quick_one_is_not() {
        let rows = |quick| cases(quick).iter().map(|case| case.n_budgets).sum::<usize>();
        assert!(rows(false) >= 60, "{}", rows(false));
        assert_eq!(rows(true), 6);
    }

    #[test]
    fn every_case_makes_two_updates() {
        for case in cases(false) {
            assert!(case.settings.contains(&format!("train.batch={}", case.batch)));
            let settings = case.settings.join(" ");
            let samples = format!("data.n_samples={} ", 2 * case.batch);
            assert!(settings.contains(&samples) || !settings.contains(SYNTHETIC), "{settings}");
        }
    }
}

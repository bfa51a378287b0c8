//! `tallow sample`.

use crate::{
    config::{self, Model, Tokenized},
    run_dir,
    view::answer,
};
use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use tallow_data::formats::{Input, Tokenizer};
use tallow_models::{Decoder, Sampling, generate, weights::Checkpoint};
use tallow_train::precision::Policy;

/// How tokens are drawn.
pub(crate) fn sampling(temperature: f64, top_k: Option<usize>, seed: u64) -> Sampling {
    match temperature {
        0.0 => Sampling::Greedy,
        _ => Sampling::Random { temperature, top_k, top_p: None, seed },
    }
}

/// Tokens added unless told otherwise.
const N_TOKENS: usize = 200;

/// What text is made of.
enum Alphabet {
    Bytes,
    Tokens(Tokenizer),
}

impl Alphabet {
    /// Of a `tokenizer.json`.
    fn of(file: &Path) -> Result<Self> {
        Ok(Self::Tokens(Tokenizer::open(&Input::open(file)?)?))
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(match self {
            Alphabet::Bytes => text.bytes().map(u32::from).collect(),
            Alphabet::Tokens(tokenizer) => tokenizer.encode(text)?,
        })
    }

    fn decode(&self, tokens: &[u32]) -> Result<String> {
        Ok(match self {
            Alphabet::Bytes => {
                // A vocabulary of more than 256 may draw what is no byte.
                let bytes: Vec<u8> =
                    tokens.iter().map(|&t| u8::try_from(t).unwrap_or(b'?')).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Alphabet::Tokens(tokenizer) => tokenizer.decode(tokens)?,
        })
    }
}

/// Prints `prompt` and `n_tokens` that follow it, by the newest weights of the run in `path`, or by the
/// weights there.
///
/// # Errors
/// If there are no weights of a language model, or nothing says what its tokens are.
pub(crate) fn run(
    path: &Path,
    prompt: &str,
    n_tokens: Option<usize>,
    sampling: &Sampling,
    tokenizer: Option<&Path>,
) -> Result<()> {
    sampling.check()?;
    ensure!(path.exists(), "`{}` does not exist", path.display());
    let (model, alphabet, vocab) = open(path, tokenizer)?;
    let ids = alphabet.encode(prompt)?;
    ensure!(!ids.is_empty(), "--prompt is empty, it needs a token to go on with");
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
        bail!("--prompt holds token {id}, the model knows {vocab} tokens");
    }
    let room = model.context().saturating_sub(ids.len());
    let (n_ids, context) = (ids.len(), model.context());
    ensure!(room > 0, "--prompt is {n_ids} tokens, the model has positions for {context}");
    let n_tokens = n_tokens.unwrap_or(N_TOKENS.min(room));
    let new = generate(&*model, &ids, n_tokens, sampling, None)?;
    answer!("{prompt}{}", alphabet.decode(&new)?)
}

/// The model, what its text is made of, and how many tokens it knows.
fn open(path: &Path, tokenizer: Option<&Path>) -> Result<(Box<dyn Decoder>, Alphabet, usize)> {
    let n_tokens = |model: &Model| model.network.tokens().map_or(0, |(vocab, _)| vocab);
    let effective = run_dir::effective_path(path);
    let given = tokenizer.map(|file| Alphabet::of(file).context("--tokenizer")).transpose()?;
    if !effective.is_file() {
        let model = config::network_of_weights(path)?;
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        let beside = folder.join("tokenizer.json");
        let alphabet = match given {
            Some(alphabet) => alphabet,
            None if beside.is_file() => Alphabet::of(&beside)?,
            None => {
                bail!("`{}` has no tokenizer.json: name one by --tokenizer", folder.display())
            }
        };
        return Ok((model.build_text(&Policy::f32(), 0)?.model, alphabet, n_tokens(&model)));
    }
    let (model, seed, tokenized) = config::network_of(&effective)?;
    let alphabet = match (given, tokenized) {
        (Some(alphabet), _) => alphabet,
        (None, Tokenized::Bytes) => Alphabet::Bytes,
        (None, Tokenized::By(file)) => Alphabet::of(&file).with_context(|| {
            format!("data.tokenizer of the run in `{}`, or name it by --tokenizer", path.display())
        })?,
        (None, Tokenized::Unknown) => bail!(
            "the tokens of the run in `{}` are no bytes: name their tokenizer by --tokenizer",
            path.display()
        ),
    };
    let built = model.build_text(&Policy::f32(), seed)?;
    let weights = run_dir::weights(path)?;
    Checkpoint::open(&[weights], "")?.load_into(&built.masters.params())?;
    built.masters.publish()?;
    Ok((built.model, alphabet, n_tokens(&model)))
}

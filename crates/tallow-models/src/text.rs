//! What models of text share: the head with its loss, and the cache of keys and values.

// B batch · T tokens · D model · V vocabulary

use crate::{error::Error, segments::Score};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use tallow_tensor::ops::{self, CrossEntropy, Loss, Mask};

/// Logits that exist at once while a loss and its gradients are computed: rows enough of a large vocabulary
/// for both to come in one pass.
const LOGITS_BYTES: u64 = 32 << 20;
/// Logits that exist at once where no gradient is wanted.
const SCORED_BYTES: u64 = 8 << 20;

/// The loss sum of normed rows `[B T, D]` under the head `[V, D]`.
pub(crate) fn loss(
    rows: &Tensor,
    head: &Tensor,
    targets_bt: &Tensor,
    cfg: &CrossEntropy,
) -> Result<Loss> {
    let (head, targets) = (head.to_dtype(rows.dtype())?, targets_bt.flatten_all()?);
    Ok(ops::linear_cross_entropy(rows, &head, None, &targets, cfg, LOGITS_BYTES)?)
}

/// Judges normed rows `[B T, D]` under the head `[V, D]`, whose logits exist in chunks.
pub(crate) fn score(
    rows: &Tensor,
    head: &Tensor,
    targets_bt: &Tensor,
    cfg: &CrossEntropy,
) -> Result<Score> {
    let (rows, targets) = (rows.detach(), targets_bt.flatten_all()?);
    let head = head.to_dtype(rows.dtype())?.detach();
    let logit_bytes = DType::F32.size_in_bytes() * head.dim(0)?;
    let chunk = (SCORED_BYTES as usize / logit_bytes).max(1);
    let mut score = Score::NONE;
    for start in (0..rows.dim(0)?).step_by(chunk) {
        let n = chunk.min(rows.dim(0)? - start);
        let logits = ops::linear(&rows.narrow(0, start, n)?, &head, None)?;
        score += Score::of_logits(&logits, &targets.narrow(0, start, n)?, cfg)?;
    }
    Ok(score)
}

/// Keys and values of the tokens a model has seen, so that the next costs one token's work.
///
/// *Memory:* `2 * n_kv_heads * head_dim` elements a block and token of the capacity.
#[derive(Clone, Debug)]
pub struct Cache {
    pub(crate) blocks: Vec<KvCache>,
    n_tokens: usize,
}

impl Cache {
    /// For a model of `n_blocks` blocks; room for `capacity` tokens is made at once, more when
    /// needed.
    pub(crate) fn new(n_blocks: usize, capacity: usize) -> Self {
        Self { blocks: vec![KvCache::new(2, capacity.max(1)); n_blocks], n_tokens: 0 }
    }

    /// Tokens seen.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// The number of new tokens and where the first stands; refuses none, and those behind the last
    /// position.
    pub(crate) fn admit(&mut self, ids_bt: &Tensor, context: usize) -> Result<(usize, usize)> {
        let &[_, n_new @ 1..=usize::MAX] = ids_bt.dims() else {
            let expected = "[batch, tokens] with at least one token".to_string();
            return Err(Error::Input { found: ids_bt.dims().to_vec(), expected }.into());
        };
        let first = self.n_tokens;
        within(first + n_new, context)?;
        self.n_tokens += n_new;
        Ok((n_new, first))
    }
}

/// Refuses more tokens than positions.
pub(crate) fn within(n_tokens: usize, context: usize) -> Result<()> {
    if n_tokens <= context {
        return Ok(());
    }
    Err(Error::TooLong { n_tokens, context }.into())
}

/// Causal attention of the queries on the keys and values so far: `q` `[B, H, T, D]`, `k` and `v`
/// `[B, G, T, D]` → `[B, T, H D]`.
pub(crate) fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cache: Option<&mut KvCache>,
) -> Result<Tensor> {
    let (b, h, t, d) = q.dims4()?;
    let scale = 1.0 / (d as f64).sqrt();
    let out = match cache {
        None => ops::attention(q, k, v, Mask::Causal, scale)?,
        Some(cache) => {
            let [k, v] = [k, v].map(|x| x.detach().contiguous());
            let (k, v) = cache.append(&k?, &v?)?;
            ops::attention(&q.detach(), &k, &v, Mask::Causal, scale)?
        }
    };
    out.transpose(1, 2)?.reshape((b, t, h * d))
}

/// A model of text that can go on from where it stands.
pub trait Decoder {
    /// Tokens of the longest sequence.
    fn context(&self) -> usize;

    /// Where its parameters are.
    fn device(&self) -> &Device;

    /// An empty cache with room for `capacity` tokens.
    fn cache(&self, capacity: usize) -> Cache;

    /// `ids_bt` (u32) `[B, T]`, the tokens after those in `cache` → the logits `[B, V]` of what
    /// follows the last. Nothing is recorded for a backward pass.
    /// # Errors
    /// If there is no token, or more than positions, or shapes do not fit; the cache is then of no
    /// further use.
    fn next_logits(&self, ids_bt: &Tensor, cache: &mut Cache) -> Result<Tensor>;
}

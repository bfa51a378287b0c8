//! A network as a chain of segments.

use candle_core::{D, DType, ModuleT, Result, Tensor};
use std::ops::AddAssign;
use tallow_tensor::ops::{self, CrossEntropy, Loss};

/// How outputs compare with their targets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// The loss, summed over counted rows.
    pub loss_sum: f64,
    /// Rows whose target is not ignored: samples, or tokens.
    pub n_counted: u64,
    /// Of these, rows whose largest logit is their target's.
    pub n_right: u64,
}

impl Score {
    /// Of no rows.
    pub const NONE: Self = Self { loss_sum: 0.0, n_counted: 0, n_right: 0 };

    /// Of `logits` `[..., V]` and classes `targets` `[...]`.
    /// # Errors
    /// If shapes do not fit, or a target is neither a class nor ignored.
    pub fn of_logits(logits: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Self> {
        let (logits, targets) = (rows(&logits.detach())?, targets.flatten_all()?);
        let loss = ops::cross_entropy(&logits, &targets, cfg)?;
        let right = logits.argmax(D::Minus1)?.to_dtype(DType::I64)?;
        let right = right.eq(&targets.to_dtype(DType::I64)?)?.to_vec1::<u8>()?;
        Ok(Self {
            loss_sum: loss.sum.to_dtype(DType::F64)?.to_scalar()?,
            n_counted: loss.n_counted,
            n_right: right.iter().map(|&r| u64::from(r)).sum(),
        })
    }
}

impl AddAssign for Score {
    fn add_assign(&mut self, more: Self) {
        self.loss_sum += more.loss_sum;
        self.n_counted += more.n_counted;
        self.n_right += more.n_right;
    }
}

/// A network cut into segments, each a function of the one before: what recomputation and planning
/// work on. After the last comes the head with the loss, a segment of its own.
pub trait Segments: Send + Sync {
    /// Their names, in order, the head's not among them.
    fn names(&self) -> Vec<String>;

    /// What the head is called.
    fn head_name(&self) -> String;

    /// Runs segment `index`; `train` as in [`ModuleT`].
    /// # Errors
    /// If the input does not fit.
    /// # Panics
    /// If there is no such segment.
    fn run(&self, index: usize, x: &Tensor, train: bool) -> Result<Tensor>;

    /// The loss sum over the rows of the last segment's output.
    /// # Errors
    /// If shapes do not fit, or a target is neither a class nor ignored.
    fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss>;

    /// Judges the last segment's output.
    /// # Errors
    /// As [`Segments::loss`].
    fn score(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score>;
}

impl Segments for Box<dyn Segments> {
    fn names(&self) -> Vec<String> {
        (**self).names()
    }

    fn head_name(&self) -> String {
        (**self).head_name()
    }

    fn run(&self, index: usize, x: &Tensor, train: bool) -> Result<Tensor> {
        (**self).run(index, x, train)
    }

    fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        (**self).loss(x, targets, cfg)
    }

    fn score(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        (**self).score(x, targets, cfg)
    }
}

/// `[..., V]` → `[N, V]`.
fn rows(logits: &Tensor) -> Result<Tensor> {
    match logits.rank() {
        0..=2 => Ok(logits.clone()),
        rank => logits.flatten_to(rank - 2),
    }
}

/// Any candle model with logits `[..., classes]` as a chain of one segment.
#[derive(Clone, Copy, Debug)]
pub struct Whole<M>(pub M);

impl<M: ModuleT + Send + Sync> Segments for Whole<M> {
    fn names(&self) -> Vec<String> {
        vec!["model".to_string()]
    }

    fn head_name(&self) -> String {
        "loss".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, train: bool) -> Result<Tensor> {
        assert_eq!(index, 0, "a whole model is one segment");
        self.0.forward_t(x, train)
    }

    fn loss(&self, logits: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        Ok(ops::cross_entropy(&rows(logits)?, &targets.flatten_all()?, cfg)?)
    }

    fn score(&self, logits: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        Score::of_logits(logits, targets, cfg)
    }
}

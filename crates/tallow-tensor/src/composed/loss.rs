//! Softmax cross-entropy.

// N rows · D features · V classes

use super::{keep_where, rows::shifted, widen};
use crate::{
    Result,
    ops::{CrossEntropy, Loss, host_targets},
};
use candle_core::{D, Tensor};
use tallow_kernels::loss::LossError;

/// As [`ops::cross_entropy`](crate::ops::cross_entropy).
/// # Errors
/// As there.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
    let op = "cross_entropy";
    let targets = host_targets(op, logits, targets)?;
    let rows = Rows::checked(targets, logits.dim(1)?, cfg)?;
    let sum = rows.loss_sum(&widen(op, logits)?, 0, cfg)?;
    Ok(Loss { sum, n_counted: rows.n_counted() })
}

/// As [`ops::linear_cross_entropy`](crate::ops::linear_cross_entropy), but while a graph is
/// recorded it keeps the logits of all chunks.
/// # Errors
/// As there.
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    cfg: &CrossEntropy,
    chunk_bytes: u64,
) -> Result<Loss> {
    let op = "linear_cross_entropy";
    let ((n_rows, _), (n_classes, _)) = (x.dims2()?, weight.dims2()?);
    let rows = Rows::checked(host_targets(op, x, targets)?, n_classes, cfg)?;
    // Logits are never rounded to half precision.
    let (x, weight_t) = (widen(op, x)?, widen(op, weight)?.t()?);
    let bias = bias.map(|b| widen(op, b)).transpose()?;
    let row_bytes = (n_classes * x.dtype().size_in_bytes()).max(1) as u64;
    let chunk_rows = usize::try_from(chunk_bytes / row_bytes).unwrap_or(usize::MAX).max(1);
    let mut sum = Tensor::zeros((), x.dtype(), x.device())?;
    for first in (0..n_rows).step_by(chunk_rows) {
        let x = x.narrow(0, first, chunk_rows.min(n_rows - first))?;
        let mut logits = x.matmul(&weight_t)?;
        if let Some(bias) = &bias {
            logits = logits.broadcast_add(bias)?;
        }
        sum = (sum + rows.loss_sum(&logits, first, cfg)?)?;
    }
    Ok(Loss { sum, n_counted: rows.n_counted() })
}

/// What the targets say of each row.
struct Rows {
    /// The class; 0 where the row is ignored.
    class: Vec<u32>,
    /// 1 where the row is counted.
    counted: Vec<u8>,
}

impl Rows {
    fn checked(targets: Vec<i64>, n_classes: usize, cfg: &CrossEntropy) -> Result<Self> {
        let label_smoothing = cfg.label_smoothing;
        if !(0.0..=1.0).contains(&label_smoothing) {
            return Err(LossError::LabelSmoothing { label_smoothing }.into());
        }
        let mut rows = Self { class: vec![0; targets.len()], counted: vec![0; targets.len()] };
        for (row, target) in targets.into_iter().enumerate() {
            if target == cfg.ignore_index {
                continue;
            }
            match u32::try_from(target) {
                Ok(class) if (class as usize) < n_classes => rows.class[row] = class,
                _ => {
                    return Err(LossError::Target { row, target, n_classes }.into());
                }
            }
            rows.counted[row] = 1;
        }
        Ok(rows)
    }

    fn n_counted(&self) -> u64 {
        self.counted.iter().map(|&c| u64::from(c)).sum()
    }

    /// The sum of the losses of the rows from `first` on, one a row of `logits` `[n, V]`.
    fn loss_sum(&self, logits: &Tensor, first: usize, cfg: &CrossEntropy) -> Result<Tensor> {
        let (n, n_classes) = logits.dims2()?;
        let rows = first..first + n;
        let counted = Tensor::from_slice(&self.counted[rows.clone()], (n, 1), logits.device())?;
        // Ignored rows may hold anything, NaN too: they become 0 before and after.
        let shifted = shifted(&keep_where(&counted, logits, 0.0)?)?;
        let at_target = || {
            let class = Tensor::from_slice(&self.class[rows], (n, 1), logits.device())?;
            shifted.gather(&class, D::Minus1)
        };
        let mean = || shifted.sum_keepdim(D::Minus1)? / n_classes as f64;
        // An infinite logit must not meet a factor of 0.
        let mixed = match cfg.label_smoothing {
            0.0 => at_target()?,
            1.0 => mean()?,
            e => ((at_target()? * (1.0 - e))? + (mean()? * e)?)?,
        };
        let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
        Ok(keep_where(&counted, &(log_sum - mixed)?, 0.0)?.sum_all()?)
    }
}

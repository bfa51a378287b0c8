/// The loss of a window or an evaluation: a sum and the weight it stands for.
///
/// The mean to log is the mean over all samples or tokens, however they were grouped; a mean of
/// micro-batch means is not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSum {
    /// Sum of the losses.
    pub sum: f64,
    /// Samples or tokens, or the sum of their weights.
    pub weight: f64,
}

impl LossSum {
    /// Adds a micro-batch.
    pub fn add(&mut self, sum: f64, weight: f64) {
        self.sum += sum;
        self.weight += weight;
    }

    /// `sum / weight`; nothing where there is no weight.
    pub fn mean(self) -> Option<f64> {
        (self.weight != 0.0).then(|| self.sum / self.weight)
    }
}

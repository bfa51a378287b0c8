//! The formulas, on a chunk of elements in accumulator precision.

use crate::Real;

/// An optimizer's formula with its numbers; each acts on every element alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Decoupled decay (Loshchilov and Hutter 2019).
    AdamW(Adam),
    /// The decay is part of the gradient (Kingma and Ba 2015).
    Adam(Adam),
    /// Momentum (Polyak 1964) and Nesterov's, in the form of Sutskever et al. 2013.
    Sgd(Sgd),
    /// The sign of an interpolated momentum (Chen et al. 2023, "Symbolic Discovery of
    /// Optimization Algorithms").
    Lion(Lion),
}

/// Numbers of Adam and AdamW for one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// The learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay.
    pub decay: f64,
    /// Which update of this parameter it is, from 1.
    pub t: u64,
}

/// Numbers of SGD for one update; no dampening.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// The learning rate.
    pub lr: f64,
    /// Decay of the momentum; at 0 it need not be stored.
    pub momentum: f64,
    /// Whether the gradient looks a step ahead.
    pub nesterov: bool,
    /// Weight decay, part of the gradient.
    pub decay: f64,
}

/// Numbers of Lion for one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// The learning rate.
    pub lr: f64,
    /// Weight of the momentum in the direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub decay: f64,
}

impl Rule {
    /// Updates `p`, and the moments that the rule has, by the gradient `g`.
    #[inline(always)]
    pub(crate) fn apply<A: Real>(&self, p: &mut [A], g: &[A], m: &mut [A], v: &mut [A]) {
        match self {
            Rule::AdamW(adam) => {
                let keep = A::of(1.0 - adam.lr * adam.decay);
                adam.apply(p, g, m, v, |p, g| (p * keep, g));
            }
            Rule::Adam(adam) => {
                let decay = A::of(adam.decay);
                adam.apply(p, g, m, v, |p, g| (p, g + decay * p));
            }
            Rule::Sgd(sgd) => sgd.apply(p, g, m),
            Rule::Lion(lion) => lion.apply(p, g, m),
        }
    }
}

impl Adam {
    #[inline(always)]
    fn apply<A: Real>(
        &self,
        p: &mut [A],
        g: &[A],
        m: &mut [A],
        v: &mut [A],
        decayed: impl Fn(A, A) -> (A, A),
    ) {
        // m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        // p = p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        let (beta1, beta2, eps) = (A::of(self.beta1), A::of(self.beta2), A::of(self.eps));
        let (alpha1, alpha2) = (A::of(1.0 - self.beta1), A::of(1.0 - self.beta2));
        let bias = |beta: f64| 1.0 - libm::pow(beta, self.t as f64);
        let lr = A::of(self.lr / bias(self.beta1));
        let root = A::of(1.0 / bias(self.beta2).sqrt());
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let (w, g) = decayed(*p, g);
            *m = beta1 * *m + alpha1 * g;
            *v = beta2 * *v + alpha2 * g * g;
            *p = w - lr * *m / (v.sqrt() * root + eps);
        }
    }
}

impl Sgd {
    #[inline(always)]
    fn apply<A: Real>(&self, p: &mut [A], g: &[A], m: &mut [A]) {
        let (lr, mu, decay) = (A::of(self.lr), A::of(self.momentum), A::of(self.decay));
        if self.momentum == 0.0 {
            for (p, &g) in p.iter_mut().zip(g) {
                *p -= lr * (g + decay * *p);
            }
            return;
        }
        // m = mu m + g;  p = p - lr m, or p - lr (g + mu m) with Nesterov's look ahead
        for ((p, &g), m) in p.iter_mut().zip(g).zip(m) {
            let g = g + decay * *p;
            *m = mu * *m + g;
            *p -= lr * if self.nesterov { g + mu * *m } else { *m };
        }
    }
}

impl Lion {
    #[inline(always)]
    fn apply<A: Real>(&self, p: &mut [A], g: &[A], m: &mut [A]) {
        // c = beta1 m + (1 - beta1) g;  p = p - lr (sign(c) + decay p);  m = beta2 m + (1 - beta2) g
        let (beta1, beta2) = (A::of(self.beta1), A::of(self.beta2));
        let (alpha1, alpha2) = (A::of(1.0 - self.beta1), A::of(1.0 - self.beta2));
        let (lr, keep) = (A::of(self.lr), A::of(1.0 - self.lr * self.decay));
        let zero = A::of(0.0);
        for ((p, &g), m) in p.iter_mut().zip(g).zip(m) {
            let c = beta1 * *m + alpha1 * g;
            // Not `signum`, which is 1 at 0; NaN stays NaN.
            let step = if c > zero {
                lr
            } else if c < zero {
                -lr
            } else {
                c * zero
            };
            *p = keep * *p - step;
            *m = beta2 * *m + alpha2 * g;
        }
    }
}

//! Activations and their derivatives, elementwise.
//!
//! All slices of a call have one length and a shape of no interest. Nothing is kept but what the
//! backward pass names: the input for GELU and SiLU, the output for ReLU. No scratch. Every
//! function panics when lengths differ.

use crate::{Element, Real, par};
use num_traits::Float;

/// GELU by its tanh approximation (Hendrycks and Gimpel 2016): `0.5 x (1 + tanh(u))` with
/// `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
///
/// Computed as `x s(2 u)`, `s(z) = 1 / (1 + exp(-z))`, which is the same, costs less, and keeps
/// the digits that `1 + tanh` loses below zero.
/// # Panics
/// If the lengths differ.
pub fn gelu_tanh<T: Element>(out: &mut [T], x: &[T]) {
    map(out, x, gelu_tanh_of);
}

/// Gradient of [`gelu_tanh`]: with `s = s(2 u)`, `dx = dout * (s + x 2 s (1 - s) du/dx)`.
/// # Panics
/// If the lengths differ.
pub fn gelu_tanh_backward<T: Element>(dx: &mut [T], x: &[T], dout: &[T]) {
    map2(
        dx,
        x,
        dout,
        #[inline(always)]
        |x, dout| {
            let (zero, one, two) = (T::Acc::of(0.0), T::Acc::of(1.0), T::Acc::of(2.0));
            let s = sigmoid(two * gelu_inner(x));
            let ds = two * s * (one - s);
            let du = T::Acc::of(GELU_C) * (one + T::Acc::of(3.0 * GELU_CUBIC) * x * x);
            // Where s is flat, x * x may overflow: its product with zero is meant to be zero.
            let slope = if ds == zero { zero } else { x * ds * du };
            dout * (s + slope)
        },
    );
}

/// [`gelu_tanh`] of one element.
#[inline(always)]
pub(crate) fn gelu_tanh_of<R: Real>(x: R) -> R {
    x * sigmoid(R::of(2.0) * gelu_inner(x))
}

/// [`gelu_erf`] of one element.
#[inline(always)]
pub(crate) fn gelu_erf_of<R: Real>(x: R) -> R {
    x * normal_cdf(x)
}

/// [`silu`] of one element.
#[inline(always)]
pub(crate) fn silu_of<R: Real>(x: R) -> R {
    x * sigmoid(x)
}

/// `sqrt(2 / pi)`.
const GELU_C: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
/// The coefficient of `x^3`.
const GELU_CUBIC: f64 = 0.044715;

/// `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
#[inline(always)]
fn gelu_inner<R: Real>(x: R) -> R {
    R::of(GELU_C) * (x + R::of(GELU_CUBIC) * x * x * x)
}

/// GELU (Hendrycks and Gimpel 2016): `x Phi(x) = 0.5 x (1 + erf(x / sqrt(2)))`.
/// # Panics
/// If the lengths differ.
pub fn gelu_erf<T: Element>(out: &mut [T], x: &[T]) {
    map(out, x, gelu_erf_of);
}

/// Gradient of [`gelu_erf`]: `dx = dout * (Phi(x) + x phi(x))`, `phi` the normal density.
/// # Panics
/// If the lengths differ.
pub fn gelu_erf_backward<T: Element>(dx: &mut [T], x: &[T], dout: &[T]) {
    let scale = T::Acc::of(GELU_C * 0.5); // 1 / sqrt(2 pi)
    map2(
        dx,
        x,
        dout,
        #[inline(always)]
        |x, dout| {
            let phi = scale * (T::Acc::of(-0.5) * x * x).quick_exp();
            dout * (normal_cdf(x) + x * phi)
        },
    );
}

/// `Phi(x)`.
#[inline(always)]
fn normal_cdf<R: Real>(x: R) -> R {
    R::of(0.5) * (R::of(1.0) + (x * R::of(std::f64::consts::FRAC_1_SQRT_2)).erf())
}

/// SiLU, also called swish (Elfwing et al. 2017): `x s(x)`, `s(x) = 1 / (1 + exp(-x))`.
/// # Panics
/// If the lengths differ.
pub fn silu<T: Element>(out: &mut [T], x: &[T]) {
    map(out, x, silu_of);
}

/// Gradient of [`silu`]: `dx = dout * s (1 + x (1 - s))`.
/// # Panics
/// If the lengths differ.
pub fn silu_backward<T: Element>(dx: &mut [T], x: &[T], dout: &[T]) {
    map2(
        dx,
        x,
        dout,
        #[inline(always)]
        |x, dout| {
            let (one, s) = (T::Acc::of(1.0), sigmoid(x));
            dout * (s * (one + x * (one - s)))
        },
    );
}

#[inline(always)]
fn sigmoid<R: Real>(x: R) -> R {
    R::of(1.0) / (R::of(1.0) + (-x).quick_exp())
}

/// SwiGLU (Shazeer 2020): `silu(gate) * up`, rounded once.
/// # Panics
/// If the lengths differ.
pub fn swiglu<T: Element>(out: &mut [T], gate: &[T], up: &[T]) {
    map2(
        out,
        gate,
        up,
        #[inline(always)]
        |gate, up| gate * sigmoid(gate) * up,
    );
}

/// Gradient of [`swiglu`] by its gate: `dgate = dout * up * s (1 + gate (1 - s))`. That by `up` is
/// [`swiglu`] of the gate and `dout`.
/// # Panics
/// If the lengths differ.
pub fn swiglu_backward_gate<T: Element>(dgate: &mut [T], gate: &[T], up: &[T], dout: &[T]) {
    assert_eq!(dgate.len(), up.len(), "swiglu: dgate and up differ in length");
    assert_eq!(dgate.len(), gate.len(), "swiglu: dgate and gate differ in length");
    assert_eq!(dgate.len(), dout.len(), "swiglu: dgate and dout differ in length");
    par::elems(
        dgate,
        #[inline(always)]
        |start, cut| {
            let operands = gate[start..].iter().zip(&up[start..]).zip(&dout[start..]);
            for (d, ((gate, up), dout)) in cut.iter_mut().zip(operands) {
                let gate = gate.widen();
                let (one, s) = (T::Acc::of(1.0), sigmoid(gate));
                *d = T::narrow(dout.widen() * up.widen() * (s * (one + gate * (one - s))));
            }
        },
    );
}

/// `max(x, 0)`; NaN stays NaN.
/// # Panics
/// If the lengths differ.
pub fn relu<T: Element>(out: &mut [T], x: &[T]) {
    map(out, x, positive);
}

/// `max(a + b, 0)`, the end of a residual block, rounded once; NaN stays NaN. Its backward is
/// [`relu_backward`], the gradient of both `a` and `b`.
/// # Panics
/// If the lengths differ.
pub fn add_relu<T: Element>(out: &mut [T], a: &[T], b: &[T]) {
    map2(
        out,
        a,
        b,
        #[inline(always)]
        |a, b| positive(a + b),
    );
}

/// Gradient of [`relu`] and [`add_relu`] from their output: `dx = dout` where `out > 0`, 0 where
/// it is 0 (so `relu'(0) = 0`), NaN where it is NaN.
/// # Panics
/// If the lengths differ.
pub fn relu_backward<T: Element>(dx: &mut [T], out: &[T], dout: &[T]) {
    map2(
        dx,
        out,
        dout,
        #[inline(always)]
        |out, dout| {
            let zero = T::Acc::of(0.0);
            if out > zero {
                dout
            } else if out.is_nan() {
                out
            } else {
                zero
            }
        },
    );
}

/// `max(x, 0)` with NaN kept, which `Float::max` would drop.
#[inline(always)]
pub(crate) fn positive<R: Real>(x: R) -> R {
    if x <= R::of(0.0) { R::of(0.0) } else { x }
}

/// `out[i] = f(x[i])`.
fn map<T: Element>(out: &mut [T], x: &[T], f: impl Fn(T::Acc) -> T::Acc + Send + Sync) {
    assert_eq!(out.len(), x.len(), "activation: out and x differ in length");
    par::elems(
        out,
        #[inline(always)]
        |start, cut| {
            for (o, x) in cut.iter_mut().zip(&x[start..]) {
                *o = T::narrow(f(x.widen()));
            }
        },
    );
}

/// `out[i] = f(x[i], y[i])`.
fn map2<T: Element>(
    out: &mut [T],
    x: &[T],
    y: &[T],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Send + Sync,
) {
    assert_eq!(out.len(), x.len(), "activation: slices differ in length");
    assert_eq!(out.len(), y.len(), "activation: slices differ in length");
    par::elems(
        out,
        #[inline(always)]
        |start, cut| {
            for ((o, x), y) in cut.iter_mut().zip(&x[start..]).zip(&y[start..]) {
                *o = T::narrow(f(x.widen(), y.widen()));
            }
        },
    );
}

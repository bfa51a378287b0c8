//! What the kernels do, from candle operations: for devices other than the CPU. New tensors take
//! the place of in-place writes.

use crate::Result;
use candle_core::{DType, Tensor};
use tallow_kernels::accum::{Finished, Squares};

/// `grad` rounded to the buffer's dtype.
pub(crate) fn write(dtype: DType, grad: &Tensor) -> Result<Tensor> {
    Ok(grad.detach().to_dtype(dtype)?.contiguous()?)
}

/// `buffer + grad`, added in `f32` at least and rounded once.
pub(crate) fn add(buffer: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let wide = if buffer.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let sum = (buffer.to_dtype(wide)? + grad.detach().to_dtype(wide)?)?;
    Ok(sum.to_dtype(buffer.dtype())?)
}

/// `clamp(buffer / divisor, -limit, limit)`, divided in `f64` where the device knows it.
pub(crate) fn finish(buffer: &Tensor, divisor: f64, limit: f64) -> Result<(Tensor, Finished)> {
    let wide = wide(buffer);
    let divisor = Tensor::new(divisor, buffer.device())?.to_dtype(wide)?;
    let quotient = buffer.to_dtype(wide)?.broadcast_div(&divisor)?.to_dtype(buffer.dtype())?;
    let squares = squares(&quotient.to_dtype(wide)?)?;
    if limit == f64::INFINITY {
        return Ok((quotient, Finished { squares, n_clipped: 0 }));
    }
    let beyond = quotient.to_dtype(wide)?.abs()?.gt(limit)?.to_dtype(wide)?;
    let n_clipped = scalar(&beyond.sum_all()?)? as u64;
    Ok((quotient.clamp(-limit, limit)?, Finished { squares, n_clipped }))
}

/// `buffer * factor`, rounded once.
pub(crate) fn scale(buffer: &Tensor, factor: f64) -> Result<Tensor> {
    Ok((buffer.to_dtype(wide(buffer))? * factor)?.to_dtype(buffer.dtype())?)
}

/// Metal has no `f64`.
fn wide(buffer: &Tensor) -> DType {
    if buffer.device().is_metal() { DType::F32 } else { DType::F64 }
}

/// Plainly where that is safe, else relative to the largest.
fn squares(x: &Tensor) -> Result<Squares> {
    let least = if x.dtype() == DType::F64 { 1e-270 } else { 1e-30 };
    let sum = scalar(&x.sqr()?.sum_all()?)?;
    if sum.is_nan() || (least..f64::INFINITY).contains(&sum) || x.elem_count() == 0 {
        return Ok(Squares::new(1.0, sum));
    }
    let largest = scalar(&x.abs()?.max_all()?)?;
    if largest == 0.0 || !largest.is_finite() {
        return Ok(Squares::new(1.0, largest));
    }
    let largest_on_device = Tensor::new(largest, x.device())?.to_dtype(x.dtype())?;
    let sum = scalar(&x.broadcast_div(&largest_on_device)?.sqr()?.sum_all()?)?;
    Ok(Squares::new(largest, sum))
}

fn scalar(x: &Tensor) -> Result<f64> {
    Ok(match x.dtype() {
        DType::F64 => x.to_scalar()?,
        _ => f64::from(x.to_dtype(DType::F32)?.to_scalar::<f32>()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu;
    use candle_core::Device;
    use tallow_testkit::{Tol, assert_close, values};

    fn some(seed: u64, n: usize, dtype: DType) -> Tensor {
        Tensor::new(values(seed, n), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn f64s(x: &Tensor) -> Vec<f64> {
        x.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }

    /// Equal up to candle's CPU cast from f64 to half precision, which may round a near-tie wrongly.
    fn same(got: &Tensor, want: &Tensor) {
        let tol = match want.dtype() {
            DType::BF16 => Tol::Rel(1.0 / 256.0),
            DType::F16 => Tol::Rel(1.0 / 2048.0),
            _ => Tol::Exact,
        };
        assert_eq!(got.dtype(), want.dtype());
        assert_close("composed", &f64s(got), &f64s(want), tol);
    }

    #[test]
    fn it_does_what_the_kernels_do() {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            for (n, limit) in [(1, f64::INFINITY), (9, 0.1), (33, f64::INFINITY), (1023, 0.1)] {
                let (first, second) = (some(1, n, DType::BF16), some(2, n, dtype));
                let kernel = Tensor::zeros(n, dtype, &Device::Cpu).unwrap();
                cpu::write(&kernel, &first).unwrap();
                let composed = write(dtype, &first).unwrap();
                same(&composed, &kernel);
                cpu::add(&kernel, &second).unwrap();
                let composed = add(&composed, &second).unwrap();
                same(&composed, &kernel);
                let want = cpu::finish(&kernel, 3.0, limit).unwrap();
                let (composed, found) = finish(&composed, 3.0, limit).unwrap();
                same(&composed, &kernel);
                // Some thousandths of the elements of half precision may be a rounding apart.
                let tol = if dtype.size_in_bytes() == 2 { 1e-3 } else { 1e-12 };
                let norms = [found.squares.norm(), want.squares.norm()];
                assert_close("norm", &norms[..1], &norms[1..], Tol::Rel(tol));
                assert_eq!(found.n_clipped, want.n_clipped);
                cpu::scale(&kernel, 0.3).unwrap();
                same(&scale(&composed, 0.3).unwrap(), &kernel);
            }
        }
    }

    #[test]
    fn norms_keep_their_range_and_find_what_is_not_finite() {
        for size in [1e-200, 1.0, 1e200] {
            let x = Tensor::new(&[3.0 * size, -4.0 * size], &Device::Cpu).unwrap();
            let (_, found) = finish(&x, 1.0, f64::INFINITY).unwrap();
            assert_close("norm", &[found.squares.norm()], &[5.0 * size], Tol::Rel(1e-14));
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let x = Tensor::new(&[1f32, bad, 2.0], &Device::Cpu).unwrap();
            assert!(!finish(&x, 1.0, 0.5).unwrap().1.squares.is_finite());
        }
        let zeros = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        assert_eq!(finish(&zeros, 1.0, 0.5).unwrap().1.squares.norm(), 0.0);
    }
}

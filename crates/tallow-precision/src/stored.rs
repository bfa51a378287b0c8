//! Tensors in 8 bits an element.

use crate::{Result, policy::check_dtype};
use candle_core::{CpuStorage, CustomOp1, DType, Device, InplaceOp2, Layout, Shape, Tensor, bail};
use half::{bf16, f16};
use tallow_kernels::{
    Element,
    cast::cast,
    fp8::{self, Fp8, fp8_bytes},
};

/// A tensor kept as 8-bit codes and one scale: element = `decode(code) * scale`.
///
/// Keep an activation so between forward and backward, or a frozen weight; [`Stored::load`] gives it
/// back in the dtype that the next layer computes in. Infinite and NaN elements stay not finite.
///
/// *Memory:* [`fp8_bytes`]: a byte an element.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The codes, u8.
    pub codes: Tensor,
    /// A power of two.
    pub scale: f32,
    /// The format of the codes.
    pub format: Fp8,
    device: Device,
}

impl Stored {
    /// Rounds `x` to `format`, scaled so that its largest element just fits. Not differentiable.
    ///
    /// *Memory:* the codes, and a dense copy of `x` while it runs if `x` is strided. Off the CPU the
    /// values travel to the CPU and the codes live there.
    /// # Errors
    /// If `x` is not f32, bf16 or f16.
    pub fn store(x: &Tensor, format: Fp8) -> Result<Self> {
        check_dtype("the tensor to store in 8 bits", x.dtype())?;
        let dense = x.detach().to_device(&Device::Cpu)?.contiguous()?;
        let (storage, layout) = dense.storage_and_layout();
        let candle_core::Storage::Cpu(storage) = &*storage else { unreachable!("on the CPU") };
        let (codes, scale) = match storage {
            CpuStorage::F32(x) => encoded(dense_slice(x, layout)?, format),
            CpuStorage::BF16(x) => encoded(dense_slice(x, layout)?, format),
            CpuStorage::F16(x) => encoded(dense_slice(x, layout)?, format),
            _ => unreachable!("checked above"),
        };
        let codes = Tensor::from_vec(codes, x.shape(), &Device::Cpu)?;
        Ok(Self { codes, scale, format, device: x.device().clone() })
    }

    /// The values in `dtype`, on the device that the tensor came from: exact in f32 and bf16.
    ///
    /// *Memory:* the result.
    /// # Errors
    /// If `dtype` is not f32, bf16 or f16.
    pub fn load(&self, dtype: DType) -> Result<Tensor> {
        check_dtype("the dtype to load in", dtype)?;
        let (storage, layout) = self.codes.storage_and_layout();
        let candle_core::Storage::Cpu(CpuStorage::U8(codes)) = &*storage else {
            return Err(candle_core::Error::Msg("8-bit codes are u8 on the CPU".into()).into());
        };
        let codes = dense_slice(codes, layout)?;
        let shape = self.codes.shape();
        let tensor = match dtype {
            DType::BF16 => self.decoded::<bf16>(codes, shape)?,
            DType::F16 => self.decoded::<f16>(codes, shape)?,
            _ => self.decoded::<f32>(codes, shape)?,
        };
        Ok(tensor.to_device(&self.device)?)
    }

    /// Bytes held: the codes and the scale.
    pub fn bytes(&self) -> u64 {
        fp8_bytes(self.codes.elem_count() as u64)
    }

    fn decoded<T: Element<Acc = f32> + candle_core::WithDType>(
        &self,
        codes: &[u8],
        shape: &Shape,
    ) -> candle_core::Result<Tensor> {
        let mut values = vec![<T as Default>::default(); codes.len()];
        fp8::decode(&mut values, codes, self.format, self.scale);
        Tensor::from_vec(values, shape, &Device::Cpu)
    }
}

fn encoded<T: Element<Acc = f32>>(x: &[T], format: Fp8) -> (Vec<u8>, f32) {
    let scale = format.scale(fp8::absmax(x));
    let mut codes = vec![0; x.len()];
    fp8::encode(&mut codes, x, format, scale);
    (codes, scale)
}

fn dense_slice<'a, T>(data: &'a [T], layout: &Layout) -> candle_core::Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&data[start..end]),
        None => bail!("the tensor is not contiguous"),
    }
}

/// `x` rounded to `format` with a scale of its own, in `dtype`; the gradient passes straight through.
pub(crate) fn through(x: &Tensor, format: Fp8, dtype: DType) -> Result<Tensor> {
    if !x.device().is_cpu() {
        // The difference is a constant to the graph; x + (rounded - x) is exact: they are close.
        let rounded = Stored::store(x, format)?.load(DType::F32)?;
        let wide = x.to_dtype(DType::F32)?;
        let change = (rounded - wide.detach())?;
        return Ok((wide + change)?.to_dtype(dtype)?);
    }
    Ok(x.contiguous()?.apply_op1(Through { format, dtype })?)
}

struct Through {
    format: Fp8,
    dtype: DType,
}

impl CustomOp1 for Through {
    fn name(&self) -> &'static str {
        "fp8_through"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let n_elems = layout.shape().elem_count();
        let mut out = match self.dtype {
            DType::F32 => CpuStorage::F32(vec![0.0; n_elems]),
            DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; n_elems]),
            DType::F16 => CpuStorage::F16(vec![f16::ZERO; n_elems]),
            dtype => bail!("fp8_through: {dtype:?} is no compute dtype"),
        };
        let whole = Layout::contiguous(layout.shape());
        write_into(&mut out, &whole, x, layout, Some(self.format))?;
        Ok((out, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dout: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(dout.to_dtype(x.dtype())?))
    }
}

/// `x` in `dtype`, apart from the graph; `x` itself where it is that already.
pub(crate) fn detached_cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let x = x.detach();
    let known = |dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    let dense = x.device().is_cpu() && x.is_contiguous();
    if x.dtype() == dtype || !dense || !known(x.dtype()) || !known(dtype) {
        return Ok(x.to_dtype(dtype)?);
    }
    // The kernel works on all cores, candle's own cast on one.
    let cast = Tensor::zeros(x.shape(), dtype, x.device())?;
    cast.inplace_op2(&x, &Publish(None))?;
    Ok(cast)
}

/// `dst = src`, rounded to the dtype of `dst`, through an 8-bit format if there is one. No allocation.
pub(crate) struct Publish(pub(crate) Option<Fp8>);

impl InplaceOp2 for Publish {
    fn name(&self) -> &'static str {
        "publish"
    }

    fn cpu_fwd(
        &self,
        dst: &mut CpuStorage,
        dst_layout: &Layout,
        src: &CpuStorage,
        src_layout: &Layout,
    ) -> candle_core::Result<()> {
        write_into(dst, dst_layout, src, src_layout, self.0)
    }
}

fn write_into(
    dst: &mut CpuStorage,
    dst_layout: &Layout,
    src: &CpuStorage,
    src_layout: &Layout,
    format: Option<Fp8>,
) -> candle_core::Result<()> {
    match src {
        CpuStorage::F32(src) => write_from(dst, dst_layout, dense_slice(src, src_layout)?, format),
        CpuStorage::BF16(src) => write_from(dst, dst_layout, dense_slice(src, src_layout)?, format),
        CpuStorage::F16(src) => write_from(dst, dst_layout, dense_slice(src, src_layout)?, format),
        _ => bail!("the source is neither f32, bf16 nor f16"),
    }
}

fn write_from<S: Element<Acc = f32>>(
    dst: &mut CpuStorage,
    layout: &Layout,
    src: &[S],
    format: Option<Fp8>,
) -> candle_core::Result<()> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("the tensor is not contiguous")
    };
    match dst {
        CpuStorage::F32(dst) => write(&mut dst[start..end], src, format),
        CpuStorage::BF16(dst) => write(&mut dst[start..end], src, format),
        CpuStorage::F16(dst) => write(&mut dst[start..end], src, format),
        _ => bail!("the destination is neither f32, bf16 nor f16"),
    }
    Ok(())
}

fn write<S, D>(dst: &mut [D], src: &[S], format: Option<Fp8>)
where
    S: Element<Acc = f32>,
    D: Element<Acc = f32>,
{
    match format {
        None => cast(dst, src),
        Some(format) => fp8::through(dst, src, format, format.scale(fp8::absmax(src))),
    }
}

//! Each operation on a CUDA device gives the CPU's result and gradients.

use candle_core::{DType, Device, Tensor, Var};
use tallow_tensor::{
    Result,
    ops::{self, Conv2dConfig, CrossEntropy, Divisor, Mask, Pool2dConfig, Then},
};
use tallow_testkit::{Tol, assert_close, values};

/// Sums in another order, and products of f32 that a device may round to fewer bits.
const TOLERANCES: [(DType, Tol); 2] =
    [(DType::F32, Tol::Rel(1e-4)), (DType::BF16, Tol::Rel(1.0 / 32.0))];
const EPS: f64 = 1e-5;

/// Output and gradients on `device`, as f64 on the host.
fn run(
    dims: &[&[usize]],
    dtype: DType,
    device: &Device,
    op: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Vec<f64>>> {
    let var = |(i, dims): (usize, &&[usize])| {
        let data: Vec<f32> =
            values(i as u64, dims.iter().product()).iter().map(|&v| v as f32).collect();
        Ok(Var::from_tensor(&Tensor::from_vec(data, *dims, device)?.to_dtype(dtype)?)?)
    };
    let vars: Vec<Var> = dims.iter().enumerate().map(var).collect::<Result<_>>()?;
    let views: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let out = op(&views)?;
    let r: Vec<f32> = values(99, out.elem_count()).iter().map(|&v| v as f32).collect();
    let r = Tensor::from_vec(r, out.dims(), device)?;
    let grads = (out.to_dtype(DType::F32)? * r)?.sum_all()?.backward()?;
    let host = |t: &Tensor| -> Result<Vec<f64>> {
        Ok(t.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
    };
    let grads = vars.iter().map(|var| host(grads.get(var).expect("each operand has a gradient")));
    [host(&out)].into_iter().chain(grads).collect()
}

fn check(what: &str, dims: &[&[usize]], op: &dyn Fn(&[Tensor]) -> Result<Tensor>) {
    let device = Device::new_cuda(0).expect("a CUDA device");
    for (dtype, tol) in TOLERANCES {
        let what = format!("{what} {dtype:?}");
        let want = run(dims, dtype, &Device::Cpu, op).expect(&what);
        let got = run(dims, dtype, &device, op).expect(&what);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_close(&format!("{what}: result {i}"), got, want, tol);
        }
    }
}

#[test]
fn element_wise() {
    let two: &[&[usize]] = &[&[5, 33], &[5, 33]];
    check("gelu_tanh", &two[..1], &|x| ops::gelu_tanh(&x[0]));
    check("silu", &two[..1], &|x| ops::silu(&x[0]));
    check("relu", &two[..1], &|x| ops::relu(&x[0]));
    check("softmax", &two[..1], &|x| ops::softmax(&x[0]));
    check("log_softmax", &two[..1], &|x| ops::log_softmax(&x[0]));
    check("swiglu", two, &|x| ops::swiglu(&x[0], &x[1]));
    check("add", two, &|x| ops::add(&x[0], &x[1]));
    check("add_relu", two, &|x| ops::add_relu(&x[0], &x[1]));
}

#[test]
fn products() {
    check("linear", &[&[4, 9], &[6, 9], &[6]], &|x| ops::linear(&x[0], &x[1], Some(&x[2])));
    check("matmul", &[&[2, 4, 9], &[2, 9, 6]], &|x| ops::matmul(&x[0], &x[1]));
    for mask in [Mask::Causal, Mask::Full] {
        let dims: &[&[usize]] = &[&[2, 4, 7, 8], &[2, 2, 7, 8], &[2, 2, 7, 8]];
        check("attention", dims, &|x| ops::attention(&x[0], &x[1], &x[2], mask, 0.35));
    }
}

#[test]
fn images() {
    for (kernel, stride, size) in [(1, 1, 7), (3, 1, 8), (3, 2, 8), (3, 2, 7), (7, 2, 13)] {
        let cfg =
            Conv2dConfig { stride: [stride; 2], padding: [kernel / 2; 2], ..Conv2dConfig::UNIT };
        let what = format!("conv2d of {kernel}, {stride} apart, on {size}");
        let dims: &[&[usize]] = &[&[2, 3, size, size + 1], &[4, 3, kernel, kernel]];
        check(&what, dims, &|x| ops::conv2d(&x[0], &x[1], None, cfg));
    }
    let cfg = Pool2dConfig { kernel: [3, 3], stride: [2, 2], padding: [1, 1] };
    let x: &[&[usize]] = &[&[2, 3, 8, 7]];
    check("max_pool2d", x, &|x| ops::max_pool2d(&x[0], cfg));
    check("avg_pool2d", x, &|x| ops::avg_pool2d(&x[0], cfg, Divisor::Window));
    check("global_avg_pool2d", x, &|x| ops::global_avg_pool2d(&x[0]));
}

#[test]
fn norms() {
    let dims: &[&[usize]] = &[&[2, 3, 5, 7], &[3], &[3]];
    for then in [Then::Identity, Then::Relu] {
        check("batch_norm2d", dims, &|x| {
            Ok(ops::batch_norm2d(&x[0], Some(&x[1]), Some(&x[2]), EPS, then)?.0)
        });
    }
    let dims: &[&[usize]] = &[&[4, 31], &[31], &[31]];
    check("layer_norm", dims, &|x| ops::layer_norm(&x[0], Some(&x[1]), Some(&x[2]), EPS));
    check("rms_norm", &dims[..2], &|x| ops::rms_norm(&x[0], Some(&x[1]), EPS));
}

#[test]
fn tokens() {
    let cfg = CrossEntropy { ignore_index: -100, label_smoothing: 0.1 };
    let targets = |x: &Tensor| Tensor::new(&[0i64, 9, -100, 3], x.device());
    check("cross_entropy", &[&[4, 10]], &|x| {
        Ok(ops::cross_entropy(&x[0], &targets(&x[0])?, &cfg)?.sum)
    });
    check("linear_cross_entropy", &[&[4, 6], &[10, 6]], &|x| {
        let targets = targets(&x[0])?;
        Ok(ops::linear_cross_entropy(&x[0], &x[1], None, &targets, &cfg, 64)?.sum)
    });
    check("embedding", &[&[5, 6]], &|x| {
        let ids = Tensor::new(&[4u32, 0, 4, 2], x[0].device())?;
        ops::embedding(&x[0], &ids, None)
    });
}

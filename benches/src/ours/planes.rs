//! Passes over images.

use crate::{
    cases::Planes,
    inputs::numbers,
    work::{Work, on_slices},
};
use tallow_kernels::{
    batch_norm::{
        Affine, BatchNormShape, Source, Then, batch_norm, batch_norm_backward, channel_stats,
    },
    optim::Weight,
    pool::{Pool2dConfig, Pool2dShape, max_pool2d, max_pool2d_backward},
};

const EPS: f64 = 1e-5;

pub(super) fn work<T: Weight>(
    kernel: Planes,
    batch: usize,
    channels: usize,
    size: usize,
) -> Result<Box<dyn Work>, String> {
    match kernel {
        Planes::BatchNormRelu | Planes::BatchNormReluBackward => {
            norm::<T>(kernel, BatchNormShape { batch, channels, pixels: size * size })
        }
        Planes::MaxPool | Planes::MaxPoolBackward => pool::<T>(kernel, batch * channels, size),
    }
}

fn norm<T: Weight>(kernel: Planes, shape: BatchNormShape) -> Result<Box<dyn Work>, String> {
    let n = shape.batch * shape.channels * shape.pixels;
    let (x, g) = (numbers::<T>(n, 1), numbers::<T>(n, 2));
    let (w, b) = (numbers::<T::Acc>(shape.channels, 3), numbers::<T::Acc>(shape.channels, 4));
    let given = channel_stats(&x, &shape).map_err(|error| error.to_string())?;
    Ok(on_slices(&[n], move |outs| {
        let affine = Affine { weight: Some(&w[..]), bias: Some(&b[..]) };
        let (out, then) = (&mut outs[0], Then::Relu);
        if kernel == Planes::BatchNormRelu {
            let stats = channel_stats(&x, &shape).expect("it was made before");
            batch_norm(out, &x, &stats, affine, &shape, EPS, then);
        } else {
            let (dx, source) = (Some(&mut out[..]), Source::Batch);
            batch_norm_backward(dx, &x, &g, &given, source, affine, &shape, EPS, then);
        }
    }))
}

fn pool<T: Weight>(kernel: Planes, n_planes: usize, size: usize) -> Result<Box<dyn Work>, String> {
    let config = Pool2dConfig { kernel: [3, 3], stride: [2, 2], padding: [1, 1] };
    let shape = Pool2dShape::new(n_planes, [size; 2], config).map_err(|error| error.to_string())?;
    let [p, q] = shape.out_extents();
    let (n_x, n_y) = (n_planes * size * size, n_planes * p * q);
    let (x, g) = (numbers::<T>(n_x, 1), numbers::<T>(n_y, 2));
    Ok(match kernel {
        Planes::MaxPool => on_slices(&[n_y], move |outs| max_pool2d(&mut outs[0], &x, &shape)),
        _ => on_slices(&[n_x], move |outs| max_pool2d_backward(&mut outs[0], &x, &g, &shape)),
    })
}

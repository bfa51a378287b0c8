//! Layers over [`ops`](crate::ops), with candle's conventions: built from a `VarBuilder`, run
//! through `Module` or `ModuleT`, parameters named as PyTorch and Hugging Face name them.

mod attention;
mod conv;
mod dropout;
mod embedding;
mod linear;
mod norm;

pub use attention::{HeadSizes, MultiHeadAttention};
pub use conv::{AvgPool2d, Conv2d, MaxPool2d, conv2d, conv2d_no_bias};
pub use dropout::Dropout;
pub use embedding::{Embedding, embedding};
pub use linear::{Linear, linear, linear_no_bias};
pub use norm::{BatchNorm2d, LayerNorm, RmsNorm, StatUpdates, batch_norm2d, layer_norm, rms_norm};

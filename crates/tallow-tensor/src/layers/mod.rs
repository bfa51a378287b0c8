//! Layers over [`ops`](crate::ops), with candle's conventions: built from a `VarBuilder`, run
//! through `Module` or `ModuleT`, parameters named as PyTorch and Hugging Face name them.
//!
//! Linear layers and convolutions compute in the dtype of their weights and cast their input to it;
//! norms compute in f32 whatever their parameters are stored in, and give back their input's dtype.
//! Which layer computes in which dtype is therefore decided once, by how its weights were built.

mod attention;
mod conv;
mod dropout;
mod embedding;
mod linear;
mod norm;
mod rotary;

pub use attention::{HeadSizes, MultiHeadAttention};
pub use conv::{AvgPool2d, Conv2d, MaxPool2d, conv2d, conv2d_no_bias};
pub use dropout::Dropout;
pub use embedding::{Embedding, embedding};
pub use linear::{Linear, linear, linear_no_bias};
pub use norm::{BatchNorm2d, LayerNorm, RmsNorm, StatUpdates, batch_norm2d, layer_norm, rms_norm};
pub use rotary::Rotary;

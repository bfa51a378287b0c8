//! Differentiable operations on tensors.

mod activation;
mod attention;
mod conv;
mod dropout;
mod embedding;
mod linear;
mod lora;
mod loss;
mod norm;
mod pool;
mod reduce;
mod rotary;
mod softmax;

pub use activation::{add, add_relu, gelu_erf, gelu_tanh, relu, silu, swiglu};
pub use attention::{Mask, attention, attention_packed, attention_rows};
pub use conv::{Conv2dConfig, conv2d};
pub use dropout::{DropKey, dropout, uniform};
pub use embedding::embedding;
pub use linear::{linear, matmul};
pub use lora::lora_linear;
pub(crate) use loss::host_targets;
pub use loss::{CrossEntropy, Loss, ONE_PASS_CHUNK_BYTES, cross_entropy, linear_cross_entropy};
pub use norm::{ChannelStats, Then, batch_norm2d, batch_norm2d_given, layer_norm, rms_norm};
pub use pool::{Divisor, Pool2dConfig, avg_pool2d, global_avg_pool2d, max_pool2d};
pub use reduce::{mean_all, sum_all};
pub use rotary::{Rope, rope, rope_frequencies, rope_table, rope_table_of};
pub use softmax::{log_softmax, softmax};

//! Networks built from tallow's layers, under the parameter names of torchvision and Hugging Face,
//! each also as a chain of [`Segments`] for recomputation.
//!
//! [`ResNet`], [`Gpt2`], [`Llama`], [`Vit`]; [`Lora`] adapters on the last three; configurations
//! ([`HfValue`]) and [`weights`] of Hugging Face both ways; [`generate`] for a look at samples.
//!
//! *Memory:* parameters and running statistics; `n_params` of each configuration prices them before
//! the model is built. *Needs:* candle, `tallow-tensor`, safetensors and a reader of their headers.
//!
//! ```
//! use candle_core::{DType, Device, ModuleT, Tensor};
//! use tallow_models::ResNetConfig;
//! use tallow_tensor::Params;
//!
//! let params = Params::new(0);
//! let config = ResNetConfig::digits();
//! let model = config.build(params.builder(DType::F32, &Device::Cpu))?;
//! let logits = model.forward_t(&Tensor::zeros((2, 1, 28, 28), DType::F32, &Device::Cpu)?, true)?;
//! assert_eq!(logits.dims(), [2, 10]);
//! assert_eq!(params.n_trainable(), config.n_params());
//! # Ok::<(), candle_core::Error>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod error;
mod generate;
mod gpt2;
mod hf;
mod llama;
mod lora;
mod resnet;
mod rope;
mod segments;
mod text;
mod vit;
pub mod weights;

pub use error::{Error, Result, WeightsError};
pub use generate::{Sampling, generate};
pub use gpt2::{Gpt2, Gpt2Config};
pub use hf::HfValue;
pub use llama::{Llama, LlamaConfig};
pub use lora::{LinearSize, Lora, WeightLayout, frozen};
pub use resnet::{Block, ResNet, ResNetConfig, Stem};
pub use rope::RopeScaling;
pub use segments::{Score, Segments, Whole};
pub use text::{Cache, Decoder};
pub use vit::{Vit, VitConfig};

/// The README's examples are compiled too.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

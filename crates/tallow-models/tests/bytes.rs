//! What models hold, counted: attention in the sequence length, adapters on a frozen base, caches,
//! and files. No test harness: its threads would be counted too.

mod support;

use candle_core::{DType, Device, Tensor, Var};
use std::alloc::System;
use support::{chain_loss, descend, f64s, folder};
use tallow_memory::CountingAllocator;
use tallow_models::{
    Decoder, Llama, LlamaConfig, Lora, RopeScaling, Segments,
    weights::{self, Checkpoint},
};
use tallow_tensor::Params;
use tallow_testkit::values_f32;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

/// Tensor headers, shapes, op nodes, names, and what the thread pool keeps for its queue.
const SMALL_BYTES: u64 = 64 << 10;
const F32_BYTES: u64 = 4;

fn main() {
    tallow_testkit::with_one_worker();
    attention_is_linear_in_the_sequence();
    shared_keys_are_not_repeated();
    mem_1_a_frozen_base_costs_no_gradients();
    mem_1_steps_leave_nothing_behind();
    a_cache_holds_its_price();
    files_pass_through_one_tensor_at_a_time();
    println!("bytes are as documented");
}

fn config() -> LlamaConfig {
    LlamaConfig {
        vocab: 64,
        context: 4096,
        model_dim: 64,
        hidden_dim: 64,
        n_layers: 1,
        n_heads: 16,
        n_kv_heads: 16,
        head_dim: 4,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        tied: true,
        attention_bias: false,
        mlp_bias: false,
    }
}

fn build(config: &LlamaConfig) -> (Params, Llama) {
    let params = Params::new(1);
    let model = config.build(params.builder(DType::F32, &Device::Cpu)).expect("builds");
    (params, model)
}

fn input(n_tokens: usize, d: usize) -> Var {
    let x = Tensor::from_vec(values_f32(1, n_tokens * d), (1, n_tokens, d), &Device::Cpu);
    Var::from_tensor(&x.expect("fits")).expect("a float")
}

/// The block's attention, forward and backward: what it holds between them, and the peak of both.
fn attention_bytes(config: &LlamaConfig, n_tokens: usize) -> (u64, u64) {
    let (_params, model) = build(config);
    let x = input(n_tokens, config.model_dim);
    let forward = || model.run(1, x.as_tensor(), true).expect("fits");
    let backward = |out: Tensor| {
        drop(out.sum_all().and_then(|sum| sum.backward()).expect("a graph"));
    };
    backward(forward()); // tables and buffers of threads
    let scope = ALLOC.scope();
    let out = forward();
    let held_bytes = scope.current_bytes();
    backward(out);
    assert!(scope.current_bytes() < SMALL_BYTES, "{} bytes are left", scope.current_bytes());
    (held_bytes, scope.peak_bytes())
}

/// 16 heads of 4096 x 4096 scores would be 1 GiB; four times the tokens need four times the bytes.
fn attention_is_linear_in_the_sequence() {
    let (small_held, small_peak) = attention_bytes(&config(), 1024);
    let (held, peak) = attention_bytes(&config(), 4096);
    assert!(held <= 4 * small_held + SMALL_BYTES, "held: {small_held} bytes, then {held}");
    assert!(peak <= 4 * small_peak + SMALL_BYTES, "peak: {small_peak} bytes, then {peak}");
    assert!(peak < 64 << 20, "{peak} bytes");
}

/// One key-value head for 16: what the graph holds of keys (twice: before and after they turn) and
/// of values shrinks sixteenfold, and nothing of the full width takes their place.
fn shared_keys_are_not_repeated() {
    const T: usize = 2048;
    let full = config();
    let shared = LlamaConfig { n_kv_heads: 1, ..config() };
    let saved_bytes = 3 * 15 * (T * full.head_dim) as u64 * F32_BYTES;
    let (full_held, full_peak) = attention_bytes(&full, T);
    let (held, peak) = attention_bytes(&shared, T);
    assert!(held <= full_held - saved_bytes + SMALL_BYTES, "held: {held} of {full_held} bytes");
    assert!(peak <= full_peak - saved_bytes + SMALL_BYTES, "peak: {peak} of {full_peak} bytes");
}

fn wide() -> LlamaConfig {
    LlamaConfig {
        model_dim: 512,
        hidden_dim: 512,
        n_heads: 8,
        n_kv_heads: 8,
        head_dim: 64,
        ..config()
    }
}

fn adapted(base: &Params, adapters: &Params, lora: &Lora) -> Llama {
    let [base, adapters] = [base, adapters].map(|p| p.builder(DType::F32, &Device::Cpu));
    wide().build_lora(base, lora, adapters).expect("builds")
}

fn lora() -> Lora {
    Lora {
        rank: 2,
        alpha: 4.0,
        rank_stabilized: false,
        targets: vec!["*".to_string()],
        dropout: 0.0,
        dropout_seed: 0,
    }
}

fn batch() -> (Tensor, Tensor) {
    let ids: Vec<u32> = (0..9).map(|i| i * 7 % 64).collect();
    let [x, next] = [&ids[..8], &ids[1..]].map(|ids| Tensor::new(ids, &Device::Cpu));
    let row = |x: candle_core::Result<Tensor>| x.and_then(|x| x.unsqueeze(0)).expect("a row");
    (row(x), row(next))
}

/// Seven frozen weights of 1 MiB each behind adapters: a whole backward stays below one of them.
fn mem_1_a_frozen_base_costs_no_gradients() {
    let weight_bytes = 512 * 512 * F32_BYTES;
    let (base, adapters, lora) = (Params::new(1), Params::new(2), lora());
    let model = adapted(&base, &adapters, &lora);
    let (x, next) = batch();
    let loss = || chain_loss(&model, &x, &next, true).sum;
    drop(loss().backward().expect("a graph"));
    let loss = loss();
    let scope = ALLOC.scope();
    let grads = loss.backward().expect("a graph");
    let peak_bytes = scope.peak_bytes();
    assert!(peak_bytes < weight_bytes, "backward holds {peak_bytes} of {weight_bytes} bytes");
    assert_eq!(grads.get_ids().count(), adapters.all().len());
}

/// 50 steps with each reported loss kept: what is live after step 5 is live after step 50.
fn mem_1_steps_leave_nothing_behind() {
    let (base, adapters, lora) = (Params::new(1), Params::new(2), lora());
    let model = adapted(&base, &adapters, &lora);
    let (x, next) = batch();
    let params = adapters.all();
    let (mut losses, mut live_bytes) = (Vec::with_capacity(50), Vec::with_capacity(50));
    for _ in 0..50 {
        let loss = chain_loss(&model, &x, &next, true).mean().expect("counted rows");
        descend(&params, &loss.backward().expect("a graph"), 0.1);
        losses.push(f64s(&loss)[0]);
        drop(loss);
        live_bytes.push(ALLOC.current_bytes());
    }
    assert!(losses[49] < losses[0], "{losses:?}");
    assert_eq!(live_bytes[4], live_bytes[49]);
}

/// `2 * n_kv_heads * head_dim` elements a block and token of the capacity, and the rotary tables of
/// the last tokens.
fn a_cache_holds_its_price() {
    let config = LlamaConfig { n_layers: 3, n_kv_heads: 2, ..config() };
    let (_params, model) = build(&config);
    let ids = Tensor::zeros((1, 4), DType::U32, &Device::Cpu).expect("ids");
    model.next_logits(&ids, &mut model.cache(4)).expect("fits"); // buffers of threads
    let scope = ALLOC.scope();
    let mut cache = model.cache(2048);
    for _ in 0..8 {
        model.next_logits(&ids, &mut cache).expect("fits");
    }
    let per_token = 2 * config.n_kv_heads * config.head_dim * config.n_layers;
    let price_bytes = (2048 * per_token) as u64 * F32_BYTES;
    let held_bytes = scope.current_bytes();
    let room = price_bytes..price_bytes + SMALL_BYTES;
    assert!(room.contains(&held_bytes), "{held_bytes} bytes, priced {price_bytes}");
}

/// Reading holds the largest tensor twice, writing a copy of it and a buffer of 1 MiB.
fn files_pass_through_one_tensor_at_a_time() {
    const WRITE_BUFFER_BYTES: u64 = 1 << 20;
    let largest_bytes = 512 * 512 * F32_BYTES;
    let (params, _model) = build(&LlamaConfig { n_layers: 3, ..wide() });
    let params = params.all();
    let path = folder("bytes").join("model.safetensors");
    let writing = ALLOC.scope();
    weights::save(&params, &path, "").expect("written");
    let peak_bytes = writing.peak_bytes();
    let limit_bytes = largest_bytes + WRITE_BUFFER_BYTES + SMALL_BYTES;
    assert!(peak_bytes < limit_bytes, "writing holds {peak_bytes} of {limit_bytes} bytes");
    drop(writing);
    let reading = ALLOC.scope();
    Checkpoint::open(&[&path], "").expect("whole").load_into(&params).expect("all there");
    let peak_bytes = reading.peak_bytes();
    let limit_bytes = 2 * largest_bytes + SMALL_BYTES;
    assert!(peak_bytes < limit_bytes, "reading holds {peak_bytes} of {limit_bytes} bytes");
    assert!(reading.current_bytes() < SMALL_BYTES, "{} bytes are left", reading.current_bytes());
}

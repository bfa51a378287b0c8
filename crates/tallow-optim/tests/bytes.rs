//! What states hold, counted. No test harness: its threads would be counted too.

mod common;

use candle_core::{DType, Var};
use common::{in_file, optimizer, params, seeded};
use std::alloc::System;
use tallow_memory::CountingAllocator;
use tallow_optim::{
    Algorithm, Config, Optimizer, Rounding, StateFormat, adafactor_state_bytes, adamw_state_bytes,
    kahan_weights_bytes, lion_state_bytes, sgd_state_bytes,
};

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

/// Names, shapes and lists of planes of two parameters, and the tables by name and by variable.
const SMALL_BYTES: u64 = 4 << 10;
const BITS8: StateFormat = StateFormat::BITS8;
const N_WEIGHT: u64 = 1 << 20;
const N_BIAS: u64 = 1001;

fn main() {
    tallow_testkit::with_one_worker();
    // The pool's own memory comes with its first use.
    let params = pair(DType::F32);
    step(&mut optimizer(&params, &Config::new(Algorithm::SGD, 0.0)), &params, 0..1);
    prices_are_what_is_counted();
    eight_bits_are_a_quarter();
    steady_state_holds_nothing_more();
    a_window_is_all_that_a_file_holds();
    loading_holds_no_more_than_a_plane();
    println!("bytes are as documented");
}

fn pair(dtype: DType) -> Vec<(String, Var)> {
    params(&[("weight", &[1024, 1024]), ("bias", &[N_BIAS as usize])], dtype)
}

fn formats() -> [StateFormat; 4] {
    let [nearest, kahan] = [Rounding::Nearest, Rounding::Kahan].map(StateFormat::Bf16);
    [StateFormat::F32, BITS8, nearest, kahan]
}

fn prices_are_what_is_counted() {
    let sgd = Algorithm::Sgd { momentum: 0.9, nesterov: false };
    type Price = fn(u64, StateFormat) -> u64;
    let rows: [(Algorithm, Price); 5] = [
        (Algorithm::ADAMW, adamw_state_bytes),
        (Algorithm::ADAM, adamw_state_bytes),
        (Algorithm::LION, lion_state_bytes),
        (sgd, sgd_state_bytes),
        (Algorithm::SGD, |_, _| 0),
    ];
    let params = pair(DType::BF16);
    for (algorithm, price) in rows {
        for format in formats() {
            let priced = price(N_WEIGHT, format) + price(N_BIAS, format);
            check(&params, &Config { format, ..Config::new(algorithm, 0.01) }, priced);
            let priced = priced + kahan_weights_bytes(N_WEIGHT) + kahan_weights_bytes(N_BIAS);
            let weights = Rounding::Kahan;
            check(&params, &Config { format, weights, ..Config::new(algorithm, 0.01) }, priced);
        }
    }
    let priced = adafactor_state_bytes(&[1024, 1024]) + adafactor_state_bytes(&[N_BIAS as usize]);
    check(&params, &Config::new(Algorithm::ADAFACTOR, 0.01), priced);
}

fn check(params: &[(String, Var)], config: &Config, priced_bytes: u64) {
    let scope = ALLOC.scope();
    let mut optimizer = optimizer(params, config);
    let counted = scope.current_bytes();
    assert_eq!(optimizer.state_bytes(), priced_bytes, "{config:?}");
    assert!(
        (priced_bytes..priced_bytes + SMALL_BYTES).contains(&counted),
        "{config:?}: {counted} bytes counted, {priced_bytes} priced"
    );
    step(&mut optimizer, params, 0..1);
    let counted = scope.current_bytes();
    assert!(counted < priced_bytes + SMALL_BYTES, "{config:?}: {counted} after an update");
}

fn eight_bits_are_a_quarter() {
    let params = params(&[("weight", &[N_WEIGHT as usize])], DType::F32);
    let held = |format| {
        let scope = ALLOC.scope();
        let config = Config { format, ..Config::new(Algorithm::ADAMW, 0.01) };
        let optimizer = optimizer(&params, &config);
        let bytes = scope.current_bytes();
        drop(optimizer);
        bytes as f64
    };
    let ratio = held(BITS8) / held(StateFormat::F32);
    assert!(ratio <= 0.27, "{ratio}");
}

fn step(optimizer: &mut Optimizer, params: &[(String, Var)], steps: std::ops::Range<u64>) {
    for k in steps {
        optimizer.step(&seeded(params, k)).expect("gradients fit");
    }
}

fn steady_state_holds_nothing_more() {
    let params = pair(DType::F32);
    for algorithm in [Algorithm::ADAMW, Algorithm::LION, Algorithm::ADAFACTOR] {
        let ram = Config::new(algorithm, 0.01);
        let mut configs = vec![ram.clone()];
        if algorithm != Algorithm::ADAFACTOR {
            configs.push(Config { format: BITS8, ..ram.clone() });
            configs.push(in_file(&ram, "steady", 1 << 20));
        }
        for config in configs {
            let mut optimizer = optimizer(&params, &config);
            let scope = ALLOC.scope();
            step(&mut optimizer, &params, 0..5);
            let after_5 = scope.current_bytes();
            step(&mut optimizer, &params, 5..50);
            assert_eq!(after_5, scope.current_bytes(), "{config:?}");
        }
    }
}

fn a_window_is_all_that_a_file_holds() {
    let params = pair(DType::F32);
    let scope = ALLOC.scope();
    let window_bytes = adamw_state_bytes(N_WEIGHT, StateFormat::F32) / 8;
    let config = in_file(&Config::new(Algorithm::ADAMW, 0.01), "window", window_bytes);
    let mut optimizer = optimizer(&params, &config);
    let made_bytes = scope.current_bytes();
    assert!(made_bytes <= window_bytes + SMALL_BYTES, "{made_bytes} bytes");
    let grads = seeded(&params, 0);
    let within = ALLOC.scope();
    optimizer.step(&grads).expect("gradients fit");
    assert!(within.peak_bytes() <= SMALL_BYTES, "{} bytes in a step", within.peak_bytes());
    assert_eq!(optimizer.resident_state_bytes(), window_bytes);
    let foreseen = tallow_optim::state_bytes(&params, optimizer.config());
    assert_eq!(foreseen, (optimizer.state_bytes(), window_bytes));
}

/// States in memory are read in place; those of a file pass through memory a plane at a time.
fn loading_holds_no_more_than_a_plane() {
    let params = pair(DType::F32);
    let config = Config::new(Algorithm::ADAMW, 0.01);
    let plane_bytes = adamw_state_bytes(N_WEIGHT, StateFormat::F32) / 2;
    // The header, and tables by name; their size does not depend on the parameters'.
    let small_bytes = 4 * SMALL_BYTES;
    for (config, most_bytes) in [
        (config.clone(), small_bytes),
        (in_file(&config, "loaded", 1 << 20), plane_bytes + small_bytes),
    ] {
        let mut saved = optimizer(&params, &config);
        step(&mut saved, &params, 0..1);
        let path = common::path("loaded-checkpoint");
        saved.save(&path).expect("saved");
        let scope = ALLOC.scope();
        saved.load(&path).expect("loaded");
        let peak_bytes = scope.peak_bytes();
        std::fs::remove_file(&path).expect("removed");
        assert!(peak_bytes <= most_bytes, "{config:?}: {peak_bytes} of {most_bytes}");
    }
}

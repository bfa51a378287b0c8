//! Any shapes, formats and windows: where a state lies, and whether it was saved, changes no bit.

mod common;

use candle_core::{DType, Var};
use common::{in_file, optimizer, path, seeded, var, weights};
use proptest::prelude::*;
use std::fs;
use tallow_optim::{Algorithm, Config, Rounding, StateFormat};

fn rounding() -> impl Strategy<Value = Rounding> {
    prop_oneof![Just(Rounding::Nearest), Just(Rounding::Stochastic), Just(Rounding::Kahan)]
}

fn config() -> impl Strategy<Value = Config> {
    let algorithm = prop_oneof![
        Just(Algorithm::ADAMW),
        Just(Algorithm::ADAM),
        Just(Algorithm::LION),
        (0.0..0.99).prop_map(|momentum| Algorithm::Sgd { momentum, nesterov: false }),
    ];
    let format = prop_oneof![
        Just(StateFormat::F32),
        rounding().prop_map(StateFormat::Bf16),
        (4u32..12).prop_map(|log| StateFormat::Bits8 { block_elems: 1 << log }),
    ];
    (algorithm, format, rounding(), 0.0..0.1, any::<u64>()).prop_map(
        |(algorithm, format, weights, weight_decay, seed)| Config {
            format,
            weights,
            weight_decay,
            seed,
            ..Config::new(algorithm, 0.01)
        },
    )
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F64), Just(DType::BF16), Just(DType::F16)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_file_a_checkpoint_and_memory_agree(
        config in config(),
        dtype in dtype(),
        sizes in prop::collection::vec(0usize..9000, 1..4),
        window_bytes in 50_000u64..200_000,
    ) {
        let some = || -> Vec<(String, Var)> {
            let seeds = 1..;
            sizes.iter().zip(seeds).map(|(n, i)| (format!("p{i}"), var(i, &[*n], dtype))).collect()
        };
        let (ram_params, file_params) = (some(), some());
        let mut ram = optimizer(&ram_params, &config);
        let in_file = in_file(&config, "property", window_bytes);
        let mut file = optimizer(&file_params, &in_file);
        prop_assert!(file.resident_state_bytes() <= window_bytes);
        for k in 0..2 {
            ram.step(&seeded(&ram_params, k)).expect("gradients fit");
            file.step(&seeded(&file_params, k)).expect("gradients fit");
        }
        prop_assert_eq!(weights(&ram_params), weights(&file_params));
        // The one from the file goes on in memory.
        let checkpoint = path("property-checkpoint");
        file.save(&checkpoint).expect("saved");
        let mut resumed = optimizer(&file_params, &config);
        resumed.load(&checkpoint).expect("the same states");
        fs::remove_file(&checkpoint).expect("saved");
        ram.step(&seeded(&ram_params, 2)).expect("gradients fit");
        resumed.step(&seeded(&file_params, 2)).expect("gradients fit");
        prop_assert_eq!(weights(&ram_params), weights(&file_params));
    }
}

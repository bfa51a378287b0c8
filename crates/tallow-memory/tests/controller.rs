//! The controller under a fake clock and a fake meter.
use std::collections::VecDeque;
use tallow_memory::{
    Error,
    batch::{Controller, ControllerConfig, Decision},
};

const CONFIG: ControllerConfig =
    ControllerConfig { min_items: 1, max_items: 64, ..ControllerConfig::fixed(16) };
const LIMIT: u64 = 1000;

fn controller(config: ControllerConfig) -> Controller {
    Controller::new(config).unwrap()
}

fn halve(from_items: usize) -> Decision {
    Decision::Halve { from_items, to_items: from_items / 2 }
}

fn double(from_items: usize) -> Decision {
    Decision::Double { from_items, to_items: from_items * 2 }
}

/// Splitmix: traces are the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }
}

#[test]
fn marks_halve_double_and_hold() {
    let mut controller = controller(CONFIG);
    assert_eq!(controller.observe(0.0, 900, LIMIT).unwrap(), Decision::Stay); // at the mark
    assert_eq!(controller.observe(1.0, 901, LIMIT).unwrap(), halve(16));
    assert_eq!(controller.observe(5.9, 901, LIMIT).unwrap(), Decision::Stay); // too soon
    assert_eq!(controller.observe(6.0, 901, LIMIT).unwrap(), halve(8));
    assert_eq!(controller.observe(11.0, 700, LIMIT).unwrap(), Decision::Stay); // at the mark
    assert_eq!(controller.observe(12.0, 451, LIMIT).unwrap(), Decision::Stay); // 902 when doubled
    assert_eq!(controller.observe(13.0, 450, LIMIT).unwrap(), double(4));
    assert_eq!(controller.piece_items(), 8);
}

#[test]
fn fixed_bytes_do_not_double() {
    let mut controller = controller(ControllerConfig { fixed_bytes: 400, ..CONFIG });
    // 400 + 2 * 200 = 800: fits, although twice the whole would not.
    assert_eq!(controller.observe(0.0, 600, LIMIT).unwrap(), double(16));
    controller.set_fixed_bytes(0);
    assert_eq!(controller.observe(9.0, 600, LIMIT).unwrap(), Decision::Stay);
    controller.set_fixed_bytes(2000); // above the reading: more than the limit is fixed
    assert_eq!(controller.observe(18.0, 600, LIMIT).unwrap(), Decision::Stay);
}

#[test]
fn a_reading_from_before_the_change_moves_nothing() {
    let mut controller = controller(CONFIG);
    assert_eq!(controller.observe(10.0, 950, LIMIT).unwrap(), halve(16));
    assert_eq!(controller.observe_taken(60.0, 10.0, 950, LIMIT).unwrap(), Decision::Stay);
    assert_eq!(controller.observe_taken(60.0, 9.0, 950, LIMIT).unwrap(), Decision::Stay);
    assert_eq!(controller.observe_taken(60.0, 10.1, 950, LIMIT).unwrap(), halve(8));
    // A clock that went back is as good as too soon.
    assert_eq!(controller.observe(3.0, 950, LIMIT).unwrap(), Decision::Stay);
}

#[test]
fn the_ends_are_kept() {
    let config = ControllerConfig { min_items: 3, max_items: 20, ..ControllerConfig::fixed(5) };
    let mut low = controller(config);
    let to_min = Decision::Halve { from_items: 5, to_items: 3 };
    assert_eq!(low.observe(0.0, 999, LIMIT).unwrap(), to_min);
    assert_eq!(low.observe(9.0, 999, LIMIT).unwrap(), Decision::Stay);
    assert_eq!(low.out_of_memory(10.0).unwrap(), Decision::Stay);
    let mut high = controller(ControllerConfig { start_items: 15, ..config });
    let to_max = Decision::Double { from_items: 15, to_items: 20 };
    assert_eq!(high.observe(0.0, 600, LIMIT).unwrap(), to_max); // 800 predicted
    assert_eq!(high.observe(9.0, 1, LIMIT).unwrap(), Decision::Stay);
    assert_eq!(size_of::<Controller>(), 120); // the figure the documentation names
    let mut off = controller(ControllerConfig::fixed(7));
    for used_bytes in [0, 500, 1000, u64::MAX] {
        assert_eq!(off.observe(0.0, used_bytes, LIMIT).unwrap(), Decision::Stay);
    }
}

#[test]
fn a_failed_growth_is_remembered_longer() {
    let mut controller = controller(CONFIG);
    assert_eq!(controller.observe(0.0, 300, LIMIT).unwrap(), double(16));
    assert_eq!(controller.observe(5.0, 950, LIMIT).unwrap(), halve(32)); // worse than predicted
    for step in 2..61 {
        let now_secs = 5.0 * f64::from(step);
        assert_eq!(controller.observe(now_secs, 300, LIMIT).unwrap(), Decision::Stay, "{now_secs}");
    }
    assert_eq!(controller.observe(305.0, 300, LIMIT).unwrap(), double(16));
    // Smaller sizes are not under the ceiling.
    assert_eq!(controller.out_of_memory(306.0).unwrap(), halve(32));
    assert_eq!(controller.observe(311.0, 950, LIMIT).unwrap(), halve(16));
    assert_eq!(controller.observe(316.0, 100, LIMIT).unwrap(), double(8));
    assert_eq!(controller.observe(321.0, 100, LIMIT).unwrap(), Decision::Stay); // 32 ran out
    assert_eq!(controller.observe(606.0, 100, LIMIT).unwrap(), double(16));
}

#[test]
fn pressure_long_after_a_growth_sets_no_ceiling() {
    let mut controller = controller(CONFIG);
    assert_eq!(controller.observe(0.0, 300, LIMIT).unwrap(), double(16));
    assert_eq!(controller.observe(1000.0, 950, LIMIT).unwrap(), halve(32)); // a neighbour came
    assert_eq!(controller.observe(1005.0, 300, LIMIT).unwrap(), double(16)); // and went
}

#[test]
fn running_out_does_not_wait() {
    let mut controller = controller(CONFIG);
    assert_eq!(controller.observe(0.0, 950, LIMIT).unwrap(), halve(16));
    assert_eq!(controller.out_of_memory(0.1).unwrap(), halve(8));
    assert_eq!(controller.out_of_memory(0.1).unwrap(), halve(4));
    assert_eq!(controller.observe(5.0, 950, LIMIT).unwrap(), Decision::Stay);
}

/// Memory of one run: what a size uses, seen through a meter that lags.
struct Machine {
    fixed_bytes: u64,
    item_bytes: u64,
    delay_secs: f64,
    history: VecDeque<(f64, u64)>,
}

impl Machine {
    fn used_bytes(&self, items: usize) -> u64 {
        self.fixed_bytes + self.item_bytes * items as u64
    }

    /// What the meter says now about `delay_secs` ago.
    fn read(&mut self, now_secs: f64, items: usize, noise_bytes: u64) -> (f64, u64) {
        self.history.push_back((now_secs, self.used_bytes(items) + noise_bytes));
        while self.history.len() > 1 && self.history[1].0 <= now_secs - self.delay_secs {
            self.history.pop_front();
        }
        self.history[0]
    }
}

fn check_trace(changes: &[(f64, Decision)], hysteresis_secs: f64) {
    for pair in changes.windows(2) {
        assert!(pair[1].0 - pair[0].0 >= hysteresis_secs, "{pair:?}");
    }
}

/// Usage bounces around both marks, and the meter lags by up to the hysteresis: no two changes
/// within a period, and with an honest `taken_secs` any lag is harmless.
#[test]
fn bouncing_usage_changes_at_most_once_a_period() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let mut controller = controller(CONFIG);
        let item_bytes = 1 + random.below(60);
        let delay_secs = random.below(20) as f64 / 2.0;
        let fixed_bytes = random.below(300);
        let mut machine = Machine { fixed_bytes, item_bytes, delay_secs, history: VecDeque::new() };
        let (mut changes, mut now_secs) = (Vec::new(), 0.0);
        for _ in 0..500 {
            now_secs += random.below(1000) as f64 / 500.0;
            let noise_bytes = random.below(400);
            let items = controller.piece_items();
            let (taken_secs, used_bytes) = machine.read(now_secs, items, noise_bytes);
            let decision =
                controller.observe_taken(now_secs, taken_secs, used_bytes, LIMIT).unwrap();
            if decision != Decision::Stay {
                changes.push((now_secs, decision));
            }
            assert!((1..=64).contains(&controller.piece_items()));
            assert!(controller.pieces(77).flat_map(|piece| piece.range()).eq(0..77));
        }
        check_trace(&changes, 5.0);
    }
}

/// Without noise the size settles: no size is left twice for a larger one in a ceiling's time,
/// whatever the fixed bytes are said to be.
#[test]
fn it_settles_and_never_ping_pongs() {
    for seed in 0..400 {
        let mut random = Random(1000 + seed);
        let (item_bytes, fixed_bytes) = (1 + random.below(80), random.below(850));
        // Told the truth, or anything at all.
        let told_bytes = if seed % 2 == 0 { fixed_bytes } else { random.below(1200) };
        let delay_secs = random.below(5) as f64; // unknown to the controller, below hysteresis
        let mut machine = Machine { fixed_bytes, item_bytes, delay_secs, history: VecDeque::new() };
        let mut controller = controller(ControllerConfig { fixed_bytes: told_bytes, ..CONFIG });
        let mut changes = Vec::new();
        for step in 0..300 {
            let now_secs = f64::from(step);
            let (_, used_bytes) = machine.read(now_secs, controller.piece_items(), 0);
            let decision = controller.observe(now_secs, used_bytes, LIMIT).unwrap();
            if decision != Decision::Stay {
                changes.push((now_secs, decision));
            }
        }
        check_trace(&changes, 5.0);
        let grew = |change: &&(f64, Decision)| matches!(change.1, Decision::Double { .. });
        let (n_up, n_down) =
            (changes.iter().filter(grew).count(), changes.iter().filter(|c| !grew(c)).count());
        if told_bytes <= fixed_bytes {
            // Never told too much: predictions are upper bounds, so it goes one way only.
            assert!(n_up == 0 || n_down == 0, "{changes:?}");
        }
        assert!(changes.len() <= 8, "{changes:?}");
        let settled = machine.used_bytes(controller.piece_items());
        assert!(settled <= 900 || controller.piece_items() == 1, "{settled}");
    }
}

/// A neighbour takes half of the memory for a while; the size falls, and grows back.
#[test]
fn it_grows_back() {
    let mut controller = controller(ControllerConfig { fixed_bytes: 100, ..CONFIG });
    let used_bytes = |items: usize| 100 + 45 * items as u64; // 16 items: 820 of 1000
    let mut at = |from: u32, to: u32, limit_bytes: u64| {
        for step in from..to {
            let used_bytes = used_bytes(controller.piece_items());
            let _ = controller.observe(f64::from(step), used_bytes, limit_bytes).unwrap();
        }
        controller.piece_items()
    };
    assert_eq!(at(0, 100, 1000), 16);
    assert_eq!(at(100, 200, 500), 4); // 280; 8 would be 460, above 450
    assert_eq!(at(200, 300, 1000), 16);
    assert_eq!(at(300, 400, 100), 1);
    assert_eq!(at(400, 500, 1000), 16);
}

#[test]
fn the_same_calls_give_the_same_answers() {
    let trace = || {
        let (mut random, mut controller) = (Random(7), controller(CONFIG));
        let observe =
            |step: u32| controller.observe(f64::from(step), random.below(1100), LIMIT).unwrap();
        (0..1000).map(observe).collect::<Vec<_>>()
    };
    assert_eq!(trace(), trace());
}

#[test]
fn what_makes_no_sense_is_a_typed_error() {
    let nan = f64::NAN;
    let rows = [
        (ControllerConfig { low: nan, ..CONFIG }, "low"),
        (ControllerConfig { low: 0.0, ..CONFIG }, "low"),
        (ControllerConfig { low: 0.9, ..CONFIG }, "low"),
        (ControllerConfig { high: nan, ..CONFIG }, "high"),
        (ControllerConfig { high: 1.1, ..CONFIG }, "high"),
        (ControllerConfig { high: 0.0, ..CONFIG }, "high"),
        (ControllerConfig { hysteresis_secs: -1.0, ..CONFIG }, "hysteresis_secs"),
        (ControllerConfig { hysteresis_secs: f64::INFINITY, ..CONFIG }, "hysteresis_secs"),
        (ControllerConfig { ceiling_secs: 4.9, ..CONFIG }, "ceiling_secs"),
        (ControllerConfig { ceiling_secs: nan, ..CONFIG }, "ceiling_secs"),
        (ControllerConfig { min_items: 0, ..CONFIG }, "min_items"),
        (ControllerConfig { min_items: 65, ..CONFIG }, "max_items"),
        (ControllerConfig { start_items: 65, ..CONFIG }, "start_items"),
        (ControllerConfig { min_items: 17, ..CONFIG }, "start_items"),
    ];
    for (config, name) in rows {
        let Err(Error::BadValue { what, .. }) = Controller::new(config) else {
            panic!("{config:?} was taken")
        };
        assert_eq!(what, name, "{config:?}");
    }
    let mut controller = controller(CONFIG);
    assert!(controller.observe(nan, 999, LIMIT).is_err());
    assert!(controller.observe(f64::INFINITY, 999, LIMIT).is_err());
    assert!(controller.observe_taken(1.0, nan, 999, LIMIT).is_err());
    assert!(controller.observe_taken(1.0, 1.1, 999, LIMIT).is_err());
    assert!(controller.out_of_memory(nan).is_err());
    let error = controller.observe(0.0, 999, 0).unwrap_err();
    assert_eq!(error.to_string(), "limit_bytes should be above 0, found 0");
    assert_eq!(controller.piece_items(), 16); // nothing has changed
}

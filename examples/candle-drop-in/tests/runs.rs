//! The example holds what it says.

use std::process::Command;

#[test]
fn memory_falls_and_weights_stay() {
    let output = Command::new(env!("CARGO_BIN_EXE_candle-drop-in")).output().expect("starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bytes: Vec<u64> = said
        .lines()
        .filter_map(|line| line.split_once(": ")?.1.split_whitespace().next()?.parse().ok())
        .collect();
    assert!(bytes.len() == 2 && 2 * bytes[1] < bytes[0], "{said}");
    assert!(said.contains("3 steps: true"), "{said}");
}

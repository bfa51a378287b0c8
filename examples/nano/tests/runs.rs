//! The example learns.

use std::process::Command;

#[test]
fn its_loss_falls() {
    let path = std::env::temp_dir().join(format!("nano-{}.txt", std::process::id()));
    let line = "Tallow candles were the frugal ones: same light, cheaper fat.\n";
    std::fs::write(&path, line.repeat(400)).expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_nano")).arg(&path).arg("41").output();
    let output = output.expect("starts");
    std::fs::remove_file(&path).expect("removed");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let losses: Vec<f64> =
        said.lines().filter_map(|line| line.split_once("loss ")?.1.parse().ok()).collect();
    // ln 256 = 5.55 knows nothing.
    assert!(losses.len() == 3 && losses[0] > 5.0 && losses[2] < 3.5, "{said}");
    let usage = Command::new(env!("CARGO_BIN_EXE_nano")).output().expect("starts");
    assert!(!usage.status.success());
}

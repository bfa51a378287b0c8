//! The `tallow` binary.
fn main() {}

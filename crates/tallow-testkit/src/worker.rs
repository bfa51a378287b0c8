use std::{env, process::Command};

/// Returns in a process whose thread pool has a single worker, whose queue and scratch are warm after
/// the first use: what starts late would be counted. The pool reads its size before anything can set
/// it, so any other process runs this program once more and ends as that one ends.
///
/// For programs that do one thing only: a harness's other tests would run again with it.
/// # Panics
/// If the program cannot be started again.
pub fn with_one_worker() {
    const WORKERS: &str = "RAYON_NUM_THREADS";
    if env::var_os(WORKERS).is_none_or(|n| n != "1") {
        let this = env::current_exe().expect("a running program has a path");
        let again = Command::new(this).env(WORKERS, "1").status().expect("it runs already");
        std::process::exit(again.code().unwrap_or(1));
    }
}

//! `cargo xtask check` and `cargo xtask alone`: other tools, run one after another.

use crate::layers::{self, Role};
use crate::metadata::Metadata;
use crate::tidy;
use anyhow::{Context, Result};
use std::process::{Command, Stdio};
use std::time::Instant;

enum Outcome {
    Pass,
    Fail,
    Skipped(&'static str),
}

impl Outcome {
    fn of(passed: bool) -> Outcome {
        if passed { Outcome::Pass } else { Outcome::Fail }
    }
}

/// With the feature that binaries of `benches` want.
const CLIPPY: &str =
    "clippy --locked --workspace --all-targets --features tallow-bench/train -- -D warnings";

type Step<'a> = (&'static str, &'a dyn Fn() -> Result<Outcome>);

/// Runs every step, prints one verdict for each, and says whether none failed.
pub(crate) fn check(metadata: &Metadata) -> Result<bool> {
    let cargo = |args: &str| cargo(metadata, args, &[]).map(Outcome::of);
    let steps: [Step; 6] = [
        ("fmt", &|| cargo("fmt --all -- --check")),
        ("clippy", &|| cargo(CLIPPY)),
        ("layers", &|| tidy::layers(metadata).map(Outcome::of)),
        ("alone", &|| alone(metadata).map(Outcome::of)),
        ("doc", &|| doc(metadata)),
        ("deny", &|| deny(metadata)),
    ];
    Ok(run(&steps))
}

fn run(steps: &[Step]) -> bool {
    let mut verdicts = Vec::new();
    let mut passed = true;
    for (name, step) in steps {
        println!("== {name}");
        let start = Instant::now();
        let outcome = step().unwrap_or_else(|error| {
            println!("error: {error:#}");
            Outcome::Fail
        });
        let elapsed_secs = start.elapsed().as_secs_f64();
        passed &= !matches!(outcome, Outcome::Fail);
        verdicts.push(match outcome {
            Outcome::Pass => format!("PASS {name} {elapsed_secs:.1} s"),
            Outcome::Fail => format!("FAIL {name} {elapsed_secs:.1} s"),
            Outcome::Skipped(why) => format!("SKIP {name} skipped: {why}"),
        });
    }
    println!("== verdicts");
    verdicts.iter().for_each(|verdict| println!("{verdict}"));
    passed
}

/// Checks every library with nothing else selected: in a build of the whole workspace a crate can
/// live on a feature or a dependency that only another crate asks for.
pub(crate) fn alone(metadata: &Metadata) -> Result<bool> {
    let mut passed = true;
    for package in &metadata.packages {
        let role = layers::find(&package.name).map(|layer| layer.role);
        if matches!(role, Some(Role::Engine | Role::Facade | Role::TestKit)) {
            let args = format!("check --locked -p {} --all-targets", package.name);
            passed &= cargo(metadata, &args, &[])?;
        }
    }
    Ok(passed)
}

/// The binary `tallow` is left out because its pages would overwrite those of the library `tallow`.
fn doc(metadata: &Metadata) -> Result<Outcome> {
    let args = "doc --locked --workspace --no-deps --exclude tallow-cli";
    cargo(metadata, args, &[("RUSTDOCFLAGS", "-Dwarnings")]).map(Outcome::of)
}

fn deny(metadata: &Metadata) -> Result<Outcome> {
    let probe = Command::new("cargo")
        .args(["deny", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("starting cargo")?;
    if !probe.success() {
        println!("cargo-deny is not installed: skipped");
        return Ok(Outcome::Skipped("not installed"));
    }
    cargo(metadata, "deny check", &[]).map(Outcome::of)
}

/// Prints and runs `cargo args` at the root; `args` are separated by spaces.
fn cargo(metadata: &Metadata, args: &str, env: &[(&str, &str)]) -> Result<bool> {
    for (name, value) in env {
        print!("{name}={value} ");
    }
    println!("cargo {args}");
    let status = Command::new("cargo")
        .args(args.split_whitespace())
        .envs(env.iter().copied())
        .current_dir(&metadata.workspace_root)
        .status()
        .with_context(|| format!("starting `cargo {args}`"))?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_failure_does_not_stop_the_steps() {
        let n_run = Cell::new(0);
        let step = |outcome| {
            n_run.set(n_run.get() + 1);
            outcome
        };
        let pass = || step(Ok(Outcome::Pass));
        let fail = || step(Ok(Outcome::Fail));
        let error = || step(Err(anyhow::anyhow!("no such tool")));
        let skip = || step(Ok(Outcome::Skipped("not installed")));
        assert!(run(&[("pass", &pass), ("skip", &skip)]));
        assert!(!run(&[("fail", &fail), ("pass", &pass)]));
        assert!(!run(&[("error", &error), ("pass", &pass)]));
        assert_eq!(n_run.get(), 6);
    }
}

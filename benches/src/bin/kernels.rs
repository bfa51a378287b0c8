//! Serves the cases to `cargo xtask bench kernels`.
//!
//! `kernels list [--quick]` prints a JSON object a case. `kernels serve [--quick]` prints what the
//! machine has, then answers lines `SECS WHO NAME`, WHO being one of `tallow`, `candle`, `gemm` and
//! `limit`, with a JSON object: a timing and samples of the results, or `absent` or `error` and why.

use serde_json::{Value, json};
use std::{
    io::{BufRead, Write, stdin, stdout},
    path::Path,
    process::ExitCode,
};
use tallow_bench::{
    candle::{self, Offer},
    cases::{Case, Unit, cases},
    limits::{Peak, Stream},
    ours, product,
    work::{Precision, Timing, Work, timed},
};
use tallow_memory::CountingAllocator;

/// As the binary `tallow` has it.
#[global_allocator]
static ALLOCATOR: CountingAllocator<mimalloc::MiMalloc> =
    CountingAllocator::new(mimalloc::MiMalloc);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["list"] => list(false),
        ["list", "--quick"] => list(true),
        ["serve"] => serve(false),
        ["serve", "--quick"] => serve(true),
        _ => {
            eprintln!("usage: kernels list|serve [--quick]");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn list(quick: bool) -> std::io::Result<()> {
    let mut out = stdout().lock();
    for case in cases(quick) {
        writeln!(out, "{}", json!(case))?;
    }
    Ok(())
}

fn serve(quick: bool) -> std::io::Result<()> {
    // The pool's threads, before anything is counted.
    rayon::broadcast(|_| ());
    let peak = |precision| format!("{:?}", Peak::of(precision));
    let machine = json!({
        "threads": rayon::current_num_threads(),
        "peak_f32": peak(Precision::F32),
        "peak_bf16": peak(Precision::Bf16),
    });
    println!("{machine}");
    let cases = cases(quick);
    let mut bench: Option<Bench> = None;
    for line in stdin().lock().lines() {
        let answer =
            answer(&line?, &cases, &mut bench).unwrap_or_else(|error| json!({"error": error}));
        println!("{answer}");
        stdout().flush()?;
    }
    Ok(())
}

/// A case and those who have begun it.
struct Bench<'a> {
    case: &'a Case,
    works: Vec<(String, Began)>,
}

/// A work after its first run.
struct Began {
    work: Box<dyn Work>,
    /// What one run does, in the case's unit.
    amount: u64,
    /// The first run, until it has been told.
    first: Option<Value>,
}

fn answer<'a>(
    line: &str,
    cases: &'a [Case],
    bench: &mut Option<Bench<'a>>,
) -> Result<Value, String> {
    let mut words = line.splitn(3, ' ');
    let (Some(secs), Some(who), Some(name)) = (words.next(), words.next(), words.next()) else {
        return Err(format!("`{line}` is not `SECS WHO NAME`"));
    };
    let secs: f64 = secs.parse().map_err(|error| format!("`{secs}`: {error}"))?;
    if bench.as_ref().is_none_or(|bench| bench.case.name != name) {
        let case = cases.iter().find(|case| case.name == name);
        // The arrays of the one before go first.
        *bench = None;
        let case = case.ok_or_else(|| format!("no case is named `{name}`"))?;
        *bench = Some(Bench { case, works: Vec::new() });
    }
    let Some(bench) = bench else { return Err("no case".to_string()) };
    let place = match bench.works.iter().position(|(began, _)| began == who) {
        Some(place) => place,
        None => match begin(bench.case, who)? {
            Ok(began) => {
                bench.works.push((who.to_string(), began));
                bench.works.len() - 1
            }
            Err(absent) => return Ok(json!({"absent": absent})),
        },
    };
    let began = &mut bench.works[place].1;
    began.told(secs)
}

/// Prepares a case and runs it once; the inner error says why `who` has nothing for it.
fn begin(case: &Case, who: &str) -> Result<Result<Began, String>, String> {
    let mut amount = case.amount;
    let mut work: Box<dyn Work> = match (who, case.unit) {
        ("tallow", _) => ours::work(case)?,
        ("candle", _) => match candle::work(case, free_bytes() / 2)? {
            Offer::Work(work) => work,
            Offer::Nothing(why) => return Ok(Err(why.to_string())),
        },
        ("gemm", _) => match product::work(case) {
            Some(work) => work,
            None => return Ok(Err("products of f32 alone".to_string())),
        },
        ("limit", Unit::Flop) => {
            let peak = Peak::of(case.precision);
            amount = peak.run_flops();
            Box::new(peak)
        }
        ("limit", Unit::Byte) => Box::new(Stream::new(case.amount)),
        _ => return Err(format!("nobody is named `{who}`")),
    };
    let scope = ALLOCATOR.scope();
    let timing = timed(&mut *work, 0.0)?;
    // What the run left is not temporary.
    let temp_bytes = scope.peak_bytes().saturating_sub(scope.current_bytes());
    drop(scope);
    let mut first = told(&timing, amount);
    first["temp_bytes"] = json!(temp_bytes);
    first["samples"] = json!(work.samples());
    Ok(Ok(Began { work, amount, first: Some(first) }))
}

/// Bytes that may still be taken.
fn free_bytes() -> u64 {
    tallow_memory::limits::limits(Path::new("/")).headroom_bytes().unwrap_or(u64::MAX)
}

impl Began {
    /// A round of `secs`; a first run that took longer is a round of its own.
    fn told(&mut self, secs: f64) -> Result<Value, String> {
        let first = self.first.take();
        match first {
            Some(first) if first["best_secs"].as_f64() > Some(secs) => Ok(first),
            first => {
                let mut answer = told(&timed(&mut *self.work, secs)?, self.amount);
                for key in ["temp_bytes", "samples"] {
                    if let Some(first) = &first {
                        answer[key] = first[key].clone();
                    }
                }
                Ok(answer)
            }
        }
    }
}

fn told(timing: &Timing, amount: u64) -> Value {
    let mut answer = json!(timing);
    answer["amount"] = json!(amount);
    answer
}

//! `bench large`: full training steps of Llama-shaped models up to 1.1B parameters.

use super::{
    Common,
    figure::Figure,
    fit::Law,
    owned,
    stats::{cell, mib},
    versus,
};
use anyhow::Result;
use serde_json::json;
use std::path::PathBuf;

/// Options of `bench large`.
#[derive(clap::Args)]
pub(crate) struct Large {
    #[command(flatten)]
    common: Common,
    /// Steps of each run.
    #[arg(long, default_value_t = 2)]
    steps: u64,
    /// The budget of every run.
    #[arg(long, value_name = "BYTES", default_value = "6GiB")]
    budget: String,
    /// Only the rows whose name contains this; may be given several times.
    #[arg(long)]
    only: Vec<String>,
    /// Where the figures go; `target/figures` of a quick run, else `docs/figures`.
    #[arg(long, value_name = "DIR")]
    figures: Option<PathBuf>,
}

/// A network of Llama's shape.
struct Shape {
    name: &'static str,
    vocab: u64,
    dim: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    tokens: u64,
}

/// The last one has TinyLlama's sizes.
const SHAPES: [Shape; 4] = [
    shape("30M", [32000, 384, 1024, 6, 6, 2]),
    shape("125M", [32000, 768, 2048, 12, 12, 4]),
    shape("400M", [32000, 1024, 2816, 30, 16, 4]),
    shape("1.1B", [32000, 2048, 5632, 22, 32, 4]),
];
const SMALL: [Shape; 3] = [
    Shape { tokens: 32, ..shape("30k", [100, 32, 64, 2, 2, 1]) },
    Shape { tokens: 32, ..shape("100k", [100, 64, 128, 2, 2, 1]) },
    Shape { tokens: 32, ..shape("400k", [100, 128, 256, 3, 4, 2]) },
];

const fn shape(name: &'static str, sizes: [u64; 6]) -> Shape {
    let [vocab, dim, hidden, layers, heads, kv_heads] = sizes;
    Shape { name, vocab, dim, hidden, layers, heads, kv_heads, tokens: 512 }
}

/// Narrow weights without masters, gradients that die in backward, every activation recomputed.
const FRUGAL: [&str; 4] = [
    "precision.compute=bf16",
    "precision.masters=false",
    "optimizer.release_gradients=true",
    "memory.recompute=all",
];
/// Where the optimizer's state is.
const STATES: [(&str, &str); 2] =
    [("8-bit state", "optimizer.state=8bit"), ("state in a file", "memory.offload_dir={folder}")];

impl Shape {
    fn settings(&self, steps: u64) -> Vec<String> {
        let mut settings = vec![
            "model.name=llama".to_string(),
            "model.tied=false".to_string(),
            format!("model.vocab={}", self.vocab),
            format!("model.model_dim={}", self.dim),
            format!("model.hidden_dim={}", self.hidden),
            format!("model.n_layers={}", self.layers),
            format!("model.n_heads={}", self.heads),
            format!("model.n_kv_heads={}", self.kv_heads),
            format!("model.context={}", self.tokens),
            format!("data.seq_tokens={}", self.tokens),
        ];
        settings.extend(versus::synthetic(1, steps));
        settings.extend(owned(&FRUGAL));
        settings
    }
}

/// Measures, prints and draws; false if a row failed to run.
pub(super) fn run(options: &Large) -> Result<bool> {
    let quick = options.common.quick;
    let (binary, mut lines) = options.common.open()?;
    let (shapes, steps) = if quick { (&SMALL[..], 1) } else { (&SHAPES[..], options.steps) };
    let default = if quick { "target/figures" } else { "docs/figures" };
    let folder = options.figures.clone().unwrap_or_else(|| default.into());
    let rows = shapes.iter().flat_map(|shape| STATES.iter().map(move |state| (shape, state)));
    let mut all_ran = true;
    let mut points: [Vec<(f64, f64, f64)>; 2] = Default::default();
    println!(
        "| model | state | parameters | counted peak MiB | bytes a parameter | resident peak MiB | s/step |"
    );
    println!("|{}", "---|".repeat(7));
    for (shape, (state, setting)) in rows {
        let name = format!("{}, {state}", shape.name);
        if !options.only.is_empty() && !options.only.iter().any(|only| name.contains(only.as_str()))
        {
            continue;
        }
        eprintln!("{name}");
        let mut settings = shape.settings(steps);
        settings.push((*setting).to_string());
        let mut report = match binary.train(&settings, Some(&options.budget)) {
            Ok(report) => report,
            Err(error) => {
                all_ran = false;
                println!("| {} | {state} | did not run: {error:#} | | | | |", shape.name);
                continue;
            }
        };
        report["bench"] = json!("large");
        report["mode"] = json!(name);
        lines.write(&report)?;
        let number = |key: &str| report[key].as_f64();
        let (params, peak) = (number("params"), number("peak_bytes"));
        let bytes = |bytes: Option<f64>| bytes.map_or("-".to_string(), mib);
        println!(
            "| {} | {state} | {} | {} | {} | {} | {} |",
            shape.name,
            cell(params, 0),
            bytes(peak),
            cell(peak.zip(params).map(|(peak, params)| peak / params), 2),
            bytes(number("rss_peak_bytes")),
            cell(number("secs_per_step"), 3),
        );
        let place = STATES.iter().position(|(name, _)| name == state).unwrap_or(0);
        if let (Some(params), Some(peak), Some(secs)) = (params, peak, number("secs_per_step")) {
            points[place].push((params / 1e6, peak / 1048576.0, secs));
        }
    }
    draw(&points, &folder)?;
    Ok(all_ran)
}

fn draw(points: &[Vec<(f64, f64, f64)>; 2], folder: &std::path::Path) -> Result<()> {
    type Pick = fn(&(f64, f64, f64)) -> f64;
    let measures: [(&str, &str, Pick); 2] =
        [("peak", "counted peak, MiB", |p| p.1), ("time", "seconds a step", |p| p.2)];
    println!("\n| state | measure, x in millions of parameters | law |\n|---|---|---|");
    for (file, name, pick) in measures {
        let line = |(state, points): (&str, &Vec<(f64, f64, f64)>)| {
            let points: Vec<(f64, f64)> = points.iter().map(|p| (p.0, pick(p))).collect();
            let law = Law::of(&points);
            let text = law.map_or("-".to_string(), |law| law.text());
            println!("| {state} | {name} | {text} |");
            (state.to_string(), points, law)
        };
        let lines: Vec<_> = STATES.map(|state| state.0).into_iter().zip(points).map(line).collect();
        let title = format!("{name} against parameters");
        let figure = Figure { title: &title, x: "millions of parameters", y: name, lines: &lines };
        figure.save(&folder.join(format!("large-{file}.svg")))?;
    }
    println!("\nfigures are in {}", folder.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_has_its_parameters() {
        let count = |s: &Shape| {
            let head_dim = s.dim / s.heads;
            let attention = 2 * s.dim * s.dim + 2 * s.dim * s.kv_heads * head_dim;
            2 * s.vocab * s.dim + s.layers * (attention + 3 * s.dim * s.hidden + 2 * s.dim) + s.dim
        };
        assert_eq!(count(&SHAPES[3]), 1_100_048_384);
        assert!((25e6..40e6).contains(&(count(&SHAPES[0]) as f64)), "{}", count(&SHAPES[0]));
    }
}

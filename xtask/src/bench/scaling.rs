//! `bench scaling`: how peak and time grow with batch, image, sequence and depth.

use super::{
    Binary, Common, Lines,
    figure::{self, Figure},
    fit::Law,
    owned,
    stats::{cell, mib},
    versus,
};
use anyhow::Result;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Options of `bench scaling`.
#[derive(clap::Args)]
pub(crate) struct Scaling {
    #[command(flatten)]
    common: Common,
    /// Steps of each run.
    #[arg(long, default_value_t = 2)]
    steps: u64,
    /// Only the axis of this name: batch, image, sequence or depth; may be given several times.
    #[arg(long)]
    only: Vec<String>,
    /// Where the figures go; `target/figures` of a quick run, else `docs/figures`.
    #[arg(long, value_name = "DIR")]
    figures: Option<PathBuf>,
}

/// Something that grows.
struct Axis {
    name: &'static str,
    /// What its numbers are.
    unit: &'static str,
    values: &'static [u64],
    /// As little as has a law.
    quick: &'static [u64],
    /// The settings of a value, and the batch.
    work: fn(u64) -> (Vec<String>, u64),
}

const AXES: [Axis; 4] = [
    Axis {
        name: "batch",
        unit: "images of 112 x 112 a step, ResNet-50",
        values: &[2, 4, 8, 12, 16],
        quick: &[2, 3, 4],
        work: |batch| (resnet(112), batch),
    },
    Axis {
        name: "image",
        unit: "side of an image in pixels, ResNet-50, batch 2",
        values: &[64, 128, 192, 256, 384],
        quick: &[32, 64, 96],
        work: |side| (resnet(side), 2),
    },
    Axis {
        name: "sequence",
        unit: "tokens of a sequence, GPT-2 of 4 layers, batch 4",
        values: &[128, 256, 512, 768, 1024],
        quick: &[32, 64, 128],
        work: |tokens| (gpt(4, tokens), 4),
    },
    Axis {
        name: "depth",
        unit: "layers, GPT-2, 256 tokens, batch 4",
        values: &[2, 4, 8, 16, 24],
        quick: &[1, 2, 4],
        work: |layers| (gpt(layers, 256), 4),
    },
];

/// A name, and the settings that make it.
const MODES: [(&str, &[&str]); 3] = [
    ("f32", &[]),
    ("bf16", &["precision.compute=bf16"]),
    ("bf16, recompute all", &["precision.compute=bf16", "memory.recompute=all"]),
];

/// What is fitted and drawn: a key, its name, and what it is divided by.
const MEASURES: [(&str, &str, f64); 2] =
    [("peak_bytes", "counted peak, MiB", 1048576.0), ("secs_per_step", "seconds a step", 1.0)];

fn resnet(side: u64) -> Vec<String> {
    vec!["model.name=resnet50".to_string(), format!("data.image_size=[{side},{side}]")]
}

fn gpt(layers: u64, tokens: u64) -> Vec<String> {
    let sizes = ["model.vocab=8000", "model.model_dim=256", "model.n_heads=4", "model.dropout=0.0"];
    let mut settings = owned(&["model.name=gpt2"]);
    settings.extend(owned(&sizes));
    settings.push(format!("model.n_layers={layers}"));
    settings.push(format!("model.context={tokens}"));
    settings.push(format!("data.seq_tokens={tokens}"));
    settings
}

/// A mode's reports along an axis.
type Line = (String, Vec<(u64, Value)>);

/// Measures, prints and draws; false if a row failed to run.
pub(super) fn run(options: &Scaling) -> Result<bool> {
    let quick = options.common.quick;
    let (binary, mut lines) = options.common.open()?;
    let default = if quick { "target/figures" } else { "docs/figures" };
    let folder = options.figures.clone().unwrap_or_else(|| default.into());
    let wanted =
        |axis: &&Axis| options.only.is_empty() || options.only.iter().any(|o| o == axis.name);
    let axes: Vec<&Axis> = AXES.iter().filter(wanted).collect();
    anyhow::ensure!(!axes.is_empty(), "--only {:?} names no axis", options.only);
    let mut n_failed = 0;
    println!("| axis | value | mode | counted peak MiB | s/step |\n|---|---|---|---|---|");
    let mut measured = Vec::new();
    for axis in axes {
        let values = if quick { axis.quick } else { axis.values };
        let steps = if quick { 1 } else { options.steps };
        measured.push((axis, walk(axis, values, steps, &binary, &mut lines, &mut n_failed)?));
    }
    println!("\n| axis | mode | measure | law |\n|---|---|---|---|");
    for (axis, all) in &measured {
        for (key, name, unit) in MEASURES {
            draw(axis, all, (key, name, unit), &folder)?;
        }
    }
    println!("\nfigures are in {}", folder.display());
    Ok(n_failed == 0)
}

/// Runs every mode at every value.
fn walk(
    axis: &Axis,
    values: &[u64],
    steps: u64,
    binary: &Binary,
    lines: &mut Lines,
    n_failed: &mut usize,
) -> Result<Vec<Line>> {
    let mut all: Vec<Line> =
        MODES.iter().map(|(name, _)| ((*name).to_string(), Vec::new())).collect();
    for &value in values {
        for ((name, settings), (_, reports)) in MODES.iter().zip(&mut all) {
            let (work, batch) = (axis.work)(value);
            let settings = [work, versus::synthetic(batch, steps), owned(settings)].concat();
            let start = format!("| {} | {value} | {name} |", axis.name);
            match binary.train(&settings, None) {
                Ok(mut report) => {
                    report["bench"] = json!("scaling");
                    report["mode"] = json!(format!("{} {value}, {name}", axis.name));
                    lines.write(&report)?;
                    let peak = report["peak_bytes"].as_f64().map_or("-".to_string(), mib);
                    println!("{start} {peak} | {} |", cell(report["secs_per_step"].as_f64(), 3));
                    reports.push((value, report));
                }
                Err(error) => {
                    *n_failed += 1;
                    println!("{start} did not run: {error:#} | |");
                }
            }
        }
    }
    Ok(all)
}

fn draw(
    axis: &Axis,
    all: &[Line],
    (key, name, unit): (&str, &str, f64),
    folder: &std::path::Path,
) -> Result<()> {
    let line = |(mode, reports): &Line| {
        let points = reports.iter().filter_map(|(x, r)| Some((*x as f64, r[key].as_f64()? / unit)));
        let points: Vec<(f64, f64)> = points.collect();
        let law = Law::of(&points);
        (mode.clone(), points, law)
    };
    let lines: Vec<figure::Line> = all.iter().map(line).collect();
    for (mode, _, law) in &lines {
        let law = law.map_or("-".to_string(), |law| law.text());
        println!("| {} | {mode} | {name} | {law} |", axis.name);
    }
    let title = format!("{name} against {}", axis.name);
    let figure = Figure { title: &title, x: axis.unit, y: name, lines: &lines };
    figure.save(&folder.join(format!("scaling-{}-{}.svg", axis.name, key.replace('_', "-"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_axis_has_a_law() {
        for axis in AXES {
            assert!(axis.values.len() >= 4 && axis.quick.len() >= 3, "{}", axis.name);
            let (settings, batch) = (axis.work)(axis.values[0]);
            let grows =
                settings != (axis.work)(axis.values[1]).0 || batch != (axis.work)(axis.values[1]).1;
            assert!(grows, "{}", axis.name);
        }
    }
}

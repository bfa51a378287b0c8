//! Section `memory`: the budget and how to keep it.

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::path::PathBuf;
use tallow_train::{
    plan::{Knob, Recomputation},
    recompute::{Check, Policy, Saved},
};

/// Section `memory`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct MemorySection {
    pub(super) budget: Option<Bytes>,
    recompute: Option<String>,
    pub(super) offload_dir: Option<PathBuf>,
    saved_inputs: Option<String>,
    check_recompute: Option<bool>,
    prefer: Option<Vec<String>>,
    forbid: Option<Vec<String>>,
}

/// A number of bytes, or a string with a unit.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(untagged, expecting = "a number of bytes, or a string such as \"512MiB\"")]
pub(super) enum Bytes {
    Number(u64),
    Text(String),
}

impl Bytes {
    pub(super) fn checked(&self) -> Result<u64> {
        let bytes = match self {
            Bytes::Number(bytes) => *bytes,
            Bytes::Text(text) => parse_bytes(text)?,
        };
        ensure!(bytes > 0, "0 bytes hold nothing");
        Ok(bytes)
    }
}

/// `512MiB`, `1.2GiB`, `800MB`, `4096`.
///
/// # Errors
/// If it is no number with one of these units, or more than 64 bits hold.
pub(crate) fn parse_bytes(text: &str) -> Result<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" | "k" => 1024.0,
        "mib" | "m" => 1024.0 * 1024.0,
        "gib" | "g" => 1024.0 * 1024.0 * 1024.0,
        "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => bail!("`{text}` is no number of bytes; write 512MiB, 1.5GiB, 800MB or 4096"),
    };
    let number: f64 = number.parse().ok().with_context(|| {
        format!("`{text}` is no number of bytes; write 512MiB, 1.5GiB, 800MB or 4096")
    })?;
    let bytes = number * scale;
    ensure!(bytes < 2f64.powi(63), "`{text}` is more bytes than 64 bits hold");
    Ok(bytes as u64)
}

/// The section, checked.
pub(super) struct Memory {
    pub(super) budget: Option<u64>,
    pub(super) recomputation: Recomputation,
    pub(super) recompute_name: String,
    pub(super) saved: Saved,
    pub(super) check: Check,
    pub(super) prefer: Vec<Knob>,
    pub(super) forbid: Vec<Knob>,
}

impl MemorySection {
    /// # Errors
    /// If a word is unknown or a number is none.
    pub(super) fn checked(&self) -> Result<Memory> {
        let budget = self.budget.as_ref().map(Bytes::checked).transpose();
        let budget = budget.context("memory.budget")?;
        let default = if budget.is_some() { "planned" } else { "none" };
        let text = self.recompute.as_deref().unwrap_or(default);
        let recomputation = recomputation(text).context("memory.recompute")?;
        ensure!(
            recomputation != Recomputation::Planned || budget.is_some(),
            "memory.recompute is planned, which needs memory.budget"
        );
        let saved = saved_inputs(self.saved_inputs.as_deref()).context("memory.saved_inputs")?;
        let check = if self.check_recompute == Some(true) { Check::Bitwise } else { Check::Shape };
        let nothing_runs_again = recomputation == Recomputation::Rule(Policy::None);
        for (key, is_given) in [
            ("saved_inputs", self.saved_inputs.is_some()),
            ("check_recompute", self.check_recompute == Some(true)),
        ] {
            ensure!(
                !(is_given && nothing_runs_again),
                "memory.{key} is given, but memory.recompute is none: no segment runs again"
            );
        }
        Ok(Memory {
            budget,
            recomputation,
            recompute_name: text.to_string(),
            saved,
            check,
            prefer: knobs("prefer", self.prefer.as_deref())?,
            forbid: knobs("forbid", self.forbid.as_deref())?,
        })
    }
}

/// The knobs of a list, each once.
fn knobs(key: &str, names: Option<&[String]>) -> Result<Vec<Knob>> {
    let mut knobs = Vec::new();
    for name in names.unwrap_or_default() {
        let found = Knob::ALL.into_iter().find(|knob| knob.name() == name);
        let knob = found.with_context(|| {
            let names: Vec<&str> = Knob::ALL.iter().map(|knob| knob.name()).collect();
            format!("memory.{key} `{name}` is unknown; there are {}", names.join(", "))
        })?;
        ensure!(!knobs.contains(&knob), "memory.{key} names `{name}` twice");
        knobs.push(knob);
    }
    Ok(knobs)
}

fn saved_inputs(text: Option<&str>) -> Result<Saved> {
    let text = text.unwrap_or("kept");
    match (text, text.strip_prefix("file:")) {
        ("kept", _) => Ok(Saved::AsIs),
        ("bf16", _) => Ok(Saved::Bf16),
        (_, Some(folder)) if !folder.trim().is_empty() => {
            let folder = PathBuf::from(folder.trim());
            ensure!(folder.is_dir(), "`{}` is no folder", folder.display());
            Ok(Saved::File(folder))
        }
        _ => bail!("`{text}` is unknown; there are kept, bf16 and file:FOLDER"),
    }
}

fn recomputation(text: &str) -> Result<Recomputation> {
    let (word, rest) = text.split_once(':').map_or((text, None), |(w, r)| (w, Some(r.trim())));
    let rule = match (word.trim(), rest) {
        ("planned", None) => return Ok(Recomputation::Planned),
        ("none", None) => Policy::None,
        ("all", None) => Policy::All,
        ("every", Some(k)) => {
            let k: usize = k.parse().with_context(|| format!("`{k}` is no number of segments"))?;
            ensure!(k > 0, "every:0 makes no group");
            Policy::Every(k)
        }
        ("bytes", None) => Policy::Bytes(Policy::DEFAULT_BYTES),
        ("bytes", Some(bytes)) => Policy::Bytes(parse_bytes(bytes)?),
        ("named", Some(names)) => {
            Policy::Named(names.split(',').map(|name| name.trim().to_string()).collect())
        }
        _ => bail!(
            "`{text}` is unknown; there are none, all, every:K, bytes:N, named:PATTERN,... and \
             planned"
        ),
    };
    Ok(Recomputation::Rule(rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        for (text, bytes) in [
            ("4096", 4096),
            ("512MiB", 512 << 20),
            ("1.5 GiB", 3 << 29),
            ("800MB", 800_000_000),
            ("2k", 2048),
        ] {
            assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "MiB", "12 parsecs", "1.2.3GiB", "-5MiB", "9e9", "99999999999GiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ways_of_waiting_are_read() {
        assert_eq!(saved_inputs(None).unwrap(), Saved::AsIs);
        assert_eq!(saved_inputs(Some("kept")).unwrap(), Saved::AsIs);
        assert_eq!(saved_inputs(Some("bf16")).unwrap(), Saved::Bf16);
        let folder = std::env::temp_dir();
        let text = format!("file: {}", folder.display());
        assert_eq!(saved_inputs(Some(&text)).unwrap(), Saved::File(folder));
        for text in ["", "file", "file:", "disk", "bf16:x", "file:/no/such/folder"] {
            assert!(saved_inputs(Some(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn rules_are_read() {
        let rule = |text| match recomputation(text).unwrap() {
            Recomputation::Rule(rule) => rule,
            Recomputation::Planned => panic!("{text} is planned"),
        };
        assert_eq!(rule("none"), Policy::None);
        assert_eq!(rule("every:2"), Policy::Every(2));
        assert_eq!(rule("bytes"), Policy::Bytes(100 << 20));
        assert_eq!(rule("bytes: 1MiB"), Policy::Bytes(1 << 20));
        let names = ["layer1.*", "fc"].map(String::from).to_vec();
        assert_eq!(rule("named:layer1.*, fc"), Policy::Named(names));
        for text in ["", "some", "every", "every:0", "every:x", "all:1", "bytes:x"] {
            assert!(recomputation(text).is_err(), "{text}");
        }
    }
}

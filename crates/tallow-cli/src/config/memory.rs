//! Section `memory`: the budget and how to keep it.

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::path::PathBuf;
use tallow_train::{
    plan::{Knob, Recomputation},
    recompute::Policy,
};

/// Section `memory`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct MemorySection {
    pub(super) budget: Option<Bytes>,
    recompute: Option<String>,
    pub(super) offload_dir: Option<PathBuf>,
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
        ensure!(bytes > 0, "a budget of 0 bytes holds nothing");
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
        let forbid = self.forbid.iter().flatten().map(|name| knob(name));
        Ok(Memory {
            budget,
            recomputation,
            recompute_name: text.to_string(),
            forbid: forbid.collect::<Result<_>>()?,
        })
    }
}

fn knob(name: &str) -> Result<Knob> {
    let found = Knob::ALL.into_iter().find(|knob| knob.name() == name);
    found.with_context(|| {
        let names: Vec<&str> = Knob::ALL.iter().map(|knob| knob.name()).collect();
        format!("memory.forbid `{name}` is unknown; there are {}", names.join(", "))
    })
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

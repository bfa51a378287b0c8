//! `tallow data`.

use crate::view::{answer, mib};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::{fs, path::Path};
use tallow_data::inspect::{self, Report, Sheet};

/// Prints what is at `path`, as a table or as JSON, and writes a sheet of its images to `sheet`.
///
/// # Errors
/// If there is no data set that is known, some samples are bad, or the sheet cannot be made.
pub(crate) fn inspect(path: &Path, as_json: bool, sheet: Option<&Path>) -> Result<()> {
    let report = inspect::inspect(path)?;
    if as_json {
        answer!("{:#}", as_value(&report))?;
    } else {
        table(path, &report)?;
    }
    if let Some(sheet) = sheet {
        let content = inspect::contact_sheet_at(path, Sheet::small()).context("--sheet")?;
        fs::write(sheet, content).with_context(|| format!("--sheet `{}`", sheet.display()))?;
    }
    match report.bad.first() {
        None => Ok(()),
        Some(first) => {
            let (n_bad, n_samples) = (report.n_bad, report.n_samples);
            bail!("{n_bad} of {n_samples} samples cannot be read, the first: {}", first.reason)
        }
    }
}

fn as_value(report: &Report) -> serde_json::Value {
    let field = |f: &inspect::Field| json!({"name": f.name, "dtype": f.dtype, "shape": f.shape});
    let class = |(name, n): &(String, u64)| json!({"name": name, "samples": n});
    let bad = |bad: &inspect::Bad| json!({"name": bad.name, "reason": bad.reason});
    json!({
        "kind": report.kind,
        "samples": report.n_samples,
        "bytes": report.n_bytes,
        "fields": report.fields.iter().map(field).collect::<Vec<_>>(),
        "classes": report.classes.iter().map(class).collect::<Vec<_>>(),
        "bad_samples": report.n_bad,
        "bad": report.bad.iter().map(bad).collect::<Vec<_>>(),
    })
}

fn table(path: &Path, report: &Report) -> Result<()> {
    /// Classes shown; a data set may have thousands.
    const MOST_CLASSES: usize = 20;
    answer!("{}: {}", path.display(), report.kind)?;
    answer!("  samples          {}", report.n_samples)?;
    answer!("  size             {} ({} bytes)", mib(report.n_bytes), report.n_bytes)?;
    for field in &report.fields {
        answer!("  {:<16} {} {}", field.name, field.dtype, field.shape)?;
    }
    for (name, n) in report.classes.iter().take(MOST_CLASSES) {
        answer!("  class {name:<10} {n}")?;
    }
    if report.classes.len() > MOST_CLASSES {
        answer!("  and {} more classes", report.classes.len() - MOST_CLASSES)?;
    }
    if report.n_bad > 0 {
        answer!("  bad samples      {}", report.n_bad)?;
    }
    for bad in &report.bad {
        answer!("    {}", bad.reason)?;
    }
    if report.n_bad > report.bad.len() as u64 {
        answer!("    and {} more", report.n_bad - report.bad.len() as u64)?;
    }
    Ok(())
}

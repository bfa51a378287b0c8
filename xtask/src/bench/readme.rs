//! `bench readme`: tables between markers, made from a record.

use super::{
    record::{Row, read},
    stats::{cell, mib},
};
use anyhow::{Context, Result, ensure};
use std::{fs, path::PathBuf};

/// Options of `bench readme`.
#[derive(clap::Args)]
pub(crate) struct Readme {
    /// The record.
    record: PathBuf,
    /// The page whose tables are made anew.
    #[arg(long, value_name = "FILE", default_value = "README.md")]
    page: PathBuf,
}

/// Stands before a table: the marker names a benchmark of the record.
const START: &str = "<!-- bench:";
const END: &str = "<!-- /bench -->";

/// Writes the page; true.
pub(super) fn run(options: &Readme) -> Result<bool> {
    let rows = read(&options.record)?;
    let name = options.page.display().to_string();
    let page = fs::read_to_string(&options.page).with_context(|| name.clone())?;
    // A page in a folder reaches the record from there.
    let up = options.page.components().count().saturating_sub(1);
    let source = format!("{}{}", "../".repeat(up), options.record.display());
    let (page, n_tables) = filled(&page, &rows, &source).with_context(|| name.clone())?;
    ensure!(n_tables > 0, "{name} has no `{START}NAME -->`");
    fs::write(&options.page, page).with_context(|| name)?;
    println!("{n_tables} tables");
    Ok(true)
}

/// `page` with every table that the record has rows for, and how many these are.
fn filled(page: &str, rows: &[Row], source: &str) -> Result<(String, usize)> {
    let (mut out, mut rest, mut n_tables) = (String::new(), page, 0);
    while let Some((before, after)) = rest.split_once(START) {
        let (bench, after) = after.split_once(" -->").context("a marker without its end")?;
        let (old, after) =
            after.split_once(END).with_context(|| format!("no `{END}` after `{bench}`"))?;
        let of_it: Vec<&Row> = rows.iter().filter(|row| row["bench"] == bench).collect();
        let table = match of_it.first() {
            Some(_) => {
                n_tables += 1;
                format!("\n{}\n", table(&of_it, source))
            }
            None => old.to_string(),
        };
        out.push_str(&format!("{before}{START}{bench} -->{table}{END}"));
        rest = after;
    }
    Ok((out + rest, n_tables))
}

/// A row a mode; what the first has is what the others are compared with.
fn table(rows: &[&Row], source: &str) -> String {
    let number = |row: &Row, key: &str| row.get(key)?.parse::<f64>().ok();
    let first = rows[0];
    let word = |key: &str| first.get(key).map_or("", String::as_str);
    let mut lines = vec![
        format!(
            "| mode | s/step | / first | counted peak MiB | / first | resident peak MiB | accuracy % |"
        ),
        format!("|{}", "---|".repeat(7)),
    ];
    for row in rows {
        let ratio = |key: &str| Some(number(row, key)? / number(first, key)?);
        let bytes = |key: &str| number(row, key).map_or("-".to_string(), mib);
        lines.push(format!(
            "| {} | {} | {} | {} | {} | {} | {} |",
            row["mode"],
            cell(number(row, "secs_per_step"), 3),
            cell(ratio("secs_per_step"), 2),
            bytes("peak_bytes"),
            cell(ratio("peak_bytes"), 2),
            bytes("rss_peak_bytes"),
            cell(number(row, "accuracy").map(|a| 100.0 * a), 2),
        ));
    }
    lines.push(format!(
        "\n{}, {} threads, commit {}; [record]({source}).",
        word("cpu"),
        word("threads"),
        word("commit")
    ));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: &str, secs: &str, peak: &str) -> Row {
        let row = [
            ("bench", "gpt"),
            ("mode", mode),
            ("secs_per_step", secs),
            ("peak_bytes", peak),
            ("cpu", "c"),
        ];
        row.map(|(key, value)| (key.to_string(), value.to_string())).into()
    }

    #[test]
    fn tables_are_made_anew_and_the_rest_stays() {
        let rows = [row("f32", "2", "2097152"), row("bf16", "1", "1048576")];
        let page = "a\n<!-- bench:gpt -->\nold\n<!-- /bench -->\nb\n<!-- bench:large -->kept<!-- /bench -->\n";
        let (once, n) = filled(page, &rows, "r.csv").expect("markers are whole");
        assert_eq!(n, 1);
        assert!(once.starts_with("a\n<!-- bench:gpt -->\n| mode |"), "{once}");
        assert!(once.contains("| bf16 | 1.000 | 0.50 | 1.0 | 0.50 | - | - |"), "{once}");
        assert!(once.contains("[record](r.csv)") && !once.contains("old"), "{once}");
        assert!(
            once.ends_with("<!-- /bench -->\nb\n<!-- bench:large -->kept<!-- /bench -->\n"),
            "{once}"
        );
        // Nothing changes the second time.
        assert_eq!(filled(&once, &rows, "r.csv").expect("markers are whole").0, once);
    }

    #[test]
    fn broken_markers_are_named() {
        let error = filled("<!-- bench:gpt -->\nold", &[], "r").expect_err("no end");
        assert!(error.to_string().contains("gpt"), "{error:#}");
    }
}

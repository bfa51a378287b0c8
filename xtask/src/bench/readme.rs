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

/// Stands before a table: the marker names a benchmark of the record, or `BENCHMARK SIZE` where it was
/// run on samples of several sizes.
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
        let (name, after) = after.split_once(" -->").context("a marker without its end")?;
        let (old, after) =
            after.split_once(END).with_context(|| format!("no `{END}` after `{name}`"))?;
        let (bench, size) = name.split_once(' ').map_or((name, None), |(b, size)| (b, Some(size)));
        let is_of_it = |row: &&Row| {
            row["bench"] == bench
                && size.is_none_or(|size| row.get("size").is_some_and(|s| s == size))
        };
        let of_it: Vec<&Row> = rows.iter().filter(is_of_it).collect();
        let table = match of_it.first() {
            Some(_) => {
                n_tables += 1;
                format!("\n{}\n", table(&of_it, source))
            }
            None => old.to_string(),
        };
        out.push_str(&format!("{before}{START}{name} -->{table}{END}"));
        rest = after;
    }
    Ok((out + rest, n_tables))
}

/// A column: its name, and its cell in a row beside the first row; `None` where there is no number.
type Column = (&'static str, fn(&Row, &Row) -> Option<String>);

const COLUMNS: [Column; 9] = [
    ("s/step", |row, _| fixed(number(row, "secs_per_step"), 3)),
    ("/ first", |row, first| ratio(row, first, |row| number(row, "secs_per_step"))),
    ("counted peak MiB", |row, _| {
        let predicted = if number(row, "peak_bytes").is_none() { ", predicted" } else { "" };
        Some(mib(counted(row)?) + predicted)
    }),
    ("/ first", |row, first| ratio(row, first, counted)),
    ("resident peak MiB", |row, _| Some(mib(number(row, "rss_peak_bytes")?))),
    ("budget MiB", |row, _| Some(mib(number(row, "budget_bytes")?))),
    ("accuracy %", |row, _| fixed(number(row, "accuracy").map(|a| 100.0 * a), 2)),
    ("lost, points", |row, first| {
        let lost = number(first, "accuracy")? - number(row, "accuracy")?;
        fixed(Some(100.0 * lost), 2)
    }),
    ("loss of step 1 off PyTorch's f32, %", |row, _| {
        fixed(number(row, "first_loss_off").map(|off| 100.0 * off), 4)
    }),
];

fn number(row: &Row, key: &str) -> Option<f64> {
    row.get(key)?.parse().ok()
}

/// The counted peak, or what was foreseen of a work that the machine is too small for.
fn counted(row: &Row) -> Option<f64> {
    number(row, "peak_bytes").or_else(|| number(row, "predicted_peak_bytes"))
}

fn ratio(row: &Row, first: &Row, of: impl Fn(&Row) -> Option<f64>) -> Option<String> {
    fixed(Some(of(row)? / of(first)?), 2)
}

fn fixed(number: Option<f64>, digits: usize) -> Option<String> {
    number.map(|number| cell(Some(number), digits))
}

/// A row a mode; what the first has is what the others are compared with. A column without a number is
/// left out.
fn table(rows: &[&Row], source: &str) -> String {
    let first = rows[0];
    let word = |key: &str| first.get(key).map_or("", String::as_str);
    let has_number = |(_, of): &&Column| rows.iter().any(|row| of(row, first).is_some());
    let columns: Vec<&Column> = COLUMNS.iter().filter(has_number).collect();
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    let mut lines = vec![
        format!("| mode | {} |", names.join(" | ")),
        format!("|{}", "---|".repeat(1 + columns.len())),
    ];
    for row in rows {
        let cells: Vec<String> =
            columns.iter().map(|(_, of)| of(row, first).unwrap_or("-".to_string())).collect();
        lines.push(format!("| {} | {} |", row["mode"], cells.join(" | ")));
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
        assert!(once.contains("| bf16 | 1.000 | 0.50 | 1.0 | 0.50 |\n"), "{once}");
        assert!(once.contains("[record](r.csv)") && !once.contains("old"), "{once}");
        assert!(
            once.ends_with("<!-- /bench -->\nb\n<!-- bench:large -->kept<!-- /bench -->\n"),
            "{once}"
        );
        // Nothing changes the second time.
        assert_eq!(filled(&once, &rows, "r.csv").expect("markers are whole").0, once);
    }

    #[test]
    fn sizes_have_tables_of_their_own_and_predictions_say_so() {
        let sized = |mode: &str, size: &str, keys: &[(&str, &str)]| {
            let mut row = row(mode, "2", "");
            row.extend(keys.iter().map(|(key, value)| (key.to_string(), value.to_string())));
            row.insert("size".to_string(), size.to_string());
            row
        };
        let rows = [
            sized("f32", "8x8", &[("predicted_peak_bytes", "4194304"), ("accuracy", "0.99")]),
            sized("bf16", "8x8", &[("peak_bytes", "1048576"), ("accuracy", "0.985")]),
            sized("other", "9x9", &[]),
        ];
        let page = "<!-- bench:gpt 8x8 --><!-- /bench -->";
        let (page, _) = filled(page, &rows, "r.csv").expect("markers are whole");
        assert!(
            page.contains("| f32 | 2.000 | 1.00 | 4.0, predicted | 1.00 | 99.00 | 0.00 |"),
            "{page}"
        );
        assert!(page.contains("| bf16 | 2.000 | 1.00 | 1.0 | 0.25 | 98.50 | 0.50 |"), "{page}");
        assert!(
            !page.contains("other") && page.starts_with("<!-- bench:gpt 8x8 -->\n| mode"),
            "{page}"
        );
    }

    #[test]
    fn broken_markers_are_named() {
        let error = filled("<!-- bench:gpt -->\nold", &[], "r").expect_err("no end");
        assert!(error.to_string().contains("gpt"), "{error:#}");
    }
}

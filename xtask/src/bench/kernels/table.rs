//! What `bench kernels` prints.

use super::{COLUMNS, TORCH, row::Row};
use crate::bench::stats::{cell, mib};
use serde_json::Value;

/// Rates in these.
const GIGA: f64 = 1e9;

/// A row a case, then the sums; `torch` is its version, or why there is none.
pub(super) fn table(rows: &[Row], machine: &Value, torch: Result<&str, &str>) -> String {
    let peaks = ["f32", "bf16"].map(|precision| (precision, peak(rows, precision)));
    let mut lines = vec![about(machine, &peaks, torch), String::new()];
    let name = |(who, name): (&str, &str)| match (who, torch) {
        (TORCH, Err(_)) => "PyTorch (none)".to_string(),
        _ => name.to_string(),
    };
    let names: Vec<String> = COLUMNS.into_iter().map(name).collect();
    lines.push(format!(
        "| case, G a second | {} | % of limit | tallow's time / PyTorch's | results |",
        names.join(" | ")
    ));
    lines.push(format!("|{}", "---|".repeat(COLUMNS.len() + 4)));
    lines.extend(rows.iter().map(|row| line(row, &peaks)));
    for precision in ["f32", "bf16"] {
        lines.extend(convolutions(rows, precision));
    }
    lines.extend(rows.iter().filter(|row| row.text("op") == "linear-cross-entropy").map(temporary));
    for row in rows {
        let error =
            |(who, error): (&str, &str)| format!("\n{}: {who} did not run: {error}", row.name());
        lines.extend(row.errors().into_iter().map(error));
    }
    lines.join("\n")
}

/// The highest rate of multiply-adds that any row saw.
fn peak(rows: &[Row], precision: &str) -> Option<f64> {
    let rows = rows.iter().filter(|r| r.text("precision") == precision && r.text("unit") == "flop");
    rows.filter_map(|row| row.rate("limit")).reduce(f64::max)
}

fn about(machine: &Value, peaks: &[(&str, Option<f64>)], torch: Result<&str, &str>) -> String {
    let peak = |(precision, peak): &(&str, Option<f64>)| {
        let by = machine[format!("peak_{precision}")].as_str().unwrap_or("?");
        format!("{precision} {} GFLOP/s ({by})", cell(peak.map(|peak| peak / GIGA), 0))
    };
    let peaks: Vec<String> = peaks.iter().map(peak).collect();
    let torch = torch.map_or_else(|why| format!("no PyTorch: {why}"), |v| format!("PyTorch {v}"));
    format!(
        "{} threads; peak {}; a row of bytes is beside a copy of as many; {torch}",
        machine["threads"],
        peaks.join(", ")
    )
}

/// The limit of a row: the machine's peak, or the copy beside it.
fn limit(row: &Row, peaks: &[(&str, Option<f64>)]) -> Option<f64> {
    match row.text("unit") {
        "flop" => peaks.iter().find(|(name, _)| *name == row.text("precision"))?.1,
        _ => row.rate("limit"),
    }
}

fn line(row: &Row, peaks: &[(&str, Option<f64>)]) -> String {
    let limit = limit(row, peaks);
    let rate = |who: &str| if who == "limit" { limit } else { row.rate(who) };
    let rates = COLUMNS.map(|(who, _)| cell(rate(who).map(|rate| rate / GIGA), 1));
    let share = row.rate("tallow").zip(limit).map(|(ours, limit)| 100.0 * ours / limit);
    let ratio = row.secs("tallow").zip(row.secs(TORCH)).map(|(ours, theirs)| ours / theirs);
    format!(
        "| {} | {} | {} | {} | {} |",
        row.name(),
        rates.join(" | "),
        cell(share, 0),
        cell(ratio, 2),
        results(row)
    )
}

/// Whether all that did the case came to the same.
fn results(row: &Row) -> String {
    let off = |(who, name): (&str, &'static str)| Some((name, row.off(who)?));
    let offs: Vec<(&str, f64)> = COLUMNS[1..].iter().filter_map(|&column| off(column)).collect();
    let is_far = |off: f64| off.is_nan() || off > row.tolerance();
    match offs.iter().find(|(_, off)| is_far(*off)) {
        Some((name, off)) => format!("OFF {name}'s by {off:.1e}"),
        None if offs.is_empty() => "-".to_string(),
        None => "agree".to_string(),
    }
}

/// The time of all convolutions of the network, each as often as it occurs.
fn convolutions<'r>(rows: &'r [Row], precision: &str) -> Option<String> {
    let is_one = |row: &&'r Row| row.text("op") == "conv" && row.text("precision") == precision;
    let convs: Vec<&'r Row> = rows.iter().filter(is_one).collect();
    if convs.is_empty() {
        return None;
    }
    let total = |who: &str| -> Option<f64> {
        convs.iter().map(|row| Some(row.count() * row.secs(who)?)).sum()
    };
    let totals = COLUMNS[..4].iter().filter_map(|(who, name)| {
        Some(format!("{name} {} ms", cell(total(who).map(|secs| secs * 1e3), 1)))
            .filter(|_| total(who).is_some())
    });
    let totals: Vec<String> = totals.collect();
    let n: f64 = convs.iter().map(|row| row.count()).sum();
    let ratio = |row: &&'r Row| Some((row.name(), row.secs("tallow")? / row.secs(TORCH)?));
    let worst = convs.iter().filter_map(ratio).max_by(|a, b| a.1.total_cmp(&b.1));
    let versus = total("tallow").zip(total(TORCH)).zip(worst);
    let versus = versus.map(|((ours, theirs), (name, worst))| {
        format!("; {:.2} times PyTorch's, at worst {worst:.2} ({name})", ours / theirs)
    });
    let versus = versus.unwrap_or_default();
    Some(format!("\n{precision}, {n} convolutions: {}{versus}", totals.join(", ")))
}

/// What the fused loss holds beside its results.
fn temporary(row: &Row) -> String {
    let bytes = |who: &str| row.temp_bytes(who).map(|bytes| bytes as f64);
    let text =
        |who: &str| bytes(who).map_or("-".to_string(), |bytes| format!("{} MiB", mib(bytes)));
    let share = bytes("tallow").zip(bytes(TORCH)).map(|(ours, theirs)| 100.0 * ours / theirs);
    format!(
        "\n{}: temporary bytes: tallow {}, candle {} (both by the counting allocator), PyTorch {} (by \
         its profiler); tallow's share of PyTorch's {} %",
        row.name(),
        text("tallow"),
        text("candle"),
        text(TORCH),
        cell(share, 1)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(case: Value, answers: &[(&'static str, Value)]) -> Row {
        let mut row = Row::new(case);
        answers.iter().for_each(|(who, answer)| row.hear(who, answer.clone()));
        row
    }

    fn conv(name: &str, count: u64, ours: f64, theirs: f64) -> Row {
        let case = json!({
            "name": name, "op": "conv", "precision": "f32", "unit": "flop", "amount": 2e9,
            "count": count,
        });
        let answer = |secs: f64| json!({"best_secs": secs, "samples": [1.0]});
        let limit = ("limit", json!({"best_secs": 1.0, "amount": 8e9}));
        row(case, &[("tallow", answer(ours)), (TORCH, answer(theirs)), limit])
    }

    #[test]
    fn rates_shares_and_sums() {
        let rows = [conv("f32 a", 3, 0.5, 0.25), conv("f32 b", 1, 0.5, 1.0)];
        let machine = json!({"threads": 2, "peak_f32": "Avx2", "peak_bf16": "Avx2"});
        let table = table(&rows, &machine, Ok("2.0"));
        assert!(
            table.contains("| f32 a | 4.0 | - | - | 8.0 | 8.0 | 50 | 2.00 | agree |"),
            "{table}"
        );
        let sum = "f32, 4 convolutions: tallow 2000.0 ms, PyTorch 1750.0 ms; 1.14 times PyTorch's, at \
                   worst 2.00 (f32 a)";
        assert!(table.contains(sum), "{table}");
        assert!(
            table.starts_with("2 threads; peak f32 8 GFLOP/s (Avx2), bf16 - GFLOP/s"),
            "{table}"
        );
    }

    #[test]
    fn what_is_missing_or_wrong_is_said() {
        let case = json!({"name": "bf16 y", "precision": "bf16", "unit": "byte", "amount": 1e9});
        let far = row(
            case,
            &[
                ("tallow", json!({"best_secs": 1.0, "samples": [1.0]})),
                ("candle", json!({"best_secs": 1.0, "samples": [1.5]})),
                ("gemm", json!({"error": "broke"})),
            ],
        );
        let table = table(&[far], &json!({}), Err("no --python was given"));
        assert!(table.contains("no PyTorch: no --python was given"), "{table}");
        assert!(table.contains("| PyTorch (none) |"), "{table}");
        assert!(table.contains("| OFF candle's by 3.3e-1 |"), "{table}");
        assert!(table.contains("bf16 y: gemm did not run: broke"), "{table}");
    }

    #[test]
    fn temporary_bytes_are_compared() {
        let case = json!({"name": "z", "op": "linear-cross-entropy"});
        let bytes = |mib: u64| json!({"temp_bytes": mib << 20});
        let row = row(case, &[("tallow", bytes(2)), (TORCH, bytes(100))]);
        let text = temporary(&row);
        assert!(
            text.contains("tallow 2.0 MiB") && text.ends_with("share of PyTorch's 2.0 %"),
            "{text}"
        );
    }
}

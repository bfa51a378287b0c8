//! Parquet rows: right values in any order, and damage that is an error.
#![cfg(feature = "parquet")]
mod common;
use common::parquet_file;
use tallow_data::{
    Error, Source,
    formats::{Cell, Input, ParquetRows},
};

fn open(content: Vec<u8>, columns: &[&str]) -> tallow_data::Result<ParquetRows> {
    ParquetRows::open(Input::new("the.parquet", content), columns)
}

fn row(i: i64) -> Vec<Cell> {
    let text = if i % 3 == 0 { Cell::Null } else { Cell::Text(format!("row {i}")) };
    vec![Cell::Int(i), text, Cell::Bytes(vec![i as u8; 5]), Cell::Float(i as f64 / 4.0)]
}

#[test]
fn rows_in_any_order() {
    let source = open(parquet_file(100, 3), &[]).unwrap();
    assert_eq!(source.columns(), ["id", "text", "image.bytes", "x"]);
    assert_eq!(source.n_samples(), 300);
    for index in (0..300).chain((0..300).rev()).chain([7, 250, 8, 251, 3]) {
        assert_eq!(source.get(index).unwrap(), row(index as i64), "{index}");
    }
    assert!(matches!(source.get(300), Err(Error::Index { index: 300, n_samples: 300, .. })));
    let two = open(parquet_file(100, 3), &["x", "image.bytes"]).unwrap();
    assert_eq!(two.get(299).unwrap(), [Cell::Float(299.0 / 4.0), Cell::Bytes(vec![43; 5])]);
}

#[test]
fn several_threads_at_once() {
    let source = open(parquet_file(100, 3), &["id"]).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let source = &source;
            scope.spawn(move || {
                for i in 0..300 {
                    let index = (i * 7 + thread * 50) % 300;
                    assert_eq!(source.get(index).unwrap(), [Cell::Int(index as i64)]);
                }
            });
        }
    });
}

#[test]
fn damage_and_missing_columns() {
    let good = parquet_file(10, 1);
    for end in [0, 3, 11, good.len() / 2, good.len() - 1] {
        let error = open(good[..end].to_vec(), &[]).unwrap_err().to_string();
        assert!(error.starts_with("`the.parquet`"), "{error}");
    }
    let error = open(good.clone(), &["none"]).unwrap_err().to_string();
    assert!(error.contains("holds no `none`; it holds `id`, `text`"), "{error}");
    let error = open(good, &["tags.list.element"]).unwrap_err().to_string();
    assert!(error.contains("is repeated"), "{error}");
}

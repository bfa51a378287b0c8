//! Lines, JSON lines and CSV: right values at any place, and errors that name it.
mod common;
use std::fmt::Write;
use tallow_data::{
    Source,
    formats::{Csv, CsvOptions, Input, JsonLines, Lines},
};

fn input(content: impl Into<Vec<u8>>) -> Input {
    Input::new("the.file", content.into())
}

fn all<S: Source>(source: &S) -> Vec<S::Item> {
    (0..source.n_samples()).map(|index| source.get(index).unwrap()).collect()
}

#[test]
fn lines_that_are_not_blank() {
    let text = "first\r\n\n  \t\nsecond \u{e9}\n\n\nlast, no end";
    assert_eq!(all(&Lines::open(input(text)).unwrap()), ["first", "second \u{e9}", "last, no end"]);
    assert_eq!(Lines::open(input("")).unwrap().n_samples(), 0);
    assert_eq!(Lines::open(input("\n \n")).unwrap().n_samples(), 0);
}

/// Across marks and blocks: every line is the one a whole read gives.
#[test]
fn any_line_of_many() {
    let mut draw = common::Draw(5);
    let lines: Vec<String> = (0..3000)
        .map(|i| format!("{i} {}", "x".repeat(draw.below(100) * usize::from(i % 7 == 0) * 9)))
        .collect();
    let source = Lines::open(input(lines.join("\n"))).unwrap();
    assert_eq!(source.n_samples(), 3000);
    for index in (0..3000).rev() {
        assert_eq!(source.get(index).unwrap(), lines[index as usize].trim_end());
    }
    assert!(source.get(3000).is_err());
}

#[test]
fn a_line_that_is_not_text_or_too_long() {
    let source = Lines::open(input(b"good\nb\xffd\n".to_vec())).unwrap();
    assert_eq!(source.get(0).unwrap(), "good");
    assert_eq!(source.get(1).unwrap_err().to_string(), "`the.file` at byte 6: not UTF-8");
    let long = [b"a\n".to_vec(), vec![b'x'; (16 << 20) + 1]].concat();
    let error = Lines::open(input(long)).unwrap_err().to_string();
    assert_eq!(error, "`the.file` at byte 2: a line above 16777216 bytes");
}

#[test]
fn one_string_of_each_json_line() {
    let text = r#"{"id": 3, "text": "a \"b\" \u00e9", "meta": {"text": [1, {}]}}

{"text": "second"}"#;
    let source = JsonLines::open(input(text), "text").unwrap();
    assert_eq!(all(&source), ["a \"b\" \u{e9}", "second"]);
    for (line, needle) in [
        (r#"{"text": 3}"#, "`text` is no string"),
        (r#"{"other": "x"}"#, "no field `text`"),
        (r#"{"text": "x""#, "not JSON"),
        (r#"{"text": "x"} {"#, "not JSON"),
        (r#"["text", "x"]"#, "the line is no object"),
        (r#"{"text": "x", "text": "y"}"#, "`text` is there twice"),
        ("plain words", "not JSON"),
    ] {
        let source = JsonLines::open(input(format!("{{}}\n{line}\n")), "text").unwrap();
        let error = source.get(1).unwrap_err().to_string();
        assert!(error.starts_with("`the.file` at byte ") && error.contains(needle), "{error}");
    }
}

#[test]
fn records_with_quotes_and_line_ends() {
    let text = "name,x,y\r\n\"a, \"\"b\"\"\nc\",1,2\r\n\r\nd,\" 3.5\",-4e1\r\n";
    let source = Csv::open(input(text), CsvOptions::comma()).unwrap();
    assert_eq!(source.columns(), ["name", "x", "y"]);
    assert_eq!(all(&source), [["a, \"b\"\nc", "1", "2"], ["d", " 3.5", "-4e1"]]);
    let (x, y) = (source.column("x").unwrap(), source.column("y").unwrap());
    assert_eq!(source.numbers(1, &[y, x]).unwrap(), [-40.0, 3.5]);
    let error = source.numbers(0, &[0]).unwrap_err().to_string();
    // The reader counts a record from the end of the one before: the `\n` of its `\r\n` is byte 9.
    assert_eq!(error, "`the.file` at byte 9: column `name` of record 0 is no number");
    let error = source.column("z").unwrap_err().to_string();
    assert_eq!(error, "`the.file` holds no `z`; it holds `name`, `x`, `y`");
    let plain = CsvOptions { has_header: false, ..CsvOptions::tab() };
    let source = Csv::open(input("1\t2\n3\t4"), plain).unwrap();
    assert_eq!(
        (source.columns().to_vec(), all(&source)),
        (
            vec!["0".into(), "1".into()],
            vec![vec!["1".to_owned(), "2".into()], vec!["3".into(), "4".into()]]
        )
    );
}

#[test]
fn any_record_of_many() {
    let mut text = "id,words\n".to_owned();
    for i in 0..2000 {
        writeln!(text, "{i},\"{}\n\"\"{i}\"\"\"", "w".repeat(i % 300)).unwrap();
    }
    let source = Csv::open(input(text), CsvOptions::comma()).unwrap();
    assert_eq!(source.n_samples(), 2000);
    for index in (0..2000).rev() {
        let want = [index.to_string(), format!("{}\n\"{index}\"", "w".repeat(index % 300))];
        assert_eq!(source.get(index as u64).unwrap(), want);
    }
}

#[test]
fn a_record_of_another_length_and_a_quote_never_closed() {
    let error = Csv::open(input("a,b\n1,2\n3\n"), CsvOptions::comma()).unwrap_err().to_string();
    assert!(error.contains("record 1 has 1 fields, the others 2"), "{error}");
    let mut text = b"a,b\n1,\"".to_vec();
    text.resize((32 << 20) + 7, b'x');
    let error = Csv::open(input(text), CsvOptions::comma()).unwrap_err().to_string();
    assert!(error.contains("a record above 16777216 bytes; a quote may be missing"), "{error}");
    let not_text = Csv::open(input(b"a\nb\xff\n".to_vec()), CsvOptions::comma()).unwrap();
    assert!(not_text.get(0).unwrap_err().to_string().contains("not UTF-8"));
}

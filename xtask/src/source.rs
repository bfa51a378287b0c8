//! Rules about source text, with a reading of Rust that is just good enough to find functions.

use std::iter::once;
use std::ops::Range;

/// Soft limits: what is longer deserves a look.
const MAX_FILE_LINES: usize = 500;
const MAX_FN_LINES: usize = 60;

/// Engines print nothing and read no environment.
const NOT_IN_ENGINES: &[&str] =
    &["println!", "eprintln!", "print!", "eprint!", "dbg!", "env::var", "env::set_var"];

/// A source file, read once.
pub(crate) struct Source {
    /// The text with comments, literals and test modules blanked; every line is where it was.
    code: String,
    n_lines_without_tests: usize,
    has_page: bool,
}

impl Source {
    pub(crate) fn read(text: &str) -> Source {
        let mut code = blank_literals(text);
        let mut n_test_lines = 0;
        while let Some(module) = find_test_module(&code) {
            // The line where the module begins counts, the one where it ends goes with it.
            n_test_lines += n_breaks(&code[module.clone()]);
            let blank: String = code[module.clone()].chars().map(blank).collect();
            code.replace_range(module, &blank);
        }
        Source {
            code,
            n_lines_without_tests: text.lines().count() - n_test_lines,
            has_page: text.trim_start().starts_with("//!"),
        }
    }

    /// Lines that are not blank, not a comment, and not of a test module.
    pub(crate) fn n_code_lines(&self) -> usize {
        self.code.lines().filter(|line| !line.trim().is_empty()).count()
    }

    /// The functions of more than `most` lines, as (line from 1, name, lines).
    pub(crate) fn functions_above(&self, most: usize) -> Vec<(usize, &str, usize)> {
        let long = functions(&self.code).into_iter().filter(|f| f.n_lines > most);
        long.map(|Function { line, name, n_lines }| (line, name, n_lines)).collect()
    }

    /// Whether the file begins with a `//!` page.
    pub(crate) fn has_page(&self) -> bool {
        self.has_page
    }

    /// Where an engine prints or reads the environment, as (line from 1, the words).
    pub(crate) fn forbidden_acts(&self) -> Vec<(usize, &'static str)> {
        let act = |line: &str| NOT_IN_ENGINES.iter().find(|act| line.contains(**act));
        let lines = self.code.lines().enumerate();
        lines.filter_map(|(i, line)| Some((i + 1, *act(line)?))).collect()
    }

    /// What exceeds a soft limit, as (line from 1, message).
    pub(crate) fn long_parts(&self) -> Vec<(usize, String)> {
        let n_lines = self.n_lines_without_tests;
        let file = (n_lines > MAX_FILE_LINES)
            .then(|| (1, format!("{n_lines} lines without tests, more than {MAX_FILE_LINES}")));
        let functions = self.functions_above(MAX_FN_LINES).into_iter();
        let functions = functions.map(|(line, name, n_lines)| {
            (line, format!("fn {name} has {n_lines} lines, more than {MAX_FN_LINES}"))
        });
        file.into_iter().chain(functions).collect()
    }
}

struct Function<'a> {
    line: usize,
    name: &'a str,
    n_lines: usize,
}

/// Functions with a body, from `fn` to the closing brace; `code` has no literals.
fn functions(code: &str) -> Vec<Function<'_>> {
    let mut functions = Vec::new();
    for (start, _) in code.match_indices("fn ") {
        let follows_word = code[..start].ends_with(is_word);
        let name = code[start + 3..].split(|c| !is_word(c)).next().unwrap_or_default();
        // `fn (` is a type, and a trait's signature has no body.
        if follows_word || name.is_empty() {
            continue;
        }
        let Some(end) = body_end(code, start) else {
            continue;
        };
        functions.push(Function {
            line: n_breaks(&code[..start]) + 1,
            name,
            n_lines: n_breaks(&code[start..end]) + 1,
        });
    }
    functions
}

/// The first test module with its attribute and body.
fn find_test_module(code: &str) -> Option<Range<usize>> {
    let mut starts = code.match_indices("#[cfg(test)]").map(|(start, _)| start);
    starts.find_map(|start| Some(start..body_end(code, start)?))
}

/// The end of the braces that follow `start`, unless a `;` outside of brackets comes first.
fn body_end(code: &str, start: usize) -> Option<usize> {
    let (mut n_brackets, mut n_braces) = (0, 0);
    for (i, c) in code[start..].char_indices() {
        match c {
            '(' | '[' => n_brackets += 1,
            ')' | ']' => n_brackets -= 1,
            '{' => n_braces += 1,
            '}' => n_braces -= 1,
            ';' if n_brackets == 0 && n_braces == 0 => return None,
            _ => continue,
        }
        if c == '}' && n_braces <= 0 {
            return Some(start + i + 1);
        }
    }
    None
}

/// The text with comments and the contents of literals as spaces.
fn blank_literals(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let n_bytes = literal_bytes(rest);
        match n_bytes {
            0 => code.push(c),
            _ => code.extend(rest[..n_bytes].chars().map(blank)),
        }
        rest = &rest[n_bytes.max(c.len_utf8())..];
    }
    code
}

/// The length of the comment or literal at the beginning of `text`; 0 if there is none.
fn literal_bytes(text: &str) -> usize {
    let until = |skip: usize, end: &str| {
        let found = text.get(skip..).and_then(|rest| rest.find(end));
        found.map_or(text.len(), |i| skip + i + end.len())
    };
    if text.starts_with("//") {
        return text.find('\n').unwrap_or(text.len());
    }
    if text.starts_with("/*") {
        return block_comment_bytes(text);
    }
    if let Some(hashes) = text.strip_prefix('r') {
        let n_hashes = hashes.len() - hashes.trim_start_matches('#').len();
        if hashes[n_hashes..].starts_with('"') {
            let end: String = once('"').chain("#".repeat(n_hashes).chars()).collect();
            return until(n_hashes + 2, &end);
        }
    }
    let mut chars = text.char_indices();
    match (chars.next(), chars.next(), chars.next()) {
        (Some((_, '"')), ..) => string_bytes(text),
        // The third character is the escaped one, which may be a quote.
        (Some((_, '\'')), Some((_, '\\')), Some((i, c))) => until(i + c.len_utf8(), "'"),
        (Some((_, '\'')), Some(_), Some((i, '\''))) => i + 1,
        _ => 0,
    }
}

fn string_bytes(text: &str) -> usize {
    let mut is_escaped = false;
    for (i, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '"' => return i + 1,
            _ => {}
        }
    }
    text.len()
}

fn block_comment_bytes(text: &str) -> usize {
    let (mut depth, mut i) = (0, 0);
    while i < text.len() {
        match &text.as_bytes()[i..text.len().min(i + 2)] {
            b"/*" => (depth, i) = (depth + 1, i + 2),
            b"*/" => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    text.len()
}

fn blank(c: char) -> char {
    if c == '\n' { c } else { ' ' }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn n_breaks(text: &str) -> usize {
    text.matches('\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_comments_are_blanked() {
        // The text, and the words that stay.
        let rows: [(&str, &[&str]); 10] = [
            (r#"a("x\"{", 1)"#, &["a(", ",", "1)"]),
            (r##"br#"{"{"#;"##, &["b", ";"]),
            ("r#fn + r\"\\\" + y", &["r#fn", "+", "+", "y"]),
            ("{'{' '\\'' '\\u{7b}' 'é'}", &["{", "}"]),
            ("f::<'a>(&'a x)", &["f::<'a>(&'a", "x)"]),
            ("x /* { /* } */ } */ y", &["x", "y"]),
            ("x // é {\ny", &["x", "y"]),
            ("x \"open", &["x"]),
            ("x r#\"open\"", &["x"]),
            ("x /* open", &["x"]),
        ];
        for (text, want) in rows {
            let code = blank_literals(text);
            assert_eq!(code.split_whitespace().collect::<Vec<_>>(), want, "{text}");
            assert_eq!(code.chars().count(), text.chars().count(), "{text}");
            assert_eq!(n_breaks(&code), n_breaks(text), "{text}");
        }
    }

    #[test]
    fn functions_are_measured_to_their_brace() {
        let text = "fn a() {}\n\
            trait T { fn b(&self); }\n\
            pub fn c(x: [u8; 2], f: fn (u8)) -> u8 {\n    // }\n    if x { \"}\" }\n}\n\
            const _: u8 = my_fn ();\n";
        let code = blank_literals(text);
        let found: Vec<_> = functions(&code).iter().map(|f| (f.line, f.name, f.n_lines)).collect();
        assert_eq!(found, [(1, "a", 1), (3, "c", 4)]);
    }

    #[test]
    fn only_what_exceeds_a_limit_is_long() {
        let function =
            |n_lines: usize| format!("fn f() {{\n{}}}\n", "    g();\n".repeat(n_lines - 2));
        assert_eq!(Source::read(&function(60)).long_parts(), []);
        let found = Source::read(&format!("\n{}", function(61))).long_parts();
        assert_eq!(found, [(2, "fn f has 61 lines, more than 60".to_owned())]);

        assert_eq!(Source::read(&"//\n".repeat(500)).long_parts(), []);
        let found = Source::read(&"//\n".repeat(501)).long_parts();
        assert_eq!(found, [(1, "501 lines without tests, more than 500".to_owned())]);
    }

    #[test]
    fn lines_of_code_are_those_that_say_something() {
        let text = "//! page\n\nfn f() {\n    // why\n    g(); // how\n}\n#[cfg(test)]\nmod tests {\n    fn x() {}\n}\n";
        assert_eq!(Source::read(text).n_code_lines(), 3);
        assert_eq!(Source::read(text).functions_above(3), [(3, "f", 4)]);
        assert_eq!(Source::read(text).functions_above(4), []);
    }

    #[test]
    fn test_modules_do_not_count() {
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "    fn x() {}\n".repeat(600));
        assert_eq!(Source::read(&format!("{}{tests}", "//\n".repeat(499))).long_parts(), []);
        // A declared module ends at its semicolon.
        let source = Source::read(&format!("#[cfg(test)]\nmod tests;\n{}", "//\n".repeat(600)));
        assert_eq!(source.long_parts().len(), 1);
    }

    #[test]
    fn acts_are_found_outside_of_tests_and_comments() {
        let text = "//! println!\nfn f() {\n    eprintln!(\"env::var\");\n    std::env::var_os(x);\n}\n\
            #[cfg(test)]\nmod tests { fn g() { println!(); } }\nfn h() { writeln!(f); env!(\"A\"); }\n";
        let source = Source::read(text);
        assert_eq!(source.forbidden_acts(), [(3, "println!"), (4, "env::var")]);
    }

    #[test]
    fn a_page_comes_first() {
        assert!(Source::read("\n//! Page.\n").has_page());
        assert!(!Source::read("mod a;\n//! Page.\n").has_page());
        assert!(!Source::read("").has_page());
    }
}

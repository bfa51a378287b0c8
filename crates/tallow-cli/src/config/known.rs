//! Refuses what the table of keys does not have: sections, keys, and values of another kind.

use super::keys::{KEYS, Kind, SECTIONS};
use anyhow::{Context, Result, bail, ensure};
use toml::Value;

/// Refuses a section, or a key of a section, that does not exist, and says what comes closest; and a
/// value that is not of its key's kind, and says what is.
pub(super) fn check(table: &toml::Table) -> Result<()> {
    for (section, value) in table {
        if !SECTIONS.iter().any(|(name, _)| name == section) {
            let names = SECTIONS.map(|(name, _)| name);
            bail!("section `{section}` is unknown{}", instead(section, &names));
        }
        let keys = value.as_table().with_context(|| {
            format!("`{section}` is {value}, but it is a section: its keys stand below [{section}]")
        })?;
        for (key, value) in keys {
            let Some(known) = KEYS.iter().find(|k| k.section == section && k.name == key) else {
                let keys = KEYS.iter().filter(|k| k.section == section);
                let names: Vec<&str> = keys.map(|k| k.name).collect();
                bail!("{section}.{key} is unknown{}", instead(key, &names));
            };
            if let (Kind::Words(words), Value::String(word)) = (known.kind, value) {
                let is_known = words.contains(&word.as_str());
                let words = words.join(", ");
                ensure!(is_known, "{section}.{key} `{word}` is unknown; there are {words}");
            }
            let expected = known.kind.expected();
            ensure!(known.kind.has(value), "{section}.{key} is {value}, it must be {expected}");
        }
    }
    Ok(())
}

/// The nearest of `names`, or all where none is near.
fn instead(word: &str, names: &[&str]) -> String {
    /// Of Jaro and Winkler, from 0 to 1.
    const NEAR: f64 = 0.75;
    let near = names.iter().map(|name| (strsim::jaro_winkler(word, name), name));
    match near.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((likeness, name)) if likeness >= NEAR => format!("; did you mean `{name}`?"),
        _ => format!("; there are {}", names.join(", ")),
    }
}

impl Kind {
    /// Whether `value` is of this kind. Numbers that are too small are the sections' to refuse: they
    /// know what a number goes with.
    fn has(self, value: &Value) -> bool {
        let is_whole = value.as_integer().is_some_and(|n| n >= 0);
        let is_number = value.is_float() || value.is_integer();
        let is_text = |value: &Value| value.is_str();
        let is_word = |words: &[&str]| value.as_str().is_some_and(|word| words.contains(&word));
        match self {
            Kind::Whole(_) => is_whole,
            Kind::Number => is_number,
            Kind::Flag => value.is_bool(),
            Kind::Text => value.is_str(),
            Kind::Texts => value.as_array().is_some_and(|items| items.iter().all(is_text)),
            Kind::Named => value.as_table().is_some_and(|fields| fields.values().all(is_text)),
            Kind::Size => value.as_array().is_some_and(|sides| {
                sides.len() == 2 && sides.iter().all(|side| Kind::Whole(1).has(side))
            }),
            Kind::Bytes => is_whole || value.is_str(),
            Kind::Words(words) => is_word(words),
            Kind::WholeOr(word) => is_whole || is_word(&[word]),
            Kind::NumberOr(words) => is_number || is_word(words),
        }
    }

    fn expected(self) -> String {
        match self {
            Kind::Whole(least) => format!("a whole number of at least {least}"),
            Kind::Number => "a number".to_string(),
            Kind::Flag => "true or false".to_string(),
            Kind::Text => "a text".to_string(),
            Kind::Texts => "a list of texts, such as [\"a\", \"b\"]".to_string(),
            Kind::Named => "names with a text each, such as { a = \"b\" }".to_string(),
            Kind::Size => "two whole numbers, [height, width]".to_string(),
            Kind::Bytes => "a number of bytes, or a text such as \"512MiB\"".to_string(),
            Kind::Words(words) => format!("one of {}", words.join(", ")),
            Kind::WholeOr(word) => format!("a whole number of at least 1, or \"{word}\""),
            Kind::NumberOr(words) => format!("a number, or one of {}", words.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a person is shown as an example, or as a default, is taken.
    #[test]
    fn examples_are_of_their_kind() {
        for key in KEYS.iter().filter(|key| !key.example.is_empty()) {
            let text = format!("[{}]\n{} = {}\n", key.section, key.name, key.example);
            check(&text.parse().unwrap()).unwrap();
        }
    }
}

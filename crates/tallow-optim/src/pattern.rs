//! Names of parameters by pattern.

/// Whether `name` is `pattern`, in which each `*` stands for any run of characters, also none.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        // The leftmost place leaves most for the parts to come.
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_stand_for_anything() {
        for (pattern, name, want) in [
            ("", "", true),
            ("", "a", false),
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("*", "layer.weight", true),
            ("*.bias", "layer.bias", true),
            ("*.bias", ".bias", true),
            ("*.bias", "bias", false),
            ("*.bias", "layer.bias.x", false),
            ("h.*.attn.*", "h.11.attn.c_attn.weight", true),
            ("h.*.attn.*", "h.11.mlp.weight", false),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("*ab*ab", "abab", true),
            ("*ab*ab", "ab", false),
            ("*norm*", "final_norm.weight", true),
            ("a**b", "ab", true),
        ] {
            assert_eq!(matches(pattern, name), want, "{pattern} {name}");
        }
    }
}

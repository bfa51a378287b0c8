//! Text through a `tokenizer.json`, into sequences.
#![cfg(feature = "text")]
mod common;
use common::WORDS;
use tallow_data::{
    Source,
    formats::{Input, Lines, Token, Tokenized, Tokenizer, Tokens, encode_to_file},
};

fn tokenizer() -> Tokenizer {
    Tokenizer::open(&Input::new("tokenizer.json", WORDS.as_bytes().to_vec())).unwrap()
}

fn lines(text: &str) -> Lines {
    Lines::open(Input::new("text", text.as_bytes().to_vec())).unwrap()
}

#[test]
fn texts_become_tokens() {
    let tokenizer = tokenizer();
    assert_eq!(
        (tokenizer.token("<end>"), tokenizer.token("dog"), tokenizer.vocab()),
        (Some(4), None, 5)
    );
    let source = Tokenized::new(lines("the cat sat\n\ncat dog the cat\n"), tokenizer);
    assert_eq!(source.n_samples(), 2);
    assert_eq!(
        (source.get(0).unwrap(), source.get(1).unwrap()),
        (vec![1, 2, 70000], vec![2, 0, 1, 2])
    );
}

#[test]
fn texts_become_a_token_file_or_none() {
    let (tokenizer, folder) = (tokenizer(), common::folder("tokens"));
    let path = folder.join("t.bin");
    let text = lines("the cat\ncat the the\n");
    let n = encode_to_file(&text, &tokenizer, tokenizer.token("<end>"), Token::U16, &path).unwrap();
    let sequences = Tokens::raw(Input::open(&path).unwrap(), Token::U16, 3).unwrap();
    assert_eq!((n, sequences.n_tokens(), sequences.get(1).unwrap()), (7, 7, vec![2, 1, 1, 4]));
    let other = folder.join("other.bin");
    let error =
        encode_to_file(&lines("the sat"), &tokenizer, None, Token::U16, &other).unwrap_err();
    assert!(error.to_string().contains("token 70000 of `text: line 0"), "{error}");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "no part of a file stays");
}

#[test]
fn what_is_no_tokenizer() {
    for content in ["", "{}", "words", r#"{"model":{"type":"Unknown"}}"#] {
        let error =
            Tokenizer::open(&Input::new("t.json", content.as_bytes().to_vec())).unwrap_err();
        assert!(error.to_string().starts_with("`t.json`: no tokenizer: "), "{error}");
    }
}

//! WebDataset shards: whole samples or an error that names the file.
#![cfg(feature = "tar")]
mod common;
use common::shard;
use tallow_data::{
    Source,
    formats::{Concat, Input, TarShard},
};

fn open(content: Vec<u8>, required: &[&str]) -> tallow_data::Result<TarShard> {
    TarShard::open(Input::new("the.tar", content), required)
}

const MEMBERS: [(&str, &[u8]); 5] = [
    ("d/a.jpg", b"picture a"),
    ("d/a.cls", b"3"),
    ("d/b.seg.PNG", b"mask"),
    ("d/b.cls", b""),
    ("c.json", b"{}"),
];

#[test]
fn members_are_grouped_by_key() {
    let source = open(shard(&MEMBERS), &[]).unwrap();
    assert_eq!((source.n_samples(), source.held_bytes()), (3, 72));
    let a = source.get(0).unwrap();
    assert_eq!(
        (&*a.key, a.member("jpg"), a.member("cls")),
        ("d/a", Some(&b"picture a"[..]), Some(&b"3"[..]))
    );
    let b = source.get(1).unwrap();
    assert_eq!(
        (b.members.len(), b.member("seg.png"), b.member("cls")),
        (2, Some(&b"mask"[..]), Some(&b""[..]))
    );
    assert_eq!(source.name(2), "the.tar: c");
    assert!(source.get(3).is_err());
    let both = Concat::new(vec![source.clone(), source]);
    assert_eq!(
        (both.n_samples(), both.get(5).unwrap().key, both.name(3)),
        (6, "c".to_owned(), "the.tar: d/a".to_owned())
    );
    assert!(both.get(6).unwrap_err().to_string().contains("sample 3, there are 3"));
}

/// Names above the 100 bytes of a header lie in an entry of their own.
#[test]
fn long_names_belong_to_their_sample() {
    let name = format!("{}/{}.txt", "folder".repeat(20), "n".repeat(90));
    let source =
        open(shard(&[("first.txt", b"1"), (&name, b"long"), ("z.txt", b"2")]), &["txt"]).unwrap();
    let sample = source.get(1).unwrap();
    assert_eq!(
        (source.n_samples(), format!("{}.txt", sample.key), sample.member("txt")),
        (3, name, Some(&b"long"[..]))
    );
    assert_eq!(source.get(2).unwrap().key, "z");
}

#[test]
fn spare_5_interleaved_keys() {
    let content = shard(&[("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"3"), ("b.cls", b"4")]);
    let error = open(content, &[]).unwrap_err().to_string();
    assert!(error.starts_with("`the.tar` at byte 2048: members of `a` are interleaved"), "{error}");
    let twice = shard(&[("a.jpg", b"1"), ("a.jpg", b"2")]);
    assert!(open(twice, &[]).unwrap_err().to_string().contains("sample `a` has two members `jpg`"));
    let missing = shard(&[("a.jpg", b"1"), ("a.cls", b"2"), ("b.jpg", b"3")]);
    let error = open(missing, &["jpg", "cls"]).unwrap_err().to_string();
    assert_eq!(error, "`the.tar` at byte 2048: sample `b` has no member `cls`, only `jpg`");
}

/// At whatever byte a tail is cut off: an error, or all samples whole.
#[test]
fn spare_5_cut_tail() {
    let content = shard(&MEMBERS);
    let whole: Vec<_> = {
        let s = open(content.clone(), &[]).unwrap();
        (0..3).map(|i| s.get(i).unwrap()).collect()
    };
    // Two blocks of zeros end the archive, one is enough to know it.
    let n_needed = content.len() - 512;
    for end in 0..content.len() {
        match open(content[..end].to_vec(), &[]) {
            Ok(source) => {
                assert!(end >= n_needed, "{end} of {}", content.len());
                let samples: Vec<_> = (0..3).map(|i| source.get(i).unwrap()).collect();
                assert_eq!(samples, whole);
            }
            Err(error) => {
                assert!(error.to_string().starts_with("`the.tar` at byte "), "{end}: {error}")
            }
        }
    }
    let error = open(content[..1200].to_vec(), &[]).unwrap_err().to_string();
    assert!(error.contains("member") || error.contains("not a whole tar"), "{error}");
}

#[test]
fn a_shard_cut_while_it_is_open() {
    let path = common::folder("shard").join("s.tar");
    std::fs::write(&path, shard(&MEMBERS)).unwrap();
    let source = TarShard::open(Input::open(&path).unwrap(), &[]).unwrap();
    std::fs::write(&path, &shard(&MEMBERS)[..700]).unwrap();
    assert!(source.get(1).is_err() && source.get(2).is_err());
}

#[test]
fn only_what_is_wanted_is_read() {
    let members: [(&str, &[u8]); 4] =
        [("a.jpg", b"1"), ("a.cls", b"2"), ("b.cls", b"4"), ("b.jpg", b"3")];
    let shard = open(shard(&members), &[]).unwrap();
    let classes = shard.only(&["cls"]);
    assert_eq!((classes.n_samples(), shard.get(0).unwrap().members.len()), (2, 2));
    let sample = classes.get(1).unwrap();
    assert_eq!((&*sample.key, sample.members), ("b", vec![("cls".to_owned(), b"4".to_vec())]));
}

//! Every way in which IDX files and their folders can be wrong.
mod common;
use common::{folder, gzip, idx};
use std::{borrow::Cow, fs, path::Path};
use tallow_data::{
    Error, ImageSet,
    idx::{IdxFault, IdxType, parse_u8, read_u8},
};

fn name() -> &'static Path {
    Path::new("some-file")
}

fn fault(content: &[u8], rank: usize) -> IdxFault {
    match parse_u8(name(), content, rank).unwrap_err() {
        Error::Idx { path, fault } if path == name() => fault,
        error => panic!("{error}"),
    }
}

#[test]
fn plain_content_is_borrowed_and_compressed_content_owned() {
    let content = idx(&[2, 1, 3], &[1, 2, 3, 4, 5, 6]);
    let plain = parse_u8(name(), &content, 3).unwrap();
    assert_eq!(plain.dims, [2, 1, 3]);
    assert!(matches!(plain.bytes, Cow::Borrowed(bytes) if std::ptr::eq(bytes, &content[16..])));
    let compressed = gzip(&content);
    assert_eq!(parse_u8(name(), &compressed, 3).unwrap(), plain);
    for (file, content) in [("plain.gz", &content), ("gzip.idx", &compressed)] {
        let path = folder("by-content").join(file); // the names lie
        fs::write(&path, content).unwrap();
        assert_eq!(read_u8(&path, 3).unwrap(), plain);
    }
}

#[test]
fn content_longer_than_the_first_read_arrives_whole() {
    let bytes: Vec<u8> = (0..300_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    let content = idx(&[300, 1000], &bytes);
    assert_eq!(*parse_u8(name(), &gzip(&content), 2).unwrap().bytes, bytes);
    let path = folder("long").join("plain");
    fs::write(&path, content).unwrap();
    assert_eq!(*read_u8(&path, 2).unwrap().bytes, bytes);
}

#[test]
fn what_is_not_idx_shows_its_first_bytes() {
    for content in [
        &b""[..],
        b"\x00",
        b"\x00\x00\x08",
        b"\x89PNG...",
        b"\x00\x00\x07\x01",
        b"\x00\x01\x08\x01",
    ] {
        let found = fault(content, 1);
        assert!(
            matches!(&found, IdxFault::NotIdx { found } if found == &content[..content.len().min(4)]),
            "{found}"
        );
    }
    assert!(fault(b"\x89PNG...", 1).to_string().ends_with("[89, 50, 4e, 47]"));
}

#[test]
fn lengths_are_compared_to_the_byte() {
    let content = idx(&[2, 3], &[9; 6]);
    for cut in 4..content.len() {
        let expected = if cut < 12 { 12 } else { 18 };
        let found = fault(&content[..cut], 2);
        assert!(
            matches!(found, IdxFault::Truncated { expected_bytes, found_bytes }
                if expected_bytes == expected && found_bytes == cut as u64),
            "{cut}: {found}"
        );
        let message = found.to_string();
        assert_eq!(fault(&gzip(&content[..cut]), 2).to_string(), message);
    }
    let longer = [&content[..], &[1, 2]].concat();
    for content in [longer.clone(), gzip(&longer)] {
        let found = fault(&content, 2);
        assert!(
            matches!(found, IdxFault::Trailing { expected_bytes: 18, extra_bytes: 2 }),
            "{found}"
        );
    }
}

#[test]
fn a_damaged_gzip_stream_is_told_from_a_short_one() {
    let mut compressed = gzip(&idx(&[2, 3], &[1, 2, 3, 4, 5, 6]));
    let n = compressed.len();
    let found = fault(&compressed[..n - 12], 2);
    assert!(matches!(found, IdxFault::Truncated { expected_bytes: 18, .. }), "{found}");
    for content in
        [&compressed[..3], &compressed[..n - 1], &[&compressed[..], b"junk after it"].concat()]
    {
        let found = fault(content, 2);
        assert!(matches!(found, IdxFault::Gzip { .. }), "{found}");
    }
    compressed[n - 6] ^= 1; // the checksum
    let found = fault(&compressed, 2);
    assert!(matches!(found, IdxFault::Gzip { found_bytes: 18, .. }), "{found}");
}

#[test]
fn other_types_and_ranks_are_named() {
    let types = [
        (9, IdxType::I8),
        (11, IdxType::I16),
        (12, IdxType::I32),
        (13, IdxType::F32),
        (14, IdxType::F64),
    ];
    for (code, want) in types {
        let mut content = idx(&[1], &[0; 8]);
        content[2] = code;
        let found = fault(&content, 1);
        assert!(
            matches!(found, IdxFault::Type { found, expected: IdxType::U8 } if found == want),
            "{found}"
        );
        assert_eq!(found.to_string(), format!("elements are {want}, u8 is needed"));
    }
    for rank in [0, 1, 2, 4, 255] {
        let found = fault(&[0, 0, 8, rank], 3);
        assert!(
            matches!(found, IdxFault::Rank { found_rank, expected_rank: 3 } if found_rank == rank as usize)
        );
    }
}

#[test]
fn absurd_dimensions_are_not_believed() {
    let found = fault(&idx(&[u32::MAX; 3], &[0; 9]), 3);
    assert!(
        matches!(&found, IdxFault::Dims { dims } if dims[..] == [u64::from(u32::MAX); 3]),
        "{found}"
    );
    for content in [idx(&[u32::MAX, 1 << 30], &[0; 9]), gzip(&idx(&[u32::MAX, 1 << 30], &[0; 9]))] {
        let found = fault(&content, 2); // 4 EiB announced: addressable, not there
        assert!(matches!(found, IdxFault::Truncated { found_bytes: 21, .. }), "{found}");
    }
}

fn write_pair(test: &str, images: &[u8], labels: &[u8]) -> Result<ImageSet, Error> {
    let folder = folder(test);
    fs::write(folder.join("t-images-idx3-ubyte"), images).unwrap();
    fs::write(folder.join("t-labels.idx1-ubyte.gz"), labels).unwrap();
    ImageSet::open_dir(folder)
}

#[test]
fn a_folder_with_one_pair_opens() {
    let labels = gzip(&idx(&[2], &[4, 1]));
    let set = write_pair("pair", &idx(&[2, 1, 2], &[1, 2, 3, 4]), &labels).unwrap();
    assert_eq!((set.n_images(), set.height(), set.width(), set.n_classes()), (2, 1, 2, 5));
    assert_eq!((set.image(1), set.label(0)), (&[3, 4][..], 4));
}

#[test]
fn images_and_labels_must_belong_together() {
    let error = write_pair("counts", &idx(&[2, 1, 1], &[1, 2]), &idx(&[3], &[0; 3])).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, Error::Counts { n_images: 2, n_labels: 3, .. }), "{message}");
    assert!(
        message.contains("t-images-idx3-ubyte` holds 2")
            && message.contains("t-labels.idx1-ubyte.gz` holds 3")
    );
    let error = write_pair("no-pixels", &idx(&[2, 0, 3], &[]), &idx(&[2], &[0; 2])).unwrap_err();
    assert!(matches!(error, Error::Idx { fault: IdxFault::Dims { .. }, .. }), "{error}");
}

#[test]
fn a_missing_file_or_folder_is_named() {
    let folder = folder("missing");
    let missing = folder.join("nowhere");
    for error in [read_u8(&missing, 1).unwrap_err(), ImageSet::open_dir(&missing).unwrap_err()] {
        assert!(matches!(&error, Error::NotFound { path } if *path == missing), "{error}");
    }
    assert!(matches!(read_u8(&folder, 1).unwrap_err(), Error::Io { .. })); // a folder, not a file
}

#[test]
fn a_folder_says_what_was_looked_for_and_found() {
    let folder = folder("listing");
    let message = ImageSet::open_dir(&folder).unwrap_err().to_string();
    assert!(
        message.ends_with("holds no file `*images*idx3-ubyte[.gz]`; it holds nothing"),
        "{message}"
    );
    fs::create_dir(folder.join("images-idx3-ubyte")).unwrap(); // a folder of that name is no file
    fs::write(folder.join("images-idx3-ubyte.zip"), "").unwrap();
    let message = ImageSet::open_dir(&folder).unwrap_err().to_string();
    assert!(message.ends_with("it holds `images-idx3-ubyte.zip`"), "{message}");
    for file in ["train-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz"] {
        fs::write(folder.join(file), "").unwrap();
    }
    let error = ImageSet::open_dir(&folder).unwrap_err();
    assert!(matches!(&error, Error::Ambiguous { found, .. } if found.len() == 2));
    assert!(
        error.to_string().ends_with("`t10k-images-idx3-ubyte.gz`, `train-images-idx3-ubyte`"),
        "{error}"
    );
}

#[test]
fn embedded_files_read_alike_from_a_folder() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let (read, embedded) = (ImageSet::open_dir(data).unwrap(), ImageSet::digits().unwrap());
    assert_eq!((read.labels(), read.n_classes()), (embedded.labels(), 10));
    assert!((0..10_000).all(|i| read.image(i) == embedded.image(i)));
}

//! What `inspect` says about good and bad data sets.
mod common;
use common::{npy, safetensors};
use std::{fs, path::Path};
use tallow_data::{
    Error,
    inspect::{MOST_NAMED, Report, inspect},
};

/// The report on a file of this name and content.
fn report(name: &str, content: impl AsRef<[u8]>) -> Report {
    let path = common::folder(&format!("inspect_{name}")).join(name);
    fs::write(&path, content).unwrap();
    inspect(&path).unwrap()
}

fn fields(report: &Report) -> Vec<(&str, &str, &str)> {
    report.fields.iter().map(|f| (&*f.name, &*f.dtype, &*f.shape)).collect()
}

#[test]
fn arrays_and_texts() {
    let found = report("x.data", npy("<f4", false, "(3, 2)", &[0; 24]));
    assert_eq!((&*found.kind, found.n_samples, found.n_bad), (".npy rows", 3, 0));
    assert_eq!(fields(&found), [("row", "F32", "[2]")]);
    let header = r#"{"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
    let found = report("w.safetensors", safetensors(header, &[0; 12]));
    assert_eq!((found.n_samples, fields(&found)), (1, vec![("w", "BF16", "[2, 3]")]));
    let found = report("t.csv", "name,x\na,1\nb, 2.5\n");
    assert_eq!(
        (found.n_samples, fields(&found)),
        (2, vec![("name", "text", "[]"), ("x", "number", "[]")])
    );
    let found = report("t.txt", "ab\n\nabcd\n");
    assert_eq!(
        (found.n_samples, found.n_bytes, fields(&found)),
        (2, 9, vec![("line", "text", "[2] to [4] bytes")])
    );
}

#[test]
fn bad_lines_are_named_up_to_a_bound() {
    let text = format!("{{\"a\": 1, \"b\": 2}}\n{}", "{\"a\": \n".repeat(50));
    let found = report("t.jsonl", text);
    assert_eq!((found.n_samples, found.n_bad, found.bad.len()), (51, 50, MOST_NAMED));
    assert_eq!(fields(&found), [("a", "JSON", "[]"), ("b", "JSON", "[]")]);
    assert!(
        found.bad[0].name.contains("line 1") && found.bad[0].reason.contains("not JSON"),
        "{:?}",
        found.bad[0]
    );
}

#[test]
fn idx_files() {
    let folder = common::folder("inspect_idx");
    fs::write(folder.join("a-images-idx3-ubyte"), common::idx(&[3, 2, 2], &[0; 12])).unwrap();
    fs::write(folder.join("a-labels-idx1-ubyte"), common::idx(&[3], &[1, 0, 1])).unwrap();
    let found = inspect(&folder).unwrap();
    assert_eq!((found.n_samples, found.n_bytes), (3, 15));
    assert_eq!(found.classes, [("0".to_owned(), 1), ("1".into(), 2)]);
}

#[test]
fn token_files_and_folders_of_them() {
    let tokens =
        |range: std::ops::Range<u16>| range.flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let found = report("t.bin", tokens(3..40_003));
    assert_eq!((found.n_samples, found.n_bytes, found.n_bad), (40_000, 80_000, 0));
    assert_eq!(fields(&found), [("token", "U16", "3 to 40002")]);
    let folder = common::folder("inspect_token_shards");
    fs::write(folder.join("a.bin"), tokens(7..17)).unwrap();
    fs::write(folder.join("b.bin"), tokens(1..6)).unwrap();
    fs::write(folder.join("c.bin"), [1, 2, 3]).unwrap();
    fs::write(folder.join("notes.md"), "not data").unwrap();
    let found = inspect(&folder).unwrap();
    assert_eq!((&*found.kind, found.n_samples), ("3 files of tokens of 16 bits", 15 + 1));
    assert_eq!(fields(&found), [("token", "U16", "1 to 16")]);
    assert!(found.n_bad == 1 && found.bad[0].reason.contains("c.bin"), "{:?}", found.bad);
}

#[test]
fn what_is_no_data_set() {
    assert!(matches!(inspect(Path::new("no/such/thing")), Err(Error::NotFound { .. })));
    assert!(matches!(inspect(&common::folder("inspect_empty")), Err(Error::NoFile { .. })));
    let path = common::folder("inspect_no_npy").join("x.npy");
    fs::write(&path, "").unwrap();
    let error = inspect(&path).unwrap_err().to_string();
    assert!(error.contains("x.npy` at byte 0: "), "{error}");
    let path = common::folder("inspect_words").join("words.doc");
    fs::write(&path, "words").unwrap();
    assert!(inspect(&path).unwrap_err().to_string().contains("no data set that is known"));
}

#[cfg(feature = "images")]
mod images {
    use super::*;
    #[cfg(any(feature = "tar", feature = "parquet"))]
    use common::images::jpeg;
    use common::images::{folder_of_8, gradient};
    use tallow_data::{
        Source,
        formats::ImageFolder,
        image::{Decode, decode},
        inspect::{Sheet, contact_sheet, contact_sheet_at},
    };

    #[test]
    fn dat_2_the_bad_images_are_named() {
        let found = inspect(&folder_of_8("inspect_images")).unwrap();
        assert_eq!((found.n_samples, found.n_bad), (8, 2));
        assert_eq!(found.classes, [("a".to_owned(), 4), ("b".into(), 4)]);
        let want =
            [("JPEG", "U8", "5 files"), ("PNG", "U8", "1 files"), ("image", "U8", "[20, 30]")];
        assert_eq!(fields(&found), want);
        assert!(found.bad[0].name.ends_with("cut.jpg") && found.bad[1].reason.ends_with("empty"));
    }

    #[test]
    fn dat_2_the_bad_images_of_a_list_are_named() {
        let path = folder_of_8("inspect_list").join("all.lst");
        fs::write(&path, "a/0.jpg 4\nb/cut.jpg\t1\nnone.jpg 4\nb/png_inside.jpg 1\n").unwrap();
        let found = inspect(&path).unwrap();
        assert_eq!((&*found.kind, found.n_samples, found.n_bad), ("list of images", 4, 2));
        assert_eq!(found.classes, [("1".to_owned(), 2), ("4".into(), 1)]);
        let want =
            [("JPEG", "U8", "1 files"), ("PNG", "U8", "1 files"), ("image", "U8", "[20, 30]")];
        assert_eq!(fields(&found), want);
        assert!(
            found.bad[0].reason.contains("b/cut.jpg`: JPEG")
                && found.bad[0].name.contains("line 1")
        );
        assert!(found.bad[1].reason.contains("none.jpg` does not exist"));
    }

    #[cfg(feature = "tar")]
    #[test]
    fn dat_2_the_bad_images_of_a_shard_are_named() {
        let (small, large) = (jpeg(&gradient([8, 12]), false), jpeg(&gradient([20, 10]), true));
        let cut = &large[..large.len() / 2];
        let members: [(&str, &[u8]); 5] = [
            ("a.JPG", &small),
            ("a.cls", b"2"),
            ("b.jpeg", cut),
            ("c.png", &large),
            ("d.cls", b"1"),
        ];
        let found = report("pictures.tar", common::shard(&members));
        assert_eq!((found.n_samples, found.n_bad), (4, 1));
        assert_eq!(fields(&found).pop(), Some(("image", "U8", "[8, 10] to [20, 12]")));
        let reason = &found.bad[0].reason;
        assert!(
            reason.contains("pictures.tar: b`: JPEG: ") && !reason.contains('\n'),
            "{reason:?}"
        );
    }

    #[cfg(feature = "parquet")]
    #[test]
    fn dat_2_the_bad_images_of_a_table_are_named() {
        let good = jpeg(&gradient([8, 12]), false);
        let images = [b"none".to_vec(), good.clone(), good[..good.len() / 2].to_vec()];
        let found = report("pictures.parquet", common::parquet_of_bytes(&images));
        assert_eq!((found.n_samples, found.n_bad), (3, 2));
        assert_eq!(fields(&found), [("image.bytes", "bytes", "[]"), ("image", "U8", "[8, 12]")]);
        let reasons = [&found.bad[0].reason, &found.bad[1].reason];
        assert!(
            reasons[0].contains("pictures.parquet: row 0`: no JPEG, PNG or WebP"),
            "{reasons:?}"
        );
        assert!(reasons[1].contains("row 2`: JPEG: "), "{reasons:?}");
    }

    #[test]
    fn a_sheet_shows_good_images_and_marks_bad_ones() {
        let folder = ImageFolder::open(folder_of_8("sheet")).unwrap();
        let layout = Sheet { columns: 3, rows: 9, cell_pixels: 10 };
        let content = contact_sheet(&folder, layout).unwrap();
        let sheet = decode(Path::new("sheet"), &content, &Decode::rgb()).unwrap();
        assert_eq!(sheet.size(), [30, 30]);
        let pixel = |y: usize, x: usize| &sheet.pixels()[(y * 30 + x) * 3..][..3];
        // The sixth and seventh are bad, the ninth is not there.
        assert_eq!(
            (pixel(15, 25), pixel(25, 5), pixel(25, 25)),
            (&[200, 0, 0][..], &[200, 0, 0][..], &[255; 3][..])
        );
        // The middle of a gradient of 30 columns is half as bright as its end.
        assert!(pixel(5, 5)[0].abs_diff(127) < 20, "{:?}", pixel(5, 5));
        assert_ne!(gradient([20, 30]).pixels()[0], 127);
        // The same from a list, from shards, and from a table.
        #[cfg(any(feature = "tar", feature = "parquet"))]
        let sources: Vec<Vec<u8>> = (0..8).map(|index| folder.get(index).unwrap().bytes).collect();
        let root = folder_of_8("sheets");
        let names: Vec<String> =
            (0..8).map(|index| folder.path(index).display().to_string()).collect();
        fs::write(root.join("all.lst"), names.join(" 0\n") + " 0\n").unwrap();
        let list = root.join("all.lst");
        assert!(contact_sheet_at(&list, layout).unwrap() == content);
        #[cfg(feature = "tar")]
        {
            let keys: Vec<String> = (0..8).map(|index| format!("{index}.jpg")).collect();
            let members = keys.iter().zip(&sources).map(|(key, bytes)| (&key[..], &bytes[..]));
            let members: Vec<(&str, &[u8])> = members.collect();
            let shards = common::folder("sheet_shards");
            fs::write(shards.join("0.tar"), common::shard(&members[..5])).unwrap();
            fs::write(shards.join("1.tar"), common::shard(&members[5..])).unwrap();
            assert!(contact_sheet_at(&shards, layout).unwrap() == content);
        }
        #[cfg(feature = "parquet")]
        {
            fs::write(root.join("all.parquet"), common::parquet_of_bytes(&sources)).unwrap();
            let table = root.join("all.parquet");
            assert!(contact_sheet_at(&table, layout).unwrap() == content);
        }
        let none = Sheet { columns: 0, rows: 1, cell_pixels: 10 };
        assert!(contact_sheet(&folder, none).is_err());
        fs::write(root.join("words.txt"), "words\n").unwrap();
        let error = contact_sheet_at(&root.join("words.txt"), layout).unwrap_err().to_string();
        assert!(error.contains("no images that a sheet could show"), "{error}");
    }

    #[test]
    fn a_sheet_of_idx_files_is_grey() {
        let folder = common::folder("sheet_idx");
        let pixels = [[0; 4], [100; 4], [255; 4]].concat();
        fs::write(folder.join("a-images-idx3-ubyte"), common::idx(&[3, 2, 2], &pixels)).unwrap();
        fs::write(folder.join("a-labels-idx1-ubyte"), common::idx(&[3], &[1, 0, 1])).unwrap();
        let layout = Sheet { columns: 3, rows: 1, cell_pixels: 2 };
        let content = contact_sheet_at(&folder, layout).unwrap();
        let sheet = decode(Path::new("sheet"), &content, &Decode::rgb()).unwrap();
        assert_eq!(sheet.size(), [2, 6]);
        assert_eq!(sheet.pixels()[..18], [[0; 6], [100; 6], [255; 6]].concat()[..]);
    }
}

#[cfg(feature = "tar")]
#[test]
fn shards() {
    let members: [(&str, &[u8]); 3] = [("a.txt", b"1"), ("a.cls", b"2"), ("b.txt", b"3")];
    let found = report("s.tar", common::shard(&members));
    assert_eq!((found.n_samples, found.n_bad), (2, 0));
    assert_eq!(fields(&found), [("txt", "bytes", "2 members"), ("cls", "bytes", "1 members")]);

    let folder = common::folder("inspect_shards");
    let whole = common::shard(&members);
    fs::write(folder.join("0.tar"), &whole).unwrap();
    fs::write(folder.join("1.tar"), &whole).unwrap();
    fs::write(folder.join("2.tar"), &whole[..600]).unwrap();
    let found = inspect(&folder).unwrap();
    assert_eq!((&*found.kind, found.n_samples, found.n_bad), ("3 files of WebDataset shard", 5, 1));
    assert_eq!(found.n_bytes, 2 * whole.len() as u64 + 600);
    assert_eq!(fields(&found), [("txt", "bytes", "4 members"), ("cls", "bytes", "2 members")]);
    assert!(found.bad[0].name.ends_with("2.tar"), "{:?}", found.bad);
}

#[cfg(feature = "parquet")]
#[test]
fn parquet() {
    let found = report("p.bin", common::parquet_file(10, 2));
    assert_eq!((found.n_samples, found.n_bad), (20, 0));
    let want = [
        ("id", "integer", "[]"),
        ("text", "text", "[]"),
        ("image.bytes", "bytes", "[]"),
        ("x", "number", "[]"),
    ];
    assert_eq!(fields(&found), want);

    let folder = common::folder("inspect_parquet_shards");
    fs::write(folder.join("a.parquet"), common::parquet_file(10, 2)).unwrap();
    fs::write(folder.join("b.parquet"), common::parquet_file(3, 1)).unwrap();
    let found = inspect(&folder).unwrap();
    assert_eq!((&*found.kind, found.n_samples), ("2 files of parquet rows", 23));
    assert_eq!(fields(&found), want);
}

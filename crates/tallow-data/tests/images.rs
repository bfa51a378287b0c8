//! Decoding by content, bad files, and random changes as functions of a key.
#![cfg(feature = "images")]
mod common;
use candle_core::{DType, Device};
use common::images::{folder_of_8, gradient, jpeg, png, webp};
use std::path::Path;
use tallow_data::{
    Error, Source,
    formats::{ImageFolder, ImageList, Input},
    image::{
        Augment, Channels, Decode, Filter, Format, Image, Normalise, Region, apply, decode,
        encode_png, probe, resize, sample_key,
    },
};

fn rgb(content: &[u8]) -> Result<Image, Error> {
    decode(Path::new("the.file"), content, &Decode::rgb())
}

/// Greatest difference of a pixel.
fn distance(a: &Image, b: &Image) -> u8 {
    assert_eq!(a.size(), b.size());
    a.pixels().iter().zip(b.pixels()).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

#[test]
fn dat_2_bad_image_files() {
    let folder = ImageFolder::open(folder_of_8("dat_2")).unwrap();
    assert_eq!(folder.n_samples(), 8);
    let outcomes: Vec<_> = (0..8)
        .map(|index| {
            let encoded = folder.get(index)?;
            decode(&encoded.path, &encoded.bytes, &Decode::rgb())
        })
        .collect();
    let bad: Vec<String> =
        outcomes.iter().filter_map(|o| o.as_ref().err().map(ToString::to_string)).collect();
    assert_eq!(bad.len(), 2, "{bad:?}");
    assert!(bad[0].contains("b/cut.jpg`") && bad[0].contains("JPEG"), "{}", bad[0]);
    assert!(bad[1].ends_with("b/empty.jpg`: the file is empty"), "{}", bad[1]);
    // The PNG that is named `.jpg` is exact, as a JPEG would not be.
    let png_index = (0..8).find(|&i| folder.name(i).ends_with("png_inside.jpg")).unwrap();
    assert_eq!(*outcomes[png_index as usize].as_ref().unwrap(), gradient([20, 30]));
    assert_eq!(
        (folder.classes(), folder.class_counts()),
        (&["a".to_owned(), "b".into()][..], vec![4, 4])
    );
    assert_eq!((folder.label(3), folder.label(4)), (0, 1));
}

/// Every cut of every format is an error, never a picture in part.
#[test]
fn dat_2_no_cut_is_a_picture() {
    for (format, content) in [
        (Format::Jpeg, jpeg(&gradient([40, 40]), false)),
        (Format::Jpeg, jpeg(&gradient([40, 40]), true)),
        (Format::Png, png([9, 10], png::ColorType::Rgb, png::BitDepth::Eight, &[7; 270])),
        (Format::Webp, webp(&gradient([20, 20]))),
    ] {
        assert_eq!(probe(Path::new("x"), &content, &Decode::rgb()).unwrap().0, format);
        rgb(&content).unwrap();
        // Bytes that hold no pixels may go: JPEG's end mark, PNG's end chunk, a checksum.
        let n_decoded: Vec<usize> =
            (0..content.len() - 2).filter(|&end| rgb(&content[..end]).is_ok()).collect();
        assert!(n_decoded.is_empty(), "{format}, {} bytes: {n_decoded:?}", content.len());
    }
}

#[test]
fn dat_2_channels_and_scale_are_the_declared_ones() {
    use png::{
        BitDepth::{Eight, One, Sixteen},
        ColorType,
    };
    let wide = |values: &[u16]| values.iter().flat_map(|v| v.to_be_bytes()).collect::<Vec<u8>>();
    let white = [255, 255, 255];
    for (content, want) in [
        (png([1, 1], ColorType::Grayscale, Eight, &[100]), [100, 100, 100]),
        (png([1, 1], ColorType::Grayscale, One, &[0x80]), white),
        (png([1, 1], ColorType::Grayscale, Sixteen, &wide(&[0x7fff])), [127, 127, 127]),
        (png([1, 1], ColorType::Rgb, Sixteen, &wide(&[u16::MAX, 0, 257 * 9])), [255, 0, 9]),
        (png([1, 1], ColorType::GrayscaleAlpha, Eight, &[70, 0]), [70, 70, 70]),
        (png([1, 1], ColorType::Rgba, Eight, &[1, 2, 3, 0]), [1, 2, 3]),
        (png([1, 1], ColorType::Rgba, Sixteen, &wide(&[257, 514, 771, 9])), [1, 2, 3]),
    ] {
        let image = rgb(&content).unwrap();
        assert_eq!((image.channels(), image.pixels()), (Channels::Rgb, &want[..]));
        let grey = decode(Path::new("g"), &content, &Decode::grey()).unwrap();
        assert_eq!((grey.channels(), grey.pixels().len()), (Channels::Grey, 1));
        let options = Decode { channels: Channels::Rgba, ..Decode::rgb() };
        assert_eq!(decode(Path::new("g"), &content, &options).unwrap().pixels()[..3], want);
    }
    let grey_jpeg = jpeg(&Image::new([8, 8], Channels::Grey, vec![90; 64]).unwrap(), false);
    assert_eq!(rgb(&grey_jpeg).unwrap().pixels()[..3], [90, 90, 90]);
    assert!(distance(&rgb(&jpeg(&gradient([32, 48]), false)).unwrap(), &gradient([32, 48])) < 12);
    assert!(distance(&rgb(&jpeg(&gradient([32, 48]), true)).unwrap(), &gradient([32, 48])) < 12);
    assert_eq!(rgb(&webp(&gradient([5, 7]))).unwrap(), gradient([5, 7]));
}

/// A fourth byte that says nothing changes no colour, whatever is done to the image.
#[test]
fn four_bytes_a_pixel_are_the_same_colours() {
    let options = Decode { channels: Channels::Rgbx, ..Decode::rgb() };
    let picture = gradient([24, 40]);
    let changes = [Augment::random_resized_crop([16, 18]), Augment::Flip { probability: 0.5 }];
    let grey = picture.clone().with_channels(Channels::Grey);
    let jpegs = [jpeg(&picture, false), jpeg(&picture, true), jpeg(&grey, false)];
    for content in jpegs.into_iter().chain([encode_png(&picture).unwrap(), webp(&picture)]) {
        let four = decode(Path::new("x"), &content, &options).unwrap();
        assert_eq!((four.channels(), four.pixels().len()), (Channels::Rgbx, 24 * 40 * 4));
        let three = rgb(&content).unwrap();
        assert_eq!(four.clone().with_channels(Channels::Rgb), three);
        assert_eq!(
            rgb(&encode_png(&four).unwrap()).unwrap(),
            four.clone().with_channels(Channels::Rgb)
        );
        for key in 0..20 {
            let padded = apply(&changes, four.clone(), key).unwrap();
            let want = apply(&changes, four.clone().with_channels(Channels::Rgb), key).unwrap();
            assert_eq!(padded.with_channels(Channels::Rgb), want, "{key}");
        }
    }
}

/// EXIF metadata with a number of another kind before the orientation.
fn exif(orientation: u16, is_little: bool) -> Vec<u8> {
    let two = |n: u16| if is_little { n.to_le_bytes() } else { n.to_be_bytes() };
    let four = |n: u32| if is_little { n.to_le_bytes() } else { n.to_be_bytes() };
    let entry = |tag, value: u16| [&two(tag)[..], &two(3), &four(1), &two(value), &[0; 2]].concat();
    let start = if is_little { b"II" } else { b"MM" };
    [&start[..], &two(42), &four(8), &two(2), &entry(0x0100, 6), &entry(0x0112, orientation)]
        .concat()
}

/// The picture as the standard has it stored: which sides its first row and first column are.
fn stored(picture: &Image, orientation: u16) -> Image {
    let [height, width] = picture.size();
    let turned = orientation >= 5;
    let size = if turned { [width, height] } else { [height, width] };
    let seen_at = |row: usize, column: usize| match orientation {
        1 => (row, column),                          // top, left
        2 => (row, width - 1 - column),              // top, right
        3 => (height - 1 - row, width - 1 - column), // bottom, right
        4 => (height - 1 - row, column),             // bottom, left
        5 => (column, row),                          // left, top
        6 => (column, width - 1 - row),              // right, top
        7 => (height - 1 - column, width - 1 - row), // right, bottom
        _ => (height - 1 - column, row),             // left, bottom
    };
    let pixel = |i: usize| {
        let (y, x) = seen_at(i / size[1], i % size[1]);
        &picture.pixels()[(y * width + x) * 3..][..3]
    };
    let pixels = (0..height * width).flat_map(pixel).copied().collect();
    Image::new(size, Channels::Rgb, pixels).unwrap()
}

#[test]
fn a_picture_is_as_it_was_seen_whatever_its_orientation() {
    let picture = gradient([24, 40]);
    for (orientation, is_little) in (1..=8).flat_map(|n| [(n, false), (n, true)]) {
        let (image, exif) = (stored(&picture, orientation), exif(orientation, is_little));
        let [height, width] = image.size().map(|side| side as u32);

        let mut content = Vec::new();
        let mut encoder = jpeg_encoder::Encoder::new(&mut content, 95);
        encoder.add_app_segment(1, &[b"Exif\0\0", &exif[..]].concat()).unwrap();
        let rgb_type = jpeg_encoder::ColorType::Rgb;
        encoder.encode(image.pixels(), width as u16, height as u16, rgb_type).unwrap();
        assert!(distance(&rgb(&content).unwrap(), &picture) < 12, "{orientation}");
        assert_eq!(probe(Path::new("x"), &content, &Decode::rgb()).unwrap().1, [24, 40]);

        let mut content = Vec::new();
        let mut info = png::Info::with_size(width, height);
        (info.color_type, info.bit_depth) = (png::ColorType::Rgb, png::BitDepth::Eight);
        info.exif_metadata = Some(exif.clone().into());
        let encoder = png::Encoder::with_info(&mut content, info).unwrap();
        encoder.write_header().unwrap().write_image_data(image.pixels()).unwrap();
        assert_eq!(rgb(&content).unwrap(), picture, "{orientation}");

        let mut content = Vec::new();
        let mut encoder = image_webp::WebPEncoder::new(&mut content);
        encoder.set_exif_metadata(exif);
        let rgb_type = image_webp::ColorType::Rgb8;
        encoder.encode(image.pixels(), width, height, rgb_type).unwrap();
        assert_eq!(rgb(&content).unwrap(), picture, "{orientation}");
        assert_eq!(probe(Path::new("x"), &content, &Decode::rgb()).unwrap().1, [24, 40]);
    }
}

/// Metadata that cannot be read say nothing: the picture is taken as it lies.
#[test]
fn damaged_orientations_turn_nothing() {
    let picture = gradient([10, 12]);
    let whole = exif(6, true);
    let cut = (0..whole.len()).map(|end| whole[..end].to_vec());
    let wrong = [exif(0, true), exif(9, false), exif(u16::MAX, true), vec![0xff; 40]];
    let far = {
        let mut far = whole.clone();
        far[4..8].copy_from_slice(&[0xff; 4]);
        far
    };
    for exif in cut.filter(|cut| cut.len() < 32).chain(wrong).chain([far]) {
        let mut content = Vec::new();
        let mut encoder = jpeg_encoder::Encoder::new(&mut content, 95);
        encoder.add_app_segment(1, &[b"Exif\0\0", &exif[..]].concat()).unwrap();
        encoder.encode(picture.pixels(), 12, 10, jpeg_encoder::ColorType::Rgb).unwrap();
        assert!(distance(&rgb(&content).unwrap(), &picture) < 12, "{exif:?}");
    }
}

#[test]
fn what_is_no_image_or_too_large_is_named() {
    let limit = Decode { max_pixels: 99, ..Decode::rgb() };
    for (content, options, needle) in [
        (b"GIF89a....".to_vec(), Decode::rgb(), "a GIF; JPEG, PNG and WebP are read"),
        (b"words".to_vec(), Decode::rgb(), "it starts with the bytes [77, 6f, 72, 64, 73]"),
        (jpeg(&gradient([10, 10]), false), limit, "10 x 10 pixels, 1 to 99 are allowed"),
        (encode_png(&gradient([10, 10])).unwrap(), limit, "10 x 10 pixels, 1 to 99"),
        (webp(&gradient([10, 10])), limit, "10 x 10 pixels, 1 to 99"),
    ] {
        let error = decode(Path::new("the.file"), &content, &options).unwrap_err().to_string();
        assert!(error.starts_with("`the.file`") && error.contains(needle), "{error}");
    }
}

#[test]
fn a_file_that_vanished_and_a_folder_without_images() {
    let root = folder_of_8("vanished");
    let folder = ImageFolder::open(&root).unwrap();
    std::fs::remove_file(folder.path(2)).unwrap();
    assert!(matches!(folder.get(2), Err(Error::NotFound { path }) if path == folder.path(2)));
    assert!(matches!(folder.get(8), Err(Error::Index { index: 8, n_samples: 8, .. })));
    let empty = common::folder("no_images");
    std::fs::write(empty.join("notes.txt"), "x").unwrap();
    let error = ImageFolder::open(&empty).unwrap_err().to_string();
    assert!(
        error.contains("holds no file `*.jpg") && error.contains("it holds `notes.txt`"),
        "{error}"
    );
    assert!(matches!(ImageFolder::open("no/such"), Err(Error::NotFound { .. })));
}

/// Nobody writes to it: whoever opens it waits for ever.
#[test]
#[cfg(unix)]
fn a_pipe_is_refused_not_waited_for() {
    let root = folder_of_8("pipe");
    let pipe = root.join("a/pipe.jpg");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let folder = ImageFolder::open(&root).unwrap();
    let index = (0..folder.n_samples()).find(|&index| folder.path(index) == pipe).unwrap();
    let errors = [folder.get(index).unwrap_err(), Input::open(&pipe).unwrap_err()];
    for error in errors {
        assert!(error.is_of_one_sample());
        assert!(
            error
                .to_string()
                .ends_with("pipe.jpg`: a pipe or a device, which cannot be read at any place"),
            "{error}"
        );
    }
}

#[test]
fn a_list_names_files_and_classes() {
    let root = folder_of_8("list");
    let list = "b/png_inside.jpg\t7\n\na/0.jpg 3\na/1.jpg\nb/9.jpg 1\na/0.jpg x\n";
    let list = ImageList::open(Input::new("list.txt", list.as_bytes().to_vec()), &root).unwrap();
    assert_eq!(
        (list.n_samples(), list.get(0).unwrap().label, list.get(1).unwrap().label),
        (5, 7, 3)
    );
    for (index, needle) in [
        (2, "`list.txt` at byte 30: a path and a class"),
        (3, "b/9.jpg` does not exist"),
        (4, "the class after the path is no number"),
    ] {
        let error = list.get(index).unwrap_err().to_string();
        assert!(error.contains(needle), "{error}");
    }
}

#[test]
fn resizing_keeps_flat_colour_and_averages() {
    let flat = Image::new([30, 50], Channels::Rgb, [10, 20, 30].repeat(1500)).unwrap();
    for filter in [Filter::Nearest, Filter::Bilinear, Filter::Bicubic, Filter::Lanczos] {
        for size in [[7, 11], [60, 90], [30, 50]] {
            let image = resize(&flat, Region::whole([30, 50]), size, filter).unwrap();
            assert_eq!(
                (image.size(), image.pixels()),
                (size, &[10, 20, 30].repeat(size[0] * size[1])[..])
            );
        }
    }
    let checks = Image::new([2, 2], Channels::Grey, vec![0, 255, 255, 0]).unwrap();
    let one = resize(&checks, Region::whole([2, 2]), [1, 1], Filter::Bilinear).unwrap();
    assert!(one.pixels()[0].abs_diff(128) <= 1, "{}", one.pixels()[0]);
    let region = Region { top: 1, left: 0, size: [1, 2] };
    assert_eq!(resize(&checks, region, [1, 2], Filter::Lanczos).unwrap().pixels(), [255, 0]);
    let outside = Region { top: 1, left: 1, size: [1, 2] };
    assert!(matches!(resize(&checks, outside, [1, 1], Filter::Nearest), Err(Error::Region { .. })));
    assert!(matches!(
        resize(&checks, Region::whole([2, 2]), [0, 1], Filter::Nearest),
        Err(Error::Size { .. })
    ));
}

#[test]
fn random_changes_are_functions_of_the_key() {
    let image = gradient([40, 50]);
    let changes = [
        Augment::random_resized_crop([24, 24]),
        Augment::Flip { probability: 0.5 },
        Augment::RandomCrop { size: [24, 24], padding: 4 },
    ];
    let of = |seed, epoch, index| {
        apply(&changes, image.clone(), sample_key(seed, epoch, index)).unwrap()
    };
    let results: Vec<Image> = (0..60).map(|i| of(i % 3, i / 3 % 4, i / 12)).collect();
    assert!(results.iter().all(|r| r.size() == [24, 24]));
    assert_eq!(of(1, 2, 3), of(1, 2, 3));
    let different = results.iter().enumerate().all(|(i, a)| results[..i].iter().all(|b| a != b));
    assert!(different, "each seed, epoch and index has its own changes");
}

/// Shares, corners and sides are what the definition says, over many keys.
#[test]
fn random_changes_have_the_stated_ranges() {
    let (image, n) = (gradient([1, 2]), 4000);
    let n_flipped = (0..n)
        .filter(|&i| {
            apply(&[Augment::Flip { probability: 0.25 }], image.clone(), sample_key(1, 0, i))
                .unwrap()
                != image
        })
        .count() as f64;
    // Four standard deviations of the count.
    assert!((n_flipped - 1000.0).abs() < 4.0 * (4000.0f64 * 0.25 * 0.75).sqrt(), "{n_flipped}");
    let dot = Image::new([1, 1], Channels::Grey, vec![9]).unwrap();
    let mut seen = [0; 9];
    for i in 0..900 {
        let crop = Augment::RandomCrop { size: [1, 1], padding: 1 };
        let out = apply(
            &[crop, Augment::Resize { size: [1, 1], filter: Filter::Nearest }],
            dot.clone(),
            i,
        )
        .unwrap();
        seen[usize::from(out.pixels()[0] == 9)] += 1;
    }
    // One of nine places holds the dot.
    assert!((60..140).contains(&seen[1]) && seen[0] + seen[1] == 900, "{seen:?}");
}

#[test]
fn crops_reach_beyond_the_image_and_sides_keep_the_shape() {
    let image = Image::new([2, 2], Channels::Grey, vec![1, 2, 3, 4]).unwrap();
    let crop = |size| apply(&[Augment::CenterCrop { size }], image.clone(), 0).unwrap();
    assert_eq!(crop([4, 4]).pixels(), [0, 0, 0, 0, 0, 1, 2, 0, 0, 3, 4, 0, 0, 0, 0, 0]);
    assert_eq!(crop([1, 2]).pixels(), [1, 2]);
    assert_eq!(crop([1, 4]).pixels(), [0, 1, 2, 0]);
    let side = Augment::ShortSide { pixels: 10, filter: Filter::Bilinear };
    assert_eq!(apply(&[side], gradient([30, 20]), 0).unwrap().size(), [15, 10]);
    let flip = Augment::Flip { probability: 1.0 };
    assert_eq!(apply(&[flip], image.clone(), 0).unwrap().pixels(), [2, 1, 4, 3]);
    for size in [[0, 3], [usize::MAX, usize::MAX]] {
        assert!(matches!(
            apply(&[Augment::CenterCrop { size }], image.clone(), 0),
            Err(Error::Size { .. })
        ));
    }
}

#[test]
fn planes_are_normalised_by_their_own_constants() {
    let image = Image::new([1, 2], Channels::Rgb, vec![0, 255, 51, 255, 0, 51]).unwrap();
    let normalise = Normalise::new(Channels::Rgb, &[0.0, 0.5, 0.2], &[1.0, 0.5, 2.0]).unwrap();
    let tensor = normalise.to_tensor(&image, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(tensor.dims(), [3, 1, 2]);
    let want = [0.0, 1.0, 1.0, -1.0, 0.0, 0.0];
    let got = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    // One rounding of a value near 1.
    assert!(
        got.iter().zip(want).all(|(got, want): (&f32, f32)| (got - want).abs() <= f32::EPSILON),
        "{got:?}"
    );
    assert!(Normalise::new(Channels::Grey, &[0.0, 0.0], &[1.0]).is_err());
    assert!(Normalise::new(Channels::Grey, &[0.0], &[0.0]).is_err());
    let grey = Image::new([1, 1], Channels::Grey, vec![1]).unwrap();
    assert!(normalise.to_tensor(&grey, DType::F32, &Device::Cpu).is_err());
}

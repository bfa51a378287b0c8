use super::{
    Image,
    convert::{Channels, convert, narrow},
    orient::Orientation,
};
use crate::error::{Error, Result};
use std::{
    fmt,
    io::Cursor,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};
use zune_jpeg::{
    JpegDecoder,
    errors::DecodeErrors,
    zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions},
};

/// What a file of an image is, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the formats")]
pub enum Format {
    Jpeg,
    Png,
    Webp,
}

impl Format {
    /// The format that `content` starts like, whatever its name says.
    pub fn of(content: &[u8]) -> Option<Self> {
        match content {
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a, ..] => Some(Self::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::Webp),
            _ => None,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Jpeg => "JPEG",
            Self::Png => "PNG",
            Self::Webp => "WebP",
        })
    }
}

/// What decoding gives, and what it may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decode {
    /// Every image has these, whatever its file has.
    pub channels: Channels,
    /// Larger images are refused before room is made for them.
    pub max_pixels: u64,
}

impl Decode {
    /// Three colours, up to 64 million pixels.
    pub const fn rgb() -> Self {
        Self { channels: Channels::Rgb, max_pixels: 64_000_000 }
    }

    /// Brightness, up to 64 million pixels.
    pub const fn grey() -> Self {
        Self { channels: Channels::Grey, max_pixels: 64_000_000 }
    }
}

/// Most bytes that decoding an image of `n_pixels` from a file of `file_bytes` holds at once, the
/// result included: up to four channels of 16 bits, twice, a progressive JPEG's coefficients, tables,
/// and metadata, which may be as large as the file.
pub const fn decode_bytes(n_pixels: u64, file_bytes: u64) -> u64 {
    20 * n_pixels + 4 * file_bytes + (1 << 20)
}

/// Most bytes that [`decode`] holds at once for the file `content`, the result included, by its header:
/// less than [`decode_bytes`] knows of every file.
/// # Errors
/// Those of [`probe`].
pub fn decoding_bytes(name: &Path, content: &[u8], options: &Decode) -> Result<u64> {
    let (format, [height, width]) = probe(name, content, options)?;
    let (n_pixels, file_bytes) = (height as u64 * width as u64, content.len() as u64);
    if format != Format::Jpeg {
        return Ok(decode_bytes(n_pixels, file_bytes));
    }
    // Colours, and these as other channels or turned; coefficients of up to four components; rows.
    let copies = 4 + 4;
    let coefficients = if is_progressive(content) { 8 } else { 0 };
    let rows = ROWS_BYTES * height.max(width) as u64;
    Ok((copies + coefficients) * n_pixels + rows + file_bytes + (1 << 16))
}

/// Bytes for each column in the rows that a JPEG decoder works on.
const ROWS_BYTES: u64 = 512;

/// Decodes the JPEG, PNG or WebP file `content`; errors call it `name`.
///
/// Samples of 16 bits are scaled to 8, grey and colour become each other by BT.601, opacity is
/// dropped unless it is asked for. Of an animation it is the first picture. The orientation in EXIF
/// metadata is applied: the picture is as it was seen. Holds [`decode_bytes`].
/// # Errors
/// If it is none of these, is damaged or cut short, or has more pixels than allowed.
pub fn decode(name: &Path, content: &[u8], options: &Decode) -> Result<Image> {
    let file = File { name, content, options };
    // The decoders are meant not to panic; if one does, it is the file's fault all the same.
    catch_unwind(AssertUnwindSafe(|| match file.format()? {
        Format::Jpeg => file.jpeg(),
        Format::Png => file.png(),
        Format::Webp => file.webp(),
    }))
    .unwrap_or_else(|_| Err(file.corrupt("the decoder could not cope with it")))
}

/// The format of `content` and the size `[H, W]` that it decodes to, by its header; no pixel is decoded.
/// # Errors
/// Those of [`decode`] that the header shows.
pub fn probe(name: &Path, content: &[u8], options: &Decode) -> Result<(Format, [usize; 2])> {
    let file = File { name, content, options };
    catch_unwind(AssertUnwindSafe(|| {
        let format = file.format()?;
        let size = match format {
            Format::Jpeg => {
                let (decoder, size) = file.jpeg_header()?;
                jpeg_orientation(&decoder).size(size)
            }
            Format::Png => {
                let (reader, size) = file.png_header()?;
                png_orientation(&reader).size(size)
            }
            Format::Webp => {
                let (mut decoder, size) = file.webp_header()?;
                webp_orientation(&mut decoder).size(size)
            }
        };
        Ok((format, size))
    }))
    .unwrap_or_else(|_| Err(file.corrupt("the decoder could not cope with it")))
}

struct File<'a> {
    name: &'a Path,
    content: &'a [u8],
    options: &'a Decode,
}

type Jpeg<'a> = JpegDecoder<ZCursor<&'a [u8]>>;
type Png<'a> = png::Reader<Cursor<&'a [u8]>>;
type Webp<'a> = image_webp::WebPDecoder<Cursor<&'a [u8]>>;

impl<'a> File<'a> {
    fn corrupt(&self, reason: impl Into<String>) -> Error {
        Error::Corrupt { path: self.name.to_owned(), offset: None, reason: reason.into() }
    }

    fn format(&self) -> Result<Format> {
        Format::of(self.content).ok_or_else(|| match self.content {
            [] => self.corrupt("the file is empty"),
            [b'G', b'I', b'F', ..] => self.corrupt("a GIF; JPEG, PNG and WebP are read"),
            [b'B', b'M', ..] => self.corrupt("a BMP; JPEG, PNG and WebP are read"),
            start => {
                let start = &start[..start.len().min(8)];
                self.corrupt(format!("no JPEG, PNG or WebP, it starts with the bytes {start:02x?}"))
            }
        })
    }

    fn fits(&self, height: u64, width: u64) -> Result<[usize; 2]> {
        let n_pixels = height.saturating_mul(width);
        let max_pixels = self.options.max_pixels;
        if n_pixels == 0 || n_pixels > max_pixels {
            let reason = format!("{height} x {width} pixels, 1 to {max_pixels} are allowed");
            return Err(self.corrupt(reason));
        }
        Ok([height as usize, width as usize])
    }

    fn image(&self, size: [usize; 2], n_channels: usize, pixels: Vec<u8>) -> Result<Image> {
        let channels = self.options.channels;
        Image::new(size, channels, convert(pixels, n_channels, channels))
            .map_err(|error| self.corrupt(error.to_string()))
    }

    fn jpeg_header(&self) -> Result<(Jpeg<'a>, [usize; 2])> {
        const SIDE: usize = u16::MAX as usize;
        let options = DecoderOptions::default().set_strict_mode(true);
        let options = options.set_max_width(SIDE).set_max_height(SIDE);
        // How colours are written is settled while the header is read, whatever is asked for later.
        let options = match self.options.channels.count() {
            4 => options.jpeg_set_out_colorspace(ColorSpace::RGBA),
            _ => options,
        };
        let mut decoder = JpegDecoder::new_with_options(ZCursor::new(self.content), options);
        decoder.decode_headers().map_err(|error| self.jpeg_fault(&error))?;
        let info = decoder.info().ok_or_else(|| self.corrupt("JPEG: no header"))?;
        let size = self.fits(info.height.into(), info.width.into())?;
        Ok((decoder, size))
    }

    fn jpeg(&self) -> Result<Image> {
        let (mut decoder, size) = self.jpeg_header()?;
        if is_cut(self.content) {
            return Err(self.corrupt("JPEG: cut short, there is no end mark after the scans"));
        }
        let is_grey = decoder.input_colorspace() == Some(ColorSpace::Luma);
        let (space, n_channels) = match self.options.channels {
            _ if is_grey => (ColorSpace::Luma, 1),
            Channels::Rgba | Channels::Rgbx => (ColorSpace::RGBA, 4),
            Channels::Grey | Channels::Rgb => (ColorSpace::RGB, 3),
        };
        let options = DecoderOptions::default().set_strict_mode(true);
        decoder.set_options(options.jpeg_set_out_colorspace(space));
        let mut pixels = vec![0; size[0] * size[1] * n_channels];
        decoder.decode_into(&mut pixels).map_err(|error| self.jpeg_fault(&error))?;
        Ok(jpeg_orientation(&decoder).upright(self.image(size, n_channels, pixels)?))
    }

    /// Some of the decoder's messages end a line.
    fn jpeg_fault(&self, error: &DecodeErrors) -> Error {
        self.corrupt(format!("JPEG: {error:?}").trim_end())
    }

    fn png_header(&self) -> Result<(Png<'a>, [usize; 2])> {
        let room = decode_bytes(self.options.max_pixels, self.content.len() as u64);
        let limits = png::Limits { bytes: usize::try_from(room).unwrap_or(usize::MAX) };
        let mut decoder = png::Decoder::new_with_limits(Cursor::new(self.content), limits);
        decoder.set_transformations(png::Transformations::EXPAND);
        decoder.set_ignore_text_chunk(true);
        decoder.set_ignore_iccp_chunk(true);
        let fault = |error: png::DecodingError| self.corrupt(format!("PNG: {error}"));
        let info = decoder.read_header_info().map_err(fault)?;
        let size = self.fits(info.height.into(), info.width.into())?;
        Ok((decoder.read_info().map_err(fault)?, size))
    }

    fn png(&self) -> Result<Image> {
        let (mut reader, size) = self.png_header()?;
        let fault = |error: png::DecodingError| self.corrupt(format!("PNG: {error}"));
        let n_bytes = reader.output_buffer_size().ok_or_else(|| self.corrupt("PNG: too large"))?;
        let mut pixels = vec![0; n_bytes];
        let frame = reader.next_frame(&mut pixels).map_err(fault)?;
        pixels.truncate(frame.buffer_size());
        // Checksums of the data and the end of the file are read here.
        reader.finish().map_err(fault)?;
        if frame.bit_depth == png::BitDepth::Sixteen {
            pixels = narrow(&pixels);
        }
        let image = self.image(size, frame.color_type.samples(), pixels)?;
        Ok(png_orientation(&reader).upright(image))
    }

    fn webp_header(&self) -> Result<(Webp<'a>, [usize; 2])> {
        let mut decoder = image_webp::WebPDecoder::new(Cursor::new(self.content))
            .map_err(|error| self.corrupt(format!("WebP: {error}")))?;
        let room = decode_bytes(self.options.max_pixels, self.content.len() as u64);
        decoder.set_memory_limit(usize::try_from(room).unwrap_or(usize::MAX));
        let (width, height) = decoder.dimensions();
        Ok((decoder, self.fits(height.into(), width.into())?))
    }

    fn webp(&self) -> Result<Image> {
        let (mut decoder, size) = self.webp_header()?;
        let n_channels = if decoder.has_alpha() { 4 } else { 3 };
        let mut pixels = vec![0; size[0] * size[1] * n_channels];
        decoder.read_image(&mut pixels).map_err(|error| self.corrupt(format!("WebP: {error}")))?;
        Ok(webp_orientation(&mut decoder).upright(self.image(size, n_channels, pixels)?))
    }
}

fn jpeg_orientation(decoder: &Jpeg<'_>) -> Orientation {
    Orientation::of(decoder.exif().map(Vec::as_slice))
}

fn png_orientation(reader: &Png<'_>) -> Orientation {
    Orientation::of(reader.info().exif_metadata.as_deref())
}

/// Metadata that cannot be read say nothing: the picture is whole.
fn webp_orientation(decoder: &mut Webp<'_>) -> Orientation {
    Orientation::of(decoder.exif_metadata().ok().flatten().as_deref())
}

/// Whether a JPEG lacks its end mark: the decoder takes the last bits of a picture for zeros where
/// they are missing, and says nothing.
fn is_cut(content: &[u8]) -> bool {
    // Within a scan 0xff is never followed by 0xd9; a thumbnail's end mark is before it.
    let scan = segments(content).find(|(marker, _)| *marker == 0xda);
    scan.is_some_and(|(_, at)| !content[at..].windows(2).any(|pair| pair == [0xff, 0xd9]))
}

/// Whether a JPEG comes in several scans, whose coefficients wait for each other.
fn is_progressive(content: &[u8]) -> bool {
    segments(content).take_while(|(marker, _)| *marker != 0xda).any(|(marker, _)| marker == 0xc2)
}

/// Markers of a JPEG up to its first scan, and where they are.
fn segments(content: &[u8]) -> impl Iterator<Item = (u8, usize)> {
    let mut at = 2;
    std::iter::from_fn(move || {
        let Some([0xff, marker, high, low]) = content.get(at..at + 4) else { return None };
        let here = at;
        at += 2 + usize::from(u16::from_be_bytes([*high, *low]));
        Some((*marker, here))
    })
}

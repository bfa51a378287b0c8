use super::input::Input;
use crate::{error::Result, source::Source};
use std::{
    io::{self, Read},
    sync::Arc,
};
use tar::Archive;

const BLOCK_BYTES: u64 = 512;

/// The members of one sample of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TarSample {
    /// The members' common name, with its folder.
    pub key: String,
    /// What follows the key's first dot, in lower case, and the content, in the file's order.
    pub members: Vec<(String, Vec<u8>)>,
}

impl TarSample {
    /// The content of the member with the ending `ending`.
    pub fn member(&self, ending: &str) -> Option<&[u8]> {
        self.members.iter().find(|(name, _)| name == ending).map(|(_, bytes)| &bytes[..])
    }
}

/// 24 bytes: where a sample lies, and its key's hash.
#[derive(Clone, Copy, Debug)]
struct Extent {
    start: u64,
    end: u64,
    hash: u64,
}

/// Samples of a WebDataset tar file: members that follow each other and share a key.
///
/// Opening it reads the headers and keeps 24 bytes for each sample; a sample is read when it is asked
/// for. A key that comes again later, a member cut off, a missing end of the archive and a sample
/// without a required member are errors: there are no half samples.
#[derive(Clone, Debug)]
pub struct TarShard {
    input: Input,
    extents: Arc<[Extent]>,
    /// Endings of the members that are read; `None`: all.
    only: Option<Arc<[String]>>,
}

impl TarShard {
    /// Finds the samples of `input`; each must have a member with each ending in `required`.
    /// # Errors
    /// If the file is cut short or damaged, keys are interleaved, or a member is missing.
    pub fn open(input: Input, required: &[&str]) -> Result<Self> {
        let mut scan = Scan::new(&input, required);
        scan.run()?;
        let extents = scan.extents.into();
        let shard = Self { input, extents, only: None };
        shard.check_keys()?;
        Ok(shard)
    }

    /// The same samples, of which only members with these endings are read. Shares what is held.
    #[must_use]
    pub fn only(&self, endings: &[&str]) -> Self {
        let only = endings.iter().map(|ending| (*ending).to_owned()).collect();
        Self { only: Some(only), ..self.clone() }
    }

    /// Bytes held: 24 for each sample.
    pub fn held_bytes(&self) -> u64 {
        (self.extents.len() * size_of::<Extent>()) as u64
    }

    /// Equal hashes are looked at: a key that was there before is an error.
    fn check_keys(&self) -> Result<()> {
        let mut order: Vec<u32> = (0..self.extents.len() as u32).collect();
        let hash = |&place: &u32| self.extents[place as usize].hash;
        order.sort_unstable_by_key(|place| (hash(place), *place));
        for pair in order.windows(2).filter(|pair| hash(&pair[0]) == hash(&pair[1])) {
            let [first, second] = [pair[0], pair[1]].map(|place| self.key(u64::from(place)));
            let (first, second) = (first?, second?);
            if first == second {
                let offset = self.extents[pair[1] as usize].start;
                let reason = format!(
                    "members of `{second}` are interleaved with others, or it is there twice"
                );
                return Err(self.input.corrupt(offset, reason));
            }
        }
        Ok(())
    }

    fn key(&self, index: u64) -> Result<String> {
        let extent = self.extents[index as usize];
        let fault = |error: io::Error| self.input.corrupt(extent.start, error.to_string());
        let mut archive =
            Archive::new(self.input.reader(extent.start).take(extent.end - extent.start));
        for entry in archive.entries().map_err(fault)? {
            let entry = entry.map_err(fault)?;
            if let Some((key, _)) = split(&entry.path_bytes()) {
                return Ok(key);
            }
        }
        Ok(String::new())
    }
}

impl Source for TarShard {
    type Item = TarSample;

    fn n_samples(&self) -> u64 {
        self.extents.len() as u64
    }

    fn get(&self, index: u64) -> Result<TarSample> {
        if index >= self.n_samples() {
            return Err(self.input.out_of_range(index, self.n_samples()));
        }
        let Extent { start, end, .. } = self.extents[index as usize];
        // A file cut since would look like one that ends here.
        self.input.read_exact(end - 1, &mut [0])?;
        let fault = |error: io::Error| self.input.corrupt(start, error.to_string());
        let mut sample = TarSample { key: String::new(), members: Vec::new() };
        let mut archive = Archive::new(self.input.reader(start).take(end - start));
        for entry in archive.entries().map_err(fault)? {
            let entry = entry.map_err(fault)?;
            let Some((key, ending)) = split(&entry.path_bytes()).filter(|_| is_file(&entry)) else {
                continue;
            };
            sample.key = key;
            if self.only.as_ref().is_some_and(|only| !only.contains(&ending)) {
                continue;
            }
            // The scan has seen that the member lies within the file.
            let bytes = self.input.read_vec(start + entry.raw_file_position(), entry.size())?;
            sample.members.push((ending, bytes));
        }
        Ok(sample)
    }

    fn name(&self, index: u64) -> String {
        let key = self.key(index).unwrap_or_else(|_| format!("sample {index}"));
        format!("{}: {key}", self.input.path().display())
    }
}

fn is_file<R: Read>(entry: &tar::Entry<'_, R>) -> bool {
    entry.header().entry_type().is_file() || entry.header().entry_type().is_contiguous()
}

/// The key and ending of a member: the last part of its path is split at its first dot.
fn split(path: &[u8]) -> Option<(String, String)> {
    let path = std::str::from_utf8(path).ok()?;
    let name_at = path.rfind('/').map_or(0, |slash| slash + 1);
    let dot = path[name_at..].find('.').filter(|&dot| dot > 0)? + name_at;
    Some((path[..dot].to_owned(), path[dot + 1..].to_lowercase()))
}

/// FNV-1a of a key; equal ones are compared afterwards.
fn hash(key: &str) -> u64 {
    key.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// One pass over the headers.
struct Scan<'a> {
    input: &'a Input,
    required: &'a [&'a str],
    extents: Vec<Extent>,
    key: Option<String>,
    endings: Vec<String>,
    end: u64,
}

impl<'a> Scan<'a> {
    fn new(input: &'a Input, required: &'a [&'a str]) -> Self {
        Self { input, required, extents: Vec::new(), key: None, endings: Vec::new(), end: 0 }
    }

    fn run(&mut self) -> Result<()> {
        let input = self.input;
        let mut archive = Archive::new(input.reader(0));
        let unreadable =
            |at: u64, error: io::Error| input.corrupt(at, format!("not a whole tar file: {error}"));
        for entry in archive.entries_with_seek().map_err(|error| unreadable(0, error))? {
            let entry = entry.map_err(|error| unreadable(self.end, error))?;
            self.add(&entry)?;
        }
        self.close()?;
        // Without this mark nobody can tell whether members are missing.
        let mark = self.input.read_vec(self.end, BLOCK_BYTES)?;
        match mark.iter().all(|&byte| byte == 0) {
            true => Ok(()),
            false => Err(self.input.corrupt(self.end, "no end of the archive here, and no member")),
        }
    }

    fn add<R: Read>(&mut self, entry: &tar::Entry<'_, R>) -> Result<()> {
        let start = self.end;
        let (data, n_bytes) = (entry.raw_file_position(), entry.size());
        let left_bytes = self.input.n_bytes().saturating_sub(data);
        if n_bytes > left_bytes {
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let reason = format!(
                "member `{name}` is cut short, {n_bytes} bytes are announced and {left_bytes} follow"
            );
            return Err(self.input.corrupt(data, reason));
        }
        let end = data + n_bytes.next_multiple_of(BLOCK_BYTES);
        let member = split(&entry.path_bytes()).filter(|_| is_file(entry));
        match member {
            None => {}
            Some((key, ending)) if self.key.as_ref() == Some(&key) => {
                if self.endings.contains(&ending) {
                    let reason = format!("sample `{key}` has two members `{ending}`");
                    return Err(self.input.corrupt(start, reason));
                }
                self.endings.push(ending);
                if let Some(last) = self.extents.last_mut() {
                    last.end = end;
                }
            }
            Some((key, ending)) => {
                self.close()?;
                self.extents.push(Extent { start, end, hash: hash(&key) });
                (self.key, self.endings) = (Some(key), vec![ending]);
            }
        }
        self.end = end;
        Ok(())
    }

    /// The sample is complete: it must have what is required.
    fn close(&mut self) -> Result<()> {
        let (Some(key), Some(last)) = (&self.key, self.extents.last()) else { return Ok(()) };
        let is_missing = |ending: &&&str| !self.endings.iter().any(|found| found == **ending);
        match self.required.iter().find(is_missing) {
            None => Ok(()),
            Some(missing) => {
                let found = self.endings.join("`, `");
                let reason = format!("sample `{key}` has no member `{missing}`, only `{found}`");
                Err(self.input.corrupt(last.start, reason))
            }
        }
    }
}

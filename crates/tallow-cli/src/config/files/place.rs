//! What `data.source` names: a file, the shards in a folder, or objects in a store.

use anyhow::{Context, Result, bail, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
};
use tallow_data::{
    formats::Input,
    store::{Cache, Store},
};

/// A path, or an address in a store; `{000..009}` in its name stands for ten of them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) name: String,
    /// Where blocks of objects are kept, and tokens of texts.
    pub(crate) cache_dir: PathBuf,
    /// The most bytes of such blocks.
    pub(crate) cache_bytes: u64,
    /// Options of the store, by the names that the `object_store` crate gives them.
    pub(crate) options: Vec<(String, String)>,
}

/// What a store is told by the environment, so that no secret needs to be in a file: the usual names.
const ENVIRONMENT: [&str; 12] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
];

/// More shards than this are a mistyped range.
const MOST_SHARDS: usize = 100_000;

impl Place {
    /// Whether `name` is an address and no path.
    pub(crate) fn is_url(name: &str) -> bool {
        name.contains("://")
    }

    /// The file or object, those of a range, or those in the folder that end in `.ending`.
    /// # Errors
    /// If there is none, or one cannot be opened.
    pub(crate) fn inputs(&self, endings: &[&str]) -> Result<Vec<Input>> {
        let mut inputs = Vec::new();
        for name in expand(&self.name).context("data.source")? {
            match Self::is_url(&name) {
                true => self.add_objects(&name, endings, &mut inputs),
                false => add_files(Path::new(&name), endings, &mut inputs),
            }
            .context("data.source")?;
        }
        ensure!(
            !inputs.is_empty(),
            "data.source `{}` holds no file that ends in .{}",
            self.name,
            endings.join(" or .")
        );
        Ok(inputs)
    }

    fn add_objects(&self, url: &str, endings: &[&str], inputs: &mut Vec<Input>) -> Result<()> {
        let parts = url.rsplit_once('/').filter(|(above, _)| Self::is_url(above));
        let (above, below) = parts.with_context(|| format!("`{url}` has no path to an object"))?;
        let cache = Cache::open(&self.cache_dir, self.cache_bytes).context("data.cache_dir")?;
        let store = Store::from_url(above, self.options(url))?;
        if !below.is_empty() {
            inputs.push(store.open(below, &cache)?);
            return Ok(());
        }
        let objects = store.list("")?.into_iter().map(|object| object.path);
        for path in objects.filter(|path| has_ending(path, endings)) {
            inputs.push(store.open(&path, &cache)?);
        }
        Ok(())
    }

    /// The environment's of the store, then the configuration's.
    fn options(&self, url: &str) -> Vec<(String, String)> {
        let prefix = match url.split("://").next() {
            Some("s3" | "s3a") => "AWS_",
            Some("gs") => "GOOGLE_",
            Some("az" | "abfs" | "abfss") => "AZURE_",
            _ => return self.options.clone(),
        };
        let names = ENVIRONMENT.iter().filter(|name| name.starts_with(prefix));
        let given = names.filter_map(|name| Some((name.to_lowercase(), std::env::var(name).ok()?)));
        given.chain(self.options.clone()).collect()
    }
}

fn add_files(path: &Path, endings: &[&str], inputs: &mut Vec<Input>) -> Result<()> {
    if !path.is_dir() {
        inputs.push(Input::open(path)?);
        return Ok(());
    }
    for path in files_in(path)? {
        if has_ending(&path.to_string_lossy(), endings) {
            inputs.push(Input::open(&path)?);
        }
    }
    Ok(())
}

/// The files of a folder that are not hidden, by name.
pub(super) fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| folder.display().to_string())?.path();
        let is_hidden = path.file_name().is_none_or(|n| n.to_string_lossy().starts_with('.'));
        if path.is_file() && !is_hidden {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn has_ending(name: &str, endings: &[&str]) -> bool {
    let ending = Path::new(name).extension().map(|ending| ending.to_string_lossy().to_lowercase());
    ending.is_some_and(|ending| endings.contains(&ending.as_str()))
}

/// `a-{08..11}.tar` as its four names; a name without braces as itself.
fn expand(name: &str) -> Result<Vec<String>> {
    let Some((before, rest)) = name.split_once('{') else { return Ok(vec![name.to_string()]) };
    let range = rest.split_once('}').and_then(|(range, after)| {
        let (first, last) = range.split_once("..")?;
        Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?, first.len(), after))
    });
    let Some((first, last, width, after)) = range.filter(|r| !r.3.contains('{')) else {
        bail!("`{name}`: braces hold one range of numbers, such as {{000..009}}")
    };
    let n = (last + 1).saturating_sub(first);
    ensure!((1..=MOST_SHARDS).contains(&n), "`{name}`: {n} names, 1 to {MOST_SHARDS} are possible");
    Ok((first..=last).map(|i| format!("{before}{i:0width$}{after}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_names() {
        assert_eq!(
            expand("s3://b/x-{08..10}.tar").unwrap(),
            ["08", "09", "10"].map(|n| format!("s3://b/x-{n}.tar"))
        );
        assert_eq!(expand("plain.tar").unwrap(), ["plain.tar"]);
        for wrong in ["{}", "{a..b}", "{1..2", "{3..1}", "{0..1}{0..1}", "{0..99999999}"] {
            assert!(expand(wrong).is_err(), "{wrong}");
        }
    }
}

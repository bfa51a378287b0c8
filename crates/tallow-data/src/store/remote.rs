use super::{cache::Cache, http::Connector};
use crate::{
    error::{Error, Result},
    formats::{Input, ReadAt},
};
use futures_util::TryStreamExt;
use object_store::{
    BackoffConfig, ClientConfigKey, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    http::HttpBuilder,
    path::Path as ObjectPath,
};
use std::{fmt, io, path::PathBuf, sync::Arc, time::Duration};
use tokio::runtime::{Builder, Runtime};

/// Bytes fetched at once and kept together.
const BLOCK_BYTES: u64 = 4 << 20;

/// One object of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its path, below the store's.
    pub path: String,
    /// Bytes it has.
    pub n_bytes: u64,
}

/// A place of objects. Clones share it.
#[derive(Clone)]
pub struct Store {
    name: String,
    prefix: ObjectPath,
    inner: Arc<dyn ObjectStore>,
    /// Runs on the thread that asks; it has none of its own.
    runtime: Arc<Runtime>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.name)
    }
}

impl Store {
    /// Any store of the `object_store` crate; errors and the cache call it `name`.
    /// # Errors
    /// If the system gives no timer.
    pub fn new(name: impl Into<String>, inner: Arc<dyn ObjectStore>) -> Result<Self> {
        let name = name.into();
        let runtime = Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|error| Error::from_io(name.as_ref(), error))?;
        Ok(Self { name, prefix: ObjectPath::default(), inner, runtime: Arc::new(runtime) })
    }

    /// The store and folder that `url` names: `s3://`, `gs://`, `az://`, `http://` or `https://`.
    ///
    /// `options` are the store's own, credentials and region among them, by the names that the
    /// `object_store` crate gives them. A request is tried four times, for at most 30 seconds.
    /// # Errors
    /// If the address or an option is not understood.
    pub fn from_url(
        url: &str,
        options: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self> {
        let wrong = |error: object_store::Error| Error::Store {
            name: url.to_owned(),
            path: String::new(),
            reason: error.to_string(),
        };
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let below = rest.split_once('/').map_or("", |(_, below)| below);
        let (inner, below) = match scheme {
            "s3" | "s3a" => (s3(url, options).map_err(wrong)?, below),
            "gs" => (gcs(url, options).map_err(wrong)?, below),
            "az" | "abfs" | "abfss" => (azure(url, options).map_err(wrong)?, below),
            // Over HTTP a path is below the whole address.
            "http" | "https" => (http(url, options).map_err(wrong)?, ""),
            _ => {
                let reason = format!("`{scheme}` is no store; s3, gs, az, http and https are");
                return Err(Error::Store { name: url.to_owned(), path: String::new(), reason });
            }
        };
        let prefix = ObjectPath::from(below);
        Ok(Self { prefix, ..Self::new(url, inner)? })
    }

    /// The objects below `prefix`, by their paths. Holds their names.
    /// # Errors
    /// If the store does not answer, or cannot list, as plain HTTP cannot.
    pub fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        let below = self.full(prefix);
        let metas: Vec<ObjectMeta> = self
            .runtime
            .block_on(self.inner.list(Some(&below)).try_collect())
            .map_err(|error| self.fault(prefix, &error))?;
        let skip = self.prefix.as_ref().len() + usize::from(!self.prefix.as_ref().is_empty());
        let object = |meta: ObjectMeta| {
            let path = meta.location.as_ref().get(skip..).unwrap_or_default().to_owned();
            Object { path, n_bytes: meta.size }
        };
        let mut objects: Vec<Object> = metas.into_iter().map(object).collect();
        objects.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        Ok(objects)
    }

    /// The object `path`, read in blocks of 4 MiB that `cache` keeps.
    ///
    /// An object that changes while it is open is an error where the store gives versions.
    /// # Errors
    /// If it is not there.
    pub fn open(&self, path: &str, cache: &Cache) -> Result<Input> {
        let location = self.full(path);
        let meta = self
            .runtime
            .block_on(self.inner.head(&location))
            .map_err(|error| self.fault(path, &error))?;
        let version = meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_rfc3339());
        let id = hash(&[&self.name, location.as_ref(), &version, &meta.size.to_string()]);
        let name = PathBuf::from(format!("{}/{path}", self.name.trim_end_matches('/')));
        let remote = Remote { store: self.clone(), location, meta, id, cache: cache.clone() };
        Ok(Input::new(name, remote))
    }

    fn full(&self, below: &str) -> ObjectPath {
        ObjectPath::from_iter(self.prefix.parts().chain(ObjectPath::from(below).parts()))
    }

    fn fault(&self, path: &str, error: &object_store::Error) -> Error {
        match error {
            object_store::Error::NotFound { .. } => Error::NotFound {
                path: PathBuf::from(format!("{}/{path}", self.name.trim_end_matches('/'))),
            },
            error => Error::Store {
                name: self.name.clone(),
                path: path.to_owned(),
                reason: error.to_string(),
            },
        }
    }
}

/// An object that is open.
struct Remote {
    store: Store,
    location: ObjectPath,
    meta: ObjectMeta,
    /// What the names of its blocks start with.
    id: String,
    cache: Cache,
}

impl ReadAt for Remote {
    fn n_bytes(&self) -> u64 {
        self.meta.size
    }

    /// Reads up to the end of a block.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        if offset >= self.meta.size || buf.is_empty() {
            return Ok(0);
        }
        let start = offset / BLOCK_BYTES * BLOCK_BYTES;
        let end = (start + BLOCK_BYTES).min(self.meta.size);
        let name = format!("{}-{:08x}", self.id, offset / BLOCK_BYTES);
        self.cache.read(&name, end - start, offset - start, buf, || self.fetch(start, end))
    }
}

impl Remote {
    fn fetch(&self, start: u64, end: u64) -> io::Result<Vec<u8>> {
        let options = object_store::GetOptions {
            range: Some((start..end).into()),
            if_match: self.meta.e_tag.clone(),
            ..Default::default()
        };
        let fetched = self.store.runtime.block_on(async {
            self.store.inner.get_opts(&self.location, options).await?.bytes().await
        });
        match fetched {
            Ok(bytes) => Ok(bytes.into()),
            Err(error) => {
                let kind = match error {
                    object_store::Error::NotFound { .. } => io::ErrorKind::NotFound,
                    _ => io::ErrorKind::Other,
                };
                Err(io::Error::new(kind, format!("bytes {start} to {end}: {error}")))
            }
        }
    }
}

/// FNV-1a over all parts in 128 bits, as a file name.
fn hash(parts: &[&str]) -> String {
    const START: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    let hash = bytes.fold(START, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
    format!("{hash:032x}")
}

fn retry() -> RetryConfig {
    let backoff = BackoffConfig {
        init_backoff: Duration::from_millis(100),
        max_backoff: Duration::from_secs(5),
        base: 2.0,
    };
    RetryConfig { backoff, max_retries: 3, retry_timeout: Duration::from_secs(30) }
}

type Opened = object_store::Result<Arc<dyn ObjectStore>>;
type Options = (String, String);

fn s3(url: &str, options: impl IntoIterator<Item = Options>) -> Opened {
    let mut builder =
        AmazonS3Builder::new().with_url(url).with_retry(retry()).with_http_connector(Connector);
    for (key, value) in options {
        builder = builder.with_config(key.parse::<AmazonS3ConfigKey>()?, value);
    }
    Ok(Arc::new(builder.build()?))
}

fn gcs(url: &str, options: impl IntoIterator<Item = Options>) -> Opened {
    let mut builder = GoogleCloudStorageBuilder::new()
        .with_url(url)
        .with_retry(retry())
        .with_http_connector(Connector);
    for (key, value) in options {
        builder = builder.with_config(key.parse::<GoogleConfigKey>()?, value);
    }
    Ok(Arc::new(builder.build()?))
}

fn azure(url: &str, options: impl IntoIterator<Item = Options>) -> Opened {
    let mut builder = MicrosoftAzureBuilder::new()
        .with_url(url)
        .with_retry(retry())
        .with_http_connector(Connector);
    for (key, value) in options {
        builder = builder.with_config(key.parse::<AzureConfigKey>()?, value);
    }
    Ok(Arc::new(builder.build()?))
}

fn http(url: &str, options: impl IntoIterator<Item = Options>) -> Opened {
    let mut builder = HttpBuilder::new()
        .with_url(url)
        .with_retry(retry())
        .with_http_connector(Connector)
        .with_config(ClientConfigKey::AllowHttp, "true");
    for (key, value) in options {
        builder = builder.with_config(key.parse::<ClientConfigKey>()?, value);
    }
    Ok(Arc::new(builder.build()?))
}

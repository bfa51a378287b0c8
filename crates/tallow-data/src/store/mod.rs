//! Objects in S3, Google, Azure and plain HTTP stores as [`Input`](crate::formats::Input)s, through a
//! cache on disk of bounded bytes.
//!
//! ```no_run
//! use tallow_data::{formats::{TarShard}, store::{Cache, Store}};
//!
//! let cache = Cache::open("cache", 8 << 30)?;
//! let store = Store::from_url("s3://bucket/shards", [("aws_region".into(), "eu-west-1".into())])?;
//! for object in store.list("")? {
//!     let shard = TarShard::open(store.open(&object.path, &cache)?, &["jpg", "cls"])?;
//! }
//! # Ok::<(), tallow_data::Error>(())
//! ```
//! Nothing is read from the environment: credentials are options of [`Store::from_url`].

mod cache;
mod http;
mod remote;
pub use self::{
    cache::Cache,
    remote::{Object, Store},
};
pub use object_store;

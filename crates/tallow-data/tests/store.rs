//! Objects through the cache: right bytes, few requests, and errors that name the object.
#![cfg(feature = "object-store")]
mod common;
use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tallow_data::{
    Error, Source,
    formats::{Token, Tokens},
    store::{
        Cache, Store,
        object_store::{ObjectStoreExt, memory::InMemory},
    },
};

fn cache(name: &str) -> Cache {
    Cache::open(common::folder(name).join("cache"), 64 << 20).unwrap()
}

/// A store in memory with one object of `n_bytes` at `a/tokens.bin`, and one beside it.
fn memory(n_bytes: usize) -> (Store, Vec<u8>) {
    let (inner, content) =
        (InMemory::new(), (0..n_bytes).map(|i| (i % 251) as u8).collect::<Vec<u8>>());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        inner.put(&"a/tokens.bin".into(), content.clone().into()).await.unwrap();
        inner.put(&"a/other".into(), vec![1u8].into()).await.unwrap();
    });
    (Store::new("memory", Arc::new(inner)).unwrap(), content)
}

#[test]
fn an_object_is_read_across_blocks() {
    let (store, content) = memory((9 << 20) + 7);
    let cache = cache("memory");
    let input = store.open("a/tokens.bin", &cache).unwrap();
    assert_eq!(input.n_bytes(), content.len() as u64);
    for (offset, n_bytes) in
        [(0, 10), ((4 << 20) - 3, 6), ((4 << 20) - 1, 5 << 20), ((9 << 20) + 5, 2)]
    {
        let bytes = input.read_vec(offset, n_bytes).unwrap();
        assert_eq!(bytes, content[offset as usize..(offset + n_bytes) as usize]);
    }
    assert_eq!(cache.held_bytes().unwrap(), content.len() as u64);
    assert!(input.read_vec((9 << 20) + 5, 3).is_err());
    let objects = store.list("a").unwrap();
    let names: Vec<&str> = objects.iter().map(|object| object.path.as_str()).collect();
    assert_eq!(
        (names, objects[1].n_bytes),
        (vec!["a/other", "a/tokens.bin"], content.len() as u64)
    );
    let error = store.open("a/none", &cache).unwrap_err();
    assert!(
        matches!(&error, Error::NotFound { path } if path.ends_with("memory/a/none")),
        "{error}"
    );
}

#[test]
fn an_address_that_is_no_store() {
    for (url, needle) in [("ftp://x/y", "`ftp` is no store"), ("words", "`` is no store")] {
        let error = Store::from_url(url, []).unwrap_err().to_string();
        assert!(error.contains(needle), "{error}");
    }
    assert!(Store::from_url("s3://bucket/x", [("no_such_option".into(), "1".into())]).is_err());
    Store::from_url("gs://bucket/x", []).unwrap();
    Store::from_url("az://container/x", [("azure_storage_account_name".into(), "a".into())])
        .unwrap();
    Store::from_url("s3://bucket/x", [("aws_region".into(), "eu-west-1".into())]).unwrap();
}

/// What the server does with a request for bytes.
#[derive(Clone, Copy)]
enum Fault {
    None,
    /// Says more bytes than it sends, this many times.
    Cut(u64),
    /// Answers with this status, this many times.
    Status(u16, u64),
}

/// Serves `content` under any path until the test ends; counts requests for bytes.
fn serve(content: Vec<u8>, fault: Fault) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let n_gets = Arc::new(AtomicU64::new(0));
    let counter = n_gets.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = answer(stream, &content, fault, &counter); // a client may hang up
        }
    });
    (url, n_gets)
}

fn answer(
    stream: TcpStream,
    content: &[u8],
    fault: Fault,
    n_gets: &AtomicU64,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let (mut is_get, mut range) = (false, 0..content.len());
    while let Some(line) = lines.next().transpose()?.filter(|line| !line.is_empty()) {
        is_get |= line.starts_with("GET");
        if let Some(asked) = line.to_lowercase().strip_prefix("range: bytes=") {
            let (first, last) = asked.split_once('-').unwrap();
            range = first.parse().unwrap()..last.parse::<usize>().unwrap() + 1;
        }
    }
    let mut stream = stream;
    let n_before = if is_get { n_gets.fetch_add(1, Ordering::Relaxed) } else { u64::MAX };
    let head =
        "Connection: close\r\nETag: \"1\"\r\nLast-Modified: Mon, 02 Mar 2026 10:00:00 GMT\r\n";
    match fault {
        Fault::Status(status, n) if is_get && n_before < n => {
            write!(stream, "HTTP/1.1 {status} Fault\r\n{head}Content-Length: 0\r\n\r\n")
        }
        _ if !is_get => {
            write!(stream, "HTTP/1.1 200 OK\r\n{head}Content-Length: {}\r\n\r\n", content.len())
        }
        _ => {
            let (n_bytes, n_all) = (range.len(), content.len());
            let (first, last) = (range.start, range.end - 1);
            write!(
                stream,
                "HTTP/1.1 206 Partial Content\r\n{head}Content-Range: bytes {first}-{last}/{n_all}\r\nContent-Length: {n_bytes}\r\n\r\n"
            )?;
            let is_cut = matches!(fault, Fault::Cut(n) if n_before < n);
            stream.write_all(&content[range][..if is_cut { n_bytes / 2 } else { n_bytes }])
        }
    }
}

#[test]
fn http_is_read_once_and_then_from_the_cache() {
    let content: Vec<u8> = (0..400u32).flat_map(|i| (i as u16).to_le_bytes()).collect();
    let (url, n_gets) = serve(content, Fault::None);
    let cache = cache("http");
    for _ in 0..2 {
        let store = Store::from_url(&url, []).unwrap();
        let source = Tokens::raw(store.open("t.bin", &cache).unwrap(), Token::U16, 9).unwrap();
        assert_eq!(source.get(7).unwrap(), (63..73).collect::<Vec<u32>>());
        assert_eq!(source.get(0).unwrap(), (0..10).collect::<Vec<u32>>());
    }
    assert_eq!(n_gets.load(Ordering::Relaxed), 1);
}

#[test]
fn http_that_recovers_is_tried_again() {
    for (name, fault) in [("cut_once", Fault::Cut(1)), ("busy_twice", Fault::Status(503, 2))] {
        let (url, n_gets) = serve(vec![7; 1000], fault);
        let store = Store::from_url(&url, []).unwrap();
        let input = store.open("t.bin", &cache(name)).unwrap();
        assert_eq!(input.read_vec(0, 1000).unwrap(), [7; 1000], "{name}");
        assert!(n_gets.load(Ordering::Relaxed) > 1);
    }
}

#[test]
fn http_that_does_not_recover_is_an_error_with_the_object() {
    for (name, fault) in [
        ("cut", Fault::Cut(u64::MAX)),
        ("denied", Fault::Status(403, u64::MAX)),
        ("busy", Fault::Status(500, u64::MAX)),
        ("gone", Fault::Status(404, u64::MAX)),
    ] {
        let (url, n_gets) = serve(vec![7; 1000], fault);
        let cache = cache(name);
        let input = Store::from_url(&url, []).unwrap().open("t.bin", &cache).unwrap();
        let error = input.read_vec(0, 1000).unwrap_err().to_string();
        assert!(error.contains(&format!("{url}/t.bin")), "{name}: {error}");
        assert!(n_gets.load(Ordering::Relaxed) <= 5, "{name} gives up");
        assert_eq!(cache.held_bytes().unwrap(), 0, "{name} leaves nothing in the cache");
    }
    // Nobody listens at a port that was just given back.
    let url = format!("http://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    let error = Store::from_url(&url, []).unwrap().open("t.bin", &cache("nobody")).unwrap_err();
    assert!(error.to_string().contains("t.bin"), "{error}");
}

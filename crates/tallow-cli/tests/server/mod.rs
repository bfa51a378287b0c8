//! Files over HTTP: what a plain web server gives an object store's client.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
};

/// A server of a folder on a port of its own; its thread ends with the process.
pub(crate) struct Server {
    port: u16,
}

impl Server {
    pub(crate) fn of(root: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (port, root) = (listener.local_addr().expect("an address").port(), root.to_owned());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let root = root.clone();
                std::thread::spawn(move || while answer(&stream, &root).is_some() {});
            }
        });
        Self { port }
    }

    pub(crate) fn url(&self, name: &str) -> String {
        format!("http://127.0.0.1:{}/{name}", self.port)
    }
}

/// Answers one HEAD or GET, with a range or without; none at the end of the connection.
fn answer(mut stream: &TcpStream, root: &Path) -> Option<()> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let request = lines.next()?;
    let (method, path) = request.split_once(' ')?;
    let path: PathBuf = root.join(path.split(' ').next()?.trim_start_matches('/'));
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let range = headers.iter().find_map(|line| {
        let (first, last) = line
            .to_lowercase()
            .strip_prefix("range: bytes=")?
            .split_once('-')
            .map(|(a, b)| (a.parse::<usize>(), b.parse::<usize>()))?;
        Some((first.ok()?, last.ok()? + 1))
    });
    let Ok(content) = fs::read(path) else {
        stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").ok()?;
        return Some(());
    };
    let (first, end) = range.unwrap_or((0, content.len()));
    let end = end.min(content.len());
    let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
    let n_all = content.len();
    let n_here = if method == "HEAD" { n_all } else { end - first };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {n_here}\r\nContent-Range: bytes {first}-{}/{n_all}\r\n\
         Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nETag: \"1\"\r\n\r\n",
        end.saturating_sub(1)
    );
    stream.write_all(head.as_bytes()).ok()?;
    if method != "HEAD" {
        stream.write_all(&content[first..end]).ok()?;
    }
    Some(())
}

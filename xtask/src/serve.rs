//! A static file server for localhost: right types, byte ranges, a security policy, nothing else.
//!
//! Own code because it is one page long and xtask stays free of dependencies. It listens on the loopback address only,
//! answers GET and HEAD, and never leaves its folder: a path component that is not a plain name is refused as text,
//! before any file is touched.

use crate::shell::{Failure, say};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What is served, and the content security policy that is sent with it.
#[derive(Clone)]
pub struct Site {
    /// Holds `index.html`.
    pub folder: PathBuf,
    /// The header's value.
    pub policy: String,
}

/// Serves a site until the process is ended.
pub fn run(site: &Site, port: u16) -> Result<(), Failure> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .map_err(|e| Failure::new(format!("port {port} cannot be used ({e}); choose another with --port")))?;
    let address = listener.local_addr().map_err(|e| Failure::new(e.to_string()))?;
    say(&format!("serving {} on http://localhost:{} (end with Ctrl-C)", site.folder.display(), address.port()));
    accept(&listener, site);
    Ok(())
}

/// Serves a site on a free port, which is returned, for as long as this process runs.
pub fn spawn(site: Site) -> Result<u16, Failure> {
    let listen = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        Ok((listener.local_addr()?.port(), listener))
    };
    let (port, listener) = listen().map_err(|e: std::io::Error| Failure::new(format!("no port to serve on: {e}")))?;
    std::thread::spawn(move || accept(&listener, &site));
    Ok(port)
}

fn accept(listener: &TcpListener, site: &Site) {
    for stream in listener.incoming().flatten() {
        let site = site.clone();
        // A thread per connection: browsers open six.
        std::thread::spawn(move || {
            // A browser that hangs up is no event.
            connection(stream, &site).ok();
        });
    }
}

fn connection(stream: TcpStream, site: &Site) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut writer = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    while let Some(request) = read_request(&mut reader)? {
        answer(&mut writer, site, &request)?;
        if request.close {
            break;
        }
    }
    Ok(())
}

struct Request {
    method: String,
    path: String,
    range: Option<String>,
    close: bool,
}

/// Reads one request head of at most 16 KiB; nothing at the end of the connection.
fn read_request(reader: &mut impl BufRead) -> std::io::Result<Option<Request>> {
    let mut head = reader.take(16 << 10);
    let mut line = String::new();
    if head.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let (method, path) = (words.next().unwrap_or("").to_owned(), words.next().unwrap_or("").to_owned());
    let mut request = Request { method, path, range: None, close: words.next() != Some("HTTP/1.1") };
    loop {
        line.clear();
        if head.read_line(&mut line)? == 0 || line.trim_end().is_empty() {
            return Ok(Some(request));
        }
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        match name.to_ascii_lowercase().as_str() {
            "range" => request.range = Some(value.trim().to_owned()),
            "connection" => request.close |= value.trim().eq_ignore_ascii_case("close"),
            // A body would be read as the next request.
            "content-length" | "transfer-encoding" => request.close = true,
            _ => {}
        }
    }
}

fn answer(out: &mut impl Write, site: &Site, request: &Request) -> std::io::Result<()> {
    if request.method != "GET" && request.method != "HEAD" {
        return plain(out, "405 Method Not Allowed", "Allow: GET, HEAD\r\n");
    }
    let Some(path) = resolve(&site.folder, &request.path) else {
        return plain(out, "400 Bad Request", "");
    };
    let Ok(mut file) = File::open(&path) else {
        return plain(out, "404 Not Found", "");
    };
    let size = file.metadata()?.len();
    let range = match request.range.as_deref().map(|text| parse_range(text, size)) {
        None | Some(Range::Whole) => None,
        Some(Range::Bytes(first, last)) => Some((first, last)),
        Some(Range::Unsatisfiable) => {
            return plain(out, "416 Range Not Satisfiable", &format!("Content-Range: bytes */{size}\r\n"));
        }
    };
    let (status, first, length, extra) = match range {
        Some((first, last)) => {
            ("206 Partial Content", first, last - first + 1, format!("Content-Range: bytes {first}-{last}/{size}\r\n"))
        }
        None => ("200 OK", 0, size, String::new()),
    };
    write!(
        out,
        "HTTP/1.1 {status}\r\nContent-Type: {}\r\nContent-Length: {length}\r\nAccept-Ranges: bytes\r\n\
         Cache-Control: no-cache\r\nX-Content-Type-Options: nosniff\r\nContent-Security-Policy: {}\r\n{extra}\r\n",
        mime(&path),
        site.policy
    )?;
    if request.method == "GET" {
        file.seek(SeekFrom::Start(first))?;
        std::io::copy(&mut file.take(length), out)?;
    }
    out.flush()
}

fn plain(out: &mut impl Write, status: &str, headers: &str) -> std::io::Result<()> {
    let body = format!("{status}\n");
    write!(
        out,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n{headers}\r\n{body}",
        body.len()
    )?;
    out.flush()
}

/// The file that a request names; nothing where a component is not a plain name.
fn resolve(folder: &Path, target: &str) -> Option<PathBuf> {
    let path = target.split(['?', '#']).next()?.strip_prefix('/')?;
    let mut file = folder.to_path_buf();
    for part in decode(path)?.split('/').filter(|part| !part.is_empty()) {
        if part == "." || part == ".." || part.contains(['\\', ':', '\0']) {
            return None;
        }
        file.push(part);
    }
    if file.is_dir() {
        file.push("index.html");
    }
    Some(file)
}

/// Undoes percent encoding; nothing where it is broken or not UTF-8.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let (high, low) = (rest.next()?, rest.next()?);
                let digit = |b: u8| char::from(b).to_digit(16);
                u8::try_from(digit(high)? * 16 + digit(low)?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

#[derive(Debug, PartialEq)]
enum Range {
    Whole,
    Bytes(u64, u64),
    Unsatisfiable,
}

/// One byte range (RFC 9110, 14.1.2). Several at once, or what cannot be parsed, mean the whole file, as the RFC allows.
fn parse_range(text: &str, size: u64) -> Range {
    let Some((first, last)) = text.strip_prefix("bytes=").and_then(|spec| spec.split_once('-')) else {
        return Range::Whole;
    };
    let (first, last) = (first.trim(), last.trim());
    match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if last < first => Range::Whole,
        (Ok(first), _) if first >= size && (last.is_empty() || last.parse::<u64>().is_ok()) => Range::Unsatisfiable,
        (Ok(first), Ok(last)) => Range::Bytes(first, last.min(size - 1)),
        (Ok(first), Err(_)) if last.is_empty() => Range::Bytes(first, size - 1),
        (Err(_), Ok(0)) if first.is_empty() => Range::Unsatisfiable,
        (Err(_), Ok(_)) if first.is_empty() && size == 0 => Range::Unsatisfiable,
        (Err(_), Ok(count)) if first.is_empty() => Range::Bytes(size - count.min(size), size - 1),
        _ => Range::Whole,
    }
}

fn mime(path: &Path) -> &'static str {
    match path.extension().and_then(|e| e.to_str()).unwrap_or("") {
        "html" => "text/html; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "json" => "application/json",
        "wasm" => "application/wasm",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "ico" => "image/x-icon",
        "txt" => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failing test may panic
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_the_rfc() {
        let cases = [
            ("bytes=0-9", Range::Bytes(0, 9)),
            ("bytes=90-200", Range::Bytes(90, 99)),
            ("bytes=90-", Range::Bytes(90, 99)),
            ("bytes=-10", Range::Bytes(90, 99)),
            ("bytes=-1000", Range::Bytes(0, 99)),
            ("bytes=100-", Range::Unsatisfiable),
            ("bytes=100-200", Range::Unsatisfiable),
            ("bytes=-0", Range::Unsatisfiable),
            ("bytes=9-0", Range::Whole),
            ("bytes=0-1,5-6", Range::Whole),
            ("lines=0-1", Range::Whole),
            ("bytes=-", Range::Whole),
        ];
        for (text, want) in cases {
            assert_eq!(parse_range(text, 100), want, "{text}");
        }
        assert_eq!(parse_range("bytes=0-0", 0), Range::Unsatisfiable);
        assert_eq!(parse_range("bytes=-5", 0), Range::Unsatisfiable);
        assert_eq!(
            parse_range("bytes=5000000000-5000000001", 6_000_000_000),
            Range::Bytes(5_000_000_000, 5_000_000_001)
        );
    }

    #[test]
    fn no_path_leaves_the_folder() {
        let folder = Path::new("/srv/page");
        for bad in ["/../secret", "/a/%2e%2e/b", "/a/..%2fb", "/C:/x", "/a\\b", "/%00", "x", "/%zz", "/%e"] {
            assert_eq!(resolve(folder, bad), None, "{bad}");
        }
        assert_eq!(resolve(folder, "/a%20b//c.js?v=1"), Some(folder.join("a b").join("c.js")));
    }

    #[test]
    fn a_wasm_file_is_served_with_its_type_whole_in_part_and_by_head() {
        let folder = std::env::temp_dir().join(format!("ebbtide-serve-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("a.wasm"), b"0123456789").unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let site = Site { folder: folder.clone(), policy: "default-src 'self'".to_owned() };
        std::thread::spawn(move || accept(&listener, &site));
        let ask = |method: &str, path: &str, headers: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            write!(stream, "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        };
        let whole = ask("GET", "/a.wasm", "");
        assert!(whole.starts_with("HTTP/1.1 200 OK") && whole.contains("Content-Type: application/wasm"), "{whole}");
        assert!(whole.contains("Policy: default-src 'self'\r\n") && whole.ends_with("\r\n\r\n0123456789"), "{whole}");
        let part = ask("GET", "/a.wasm", "Range: bytes=3-5\r\n");
        assert!(
            part.starts_with("HTTP/1.1 206") && part.contains("bytes 3-5/10") && part.ends_with("\r\n\r\n345"),
            "{part}"
        );
        let head = ask("HEAD", "/a.wasm", "");
        assert!(head.contains("Content-Length: 10") && head.ends_with("\r\n\r\n"), "{head}");
        assert!(ask("GET", "/a.wasm", "Range: bytes=10-\r\n").starts_with("HTTP/1.1 416"));
        assert!(ask("GET", "/none", "").starts_with("HTTP/1.1 404"));
        assert!(ask("GET", "/../a.wasm", "").starts_with("HTTP/1.1 400"));
        assert!(ask("POST", "/a.wasm", "").starts_with("HTTP/1.1 405"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

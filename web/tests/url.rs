//! Files on a server, natively: the same rules as in the page, against the server of `cargo xtask web` and against servers that
//! misbehave.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test stops at the first surprise")]

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use ebbtide::rt::{Sink, Waiting};
use ebbtide::weights::{Catalog, Source};
use ebbtide::{Budget, Cancel, Device, DeviceChoice, Graph, Session};
use ebbtide_web::http::{Answer, HttpFile, Server};
use pollster::block_on;

/// The page's server, as `cargo xtask web` runs it.
#[path = "../../xtask/src/serve.rs"]
#[allow(dead_code)]
mod serve;

/// What that file needs of its crate.
mod shell {
    #[derive(Debug)]
    pub struct Failure;

    impl Failure {
        pub fn new(_: impl Into<String>) -> Failure {
            Failure
        }
    }

    pub fn say(_: &str) {}
}

/// Requests through a socket, one a connection; notes what was asked for.
#[derive(Default)]
struct Sockets {
    asked: Mutex<Vec<(u64, u64)>>,
}

struct SocketAnswer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Mutex<BufReader<TcpStream>>,
}

impl Server for Sockets {
    fn get<'a>(&'a self, url: &'a str, first: u64, last: u64) -> Waiting<'a, Result<Box<dyn Answer>, String>> {
        self.asked.lock().unwrap().push((first, last));
        Box::pin(async move {
            let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
            let mut stream = TcpStream::connect(host).map_err(|e| e.to_string())?;
            write!(
                stream,
                "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nRange: bytes={first}-{last}\r\n\r\n"
            )
            .map_err(|e| e.to_string())?;
            let mut body = BufReader::new(stream);
            let mut line = String::new();
            body.read_line(&mut line).map_err(|e| e.to_string())?;
            let status = line.split(' ').nth(1).and_then(|s| s.parse().ok()).ok_or("no status")?;
            let mut headers = Vec::new();
            loop {
                line.clear();
                if body.read_line(&mut line).map_err(|e| e.to_string())? == 0 || line.trim().is_empty() {
                    break;
                }
                let (name, value) = line.split_once(':').unwrap();
                headers.push((name.to_lowercase(), value.trim().to_owned()));
            }
            Ok(Box::new(SocketAnswer { status, headers, body: Mutex::new(body) }) as Box<dyn Answer>)
        })
    }

    fn wait(&self, _: u32) -> Waiting<'_, ()> {
        Box::pin(async {})
    }
}

impl Answer for SocketAnswer {
    fn status(&self) -> u16 {
        self.status
    }

    fn header(&self, name: &str) -> Option<String> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone())
    }

    fn body<'a>(&'a mut self, sink: &'a mut Sink<'_>) -> Waiting<'a, Result<u64, String>> {
        Box::pin(async move {
            let mut bytes = Vec::new();
            let most = sink.len() as u64 + 1;
            self.body.lock().unwrap().by_ref().take(most).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
            let n = bytes.len().min(sink.len());
            sink.put(0, &bytes[..n]);
            Ok(bytes.len() as u64)
        })
    }
}

fn site(folder: &Path) -> serve::Site {
    serve::Site { folder: folder.into(), policy: "default-src 'self'".into() }
}

fn open(server: &Arc<Sockets>, url: &str) -> ebbtide::Result<Option<Source>> {
    block_on(HttpFile::open(server.clone(), url))
}

/// A server that gives every request the same answer.
fn answers(answer: &'static str) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("http://{}/file", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|n| n > 2) {
                line.clear();
            }
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    url
}

#[test]
fn a_server_that_ignores_ranges_is_found_out_before_its_body_is_read() {
    // Its body never ends: reading it would hang the test.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("http://{}/file", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 90000000000\r\n\r\n");
            while stream.write_all(&[0; 1000]).is_ok() {}
        }
    });
    let error = open(&Arc::default(), &url).unwrap_err();
    assert!(error.code() == "io" && error.to_string().contains("does not know byte ranges"), "{error}");
}

#[test]
fn an_answer_that_is_not_the_range_asked_for_is_refused_in_words() {
    let cases = [
        ("HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n\r\nx", "Access-Control-Expose-Headers"),
        ("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 5-5/9\r\n\r\nx", "the server sent `bytes 5-5/9`"),
        ("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-0/*\r\n\r\nx", "bytes 0-0/*"),
        ("HTTP/1.1 403 Forbidden\r\n\r\n", "answered 403"),
        ("HTTP/1.1 503 Busy\r\n\r\n", "4 tries"),
    ];
    for (answer, words) in cases {
        let error = open(&Arc::default(), &answers(answer)).unwrap_err();
        assert!(error.code() == "io" && error.to_string().contains(words), "{error}");
    }
    assert!(open(&Arc::default(), &answers("HTTP/1.1 404 Not Found\r\n\r\n")).unwrap().is_none());
}

#[test]
fn a_body_that_is_too_short_or_too_long_never_passes_for_the_bytes() {
    let long = answers("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-0/9\r\n\r\nxy");
    let source = open(&Arc::default(), &long).unwrap().unwrap();
    let error = block_on(source.fill(0, &mut [0])).unwrap_err();
    assert!(error.to_string().contains("sent more"), "{error}");
    let short = answers("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-0/9\r\n\r\n");
    let source = open(&Arc::default(), &short).unwrap().unwrap();
    let error = block_on(source.fill(0, &mut [0])).unwrap_err();
    assert!(error.to_string().contains("0 came"), "{error}");
}

/// Writes a model of 2 blocks, far apart in a file of 5 GB that takes no room on the disk; only the values that are looked at
/// are there.
fn sparse_file(path: &Path) -> (u64, Vec<f32>, Vec<f32>) {
    const N: u64 = 64;
    let block = N * N * 4;
    let far = 5_000_000_000u64;
    let filler = far - block;
    let header = format!(
        r#"{{"first":{{"dtype":"F32","shape":[{N},{N}],"data_offsets":[0,{block}]}},"between":{{"dtype":"U8","shape":[{filler}],"data_offsets":[{block},{far}]}},"last":{{"dtype":"F32","shape":[{N},{N}],"data_offsets":[{far},{}]}}}}"#,
        far + block
    );
    let width = header.len().next_multiple_of(8);
    let header = format!("{header:<width$}");
    let value = |i: u64, scale: f32| ((i * 37 % 101) as f32 - 50.0) * scale;
    let first: Vec<f32> = (0..N * N).map(|i| value(i, 0.01)).collect();
    let last: Vec<f32> = (0..N * N).map(|i| value(i + 7, 0.02)).collect();
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(&bytes(&first)).unwrap();
    file.seek(SeekFrom::Start(8 + header.len() as u64 + far)).unwrap();
    file.write_all(&bytes(&last)).unwrap();
    (N, first, last)
}

#[test]
fn a_file_of_five_gigabytes_opens_plans_and_loads_its_first_and_last_layer_over_http() {
    let folder = tempfile::tempdir().unwrap();
    let (n, first, last) = sparse_file(&folder.path().join("model.safetensors"));
    let port = serve::spawn(site(folder.path())).unwrap();
    let server = Arc::new(Sockets::default());
    let url = format!("http://127.0.0.1:{port}/model.safetensors");
    let source = open(&server, &url).unwrap().unwrap();
    assert!(source.len() > 5_000_000_000);
    let mut catalog = block_on(Catalog::from_sources(vec![source])).unwrap();
    let segments: Vec<_> = ["first", "last"]
        .map(|name| {
            let id = catalog.find(name).unwrap();
            catalog.define_segment(name, &[("w", id)]).unwrap()
        })
        .into();
    let mut g = Graph::new();
    let x = g.input("x", [8, n]).unwrap();
    let mut h = x;
    for segment in &segments {
        let w = g.weight(segment, "w").unwrap();
        h = g.matmul(h, w, None).unwrap();
    }
    let program = g.outputs(&[("y", h)]).unwrap();
    let device = block_on(Device::open(&DeviceChoice::from_env())).expect("an adapter");
    let set = ebbtide::compile(&[program], &catalog, device.caps(), Budget::Floor).unwrap();
    let chunk = set.table.upload.chunk;
    server.asked.lock().unwrap().clear();
    let mut session = block_on(Session::new(&device, &catalog, set)).unwrap();
    let values: Vec<f32> = (0..8 * n).map(|i| (i % 13) as f32 * 0.1).collect();
    let input: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let out = block_on(session.run(0, &[("x", &input)], &Cancel::new(), &mut ebbtide::event::NoEvents)).unwrap();
    let times = |a: &[f32], b: &[f32]| -> Vec<f32> {
        let n = n as usize;
        (0..8 * n).map(|i| (0..n).map(|k| a[i / n * n + k] * b[k * n + i % n]).sum()).collect()
    };
    let want = times(&times(&values, &first), &last);
    for (got, want) in out.f32("y").unwrap().iter().zip(&want) {
        assert!((got - want).abs() < 1e-3 * want.abs().max(1.0), "{got} {want}");
    }
    let asked = server.asked.lock().unwrap();
    assert!(asked.iter().any(|(from, _)| *from > 1 << 32), "nothing was read beyond 4 GiB");
    assert!(asked.iter().all(|(from, to)| to - from < chunk), "a request larger than a chunk of the ring");
}

#[test]
fn a_file_that_changes_on_the_server_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.bin");
    std::fs::write(&path, [7; 100]).unwrap();
    let port = serve::spawn(site(folder.path())).unwrap();
    let source = open(&Arc::default(), &format!("http://127.0.0.1:{port}/a.bin")).unwrap().unwrap();
    let mut bytes = [0; 10];
    block_on(source.fill(50, &mut bytes)).unwrap();
    assert_eq!(bytes, [7; 10]);
    assert_eq!(block_on(source.fill(95, &mut bytes)).unwrap_err().code(), "io", "beyond the end");
    std::fs::write(&path, [7; 101]).unwrap();
    assert_eq!(block_on(source.fill(50, &mut bytes)).unwrap_err().code(), "source-changed");
    std::fs::write(&path, [7; 20]).unwrap();
    assert_eq!(block_on(source.fill(50, &mut bytes)).unwrap_err().code(), "source-changed");
}

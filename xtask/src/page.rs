//! Opens the built page in headless Chromium and waits for it to say that it is ready.
//!
//! Tests inside the wasm module cannot see what breaks around it: a content security policy that forbids the module, a
//! script that does not fit its wasm, a wrong type from the server. A client of the WebDriver protocol for this one
//! question is a page long; the page's behaviour is tested with better tools.

use crate::serve;
use crate::shell::{Failure, root, say};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The page marks its end of loading in `data-ready`; what it shows is the answer.
const SCRIPT: &str = "return (document.documentElement.dataset.ready || 'loading') + '|' + document.body.innerText";
const PATIENCE: Duration = Duration::from_secs(120);

/// Serves `dist` and opens it; fails with the page's own words if it does not become ready.
pub fn check(driver: &Path) -> Result<(), Failure> {
    let port = serve::spawn(&root().join("dist"))?;
    let flags = std::fs::read_to_string(root().join("web/webdriver.json"))
        .map_err(|e| Failure::new(format!("web/webdriver.json: {e}")))?;
    let driver = Driver::start(driver)?;
    let opened = driver.post("/session", &format!(r#"{{"capabilities":{{"alwaysMatch":{flags}}}}}"#))?;
    let session = text_field(&opened, "sessionId")
        .ok_or_else(|| Failure::new(format!("chromedriver opened no browser: {opened}")))?;
    let result = wait_until_ready(&driver, &session, port);
    // Ends the browser; the driver ends with `driver`.
    driver.request("DELETE", &format!("/session/{session}"), "").ok();
    result
}

fn wait_until_ready(driver: &Driver, session: &str, port: u16) -> Result<(), Failure> {
    driver.post(&format!("/session/{session}/url"), &format!(r#"{{"url":"http://localhost:{port}/"}}"#))?;
    let start = Instant::now();
    loop {
        let answer = driver
            .post(&format!("/session/{session}/execute/sync"), &format!(r#"{{"script":"{SCRIPT}","args":[]}}"#))?;
        let shown = text_field(&answer, "value").unwrap_or(answer);
        match shown.split_once('|') {
            Some(("yes", text)) => {
                say(&format!("the page is ready after {:.1} s and shows:", start.elapsed().as_secs_f64()));
                text.replace("\\n", "\n")
                    .replace("\\t", " ")
                    .lines()
                    .filter(|l| !l.is_empty())
                    .for_each(|l| println!("    {l}"));
                return Ok(());
            }
            Some(("failed", text)) => return Err(Failure::new(format!("the page reports: {text}"))),
            _ if start.elapsed() > PATIENCE => {
                return Err(Failure::new(format!("the page is not ready; it shows: {shown}")));
            }
            _ => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}

/// A chromedriver of our own, ended when dropped.
struct Driver {
    child: Child,
    port: u16,
}

impl Driver {
    fn start(program: &Path) -> Result<Self, Failure> {
        let start = || Command::new(program).arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut child = start().map_err(|e| Failure::new(format!("{}: {e}", program.display())))?;
        let lines =
            child.stdout.take().map(BufReader::new).into_iter().flat_map(|out| out.lines().map_while(Result::ok));
        let port = lines.into_iter().find_map(|line| started_port(&line));
        match port {
            Some(port) => Ok(Self { child, port }),
            None => {
                child.kill().ok();
                Err(Failure::new(format!("{} did not start", program.display())))
            }
        }
    }

    fn post(&self, path: &str, body: &str) -> Result<String, Failure> {
        self.request("POST", path, body)
    }

    fn request(&self, method: &str, path: &str, body: &str) -> Result<String, Failure> {
        let exchange = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
            stream.set_read_timeout(Some(PATIENCE))?;
            write!(
                stream,
                "{method} {path} HTTP/1.1\r\nHost: localhost:{}\r\nConnection: close\r\n\
                 Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                self.port,
                body.len()
            )?;
            read_body(BufReader::new(stream))
        };
        exchange().map_err(|e| Failure::new(format!("chromedriver, {method} {path}: {e}")))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The port in chromedriver's greeting: "ChromeDriver was started successfully on port 40123."
fn started_port(line: &str) -> Option<u16> {
    line.split_once("successfully on port ")?.1.trim_end().trim_end_matches('.').parse().ok()
}

fn read_body(mut reader: impl BufRead) -> std::io::Result<String> {
    let mut length = None;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 0 && !line.trim_end().is_empty() {
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().ok();
        }
        line.clear();
    }
    let mut body = String::new();
    reader.take(length.unwrap_or(u64::MAX)).read_to_string(&mut body)?;
    Ok(body)
}

/// The text of a field in a JSON object, escapes other than quotes left as they are; enough for the driver's answers.
fn text_field(json: &str, name: &str) -> Option<String> {
    let rest = json.split_once(&format!("\"{name}\":\""))?.1;
    let mut text = String::new();
    let mut chars = rest.chars();
    loop {
        match chars.next()? {
            '"' => return Some(text),
            '\\' => match chars.next()? {
                '"' => text.push('"'),
                other => text.extend(['\\', other]),
            },
            other => text.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_answers_are_understood() {
        assert_eq!(started_port("ChromeDriver was started successfully on port 40123."), Some(40123));
        assert_eq!(started_port("Starting ChromeDriver 156 on port 0"), None);
        let answer = r#"{"value":{"capabilities":{},"sessionId":"ab12"}}"#;
        assert_eq!(text_field(answer, "sessionId").as_deref(), Some("ab12"));
        assert_eq!(text_field(r#"{"value":"yes|a \"b\"\nc"}"#, "value").as_deref(), Some("yes|a \"b\"\\nc"));
        assert_eq!(text_field(r#"{"value":null}"#, "value"), None);
        assert_eq!(text_field(r#"{"value":"cut"#, "value"), None);
    }

    #[test]
    fn a_body_ends_where_its_length_says() {
        let text = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcdef";
        assert_eq!(read_body(&text[..]).ok().as_deref(), Some("abc"));
    }
}

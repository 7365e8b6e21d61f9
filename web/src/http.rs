//! Files on a server, read by byte range.
//!
//! A server that does not know ranges answers with the whole file, which may be larger than any memory: it is found out by its
//! status, before its body is read. Every answer is checked to be the range that was asked for, of a file as long and as old as
//! the one that was opened; anything else would be wrong numbers in a weight. The rules stand here, apart from how requests are
//! made, so that they are tested natively as well ([`Server`] is `fetch` in the page and a socket in the tests).

use std::sync::Arc;

use ebbtide::rt::{Shared, Sink, Waiting};
use ebbtide::weights::{Fetch, Source};
use ebbtide::{Error, Result};

/// Tries of a request that fails on its way.
const TRIES: u32 = 4;

/// Makes requests.
pub trait Server: Shared {
    /// Asks for bytes `first ..= last` of a file, and waits for the answer's head alone. An error is one of the way there.
    fn get<'a>(&'a self, url: &'a str, first: u64, last: u64) -> Waiting<'a, Result<Box<dyn Answer>, String>>;
    /// Waits before a request is made again, the longer the more tries there were.
    fn wait(&self, tries: u32) -> Waiting<'_, ()>;
}

/// An answer of which the head has come. Dropping it ends the request.
pub trait Answer: Shared {
    /// The status.
    fn status(&self) -> u16;
    /// A field of the head.
    fn header(&self, name: &str) -> Option<String>;
    /// Reads the body into `sink` and returns how many bytes it had; ends the request as soon as it has more than fit, and
    /// then returns more than fit.
    fn body<'a>(&'a mut self, sink: &'a mut Sink<'_>) -> Waiting<'a, Result<u64, String>>;
}

/// A file on a server.
pub struct HttpFile {
    server: Arc<dyn Server>,
    url: String,
    len: u64,
    /// The server's word for this state of the file, where it has one.
    tag: Option<String>,
}

impl HttpFile {
    /// Asks for the first byte of a file, and so for its length. `None` if there is no such file.
    ///
    /// Errors: [`Error::Io`] if the server cannot be reached, refuses, or does not know byte ranges.
    pub async fn open(server: Arc<dyn Server>, url: &str) -> Result<Option<Source>> {
        let mut file = HttpFile { server, url: url.into(), len: 0, tag: None };
        let answer = file.ask(0, 0).await?;
        match answer.status() {
            404 | 410 => return Ok(None),
            // A file without any byte has no first one.
            416 if answer.header("content-range").is_some_and(|r| r.trim() == "bytes */0") => {}
            _ => file.len = file.check(&*answer, 0, 0)?,
        }
        file.tag = tag(&*answer);
        Ok(Some(Source::waiting(Arc::new(file))))
    }

    fn error(&self, reason: impl Into<String>) -> Error {
        Error::Io { file: self.url.clone(), reason: reason.into() }
    }

    /// Asks until there is an answer.
    async fn ask(&self, first: u64, last: u64) -> Result<Box<dyn Answer>> {
        let mut tries = 1;
        loop {
            let failed = match self.server.get(&self.url, first, last).await {
                Ok(answer) if !matches!(answer.status(), 429 | 500..=599) => return Ok(answer),
                Ok(answer) => format!("the server answered {}", answer.status()),
                Err(reason) => reason,
            };
            if tries == TRIES {
                return Err(self.error(format!("{failed} ({TRIES} tries)")));
            }
            self.server.wait(tries).await;
            tries += 1;
        }
    }

    /// The length of the whole file, if the answer is what was asked for.
    fn check(&self, answer: &dyn Answer, first: u64, last: u64) -> Result<u64> {
        match answer.status() {
            206 => {}
            200 => {
                let reason = "the server does not know byte ranges: it would send the whole file. Put the files on a server \
                              that does, or open them from this computer";
                return Err(self.error(reason));
            }
            other => return Err(self.error(format!("the server answered {other}"))),
        }
        let Some(range) = answer.header("content-range") else {
            let reason = "the server does not let the page see which bytes it sent (Access-Control-Expose-Headers has to name \
                          Content-Range)";
            return Err(self.error(reason));
        };
        match parse_content_range(&range) {
            Some((f, l, total)) if (f, l) == (first, last) && last < total => Ok(total),
            _ => Err(self.error(format!("asked for bytes {first} to {last}, the server sent `{range}`"))),
        }
    }

    async fn read(&self, offset: u64, mut sink: Sink<'_>) -> Result<()> {
        let len = sink.len() as u64;
        if len == 0 {
            return Ok(());
        }
        let last = offset + len - 1;
        let mut tries = 1;
        loop {
            let mut answer = self.ask(offset, last).await?;
            let changed = |reason: String| Error::SourceChanged { file: self.url.clone(), reason };
            if answer.status() == 416 {
                return Err(changed("it is shorter now".into()));
            }
            let total = self.check(&*answer, offset, last)?;
            if total != self.len {
                return Err(changed(format!("its size was {} bytes and is {total} bytes", self.len)));
            }
            if let (Some(then), Some(now)) = (&self.tag, tag(&*answer))
                && *then != now
            {
                return Err(changed(format!("the server's mark of it was {then} and is {now}")));
            }
            let failed = match answer.body(&mut sink).await {
                Ok(n) if n == len => return Ok(()),
                Ok(n) if n > len => {
                    return Err(self.error(format!("asked for {len} bytes at byte {offset}, the server sent more")));
                }
                Ok(n) => format!("{len} bytes at byte {offset} were asked for, {n} came"),
                Err(reason) => reason,
            };
            if tries == TRIES {
                return Err(self.error(format!("{failed} ({TRIES} tries)")));
            }
            self.server.wait(tries).await;
            tries += 1;
        }
    }
}

impl Fetch for HttpFile {
    fn name(&self) -> &str {
        &self.url
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn fetch<'a>(&'a self, offset: u64, sink: Sink<'a>) -> Waiting<'a, Result<()>> {
        Box::pin(self.read(offset, sink))
    }
}

/// What changes when the file does. A weak tag may stand for other bytes, and a time is better than nothing.
fn tag(answer: &dyn Answer) -> Option<String> {
    answer.header("etag").filter(|tag| !tag.starts_with("W/")).or_else(|| answer.header("last-modified"))
}

/// `bytes first-last/total` (RFC 9110, 14.4).
fn parse_content_range(text: &str) -> Option<(u64, u64, u64)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.trim().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let (first, last, total) = (number(first)?, number(last)?, number(total)?);
    (first <= last).then_some((first, last, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_range_is_read_beyond_four_gigabytes_and_nothing_else_is_taken_for_one() {
        let text = "bytes 5000000000-5000000009/6000000000";
        assert_eq!(parse_content_range(text), Some((5_000_000_000, 5_000_000_009, 6_000_000_000)));
        for bad in ["", "bytes", "bytes 1-2", "bytes */9", "bytes 1-2/*", "bytes 2-1/9", "lines 1-2/9", "bytes a-2/9"] {
            assert_eq!(parse_content_range(bad), None, "{bad}");
        }
    }
}

//! Requests by the browser's `fetch`.

use ebbtide::rt::{Sink, Waiting, pause};
use ebbtide::{Error, Result};
use js_sys::{Reflect, Uint8Array};
use wasm_bindgen::JsCast;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::{AbortController, Blob, Headers, ReadableStreamDefaultReader, RequestCache, RequestInit, Response};

use super::words;
use crate::http::{Answer, Server};

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_name = fetch)]
    fn fetch_of_the_browser(url: &str, init: &RequestInit) -> js_sys::Promise;
}

/// The browser.
pub struct Browser;

struct BrowserAnswer {
    response: Response,
    abort: AbortController,
}

impl Drop for BrowserAnswer {
    fn drop(&mut self) {
        // Without effect once the body has come; before, nothing more of it is sent.
        self.abort.abort();
    }
}

async fn ask(url: &str, range: Option<(u64, u64)>) -> Result<BrowserAnswer, JsValue> {
    let abort = AbortController::new()?;
    let init = RequestInit::new();
    init.set_method("GET");
    init.set_signal(Some(&abort.signal()));
    if let Some((first, last)) = range {
        let headers = Headers::new()?;
        headers.set("Range", &format!("bytes={first}-{last}"))?;
        init.set_headers(&headers);
        // Parts of large files are read once a step; the browser's cache would keep them all.
        init.set_cache(RequestCache::NoStore);
    }
    let response = JsFuture::from(fetch_of_the_browser(url, &init)).await?.dyn_into::<Response>()?;
    Ok(BrowserAnswer { response, abort })
}

impl Server for Browser {
    fn get<'a>(&'a self, url: &'a str, first: u64, last: u64) -> Waiting<'a, Result<Box<dyn Answer>, String>> {
        Box::pin(async move {
            match ask(url, Some((first, last))).await {
                Ok(answer) => Ok(Box::new(answer) as Box<dyn Answer>),
                Err(error) => Err(format!(
                    "the browser could not fetch it ({}): the address is wrong, the server gone, or one of the two forbids it",
                    words(&error)
                )),
            }
        })
    }

    fn wait(&self, tries: u32) -> Waiting<'_, ()> {
        Box::pin(pause(200 << tries.min(6)))
    }
}

impl Answer for BrowserAnswer {
    fn status(&self) -> u16 {
        self.response.status()
    }

    fn header(&self, name: &str) -> Option<String> {
        self.response.headers().get(name).ok().flatten()
    }

    fn body<'a>(&'a mut self, sink: &'a mut Sink<'_>) -> Waiting<'a, Result<u64, String>> {
        Box::pin(async move {
            let read = async {
                let Some(body) = self.response.body() else { return Ok(0) };
                let reader: ReadableStreamDefaultReader = body.get_reader().unchecked_into();
                let mut at = 0usize;
                loop {
                    let piece = JsFuture::from(reader.read()).await?;
                    if Reflect::get(&piece, &"done".into())?.is_truthy() {
                        return Ok(at as u64);
                    }
                    let bytes: Uint8Array = Reflect::get(&piece, &"value".into())?.dyn_into()?;
                    let end = at + bytes.length() as usize;
                    if end > sink.len() {
                        return Ok(end as u64);
                    }
                    sink.put_host(at, &bytes);
                    at = end;
                }
            };
            read.await.map_err(|e: JsValue| words(&e))
        })
    }
}

/// A file beside the page, as a whole, in the browser's store.
pub async fn whole(path: &str) -> Result<Blob> {
    let io = |reason: String| Error::Io { file: path.into(), reason };
    let answer = ask(path, None).await.map_err(|e| io(words(&e)))?;
    if !answer.response.ok() {
        return Err(io(format!("the server answered {}", answer.response.status())));
    }
    let blob = answer.response.blob().map_err(|e| io(words(&e)))?;
    JsFuture::from(blob).await.map(|b| b.unchecked_into()).map_err(|e| io(words(&e)))
}

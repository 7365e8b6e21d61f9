//! Training data: `train.jsonl` and `valid.jsonl`, scanned once and read again row by row.
//!
//! A scan keeps of each row where it lies and how many tokens it has: 24 bytes, however long its text. So host memory does
//! not grow with the texts, the longest row is known before anything is planned (a long row late in the data is a known way
//! to run out of memory at night), and a bad line is found, by file and line, before the first step. Rows are read and
//! encoded again when their turn comes; a file that changed since the scan is [`Error::SourceChanged`].
//!
//! Three forms: `text`; `prompt` and `completion` (joined as they are: a completion brings its own space); `messages`
//! (by the model's chat template). Texts of the first two get the end token, once; a template writes its own ends.
//! With `mask_prompt` only tokens of the completion, or of the last message, are trained; the ids are the same without.

mod order;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::llm::config::ModelConfig;
use crate::llm::hub::optional_file;
use crate::llm::template::{ChatTemplate, Message};
use crate::llm::tokenizer::Tokenizer;
use crate::rt::file::is_folder;
use crate::weights::Source;
use crate::weights::fingerprint::Fingerprint;
use crate::weights::safetensors::format_error;

pub use order::{Batches, Order};

/// The most bytes of a line.
const MAX_LINE_BYTES: usize = 16 << 20;
/// Bytes read at once while scanning.
const CHUNK: usize = 1 << 18;

/// How rows become tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataOptions {
    /// Train the completion, or the last message, only.
    pub mask_prompt: bool,
    /// Rows are cut after so many tokens (`--max-seq-length`).
    pub max_tokens: u64,
}

/// A row as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Token ids.
    pub ids: Vec<i32>,
    /// The first token that is trained, that is: predicted from those before it. Never 0.
    pub from: usize,
    /// Tokens that were cut off at the end.
    pub cut: u64,
}

impl Example {
    /// Tokens that are trained.
    pub fn trained(&self) -> u64 {
        self.ids.len().saturating_sub(self.from) as u64
    }
}

/// Turns lines into tokens.
#[derive(Clone, Debug)]
pub struct Encoder {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    end: u32,
    vocabulary: u64,
    options: DataOptions,
}

#[derive(Deserialize)]
struct Line {
    text: Option<String>,
    prompt: Option<String>,
    completion: Option<String>,
    messages: Option<Vec<Message>>,
}

impl Encoder {
    /// `end`: the token that ends a text. `vocabulary`: rows of the model's embedding, which all ids must be below.
    ///
    /// Errors: [`Error::Invalid`] if no token could be trained (`max_tokens` below 2) or `end` is no row of the embedding.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        template: Option<ChatTemplate>,
        end: u32,
        vocabulary: u64,
        options: DataOptions,
    ) -> Result<Encoder> {
        if options.max_tokens < 2 || options.max_tokens > u64::from(u32::MAX) {
            let reason = format!("{} tokens: a row needs at least 2, and at most {}", options.max_tokens, u32::MAX);
            return Err(Error::Invalid { what: "--max-seq-length".into(), reason });
        }
        let encoder = Encoder { tokenizer, template, end, vocabulary, options };
        encoder.known(end).map_err(|reason| Error::Invalid { what: "the end token".into(), reason })?;
        Ok(encoder)
    }

    /// For a model: its end token is the tokenizer's, or the first of the configuration's; its chat template is the
    /// tokenizer's.
    ///
    /// Errors: as [`Encoder::new`]; [`Error::Format`] if the template is none; [`Error::NotFound`] if there is no end token.
    pub fn of_model(tokenizer: Arc<Tokenizer>, config: &ModelConfig, options: DataOptions) -> Result<Encoder> {
        let end = tokenizer.eos().map(|s| s.id).or_else(|| config.eos.first().copied());
        let end = end.ok_or_else(|| Error::NotFound {
            what: "end token",
            name: tokenizer.file().to_owned(),
            hint: Some("neither tokenizer_config.json nor config.json names one".into()),
        })?;
        let template = ChatTemplate::of_tokenizer(&tokenizer)?;
        Encoder::new(tokenizer, template, end, config.vocabulary, options)
    }

    /// What cuts texts into tokens.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The token that ends a text, which also fills rows up.
    pub fn end(&self) -> u32 {
        self.end
    }

    fn known(&self, id: u32) -> std::result::Result<i32, String> {
        let fits = i32::try_from(id).ok().filter(|_| u64::from(id) < self.vocabulary);
        fits.ok_or_else(|| {
            format!("token {id} is none of the model's {} (is the tokenizer another model's?)", self.vocabulary)
        })
    }

    /// The tokens of a line, without the name of its place.
    fn encode(&self, line: &[u8]) -> std::result::Result<Example, String> {
        // An array would be read as the fields in order.
        if line.trim_ascii_start().first() != Some(&b'{') {
            return Err("not a JSON object".into());
        }
        let line: Line = serde_json::from_slice(line).map_err(|e| {
            // The line within a line says nothing.
            let text = e.to_string();
            format!("not a JSON object of the expected form: {}", text.replace(" at line 1 column ", " at column "))
        })?;
        let failed = |e: Error| e.to_string();
        let mask = self.options.mask_prompt;
        let (text, prompt, template) = match line {
            Line { text: Some(text), prompt: None, completion: None, messages: None } => {
                if mask {
                    return Err(
                        "`text` has no prompt to mask: --mask-prompt needs `prompt` and `completion`, or `messages`"
                            .into(),
                    );
                }
                (text, 0, false)
            }
            Line { text: None, prompt: Some(prompt), completion: Some(completion), messages: None } => {
                let length = prompt.len();
                (prompt + &completion, length, false)
            }
            Line { text: None, prompt: None, completion: None, messages: Some(messages) } => {
                let (text, prompt) = self.chat(&messages)?;
                (text, prompt, true)
            }
            _ => return Err("expected exactly one of `text`, `prompt` with `completion`, and `messages`".into()),
        };
        let mut tokens = self.tokenizer.encode_tokens(&text, !template).map_err(failed)?;
        if !template && tokens.last().is_none_or(|t| t.id != self.end) {
            tokens.push(crate::llm::tokenizer::Token { id: self.end, end: usize::MAX });
        }
        let whole = tokens.len();
        tokens.truncate(usize::try_from(self.options.max_tokens).unwrap_or(usize::MAX));
        let ids = tokens.iter().map(|t| self.known(t.id)).collect::<std::result::Result<Vec<i32>, String>>()?;
        // A token that reaches from the prompt into the completion is the completion's: it has to be learned.
        let first = if mask { tokens.iter().position(|t| t.end > prompt).unwrap_or(ids.len()) } else { 0 };
        Ok(Example { from: first.max(1), cut: (whole - ids.len()) as u64, ids })
    }

    /// The text of a chat, and how much of it is not the last message's.
    fn chat(&self, messages: &[Message]) -> std::result::Result<(String, usize), String> {
        let Some(template) = &self.template else {
            return Err("`messages` need a chat template, and the model has none".into());
        };
        let Some((last, before)) = messages.split_last() else { return Err("`messages` is empty".into()) };
        let failed = |e: Error| e.to_string();
        let text = template.render(messages, false).map_err(failed)?;
        if !self.options.mask_prompt {
            return Ok((text, 0));
        }
        let prompt = template.render(before, last.role() == "assistant").map_err(failed)?;
        match text.starts_with(&prompt) {
            true => Ok((text, prompt.len())),
            false => Err("--mask-prompt cannot tell the last message: the chat template writes the others differently without it".into()),
        }
    }
}

/// What is kept of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    offset: u64,
    bytes: u32,
    line: u32,
    /// Tokens after cutting.
    pub(crate) tokens: u32,
    trained: u32,
}

/// What a scan found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataStats {
    /// Rows of the file.
    pub rows: u64,
    /// Tokens of the rows that are used, after cutting.
    pub tokens: u64,
    /// Tokens of the longest row, after cutting.
    pub longest: u64,
    /// Tokens that are trained in one pass.
    pub trained: u64,
    /// Rows that were cut.
    pub cut_rows: u64,
    /// Tokens that were cut off.
    pub cut_tokens: u64,
    /// Rows of which no token would be trained: they are left out.
    pub untrained_rows: u64,
}

impl DataStats {
    /// What the user has to be told, in words; `most` is `--max-seq-length`.
    pub fn notes(&self, most: u64) -> Vec<String> {
        let mut notes = Vec::new();
        if self.cut_rows > 0 {
            notes.push(format!(
                "{} of {} rows are longer than {most} tokens and are cut: {} tokens are not trained (--max-seq-length)",
                self.cut_rows, self.rows, self.cut_tokens
            ));
        }
        if self.untrained_rows > 0 {
            notes
                .push(format!("{} of {} rows have no token to train and are left out", self.untrained_rows, self.rows));
        }
        notes
    }
}

/// A scanned file of rows.
#[derive(Clone, Debug)]
pub struct Dataset {
    source: Source,
    encoder: Arc<Encoder>,
    rows: Vec<Row>,
    stats: DataStats,
}

impl Dataset {
    /// Reads the file through once, in pieces, and checks every row.
    ///
    /// Errors: [`Error::Format`] naming file and line of the first bad row, or if there is no row or no token to train;
    /// what [`Source::fill`] returns.
    pub async fn scan(source: Source, encoder: Arc<Encoder>) -> Result<Dataset> {
        let mut set = Dataset { source, encoder, rows: Vec::new(), stats: DataStats::default() };
        let mut chunk = vec![0; CHUNK];
        let mut line: Vec<u8> = Vec::new();
        let (mut at, mut begin, mut number) = (0, 0, 1);
        while at < set.source.len() {
            let n = usize::try_from(set.source.len() - at).map_or(CHUNK, |left| left.min(CHUNK));
            set.source.fill(at, &mut chunk[..n]).await?;
            at += n as u64;
            for part in chunk[..n].split_inclusive(|b| *b == b'\n') {
                if line.len() + part.len() > MAX_LINE_BYTES {
                    return Err(set.bad(number, format!("the line has more than {MAX_LINE_BYTES} bytes")));
                }
                line.extend_from_slice(part);
                if part.ends_with(b"\n") {
                    set.add(begin, number, &line)?;
                    begin += line.len() as u64;
                    number = number.checked_add(1).ok_or_else(|| set.bad(number, "too many lines"))?;
                    line.clear();
                }
            }
        }
        set.add(begin, number, &line)?;
        if set.rows.is_empty() {
            let what = if set.stats.rows == 0 { "it has no rows" } else { "none of its rows has a token to train" };
            return Err(format_error(set.source.name(), None, what));
        }
        set.rows.shrink_to_fit();
        Ok(set)
    }

    fn bad(&self, line: u32, reason: impl AsRef<str>) -> Error {
        format_error(&format!("{}:{line}", self.source.name()), None, reason)
    }

    fn add(&mut self, offset: u64, line: u32, text: &[u8]) -> Result<()> {
        let mark = if line == 1 && text.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
        let text = &text[mark..];
        if text.trim_ascii().is_empty() {
            return Ok(());
        }
        let example = self.encoder.encode(text).map_err(|reason| self.bad(line, reason))?;
        let stats = &mut self.stats;
        stats.rows += 1;
        stats.cut_rows += u64::from(example.cut > 0);
        stats.cut_tokens += example.cut;
        if example.trained() == 0 {
            // Left out: a window of nothing but such rows would have no loss.
            stats.untrained_rows += 1;
            return Ok(());
        }
        stats.tokens += example.ids.len() as u64;
        stats.longest = stats.longest.max(example.ids.len() as u64);
        stats.trained += example.trained();
        // Both are bounded by MAX_LINE_BYTES and max_tokens.
        self.rows.push(Row {
            offset: offset + mark as u64,
            bytes: text.len() as u32,
            line,
            tokens: example.ids.len() as u32,
            trained: example.trained() as u32,
        });
        Ok(())
    }

    /// What the scan found.
    pub fn stats(&self) -> DataStats {
        self.stats
    }

    /// What turns its lines into tokens.
    pub fn encoder(&self) -> &Encoder {
        &self.encoder
    }

    /// Number of rows that are used; at least 1.
    #[allow(clippy::len_without_is_empty, reason = "a scan refuses a file without rows")]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Names these rows as this encoder reads them, for checkpoints: a training that goes on over other data is not the
    /// same training.
    pub fn fingerprint(&self) -> u64 {
        let print = Fingerprint::new().bytes(&self.source.len().to_le_bytes());
        let all = self.rows.iter().fold(print, |print, row| {
            print.bytes(&row.offset.to_le_bytes()).bytes(&row.tokens.to_le_bytes()).bytes(&row.trained.to_le_bytes())
        });
        all.value()
    }

    /// Reads a row again and encodes it.
    ///
    /// Errors: [`Error::NotFound`] if there is no such row; [`Error::SourceChanged`] if the file, or this row of it, is not
    /// what was scanned.
    pub async fn example(&self, row: u32) -> Result<Example> {
        let Some(kept) = self.rows.get(row as usize) else {
            let hint = Some(format!("{} has {} rows", self.source.name(), self.rows.len()));
            return Err(Error::NotFound { what: "row", name: row.to_string(), hint });
        };
        let mut text = vec![0; kept.bytes as usize];
        self.source.fill(kept.offset, &mut text).await?;
        let example = self.encoder.encode(&text);
        match example {
            Ok(e) if e.ids.len() as u64 == u64::from(kept.tokens) && e.trained() == u64::from(kept.trained) => Ok(e),
            _ => {
                let reason = format!("line {} is not what it was when the file was scanned", kept.line);
                Err(Error::SourceChanged { file: self.source.name().to_owned(), reason })
            }
        }
    }
}

/// The files of `--data`.
#[derive(Clone, Debug)]
pub struct DataFiles {
    /// `train.jsonl`, or the file itself.
    pub train: Source,
    /// `valid.jsonl`, where there is one.
    pub valid: Option<Source>,
}

impl DataFiles {
    /// The files of a folder, or a file alone.
    ///
    /// Errors: [`Error::Io`] if there is nothing; [`Error::NotFound`] if the folder has no `train.jsonl`.
    pub fn open(path: impl AsRef<Path>) -> Result<DataFiles> {
        let path = path.as_ref();
        if !is_folder(path)? {
            return Ok(DataFiles { train: Source::open(path)?, valid: None });
        }
        let train = optional_file(path, "train.jsonl")?.ok_or_else(|| Error::NotFound {
            what: "data file",
            name: "train.jsonl".into(),
            hint: Some(format!("{} needs one, and may have a valid.jsonl", path.display())),
        })?;
        Ok(DataFiles { train, valid: optional_file(path, "valid.jsonl")? })
    }
}

//! Text to token ids and back, by the model's own `tokenizer.json`.
//!
//! The rules are those of the `tokenizers` crate; what is added here prevents the failures around it: a tokenizer file that
//! cuts or pads texts by itself, or splits them at random, would change a training silently, so the first two are switched
//! off and the third is refused; what would make the crate panic is refused before it is given to it; a multi-byte character
//! that arrives in parts is held back while streaming ([`TextStream`]) instead of being printed as rubbish.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;

use crate::error::{Error, Result};
use crate::llm::hub::{optional_file, read_small};
use crate::weights::Source;
use crate::weights::safetensors::format_error;

/// The most bytes of a `tokenizer.json` (that of Llama 3 has 9 MB).
const MAX_TOKENIZER_BYTES: u64 = 64 << 20;
/// The most bytes of a `tokenizer_config.json`.
const MAX_SETTINGS_BYTES: u64 = 8 << 20;
/// The most bytes of a text that is encoded at once.
const MAX_TEXT_BYTES: usize = 64 << 20;

/// A special token: its text and id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Special {
    /// The text.
    pub text: String,
    /// The id.
    pub id: u32,
}

/// A token of an encoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The id.
    pub id: u32,
    /// Where its part of the text ends, in bytes; 0 for a token that was added and stands for no text.
    pub end: usize,
}

/// A model's tokenizer with what `tokenizer_config.json` says about it.
pub struct Tokenizer {
    file: String,
    inner: tokenizers::Tokenizer,
    vocabulary: u64,
    bos: Option<Special>,
    eos: Option<Special>,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
    templates: Vec<(String, String)>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("file", &self.file)
            .field("vocabulary", &self.vocabulary)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// What is looked at in a `tokenizer.json` before the crate sees it.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: OutlineModel,
}

#[derive(Deserialize)]
struct OutlineModel {
    #[serde(default)]
    dropout: Value,
}

impl Outline {
    fn check(&self) -> Result<(), String> {
        if self.model.dropout.as_f64().is_some_and(|rate| rate > 0.0) {
            return Err("field `model.dropout`: texts would be split at random, which is not supported".into());
        }
        let sections = [
            ("normalizer", &self.normalizer),
            ("pre_tokenizer", &self.pre_tokenizer),
            ("post_processor", &self.post_processor),
            ("decoder", &self.decoder),
        ];
        sections.into_iter().filter(|(_, v)| !v.is_null()).try_for_each(|(name, v)| typed(name, v))
    }
}

/// Every step is an object with a type, as the crate takes for granted.
fn typed(name: &str, step: &Value) -> Result<(), String> {
    let kind = step.get("type").and_then(Value::as_str);
    match kind {
        None => return Err(format!("field `{name}`: expected an object with a `type`")),
        Some("Precompiled") => return Err(format!("field `{name}`: the type `Precompiled` is not supported")),
        Some(_) => {}
    }
    for list in ["normalizers", "pretokenizers", "processors", "decoders"] {
        for inner in step.get(list).and_then(Value::as_array).into_iter().flatten() {
            typed(&format!("{name}.{list}"), inner)?;
        }
    }
    Ok(())
}

/// `tokenizer_config.json`, as far as it matters.
#[derive(Default, Deserialize)]
struct Settings {
    #[serde(default)]
    bos_token: Option<TokenText>,
    #[serde(default)]
    eos_token: Option<TokenText>,
    #[serde(default)]
    add_bos_token: Option<bool>,
    #[serde(default)]
    add_eos_token: Option<bool>,
    #[serde(default)]
    added_tokens_decoder: Option<std::collections::BTreeMap<u32, AddedText>>,
    #[serde(default)]
    chat_template: Option<Templates>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenText {
    Plain(String),
    Object { content: String },
}

impl TokenText {
    fn text(&self) -> &str {
        match self {
            TokenText::Plain(text) | TokenText::Object { content: text } => text,
        }
    }
}

#[derive(Deserialize)]
struct AddedText {
    content: String,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model's folder with, where they are, `tokenizer_config.json` and
    /// `chat_template.jinja` (which comes before a template in the configuration).
    ///
    /// Errors: as [`Tokenizer::parse`]; [`Error::Io`] if there is no `tokenizer.json` or a file cannot be read;
    /// [`Error::Format`] if one is larger than 64 MiB (8 MiB for the other two).
    pub async fn open(folder: impl AsRef<Path>) -> Result<Tokenizer> {
        let folder = folder.as_ref();
        let source = Source::open(folder.join("tokenizer.json"))?;
        let text = read_small(&source, MAX_TOKENIZER_BYTES).await?;
        let settings = match optional_file(folder, "tokenizer_config.json")? {
            Some(source) => Some((source.name().to_owned(), read_small(&source, MAX_SETTINGS_BYTES).await?)),
            None => None,
        };
        let settings = settings.as_ref().map(|(file, text)| (file.as_str(), text.as_slice()));
        let mut tokenizer = Tokenizer::parse(source.name(), &text, settings)?;
        if let Some(source) = optional_file(folder, "chat_template.jinja")? {
            let text = String::from_utf8(read_small(&source, MAX_SETTINGS_BYTES).await?)
                .map_err(|e| format_error(source.name(), None, format!("not UTF-8: {e}")))?;
            tokenizer.templates.retain(|(name, _)| name != "default");
            tokenizer.templates.push(("default".into(), text));
        }
        Ok(tokenizer)
    }

    /// Reads the text of a `tokenizer.json` and, with its name, that of a `tokenizer_config.json`.
    ///
    /// Errors: [`Error::Format`] naming the file if one is not valid, splits texts at random, names a begin or end token
    /// that is no token, or if the two files contradict each other.
    pub fn parse(file: &str, text: &[u8], settings: Option<(&str, &[u8])>) -> Result<Tokenizer> {
        let refuse = |reason: String| format_error(file, None, reason);
        let outline: Outline =
            serde_json::from_slice(text).map_err(|e| refuse(format!("not a valid tokenizer: {e}")))?;
        outline.check().map_err(refuse)?;
        let mut inner =
            tokenizers::Tokenizer::from_bytes(text).map_err(|e| refuse(format!("not a valid tokenizer: {e}")))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| refuse(format!("its truncation cannot be switched off: {e}")))?;
        let (settings_file, settings) = match settings {
            None => (file, Settings::default()),
            Some((file, text)) => {
                // An array would be read as the fields in order.
                if text.trim_ascii_start().first() != Some(&b'{') {
                    return Err(format_error(file, None, "it holds no JSON object"));
                }
                let parsed: Settings = serde_json::from_slice(text)
                    .map_err(|e| format_error(file, None, format!("not a valid tokenizer configuration: {e}")))?;
                (file, parsed)
            }
        };
        for (id, added) in settings.added_tokens_decoder.iter().flatten() {
            add_token(&mut inner, *id, added).map_err(|reason| format_error(settings_file, None, reason))?;
        }
        let special = |name: &str, text: &Option<TokenText>| -> Result<Option<Special>> {
            let Some(text) = text.as_ref().map(TokenText::text) else { return Ok(None) };
            match inner.token_to_id(text) {
                Some(id) => Ok(Some(Special { text: text.to_owned(), id })),
                None => {
                    Err(format_error(settings_file, None, format!("field `{name}`: {text:?} is no token of {file}")))
                }
            }
        };
        let (bos, eos) = (special("bos_token", &settings.bos_token)?, special("eos_token", &settings.eos_token)?);
        for (name, add, token) in
            [("add_bos_token", settings.add_bos_token, &bos), ("add_eos_token", settings.add_eos_token, &eos)]
        {
            if add == Some(true) && token.is_none() {
                return Err(format_error(
                    settings_file,
                    None,
                    format!("field `{name}`: there is no such token to add"),
                ));
            }
        }
        let largest = inner.get_vocab(true).into_values().max();
        let vocabulary = largest.map_or(0, |id| u64::from(id) + 1);
        let templates = match settings.chat_template {
            None => Vec::new(),
            Some(Templates::One(text)) => vec![("default".into(), text)],
            Some(Templates::Named(all)) => all.into_iter().map(|t| (t.name, t.template)).collect(),
        };
        Ok(Tokenizer {
            file: file.to_owned(),
            inner,
            vocabulary,
            bos,
            eos,
            add_bos: settings.add_bos_token,
            add_eos: settings.add_eos_token,
            templates,
        })
    }

    /// The file it came from.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// One more than the largest id. A model's table may be larger (padded) but not smaller.
    pub fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    /// The token a text begins with, as `tokenizer_config.json` names it.
    pub fn bos(&self) -> Option<&Special> {
        self.bos.as_ref()
    }

    /// The token that ends a text, as `tokenizer_config.json` names it.
    pub fn eos(&self) -> Option<&Special> {
        self.eos.as_ref()
    }

    /// The text of the chat template of this name; the usual one is `default`.
    pub fn chat_template(&self, name: &str) -> Option<&str> {
        self.templates.iter().find(|(n, _)| n == name).map(|(_, text)| text.as_str())
    }

    /// The id of a token, by its text.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The ids of a text. `special`: with the tokens the files add at its ends; texts of a chat template bring their own.
    ///
    /// Errors: [`Error::Invalid`] if the text has more than 64 MiB, [`Error::Format`] if the tokenizer fails on it.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        Ok(self.encode_tokens(text, special)?.into_iter().map(|t| t.id).collect())
    }

    /// As [`Tokenizer::encode`], with where in the text each token ends.
    pub fn encode_tokens(&self, text: &str, special: bool) -> Result<Vec<Token>> {
        if text.len() > MAX_TEXT_BYTES {
            let reason = format!("{} bytes are more than the {MAX_TEXT_BYTES} that are encoded at once", text.len());
            return Err(Error::Invalid { what: "text".into(), reason });
        }
        let encode = |special| {
            let encoding =
                self.inner.encode(text, special).map_err(|e| self.failed("a text could not be encoded", &e))?;
            let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
            Ok::<_, Error>(tokens.map(|(id, (_, end))| Token { id: *id, end: *end }).collect::<Vec<_>>())
        };
        let mut tokens = encode(special)?;
        if special && (self.add_bos.is_some() || self.add_eos.is_some()) {
            // The configuration has the last word on what stands at the ends, as in transformers.
            let bare = encode(false)?;
            let (before, after) = added(&tokens, &bare);
            let own = |end: Option<&Special>| end.map(|s| Token { id: s.id, end: 0 });
            let ends = |add: Option<bool>, there: &[Token], token: Option<Token>| match add {
                None => there.to_vec(),
                Some(false) => Vec::new(),
                Some(true) => token.into_iter().collect(),
            };
            let mut all = ends(self.add_bos, before, own(self.bos()));
            let end = ends(self.add_eos, after, own(self.eos()));
            all.extend(bare);
            all.extend(end);
            tokens = all;
        }
        Ok(tokens)
    }

    /// The text of ids. `skip_special`: without special tokens.
    ///
    /// Errors: [`Error::Format`] if the tokenizer fails; an id that is no token gives no text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(|e| self.failed("ids could not be decoded", &e))
    }

    /// A decoder for ids that come one by one.
    pub fn stream(&self, skip_special: bool) -> TextStream<'_> {
        TextStream { tokenizer: self, skip_special, ids: Vec::new(), given: String::new() }
    }

    fn failed(&self, what: &str, error: &dyn std::fmt::Display) -> Error {
        format_error(&self.file, None, format!("{what}: {error}"))
    }
}

/// Makes sure that the token of `tokenizer_config.json` is one of the tokenizer, under this id.
fn add_token(inner: &mut tokenizers::Tokenizer, id: u32, added: &AddedText) -> Result<(), String> {
    let content = &added.content;
    if inner.token_to_id(content).is_none() {
        let token = AddedToken::from(content.clone(), added.special)
            .lstrip(added.lstrip)
            .rstrip(added.rstrip)
            .normalized(added.normalized)
            .single_word(added.single_word);
        if added.special {
            inner.add_special_tokens(&[token])
        } else {
            inner.add_tokens(&[token])
        };
    }
    match inner.token_to_id(content) {
        Some(there) if there == id => Ok(()),
        there => Err(format!(
            "field `added_tokens_decoder`: {content:?} is said to be {id}, but the tokenizer has it as {there:?}"
        )),
    }
}

/// What stands before and after `bare` in `all`; nothing if `bare` is not within.
fn added<'a>(all: &'a [Token], bare: &[Token]) -> (&'a [Token], &'a [Token]) {
    let extra = all.len().saturating_sub(bare.len());
    for before in 0..=extra {
        let inside = all.get(before..before + bare.len());
        let same = inside.is_some_and(|inside| inside.iter().zip(bare).all(|(a, b)| a.id == b.id));
        // With no text there is nothing to tell before from after by: the first half is before.
        if same && (!bare.is_empty() || before >= extra.div_ceil(2)) {
            return (&all[..before], &all[before + bare.len()..]);
        }
    }
    (&[], &[])
}

/// The replacement character that stands for bytes which are no UTF-8 (yet).
const BROKEN: char = '\u{FFFD}';
/// Tokens after which the window of a stream is cut back, and those kept: they carry the context for spaces.
const WINDOW: (usize, usize) = (32, 8);

/// Without what may become another text: bytes that are no character yet show as up to three replacement characters.
fn certain(text: &str) -> &str {
    (0..3).fold(text, |text, _| text.strip_suffix(BROKEN).unwrap_or(text))
}

/// Ids to text, piece by piece: the pieces together are the text of all ids, and none ends within a character.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// The last ids.
    ids: Vec<u32>,
    /// That part of their text which was given out.
    given: String,
}

impl TextStream<'_> {
    /// Adds an id and returns the text that is certain now; often empty while a character is incomplete.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids, self.skip_special)?;
        let new = self.new_part(certain(&text), id);
        if self.ids.len() >= WINDOW.0 {
            let kept = self.ids[self.ids.len() - WINDOW.1..].to_vec();
            let kept_text = self.tokenizer.decode(&kept, self.skip_special)?;
            let given = certain(&kept_text);
            // Only where what is held back is the same, so that nothing of it is lost or told twice.
            if text.get(self.given.len()..) == kept_text.get(given.len()..) {
                self.given = given.to_owned();
                self.ids = kept;
            }
        }
        Ok(new)
    }

    /// The rest: what was held back, with the replacement character where bytes never became a character.
    pub fn finish(mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids, self.skip_special)?;
        Ok(self.new_part(&text, 0))
    }

    fn new_part(&mut self, certain: &str, id: u32) -> String {
        if let Some(new) = certain.strip_prefix(self.given.as_str()) {
            let new = new.to_owned();
            self.given.push_str(&new);
            return new;
        }
        if !self.given.starts_with(certain) {
            // A byte that spoils characters already given out (tokenizers which judge a run of bytes as a whole): what
            // was given stays, and the stream goes on behind it.
            self.ids = vec![id];
            self.given.clear();
        }
        String::new()
    }
}

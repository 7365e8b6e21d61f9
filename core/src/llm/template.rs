//! Chat templates: from messages to the text the model was trained to continue.
//!
//! A template is a program that came with a download. It is run with fuel, so that it ends; without loaders, so that it
//! reaches no file; and without a clock: `strftime_now` is not there, since a training text that depends on the day cannot
//! be made again. (Templates that ask whether it is defined fall back to a fixed date.) Otherwise the rules are those of
//! transformers: blocks are trimmed, `tojson` writes as Python does, `raise_exception` refuses.

use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, ErrorKind};
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::llm::tokenizer::{Special, Tokenizer};
use crate::weights::safetensors::format_error;

/// Instructions and 64-byte units of data that one rendering may spend.
const FUEL: u64 = 1_000_000;
/// Calls within calls.
const DEPTH: usize = 64;
/// The most bytes of a template.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
const NAME: &str = "chat_template";

/// One message of a chat: an object with `role`, `content` and whatever else the template reads.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Value")]
pub struct Message(Value);

impl Message {
    /// A message of this role (`system`, `user`, `assistant`).
    pub fn new(role: &str, content: &str) -> Message {
        Message(minijinja::context! { role => role, content => content })
    }

    /// Its role.
    pub fn role(&self) -> String {
        self.field("role").as_str().unwrap_or_default().to_owned()
    }

    /// Its content, where that is a text.
    pub fn content(&self) -> Option<String> {
        self.field("content").as_str().map(str::to_owned)
    }

    fn field(&self, name: &str) -> Value {
        self.0.get_attr(name).unwrap_or(Value::UNDEFINED)
    }
}

impl TryFrom<Value> for Message {
    type Error = String;

    fn try_from(value: Value) -> std::result::Result<Message, String> {
        if value.kind() != ValueKind::Map {
            return Err("a message is an object with `role` and `content`".into());
        }
        let message = Message(value);
        if message.field("role").kind() != ValueKind::String {
            return Err("a message has no text `role`".into());
        }
        match message.field("content").kind() {
            ValueKind::String | ValueKind::Seq => Ok(message),
            ValueKind::None | ValueKind::Undefined if message.field("tool_calls").kind() == ValueKind::Seq => {
                Ok(message)
            }
            _ => Err("a message has no `content`".into()),
        }
    }
}

/// A model's chat template, parsed.
#[derive(Clone)]
pub struct ChatTemplate {
    file: String,
    environment: Arc<Environment<'static>>,
    bos: String,
    eos: String,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("file", &self.file).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Parses a template. `file` names it in errors; `bos` and `eos` are the texts of those tokens, empty if there are none.
    ///
    /// Errors: [`Error::Format`] with the line if it is no template or larger than 1 MiB.
    pub fn parse(file: &str, text: &str, bos: &str, eos: &str) -> Result<ChatTemplate> {
        if text.len() > MAX_TEMPLATE_BYTES {
            let reason = format!("its chat template has {} bytes, above the limit of {MAX_TEMPLATE_BYTES}", text.len());
            return Err(format_error(file, None, reason));
        }
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| failed(file, &e))?);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(DEPTH);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<Value, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("the template refuses: {message}")))
            },
        );
        environment.add_filter("tojson", tojson);
        environment.add_template_owned(NAME, without_generation_marks(text)).map_err(|e| failed(file, &e))?;
        Ok(ChatTemplate { file: file.into(), environment: Arc::new(environment), bos: bos.into(), eos: eos.into() })
    }

    /// The usual template of a tokenizer, if it has one. Errors: as [`ChatTemplate::parse`].
    pub fn of_tokenizer(tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        let special = |s: Option<&Special>| s.map(|s| s.text.clone()).unwrap_or_default();
        let parse =
            |text| ChatTemplate::parse(tokenizer.file(), text, &special(tokenizer.bos()), &special(tokenizer.eos()));
        tokenizer.chat_template("default").map(parse).transpose()
    }

    /// The text of a chat. `add_generation_prompt`: with the beginning of an answer.
    ///
    /// Errors: [`Error::Format`] if the template refuses the messages, fails, or runs out of fuel.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(|e| failed(&self.file, &e))?;
        let messages: Vec<Value> = messages.iter().map(|m| m.0.clone()).collect();
        let context = minijinja::context! {
            messages => messages,
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        template.render(context).map_err(|e| failed(&self.file, &e))
    }
}

fn failed(file: &str, error: &minijinja::Error) -> Error {
    let place = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    let what = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => "it does not come to an end".to_owned(),
        (ErrorKind::UnknownFunction, Some(detail)) if detail.contains("strftime_now") => {
            "it asks for the day (`strftime_now`), which is refused: the same messages would give another text tomorrow"
                .into()
        }
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    format_error(file, None, format!("chat template{place}: {what}"))
}

/// `{% generation %}` marks the answer for transformers' masks and prints nothing: it becomes a block that always holds.
fn without_generation_marks(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inside = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match inside {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// JSON as Python's `json.dumps(ensure_ascii=False)` writes it, which is what transformers puts in the place of Jinja's own.
fn tojson(value: &Value, kwargs: Kwargs) -> std::result::Result<String, minijinja::Error> {
    let bad = |e: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string());
    let indent: Option<usize> = kwargs.get("indent")?;
    for ignored in ["ensure_ascii", "sort_keys", "separators"] {
        let _: Option<Value> = kwargs.get(ignored)?;
    }
    kwargs.assert_all_used()?;
    let mut out = Vec::new();
    match indent {
        None => {
            let mut writer = serde_json::Serializer::with_formatter(&mut out, Spaced);
            serde::Serialize::serialize(value, &mut writer).map_err(bad)?;
        }
        Some(indent) => {
            let indent = vec![b' '; indent.min(16)];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&indent);
            let mut writer = serde_json::Serializer::with_formatter(&mut out, pretty);
            serde::Serialize::serialize(value, &mut writer).map_err(bad)?;
        }
    }
    String::from_utf8(out).map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// A space behind each comma and colon.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, w: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        w.write_all(b": ")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    fn render(template: &str, messages: &[Message], prompt: bool) -> Result<String> {
        ChatTemplate::parse("t", template, "<s>", "</s>")?.render(messages, prompt)
    }

    fn chat() -> Vec<Message> {
        vec![Message::new("user", " Low water? <&>' "), Message::new("assistant", "10:05.")]
    }

    #[test]
    fn llama_3s_shape_renders_with_headers_and_the_begin_token() {
        let template = "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n        \
            {%- set date_string = strftime_now(\"%d %b %Y\") %}\n    {%- else %}\n        {%- set date_string = \"26 Jul 2024\" %}\n    \
            {%- endif %}\n{%- endif %}\n{{- 'Today: ' + date_string + '\\n' }}\n{%- for message in messages %}\n    \
            {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}\n\
            {%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n";
        let text = render(template, &chat()[..1], true).unwrap();
        let expected = "<s>Today: 26 Jul 2024\n<|start_header_id|>user<|end_header_id|>\n\nLow water? <&>'<|eot_id|>\
            <|start_header_id|>assistant<|end_header_id|>\n\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn qwens_shape_renders_with_a_namespace_python_methods_and_reversed_messages() {
        let template = "{%- set ns = namespace(last=-1) %}\n{%- for message in messages[::-1] %}\n    \
            {%- set index = (messages|length - 1) - loop.index0 %}\n    \
            {%- if ns.last < 0 and message.role == 'user' and not(message.content.startswith('<tool>')) %}\n        \
            {%- set ns.last = index %}\n    {%- endif %}\n{%- endfor %}\n{%- for message in messages %}\n    \
            {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}\n        \
            {{- '<|im_start|>' + message.role + '\\n' + message.content.strip() + '<|im_end|>' + '\\n' }}\n    \
            {%- elif message.role == 'assistant' %}\n        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\n        \
            {{- '<|im_start|>' + message.role + '\\n' }}{% if loop.index0 > ns.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}\n        \
            {{- content + '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}\n\
            {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
        let text = render(template, &chat(), false).unwrap();
        let expected = "<|im_start|>user\nLow water? <&>'<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n10:05.<|im_end|>\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn what_the_template_refuses_is_an_error_with_its_words() {
        let e = render("{{ raise_exception('roles must alternate') }}", &chat(), false).unwrap_err();
        assert!(e.code() == "format" && e.to_string().contains("roles must alternate"), "{e}");
    }

    #[test]
    fn the_clock_files_and_endless_loops_are_out_of_reach() {
        let now = render("{{ strftime_now('%Y') }}", &chat(), false).unwrap_err();
        assert!(now.to_string().contains("tomorrow"), "{now}");
        for template in [
            "{% include '/etc/passwd' %}",
            "{% import 'x' as y %}",
            "{% extends 'x' %}",
            "{{ open('/etc/passwd') }}",
            "{{ messages.__class__.__mro__ }}",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for a in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "{{ 'a' * 999999999 * 9999 }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% for %}",
        ] {
            let e = render(template, &chat(), false).unwrap_err();
            assert_eq!(e.code(), "format", "{template}");
        }
        let deep = format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000));
        assert_eq!(render(&deep, &chat(), false).unwrap_err().code(), "format");
    }

    #[test]
    fn json_is_written_as_python_does_and_nothing_is_escaped_for_pages() {
        let json = |text: &str| render(text, &chat(), false).unwrap();
        assert_eq!(json("{{ messages[0] | tojson }}"), r#"{"role": "user", "content": " Low water? <&>' "}"#);
        assert_eq!(json("{{ [1, 'é'] | tojson(indent=2) }}"), "[\n  1,\n  \"é\"\n]");
        assert_eq!(json("{{ messages[0].content }}"), " Low water? <&>' ");
    }

    #[test]
    fn marks_of_the_answer_print_nothing_and_keep_their_trimming() {
        let template = "a {%- generation -%} b {%- endgeneration %} c{% generation %}d{% endgeneration %}";
        assert_eq!(render(template, &chat(), false).unwrap(), "ab cd");
    }

    #[test]
    fn a_message_without_role_or_content_is_refused() {
        let parse = |text: &str| serde_json::from_str::<Message>(text);
        for text in ["1", "{}", r#"{"role": "user"}"#, r#"{"role": 1, "content": "x"}"#, r#"{"content": "x"}"#] {
            assert!(parse(text).is_err(), "{text}");
        }
        let kept = parse(r#"{"z": 1, "role": "assistant", "content": null, "tool_calls": []}"#).unwrap();
        assert_eq!((kept.role().as_str(), kept.content()), ("assistant", None));
        let text = render("{{ messages[0] | tojson }}", &[kept], false).unwrap();
        assert_eq!(text, r#"{"z": 1, "role": "assistant", "content": null, "tool_calls": []}"#);
    }
}

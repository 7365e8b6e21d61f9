//! A conversation: at a terminal line by line, else the messages that were piped in.

use std::io::{BufRead, IsTerminal, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use ebbtide::llm::generator::Generator;
use ebbtide::llm::template::Message;
use ebbtide::{Cancel, Error};
use serde::Deserialize;

use super::speak::Speaker;
use super::{GenerateArgs, answer};
use crate::text::Texts;

const HELP: &str = "\
/adapter NAME   use this adapter; /adapter none: the bare model
/adapters       the adapters there are
/clear          begin a new conversation
/help           this list
/exit           end (or Ctrl-D)";

/// The messages that a conversation begins with: the system's, and one of the user's.
pub fn opening(args: &GenerateArgs, user: Option<&str>) -> Vec<Message> {
    let system = args.system.iter().map(|text| Message::new("system", text));
    system.chain(user.map(|text| Message::new("user", text))).collect()
}

/// Messages as they are piped in.
#[derive(Deserialize)]
#[serde(untagged)]
enum Piped {
    Bare(Vec<Message>),
    Row { messages: Vec<Message> },
}

/// Talks until the input ends.
pub async fn run(
    args: &GenerateArgs,
    texts: &Texts,
    generator: &mut Generator,
    speaker: &mut Speaker,
    context: u64,
    cancel: &Cancel,
) -> anyhow::Result<()> {
    let mut talk = Talk { args, texts, generator, speaker, context, cancel, messages: opening(args, None) };
    if std::io::stdin().is_terminal() {
        eprintln!("{HELP}");
        return talk.lines(true).await;
    }
    // Messages as JSON are one conversation, and its next message is what is asked for.
    let mut text = String::new();
    let mut lines = std::io::stdin().lock();
    lines.read_line(&mut text)?;
    if !text.trim_start().starts_with(['[', '{']) {
        drop(lines);
        talk.turn(text.trim_end_matches(['\r', '\n'])).await?;
        return talk.lines(false).await;
    }
    std::io::Read::read_to_string(&mut lines, &mut text)?;
    drop(lines);
    let messages = match serde_json::from_str(&text) {
        Ok(Piped::Bare(messages) | Piped::Row { messages }) if !messages.is_empty() => messages,
        Ok(_) => return Err(not_messages("there are none").into()),
        Err(e) => return Err(not_messages(&e.to_string()).into()),
    };
    talk.messages.extend(messages);
    talk.respond().await
}

fn not_messages(reason: &str) -> Error {
    Error::Invalid {
        what: "the messages on standard input".into(),
        reason: format!("{reason}; expected [{{\"role\": \"user\", \"content\": \"…\"}}, …], or one message a line"),
    }
}

struct Talk<'a> {
    args: &'a GenerateArgs,
    texts: &'a Texts,
    generator: &'a mut Generator,
    speaker: &'a mut Speaker,
    context: u64,
    cancel: &'a Cancel,
    messages: Vec<Message>,
}

impl Talk<'_> {
    async fn lines(&mut self, terminal: bool) -> anyhow::Result<()> {
        let lines = reader();
        loop {
            if terminal {
                eprint!("> ");
                let _ = std::io::stderr().flush();
            }
            let Some(line) = self.next(&lines)? else { return Ok(()) };
            match self.turn(&line).await {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                // A wrong command or a message too long is no reason to lose the conversation.
                Err(error)
                    if terminal
                        && matches!(error.downcast_ref(), Some(Error::Invalid { .. } | Error::NotFound { .. })) =>
                {
                    eprintln!("{error:#}");
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The next line; `None` at the end. A Ctrl-C while waiting ends the command.
    fn next(&self, lines: &Receiver<std::io::Result<String>>) -> anyhow::Result<Option<String>> {
        loop {
            match lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => return Ok(Some(line?)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if self.cancel.is_cancelled() => return Err(Error::Cancelled.into()),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// A command, or a message and its answer. Whether to go on.
    async fn turn(&mut self, line: &str) -> anyhow::Result<bool> {
        let line = line.trim();
        let Some(command) = line.strip_prefix('/') else {
            if !line.is_empty() {
                self.messages.push(Message::new("user", line));
                self.respond().await?;
            }
            return Ok(true);
        };
        match command.split_once(' ').map_or((command, ""), |(a, b)| (a, b.trim())) {
            ("exit" | "quit", _) => return Ok(false),
            ("clear", _) => self.messages = opening(self.args, None),
            ("adapters", _) => {
                let names: Vec<&str> = self.generator.adapters().collect();
                eprintln!("{}; in use: {}", names.join(", "), self.generator.active().unwrap_or("none"));
            }
            ("adapter", "none") => self.generator.select(None).await?,
            ("adapter", name) if !name.is_empty() => self.generator.select(Some(name)).await?,
            _ => eprintln!("{HELP}"),
        }
        Ok(true)
    }

    /// Answers the messages so far.
    async fn respond(&mut self) -> anyhow::Result<()> {
        let prompt = self.fitting()?;
        let text = answer(self.args, self.texts, self.generator, self.speaker, &prompt, self.cancel).await?;
        self.messages.push(Message::new("assistant", &text));
        Ok(())
    }

    /// The tokens of the conversation; what is oldest goes where there is no room.
    fn fitting(&mut self) -> anyhow::Result<Vec<i32>> {
        let system = usize::from(self.messages.first().is_some_and(|m| m.role() == "system"));
        loop {
            let prompt = self.texts.chat(&self.messages)?;
            if (prompt.len() as u64) < self.context {
                return Ok(prompt);
            }
            if self.messages.len() <= system + 2 {
                self.messages.pop();
                let reason =
                    format!("it has {} tokens, and the context {}; see --max-context", prompt.len(), self.context);
                return Err(Error::Invalid { what: "the message".into(), reason }.into());
            }
            // A question goes with its answer.
            self.messages.drain(system..system + 2);
            if !self.speaker.json() {
                eprintln!("[the context of {} tokens is full: the oldest question was forgotten]", self.context);
            }
        }
    }
}

/// Lines of standard input, read by a thread of their own, as waiting for one cannot be interrupted.
fn reader() -> Receiver<std::io::Result<String>> {
    let (to, lines) = sync_channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if to.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

//! The texts of a model: its tokenizer, its chat template, and the tokens that end an answer.

use std::path::Path;

use ebbtide::llm::config::ModelConfig;
use ebbtide::llm::hub::{optional_file, read_small};
use ebbtide::llm::template::{ChatTemplate, Message};
use ebbtide::llm::tokenizer::Tokenizer;
use ebbtide::{Error, Result};

/// The most bytes of a `generation_config.json`.
const MAX_SETTINGS: u64 = 1 << 20;

/// What turns messages into tokens and tokens into text.
pub struct Texts {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// Tokens that end an answer: the configuration's, `generation_config.json`'s, the tokenizer's.
    pub stop: Vec<i32>,
    vocabulary: u64,
}

impl Texts {
    /// Those of a model's folder.
    pub async fn open(folder: &Path, config: &ModelConfig) -> Result<Texts> {
        let tokenizer = Tokenizer::open(folder).await?;
        let mut config = config.clone();
        if let Some(source) = optional_file(folder, "generation_config.json")? {
            config.add_end_tokens(source.name(), &read_small(&source, MAX_SETTINGS).await?)?;
        }
        let mut stop: Vec<i32> = config.eos.iter().filter_map(|id| i32::try_from(*id).ok()).collect();
        stop.extend(tokenizer.eos().and_then(|s| i32::try_from(s.id).ok()).filter(|id| !stop.contains(id)));
        let template = ChatTemplate::of_tokenizer(&tokenizer)?;
        Ok(Texts { tokenizer, template, stop, vocabulary: config.vocabulary })
    }

    /// The tokens of a text to be gone on from.
    pub fn prompt(&self, text: &str) -> Result<Vec<i32>> {
        self.ids(text, true)
    }

    /// The tokens of a chat, up to where the answer begins.
    pub fn chat(&self, messages: &[Message]) -> Result<Vec<i32>> {
        let Some(template) = &self.template else {
            return Err(Error::Invalid {
                what: "--chat".into(),
                reason: "the model has no chat template; use --prompt alone, which is gone on from as it stands".into(),
            });
        };
        // A template writes its own beginning.
        self.ids(&template.render(messages, true)?, false)
    }

    fn ids(&self, text: &str, special: bool) -> Result<Vec<i32>> {
        let ids = self.tokenizer.encode(text, special)?;
        let known = |id: &u32| i32::try_from(*id).ok().filter(|_| u64::from(*id) < self.vocabulary);
        ids.iter()
            .map(|id| {
                known(id).ok_or_else(|| Error::Invalid {
                    what: format!("token {id} of the prompt"),
                    reason: format!("the model has {} (is the tokenizer another model's?)", self.vocabulary),
                })
            })
            .collect()
    }
}

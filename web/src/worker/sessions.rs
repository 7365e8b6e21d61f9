//! Kept sessions: model, data, settings and the training's state, in the browser's own file system.

use std::rc::Rc;

use ebbtide::llm::trainer::Checkpoint;
use ebbtide::weights::Source;
use ebbtide::{Catalog, Error, Result};
use serde::{Deserialize, Serialize};

use super::material::Data;
use super::train::{Trained, adapter_of};
use super::{Bench, missing};
use crate::protocol::{DataSettings, ModelFrom, Reply, RunSettings, SessionInfo};
use crate::sources::kept::{Keep, check_name};

const FOLDER: &str = "sessions";
const ABOUT: &str = "session.json";
const STATE: &str = "checkpoint.safetensors";
const ADAPTER: &str = "adapter_model.safetensors";
const TRAIN: &str = "train.jsonl";
const VALID: &str = "valid.jsonl";

/// What a session's folder says of itself. Written last: a folder without it is none.
#[derive(Deserialize, Serialize)]
struct About {
    format: u32,
    info: SessionInfo,
    model: ModelFrom,
    /// Of the model's files.
    fingerprint: String,
    data: String,
    data_settings: DataSettings,
    run: RunSettings,
    losses: Vec<(u64, f64)>,
}

impl Bench {
    pub async fn save_session(&self, name: &str) -> Result<Reply> {
        check_name(name)?;
        let (material, data) = (self.model()?, self.data()?);
        let trained = self.trained().ok_or_else(|| missing("training"))?;
        let adapter = adapter_of(&material, &trained.run)?.weights_file(&trained.values)?;
        let mut files =
            vec![(STATE, trained.checkpoint.to_vec()), (ADAPTER, adapter), (TRAIN, whole(&data.sources.0).await?)];
        if let Some(valid) = &data.sources.1 {
            files.push((VALID, whole(valid).await?));
        }
        let about = About {
            format: 1,
            info: SessionInfo {
                name: name.into(),
                model: material.name.clone(),
                steps: trained.steps,
                bytes: files.iter().map(|(_, bytes)| bytes.len() as u64).sum(),
                saved_at: js_sys::Date::now(),
            },
            model: material.from.clone(),
            fingerprint: format!("{:016x}", material.model.catalog().fingerprint()),
            data: data.info.name.clone(),
            data_settings: data.settings.clone(),
            run: trained.run.clone(),
            losses: trained.losses.clone(),
        };
        Keep::open(&[FOLDER]).await?.delete(name).await?;
        let folder = Keep::open(&[FOLDER, name]).await?;
        for (file, bytes) in &files {
            folder.write(file, bytes).await?;
        }
        folder.write(ABOUT, &serde_json::to_vec(&about).unwrap_or_default()).await?;
        self.sessions().await
    }

    pub async fn sessions(&self) -> Result<Reply> {
        let mut sessions = Vec::new();
        for name in Keep::open(&[FOLDER]).await?.names().await? {
            // What cannot be read is no session; it is not deleted, since a newer engine may know it.
            if let Ok(about) = about(&name).await {
                sessions.push(about.info);
            }
        }
        sessions.sort_by(|a, b| b.saved_at.total_cmp(&a.saved_at));
        Ok(Reply::Sessions { sessions })
    }

    pub async fn delete_session(&self, name: &str) -> Result<Reply> {
        check_name(name)?;
        Keep::open(&[FOLDER]).await?.delete(name).await?;
        self.sessions().await
    }

    pub async fn open_session(&self, id: u32, name: &str) -> Result<Reply> {
        check_name(name)?;
        let about = about(name).await?;
        let folder = Keep::open(&[FOLDER, name]).await?;
        let material = self.open_unless_open(id, &about.model, &about.fingerprint).await?;
        let broken =
            || Error::Format { file: name.into(), tensor: None, reason: "a file of the session is missing".into() };
        let train = Source::memory(TRAIN, folder.read(TRAIN).await?.ok_or_else(broken)?);
        let valid = folder.read(VALID).await?.map(|bytes| Source::memory(VALID, bytes));
        let data = Rc::new(Data::open(&material, about.data, (train, valid), &about.data_settings).await?);
        let state: std::sync::Arc<[u8]> = folder.read(STATE).await?.ok_or_else(broken)?.into();
        let adapter = adapter_of(&material, &about.run)?;
        let checkpoint = Checkpoint::open(Source::memory(STATE, state.clone()), &material.model, &adapter).await?;
        let weights = Source::memory(ADAPTER, folder.read(ADAPTER).await?.ok_or_else(broken)?);
        let weights = Catalog::from_sources(vec![weights]).await?;
        let (_, values) = ebbtide::llm::adapters::Adapter::read(
            ABOUT,
            &adapter.config_json(&material.name),
            &weights,
            &material.model,
        )
        .await?;
        let trained = Trained {
            run: about.run.clone(),
            steps: checkpoint.step,
            values,
            checkpoint: state,
            losses: about.losses.clone(),
        };
        *self.trained.borrow_mut() = Some(Rc::new(trained));
        *self.data.borrow_mut() = Some(data.clone());
        self.all_bytes.borrow_mut().clear();
        Ok(Reply::Session {
            session: about.info,
            model: material.info().await,
            data: data.info.clone(),
            run: Box::new(about.run),
            losses: about.losses,
        })
    }
}

async fn whole(source: &Source) -> Result<Vec<u8>> {
    let mut bytes = vec![0; source.len() as usize];
    source.fill(0, &mut bytes).await?;
    Ok(bytes)
}

async fn about(name: &str) -> Result<About> {
    let refuse = |reason: String| Error::Format { file: name.into(), tensor: None, reason };
    let text = Keep::open(&[FOLDER, name]).await?.read(ABOUT).await?;
    let text = text.ok_or_else(|| Error::NotFound { what: "session", name: name.into(), hint: None })?;
    let about: About = serde_json::from_slice(&text).map_err(|e| refuse(format!("it is no session: {e}")))?;
    if about.format != 1 {
        return Err(refuse(format!("sessions of format {} are not known; this engine writes 1", about.format)));
    }
    Ok(about)
}

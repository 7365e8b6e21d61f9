//! A model that writes, with adapters that come and go over a base that stays where the budget puts it.
//!
//! Another adapter of the layout in use (rank, layers) is only another content of its state arrays; one of another layout
//! is another set of plans under the same budget, made after the old one's memory is given back, so that the peak never
//! holds two. The cache remembers the text before, so that a chat does not read its beginning again; a change of adapter
//! forgets it: keys of one adapter are no past for another.

use std::collections::BTreeMap;

use super::adapters::{Adapter, Values};
use super::generate::{Sampling, Writer};
use super::models::Model;
use crate::caps::Caps;
use crate::compile::{Budget, Options, PlanSet, compile_with};
use crate::error::{Error, Result};
use crate::event::EventSink;
use crate::gpu::Device;
use crate::stream::{Cancel, Session};

/// The fewest prompt tokens that go through at once.
const LEAST_CHUNK: u64 = 8;

/// What a generator may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Space {
    /// Device memory, the cache of keys and values included.
    pub budget: Budget,
    /// Tokens of prompt and text together.
    pub context: u64,
    /// The most prompt tokens that go through at once; fewer where the budget asks for it. The text does not depend on it.
    pub chunk: u64,
}

impl Space {
    /// Plans the two programs of an adapter, or of the bare model: with the largest part of a prompt at once that the
    /// budget holds. Pure.
    ///
    /// Errors: [`Error::BudgetBelowFloor`] with the floor of the smallest part; [`Error::Invalid`] for a context that the
    /// model does not have.
    pub fn plan(&self, model: &Model, adapter: Option<&Adapter>, caps: &Caps) -> Result<(PlanSet, Writer)> {
        let most = self.chunk.clamp(LEAST_CHUNK, self.context.max(LEAST_CHUNK));
        // The floor is that of the leanest plan.
        let mut chunk = if self.budget == Budget::Floor { LEAST_CHUNK } else { most };
        loop {
            let programs = Writer::programs(model, adapter, chunk, self.context)?;
            let writer = Writer { first: 0, chunk: chunk.clamp(2, self.context.max(2)), capacity: self.context };
            match compile_with(&programs, model.catalog(), caps, self.budget, Options::default()) {
                Err(Error::BudgetBelowFloor { .. } | Error::Limit { .. }) if chunk > LEAST_CHUNK => {
                    chunk = (chunk / 2).max(LEAST_CHUNK);
                }
                other => return Ok((other?, writer)),
            }
        }
    }
}

/// A model with a session that writes, and the adapters it knows.
pub struct Generator {
    device: Device,
    model: Model,
    space: Space,
    adapters: BTreeMap<String, (Adapter, Values)>,
    active: Option<String>,
    /// The layout that the session was planned for.
    layout: Option<Adapter>,
    session: Option<Session>,
    writer: Writer,
    /// The tokens that the cache holds.
    held: Vec<i32>,
}

impl Generator {
    /// Begins with the bare model.
    pub async fn new(device: &Device, model: Model, space: Space) -> Result<Generator> {
        Generator::with(device, model, space, Vec::new(), None).await
    }

    /// Begins with these adapters known and one of them in use, or none.
    pub async fn with(
        device: &Device,
        model: Model,
        space: Space,
        adapters: Vec<(String, (Adapter, Values))>,
        first: Option<&str>,
    ) -> Result<Generator> {
        let mut generator = Generator {
            device: device.clone(),
            model,
            space,
            adapters: adapters.into_iter().collect(),
            active: None,
            layout: None,
            session: None,
            writer: Writer { first: 0, chunk: LEAST_CHUNK, capacity: space.context },
            held: Vec::new(),
        };
        generator.select(first).await?;
        Ok(generator)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The plans in use.
    pub fn set(&self) -> Result<&PlanSet> {
        self.session.as_ref().map(Session::set).ok_or_else(no_session)
    }

    /// The adapters it knows, by name.
    pub fn adapters(&self) -> impl Iterator<Item = &str> {
        self.adapters.keys().map(String::as_str)
    }

    /// The adapter in use.
    pub fn active(&self) -> Option<&str> {
        self.active.as_deref()
    }

    /// Makes an adapter known; nothing on the device changes. One of the same name is replaced, but not while it is in
    /// use.
    pub fn add(&mut self, name: &str, adapter: Adapter, values: Values) -> Result<()> {
        if self.active() == Some(name) {
            let reason = "it is in use; choose another first".into();
            return Err(Error::Invalid { what: format!("adapter `{name}`"), reason });
        }
        self.adapters.insert(name.into(), (adapter, values));
        Ok(())
    }

    /// Forgets an adapter. One in use is taken out first.
    pub async fn remove(&mut self, name: &str) -> Result<()> {
        self.known(name)?;
        if self.active() == Some(name) {
            self.select(None).await?;
        }
        self.adapters.remove(name);
        Ok(())
    }

    /// Takes the named adapter into use in the place of the one before; `None`: the bare model. What fails to be planned
    /// leaves the one before in use.
    pub async fn select(&mut self, name: Option<&str>) -> Result<()> {
        if name == self.active() && self.session.is_some() {
            return Ok(());
        }
        let chosen = name.map(|n| self.known(n).cloned()).transpose()?;
        let fits = match (&self.layout, &chosen) {
            (Some(layout), Some((adapter, _))) => same_layout(layout, adapter),
            (None, None) => true,
            // The bare model has plans of its own: with zeros in the place of an adapter it would be the same model, but
            // not in the same memory.
            _ => false,
        };
        if !fits || self.session.is_none() {
            let adapter = chosen.as_ref().map(|(adapter, _)| adapter);
            let (set, writer) = self.space.plan(&self.model, adapter, self.device.caps())?;
            // The old memory is given back before the new is made.
            self.session = None;
            self.session = Some(Session::new(&self.device, self.model.catalog(), set).await?);
            (self.writer, self.layout) = (writer, adapter.cloned());
        }
        self.held.clear();
        self.active = name.map(str::to_string);
        if let (Some(session), Some((adapter, values))) = (&mut self.session, &chosen)
            && let Err(error) = adapter.install(session, values).await
        {
            // Half of one adapter and half of another is none.
            self.session = None;
            return Err(error);
        }
        Ok(())
    }

    fn known(&self, name: &str) -> Result<&(Adapter, Values)> {
        self.adapters.get(name).ok_or_else(|| Error::NotFound {
            what: "adapter",
            name: name.into(),
            hint: Some(format!("there are {:?}", self.adapters().collect::<Vec<_>>())),
        })
    }

    /// Goes on from `prompt`: as [`Writer::write`]. What the cache holds of it from the text before is not read again.
    #[allow(clippy::too_many_arguments)] // a text is all of these
    pub async fn write(
        &mut self,
        prompt: &[i32],
        count: usize,
        stop: &[i32],
        sampling: &Sampling,
        cancel: &Cancel,
        events: &mut dyn EventSink,
        each: &mut dyn FnMut(i32) -> bool,
    ) -> Result<Vec<i32>> {
        let session = self.session.as_mut().ok_or_else(no_session)?;
        let held = self.held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        // Until the text is there nobody knows what the cache holds.
        self.held.clear();
        let text =
            self.writer.go_on(session, &self.model, held, prompt, count, stop, sampling, cancel, events, each).await?;
        // The last token of a text may not have gone through.
        let gone_through = text.len().saturating_sub(1);
        self.held = prompt.iter().chain(&text[..gone_through]).copied().collect();
        Ok(text)
    }
}

fn same_layout(a: &Adapter, b: &Adapter) -> bool {
    let sites = |x: &Adapter| x.sites().iter().map(|s| s.module.clone()).collect::<Vec<_>>();
    a.spec().rank == b.spec().rank && a.spec().scale() == b.spec().scale() && sites(a) == sites(b)
}

fn no_session() -> Error {
    Error::Invalid {
        what: "generator".into(),
        reason: "its last change of adapters failed on the device; select one again".into(),
    }
}

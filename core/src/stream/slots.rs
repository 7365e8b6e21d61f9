//! The store: what is on the device, and in which buffers.

use std::sync::Arc;

use crate::compile::{Category, SlotId, SlotTable};
use crate::error::Result;
use crate::gpu::{Buffer, Device};

/// The buffers of every slot, and what weight slots hold.
pub(crate) struct Store {
    slots: Vec<Vec<Arc<Buffer>>>,
    /// Segment held by each slot, complete.
    pub held: Vec<Option<u32>>,
}

const USAGE: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_DST).union(wgpu::BufferUsages::COPY_SRC);

impl Store {
    /// A store with no slot made.
    pub fn new(table: &SlotTable) -> Store {
        Store { slots: table.slots.iter().map(|_| Vec::new()).collect(), held: vec![None; table.slots.len()] }
    }

    /// Makes the static slots that do not exist yet.
    pub async fn make_static(&mut self, device: &Device, table: &SlotTable) -> Result<()> {
        for (i, slot) in table.slots.iter().enumerate() {
            if !slot.dynamic && self.slots[i].is_empty() {
                self.make(device, table, SlotId(i as u32)).await?;
            }
        }
        Ok(())
    }

    /// Uses buffers that exist: folds which another session has made.
    pub fn share(&mut self, slot: SlotId, buffers: Vec<Arc<Buffer>>) {
        self.slots[slot.0 as usize] = buffers;
    }

    /// The buffers of a slot, to be shared.
    pub fn shared(&self, slot: SlotId) -> Vec<Arc<Buffer>> {
        self.slots[slot.0 as usize].clone()
    }

    /// Makes the buffers of a slot.
    pub async fn make(&mut self, device: &Device, table: &SlotTable, slot: SlotId) -> Result<()> {
        let what = match table.slots[slot.0 as usize].category {
            Category::Weights => "a weight slot",
            Category::Activations => "an activation slot",
            Category::Folded => "a folded constant",
            other => other.name(),
        };
        for bytes in &table.slots[slot.0 as usize].buffers {
            let buffer = device.buffer(what, table.slots[slot.0 as usize].category, *bytes, USAGE).await?;
            self.slots[slot.0 as usize].push(Arc::new(buffer));
        }
        Ok(())
    }

    /// Destroys the buffers of a slot.
    pub fn destroy(&mut self, slot: SlotId) {
        self.slots[slot.0 as usize].clear();
        self.held[slot.0 as usize] = None;
    }

    /// Destroys all dynamic slots and forgets what the others hold.
    pub fn forget(&mut self, table: &SlotTable) {
        for (i, slot) in table.slots.iter().enumerate() {
            if slot.dynamic {
                self.slots[i].clear();
            }
        }
        self.held.fill(None);
    }

    /// A buffer of a slot. Plans are verified, so it exists.
    pub fn buffer(&self, slot: SlotId, buffer: u32) -> &wgpu::Buffer {
        self.slots[slot.0 as usize][buffer as usize].raw()
    }
}

/// Makes the uniform buffer; its content comes through the upload ring.
pub(crate) async fn uniform_buffer(device: &Device, bytes: u64) -> Result<Option<Buffer>> {
    if bytes == 0 {
        return Ok(None);
    }
    let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
    device.buffer("the uniform buffer", Category::Uniforms, bytes, usage).await.map(Some)
}

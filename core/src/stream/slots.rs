//! The store: what is on the device, and in which buffers.

use crate::caps::ALIGN;
use crate::compile::{Category, SlotId, SlotTable};
use crate::error::Result;
use crate::gpu::{Buffer, Device};

/// The buffers of every slot, and what weight slots hold.
pub(crate) struct Store {
    slots: Vec<Vec<Buffer>>,
    /// Segment held by each slot, complete.
    pub held: Vec<Option<u32>>,
}

const USAGE: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_DST).union(wgpu::BufferUsages::COPY_SRC);

impl Store {
    /// Makes all static slots.
    pub async fn new(device: &Device, table: &SlotTable) -> Result<Store> {
        let mut store = Store { slots: Vec::with_capacity(table.slots.len()), held: vec![None; table.slots.len()] };
        for (i, slot) in table.slots.iter().enumerate() {
            store.slots.push(Vec::new());
            if !slot.dynamic {
                store.make(device, table, SlotId(i as u32)).await?;
            }
        }
        Ok(store)
    }

    /// Makes the buffers of a slot.
    pub async fn make(&mut self, device: &Device, table: &SlotTable, slot: SlotId) -> Result<()> {
        let what = match table.slots[slot.0 as usize].category {
            Category::Weights => "a weight slot",
            Category::Activations => "an activation slot",
            other => other.name(),
        };
        for bytes in &table.slots[slot.0 as usize].buffers {
            let buffer = device.buffer(what, table.slots[slot.0 as usize].category, *bytes, USAGE).await?;
            self.slots[slot.0 as usize].push(buffer);
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
    debug_assert!(bytes % 4 == 0 && ALIGN % 4 == 0);
    let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
    device.buffer("the uniform buffer", Category::Uniforms, bytes, usage).await.map(Some)
}

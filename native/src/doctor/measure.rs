//! Measured speed of the two ways a weight goes: disk to memory, memory to device.
//!
//! Both do what the engine does, nothing else: positioned reads of one chunk, and a ring of mapped chunks copied into a
//! buffer that is filled again and again.

use anyhow::{Context, anyhow, bail};
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

const CHUNK: usize = 16 << 20;
const FILE_CHUNKS: usize = 16;
const BUFFER: u64 = 128 << 20;
const RING: usize = 3;
/// Alignment that unbuffered reads want of address, offset and length.
const PAGE: usize = 4096;

/// What was measured, in bytes a second.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Where the file was.
    folder: String,
    /// Positioned reads past the system's cache; nothing where the system or the file system has no way to do it.
    pub disk_read: Option<f64>,
    /// The same from the system's cache: the upper bound.
    pub cached_read: f64,
    /// Ring into a new buffer, the first time.
    upload_first: f64,
    /// Ring into the same buffer again: what streaming does.
    pub upload_refill: f64,
}

impl Measured {
    /// For people.
    pub fn text(&self) -> String {
        let speed = |bytes: f64| format!("{:.2} GB/s", bytes / 1e9);
        let disk = match self.disk_read {
            Some(rate) => speed(rate),
            None => "not measurable here (no unbuffered reads)".into(),
        };
        format!(
            "  disk      {disk}; from the system's cache {} ({})\n  upload    {} into a buffer in use, {} into a new one\n",
            speed(self.cached_read),
            self.folder,
            speed(self.upload_refill),
            speed(self.upload_first)
        )
    }
}

/// Measures on this adapter and in the current folder, the likeliest place for models; in the temporary folder where
/// that one cannot be written.
pub fn run(adapter: &wgpu::Adapter) -> anyhow::Result<Measured> {
    let here = std::env::current_dir().unwrap_or_else(|_| std::env::temp_dir());
    let (folder, (disk_read, cached_read)) = match disk(&here) {
        Ok(rates) => (here, rates),
        Err(_) => {
            let folder = std::env::temp_dir();
            let rates = disk(&folder).with_context(|| format!("measuring reads in {}", folder.display()))?;
            (folder, rates)
        }
    };
    let (upload_first, upload_refill) = pollster::block_on(upload(adapter)).context("measuring uploads")?;
    Ok(Measured { folder: folder.display().to_string(), disk_read, cached_read, upload_first, upload_refill })
}

fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-9)
}

/// Reads a temporary file, which is removed again: past the cache if possible, and from the cache.
fn disk(folder: &Path) -> anyhow::Result<(Option<f64>, f64)> {
    let mut file = tempfile::Builder::new().prefix(".ebbtide-doctor-").tempfile_in(folder)?;
    // Not zeros: file systems and disks compress those away.
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut chunk: Vec<u8> = Vec::with_capacity(CHUNK);
    for _ in 0..FILE_CHUNKS {
        chunk.clear();
        while chunk.len() < CHUNK {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            chunk.extend_from_slice(&(seed ^ (seed >> 29)).to_le_bytes());
        }
        file.write_all(&chunk)?;
    }
    file.as_file().sync_all()?;
    let mut space = vec![0; CHUNK + PAGE];
    let start = space.as_ptr().align_offset(PAGE).min(PAGE);
    let buffer = &mut space[start..start + CHUNK];
    let direct = unbuffered(file.path()).and_then(|file| read_all(&file, buffer).ok());
    let file = file.reopen()?;
    read_all(&file, buffer)?; // fills the cache
    let cached = read_all(&file, buffer)?;
    Ok((direct, cached))
}

fn read_all(file: &File, buffer: &mut [u8]) -> std::io::Result<f64> {
    let start = Instant::now();
    for chunk in 0..FILE_CHUNKS {
        read_exact_at(file, buffer, (chunk * CHUNK) as u64)?;
    }
    Ok(rate((FILE_CHUNKS * CHUNK) as u64, start.elapsed()))
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> std::io::Result<()> {
    while !buffer.is_empty() {
        let count = std::os::windows::fs::FileExt::seek_read(file, buffer, offset)?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        buffer = &mut buffer[count..];
        offset += count as u64;
    }
    Ok(())
}

/// The file opened so that reads go past the cache, where that can be had by a flag.
#[cfg(target_os = "linux")]
fn unbuffered(path: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()
}

#[cfg(not(target_os = "linux"))]
fn unbuffered(_: &Path) -> Option<File> {
    None
}

/// Fills one buffer four times through a ring of mapped chunks; the first time and the best of the others.
async fn upload(adapter: &wgpu::Adapter) -> anyhow::Result<(f64, f64)> {
    let limits = wgpu::Limits { max_buffer_size: BUFFER.max(256 << 20), ..wgpu::Limits::default() };
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
    let (device, queue) = adapter.request_device(&descriptor).await?;
    let scope = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let buffer = |size, usage| {
        device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    };
    let target = buffer(BUFFER, wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST);
    let ring: Vec<_> =
        (0..RING).map(|_| buffer(CHUNK as u64, wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC)).collect();
    if let Some(error) = scope.pop().await {
        bail!("{} of device memory could not be had: {error}", ebbtide::error::Bytes(BUFFER));
    }
    let source = vec![0x5a; CHUNK];
    let mut rates = Vec::new();
    for _ in 0..4 {
        let start = Instant::now();
        for chunk in 0..(BUFFER as usize / CHUNK) {
            let staging = &ring[chunk % RING];
            fill(&device, staging, &source)?;
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            encoder.copy_buffer_to_buffer(staging, 0, &target, (chunk * CHUNK) as u64, CHUNK as u64);
            queue.submit([encoder.finish()]);
        }
        wait(&device)?;
        rates.push(rate(BUFFER, start.elapsed()));
    }
    for buffer in ring.iter().chain([&target]) {
        buffer.destroy();
    }
    queue.submit([]);
    wait(&device)?;
    let first = rates[0];
    Ok((first, rates[1..].iter().copied().fold(0.0, f64::max)))
}

/// Maps a chunk once its last copy is done, writes it, unmaps it.
fn fill(device: &wgpu::Device, staging: &wgpu::Buffer, source: &[u8]) -> anyhow::Result<()> {
    let (sender, receiver) = std::sync::mpsc::channel();
    staging.map_async(wgpu::MapMode::Write, .., move |result| {
        sender.send(result).ok();
    });
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        device.poll(wgpu::PollType::Poll)?;
        match receiver.recv_timeout(Duration::from_micros(50)) {
            Ok(result) => break result.map_err(|e| anyhow!("a staging buffer could not be mapped: {e}"))?,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
            Err(e) => bail!("a staging buffer was not mapped within 30 s: {e}"),
        }
    }
    staging.get_mapped_range_mut(..)?.copy_from_slice(source);
    staging.unmap();
    Ok(())
}

fn wait(device: &wgpu::Device) -> anyhow::Result<()> {
    device.poll(wgpu::PollType::Wait { submission_index: None, timeout: Some(Duration::from_secs(60)) })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_temporary_file_is_gone_afterwards_and_both_rates_are_positive() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let (direct, cached) = disk(folder.path())?;
        assert!(cached > 0.0 && direct.is_none_or(|rate| rate > 0.0));
        assert_eq!(std::fs::read_dir(folder.path())?.count(), 0);
        Ok(())
    }
}

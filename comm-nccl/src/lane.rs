//! What a lane works with on the device.

use comm_core::Result;

use crate::sys::{Device, DevicePointer, Event, Memory, Staging, Stream};

/// The stream and the memory of one lane.
#[derive(Debug)]
pub(crate) struct LaneState {
    pub(crate) stream: Stream,
    pub(crate) event: Event,
    pub(crate) staging: Staging,
    pub(crate) buffer: GrowableMemory,
    pub(crate) input: GrowableMemory,
    pub(crate) scratch: GrowableMemory,
}

impl LaneState {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(LaneState {
            stream: device.stream()?,
            event: device.event()?,
            staging: Staging::new(device)?,
            buffer: GrowableMemory::default(),
            input: GrowableMemory::default(),
            scratch: GrowableMemory::default(),
        })
    }

    /// Sets the lane's event after all that its stream has been given: an operation may have failed before it set its own.
    pub(crate) fn mark(&self) -> Result<()> {
        self.event.record(&self.stream)
    }
}

/// Memory on the device that grows.
///
/// Freeing waits for everything that runs on the device, and what runs there may wait for peers. So what it has outgrown stays until an
/// operation finds nothing else under way.
#[derive(Debug, Default)]
pub(crate) struct GrowableMemory {
    pub(crate) memory: Option<Memory>,
    pub(crate) outgrown: Vec<Memory>,
}

impl GrowableMemory {
    /// At least so many bytes. `quiet` gives something while nothing else runs on the device, and nothing begins there.
    pub(crate) fn of<Q>(
        &mut self,
        device: &Device,
        bytes: usize,
        quiet: impl Fn() -> Option<Q>,
    ) -> Result<DevicePointer> {
        if bytes == 0 {
            return Ok(DevicePointer::NULL);
        }
        let held = self.memory.as_ref().map_or(0, Memory::bytes);
        if held < bytes {
            self.outgrown.extend(self.memory.take());
        }
        if !self.outgrown.is_empty()
            && let Some(_quiet) = quiet()
        {
            self.outgrown.clear();
        }
        let memory = match self.memory.take() {
            Some(memory) => memory,
            None => {
                // While nothing can be freed it at least doubles, so that all that is kept is no more than the last.
                let bytes = if self.outgrown.is_empty() { bytes } else { bytes.max(2 * held) };
                let step = bytes.next_power_of_two().clamp(4096, 64 << 20);
                device.allocate(bytes.next_multiple_of(step))?
            }
        };
        Ok(self.memory.insert(memory).pointer())
    }
}

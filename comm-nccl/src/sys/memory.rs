//! Memory of the device, and memory of the host from which and to which the device copies.

use std::ffi::c_void;
use std::{ptr, slice};

use comm_core::Result;

use super::{Device, DevicePointer, Event, Stream};

/// Memory on a device, freed when dropped. Freeing waits for what uses it; that of a device that was [given up](Device::give_up) stays.
#[derive(Debug)]
pub(crate) struct Memory {
    device: Device,
    pointer: DevicePointer,
    bytes: usize,
}

impl Memory {
    /// What the driver has allocated.
    pub(super) fn new(device: &Device, pointer: DevicePointer, bytes: usize) -> Self {
        Memory { device: device.clone(), pointer, bytes }
    }

    pub(crate) fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.device.can_free() {
            let address = self.pointer.address();
            // SAFETY: allocated by this driver, freed once. An error cannot be helped here.
            let _ = self.device.call("freeing memory on the GPU", |table| unsafe { (table.memory_free)(address) });
        }
    }
}

/// Bytes that are copied at a time: the host fills one half while the device empties the other.
const HALF: usize = 512 << 10;

/// The caller's function that waits until an event has passed.
pub(crate) type WaitForEvent<'a> = &'a mut dyn FnMut(&Event) -> Result<()>;

/// Through which what is in the host's memory goes to the device and back.
///
/// A copy that the driver makes of any memory may wait inside the driver for as long as it takes, and a device that does not answer could
/// go on writing to memory that somebody has only lent. This memory is page-locked, so that copies are queued and can be waited for with
/// a deadline, and it is our own: a copy that never ends costs the job, and this memory, which is then never freed.
#[derive(Debug)]
pub(crate) struct Staging {
    halves: [StagingHalf; 2],
}

#[derive(Debug)]
struct StagingHalf {
    device: Device,
    memory: *mut c_void,
    /// After the last copy from it or to it.
    copied: Event,
}

// SAFETY: page-locked memory may be used by any thread.
unsafe impl Send for StagingHalf {}

impl Staging {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Staging { halves: [StagingHalf::new(device)?, StagingHalf::new(device)?] })
    }

    /// Copies to the device in the order of `stream`; what does not fit is waited for by `wait_for`, the rest not at all.
    pub(crate) fn upload(
        &mut self,
        to: DevicePointer,
        from: &[u8],
        stream: &Stream,
        wait_for: WaitForEvent<'_>,
    ) -> Result<()> {
        for (number, piece) in from.chunks(HALF).enumerate() {
            let half = &mut self.halves[number % 2];
            let pinned = half.ours(piece.len(), wait_for)?;
            comm_core::copy(pinned, piece);
            half.send(to.at(number * HALF), piece.len(), stream)?;
        }
        Ok(())
    }

    /// Copies to the host what is there once `stream` has come so far, and waits for it by `wait_for`.
    pub(crate) fn download(
        &mut self,
        from: DevicePointer,
        to: &mut [u8],
        stream: &Stream,
        wait_for: WaitForEvent<'_>,
    ) -> Result<()> {
        let mut pieces: Vec<&mut [u8]> = to.chunks_mut(HALF).collect();
        for number in 0..=pieces.len() {
            if let Some(piece) = pieces.get(number) {
                let (half, bytes) = (&mut self.halves[number % 2], piece.len());
                half.ours(bytes, wait_for)?;
                half.fetch(from.at(number * HALF), bytes, stream)?;
            }
            // The one before, while the device copies this one.
            if let Some(before) = number.checked_sub(1) {
                let (half, piece) = (&mut self.halves[before % 2], &mut pieces[before]);
                comm_core::copy(piece, half.ours(piece.len(), wait_for)?);
            }
        }
        Ok(())
    }
}

impl StagingHalf {
    fn new(device: &Device) -> Result<Self> {
        let mut memory = ptr::null_mut();
        let at = &raw mut memory;
        // SAFETY: writes one address through the pointer.
        device.call("allocating page-locked memory", |table| unsafe { (table.host_alloc)(at, HALF, 0) })?;
        // Freed with this if there is no event for it.
        let copied = device.event();
        match copied {
            Ok(copied) => Ok(StagingHalf { device: device.clone(), memory, copied }),
            Err(error) => {
                free(device, memory);
                Err(error)
            }
        }
    }

    /// The first `bytes` of it, at most [`HALF`], once the device has done with them.
    fn ours(&mut self, bytes: usize, wait_for: WaitForEvent<'_>) -> Result<&mut [u8]> {
        wait_for(&self.copied)?;
        // SAFETY: so many bytes at least were allocated, the driver has filled them with something, and the device does not use them
        // until the next copy, for which this half must not be borrowed.
        Ok(unsafe { slice::from_raw_parts_mut(self.memory.cast(), bytes.min(HALF)) })
    }

    fn send(&mut self, to: DevicePointer, bytes: usize, stream: &Stream) -> Result<()> {
        let bytes = bytes.min(HALF);
        // SAFETY: this memory is left alone until the event below has passed; the caller owns the device's.
        self.device.call("copying to the GPU", |table| unsafe {
            (table.upload)(to.address(), self.memory, bytes, stream.handle())
        })?;
        self.copied.record(stream)
    }

    fn fetch(&mut self, from: DevicePointer, bytes: usize, stream: &Stream) -> Result<()> {
        let bytes = bytes.min(HALF);
        // SAFETY: as in `send`.
        self.device.call("copying from the GPU", |table| unsafe {
            (table.download)(self.memory, from.address(), bytes, stream.handle())
        })?;
        self.copied.record(stream)
    }
}

impl Drop for StagingHalf {
    fn drop(&mut self) {
        free(&self.device, self.memory);
    }
}

fn free(device: &Device, memory: *mut c_void) {
    if device.can_free() {
        // SAFETY: allocated by this driver, freed once. An error cannot be helped here.
        let _ = device.call("freeing page-locked memory", |table| unsafe { (table.host_free)(memory) });
    }
}

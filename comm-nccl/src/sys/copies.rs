//! Copies between the host and a device that belong to no operation.

use std::io;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use comm_core::{DType, Deadline, DeviceMemory as _, Error, Result};

use super::memory::WaitForEvent;
use super::{CudaBuffer, Device, Event, Staging, Stream};

/// How long a piece of a copy that depends on nobody may take.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);

impl Device {
    /// A buffer with what `bytes` hold: whole elements of `dtype`.
    ///
    /// # Errors
    /// `InvalidArgument` for a part of an element, `Io` where the device has not enough memory or does not answer.
    pub fn buffer(&self, dtype: DType, bytes: &[u8]) -> Result<CudaBuffer> {
        if !bytes.len().is_multiple_of(dtype.size()) {
            return Err(Error::invalid(format!("{} bytes are not a whole number of elements of {dtype}", bytes.len())));
        }
        let memory = self.allocate(bytes.len())?;
        self.copy_now(|staging, stream, wait_for| staging.upload(memory.pointer(), bytes, stream, wait_for))?;
        Ok(CudaBuffer::owned(memory, dtype, bytes.len() / dtype.size()))
    }

    /// What a buffer on this device holds, as bytes.
    ///
    /// # Errors
    /// `Io`.
    pub fn read(&self, buffer: &CudaBuffer) -> Result<Vec<u8>> {
        let mut bytes = vec![0; buffer.count() * buffer.dtype().size()];
        self.copy_now(|staging, stream, wait_for| {
            staging.download(buffer.device_pointer(), &mut bytes, stream, wait_for)
        })?;
        Ok(bytes)
    }

    /// Copies, and waits for it: nothing else is in the stream, so that it ends whatever peers do.
    fn copy_now(&self, copy: impl FnOnce(&mut Staging, &Stream, WaitForEvent<'_>) -> Result<()>) -> Result<()> {
        let idle = self.lock_idle().pop();
        let mut own = idle.map_or_else(|| Copying::new(self), Ok)?;
        let mut wait_for = |event: &Event| {
            let deadline = Deadline::after(COPY_TIMEOUT);
            while !event.has_passed()? {
                if deadline.has_passed() {
                    // The copy may still be made, so that nothing of it can be freed.
                    self.give_up();
                    let waited = format!("it made no progress for {} s", COPY_TIMEOUT.as_secs());
                    let source = io::Error::new(io::ErrorKind::TimedOut, waited);
                    return Err(Error::io(format!("copying to or from CUDA device {}", self.ordinal()), source));
                }
                std::thread::yield_now();
            }
            Ok(())
        };
        copy(&mut own.staging, &own.stream, &mut wait_for)?;
        own.end.record(&own.stream)?;
        wait_for(&own.end)?;
        self.lock_idle().push(own);
        Ok(())
    }

    /// Has ready what a copy needs: to allocate it may wait for what runs on the device.
    pub(crate) fn prepare_copies(&self) -> Result<()> {
        let own = Copying::new(self)?;
        self.lock_idle().push(own);
        Ok(())
    }

    /// Frees what copies have needed, for which nothing may run on the device.
    pub(crate) fn forget_copies(&self) {
        let idle = std::mem::take(&mut *self.lock_idle());
        drop(idle);
    }

    fn lock_idle(&self) -> MutexGuard<'_, Vec<Copying>> {
        self.idle().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Staging memory, stream and event for copies outside a communicator.
pub(super) struct Copying {
    staging: Staging,
    stream: Stream,
    end: Event,
}

impl Copying {
    fn new(device: &Device) -> Result<Self> {
        Ok(Copying { staging: Staging::new(device)?, stream: device.stream()?, end: device.event()? })
    }
}

//! The memory that an operation works on: owned for its time, or lent.

use crate::buffer::{Buffer, DeviceMemory, View, ViewMut};
use crate::op::Elements;

/// The data of an operation on one rank.
#[derive(Debug)]
pub struct Data<'a> {
    /// The buffer.
    pub buffer: BufferLocation<'a>,
    /// The input, out of place.
    pub input: Option<Source<'a>>,
}

/// Where a buffer is.
#[derive(Debug)]
pub enum BufferLocation<'a> {
    /// In host memory.
    Host(ViewMut<'a>),
    /// On a device.
    Device(&'a mut (dyn DeviceMemory + 'static)),
}

/// Where an input is. It is not written to.
#[derive(Debug)]
pub enum Source<'a> {
    /// In host memory.
    Host(View<'a>),
    /// On a device; `mut` only for [`DeviceMemory::as_any_mut`].
    Device(&'a mut (dyn DeviceMemory + 'static)),
}

impl<'a> Data<'a> {
    /// That of owned buffers.
    pub(super) fn of(buffer: &'a mut Buffer, input: Option<&'a mut Buffer>) -> Self {
        let buffer = match buffer {
            Buffer::Host(host) => BufferLocation::Host(host.view_mut()),
            Buffer::Device(device) => BufferLocation::Device(&mut **device),
        };
        let input = input.map(|input| match input {
            Buffer::Host(host) => Source::Host(host.view()),
            Buffer::Device(device) => Source::Device(&mut **device),
        });
        Data { buffer, input }
    }

    /// That of a caller who lends it.
    pub fn lent(buffer: ViewMut<'a>, input: Option<View<'a>>) -> Self {
        Data { buffer: BufferLocation::Host(buffer), input: input.map(Source::Host) }
    }

    /// Elements of the buffer and of the input.
    pub(super) fn elements(&self) -> (Elements, Option<Elements>) {
        let buffer = match &self.buffer {
            BufferLocation::Host(view) => Elements { dtype: view.dtype(), count: view.count() },
            BufferLocation::Device(device) => Elements { dtype: device.dtype(), count: device.count() },
        };
        let input = self.input.as_ref().map(|input| match input {
            Source::Host(view) => Elements { dtype: view.dtype(), count: view.count() },
            Source::Device(device) => Elements { dtype: device.dtype(), count: device.count() },
        });
        (buffer, input)
    }

    /// Whether any of it is on a device.
    pub fn is_on_device(&self) -> bool {
        matches!(self.buffer, BufferLocation::Device(_)) || matches!(self.input, Some(Source::Device(_)))
    }

    /// Buffer and input in host memory; `None` if any of it is on a device.
    pub fn into_host(self) -> Option<(ViewMut<'a>, Option<View<'a>>)> {
        match (self.buffer, self.input) {
            (BufferLocation::Host(buffer), None) => Some((buffer, None)),
            (BufferLocation::Host(buffer), Some(Source::Host(input))) => Some((buffer, Some(input))),
            (BufferLocation::Device(_), _) | (_, Some(Source::Device(_))) => None,
        }
    }
}

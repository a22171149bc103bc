//! Owned buffers: in with a call, back with its completion.

use std::any::Any;
use std::fmt;

use half::{bf16, f16};

use crate::dtype::DType;
use crate::error::{Error, Result};

/// A buffer that an operation owns while it runs.
#[derive(Debug)]
pub enum Buffer {
    /// In host memory.
    Host(HostBuffer),
    /// On a device. Byte transports refuse it: copy to the host first.
    Device(Box<dyn DeviceMemory>),
}

impl Buffer {
    /// A host buffer that owns `values`, without a copy.
    pub fn from_vec<T: Element>(values: Vec<T>) -> Self {
        Buffer::Host(T::into_buffer(values))
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Buffer::Host(host) => host.dtype(),
            Buffer::Device(device) => device.dtype(),
        }
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        match self {
            Buffer::Host(host) => host.count(),
            Buffer::Device(device) => device.count(),
        }
    }

    /// The values, without a copy.
    ///
    /// # Errors
    /// `InvalidArgument` when the buffer holds another type or lives on a device.
    pub fn into_vec<T: Element>(self) -> Result<Vec<T>> {
        match self {
            Buffer::Host(host) => T::from_buffer(host)
                .map_err(|other| Error::invalid(format!("the buffer holds {}, not {}", other.dtype(), T::DTYPE))),
            Buffer::Device(_) => Err(Error::invalid("the buffer is in device memory; copy it to the host first")),
        }
    }
}

/// Device memory that a native backend understands.
pub trait DeviceMemory: Any + Send + fmt::Debug {
    /// Element type.
    fn dtype(&self) -> DType;
    /// Number of elements.
    fn count(&self) -> usize;
    /// For the backend to recover its own type.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// A typed vector in host memory. Each variant is aligned for its type, so its bytes can be viewed as elements.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a variant for each element type")]
pub enum HostBuffer {
    F32(Vec<f32>),
    F64(Vec<f64>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    I8(Vec<i8>),
    I16(Vec<i16>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    U8(Vec<u8>),
    U16(Vec<u16>),
    U32(Vec<u32>),
    U64(Vec<u64>),
}

macro_rules! each {
    ($buffer:expr, $values:ident => $body:expr) => {
        match $buffer {
            HostBuffer::F32($values) => $body,
            HostBuffer::F64($values) => $body,
            HostBuffer::F16($values) => $body,
            HostBuffer::Bf16($values) => $body,
            HostBuffer::I8($values) => $body,
            HostBuffer::I16($values) => $body,
            HostBuffer::I32($values) => $body,
            HostBuffer::I64($values) => $body,
            HostBuffer::U8($values) => $body,
            HostBuffer::U16($values) => $body,
            HostBuffer::U32($values) => $body,
            HostBuffer::U64($values) => $body,
        }
    };
}

impl HostBuffer {
    /// `count` zeros.
    pub fn zeros(dtype: DType, count: usize) -> Self {
        match dtype {
            DType::F32 => HostBuffer::F32(vec![0.0; count]),
            DType::F64 => HostBuffer::F64(vec![0.0; count]),
            DType::F16 => HostBuffer::F16(vec![f16::ZERO; count]),
            DType::Bf16 => HostBuffer::Bf16(vec![bf16::ZERO; count]),
            DType::I8 => HostBuffer::I8(vec![0; count]),
            DType::I16 => HostBuffer::I16(vec![0; count]),
            DType::I32 => HostBuffer::I32(vec![0; count]),
            DType::I64 => HostBuffer::I64(vec![0; count]),
            DType::U8 => HostBuffer::U8(vec![0; count]),
            DType::U16 => HostBuffer::U16(vec![0; count]),
            DType::U32 => HostBuffer::U32(vec![0; count]),
            DType::U64 => HostBuffer::U64(vec![0; count]),
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            HostBuffer::F32(_) => DType::F32,
            HostBuffer::F64(_) => DType::F64,
            HostBuffer::F16(_) => DType::F16,
            HostBuffer::Bf16(_) => DType::Bf16,
            HostBuffer::I8(_) => DType::I8,
            HostBuffer::I16(_) => DType::I16,
            HostBuffer::I32(_) => DType::I32,
            HostBuffer::I64(_) => DType::I64,
            HostBuffer::U8(_) => DType::U8,
            HostBuffer::U16(_) => DType::U16,
            HostBuffer::U32(_) => DType::U32,
            HostBuffer::U64(_) => DType::U64,
        }
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        each!(self, values => values.len())
    }

    /// The elements as bytes, in the machine's own (little-endian) order.
    pub fn bytes(&self) -> &[u8] {
        each!(self, values => bytemuck::cast_slice(values))
    }

    /// The elements as bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        each!(self, values => bytemuck::cast_slice_mut(values))
    }

    /// The elements, borrowed.
    pub fn view(&self) -> View<'_> {
        View { dtype: self.dtype(), bytes: self.bytes() }
    }

    /// The elements, borrowed to be written.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut { dtype: self.dtype(), bytes: self.bytes_mut() }
    }

    /// A buffer of the same elements.
    pub(crate) fn copy_of(view: View<'_>) -> Self {
        let mut buffer = HostBuffer::zeros(view.dtype, view.count());
        buffer.bytes_mut().copy_from_slice(view.bytes);
        buffer
    }
}

/// Lent elements, of a type that is known at run time.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

/// Lent elements to be written.
#[derive(Debug)]
pub struct ViewMut<'a> {
    dtype: DType,
    /// Aligned for `dtype`, and whole elements of it.
    bytes: &'a mut [u8],
}

impl<'a> View<'a> {
    /// These elements.
    pub fn of<T: Element>(values: &'a [T]) -> Self {
        View { dtype: T::DTYPE, bytes: bytemuck::cast_slice(values) }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// The elements as bytes, in the machine's own (little-endian) order.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> ViewMut<'a> {
    /// These elements.
    pub fn of<T: Element>(values: &'a mut [T]) -> Self {
        ViewMut { dtype: T::DTYPE, bytes: bytemuck::cast_slice_mut(values) }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// The elements as bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// The elements as bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// The same elements, lent on.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { dtype: self.dtype, bytes: self.bytes }
    }
}

impl<'a> From<&'a ViewMut<'_>> for View<'a> {
    fn from(view: &'a ViewMut<'_>) -> Self {
        View { dtype: view.dtype, bytes: view.bytes }
    }
}

/// A Rust type that travels in buffers.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + fmt::Debug + private::Sealed {
    /// Its code.
    const DTYPE: DType;
    /// A buffer that owns `values`, without a copy.
    fn into_buffer(values: Vec<Self>) -> HostBuffer;
    /// The values of a buffer of this type; the buffer itself when it holds another type.
    fn from_buffer(buffer: HostBuffer) -> Result<Vec<Self>, HostBuffer>;
}

mod private {
    pub trait Sealed {}
}

macro_rules! element {
    ($($rust:ty => $variant:ident),* $(,)?) => {$(
        impl private::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$variant;
            fn into_buffer(values: Vec<Self>) -> HostBuffer {
                HostBuffer::$variant(values)
            }
            fn from_buffer(buffer: HostBuffer) -> Result<Vec<Self>, HostBuffer> {
                match buffer {
                    HostBuffer::$variant(values) => Ok(values),
                    other => Err(other),
                }
            }
        }
    )*};
}

element!(
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
);
